"""Cancellation: an intent ends what has no process at once, and is delivered until a worker proves the rest ended."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from services.dispatcher.lease import released
from services.dispatcher.records import CancellationRecord, Case, Event, note
from services.dispatcher.retry import cancel_code
from services.dispatcher.run import end_unstarted

DELIVERY_FIRST_MS: Final = 1_000
DELIVERY_MAX_MS: Final = 30_000
DELIVERIES_MOST: Final = 64
"""After so many deliveries without an end (about half an hour) somebody has to look; asking again re-arms it."""

EXECUTING: Final = frozenset({"starting", "running"})


def converge(case: Case, now: int) -> Case | None:
    """The end of a run that is asked to end and of which no process can exist; None while one may.

    An offer that never passed the start barrier is taken back: the barrier will refuse it.
    """
    run, attempt, lease = case.run, case.attempt, case.lease
    if run.cancel_reason is None or run.finished_at_ms is not None:
        return None
    if attempt is not None and attempt.status in EXECUTING:
        return None
    status = "timed_out" if run.cancel_reason == "timeout" else "cancelled"
    code = "run_timeout" if run.cancel_reason == "timeout" else cancel_code(run.cancel_reason)
    ended = end_unstarted(case, status, now, error_code=code)
    if lease is not None and lease.status == "leased":
        ended = replace(ended, lease=released(lease, "cancelled", now))
    return ended


def delivery(case: Case, dispatch_id: str, grace_ms: int, now: int) -> CancellationRecord:
    """The delivery of an intent to the holder of the executing attempt, due at once."""
    attempt, lease, run = case.attempt, case.lease, case.run
    assert attempt is not None
    assert lease is not None
    assert run.cancel_reason is not None
    return CancellationRecord(
        attempt_id=attempt.id,
        run_id=run.id,
        dispatch_id=dispatch_id,
        status="pending",
        version=0,
        dispatch_count=0,
        worker_id=lease.worker_id,
        lease_generation=lease.lease_generation,
        reason=run.cancel_reason,
        grace_ms=grace_ms,
        created_at_ms=now,
        next_attempt_at_ms=now,
    )


def delivered(record: CancellationRecord, now: int) -> CancellationRecord:
    """After one more delivery: due again with backoff until the end is proved, or blocked."""
    count = record.dispatch_count + 1
    if count >= DELIVERIES_MOST:
        return replace(
            record, status="blocked", version=record.version + 1, dispatch_count=count, next_attempt_at_ms=None,
            last_dispatched_at_ms=now,
        )  # fmt: skip
    pause = min(DELIVERY_MAX_MS, DELIVERY_FIRST_MS * 2 ** min(count - 1, 10)) + record.grace_ms
    return replace(
        record, status="dispatched", version=record.version + 1, dispatch_count=count,
        next_attempt_at_ms=now + pause, last_dispatched_at_ms=now,
    )  # fmt: skip


def rearmed(record: CancellationRecord, case: Case, now: int) -> CancellationRecord:
    """An open delivery under the run's present reason, due at once; what was blocked is tried again."""
    reason = case.run.cancel_reason or record.reason
    return replace(
        record, status="pending", version=record.version + 1, dispatch_count=0, reason=reason, next_attempt_at_ms=now
    )


def tell(case: Case, record: CancellationRecord) -> Case | None:
    """The event of a delivery: the first and the one that gave up are told, repeats are not."""
    if record.status == "blocked":
        kind = "run.cancel_dispatch_blocked"
    elif record.dispatch_count == 1:
        kind = "run.cancel_dispatched"
    else:
        return None
    event = Event(
        case.run.event_sequence + 1,
        kind,
        record.attempt_id,
        {"worker": record.worker_id, "dispatch_count": record.dispatch_count},
        dedupe_key=f"cancel-dispatch:{record.attempt_id}:{record.version}",
    )
    return note(case, event)
