"""The start barrier in the ledger: a batch of requests, one transaction, grants and recorded refusals."""

from __future__ import annotations

from collections.abc import Sequence

from schemas.errors import Ql3Error
from schemas.proof import CONTEXT_BODY, proof_holds
from schemas.tasks import ExecutionRevision
from schemas.workers import LeaseVerified, LeaseVerify, Refusal, StartAnswer, StartAttempts
from services.dispatcher import attempt as attempts
from services.dispatcher import fences
from services.dispatcher.lease import Held, check
from services.dispatcher.records import Refused
from services.dispatcher.store import cases, workers
from services.dispatcher.store.cases import Change
from services.dispatcher.store.revisions import Revisions
from services.kit.database import Transaction


async def start(tx: Transaction, revisions: Revisions, questions: Sequence[StartAttempts]) -> list[StartAnswer]:
    """Grants what the fences allow. The same question again gets the same grants while the leases live."""
    now = await tx.now_ms()
    run_of = await cases.runs_of_attempts(tx, [item.attempt_id for q in questions for item in q.attempts])
    before = await cases.load(tx, set(run_of.values()), policies=False)
    pinned = await revisions.read(tx, {case.run.revision_digest for case in before.values()})
    held = dict(before)
    rejected: list[fences.Rejection] = []
    answers: list[StartAnswer] = []
    for question in questions:
        fence = question.fence
        answer = StartAnswer(grants=[], refused=[])
        for item in question.attempts:
            case = held.get(run_of.get(item.attempt_id, ""))
            if case is None:
                answer.refused.append(Refusal(attempt_id=item.attempt_id, code="not_found"))
                continue
            try:
                if case.attempt is None or case.attempt.id != item.attempt_id:
                    raise Refused("fence_rejected", "attempts.start")
                timeout = _timeout(pinned.get(case.run.revision_digest))
                held[case.run.id], grant = attempts.start(case, fence, item, timeout, now)
            except Refused as refusal:
                answer.refused.append(Refusal(attempt_id=item.attempt_id, code=refusal.code))
                known = Held(item.attempt_id, item.lease_generation)
                rejected.append(fences.Rejection(case.run.id, refusal.code, refusal.what, known, fence.worker))
                continue
            answer.grants.append(grant)
        answers.append(answer)
    changes = [Change(case, held[run_id]) for run_id, case in before.items() if held[run_id] is not case]
    written = await cases.write(tx, changes)
    await fences.record(tx, rejected, {**held, **{case.run.id: case for case in written}})
    return answers


def _timeout(revision: ExecutionRevision | None) -> int | None:
    return None if revision is None else revision.execution.timeout_ms


async def verify(tx: Transaction, revisions: Revisions, question: LeaseVerify) -> LeaseVerified:
    """For the vault: whether this session holds this attempt at the start barrier now. Raises `fence_rejected`."""
    now = await tx.now_ms()
    run_of = await cases.runs_of_attempts(tx, [question.attempt_id])
    held = await cases.load(tx, run_of.values(), lock=False, policies=False)
    case = held.get(run_of.get(question.attempt_id, ""))
    if case is None or case.attempt is None:
        raise Ql3Error("fence_rejected")
    try:
        check(case.lease, question.fence, Held(question.attempt_id, question.lease_generation), now, "leases.verify")
    except Refused as refusal:
        raise Ql3Error(refusal.code if refusal.code != "not_found" else "fence_rejected") from None
    attempt = case.attempt
    if attempt.id != question.attempt_id or attempt.status != "starting" or attempt.token_digest is None:
        raise Ql3Error("fence_rejected")
    if not proof_holds(attempt.token_digest, attempt.id, question.sequence, CONTEXT_BODY, question.proof):
        raise Ql3Error("fence_rejected")
    if case.run.cancel_requested_at_ms is not None:
        raise Ql3Error("fence_rejected", "The run is being ended.")
    pinned = await revisions.read(tx, [case.run.revision_digest])
    revision = pinned.get(case.run.revision_digest)
    worker = (await workers.read(tx, [question.fence.worker])).get(question.fence.worker)
    if revision is None or worker is None:
        raise Ql3Error("revision_unavailable")
    return LeaseVerified(
        project=case.run.project_id, run_id=case.run.id, revision=revision, public_key=worker.public_key
    )
