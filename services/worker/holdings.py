"""What this worker holds: attempts from their offer to the acknowledgement of their end, and the host that runs them.

The order that keeps every crash truthful: an attempt is in the journal before it is started; its end is durable (in the
host's receipts, or here) before it is told; its journal row goes before the host forgets its receipt.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final

import msgspec
import structlog

from schemas import proof
from schemas.workers import BeatItem, JournalEntry, LogFact, ReportBody, SessionFence
from services.kit.artifacts import Artifacts
from services.kit.clock import Clock
from services.kit.database import Database
from services.kit.loops import Loop
from services.worker import attempt as rules
from services.worker import store
from services.worker.attempt import END_SEQUENCE, Held, Receipt
from services.worker.hostlink import Exit, HostLink, News, RefusedStart, Started
from services.worker.logs import Logs, SendChunk, log_digest, log_size
from services.worker.place import Directories
from services.worker.reports import Reports, Send

log: structlog.stdlib.BoundLogger = structlog.get_logger("ql3.worker")


async def _nothing_to_clear(_engine: str, _attempt_ids: list[str]) -> None:
    """For a worker without containers."""


SETTLE_PAUSE_S: Final = 0.05
DOUBT_AGAIN_S: Final = 5.0
LIVING: Final = frozenset({"queued", "running", "stopping", "killing", "cleaning"})

Kill = tuple[str, str, int | None]
"""Attempt, reason, grace in milliseconds (None: its own)."""


class Holdings:
    """Everything about held attempts that needs no bus."""

    def __init__(
        self,
        *,
        database: Database,
        clock: Clock,
        directories: Directories,
        worker: str,
        artifacts: Artifacts,
        fence: Callable[[], SessionFence | None],
        send_reports: Send,
        send_chunk: SendChunk,
    ) -> None:
        self.held: dict[str, Held] = {}
        self.host_name = ""
        """Boot, pid and start ticks of the host that is connected."""
        self.withdraw: Callable[[str], bool] = lambda _: False
        """Takes an attempt back that was not handed to the host yet; set by the intake."""
        self.released: Callable[[Held], None] = lambda _: None
        """Called when nothing of an attempt can run any more."""
        self.ready: Callable[[], None] = lambda: None
        """Called when a host is there."""
        self.clear: Callable[[str, list[str]], Awaitable[None]] = _nothing_to_clear
        """Ends the containers that attempts may have under an engine."""
        self.host = HostLink(directories.host, directories.logs, on_hello=self._hello, on_news=self._news)
        self.logs = Logs(
            directory=directories.logs,
            worker=worker,
            store=artifacts,
            held=self.held.get,
            follow=lambda names: self.host.send({"op": "follow", "attempts": names}),
            send=send_chunk,
        )
        self.reports = Reports(clock=clock, send=send_reports, fence=fence, ended=self._acked, more_coming=self._busy)
        self.engine_before: str | None = None
        """The engine of attempts that were journalled before the journal said which one has them."""
        self._database = database
        self._clock = clock
        self._directories = directories
        self._key = b""
        self._doubts: dict[str, Held] = {}
        self._unhanded: dict[str, dict[str, Any]] = {}
        """Granted starts that no host was there for: nothing of them can run before the next one gets them."""
        self._kept: dict[str, Receipt] = {}
        self._to_keep: list[tuple[Held, ReportBody]] = []
        self._to_digest: list[tuple[Held, Exit]] = []
        self._settled: list[tuple[str, int]] = []
        self._host_acks: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._settling = Loop("worker.settle", self._settle_many, every_s=60.0)
        self._ends = Loop("worker.ends", self._keep_ends, every_s=60.0)

    # -- life

    async def start(self, key: bytes) -> None:
        """Read the journal, reach the host, compare the two."""
        self._key = key
        await self._restore(key)
        await self.host.start()
        await self.logs.start()
        await self.logs.take_up(set(self.held))
        for loop in (self.reports.loop, self._settling, self._ends):
            await loop.start()

    async def stop(self) -> None:
        """Let go; the host stays with what still runs, and retires when nothing does."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(loop.stop() for loop in (self.reports.loop, self._settling, self._ends)))
        await self.logs.stop()
        try:
            await self.settle()
        except Exception:  # the journal is the truth again after the next start
            log.warning("the last rows of the journal could not be settled", exc_info=True)
        await self.host.stop()

    async def nothing_held(self) -> None:
        """Return when no attempt is held."""
        while self.held:
            self._idle.clear()
            await self._idle.wait()

    async def _restore(self, key: bytes) -> None:
        offers = await self._database.read(store.offers)
        kept = await self._database.read(store.receipts)
        for row in offers:
            token = proof.token(key, row.attempt_id, row.offer_id, row.lease_generation)
            self.held[row.attempt_id] = Held(
                attempt_id=row.attempt_id,
                offer_id=row.offer_id,
                run_id=row.run_id,
                project=row.project,
                lease_generation=row.lease_generation,
                host=row.host,
                digest=proof.token_digest(token),
                engine=self.engine_before if row.engine is None else row.engine or None,
                asked=True,
            )
        for row in kept:
            held = self.held.get(row.attempt_id)
            if held is not None:
                held.state = "ended"
                self._kept[row.attempt_id] = Receipt(row.sequence, row.body.encode(), row.proof)
        self._ends.ring()

    # -- what the session asks

    def journal(self) -> list[JournalEntry]:
        """What registration tells."""
        return [rules.journal_entry(one) for one in self.held.values() if one.asked][: store.MAX_JOURNAL]

    def beats(self) -> list[BeatItem]:
        """What is renewed: whatever was, or may have been, handed to a host and is not acknowledged."""
        return [
            BeatItem(
                attempt_id=one.attempt_id,
                lease_generation=one.lease_generation,
                sequence=0,
                proof=rules.beat_proof(one),
            )
            for one in self.held.values()
            if one.asked and (one.state != "accepted" or one.in_doubt)
        ]

    def registered(self, released: Sequence[str], refused: Sequence[str]) -> None:
        """A session began. What is not ours any more is ended; its end is told all the same, as a late one."""
        self.kill([(name, "reconcile", None) for name in refused])
        for name in (*released, *refused):
            held = self.held.get(name)
            if held is not None and held.state == "accepted" and not held.in_doubt:
                self.forget(held)  # nobody was asked to start it, and nobody waits for word of it
        for held in list(self.held.values()):
            if held.state == "accepted" and held.offer is None and not held.in_doubt:
                self.not_started(held, "not_started", "The worker was restarted before the start.")
        self.reports.again()

    def kill(self, wanted: Sequence[Kill]) -> None:
        """End trees; what was not started yet is not started."""
        items: list[dict[str, Any]] = []
        for name, reason, grace_ms in wanted:
            held = self.held.get(name)
            if held is None or held.state == "ended":
                continue
            held.stop_reason = held.stop_reason or reason
            if self.withdraw(name) or self._unhanded.pop(name, None) is not None:
                self._end_here(held, rules.end_of(reason, "stopped", kind="not_started", summary="It was stopped."))
                continue
            item: dict[str, Any] = {"attempt": name, "reason": reason}
            if grace_ms is not None:
                item["grace_ms"] = grace_ms
            items.append(item)
        if items:
            self.host.send({"op": "kill", "items": items})

    def kill_all(self, reason: str) -> None:
        """End everything."""
        self.kill([(name, reason, None) for name in self.held])

    def spawn(self, items: list[dict[str, Any]]) -> None:
        """Hand attempts to the host; what there is no host for waits for the next, as long as its start is granted."""
        for item in items:
            self.held[item["attempt"]].host = self.host_name
        for item in self.host.send_items("spawn", items):
            self._unhanded[item["attempt"]] = item
            left_ns = item["not_after_ns"] - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
            self._later(max(0.0, left_ns / 1e9), self._lapse(item))

    async def _lapse(self, item: dict[str, Any]) -> None:
        if self._unhanded.get(item["attempt"]) is item:
            del self._unhanded[item["attempt"]]
            self.not_started(self.held[item["attempt"]], "not_started", "The worker had no process host.")

    def not_started(self, held: Held, code: str, summary: str) -> None:
        """The end of an attempt that will not be started."""
        self._end_here(held, rules.end_of(held.stop_reason, code, kind="not_started", summary=summary))

    # -- what the host tells

    def _hello(self, hello: News) -> None:
        self.host_name = "{boot_id}:{pid}:{start_ticks}".format(**hello.host)
        known = {row["attempt"]: row for row in hello.attempts}
        unhanded, self._unhanded = self._unhanded, {}
        handed = [one for one in self.held.values() if one.offer is None and one.attempt_id not in unhanded]
        found = rules.reconcile(handed, self.host_name, known)
        for held in found.running:
            row = known[held.attempt_id]
            held.state = "launching" if row["state"] == "queued" else "running"
            if held.state == "running":
                self.reports.started(held, Started(held.attempt_id, row["pid"], row["started_at_ms"]))
        self._doubts = {one.attempt_id: one for one in found.in_doubt}
        for held in found.in_doubt:
            held.in_doubt = True
        # Apart, so that an engine that does not answer holds up nobody but those whom it may run.
        for engine in {one.engine for one in found.in_doubt}:
            doubted = [one.attempt_id for one in found.in_doubt if one.engine == engine]
            self._later(0.0, self._sweep(doubted, engine))
        self._end_strangers(known)
        self.logs.tell_host()
        if unhanded:
            self.spawn(list(unhanded.values()))
        self.ready()
        for held in found.running:
            if held.stop_reason is not None:
                self.kill([(held.attempt_id, held.stop_reason, None)])
        for held in found.never_started:
            if held.state == "launching":
                body = rules.end_of(None, "not_started", kind="not_started", summary="The process host lost it.")
                self._end_here(held, body)

    def _end_strangers(self, known: dict[str, dict[str, Any]]) -> None:
        # What runs without a row here belongs to nobody: its end could not be told, its lease not renewed.
        strangers = [name for name, row in known.items() if name not in self.held and row["state"] in LIVING]
        if strangers:
            log.warning("ending attempts that the journal does not know", attempts=len(strangers))
            self.host.send({"op": "kill", "items": [{"attempt": name, "reason": "reconcile"} for name in strangers]})

    def _later(self, pause_s: float, work: Coroutine[Any, Any, None]) -> None:
        async def run() -> None:
            with contextlib.closing(work):  # also when it is not reached
                await asyncio.sleep(pause_s)
                await work

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _sweep(self, attempt_ids: list[str], engine: str | None) -> None:
        """End what another host left of these; the host tells when nothing is left."""
        if engine is not None:
            await self.clear(engine, attempt_ids)
        self.host.send({"op": "sweep", "items": [{"attempt": name} for name in attempt_ids]})

    def _news(self, news: News) -> None:
        for started in news.started:
            held = self.held.get(started.attempt)
            if held is not None and held.state in ("accepted", "launching", "running"):
                held.state = "running"
                self.reports.started(held, started)
        for refused in news.refused:
            held = self.held.get(refused.attempt)
            if held is None:
                self._host_acks.append(refused.attempt)  # settled in an earlier life
            elif held.state != "ended":
                self._end_here(held, _refused_body(held, refused))
        for exit_ in news.exits:
            self._ended(exit_)
        if news.grown:
            self.logs.grown(item.attempt for item in news.grown)
        for gone in news.gone:
            held = self._doubts.get(gone.attempt)
            if held is None or held.state == "ended":
                continue
            if self.held.get(gone.attempt) is not held:
                # Offered anew: so it never passed the barrier, and there was nothing to doubt.
                del self._doubts[gone.attempt]
                continue
            if gone.presence == "gone":
                del self._doubts[gone.attempt]
                self._vanished(held)
            else:
                # Something may live on: the lease is kept, and nothing is said, until that is known.
                self._later(DOUBT_AGAIN_S, self._sweep([gone.attempt], held.engine))
        if self._host_acks:
            self._settling.ring()

    def _ended(self, told: Exit) -> None:
        held = self.held.get(told.attempt)
        receipt = Receipt(told.sequence, told.body.encode(), told.proof)
        if held is None:
            self._orphan(told, receipt)
            return
        if receipt.sequence != END_SEQUENCE or not rules.authentic(held, receipt):
            log.error("a receipt with a wrong proof was set aside", attempt=told.attempt)
            self.host.send({"op": "quarantine", "attempts": [told.attempt]})
            self._vanished(held)
            return
        if held.state == "ended":
            return
        held.state = "ended"
        held.in_doubt = False
        self._doubts.pop(held.attempt_id, None)
        self.released(held)
        fact = msgspec.json.decode(receipt.body, type=rules.Ended).log
        held.log_size = fact.size if fact else 0
        held.truncated = fact.truncated if fact else None
        if held.log_size:
            self.logs.finished(held.attempt_id)
        self.logs.ended(held.attempt_id)
        if fact is not None and fact.size and fact.sha256 is None:
            # A large log has no digest yet; it is read once, beside the loop.
            self._to_digest.append((held, told))
            self._ends.ring()
        else:
            self.reports.end(held, receipt)

    def _orphan(self, told: Exit, receipt: Receipt) -> None:
        """A receipt without a row: settled in an earlier life if it is ours, and evidence to keep if it is not."""
        if rules.was_ours(self._key, told.attempt, told.context, receipt):
            self._host_acks.append(told.attempt)
        else:
            log.error("a receipt that nobody here asked for was set aside", attempt=told.attempt)
            self.host.send({"op": "quarantine", "attempts": [told.attempt]})

    def _vanished(self, held: Held) -> None:
        # Its output up to then is kept; nobody can say whether more was written.
        size = log_size(self._directories.logs, held.attempt_id)
        fact = LogFact(artifact_id=held.attempt_id, size=size, produced=size, truncated=True) if size else None
        now_ms = self._clock.now_ms()
        self._end_here(
            held, ReportBody(kind="vanished", finished_at_ms=now_ms, error_code="process_vanished", log=fact)
        )
        if fact is not None:
            self.logs.finished(held.attempt_id)

    def _end_here(self, held: Held, body: ReportBody) -> None:
        """An end that the host has no receipt of: made durable here before it is told."""
        if held.state == "ended":
            return
        held.state = "ended"
        held.in_doubt = False
        self.released(held)
        self.logs.ended(held.attempt_id)
        self._to_keep.append((held, body))
        self._ends.ring()

    # -- ends

    async def _keep_ends(self) -> bool:
        for name, receipt in list(self._kept.items()):
            held = self.held.get(name)
            if held is not None:
                self.reports.end(held, receipt)
            del self._kept[name]
        if self._to_digest:
            held, told = self._to_digest[0]
            digest = await asyncio.to_thread(log_digest, self._directories.logs, held.attempt_id)
            body = msgspec.json.decode(told.body, type=ReportBody)
            if digest is not None and body.log is not None:
                body = msgspec.structs.replace(body, log=msgspec.structs.replace(body.log, sha256=digest))
            await self._keep_all([(held, body)])
            self._to_digest.pop(0)
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
            self.reports.end(held, receipt)

    def _busy(self, ready: int) -> bool:
        # A quarter of what is held is a batch already.
        return ready < len(self.held) // 4

    def _acked(self, done: list[Held]) -> None:
        for held in done:
            self.forget(held)

    def forget(self, held: Held) -> None:
        if self.held.get(held.attempt_id) is held:
            del self.held[held.attempt_id]
        self.reports.forget(held)
        self._settled.append((held.attempt_id, held.lease_generation))
        self._settling.ring()
        if not self.held:
            self._idle.set()

    async def _settle_many(self) -> bool:
        # Nobody waits for it, and one transaction for many is worth a moment.
        await asyncio.sleep(SETTLE_PAUSE_S)
        return await self.settle()

    async def settle(self) -> bool:
        """Let go of what is acknowledged."""
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
            self.host.send({"op": "ack", "attempts": [*(name for name, _ in settled), *acks]})
        return bool(self._settled)


def _refused_body(held: Held, refused: RefusedStart) -> ReportBody:
    code = refused.code
    if code.startswith("stopped_"):
        return rules.end_of(code.removeprefix("stopped_"), "stopped", kind="not_started", summary="It was stopped.")
    if code in ("start_window_passed", "already_ran"):
        return rules.end_of(held.stop_reason, code, kind="not_started", summary=_SENTENCES.get(code, ""))
    named = {
        "command": _printable(refused.command),
        "directory": _printable(refused.directory),
        "limits": _printable(refused.limits),
    }
    summary = _SENTENCES.get(code, "").format(**named)
    return rules.end_of(held.stop_reason, code, kind="start_failed", summary=summary)


def _printable(text: str) -> str:
    # It is shown on terminals, which a control character would command.
    return "".join(letter if letter.isprintable() else "?" for letter in text) or "?"


_SENTENCES: Final = {
    "start_window_passed": "The start was granted too late.",
    "already_ran": "This attempt was started before.",
    "command_not_found": "The command {command} (or what its first line names to run it) was not found from the folder"
    " {directory}.",
    "command_not_executable": "The file of the command {command} is not executable (from the folder {directory}).",
    "command_invalid": "The command or its environment holds what no process can be given.",
    "working_directory_unusable": "The working directory {directory} does not exist or may not be entered.",
    "environment_too_large": "The command's arguments and environment are larger than the kernel takes.",
    "limit_unsupported": "This worker cannot set the limits that the task requires ({limits}).",
    "process_limit": "The machine allows no more processes.",
    "memory_exhausted": "The machine has no memory for another process.",
}
