"""The scheduler's timers: admitting what is due, ringing open orders again, and pruning closed ones."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final, cast

import structlog

from schemas.errors import Ql3Error
from schemas.limits import BATCH_ITEMS
from schemas.runs import TriggerType
from services.kit import metrics
from services.kit.clock import Clock
from services.kit.database import Database, Row, Transaction
from services.kit.ids import new_id
from services.kit.orders import next_ring_ms
from services.scheduler.admissions import Admission, for_fire
from services.scheduler.decisions import INPUTS_REFUSED, PROJECT_ARCHIVED, Missed, begin, decide
from services.scheduler.executions import Executions
from services.scheduler.parameters import check_inputs
from services.scheduler.projects import Asked, Projects, asked
from services.scheduler.scheduling import go_on, missed_row, moved, record_missed, stop
from services.scheduler.store import admissions, schedules
from services.scheduler.store import tasks as task_store
from services.scheduler.submitting import ANSWER_MS, Submitter, admission_of, count_fires, queue_orders
from services.scheduler.triggers import Span, stored_plan

SET_BACK_MS: Final = 1_500
"""A wall clock this much behind what it said before was set back."""
SEEN_EVERY_MS: Final = 10_000
AGAIN_MS: Final = 60_000
"""When to look again at what cannot be decided now: an archived project, a row that cannot be read."""
SLEEP_S: Final = 1.0
"""The longest sleep: a clock that is set forward meanwhile is noticed after it."""
KEPT_MS: Final = 3 * 86_400_000
"""Closed admissions are kept so long; a clock set back further waits instead of repeating."""
WITHDRAW_ABSENT: Final = 12
"""A run that the dispatcher denies so often in a row, long after its time, will not come to be any more."""
ABSENT_KEPT: Final = 4_096
WITHDRAW_KEPT_MS: Final = KEPT_MS
"""How long after its time. A queued order has no end of its own: should its run be made still later, its
acknowledgement takes the withdrawal up again."""
BUSY_S: Final = 0.25
"""One transaction decides about rows for so long; after an outage each of them may have weeks to count."""
ASK_AHEAD_MOST_MS: Final = 23 * 3_600_000
"""An approval's request lives a day at most, and it has to live beyond the start that it is about."""

log: structlog.stdlib.BoundLogger = structlog.get_logger("ql3.scheduler")


@dataclass
class _Round:
    """What one transaction of the admission loop collects."""

    now_ms: int
    claimed: int = 0
    admissions: list[Admission] = field(default_factory=list[Admission])
    moves: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    missed: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    postponed: list[str] = field(default_factory=list[str])
    unknown: set[Asked] = field(default_factory=set[Asked])
    starts: dict[str, int] = field(default_factory=dict[str, int])
    """By order, when it was to be admitted: its instant with its jitter."""

    @property
    def room(self) -> int:
        return BATCH_ITEMS - len(self.admissions)


class AdmissionLoop:
    """Turns due instants into open orders: one transaction a batch, rows claimed by their locks.

    Several schedulers share the rows: each takes those that no other holds. A scheduler that dies loses its locks with
    its connection, and the database ends a silent one's transaction by its own clock.
    """

    def __init__(
        self,
        database: Database,
        clock: Clock,
        executions: Executions,
        projects: Projects,
        submitter: Submitter,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._clock = clock
        self._executions = executions
        self._projects = projects
        self._submitter = submitter
        self._monotonic = monotonic
        self._last_ms: int | None = None
        self._seen_ms = 0

    async def step(self) -> bool | float:
        """Admit one batch. True: more is due; otherwise the seconds until the next row is."""
        now_ms = self._clock.now_ms()
        await self._watch_clock(now_ms)
        done = await self._database.transact(lambda tx: self._admit(tx, now_ms))
        self._count(done)
        await self._submitter.post(done.admissions)
        if done.unknown:
            await self._projects.learn(sorted(done.unknown))
            return True
        if done.claimed:
            return True
        wake_ms = await self._database.read(schedules.next_wake)
        if wake_ms is None:
            return SLEEP_S
        return min(SLEEP_S, max(0.0, (wake_ms - self._clock.now_ms()) / 1000))

    def _count(self, done: _Round) -> None:
        if not done.admissions:
            return
        count_fires(done.admissions)
        now_ms = self._clock.now_ms()
        for admission in done.admissions:
            metrics.LATENESS.observe(max(0, now_ms - done.starts[admission.order.order_id]) / 1000)

    async def _watch_clock(self, now_ms: int) -> None:
        last_ms = self._last_ms
        if last_ms is None:
            last_ms = self._seen_ms = int((await self._database.read(schedules.clock))["seen_ms"])
        if now_ms < last_ms - SET_BACK_MS:
            log.warning("the wall clock was set back", by_ms=last_ms - now_ms)
            await self._rewind(now_ms)
            self._seen_ms = 0
        self._last_ms = now_ms
        if not 0 <= now_ms - self._seen_ms < SEEN_EVERY_MS:
            await self._database.transact(lambda tx: schedules.see(tx, now_ms))
            self._seen_ms = now_ms

    async def _rewind(self, now_ms: int) -> None:
        """Schedules wait no longer than the clock says; instants that were admitted before are met again and kept."""
        after: str | None = ""
        while after is not None:
            after = await self._database.transact(lambda tx, after=after: self._rewind_page(tx, after, now_ms))

    async def _rewind_page(self, tx: Transaction, after: str, now_ms: int) -> str | None:
        rows = await schedules.ahead_of(tx, after, now_ms, BATCH_ITEMS)
        through = max(now_ms - 1, (await schedules.clock(tx))["pruned_through_ms"])
        specs = await schedules.specs(tx, [row["trigger_id"] for row in rows])
        moves: list[dict[str, Any]] = []
        for row in rows:
            try:
                spec = specs[row["trigger_id"]]
                plan = stored_plan(row["trigger_id"], spec["spec"], spec["content_digest"], row["anchor_ms"])
            except (Ql3Error, KeyError):
                continue
            stopped = (row["stopped_at_ms"], row["stopped_by"])
            moves.append(moved(row["trigger_id"], begin(plan, through, now_ms), now_ms, stopped=stopped))
        await schedules.move(tx, moves)
        return rows[-1]["trigger_id"] if len(rows) == BATCH_ITEMS else None

    async def _admit(self, tx: Transaction, now_ms: int) -> _Round:
        done = _Round(now_ms)
        rows = await schedules.claim(tx, now_ms, BATCH_ITEMS)
        if not rows:
            return done
        specs = await schedules.specs(tx, [row["trigger_id"] for row in rows])
        tasks = await task_store.current_executions(tx, sorted({row["task_id"] for row in rows}))
        until = self._monotonic() + BUSY_S
        for row in rows:
            if done.room == 0 or (done.claimed and self._monotonic() >= until):
                break  # the others stay due
            try:
                await self._decide(tx, row, specs.get(row["trigger_id"]), tasks.get(row["task_id"]), done)
            except Ql3Error as error:
                # One broken row must not hold the others, and must not be forgotten either.
                log.error("a trigger cannot be decided", trigger=row["trigger_id"], error=error.code)
                done.postponed.append(row["trigger_id"])
        await self._write(tx, done)
        return done

    async def _decide(self, tx: Transaction, row: Row, spec: Row | None, task: Row | None, done: _Round) -> None:
        permit = self._projects.decision(asked(row["project"]))
        if permit is None:
            done.unknown.add(asked(row["project"]))
            return
        if permit.has_rules and permit.effect != "deny" and task is not None:
            # Labels decide too; those of the revision that would run.
            pinned = await self._executions.load(tx, row["task_id"], task["revision"])
            labelled = asked(row["project"], pinned.revision.terms.labels)
            permit = self._projects.decision(labelled)
            if permit is None:
                done.unknown.add(labelled)
                return
        done.claimed += 1
        hold = permit.effect == "require_approval"
        if permit.effect == "deny":
            if row["stopped_by"] is None:
                await stop(tx, [row], PROJECT_ARCHIVED, [], done.now_ms)
            done.postponed.append(row["trigger_id"])
            return
        if row["stopped_by"] == PROJECT_ARCHIVED:
            await go_on(tx, row, None, done.now_ms, look_now=permit.has_rules)
            return
        if spec is None or task is None:
            raise Ql3Error("revision_unavailable")
        if not task["enabled"]:
            await stop(tx, [row], "task_disabled", [], done.now_ms)
            return
        plan = stored_plan(row["trigger_id"], spec["spec"], spec["content_digest"], row["anchor_ms"])
        try:
            ahead_ms = min(permit.ahead_ms, ASK_AHEAD_MOST_MS) if hold else 0
            decision = decide(plan, row["decided_through_ms"], done.now_ms, limit=done.room, ahead_ms=ahead_ms)
        except Exception as error:
            log.exception("a decision failed", trigger=row["trigger_id"])
            raise Ql3Error("internal_error") from error
        fires, missed = decision.fires, list(decision.missed)
        if fires:
            pinned = await self._executions.load(tx, row["task_id"], task["revision"])
            parameters = await self._executions.parameters(tx, row["project"], row["task_id"], task["revision"])
            try:
                inputs = check_inputs(parameters, plan.spec.inputs)
            except Ql3Error:
                # The task was edited since, and takes these inputs no more.
                missed += [Missed(INPUTS_REFUSED, Span(fire.instant_ms, fire.instant_ms, 1)) for fire in fires]
            else:
                for fire in fires:
                    admission = for_fire(
                        pinned,
                        trigger_id=row["trigger_id"],
                        trigger_revision=row["trigger_revision"],
                        trigger_type=cast(TriggerType, spec["kind"]),
                        # What asked and was taken back may be asked about again, as another run.
                        occasion=f"{fire.instant_ms}:{new_id()}" if fire.asked else str(fire.instant_ms),
                        inputs=inputs,
                        now_ms=done.now_ms,
                        scheduled_for_ms=fire.instant_ms,
                        not_before_ms=fire.not_before_ms,
                        hold=hold,
                    )
                    done.admissions.append(admission)
                    done.starts[admission.order.order_id] = fire.instant_ms + plan.jitter_ms(fire.instant_ms)
        done.moves.append(moved(row["trigger_id"], decision, done.now_ms))
        done.missed += [missed_row(row, row["trigger_revision"], part, done.now_ms) for part in missed]

    async def _write(self, tx: Transaction, done: _Round) -> None:
        if done.admissions:
            ring_at = await tx.now_ms() + ANSWER_MS
            rows = [admission.row() for admission in done.admissions]
            new = await admissions.insert(tx, rows, ring_at, done.now_ms)
            # What is not new was admitted before the clock was set back.
            fresh = [admission for admission in done.admissions if admission.order.order_id in new]
            done.admissions = fresh
        await schedules.move(tx, done.moves)
        await record_missed(tx, done.missed)
        await schedules.postpone(tx, done.postponed, done.now_ms + AGAIN_MS)


Cancel = Callable[[str, str], Awaitable[None]]
"""Ends a run (project, run id) that must not start. Raises `not_found` when the dispatcher does not have it."""


class RingLoop:
    """Rings open orders again until the dispatcher has answered, and takes back what was withdrawn."""

    def __init__(self, database: Database, clock: Clock, executions: Executions, cancel: Cancel) -> None:
        self._database = database
        self._clock = clock
        self._executions = executions
        self._cancel = cancel
        self._absent: dict[str, int] = {}

    async def step(self) -> bool | None:
        """Ring one batch; True when there may be more."""
        count, withdrawing = await self._database.transact(self._ring)
        ended = [row["id"] for row in withdrawing if await self._ended(row)]
        if ended:

            async def close(tx: Transaction) -> None:
                await admissions.withdrawn(tx, ended, await tx.now_ms())

            await self._database.transact(close)
        return True if count == BATCH_ITEMS else None

    async def _ended(self, row: Row) -> bool:
        """Whether a withdrawn run can start no more. What is not known is asked again, however long that takes."""
        absent = self._absent.pop(row["id"], 0) + 1
        try:
            await self._cancel(row["project"], row["run_id"])
        except Ql3Error as error:
            if error.code != "not_found":
                log.warning("a withdrawn run was not cancelled yet", run=row["run_id"], error=error.code)
                return False
            # Its order may be under way still, and may wait as long as the dispatcher is away.
            starts_ms = max(row["not_before_ms"] or 0, row["created_at_ms"])
            if self._clock.now_ms() < starts_ms + WITHDRAW_KEPT_MS:
                return False
            if absent >= WITHDRAW_ABSENT:
                return True
            if len(self._absent) >= ABSENT_KEPT:
                self._absent.clear()
            self._absent[row["id"]] = absent
            return False
        return True

    async def _ring(self, tx: Transaction) -> tuple[int, list[Row]]:
        now_ms = await tx.now_ms()
        rows = await admissions.due(tx, now_ms, BATCH_ITEMS)
        again: list[Admission] = []
        for row in rows:
            if row["status"] != "open":
                continue
            try:
                again.append(await admission_of(tx, self._executions, row))
            except Ql3Error as error:
                log.error("an open order cannot be rung", order=row["id"], error=error.code)
        await queue_orders(tx, again)
        await admissions.rung(tx, {row["id"]: next_ring_ms(row["rings"] + 1, now_ms) for row in rows})
        return len(rows), [row for row in rows if row["status"] == "withdrawing"]


class PruneLoop:
    """Deletes orders that were closed long ago, a page at a time."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def step(self) -> bool | None:
        """Delete one page; True when there may be more."""
        return True if await self._database.transact(self._prune) == BATCH_ITEMS else None

    async def _prune(self, tx: Transaction) -> int:
        passed_ms = self._clock.now_ms() - KEPT_MS
        count, through_ms = await admissions.prune(tx, await tx.now_ms() - KEPT_MS, BATCH_ITEMS, passed_ms)
        if through_ms:
            await schedules.note_pruned(tx, through_ms)
        return count
