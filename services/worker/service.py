"""The worker: takes attempts on, has them started by the process host, tells what became of them, keeps their logs.

The only file of the worker that knows NATS.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import structlog

from schemas import proof, subjects
from schemas.endpoints import (
    ARTIFACTS_RETIRED,
    ATTEMPTS_START,
    CONTEXT_OPEN,
    LOG_FOLLOW,
    LOG_READ,
    WORKERS_BEAT,
    WORKERS_REGISTER,
)
from schemas.errors import Ql3Error
from schemas.limits import BATCH_ITEMS, BEAT_MS, RPC_TIMEOUT_S
from schemas.secrets import ContextOpen, SealedValues
from schemas.system import Done, OrdersAck
from schemas.workers import (
    ArtifactsRetired,
    AttemptReport,
    BeatItem,
    CancelAttempts,
    Capabilities,
    LogChunk,
    LogFollow,
    LogRange,
    LogRead,
    OfferAttempts,
    ReportAttempts,
    ReportBody,
    RetireArtifacts,
    SessionFence,
    StartAnswer,
    StartAttempts,
    StopItem,
    WorkerBeat,
    WorkerRegister,
)
from services.kit.artifact_store import free_bytes
from services.kit.bus import Bus, Caller, Delivery, Route
from services.kit.clock import Clock
from services.kit.config import Config
from services.kit.database import Database
from services.kit.ids import new_id
from services.kit.loops import Loop
from services.kit.sealing import SealError, SealingKey, attempt_context
from services.kit.version import VERSION
from services.worker import attempt as rules
from services.worker import store
from services.worker.attempt import END_SEQUENCE, Held, Receipt
from services.worker.command import Builder, Prepared
from services.worker.hostlink import Exit, HostLink, News, Started
from services.worker.intake import Intake
from services.worker.logs import Logs
from services.worker.place import Directories, describe, load_key, look
from services.worker.reports import Reports

NAME = "worker"
DRAIN_S: Final = 10.0
STOP_RUNS_S: Final = 30.0
LARGE_LOG: Final = 1024 * 1024

log: structlog.stdlib.BoundLogger = structlog.get_logger("ql3.worker")


class WorkerService:
    """One worker. Its journal is `database` (local SQLite); `stop_runs` ends what runs when it stops."""

    def __init__(self, *, config: Config, database: Database, bus: Bus, clock: Clock, stop_runs: bool = False) -> None:
        self._config = config
        self._database = database
        self._bus = bus
        self._clock = clock
        self._stop_runs = stop_runs
        self.id = config.worker_id
        self._slots = config.slots
        self._directories = Directories(config.data)
        self._held: dict[str, Held] = {}
        self._fence: SessionFence | None = None
        self._session_key = SealingKey.generate()
        self._session_id = new_id()
        self._capabilities = Capabilities()
        self._host_name = ""
        self._draining = False
        self._replaced = False
        self._consuming = False
        self._kept: dict[str, Receipt] = {}
        self._settled: list[tuple[str, int]] = []
        self._host_acks: list[str] = []
        self._doubts: dict[str, Held] = {}
        self._idle = asyncio.Event()
        self._host = HostLink(self._directories.host, self._directories.logs, on_hello=self._hello, on_news=self._news)
        self._logs = Logs(
            directory=self._directories.logs,
            store=config.artifact_directory,
            held=self._held.get,
            follow=lambda names: self._host.send({"op": "follow", "attempts": names}),
            send=self._send_chunk,
        )
        self._reports = Reports(clock=clock, send=self._send_reports, fence=lambda: self._fence, ended=self._acked)
        self._intake: Intake | None = None
        self._session = Loop("worker.session", self._beat, every_s=BEAT_MS / 1000)
        self._settling = Loop("worker.settle", self._settle, every_s=60.0)
        self._ends = Loop("worker.ends", self._keep_ends, every_s=60.0)
        self._to_keep: list[tuple[Held, ReportBody]] = []
        self._to_digest: list[tuple[Held, Exit]] = []
        self._acks: Any = None

    # -- life

    async def start(self) -> None:
        """Own the data folder, reach the process host, compare it with the journal, then register and take offers."""
        self._directories.own()
        try:
            key = load_key(self._directories.root / "worker.key")
            await self._restore(key)
            self._capabilities, _ = await asyncio.gather(asyncio.to_thread(look, self._config), self._host.start())
            self._intake = Intake(
                key=key,
                clock=self._clock,
                database=self._database,
                builder=Builder(describe(self._directories)),
                held=self._held,
                fence=lambda: None if self._draining else self._fence,
                host=lambda: self._host_name,
                ask=self._ask_start,
                secrets=self._open_secrets,
                spawn=lambda items: self._host.send({"op": "spawn", "items": items}),
                not_started=self._not_started,
                forget=self._forget,
                make_directory=self._directories.project,
                room=self._has_room,
            )
            await self._logs.start()
            await self._logs.take_up(set(self._held))
            self._acks = await self._bus.subscribe(subjects.ack(self.id), self._heard_ack)
            await self._bus.serve(
                NAME,
                VERSION,
                [
                    Route(LOG_READ.bound(self.id), self.read_log),
                    Route(LOG_FOLLOW.bound(self.id), self.follow_log),
                ],
            )
            for loop in (self._session, self._intake.loop, self._reports.loop, self._settling, self._ends):
                await loop.start()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Take no more; give what runs up to 10 s; leave the rest to the host, or end it first (`stop_runs`)."""
        self._draining = True
        if self._fence is not None and self._held:
            with contextlib.suppress(Ql3Error):
                await self._beat()
            if self._stop_runs:
                self._kill([(held.attempt_id, "shutdown", None) for held in self._held.values()])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_RUNS_S if self._stop_runs else DRAIN_S):
                    await self._nothing_held()
        loops = [self._session, self._reports.loop, self._ends, self._settling]
        if self._intake is not None:
            loops.append(self._intake.loop)
        await asyncio.gather(*(loop.stop() for loop in loops))
        await self._logs.stop()
        with contextlib.suppress(Exception):
            await self._settle()
        await self._host.stop()
        if self._acks is not None:
            await self._acks.close()
        self._directories.release()

    def health(self) -> list[str]:
        """Why this worker could not start a run now."""
        reasons: list[str] = []
        if self._replaced:
            reasons.append("a newer session of this worker exists")
        elif self._fence is None:
            reasons.append("not registered with the dispatcher")
        if not self._host.connected:
            reasons.append("no process host")
        if not self._has_room(0):
            reasons.append("too little room on the disk")
        return reasons + self._logs.health()

    async def _nothing_held(self) -> None:
        while self._held:
            self._idle.clear()
            await self._idle.wait()

    async def _restore(self, key: bytes) -> None:
        offers = await self._database.read(store.offers)
        kept = await self._database.read(store.receipts)
        for row in offers:
            token = proof.token(key, row.attempt_id, row.offer_id, row.lease_generation)
            self._held[row.attempt_id] = Held(
                attempt_id=row.attempt_id,
                offer_id=row.offer_id,
                run_id=row.run_id,
                project=row.project,
                lease_generation=row.lease_generation,
                host=row.host,
                digest=proof.token_digest(token),
                asked=True,
            )
        for row in kept:
            held = self._held.get(row.attempt_id)
            if held is not None:
                held.state = "ended"
                self._kept[row.attempt_id] = Receipt(row.sequence, row.body.encode(), row.proof)

    # -- the session

    async def _beat(self) -> bool | float | None:
        if self._replaced:
            return None
        if self._fence is None:
            await self._register()
            if not self._consuming:
                # Only now: a worker may be started before the services that declare the streams.
                self._consuming = True
                await self._bus.consume_worker(
                    self.id,
                    {OfferAttempts: self.take_offers, CancelAttempts: self.cancel, RetireArtifacts: self.retire},
                )
            return None
        held = [one for one in self._held.values() if one.asked and (one.state != "accepted" or one.in_doubt)]
        items = [
            BeatItem(
                attempt_id=one.attempt_id,
                lease_generation=one.lease_generation,
                sequence=0,
                proof=rules.beat_proof(one),
            )
            for one in held
        ]
        message = WorkerBeat(fence=self._fence, draining=self._draining, slots=self._slots, attempts=items)
        try:
            answer = await self._bus.request(WORKERS_BEAT, message, token=self.id)
        except Ql3Error as error:
            if error.code == "session_replaced":
                self._lose_session()
                return None
            if error.code == "not_found":
                self._fence = None
                return True
            raise
        self._kill([(refusal.attempt_id, "reconcile", None) for refusal in answer.refused])
        self._stop(answer.stops)
        return None

    async def _register(self) -> None:
        journal = [rules.journal_entry(one) for one in self._held.values() if one.asked]
        message = WorkerRegister(
            worker=self.id,
            session_id=self._session_id,
            slots=self._slots,
            capabilities=self._capabilities,
            public_key=self._session_key.public,
            journal=journal[: store.MAX_JOURNAL],
            draining=self._draining,
        )
        answer = await self._bus.request(WORKERS_REGISTER, message, token=self.id)
        self._fence = SessionFence(worker=self.id, session_id=self._session_id, generation=answer.generation)
        log.info("registered", worker=self.id, generation=answer.generation, adopted=len(answer.adopted))
        # What is not ours any more is ended; its receipt is told all the same, and kept as a late one.
        self._kill([(name, "reconcile", None) for name in answer.refused])
        for name in answer.released:
            held = self._held.get(name)
            if held is not None and held.state == "accepted":
                self._forget(held)
        for held in list(self._held.values()):
            if held.state == "accepted" and held.offer is None and not held.in_doubt:
                self._not_started(held, "not_started", "The worker was restarted before the start.")
        self._reports.again()

    def _lose_session(self) -> None:
        # Somebody with our id registered elsewhere. Our leases are theirs to judge; our processes must not run on.
        log.error("a newer session of this worker exists; this one ends its runs and takes no more")
        self._replaced = True
        self._fence = None
        self._kill([(one.attempt_id, "reconcile", None) for one in self._held.values()])

    # -- offers, cancels, retirement

    async def take_offers(self, messages: list[OfferAttempts]) -> None:
        """Offers of this session."""
        assert self._intake is not None
        if not self._draining:
            await self._intake.take(messages)

    async def cancel(self, messages: list[CancelAttempts]) -> None:
        """Trees that have to end; the report proves the end."""
        for message in messages:
            self._stop(message.stops)

    async def retire(self, messages: list[RetireArtifacts]) -> None:
        """The store has these logs."""
        names = [item.attempt_id for message in messages for item in message.items]
        await self._logs.drop(names)
        for at in range(0, len(names), BATCH_ITEMS):
            answer = ArtifactsRetired(attempt_ids=names[at : at + BATCH_ITEMS])
            await self._bus.request(ARTIFACTS_RETIRED, answer, token=self.id)

    def _stop(self, stops: Sequence[StopItem]) -> None:
        wanted: list[tuple[str, str, int | None]] = []
        for stop in stops:
            held = self._held.get(stop.attempt_id)
            if held is not None and held.lease_generation == stop.lease_generation:
                wanted.append((stop.attempt_id, stop.reason, stop.grace_ms))
        self._kill(wanted)

    def _kill(self, wanted: Sequence[tuple[str, str, int | None]]) -> None:
        items: list[dict[str, Any]] = []
        for name, reason, grace_ms in wanted:
            held = self._held.get(name)
            if held is None or held.state == "ended":
                continue
            held.stop_reason = held.stop_reason or reason
            if self._intake is not None and self._intake.withdraw(name) is not None:
                self._end_here(held, rules.end_of(reason, "stopped", kind="not_started", summary="It was stopped."))
                continue
            item: dict[str, Any] = {"attempt": name, "reason": reason}
            if grace_ms is not None:
                item["grace_ms"] = grace_ms
            items.append(item)
        if items:
            self._host.send({"op": "kill", "items": items})

    async def _ask_start(self, message: StartAttempts) -> StartAnswer:
        return await self._bus.request(ATTEMPTS_START, message, token=self.id)

    async def _open_secrets(self, held: Held, prepared: Prepared, not_after_ns: int) -> dict[str, str]:
        """The values of an attempt's secret variables. Raises Ql3Error when they cannot be had in time."""
        fence = self._fence
        left_s = (not_after_ns - time.clock_gettime_ns(time.CLOCK_BOOTTIME)) / 1e9
        if fence is None or left_s <= 0:
            raise Ql3Error("context_unavailable")
        message = ContextOpen(
            fence=fence,
            attempt_id=held.attempt_id,
            lease_generation=held.lease_generation,
            sequence=0,
            proof=proof.proof(held.digest, held.attempt_id, 0, proof.CONTEXT_BODY),
        )
        answer = await self._bus.request(
            CONTEXT_OPEN, message, token=self.id, timeout=min(RPC_TIMEOUT_S, max(0.1, left_s))
        )
        try:
            plain = self._session_key.open(answer.sealed, attempt_context(held.attempt_id, held.lease_generation))
            values = msgspec.json.decode(plain, type=SealedValues).values
        except (SealError, msgspec.DecodeError) as error:
            raise Ql3Error("context_unavailable") from error
        plain[:] = bytes(len(plain))
        if not set(prepared.secrets) <= values.keys():
            raise Ql3Error("context_unavailable")
        return {name: values[name] for name in prepared.secrets}

    def _has_room(self, quota: int) -> bool:
        try:
            return free_bytes(self._directories.logs) >= self._config.worker_min_free + quota
        except OSError:
            return False  # what is not known is no room

    # -- what the host tells

    def _hello(self, hello: News) -> None:
        self._host_name = "{boot_id}:{pid}:{start_ticks}".format(**hello.host)
        known = {row["attempt"]: row for row in hello.attempts}
        handed = [one for one in self._held.values() if one.offer is None]
        found = rules.reconcile(handed, self._host_name, known)
        for held in found.running:
            row = known[held.attempt_id]
            held.state = "launching" if row["state"] == "queued" else "running"
            if held.state == "running":
                self._reports.started(held, Started(held.attempt_id, row["pid"], row["started_at_ms"]))
        self._doubts = {one.attempt_id: one for one in found.in_doubt}
        for held in found.in_doubt:
            held.in_doubt = True
        if found.in_doubt:
            self._host.send({"op": "sweep", "items": [{"attempt": one.attempt_id} for one in found.in_doubt]})
        self._logs.tell_host()
        for held in found.running:
            if held.stop_reason is not None:
                self._kill([(held.attempt_id, held.stop_reason, None)])
        for held in found.never_started:
            if held.state == "launching":
                body = rules.end_of(None, "not_started", kind="not_started", summary="The process host lost it.")
                self._end_here(held, body)

    def _news(self, news: News) -> None:
        for started in news.started:
            held = self._held.get(started.attempt)
            if held is not None and held.state in ("accepted", "launching", "running"):
                held.state = "running"
                self._reports.started(held, started)
        for refused in news.refused:
            held = self._held.get(refused.attempt)
            if held is None:
                self._host_acks.append(refused.attempt)  # settled in an earlier life
            elif held.state != "ended":
                self._end_here(held, _refused_body(held, refused.code))
        for exit_ in news.exits:
            self._ended(exit_)
        if news.grown:
            self._logs.grown(item.attempt for item in news.grown)
        for gone in news.gone:
            held = self._doubts.pop(gone.attempt, None)
            if held is not None and held.state != "ended":
                self._vanished(held)
        if self._host_acks:
            self._settling.ring()

    def _ended(self, told: Exit) -> None:
        held = self._held.get(told.attempt)
        if held is None:
            self._host_acks.append(told.attempt)  # settled in an earlier life
            return
        receipt = Receipt(told.sequence, told.body.encode(), told.proof)
        if receipt.sequence != END_SEQUENCE or not rules.authentic(held, receipt):
            log.error("a receipt with a wrong proof was set aside", attempt=told.attempt)
            self._host.send({"op": "quarantine", "attempts": [told.attempt]})
            self._vanished(held)
            return
        if held.state == "ended":
            return
        held.state = "ended"
        held.in_doubt = False
        self._doubts.pop(held.attempt_id, None)
        fact = msgspec.json.decode(receipt.body, type=rules.Ended).log
        held.log_size = fact.size if fact else 0
        held.truncated = fact.truncated if fact else None
        if held.log_size:
            self._logs.finished(held.attempt_id)
        self._logs.ended(held.attempt_id)
        if fact is not None and fact.size and fact.sha256 is None:
            # A large log has no digest yet; it is read once, beside the loop.
            self._to_digest.append((held, told))
            self._ends.ring()
        else:
            self._reports.end(held, receipt)

    def _vanished(self, held: Held) -> None:
        body = ReportBody(kind="vanished", finished_at_ms=self._clock.now_ms(), error_code="process_vanished")
        self._end_here(held, body)

    def _end_here(self, held: Held, body: ReportBody) -> None:
        """An end that the host has no receipt of: made durable here before it is told."""
        if held.state == "ended":
            return
        held.state = "ended"
        held.in_doubt = False
        self._logs.ended(held.attempt_id)
        self._to_keep.append((held, body))
        self._ends.ring()

    def _not_started(self, held: Held, code: str, summary: str) -> None:
        self._end_here(held, rules.end_of(held.stop_reason, code, kind="not_started", summary=summary))

    # -- ends

    async def _keep_ends(self) -> bool:
        for name, receipt in list(self._kept.items()):
            held = self._held.get(name)
            if held is not None:
                self._reports.end(held, receipt)
            del self._kept[name]
        if self._to_digest:
            held, told = self._to_digest[0]
            digest = await asyncio.to_thread(_digest, self._directories.logs / f"{held.attempt_id}.log")
            self._to_digest.pop(0)
            body = msgspec.json.decode(told.body, type=ReportBody)
            if digest is not None and body.log is not None:
                body = msgspec.structs.replace(body, log=msgspec.structs.replace(body.log, sha256=digest))
            await self._keep_all([(held, body)])
        batch, self._to_keep = self._to_keep, []
        if batch:
            try:
                await self._keep_all(batch)
            except BaseException:
                self._to_keep = batch + self._to_keep
                raise
        return bool(self._to_digest or self._to_keep)

    async def _keep_all(self, batch: Sequence[tuple[Held, ReportBody]]) -> None:
        signed = [(held, rules.sign(held, body, END_SEQUENCE)) for held, body in batch]
        rows = [
            store.ReceiptRow(held.attempt_id, receipt.sequence, receipt.body.decode(), receipt.proof)
            for held, receipt in signed
        ]
        now_ms = self._clock.now_ms()
        await self._database.transact(lambda tx: store.keep(tx, rows, now_ms))
        for held, receipt in signed:
            self._reports.end(held, receipt)

    def _acked(self, done: list[Held]) -> None:
        for held in done:
            self._forget(held)

    def _forget(self, held: Held) -> None:
        if self._held.get(held.attempt_id) is held:
            del self._held[held.attempt_id]
        self._reports.forget(held)
        self._settled.append((held.attempt_id, held.lease_generation))
        self._settling.ring()
        if not self._held:
            self._idle.set()

    async def _settle(self) -> bool:
        # First the journal, then the host: a receipt that is told again after a crash finds no row and is let go.
        settled, self._settled = self._settled, []
        acks, self._host_acks = self._host_acks, []
        if settled:
            try:
                await self._database.transact(lambda tx: store.settle(tx, settled))
            except BaseException:
                self._settled = settled + self._settled
                self._host_acks = acks + self._host_acks
                raise
        if settled or acks:
            self._host.send({"op": "ack", "attempts": [*(name for name, _ in settled), *acks]})
        return bool(self._settled)

    # -- the bus

    async def _send_reports(self, fence: SessionFence, reports: list[AttemptReport]) -> None:
        # Not waited for: a report that is lost is sent again until the dispatcher has committed it.
        await self._bus.publish_core(subjects.report(self.id), ReportAttempts(fence=fence, reports=reports))

    async def _send_chunk(self, subject: str, chunk: LogChunk) -> None:
        await self._bus.publish_core(subject, chunk)

    async def _heard_ack(self, delivery: Delivery) -> None:
        await self._reports.heard(delivery.decode(OrdersAck).ids)

    async def read_log(self, question: LogRead, _caller: Caller) -> LogRange:
        """A range of a log that this worker holds."""
        return await self._logs.read(question)

    async def follow_log(self, question: LogFollow, _caller: Caller) -> Done:
        """Live chunks for 30 s more."""
        await self._logs.follow(question)
        return Done()


def _refused_body(held: Held, code: str) -> ReportBody:
    if code.startswith("stopped_"):
        return rules.end_of(code.removeprefix("stopped_"), "stopped", kind="not_started", summary="It was stopped.")
    if code in ("start_window_passed", "already_ran"):
        return rules.end_of(held.stop_reason, code, kind="not_started", summary=_SENTENCES.get(code, ""))
    return rules.end_of(held.stop_reason, code, kind="start_failed", summary=_SENTENCES.get(code, ""))


_SENTENCES: Final = {
    "start_window_passed": "The start was granted too late.",
    "already_ran": "This attempt was started before.",
    "command_not_found": "The command was not found.",
    "command_not_executable": "The command's file is not executable.",
    "command_invalid": "The command or its environment holds what no process can be given.",
    "working_directory_unusable": "The working directory does not exist or may not be entered.",
    "environment_too_large": "The command's arguments and environment are larger than the kernel takes.",
    "limit_unsupported": "A limit that the task requires could not be set.",
    "process_limit": "The machine allows no more processes.",
    "memory_exhausted": "The machine has no memory for another process.",
}


def _digest(path: Any) -> str | None:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
