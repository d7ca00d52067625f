"""Held runs in the ledger: the order to approval, the release, the end, and the closing of a dispatch id."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

from msgspec.structs import replace

from schemas.approvals import RequestApprovals
from schemas.canonical import digest
from schemas.errors import Ql3Error
from schemas.runs import DispatchClose, RunRelease, RunReleaseAnswer
from schemas.tasks import ExecutionRevision
from services.dispatcher import cancelling, overlap, placement
from services.dispatcher.placement import Limit
from services.dispatcher.records import Case
from services.dispatcher.run import end_unstarted, queue
from services.dispatcher.store import cases, holds, limits, runs
from services.dispatcher.store.cases import Change
from services.dispatcher.store.holds import ReceiptRecord
from services.dispatcher.store.revisions import Revisions
from services.dispatcher.submission import OVERLAP_SUMMARY, hold_order
from services.kit.database import Transaction, UniqueViolation
from services.kit.ids import new_id
from services.kit.orders import next_ring_ms

PAGE: Final = 64
SENDER: Final = "dispatcher"


async def ring(tx: Transaction, revisions: Revisions) -> tuple[RequestApprovals | None, bool]:
    """The orders for approval that are due, to be sent after the commit, and whether more wait."""
    now = await tx.now_ms()
    due = await holds.due(tx, now, PAGE)
    if not due:
        return None, False
    waiting = await cases.load_runs(tx, [hold.run_id for hold in due], lock=False)
    pinned = await revisions.read(tx, {run.revision_digest for run in waiting.values()})
    given = await runs.inputs(tx, waiting)
    orders = [
        hold_order(hold, waiting[hold.run_id], pinned[waiting[hold.run_id].revision_digest], given.get(hold.run_id))
        for hold in due
        if waiting[hold.run_id].revision_digest in pinned
    ]
    await holds.rung(tx, [(next_ring_ms(hold.rings + 1, now), hold.run_id) for hold in due])
    message = RequestApprovals(sender=SENDER, requests=orders) if orders else None
    return message, len(due) == PAGE


async def acked(tx: Transaction, order_ids: Iterable[str]) -> int:
    """Approval has committed these requests."""
    return await holds.acked(tx, order_ids)


async def release(tx: Transaction, revisions: Revisions, question: RunRelease) -> tuple[RunReleaseAnswer, bool]:
    """Carries out a decision about a held run, once per dispatch id; also whether something may be placed now.

    A dispatch id that was closed releases nothing. Raises `not_found`, or `conflict` when the action that was approved
    is not the one that waits.
    """
    now = await tx.now_ms()
    case = await cases.load_one(tx, question.project, question.run)
    if case is None:
        raise Ql3Error("not_found")
    known = (await holds.receipts(tx, [question.dispatch_id])).get(question.dispatch_id)
    if known is not None:
        if known.outcome != "closed" and known.run_id != question.run:
            raise Ql3Error("conflict", "This dispatch id was used for another run.")
        return _answer(known, case), False
    if case.run.status != "waiting_approval":
        return (
            RunReleaseAnswer(dispatch_id=question.dispatch_id, outcome="not_waiting", run_status=case.run.status),
            False,
        )
    hold = (await holds.read(tx, [question.run])).get(question.run)
    if question.outcome == "approved" and (hold is None or hold.action_digest != question.action_digest):
        raise Ql3Error("conflict", "What was approved is not what this run is.", field="action_digest")
    after = await _decided(tx, revisions, case, question, now)
    (written,) = await cases.write(tx, [Change(case, after)])
    await holds.close(tx, [question.run], now)
    receipt = _receipt(question, written.run.status, now)
    try:
        await holds.add_receipt(tx, receipt)
    except UniqueViolation:
        # Closed, or used for another run, by a transaction that we did not see: nothing of ours may stand.
        raise Ql3Error("conflict", "This dispatch id was just used.") from None
    return _answer(receipt, written), written.run.status == "queued"


async def _decided(tx: Transaction, revisions: Revisions, case: Case, question: RunRelease, now: int) -> Case:
    if question.outcome == "expired":
        return end_unstarted(case, "timed_out", now, error_code="approval_expired")
    if question.outcome != "approved":
        ended = end_unstarted(case, "cancelled", now, error_code="approval_rejected")
        return _with_reason(ended, now)
    pinned = await revisions.read(tx, [case.run.revision_digest])
    revision = pinned.get(case.run.revision_digest)
    if revision is None:
        raise Ql3Error("revision_unavailable")
    terms = revision.terms
    refused = await _overlap(tx, case, revision, now) if overlap.asks_ahead(case.run) else None
    if refused is not None:
        return end_unstarted(case, "cancelled", now, error_code=refused, summary=OVERLAP_SUMMARY[refused])
    return queue(case, new_id(), terms.placement.executor, terms.queue_timeout_ms, now)


async def _overlap(tx: Transaction, case: Case, revision: ExecutionRevision, now: int) -> str | None:
    """What asked ahead of its time meets the others of its task now that it starts; why it may not, if so."""
    terms = revision.terms
    if terms.overlap.policy == "allow":
        return None
    most = placement.task_limit(revision)
    if most is not None:
        limit = Limit(revision.project, "task", revision.task_id)
        await limits.put(tx, {limit: most}, now)
        await limits.lock(tx, [limit])
    found = await runs.open_of_task(tx, revision.project, revision.task_id, 1000, overlap.ASKS_AHEAD_MS)
    entry = overlap.enter(terms.overlap, [overlap.Open(*row) for row in found])
    if entry.refused is None and entry.replaces:
        others = await cases.load(tx, entry.replaces)
        await cancelling.request(
            tx,
            list(others.values()),
            "policy",
            actor_type="system",
            grace_of=lambda _: revision.execution.grace_ms,
            now=now,
        )
    return entry.refused


def _with_reason(case: Case, now: int) -> Case:
    return replace(case, run=replace(case.run, cancel_requested_at_ms=now, cancel_reason="policy"))


def _receipt(question: RunRelease, status: str, now: int) -> ReceiptRecord:
    outcome = "released" if status == "queued" else "ended"
    evidence = digest(
        "ql3.run-release-receipt.v1",
        {
            "dispatch": question.dispatch_id,
            "run": question.run,
            "approval": question.approval_id,
            "action": question.action_digest or "",
            "outcome": outcome,
            "status": status,
            "at": now,
        },
    )
    return ReceiptRecord(
        dispatch_id=question.dispatch_id,
        project_id=question.project,
        outcome=outcome,
        evidence_digest=evidence,
        created_at_ms=now,
        run_id=question.run,
        approval_id=question.approval_id,
        action_digest=question.action_digest,
        run_status=status,
    )


def _answer(receipt: ReceiptRecord, case: Case) -> RunReleaseAnswer:
    return RunReleaseAnswer(
        dispatch_id=receipt.dispatch_id,
        outcome=_outcome(receipt),
        run_status=case.run.status,
        evidence_digest=receipt.evidence_digest,
    )


def _outcome(receipt: ReceiptRecord) -> Literal["released", "ended", "closed"]:
    return "released" if receipt.outcome == "released" else "ended" if receipt.outcome == "ended" else "closed"


async def close(tx: Transaction, question: DispatchClose) -> RunReleaseAnswer:
    """A tombstone for a dispatch id, so that a late release or create is refused. Answers what was committed before."""
    now = await tx.now_ms()
    known = (await holds.receipts(tx, [question.dispatch_id])).get(question.dispatch_id)
    if known is None:
        created = await runs.by_keys(tx, question.project, [question.dispatch_id])
        if created:
            return RunReleaseAnswer(dispatch_id=question.dispatch_id, outcome="released", run_status=created[0].status)
        known = ReceiptRecord(
            dispatch_id=question.dispatch_id,
            project_id=question.project,
            outcome="closed",
            evidence_digest=digest(
                "ql3.run-release-receipt.v1", {"dispatch": question.dispatch_id, "outcome": "closed", "at": now}
            ),
            created_at_ms=now,
        )
        await holds.add_receipt(tx, known)
    status = None
    if known.run_id is not None:
        run = (await cases.load_runs(tx, [known.run_id], lock=False)).get(known.run_id)
        status = run.status if run else None
    return RunReleaseAnswer(
        dispatch_id=question.dispatch_id,
        outcome=_outcome(known),
        run_status=status,
        evidence_digest=known.evidence_digest,
    )
