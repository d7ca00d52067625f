"""Submission: orders become runs, a batch in one transaction, each order once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from schemas import limits as bounds
from schemas.approvals import Binding, HoldOrder, preview_digest, risk_of
from schemas.identity import Subject
from schemas.runs import RunOrder, Submitted
from schemas.tasks import ExecutionRevision
from services.dispatcher import cancelling, overlap, placement
from services.dispatcher.placement import Limit
from services.dispatcher.records import Case, RunRecord
from services.dispatcher.run import (
    action_digest,
    admit,
    end_unstarted,
    hold,
    lane_of,
    queue,
    request_digest,
)
from services.dispatcher.store import cases, holds, limits, refused, runs
from services.dispatcher.store.cases import Change
from services.dispatcher.store.holds import HoldRecord
from services.dispatcher.store.refused import Refusal
from services.dispatcher.store.revisions import Revisions
from services.dispatcher.views import run_view
from services.kit.database import Transaction
from services.kit.ids import new_id

_json = msgspec.json.Encoder()
APPROVAL_MOST_MS = 86_400_000
_PREVIEW_CHARS = 400
"""A preview is at most 8 KiB, and one character may take six bytes of JSON."""


class Outcome(NamedTuple):
    """What became of one order: the run as committed, or a code; `queued` says that it may be placed now."""

    order_id: str
    run: RunRecord | None = None
    replayed: bool = False
    error: str | None = None
    detail: str | None = None

    def answer(self) -> Submitted:
        """As the sender reads it."""
        return Submitted(
            order_id=self.order_id,
            run=None if self.run is None else run_view(self.run),
            replayed=self.replayed,
            error=self.error,
            error_detail=self.detail,
        )


async def submit(
    tx: Transaction,
    revisions: Revisions,
    offered: Mapping[str, ExecutionRevision],
    orders: Sequence[RunOrder],
    *,
    retry_of: Mapping[str, str] | None = None,
) -> list[Outcome]:
    """Commits a batch of at most 256 orders; outcomes stand in the orders' order.

    An order that was committed before is answered with its run, or with its refusal. The same idempotency key for
    another request is refused, and so is an approved action whose dispatch id was closed. `retry_of` names, for a new
    run's id, the ended run that it repeats.
    """
    now = await tx.now_ms()
    pinned = await revisions.pin(tx, offered, now)
    missing = {order.revision for order in orders} - set(pinned)
    if missing:
        pinned |= await revisions.read(tx, missing)
    work = _Batch(tx, now, pinned, await _closed(tx, orders), retry_of or {})
    await work.prepare(orders)
    # Behind the locks of the overlap rules: another dispatcher may just have answered a copy of the same order.
    known_ids, known_keys = await _known(tx, orders)
    refusals = await refused.find(tx, [(o.project, o.idempotency_key) for o in orders if _is_instant(o)])
    outcomes: list[Outcome] = []
    for order in orders:
        wanted = request_digest(order)
        key = (order.project, order.idempotency_key)
        known = known_ids.get(order.run_id) or known_keys.get(key)
        if known is not None:
            same = known.request_digest == wanted and known.project_id == order.project
            outcomes.append(
                Outcome(order.order_id, known, replayed=True)
                if same
                else Outcome(order.order_id, error="idempotency_conflict")
            )
            continue
        refusal = refusals.get(key) or work.refused.get(key)
        if refusal is not None:
            same = refusal.request_digest == wanted
            outcomes.append(
                Outcome(order.order_id, replayed=True, error=refusal.error, detail=refusal.detail)
                if same
                else Outcome(order.order_id, error="idempotency_conflict")
            )
            continue
        outcome = await work.enter(order, wanted)
        if outcome.run is not None:
            known_ids[order.run_id] = known_keys[key] = outcome.run
        outcomes.append(outcome)
    written = {case.run.id: case.run for case in await work.write()}
    return [
        outcome._replace(run=written[outcome.run.id])
        if outcome.run is not None and outcome.run.id in written
        else outcome
        for outcome in outcomes
    ]


async def _known(
    tx: Transaction, orders: Sequence[RunOrder]
) -> tuple[dict[str, RunRecord], dict[tuple[str, str], RunRecord]]:
    by_id = await cases.load_runs(tx, (order.run_id for order in orders), lock=False)
    by_key: dict[tuple[str, str], RunRecord] = {}
    for project in sorted({order.project for order in orders}):
        keys = [order.idempotency_key for order in orders if order.project == project]
        for run in await runs.by_keys(tx, project, keys):
            by_key[(project, run.idempotency_key)] = run
    return by_id, by_key


def _is_instant(order: RunOrder) -> bool:
    return order.trigger_id is not None and order.scheduled_for_ms is not None


async def _closed(tx: Transaction, orders: Sequence[RunOrder]) -> set[str]:
    # An approved action's idempotency key is its dispatch id.
    ids = [order.idempotency_key for order in orders if order.trigger_type == "approved_action"]
    if not ids:
        return set()
    return {dispatch_id for dispatch_id, r in (await holds.receipts(tx, ids)).items() if r.outcome == "closed"}


class _Batch:
    """Orders of one transaction on their way into the ledger."""

    def __init__(
        self,
        tx: Transaction,
        now: int,
        revisions: Mapping[str, ExecutionRevision],
        closed: set[str],
        retry_of: Mapping[str, str],
    ) -> None:
        self._tx = tx
        self._now = now
        self._revisions = revisions
        self._closed = closed
        self._retry_of = retry_of
        self._lanes: dict[str, str] = {}
        self._changes: list[Change] = []
        self._inputs: dict[str, str] = {}
        self._holds: list[HoldRecord] = []
        self.refused: dict[tuple[str, str], Refusal] = {}
        """Instants that this batch skips."""
        self._open: dict[tuple[str, str], list[overlap.Open]] = {}

    async def prepare(self, orders: Sequence[RunOrder]) -> None:
        """Writes the limits that these orders' revisions name; the task's row is the lock of its overlap rule."""
        wanted: dict[Limit, int] = {}
        for revision in {order.revision: self._revisions.get(order.revision) for order in orders}.values():
            if revision is None:
                continue
            for limit in revision.terms.concurrency:
                wanted[Limit(revision.project, "key", limit.key)] = limit.limit
            most = placement.task_limit(revision)
            if most is not None:
                wanted[Limit(revision.project, "task", revision.task_id)] = most
        if wanted:
            await limits.put(self._tx, wanted, self._now)
            await limits.lock(self._tx, wanted)

    async def enter(self, order: RunOrder, wanted_digest: str) -> Outcome:
        """One new run, as far as it goes now."""
        revision = self._revisions.get(order.revision)
        if revision is None:
            return Outcome(order.order_id, error="revision_unavailable", detail="The revision did not come along.")
        if revision.project != order.project:
            return Outcome(order.order_id, error="invalid", detail="The revision belongs to another project.")
        if order.trigger_type == "approved_action" and order.idempotency_key in self._closed:
            return Outcome(order.order_id, error="conflict", detail="This approved action was closed.")
        lane = self._lanes.get(order.revision)
        if lane is None:
            lane = self._lanes[order.revision] = lane_of(revision)
        case = admit(order, revision, lane, wanted_digest, self._now)
        if order.run_id in self._retry_of:
            case = replace(case, run=replace(case.run, retry_of_run_id=self._retry_of[order.run_id]))
        if order.inputs is not None:
            inputs = _json.encode(order.inputs)
            if len(inputs) > bounds.SPEC_BYTES:
                # An offer that is too large for a message would be rung for ever.
                return Outcome(order.order_id, error="too_large", detail="The inputs are larger than 64 KiB.")
            self._inputs[order.run_id] = inputs.decode()
        case = await self._go_on(case, revision, hold_it=order.hold)
        if case.run.finished_at_ms is not None and _is_instant(order):
            # An instant that its task skips is one more missed instant of its trigger, not one more cancelled run.
            code, summary = case.run.error_code or "conflict", case.run.error_summary or ""
            refusal = Refusal(order.project, order.idempotency_key, wanted_digest, code, summary)
            self.refused[order.project, order.idempotency_key] = refusal
            return Outcome(order.order_id, error=code, detail=summary)
        self._changes.append(Change(None, case))
        return Outcome(order.order_id, case.run)

    async def _go_on(self, case: Case, revision: ExecutionRevision, *, hold_it: bool) -> Case:
        terms, now = revision.terms, self._now
        held = terms.needs_approval or hold_it
        if terms.overlap.policy != "allow" and not (held and overlap.asks_ahead(case.run)):
            entry = await self._overlap(case, revision)
            if entry.refused is not None:
                return end_unstarted(
                    case, "cancelled", now, error_code=entry.refused, summary=OVERLAP_SUMMARY[entry.refused]
                )
        if held:
            waiting = hold(case)
            self._holds.append(
                HoldRecord(
                    run_id=case.run.id,
                    order_id=new_id(),
                    action_digest=action_digest(case.run, self._inputs.get(case.run.id)),
                    expires_at_ms=_hold_ends(case.run, terms.approval_ttl_ms, now),
                    next_ring_at_ms=now,
                )
            )
            return waiting
        return queue(case, new_id(), terms.placement.executor, terms.queue_timeout_ms, now)

    async def _overlap(self, case: Case, revision: ExecutionRevision) -> overlap.Entry:
        key = (revision.project, revision.task_id)
        others = self._open.get(key)
        if others is None:
            found = await runs.open_of_task(self._tx, *key, 1000, overlap.ASKS_AHEAD_MS)
            others = self._open[key] = [overlap.Open(*row) for row in found]
        entry = overlap.enter(revision.terms.overlap, others)
        if entry.replaces:
            # Those of this same batch are not in the table yet; they are replaced where they stand.
            await self._replace(set(entry.replaces))
            others.clear()
        if entry.refused is None:
            others.append(overlap.Open(case.run.id, "queued"))
        return entry

    async def _replace(self, run_ids: set[str]) -> None:
        for index, change in enumerate(self._changes):
            if change.after.run.id in run_ids:
                run_ids.discard(change.after.run.id)
                ended = end_unstarted(
                    change.after, "cancelled", self._now, error_code=overlap.REPLACED,
                    summary=OVERLAP_SUMMARY[overlap.REPLACED],
                )  # fmt: skip
                self._changes[index] = Change(None, ended)
        if run_ids:
            held = await cases.load(self._tx, run_ids)
            await cancelling.request(
                self._tx, list(held.values()), "policy", actor_type="system", grace_of=self._grace, now=self._now
            )

    def _grace(self, run: RunRecord) -> int:
        revision = self._revisions.get(run.revision_digest)
        return bounds.GRACE_DEFAULT_MS if revision is None else revision.execution.grace_ms

    async def write(self) -> list[Case]:
        """Writes everything."""
        written = await cases.write(self._tx, self._changes, self._inputs)
        ended = {case.run.id for case in written if case.run.status != "waiting_approval"}
        await holds.add(self._tx, [hold for hold in self._holds if hold.run_id not in ended])
        await refused.keep(self._tx, list(self.refused.values()), self._now)
        return written


def _hold_ends(run: RunRecord, ttl_ms: int, now: int) -> int:
    # Counted from the start that it is about; a request lives a day at most.
    return min(max(now, run.not_before_ms or 0) + ttl_ms, now + APPROVAL_MOST_MS)


OVERLAP_SUMMARY = {
    overlap.SKIPPED: "Another run of this task was not over yet.",
    overlap.QUEUE_FULL: "As many runs of this task as may wait were waiting already.",
    overlap.REPLACED: "A newer run of this task took its place.",
}


def _cut(text: str) -> str:
    return text if len(text) <= _PREVIEW_CHARS else f"{text[:_PREVIEW_CHARS]}…"


def hold_order(record: HoldRecord, run: RunRecord, revision: ExecutionRevision, inputs: str | None) -> HoldOrder:
    """The order to approval for one run that waits."""
    preview: dict[str, Any] = {
        "task": run.task_name,
        "task_revision": run.task_revision,
        "command": _cut(" ".join(revision.execution.command)),
        "trigger": run.trigger_type,
        "secrets": sorted({v.secret.secret for v in revision.execution.environment if v.secret is not None})[:32],
    }
    if inputs is not None:
        preview["inputs"] = _cut(inputs)
    asker = _subject(run)
    if run.trigger_id and asker.type == "system":
        # A person who runs a trigger asks for himself: nobody decides about his own run in a trigger's name.
        asker = Subject(type="system", id=f"trigger/{run.trigger_id}")
    return HoldOrder(
        order_id=record.order_id,
        request_id=run.id,
        project=run.project_id,
        binding=Binding(
            permission="run.start",
            action_type="run.release",
            action_ref=run.id,
            action_digest=record.action_digest,
            preview_digest=preview_digest(preview),
        ),
        preview=preview,
        risk=risk_of(revision.terms.labels),
        requested_by=asker,
        requested_at_ms=run.created_at_ms,
        expires_at_ms=record.expires_at_ms,
        labels=dict(revision.terms.labels),
        not_before_ms=_due(record, run),
    )


def _due(record: HoldRecord, run: RunRecord) -> int | None:
    # What is due after the end of the request is released when it is approved.
    due = run.not_before_ms
    return due if due is not None and overlap.asks_ahead(run) and due < record.expires_at_ms else None


def _subject(run: RunRecord) -> Subject:
    return msgspec.convert({"type": run.requested_by_type, "id": run.requested_by_id}, Subject)
