"""Cancel intents in the ledger: recorded, converged at once where nothing runs, delivered where something may."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from schemas import limits
from schemas.errors import Ql3Error
from schemas.identity import PolicyDecision
from schemas.runs import ActorType, CancelReason, RunCancel
from schemas.workers import CancelAttempts, StopItem
from services.dispatcher import cancel
from services.dispatcher.records import CancellationRecord, Case, RunRecord
from services.dispatcher.run import request_cancel
from services.dispatcher.store import cancellations, cases, holds, runs
from services.dispatcher.store.cases import Change
from services.dispatcher.store.revisions import Revisions
from services.kit import audit
from services.kit.database import Transaction
from services.kit.ids import new_id

PAGE = 128


class Requested(NamedTuple):
    """The cases as written, and whether a worker has to be told now."""

    cases: list[Case]
    deliver: bool


async def request(
    tx: Transaction,
    held: Sequence[Case],
    reason: CancelReason,
    *,
    actor_type: ActorType,
    grace_of: Callable[[RunRecord], int],
    now: int,
    actor_id: str | None = None,
) -> Requested:
    """Asks for the end of runs that the caller holds. Asking again re-arms a delivery and changes nothing else."""
    executing = [c.attempt.id for c in held if c.attempt is not None and c.attempt.status in cancel.EXECUTING]
    known = await cancellations.read(tx, executing) if executing else {}
    changes: list[Change] = []
    new: list[CancellationRecord] = []
    again: list[CancellationRecord] = []
    unheld: list[str] = []
    for case in held:
        asked = request_cancel(case, reason, now, actor_type=actor_type, actor_id=actor_id)
        after = asked or case
        if after.run.cancel_reason is None or after.run.finished_at_ms is not None:
            continue
        ended = cancel.converge(after, now)
        if ended is not None:
            if case.run.status == "waiting_approval":
                unheld.append(case.run.id)
            changes.append(Change(case, ended))
            continue
        attempt_id = after.run.attempt_id or ""
        record = known.get(attempt_id)
        if record is None:
            new.append(cancel.delivery(after, new_id(), grace_of(after.run), now))
        elif asked is not None or record.status == "blocked":
            again.append(cancel.rearmed(record, after, now))
        if asked is not None:
            changes.append(Change(case, after))
    written = await cases.write(tx, changes)
    await cancellations.add(tx, new)
    await cancellations.update(tx, again)
    if unheld:
        await holds.close(tx, unheld, now)
    return Requested(written, bool(new or again))


async def deliver(tx: Transaction, now: int) -> tuple[list[tuple[str, CancelAttempts]], bool]:
    """Takes due deliveries in hand; answers orders (worker, message) to ring after the commit, and whether more wait.

    The order stays open in its row, so that one that is lost on the way is rung again.
    """
    run_ids = await cancellations.due(tx, now, PAGE)
    if not run_ids:
        return [], False
    held = await cases.load(tx, run_ids, policies=False)
    by_attempt = await cancellations.read(tx, [c.attempt.id for c in held.values() if c.attempt is not None])
    changes: list[Change] = []
    updates: list[CancellationRecord] = []
    stops: dict[str, list[StopItem]] = {}
    for case in held.values():
        record = by_attempt.get(case.run.attempt_id or "")
        if record is None or record.next_attempt_at_ms is None or record.next_attempt_at_ms > now:
            continue
        record = cancel.delivered(record, now)
        updates.append(record)
        told = cancel.tell(case, record)
        if told is not None:
            changes.append(Change(case, told))
        stops.setdefault(record.worker_id, []).append(stop_item(record))
    await cases.write(tx, changes)
    await cancellations.update(tx, updates)
    orders = [(worker, CancelAttempts(worker=worker, stops=items)) for worker, items in sorted(stops.items())]
    return orders, len(run_ids) == PAGE


def stop_item(record: CancellationRecord) -> StopItem:
    """What the worker is told."""
    return StopItem(
        attempt_id=record.attempt_id,
        dispatch_id=record.dispatch_id,
        lease_generation=record.lease_generation,
        reason=record.reason,
        grace_ms=record.grace_ms,
    )


class Position(NamedTuple):
    """Where a sweep over intents goes on."""

    at_ms: int = -1
    run_id: str = ""


async def sweep(tx: Transaction, revisions: Revisions, position: Position, now: int) -> Position:
    """Converges runs whose intent was recorded but not carried through, a page at a time; wraps around.

    The position moves over what must wait, so that no stuck run hides another.
    """
    run_ids = await runs.cancel_open(tx, position, PAGE)
    if not run_ids:
        return Position()
    held = await cases.load(tx, run_ids)
    pinned = await revisions.read(tx, {c.run.revision_digest for c in held.values()})

    def grace(run: RunRecord) -> int:
        revision = pinned.get(run.revision_digest)
        return limits.GRACE_DEFAULT_MS if revision is None else revision.execution.grace_ms

    executing = [c for c in held.values() if c.attempt is not None and c.attempt.status in cancel.EXECUTING]
    known = await cancellations.read(tx, [c.run.attempt_id or "" for c in executing]) if executing else {}
    undelivered = [c for c in executing if c.run.attempt_id not in known]
    await cancellations.add(tx, [cancel.delivery(c, new_id(), grace(c.run), now) for c in undelivered])
    changes: list[Change] = []
    for case in held.values():
        ended = cancel.converge(case, now)
        if ended is not None:
            changes.append(Change(case, ended))
    await cases.write(tx, changes)
    await holds.close(tx, [change.before.run.id for change in changes if change.before is not None], now)
    last = max(held.values(), key=lambda c: (c.run.cancel_requested_at_ms or 0, c.run.id), default=None)
    if last is None or len(run_ids) < PAGE:
        return Position()
    return Position(last.run.cancel_requested_at_ms or 0, last.run.id)


async def cancel_run(
    tx: Transaction, revisions: Revisions, question: RunCancel, decision: PolicyDecision | str
) -> tuple[RunRecord, bool]:
    """A person's or a rule's cancel of one run; the run as it stands, and whether a worker has to be told.

    Raises `not_found`, or `invalid` for a reason that is not theirs. A run that has ended, or was asked already, is
    answered as it is.
    """
    if question.reason in ("timeout", "reconcile"):
        raise Ql3Error("invalid", "This reason is the ledger's own.", field="reason")
    now = await tx.now_ms()
    case = await cases.load_one(tx, question.project, question.run)
    if case is None:
        raise Ql3Error("not_found", "There is no such run in this project.", field="run")
    if case.run.finished_at_ms is not None:
        return case.run, False
    pinned = await revisions.read(tx, [case.run.revision_digest])
    revision = pinned.get(case.run.revision_digest)
    grace_ms = limits.GRACE_DEFAULT_MS if revision is None else revision.execution.grace_ms
    actor = question.actor
    asked = await request(
        tx, [case], question.reason, actor_type=actor.type, actor_id=actor.id, grace_of=lambda _: grace_ms, now=now
    )
    if asked.cases or asked.deliver:
        await audit.append(
            tx, actor, "run.cancel", question.project, question.run, decision, {"reason": question.reason}
        )
    return (asked.cases[0].run if asked.cases else case.run), asked.deliver
