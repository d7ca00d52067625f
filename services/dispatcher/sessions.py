"""Sessions of workers in the ledger: registration with adoption, heartbeats with renewal."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from schemas import limits, proof, subjects
from schemas.canonical import canonical
from schemas.errors import Ql3Error
from schemas.identity import DEFAULT_PROJECT, PolicyDecision
from schemas.workers import (
    JournalEntry,
    Refusal,
    Worker,
    WorkerBeat,
    WorkerBeaten,
    WorkerChanged,
    WorkerDrain,
    WorkerRegister,
    WorkerRegistered,
    WorkerStatus,
)
from services.dispatcher import attempt as attempts
from services.dispatcher import fences
from services.dispatcher import lease as leasing
from services.dispatcher.cancelling import stop_item
from services.dispatcher.lease import Held
from services.dispatcher.records import Case, LeaseRecord, Refused, WorkerRecord
from services.dispatcher.store import cancellations, cases, leases, workers
from services.dispatcher.store.cases import Change
from services.dispatcher.views import worker_view
from services.kit import audit, dispatches, outbox
from services.kit.database import Transaction

HELD_MOST = 4096


async def register(tx: Transaction, question: WorkerRegister, chance: Callable[[], float]) -> WorkerRegistered:
    """A new session, in one transaction with what becomes of everything that the worker held.

    Started leases that still live go on under the new session when the worker proves that it holds them; unstarted ones
    are released; what the worker itself says is gone is lost. A replay of the same session changes nothing.
    """
    now = await tx.now_ms()
    old = (await workers.lock(tx, [question.worker])).get(question.worker)
    replayed = old is not None and old.session_id == question.session_id
    worker = old if replayed and old is not None else _session(old, question, now)
    if not replayed:
        await workers.put(tx, worker)
    run_of = await cases.runs_of_attempts(tx, [entry.attempt_id for entry in question.journal])
    run_ids = set(run_of.values()) | set(await leases.of_worker(tx, question.worker, HELD_MOST))
    before = await cases.load(tx, run_ids)
    told = {entry.attempt_id: entry for entry in question.journal}
    adopted: list[str] = []
    released: list[str] = []
    changes: list[Change] = []
    for case in before.values():
        lease = case.lease
        if lease is None or lease.worker_id != worker.id or lease.status != "leased":
            continue
        after = _taken_over(case, lease, told.get(lease.attempt_id), worker, now, chance)
        if after is None:
            continue
        if after is not case:
            changes.append(Change(case, after))
        if after.lease is not None and after.lease.status == "leased":
            adopted.append(lease.attempt_id)
        elif after.run.status == "queued":
            released.append(lease.attempt_id)
    await cases.write(tx, changes)
    if not replayed:
        await outbox.fact(tx, subjects.event("worker", "-", worker.id, worker.status), _changed(worker, now))
    known = {*adopted, *released}
    refused = [entry.attempt_id for entry in question.journal if entry.attempt_id not in known]
    return WorkerRegistered(generation=worker.generation, adopted=adopted, released=released, refused=refused)


def _session(old: WorkerRecord | None, question: WorkerRegister, now: int) -> WorkerRecord:
    capabilities = canonical(question.capabilities)
    return WorkerRecord(
        id=question.worker,
        session_id=question.session_id,
        generation=1 if old is None else old.generation + 1,
        status="draining" if question.draining else "online",
        drain_requested=0 if old is None else old.drain_requested,
        version=0 if old is None else old.version + 1,
        slots=question.slots,
        capabilities=capabilities.decode(),
        capabilities_digest=hashlib.sha256(capabilities).hexdigest(),
        public_key=question.public_key,
        registered_at_ms=now,
        last_heartbeat_at_ms=now,
        lease_expires_at_ms=now + limits.SESSION_MS,
    )


def _taken_over(
    case: Case,
    lease: LeaseRecord,
    entry: JournalEntry | None,
    worker: WorkerRecord,
    now: int,
    chance: Callable[[], float],
) -> Case | None:
    if lease.worker_session_id == worker.session_id and lease.worker_generation == worker.generation:
        return case  # a replay
    if case.attempt is None:
        return None
    if case.attempt.status == "claimed":
        if case.run.cancel_requested_at_ms is not None:
            return None  # its end is converging
        return leasing.release_unstarted(case, "session_replaced", now)
    if entry is None or lease.token_digest is None:
        # The worker does not know it any more; its lease runs out by itself.
        return None
    body = proof.register_body(entry.state)
    if entry.lease_generation != lease.lease_generation or not proof.proof_holds(
        lease.token_digest, lease.attempt_id, entry.sequence, body, entry.proof
    ):
        return None
    if entry.state == "gone":
        return attempts.lost(case, now, chance(), error_code="process_vanished", worker=worker.id)
    try:
        return leasing.adopted(case, worker, now)
    except Refused:
        return None  # it ran out before; whoever judges it decides


def _changed(worker: WorkerRecord, now: int) -> WorkerChanged:
    return WorkerChanged(
        worker=worker.id,
        status="draining" if worker.drain_requested else msgspec.convert(worker.status, WorkerStatus),
        generation=worker.generation,
        slots=worker.slots,
        at_ms=now,
    )


class Beaten(NamedTuple):
    """A beat's answer, and whether the worker may take work again that it might not before."""

    answer: WorkerBeaten
    woke: bool


async def beat(tx: Transaction, question: WorkerBeat) -> Beaten:
    """Renews a session's leases in one statement; what it may not hold any more is refused. Writes only what changes.

    Raises `session_replaced` for an older session, `not_found` for a worker that never registered.
    """
    now = await tx.now_ms()
    fence = question.fence
    worker = (await workers.read(tx, [fence.worker])).get(fence.worker)
    if worker is None:
        raise Ql3Error("not_found", "This worker is not registered.")
    if worker.session_id != fence.session_id or worker.generation != fence.generation:
        raise Ql3Error("session_replaced")
    # Locks are taken in one order everywhere: worker, runs, leases.
    woke = await _keep_session(tx, worker, question, now)
    refused: list[Refusal] = []
    if question.attempts:
        refused = await _renew(tx, question, now)
    stops = [stop_item(row) for row in await cancellations.of_worker(tx, fence.worker, limits.BATCH_ITEMS)]
    held = {item.attempt_id for item in question.attempts}
    return Beaten(
        WorkerBeaten(
            refused=refused,
            stops=[stop for stop in stops if stop.attempt_id in held],
            drain=bool(worker.drain_requested),
        ),
        woke,
    )


async def _renew(tx: Transaction, question: WorkerBeat, now: int) -> list[Refusal]:
    fence = question.fence
    known = await leases.read(tx, [item.attempt_id for item in question.attempts])
    good: list[str] = []
    refused: list[Refusal] = []
    rejected: list[tuple[LeaseRecord, fences.Rejection]] = []
    for item in question.attempts:
        lease = known.get(item.attempt_id)
        held = Held(item.attempt_id, item.lease_generation)
        try:
            if lease is not None and lease.status == "completed" and lease.lease_generation == item.lease_generation:
                # Its end is committed and the answer on its way; there is nothing to stop and nothing to record.
                continue
            checked = leasing.check(lease, fence, held, now, "workers.beat")
            if checked.token_digest is None or not proof.proof_holds(
                checked.token_digest, item.attempt_id, item.sequence, proof.BEAT_BODY, item.proof
            ):
                raise Refused("fence_rejected", "workers.beat")
            good.append(item.attempt_id)
        except Refused as refusal:
            refused.append(Refusal(attempt_id=item.attempt_id, code=refusal.code))
            if lease is not None:
                rejection = fences.Rejection(lease.run_id, refusal.code, "workers.beat", held, fence.worker)
                rejected.append((lease, rejection))
    if rejected:
        held_runs = await cases.load(tx, {lease.run_id for lease, _ in rejected}, policies=False)
        await fences.record(tx, [rejection for _, rejection in rejected], held_runs)
    if good:
        await leases.renew(tx, fence, good, now)
    return refused


async def _keep_session(tx: Transaction, worker: WorkerRecord, question: WorkerBeat, now: int) -> bool:
    if not _needs_writing(worker, question, now):
        return False
    status = "draining" if question.draining else "online"
    locked = (await workers.lock(tx, [worker.id])).get(worker.id)
    if locked is None or locked.session_id != worker.session_id:
        raise Ql3Error("session_replaced")
    changed = replace(
        locked,
        status=status,
        version=locked.version + 1,
        slots=question.slots,
        last_heartbeat_at_ms=now,
        lease_expires_at_ms=now + limits.SESSION_MS,
        silent_since_ms=None,
    )
    await workers.put(tx, changed)
    if locked.silent_since_ms is not None or locked.status != status:
        await outbox.fact(tx, subjects.event("worker", "-", worker.id, status), _changed(changed, now))
    return True


async def quiet_beat(tx: Transaction, question: WorkerBeat) -> WorkerBeaten | None:
    """The answer to a beat that changes nothing, from a read alone; None when it has to be written."""
    now = await tx.now_ms()
    fence = question.fence
    worker = (await workers.read(tx, [fence.worker])).get(fence.worker)
    if question.attempts or worker is None:
        return None
    if worker.session_id != fence.session_id or worker.generation != fence.generation:
        raise Ql3Error("session_replaced")
    if _needs_writing(worker, question, now):
        return None
    return WorkerBeaten(drain=bool(worker.drain_requested))


def _needs_writing(worker: WorkerRecord, question: WorkerBeat, now: int) -> bool:
    status = "draining" if question.draining else "online"
    stale = worker.lease_expires_at_ms - now < limits.SESSION_MS // 2
    return stale or worker.silent_since_ms is not None or (worker.status, worker.slots) != (status, question.slots)


async def drain(tx: Transaction, question: WorkerDrain, decision: PolicyDecision | str) -> Worker:
    """Gives a worker no new work, or work again. It keeps what it holds. Raises `not_found`.

    An approved action that had its effect before changes nothing again; one that was closed is a `conflict`.
    """
    now = await tx.now_ms()
    worker = (await workers.lock(tx, [question.worker])).get(question.worker)
    if worker is None:
        raise Ql3Error("not_found")
    wanted = int(question.drain)
    fresh = await dispatches.claim(tx, question.dispatch_id, DEFAULT_PROJECT, worker.id)
    if fresh and worker.drain_requested != wanted:
        worker = replace(worker, drain_requested=wanted, version=worker.version + 1)
        await workers.put(tx, worker)
        what = "worker.drain" if question.drain else "worker.resume"
        await audit.append(tx, question.actor, what, None, worker.id, decision)
        await outbox.fact(
            tx, subjects.event("worker", "-", worker.id, "draining" if wanted else "online"), _changed(worker, now)
        )
    live = await workers.live_leases(tx, [worker.id])
    return worker_view(worker, live.get(worker.id, 0), now)
