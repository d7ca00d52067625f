"""What nobody reports: leases that ran out, times that are over, attempts that are due, and our own outage.

Each step takes a bounded page and works only on what it can move, so that nothing that is stuck stands before others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from schemas import limits, subjects
from schemas.workers import WorkerChanged
from services.dispatcher import attempt as attempts
from services.dispatcher import cancelling
from services.dispatcher import lease as leasing
from services.dispatcher.cancel import converge
from services.dispatcher.records import Case, RunRecord
from services.dispatcher.run import end_unstarted, queue
from services.dispatcher.store import cases, holds, leases, runs, workers
from services.dispatcher.store.cases import Change
from services.dispatcher.store.revisions import Revisions
from services.kit import outbox
from services.kit.database import Transaction
from services.kit.ids import new_id

PAGE = 128
HEARD_FOR_S = 2.5 * limits.BEAT_MS / 1000
"""Two beats and a half: so long we must have heard everybody before a silence counts."""
BREAK_S = 3.0
PATIENCE_MS = 120_000
APPROVAL_SLACK_MS = 60_000
"""Approval tells that a request ran out; after so long without it, the run ends by itself."""


class Step(NamedTuple):
    """What a step did: how many it moved, whether more wait, whether something may be placed or must be delivered."""

    moved: int
    more: bool = False
    place: bool = False
    deliver: bool = False


class Hearing:
    """Since when we can hear workers without a break, by our own monotonic clock in seconds.

    Several short outages of ours (a pause, a restart, a message server that is away) can together be longer than a
    lease. A started attempt is judged only when its worker had time enough to be heard, and was not; but in the end it
    is judged even by a dispatcher that is never well.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._looked = self._since = monotonic()

    def look(self, *, connected: bool) -> None:
        """Called at every turn of the timers; a turn that comes late was a break too."""
        now = self._monotonic()
        if not connected or now - self._looked > BREAK_S:
            self._since = now
        self._looked = now

    def patience_ms(self) -> int:
        """How long over the lease of a started attempt must be: 0 when a worker's silence is its own."""
        return 0 if self._monotonic() - self._since >= HEARD_FOR_S else PATIENCE_MS


async def reap(tx: Transaction, chance: Callable[[], float], *, patience_ms: int = 0) -> Step:
    """Judges leases that ran out: an offer that was never started goes back to the queue, a started attempt is lost.

    First looks whether it was us who were away: then every lease gets its time anew and nothing is judged. A started
    attempt is judged when its lease is over for `patience_ms`.
    """
    if await forgive(tx):
        return Step(0, more=True)
    now = await tx.now_ms()
    over = await leases.expired(tx, now, PAGE, started_by=now - patience_ms)
    if not over:
        return Step(0)
    # Locks are taken in one order everywhere: workers, runs, leases.
    await workers.lock(tx, {held.worker_id for held in over})
    before = await cases.load(tx, {held.run_id for held in over})
    changes: list[Change] = []
    silent: set[str] = set()
    for case in before.values():
        lease = case.lease
        if lease is None or lease.status != "leased" or lease.expires_at_ms > now:
            continue  # renewed, or judged by somebody else meanwhile
        if lease.token_digest is not None and lease.expires_at_ms > now - patience_ms:
            continue  # passed the barrier meanwhile
        silent.add(lease.worker_id)
        changes.append(Change(case, expired(case, now, chance())))
    await cases.write(tx, changes)
    await _silence(tx, silent, now)
    return Step(len(changes), len(over) == PAGE, place=bool(changes))


def expired(case: Case, now: int, chance: float) -> Case:
    """A case whose lease is over, judged."""
    assert case.attempt is not None
    if case.attempt.status != "claimed":
        return attempts.lost(case, now, chance)
    if case.run.cancel_requested_at_ms is not None:
        ended = converge(case, now)
        assert ended is not None
        return ended
    return leasing.release_unstarted(case, "expired", now)


async def _silence(tx: Transaction, ids: set[str], now: int) -> None:
    if not ids:
        return
    locked = await workers.lock(tx, ids)
    fresh = [worker for worker in locked.values() if worker.silent_since_ms is None]
    await workers.fell_silent(tx, [worker.id for worker in fresh], now)
    facts = [
        (
            subjects.event("worker", "-", worker.id, "offline"),
            WorkerChanged(
                worker=worker.id, status="offline", generation=worker.generation, slots=worker.slots, at_ms=now
            ),
        )
        for worker in fresh
    ]
    await outbox.facts(tx, facts)


async def forgive(tx: Transaction) -> bool:
    """Extends every lease when nobody has looked after the ledger for 15 s: our outage must not kill anybody's job.

    The stamp is written at a third of that, and only when it is old enough to be worth a write.
    """
    now = await tx.now_ms()
    age = now - await workers.stamp(tx)
    if age < limits.OUTAGE_MS // 3:
        return False
    age = now - await workers.stamp(tx, lock=True)
    if age > limits.OUTAGE_MS:
        await leases.extend_all(tx, now)
    await workers.set_stamp(tx, now)
    return age > limits.OUTAGE_MS


async def wake_retries(tx: Transaction, revisions: Revisions) -> Step:
    """Gives runs whose pause is over their next attempt."""
    now = await tx.now_ms()
    due = await runs.retry_due(tx, now, PAGE)
    if not due:
        return Step(0)
    before = await cases.load(tx, due)
    pinned = await revisions.read(tx, {case.run.revision_digest for case in before.values()})
    changes: list[Change] = []
    for case in before.values():
        policy = case.policy
        if policy is None or policy.next_attempt_at_ms is None or policy.next_attempt_at_ms > now:
            continue
        if case.run.status != "retry_wait":
            # Ended some other way; its time is taken away so that it does not stand before others.
            cleared = replace(case, policy=replace(policy, next_attempt_at_ms=None, version=policy.version + 1))
            changes.append(Change(case, cleared))
            continue
        revision = pinned.get(case.run.revision_digest)
        if revision is None:
            ended = end_unstarted(case, "cancelled", now, error_code="revision_unavailable")
            changes.append(Change(case, ended))
            continue
        terms = revision.terms
        changes.append(Change(case, queue(case, new_id(), terms.placement.executor, terms.queue_timeout_ms, now)))
    await cases.write(tx, changes)
    return Step(len(changes), len(due) == PAGE, place=bool(changes))


async def end_overdue(tx: Transaction, revisions: Revisions) -> Step:
    """Asks for the end of attempts whose time is over; the worker proves it, as for any cancel."""
    now = await tx.now_ms()
    due = await runs.overdue(tx, now, PAGE)
    if not due:
        return Step(0)
    before = await cases.load(tx, due)
    pinned = await revisions.read(tx, {case.run.revision_digest for case in before.values()})

    def grace(run: RunRecord) -> int:
        revision = pinned.get(run.revision_digest)
        return limits.GRACE_DEFAULT_MS if revision is None else revision.execution.grace_ms

    late = [case for case in before.values() if attempts.overdue(case, now)]
    asked = await cancelling.request(tx, late, "timeout", actor_type="system", grace_of=grace, now=now)
    return Step(len(asked.cases), len(due) == PAGE and bool(late), deliver=asked.deliver)


async def end_unplaced(tx: Transaction) -> Step:
    """Ends runs that waited in the queue longer than they may."""
    now = await tx.now_ms()
    due = await runs.queue_expired(tx, now, PAGE)
    if not due:
        return Step(0)
    before = await cases.load(tx, due)
    changes: list[Change] = []
    for case in before.values():
        run, attempt = case.run, case.attempt
        if run.queue_deadline_ms is None or run.queue_deadline_ms > now or attempt is None:
            continue
        if attempt.status != "claimed":
            continue
        ended = end_unstarted(
            case, "timed_out", now, error_code="queue_timeout", summary="It was not started within its queue time."
        )
        if case.lease is not None and case.lease.status == "leased":
            ended = replace(ended, lease=leasing.released(case.lease, "cancelled", now))
        changes.append(Change(case, ended))
    await cases.write(tx, changes)
    return Step(len(changes), len(due) == PAGE and bool(changes), place=bool(changes))


async def end_unapproved(tx: Transaction) -> Step:
    """Ends held runs whose approval ran out long ago and was not told."""
    now = await tx.now_ms()
    due = await holds.expired(tx, now - APPROVAL_SLACK_MS, PAGE)
    if not due:
        return Step(0)
    before = await cases.load(tx, due)
    changes = [
        Change(case, end_unstarted(case, "timed_out", now, error_code="approval_expired"))
        for case in before.values()
        if case.run.status == "waiting_approval"
    ]
    await cases.write(tx, changes)
    await holds.close(tx, due, now)
    return Step(len(changes), len(due) == PAGE)
