"""Leases: who may write about an attempt, and until when. The database's clock judges.

A lease lives while `expires_at_ms > now`. Before the start barrier it has no token digest; after it, it has one.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from msgspec.structs import replace

from schemas import limits
from schemas.workers import SessionFence
from services.dispatcher.records import Case, Event, LeaseRecord, Refused, WorkerRecord, move_run, note

FIRST_REOFFER_MS: Final = 2_000
REOFFER_MAX_MS: Final = 8_000

ReleaseReason = Literal["expired", "session_replaced", "cancelled", "lost"]


class Held(NamedTuple):
    """The part of a fence that names the lease; the rest is the `SessionFence`."""

    attempt_id: str
    lease_generation: int
    offer_id: str | None = None


def is_live(lease: LeaseRecord, now: int) -> bool:
    """Whether the lease still gives a right."""
    return lease.status == "leased" and lease.expires_at_ms > now


def acquire(case: Case, worker: WorkerRecord, offer_id: str, now: int) -> Case:
    """The attempt's next lease, for this session of this worker; the run is dispatching. Any old lease must be over."""
    run, attempt, old = case.run, case.attempt, case.lease
    if attempt is None or attempt.status != "claimed" or run.cancel_requested_at_ms is not None:
        raise Refused("invalid_transition", "lease.acquire")
    if (old is not None and old.status == "completed") or (old is not None and is_live(old, now)):
        raise Refused("fence_rejected", "lease.acquire")
    lease = LeaseRecord(
        attempt_id=attempt.id,
        run_id=run.id,
        project_id=run.project_id,
        task_id=run.task_id,
        status="leased",
        version=1 if old is None else old.version + 1,
        lease_generation=1 if old is None else old.lease_generation + 1,
        worker_id=worker.id,
        worker_session_id=worker.session_id,
        worker_generation=worker.generation,
        offer_id=offer_id,
        offers=1,
        next_offer_at_ms=now + FIRST_REOFFER_MS,
        acquired_at_ms=now,
        renewed_at_ms=now,
        expires_at_ms=now + limits.LEASE_UNSTARTED_MS,
    )
    event = Event(
        run.event_sequence + 1,
        "run.dispatching",
        attempt.id,
        {"worker": worker.id, "lease_generation": lease.lease_generation},
    )
    moved = move_run(case, "dispatching", event, worker_id=worker.id)
    return replace(moved, lease=lease)


def check(lease: LeaseRecord | None, fence: SessionFence, held: Held, now: int, what: str) -> LeaseRecord:
    """The lease, when the whole fence holds. Raises `Refused` with the reason that the holder may know."""
    if lease is None or lease.attempt_id != held.attempt_id:
        raise Refused("not_found", what)
    if lease.worker_id != fence.worker or lease.lease_generation != held.lease_generation:
        raise Refused("fence_rejected", what)
    if lease.worker_session_id != fence.session_id or lease.worker_generation != fence.generation:
        raise Refused("session_replaced", what)
    if held.offer_id is not None and lease.offer_id != held.offer_id:
        raise Refused("fence_rejected", what)
    if not is_live(lease, now):
        raise Refused("fence_rejected", what)
    return lease


def reoffered(lease: LeaseRecord, now: int) -> LeaseRecord:
    """The same offer, told again because it may not have arrived: nothing of the fence changes."""
    pause = min(REOFFER_MAX_MS, FIRST_REOFFER_MS * 2 ** min(lease.offers, 8))
    return replace(lease, version=lease.version + 1, offers=lease.offers + 1, next_offer_at_ms=now + pause)


def release_unstarted(case: Case, reason: ReleaseReason, now: int) -> Case:
    """Takes the right from a holder that never passed the start barrier; the same attempt waits in the queue again.

    Costs nothing of the retry budget, for nothing was started.
    """
    lease, attempt = case.lease, case.attempt
    if lease is None or lease.status != "leased" or attempt is None or attempt.status != "claimed":
        raise Refused("invalid_transition", "lease.release")
    event = Event(
        case.run.event_sequence + 1,
        "run.queued",
        attempt.id,
        {"reason": reason, "worker": lease.worker_id, "lease_generation": lease.lease_generation},
    )
    if case.run.status == "dispatching":
        case = move_run(case, "queued", event, worker_id=None)
    return replace(case, lease=released(lease, reason, now))


def released(lease: LeaseRecord, reason: ReleaseReason, now: int) -> LeaseRecord:
    """The lease without any right."""
    return replace(
        lease,
        status="released",
        version=lease.version + 1,
        next_offer_at_ms=None,
        released_at_ms=now,
        release_reason=reason,
    )


def completed(lease: LeaseRecord, now: int) -> LeaseRecord:
    """The lease after the attempt's end, as its holder told it."""
    return replace(lease, status="completed", version=lease.version + 1, next_offer_at_ms=None, completed_at_ms=now)


def renewed(lease: LeaseRecord, now: int) -> LeaseRecord:
    """A started lease, longer."""
    return replace(lease, version=lease.version + 1, renewed_at_ms=now, expires_at_ms=now + limits.LEASE_STARTED_MS)


def adopted(case: Case, worker: WorkerRecord, now: int) -> Case:
    """A started lease in the hands of the same worker's new session: its processes went on meanwhile."""
    lease = case.lease
    if lease is None or not is_live(lease, now) or lease.token_digest is None or lease.worker_id != worker.id:
        raise Refused("fence_rejected", "workers.register")
    event = Event(
        case.run.event_sequence + 1,
        "attempt.adopted",
        lease.attempt_id,
        {"worker": worker.id, "worker_generation": worker.generation},
        "worker",
        worker.id,
    )
    taken = replace(renewed(lease, now), worker_session_id=worker.session_id, worker_generation=worker.generation)
    return replace(note(case, event), lease=taken)


def refusal(case: Case, code: str, what: str, held: Held, worker: str) -> Case:
    """The event of a refused write; its dedupe key keeps a stale holder from filling the ledger."""
    # The event is about an attempt of this run only when the run has it; a made-up id is told in the payload alone.
    known = held.attempt_id if case.attempt is not None and case.attempt.id == held.attempt_id else None
    event = Event(
        case.run.event_sequence + 1,
        "attempt.fence_refused",
        known,
        {
            "what": what,
            "code": code,
            "worker": worker,
            "attempt": held.attempt_id,
            "lease_generation": held.lease_generation,
        },
        "worker",
        worker,
        f"refused:{what}:{held.attempt_id}:{held.lease_generation}:{code}:{worker}"[:255],
    )
    return note(case, event)
