"""A new run like an ended one, on somebody's request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from schemas.errors import Ql3Error
from schemas.identity import PolicyDecision, Subject
from schemas.runs import RunOrder, RunRetry
from services.dispatcher import reading
from services.dispatcher.records import RunRecord
from services.dispatcher.store import cases, runs
from services.dispatcher.store.revisions import Revisions
from services.dispatcher.submission import submit
from services.kit import audit
from services.kit.database import Transaction


class Retried(NamedTuple):
    """The new run, or the one that the same request made before."""

    run: RunRecord
    replayed: bool


async def labels(tx: Transaction, revisions: Revisions, question: RunRetry) -> Mapping[str, str]:
    """The labels of the revision that the new run will have; none of one that cannot be read, and so not be run.

    Raises `not_found`.
    """
    old = await reading.find(tx, question.project, question.run)
    pinned = (await revisions.read(tx, [old.revision_digest])).get(old.revision_digest)
    return {} if pinned is None else pinned.terms.labels


async def retry(
    tx: Transaction,
    revisions: Revisions,
    question: RunRetry,
    decision: PolicyDecision | str,
    *,
    hold: bool = False,
) -> Retried:
    """Makes the new run, with the same frozen revision and inputs; it points to the old one. With `hold` it waits for
    an approval, whatever its task says.

    Raises `not_found`, `invalid_transition` while the old one has not ended, `conflict` when the new id is taken.
    """
    old = await reading.find(tx, question.project, question.run)
    taken = (await cases.load_runs(tx, [question.new_run_id], lock=False)).get(question.new_run_id)
    if taken is not None:
        if taken.retry_of_run_id != old.id or taken.project_id != old.project_id:
            raise Ql3Error("conflict", "This id is taken.", field="new_run_id")
        return Retried(taken, replayed=True)
    if old.finished_at_ms is None:
        raise Ql3Error("invalid_transition", "The run has not ended.", data={"status": old.status})
    inputs = (await runs.inputs(tx, [old.id])).get(old.id)
    order = RunOrder(
        order_id=question.new_run_id,
        run_id=question.new_run_id,
        project=old.project_id,
        revision=old.revision_digest,
        trigger_type="retry",
        requested_by=Subject(type=question.actor.type, id=question.actor.id),
        created_at_ms=await tx.now_ms(),
        idempotency_key=f"retry:{question.new_run_id}",
        priority=old.priority,
        inputs=None if inputs is None else msgspec.json.decode(inputs),
        parent_run_id=old.parent_run_id,
        hold=hold,
    )
    (outcome,) = await submit(tx, revisions, {}, [order], retry_of={order.run_id: old.id})
    if outcome.run is None:
        raise Ql3Error(outcome.error or "internal_error", outcome.detail)
    await audit.append(tx, question.actor, "run.retry", old.project_id, old.id, decision, {"new_run": outcome.run.id})
    return Retried(outcome.run, outcome.replayed)
