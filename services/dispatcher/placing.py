"""Placement in the ledger: free slots under the workers' locks, leases for what goes there, offers after the commit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from schemas import limits as bounds
from schemas.tasks import ExecutionRevision
from schemas.workers import Capabilities, OfferAttempts, OfferItem, SessionFence
from services.dispatcher import lease as leasing
from services.dispatcher.placement import Lane, Limit, Seat, lane_terms, plan
from services.dispatcher.records import Case, RunRecord, WorkerRecord
from services.dispatcher.store import cases, leases, limits, runs, workers
from services.dispatcher.store.cases import Change
from services.dispatcher.store.revisions import Revisions
from services.dispatcher.waiting import Known, Why, behind, standing_of, unreadable, why_not
from services.kit.database import Transaction
from services.kit.ids import new_id

LANES = 512
PER_PASS = bounds.BATCH_ITEMS
_WORKERS_LOOKED_AT = 1000
_OFFER_BYTES = bounds.BATCH_BYTES - 16 * 1024

Offer = tuple[str, OfferAttempts]
"""A worker's id and what it is offered."""


class Placed(NamedTuple):
    """What a pass did: offers to ring after the commit, and whether another pass may place more."""

    offers: list[Offer]
    placed: int
    more: bool
    last_lane: str


_NONE = Placed([], 0, False, "")


async def place(tx: Transaction, revisions: Revisions, after_lane: str = "") -> Placed:
    """Places up to 256 queued runs of a page of lanes behind `after_lane`; `last_lane` begins the next page.

    Of several dispatchers each fills workers that the others do not hold.
    """
    now = await tx.now_ms()
    seats = await seats_now(tx, now)
    total = sum(seat.free for seat in seats)
    if total <= 0:
        return _NONE
    names = await runs.lanes(tx, after_lane, LANES)
    if not names:
        return _NONE
    each = max(1, min(total, PER_PASS, max(4, 1024 // len(names))))
    waiting = await runs.waiting(tx, names, each)
    lanes = await _terms(tx, revisions, waiting)
    waiting = {name: found for name, found in waiting.items() if name in lanes}
    known = await limits.lock(tx, {limit for lane in lanes.values() for limit in lane.limits})
    live = await limits.live_by_limit(tx, known) if known else {}
    projects = {lane.project for lane in lanes.values()}
    by_project = await limits.live_by_project(tx, projects) if len(projects) > 1 else {}
    found = plan(lanes, waiting, seats, by_project, known, live)
    chosen = found.choices[:PER_PASS]
    held = await cases.complete(tx, [choice.run for choice in chosen], policies=False)
    changes: list[Change] = []
    keys: list[tuple[str, Limit]] = []
    for choice in chosen:
        case = held[choice.run.id]
        after = leasing.acquire(case, choice.worker, new_id(), now)
        changes.append(Change(case, after))
        if after.lease is not None:
            keys += [(after.lease.attempt_id, limit) for limit in choice.lane.limits if limit.kind == "key"]
    written = await cases.write(tx, changes)
    await limits.hold_keys(tx, keys)
    offers = await offers_for(tx, revisions, written)
    drained = any(len(r) == each for name, r in waiting.items() if name not in found.stuck)
    more = bool(chosen) and (len(found.choices) > PER_PASS or (drained and len(chosen) < total))
    last = names[-1] if len(names) == LANES else ""
    return Placed(offers, len(chosen), more or bool(last), last)


async def seats_now(tx: Transaction, now: int) -> list[Seat]:
    """Workers with their free slots. Slots are counted from live leases, never from what a worker claims."""
    online = await workers.seats(tx, now)
    if not online:
        return []
    taken = await workers.live_leases(tx, [worker.id for worker in online])
    return [Seat(worker, _capabilities(worker), max(0, worker.slots - taken.get(worker.id, 0))) for worker in online]


async def why(tx: Transaction, revisions: Revisions, run: RunRecord) -> Why:
    """Why a queued run is not placed, as things stand now."""
    now = await tx.now_ms()
    pinned = (await revisions.read(tx, [run.revision_digest])).get(run.revision_digest)
    if pinned is None:
        return unreadable()
    lane = lane_terms(run.lane, pinned)
    workers_now = await workers.page(tx, "", _WORKERS_LOOKED_AT)
    taken = await workers.live_leases(tx, [worker.id for worker in workers_now])
    known = [
        Known(worker, _capabilities(worker), max(0, worker.slots - taken.get(worker.id, 0)), standing_of(worker, now))
        for worker in workers_now
    ]
    most = await limits.read(tx, lane.limits)
    live = await limits.live_by_limit(tx, most) if most else {}
    found = why_not(run, lane, known, most, live, in_turn=pinned.terms.overlap.policy != "allow")
    return found or behind(await runs.ahead(tx, run))


async def _terms(tx: Transaction, revisions: Revisions, waiting: Mapping[str, Sequence[RunRecord]]) -> dict[str, Lane]:
    heads = {name: found[0].revision_digest for name, found in waiting.items()}
    pinned = await revisions.read(tx, heads.values())
    return {name: lane_terms(name, pinned[digest]) for name, digest in heads.items() if digest in pinned}


def _capabilities(worker: WorkerRecord) -> Capabilities:
    known = _decoded.get(worker.capabilities_digest)
    if known is None:
        if len(_decoded) > 1024:
            _decoded.clear()
        known = _decoded[worker.capabilities_digest] = msgspec.json.decode(worker.capabilities, type=Capabilities)
    return known


_decoded: dict[str, Capabilities] = {}


async def reoffer(tx: Transaction, revisions: Revisions, now: int, limit: int) -> tuple[list[Offer], bool]:
    """Offers again what was leased and not started yet, to the same session under the same fence."""
    run_ids = await leases.offer_due(tx, now, limit)
    if not run_ids:
        return [], False
    held = await cases.load(tx, run_ids, policies=False)
    changes: list[Change] = []
    for case in held.values():
        lease = case.lease
        if lease is None or lease.next_offer_at_ms is None or lease.next_offer_at_ms > now:
            continue
        if leasing.is_live(lease, now):
            again = msgspec.structs.replace(case, lease=leasing.reoffered(lease, now))
            changes.append(Change(case, again))
    written = await cases.write(tx, changes)
    return await offers_for(tx, revisions, written), len(run_ids) == limit


async def offers_for(tx: Transaction, revisions: Revisions, held: Sequence[Case]) -> list[Offer]:
    """Messages of at most 256 offers and 512 KiB, each with the revisions that it needs."""
    if not held:
        return []
    pinned = await revisions.read(tx, {case.run.revision_digest for case in held})
    given = await runs.inputs(tx, [case.run.id for case in held])
    by_session: dict[SessionFence, list[Case]] = {}
    for case in held:
        lease = case.lease
        assert lease is not None
        fence = SessionFence(
            worker=lease.worker_id, session_id=lease.worker_session_id, generation=lease.worker_generation
        )
        by_session.setdefault(fence, []).append(case)
    sizes = {digest: len(msgspec.json.encode(revision)) for digest, revision in pinned.items()}
    messages: list[Offer] = []
    for fence, group in by_session.items():
        items: list[OfferItem] = []
        needed: set[str] = set()
        size = 0
        for case in group:
            digest = case.run.revision_digest
            if digest not in pinned:
                continue
            inputs = given.get(case.run.id)
            more = 512 + len(inputs or "") + (0 if digest in needed else sizes[digest])
            if items and (size + more > _OFFER_BYTES or len(items) == bounds.BATCH_ITEMS):
                messages.append((fence.worker, _message(fence, items, needed, pinned)))
                items, needed, size = [], set[str](), 0
                more = 512 + len(inputs or "") + sizes[digest]
            items.append(_item(case, inputs))
            needed.add(digest)
            size += more
        if items:
            messages.append((fence.worker, _message(fence, items, needed, pinned)))
    return messages


def _message(
    fence: SessionFence, items: list[OfferItem], needed: set[str], pinned: Mapping[str, ExecutionRevision]
) -> OfferAttempts:
    revisions = [pinned[digest] for digest in sorted(needed)]
    return OfferAttempts(fence=fence, revisions=revisions, offers=items)


def _item(case: Case, inputs: str | None) -> OfferItem:
    run, lease = case.run, case.lease
    assert lease is not None
    return OfferItem(
        offer_id=lease.offer_id,
        attempt_id=lease.attempt_id,
        run_id=run.id,
        project=run.project_id,
        attempt=run.attempt,
        lease_generation=lease.lease_generation,
        revision=run.revision_digest,
        not_before_ms=run.not_before_ms,
        scheduled_for_ms=run.scheduled_for_ms,
        trigger_type=run.trigger_type,
        inputs=None if inputs is None else msgspec.json.decode(inputs),
    )
