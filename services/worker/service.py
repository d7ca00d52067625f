"""The worker: takes attempts on, has them started by the process host, tells what became of them, keeps their logs.

The only file of the worker that knows NATS.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
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
from schemas.limits import BATCH_ITEMS, LOG_QUOTA_DEFAULT_BYTES, RPC_TIMEOUT_S
from schemas.secrets import ContextOpen, SealedValues
from schemas.system import Done, OrdersAck
from schemas.workers import (
    ArtifactsRetired,
    AttemptReport,
    CancelAttempts,
    LogChunk,
    LogFollow,
    LogRange,
    LogRead,
    OfferAttempts,
    ReportAttempts,
    RetireArtifacts,
    SessionFence,
)
from services.kit import metrics
from services.kit.artifacts import open_artifacts
from services.kit.bus import Bus, Caller, Delivery, Route, Subscription
from services.kit.clock import Clock
from services.kit.config import Config
from services.kit.database import Database
from services.kit.loops import Loop
from services.kit.sealing import SealError, attempt_context
from services.kit.version import VERSION
from services.worker import container
from services.worker.attempt import Held
from services.worker.command import Builder
from services.worker.extras import Supplies
from services.worker.files import Files
from services.worker.holdings import Holdings
from services.worker.intake import Intake
from services.worker.place import Directories, Room, describe, load_key, look
from services.worker.runtimes import Runtimes, for_installers
from services.worker.session import Session

NAME = "worker"
DRAIN_S: Final = 10.0
STOP_RUNS_S: Final = 30.0
CLEAR_AGAIN_S: Final = 2.0
SWEEP_S: Final = 3600.0

log: structlog.stdlib.BoundLogger = structlog.get_logger("ql3.worker")


class WorkerService:
    """One worker. Its journal is `database` (local SQLite); `stop_runs` ends what runs when it stops."""

    def __init__(self, *, config: Config, database: Database, bus: Bus, clock: Clock, stop_runs: bool = False) -> None:
        self.id = config.worker_id
        self._config = config
        self._bus = bus
        self._stop_runs = stop_runs
        self._directories = Directories(config.data)
        self._room = Room(self._directories.logs, config.worker_min_free)
        self.session = Session(
            worker=self.id,
            # A disk without room for another log takes no offers, rather than failing them.
            slots=lambda: config.slots if self._room.fits(LOG_QUOTA_DEFAULT_BYTES) else 0,
            holdings=lambda: self.holdings,
            register=lambda message: bus.request(WORKERS_REGISTER, message, token=self.id),
            beat=lambda message: bus.request(WORKERS_BEAT, message, token=self.id),
            ready=self._take_orders,
        )
        self.holdings = Holdings(
            database=database,
            clock=clock,
            directories=self._directories,
            worker=self.id,
            artifacts=open_artifacts(config),
            fence=lambda: self.session.fence,
            send_reports=self._send_reports,
            send_chunk=self._send_chunk,
        )
        self._supplies = Supplies(
            files=Files(self._directories.files, self._directories.mark),
            runtimes=Runtimes(self._directories.environments, for_installers(os.environ)),
            secrets=self._open_secrets,
        )
        self._sweeping = Loop("worker.sweep", self._sweep, every_s=SWEEP_S)
        self.intake = Intake(
            clock=clock,
            database=database,
            holdings=self.holdings,
            builder=Builder(),
            room=self._room,
            make_directory=self._directories.project,
            fence=lambda: None if self.session.draining else self.session.fence,
            ask=lambda message: bus.request(ATTEMPTS_START, message, token=self.id),
            extras=self._supplies.get,
        )
        self.holdings.released = self._released
        self.holdings.clear = self._clear
        self._consuming: asyncio.Task[None] | None = None
        self._acks: Subscription | None = None

    # -- life

    async def start(self) -> None:
        """Own the data folder, reach the process host, compare it with the journal, then register and take offers."""
        self._directories.own()
        try:
            self.intake.key = load_key(self._directories.root / "worker.key")
            place = self.intake.builder.place = await asyncio.to_thread(describe, self._directories)
            self.holdings.engine_before = place.engine
            self.session.capabilities, _ = await asyncio.gather(
                asyncio.to_thread(look, self._config, place), self.holdings.start(self.intake.key)
            )
            self._acks = await self._bus.subscribe(subjects.ack(self.id), self._heard_ack)
            routes: list[Route[Any, Any]] = [
                Route(LOG_READ.bound(self.id), self.read_log),
                Route(LOG_FOLLOW.bound(self.id), self.follow_log),
            ]
            await self._bus.serve(NAME, VERSION, routes)
            metrics.look_at("slots of the worker", self._count_slots)
            await self.intake.loop.start()
            await self.session.loop.start()
            await self._sweeping.start()
        except BaseException:
            await self.stop()
            raise

    async def _count_slots(self) -> None:
        metrics.SLOTS_USED.set(len(self.holdings.beats()))
        metrics.SLOTS.set(self._config.slots)

    async def stop(self) -> None:
        """Take no more; give what runs up to 10 s; leave the rest to the host, or end it first (`stop_runs`)."""
        self.session.draining = True
        if self.session.fence is not None and self.holdings.held:
            with contextlib.suppress(Ql3Error):
                await self.session.step()
            if self._stop_runs:
                self.holdings.kill_all("shutdown")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_RUNS_S if self._stop_runs else DRAIN_S):
                    await self.holdings.nothing_held()
        if self._consuming is not None:
            self._consuming.cancel()
        await asyncio.gather(self.session.loop.stop(), self.intake.loop.stop(), self._sweeping.stop())
        await self.holdings.stop()
        if self._acks is not None:
            await self._acks.close()
        self._directories.release()

    def health(self) -> list[str]:
        """Why this worker could not start a run now."""
        reasons = self.session.health()
        if self._consuming is not None and not self._consuming.done():
            reasons.append("its orders cannot be heard yet")
        if not self.holdings.host.connected:
            reasons.append("no process host")
        if not self._room.fits(0):
            reasons.append("too little room on the disk")
        return reasons + self.holdings.logs.health()

    async def _take_orders(self) -> None:
        # Only once registered: a worker may be started before the services that declare the streams. And beside the
        # beats: without its stream a consumer waits, and the leases of what runs must be renewed all the same.
        if self._consuming is None:
            self._consuming = asyncio.create_task(
                self._bus.consume_worker(
                    self.id,
                    {OfferAttempts: self.take_offers, CancelAttempts: self.cancel, RetireArtifacts: self.retire},
                )
            )

    # -- orders

    async def take_offers(self, messages: list[OfferAttempts]) -> None:
        """Offers of this session."""
        if not self.session.draining:
            await self.intake.take(messages)

    async def cancel(self, messages: list[CancelAttempts]) -> None:
        """Trees that have to end; the report proves the end."""
        for message in messages:
            self.session.stop_runs(message.stops)

    async def retire(self, messages: list[RetireArtifacts]) -> None:
        """The store has these logs."""
        names = [item.attempt_id for message in messages for item in message.items]
        await self.holdings.logs.drop(names)
        for at in range(0, len(names), BATCH_ITEMS):
            answer = ArtifactsRetired(attempt_ids=names[at : at + BATCH_ITEMS])
            await self._bus.request(ARTIFACTS_RETIRED, answer, token=self.id)

    async def _heard_ack(self, delivery: Delivery) -> None:
        await self.holdings.reports.heard(delivery.decode(OrdersAck).ids)

    # -- endpoints

    async def read_log(self, question: LogRead, _caller: Caller) -> LogRange:
        """A range of a log that this worker holds."""
        return await self.holdings.logs.read(question)

    async def follow_log(self, question: LogFollow, _caller: Caller) -> Done:
        """Live chunks for 30 s more."""
        await self.holdings.logs.follow(question)
        return Done()

    # -- what goes out

    async def _send_reports(self, fence: SessionFence, reports: list[AttemptReport]) -> None:
        # Not waited for: a report that is lost is sent again until the dispatcher has committed it.
        await self._bus.publish_core(subjects.report(self.id), ReportAttempts(fence=fence, reports=reports))

    async def _send_chunk(self, subject: str, chunk: LogChunk) -> None:
        await self._bus.publish_core(subject, chunk)

    def _released(self, held: Held) -> None:
        self._room.release(held)
        self._supplies.put_away(held)

    async def _sweep(self) -> None:
        held = set(self.holdings.held)
        await self._supplies.sweep(held)
        await self.holdings.logs.sweep(held)

    async def _clear(self, engine: str, attempt_ids: list[str]) -> None:
        """Containers that a host that died has left; not over before they are gone."""
        while True:
            found = await asyncio.to_thread(container.left_behind, engine)
            if found is not None:
                ours = [found[name] for name in attempt_ids if name in found]
                if await asyncio.to_thread(container.remove, engine, ours):
                    return
            log.warning("containers cannot be removed yet", attempts=len(attempt_ids), engine=engine)
            await asyncio.sleep(CLEAR_AGAIN_S)

    async def _open_secrets(self, held: Held, not_after_ns: int) -> dict[str, str]:
        """The values of an attempt's secret variables. Raises Ql3Error when they cannot be had in time."""
        fence = self.session.fence
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
        timeout = min(RPC_TIMEOUT_S, max(0.1, left_s))
        answer = await self._bus.request(CONTEXT_OPEN, message, token=self.id, timeout=timeout)
        try:
            plain = self.session.key.open(answer.sealed, attempt_context(held.attempt_id, held.lease_generation))
            values = msgspec.json.decode(plain, type=SealedValues).values
        except (SealError, msgspec.DecodeError) as error:
            raise Ql3Error("context_unavailable") from error
        plain[:] = bytes(len(plain))
        return values
