"""The dispatcher on the bus: endpoints, orders and loops. The only file of the dispatcher that knows NATS.

Everything that is decided, is decided in a transaction over the ledger; what is sent afterwards may be lost, because a
row says that it is still open.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec
import structlog

from schemas import endpoints, limits, subjects
from schemas.artifacts import PurgeRuns
from schemas.errors import Ql3Error
from schemas.runs import (
    DispatchClose,
    EndedPage,
    EndedRead,
    RunOrder,
    RunRelease,
    RunReleaseAnswer,
    SubmitAnswer,
    SubmitRuns,
)
from schemas.tasks import ExecutionRevision
from schemas.workers import (
    CancelAttempts,
    LeaseVerified,
    LeaseVerify,
    Readiness,
    ReadinessRead,
    ReportAttempts,
    StartAnswer,
    StartAttempts,
    WorkerBeat,
    WorkerBeaten,
    WorkerRegister,
    WorkerRegistered,
)
from services.dispatcher import (
    barrier,
    cancelling,
    holding,
    placing,
    purging,
    reading,
    recovery,
    reporting,
    sessions,
    submission,
)
from services.dispatcher.gathering import Gatherer
from services.dispatcher.people import Bells, People
from services.dispatcher.placing import Offer, Placed
from services.dispatcher.recovery import Step
from services.dispatcher.reporting import Sent, Settled
from services.dispatcher.store import ended, runs
from services.dispatcher.store.revisions import Revisions
from services.dispatcher.submission import Outcome
from services.dispatcher.turns import look, pause_s, with_now
from services.kit.bus import Bus, Caller, Route, Spoken
from services.kit.clock import Clock
from services.kit.config import Config
from services.kit.database import Database, DatabaseUnavailable, Transaction, UniqueViolation
from services.kit.dispatches import closing_route
from services.kit.health import Health
from services.kit.loops import Loop
from services.kit.policy import PolicyClient
from services.kit.rush import rush
from services.kit.standing import standing_routes
from services.kit.upkeep import upkeep
from services.kit.version import VERSION

NAME: Final = "dispatcher"
TICK_S: Final = 1.0
RUNG_S: Final = 3600.0
"""The pace of loops that the timers ring when something of theirs is due."""
SWEEP_AFTER_MS: Final = 5_000
_SAME_KEY_TRIES: Final = 5

T = TypeVar("T")

log: structlog.stdlib.BoundLogger = structlog.get_logger("ql3.dispatcher")


class DispatcherService:
    """Several may run on one PostgreSQL ledger; each may die at any statement."""

    def __init__(self, *, config: Config, database: Database, bus: Bus, clock: Clock) -> None:
        self._config = config
        self._database = database
        self._bus = bus
        self._policy = PolicyClient(bus, clock=clock)
        self._revisions = Revisions()
        self._submissions: Gatherer[SubmitRuns, list[Outcome]] = Gatherer(
            self._submit, most=limits.BATCH_ITEMS, size=lambda message: len(message.runs)
        )
        self._starts: Gatherer[StartAttempts, StartAnswer] = Gatherer(
            self._start_many, most=limits.BATCH_ITEMS, size=lambda message: len(message.attempts)
        )
        self._placing = Loop("dispatcher.place", self._place, every_s=TICK_S)
        self._timing = Loop("dispatcher.timers", self._tick, every_s=TICK_S)
        self._delivering = Loop("dispatcher.cancel", self._deliver, every_s=RUNG_S)
        self._ringing = Loop("dispatcher.holds", self._ring, every_s=RUNG_S)
        self._loops = (self._placing, self._timing, self._delivering, self._ringing)
        self._upkeep = upkeep(database, bus, aside=rush.over)
        self._asked = True
        self._lane = ""
        self._sweep = cancelling.Position()
        self._hearing = recovery.Hearing(time.monotonic)
        self._people = People(
            database=database,
            revisions=self._revisions,
            policy=self._policy,
            bells=Bells(self._ask_to_place, self._delivering.ring, self._ringing.ring, self._timing.ring),
            listening=lambda: self._hearing.patience_ms() > 0,
        )
        self._sending: set[asyncio.Task[None]] = set()
        self._could_run: list[str] = ["it was not looked yet whether a run could be started"]

    async def start(self) -> None:
        """Put the ledger in order as far as nobody else's clock is involved, then answer, then look after it."""
        await self._database.transact(recovery.forgive)
        health = Health()
        health.add(NAME, self.health)
        standing = standing_routes(NAME, VERSION, database=self._database, policy=self._policy, health=health)
        await self._bus.serve(NAME, VERSION, [*self._routes(), *standing])
        await self._bus.consume(
            NAME,
            {SubmitRuns: self._take_submissions, ReportAttempts: self._take_reports, PurgeRuns: self._take_purges},
            spoken=(ReportAttempts,),
        )
        await self._bus.on_ack(NAME, self._acked)
        await self._bus.flush()
        for loop in (*self._upkeep, *self._loops):
            await loop.start()

    async def stop(self) -> None:
        """End after what is at work; what was committed last still goes out."""
        for loop in self._loops:
            await loop.stop()
        await self._submissions.close()
        await self._starts.close()
        if self._sending:
            await asyncio.wait(self._sending, timeout=5.0)
        for loop in self._upkeep:
            await loop.stop()

    def health(self) -> list[str]:
        """Why a run could not be submitted, placed and started now."""
        reasons = [*self._bus.health()]
        if not self._timing.first_done.is_set():
            reasons.append("the ledger was not put in order yet")
        if self._timing.failures > 2:
            reasons.append("the ledger cannot be looked after")
        return [*reasons, *self._could_run]

    def _routes(self) -> list[Route[Any, Any]]:
        people = self._people
        return [
            Route(endpoints.RUNS_SUBMIT, self.submit, concurrency=256),
            Route(endpoints.RUNS_GET, people.get_run, concurrency=32),
            Route(endpoints.RUNS_LIST, people.list_runs),
            Route(endpoints.RUNS_EVENTS, people.list_events),
            Route(endpoints.RUNS_ATTEMPTS, people.list_attempts),
            Route(endpoints.RUNS_CANCEL, people.cancel),
            Route(endpoints.RUNS_RETRY, people.retry),
            Route(endpoints.RUNS_EXPLAIN, people.explain),
            Route(endpoints.RUNS_RELEASE, self.release),
            Route(endpoints.RUNS_CLOSE, self.close),
            Route(endpoints.ATTEMPTS_START, self.start_attempts, concurrency=256),
            Route(endpoints.WORKERS_REGISTER, self.register),
            Route(endpoints.WORKERS_BEAT, self.beat, concurrency=64),
            Route(endpoints.WORKERS_LIST, people.list_workers),
            Route(endpoints.WORKERS_DRAIN, people.drain),
            Route(endpoints.LIMITS_LIST, people.list_limits),
            Route(endpoints.LIMITS_SET, people.set_limit),
            Route(endpoints.LEASES_VERIFY, self.verify_lease, concurrency=64),
            Route(endpoints.ATTEMPTS_ENDED, self.ended_attempts),
            Route(endpoints.READINESS, self.readiness),
            closing_route(NAME, self._database),
        ]

    # -- submission

    async def submit(self, message: SubmitRuns, _caller: Caller) -> SubmitAnswer:
        """Commit orders and answer with the runs as they stand."""
        outcomes = await self._submissions.put(message)
        return SubmitAnswer(results=[outcome.answer() for outcome in outcomes])

    async def _take_submissions(self, messages: list[SubmitRuns]) -> list[BaseException | None]:
        outcomes = await asyncio.gather(*(self._submissions.put(m) for m in messages), return_exceptions=True)
        acks: dict[str, list[str]] = {}
        errors: list[BaseException | None] = []
        for message, outcome in zip(messages, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                errors.append(outcome)
                continue
            errors.append(None)
            for one in outcome:
                if one.error is not None:
                    log.warning("an order was refused", order=one.order_id, error=one.error, sender=message.sender)
                acks.setdefault(message.sender, []).append(one.order_id)
        await self._acknowledge(acks)
        return errors

    async def _submit(self, messages: Sequence[SubmitRuns]) -> list[list[Outcome]]:
        orders = [order for message in messages for order in message.runs]
        digests = {order.revision for order in orders}
        offered: dict[str, ExecutionRevision] = {}
        if not self._are_kept(digests):  # the digest of a revision is costly to make
            offered = {revision.digest: revision for message in messages for revision in message.revisions}
        outcomes = await self._committed(offered, orders)
        self._ask_to_place()
        if any(outcome.run is not None and outcome.run.status == "waiting_approval" for outcome in outcomes):
            self._ringing.ring()
        if any(outcome.run is not None and outcome.run.queue_deadline_ms is not None for outcome in outcomes):
            self._timing.ring()
        found = iter(outcomes)
        return [[next(found) for _ in message.runs] for message in messages]

    async def _committed(self, offered: dict[str, ExecutionRevision], orders: Sequence[RunOrder]) -> list[Outcome]:
        for _ in range(_SAME_KEY_TRIES):
            try:
                return await self._database.transact(lambda tx: submission.submit(tx, self._revisions, offered, orders))
            except UniqueViolation:
                continue  # another dispatcher just committed one of these keys; the next look finds its run
        raise Ql3Error("unavailable", "Others submit the same runs at this moment.")

    def _are_kept(self, digests: set[str]) -> bool:
        return all(self._revisions.kept(digest) is not None for digest in digests)

    # -- placement

    async def _place(self) -> bool:
        asked, self._asked = self._asked, False
        # Without a reason to place anything, a look that writes nothing.
        if not asked and not await self._database.read(lambda tx: runs.lanes(tx, "", 1)):
            return False
        return self._placed(await self._database.transact(self._fill_seats))

    async def _fill_seats(self, tx: Transaction) -> Placed:
        return await placing.place(tx, self._revisions, self._lane)

    def _placed(self, placed: Placed) -> bool:
        self._lane = placed.last_lane
        self._send_offers(placed.offers)
        rush.starts(placed.placed)
        self._asked |= placed.more
        return placed.more

    def _ask_to_place(self) -> None:
        self._asked = True
        self._placing.ring()

    def _send_offers(self, offers: Sequence[Offer]) -> None:
        for worker, message in offers:
            self._send(subjects.to_worker(worker, "offer"), message)

    def _send(self, subject: str, message: msgspec.Struct) -> None:
        # Not awaited: the next transaction need not wait for the stream. What is lost is rung again from its row.
        task = asyncio.create_task(self._publish(subject, message))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _publish(self, subject: str, message: msgspec.Struct) -> None:
        try:
            await self._bus.publish(subject, message)
        except Ql3Error as error:
            log.warning("an order was not sent and will be rung again", subject=subject, error=error.code)

    # -- workers

    async def register(self, message: WorkerRegister, caller: Caller) -> WorkerRegistered:
        """A new session of a worker."""
        _same_worker(caller, message.worker)
        answer = await self._database.transact(lambda tx: sessions.register(tx, message, random.random))
        log.info(
            "worker registered", worker=message.worker, generation=answer.generation, slots=message.slots,
            adopted=len(answer.adopted), released=len(answer.released), refused=len(answer.refused),
        )  # fmt: skip
        self._could_run = []
        self._timing.ring()
        self._ask_to_place()
        return answer

    async def beat(self, message: WorkerBeat, caller: Caller) -> WorkerBeaten:
        """Heartbeat and renewal."""
        _same_worker(caller, message.fence.worker)
        quiet = await self._database.read(lambda tx: sessions.quiet_beat(tx, message))
        if quiet is not None:
            return quiet
        beaten = await self._database.transact(lambda tx: sessions.beat(tx, message))
        if beaten.woke:
            self._ask_to_place()
            self._timing.ring()
        return beaten.answer

    async def start_attempts(self, message: StartAttempts, caller: Caller) -> StartAnswer:
        """The start barrier."""
        _same_worker(caller, message.fence.worker)
        return await self._starts.put(message)

    async def _start_many(self, messages: Sequence[StartAttempts]) -> list[StartAnswer]:
        answers = await self._database.transact(lambda tx: barrier.start(tx, self._revisions, messages))
        if any(grant.timeout_ms is not None for answer in answers for grant in answer.grants):
            self._timing.ring()
        return answers

    async def _take_reports(self, messages: list[Spoken]) -> list[BaseException | None]:
        errors: list[BaseException | None] = [None] * len(messages)
        batch: list[int] = []
        weight = 0
        for index, message in enumerate(messages):
            if batch and weight + len(message.message.reports) > limits.BATCH_ITEMS:
                await self._settle(messages, batch, errors)
                batch, weight = [], 0
            batch.append(index)
            weight += len(message.message.reports)
        await self._settle(messages, batch, errors)
        return errors

    async def _settle(self, messages: list[Spoken], batch: list[int], errors: list[BaseException | None]) -> None:
        taken = [messages[index] for index in batch]
        sent = [Sent(speaker, message.fence, report) for speaker, message in taken for report in message.reports]
        fills = self._database.dialect == "sqlite"

        async def settle(tx: Transaction) -> tuple[Settled, Placed | None]:
            settled = await reporting.settle(tx, sent, random.random)
            # The next runs get the slots at once where another transaction would only stand in line behind this one.
            # With several writers it would hold the ended runs while it waits for limits that a submission holds.
            return settled, await self._fill_seats(tx) if fills and settled.ended else None

        try:
            try:
                settled, placed = await self._database.transact(settle)
            except Exception as error:
                if not fills or isinstance(error, DatabaseUnavailable):
                    raise
                log.warning("reports are settled without placing", exc_info=True)
                fills = False
                settled, placed = await self._database.transact(settle)
        except Exception as error:
            if len(batch) > 1 and not isinstance(error, DatabaseUnavailable):
                for index in batch:
                    await self._settle(messages, [index], errors)
                return
            for index in batch:
                errors[index] = error
            return
        if placed is not None:
            if self._placed(placed):
                self._placing.ring()
        elif settled.ended:
            self._ask_to_place()
        if settled.retrying:
            self._timing.ring()
        await self._acknowledge(settled.acks)

    async def verify_lease(self, message: LeaseVerify, _caller: Caller) -> LeaseVerified:
        """For the vault."""
        return await self._database.read(lambda tx: barrier.verify(tx, self._revisions, message))

    async def ended_attempts(self, message: EndedRead, _caller: Caller) -> EndedPage:
        """For retention, when its facts are gone from the feed."""
        return await self._database.read(lambda tx: ended.page(tx, message.after, message.limit))

    # -- decisions about held runs

    async def release(self, message: RunRelease, _caller: Caller) -> RunReleaseAnswer:
        """Approval's decision about a held run."""
        answer, queued = await self._database.transact(lambda tx: holding.release(tx, self._revisions, message))
        if queued:
            self._ask_to_place()
        return answer

    async def close(self, message: DispatchClose, _caller: Caller) -> RunReleaseAnswer:
        """Close a dispatch id."""
        return await self._database.transact(lambda tx: holding.close(tx, message))

    async def readiness(self, _message: ReadinessRead, _caller: Caller) -> Readiness:
        """Could a run be submitted, placed and started?"""
        self._could_run = await self._database.read(reading.could_run)
        return Readiness(reasons=self.health())

    # -- orders of others, and answers to ours

    async def _take_purges(self, messages: list[PurgeRuns]) -> list[BaseException | None]:
        errors: list[BaseException | None] = []
        done: list[str] = []
        for message in messages:
            try:
                await self._database.transact(lambda tx, order=message: purging.purge_runs(tx, order))
                done.append(message.order_id)
                errors.append(None)
            except Exception as error:
                errors.append(error)
        await self._acknowledge({"retention": done} if done else {})
        return errors

    async def _acked(self, ids: list[str]) -> None:
        await self._database.transact(lambda tx: holding.acked(tx, ids))

    async def _acknowledge(self, acks: dict[str, list[str]]) -> None:
        for sender, ids in acks.items():
            try:
                await self._bus.acknowledge(sender, ids)
            except Ql3Error as error:
                log.info("an answer was not sent; its sender will ring again", sender=sender, error=error.code)

    # -- loops

    async def _deliver(self) -> bool:
        orders, more = await self._database.transact(with_now(cancelling.deliver))
        for worker, message in orders:
            self._send_cancel(worker, message)
        return more

    def _send_cancel(self, worker: str, message: CancelAttempts) -> None:
        self._send(subjects.to_worker(worker, "cancel"), message)

    async def _ring(self) -> bool:
        message, more = await self._database.transact(lambda tx: holding.ring(tx, self._revisions))
        if message is not None:
            self._send(subjects.command("approval", "request"), message)
        return more

    async def _tick(self) -> bool | float:
        """Whatever has come due, each kind one bounded page; then when to look again, in seconds."""
        now_due, self._could_run = await self._database.read(look)
        self._hearing.look(connected=self._bus.connected)
        more = False
        if now_due.needs_stamp():
            await self._database.transact(recovery.forgive)
        if now_due.is_over(now_due.expiry):
            patience = self._hearing.patience_ms()
            step = await self._database.transact(lambda tx: recovery.reap(tx, random.random, patience_ms=patience))
            more |= self._follow(step)
        if now_due.is_over(now_due.offer):
            more |= await self._reoffer()
        if now_due.is_over(now_due.retry):
            step = await self._database.transact(lambda tx: recovery.wake_retries(tx, self._revisions))
            more |= self._follow(step)
        if now_due.is_over(now_due.deadline):
            step = await self._database.transact(lambda tx: recovery.end_overdue(tx, self._revisions))
            more |= self._follow(step)
        if now_due.is_over(now_due.queue_end):
            more |= self._follow(await self._database.transact(recovery.end_unplaced))
        if now_due.is_over(now_due.hold_end, recovery.APPROVAL_SLACK_MS):
            more |= self._follow(await self._database.transact(recovery.end_unapproved))
        if now_due.is_over(now_due.intent, SWEEP_AFTER_MS):
            self._sweep = await self._database.transact(
                with_now(lambda tx, now: cancelling.sweep(tx, self._revisions, self._sweep, now))
            )
        if now_due.is_over(now_due.stop):
            self._delivering.ring()
        if now_due.is_over(now_due.ring):
            self._ringing.ring()
        return True if more else pause_s(now_due, TICK_S)

    async def _reoffer(self) -> bool:
        offers, more = await self._database.transact(
            with_now(lambda tx, now: placing.reoffer(tx, self._revisions, now, limits.BATCH_ITEMS))
        )
        self._send_offers(offers)
        return more

    def _follow(self, step: Step) -> bool:
        if step.place:
            self._ask_to_place()
        if step.deliver:
            self._delivering.ring()
        return step.more


def _same_worker(caller: Caller, worker: str) -> None:
    if caller.token != worker:
        raise Ql3Error("forbidden", "A worker may speak for itself alone.")
