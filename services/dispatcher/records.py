"""The ledger's records as the rules see them, and the events that the rules write. No I/O, no clock.

Times are milliseconds of the database's clock. A `Case` is one run with what belongs to its present step: its latest
attempt, that attempt's lease and the run's retry policy. Rules take a case and answer a new one, or raise `Refused`.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec.structs import replace

from schemas.runs import ActorType, AttemptStatus, CancelReason, RunStatus


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `runs`, without its inputs."""

    id: str
    project_id: str
    task_id: str
    task_name: str
    task_revision: int
    revision_digest: str
    lane: str
    trigger_type: str
    requested_by_type: str
    requested_by_id: str
    idempotency_key: str
    request_digest: str
    created_at_ms: int
    status: RunStatus
    version: int
    event_sequence: int
    priority: int = 0
    trigger_id: str | None = None
    scheduled_for_ms: int | None = None
    not_before_ms: int | None = None
    request_id: str | None = None
    parent_run_id: str | None = None
    retry_of_run_id: str | None = None
    attempt: int = 0
    attempt_id: str | None = None
    worker_id: str | None = None
    exit_code: int | None = None
    error_code: str | None = None
    error_summary: str | None = None
    cancel_requested_at_ms: int | None = None
    cancel_reason: CancelReason | None = None
    queue_deadline_ms: int | None = None
    queued_at_ms: int | None = None
    started_at_ms: int | None = None
    finished_at_ms: int | None = None


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `run_attempts`; `log` is a `LogFact` as JSON text."""

    id: str
    run_id: str
    attempt: int
    status: AttemptStatus
    executor: str
    created_at_ms: int
    worker_id: str | None = None
    token_digest: str | None = None
    callback_sequence: int = 0
    pid: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    error_code: str | None = None
    error_summary: str | None = None
    late_exit_code: int | None = None
    late_receipt: int = 0
    log: str | None = None
    deadline_at_ms: int | None = None
    started_at_ms: int | None = None
    finished_at_ms: int | None = None


class LeaseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `run_dispatch_leases`."""

    attempt_id: str
    run_id: str
    project_id: str
    task_id: str
    status: str
    version: int
    lease_generation: int
    worker_id: str
    worker_session_id: str
    worker_generation: int
    offer_id: str
    offers: int
    acquired_at_ms: int
    renewed_at_ms: int
    expires_at_ms: int
    next_offer_at_ms: int | None = None
    token_digest: str | None = None
    released_at_ms: int | None = None
    release_reason: str | None = None
    completed_at_ms: int | None = None


class PolicyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `run_retry_policies`; `retry_on` is comma-separated."""

    run_id: str
    max_attempts: int
    retry_on: str
    safety: str
    backoff_base_ms: int
    backoff_max_ms: int
    jitter_percent: int
    next_attempt_at_ms: int | None = None
    version: int = 0


class CancellationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `run_cancellation_dispatches`."""

    attempt_id: str
    run_id: str
    dispatch_id: str
    status: str
    version: int
    dispatch_count: int
    worker_id: str
    lease_generation: int
    reason: CancelReason
    grace_ms: int
    created_at_ms: int
    next_attempt_at_ms: int | None = None
    last_dispatched_at_ms: int | None = None
    settled_at_ms: int | None = None


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `workers`; `capabilities` is canonical JSON text."""

    id: str
    session_id: str
    generation: int
    status: str
    drain_requested: int
    version: int
    slots: int
    capabilities: str
    capabilities_digest: str
    public_key: str
    registered_at_ms: int
    last_heartbeat_at_ms: int
    lease_expires_at_ms: int
    silent_since_ms: int | None = None


class Event(msgspec.Struct, frozen=True):
    """One row of `run_events` to be written."""

    sequence: int
    type: str
    attempt_id: str | None = None
    payload: dict[str, Any] = {}
    actor_type: ActorType = "system"
    actor_id: str | None = None
    dedupe_key: str | None = None


class Case(msgspec.Struct, frozen=True):
    """A run in work."""

    run: RunRecord
    attempt: AttemptRecord | None = None
    lease: LeaseRecord | None = None
    policy: PolicyRecord | None = None
    events: tuple[Event, ...] = ()


class Refused(Exception):  # noqa: N818 - a refusal is an answer, not a fault
    """A rule says no. `code` is a registered error code; `what` names the act for the record."""

    def __init__(self, code: str, what: str, detail: str | None = None) -> None:
        self.code = code
        self.what = what
        self.detail = detail
        super().__init__(f"{what}: {code}")


TERMINAL: Final = frozenset({"succeeded", "failed", "cancelled", "timed_out"})

RUN_EDGES: Final[dict[str, frozenset[str]]] = {
    "created": frozenset({"queued", "waiting_approval", "cancelled"}),
    "waiting_approval": frozenset({"queued", "cancelled", "timed_out"}),
    "queued": frozenset({"dispatching", "cancelled", "timed_out"}),
    # Back to `queued` only while nothing was started: the offer lapsed or the worker's session was replaced.
    "dispatching": frozenset({"queued", "running", "retry_wait", "failed", "cancelled", "timed_out", "lost"}),
    "running": frozenset({"retry_wait", "succeeded", "failed", "cancelled", "timed_out", "lost"}),
    "retry_wait": frozenset({"queued", "cancelled", "timed_out"}),
    "lost": frozenset({"retry_wait", "failed", "cancelled", "timed_out"}),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
    "timed_out": frozenset(),
}

ATTEMPT_EDGES: Final[dict[str, frozenset[str]]] = {
    "claimed": frozenset({"starting", "cancelled"}),
    "starting": frozenset({"running", "failed", "cancelled", "timed_out", "lost"}),
    "running": frozenset({"succeeded", "failed", "cancelled", "timed_out", "lost"}),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
    "timed_out": frozenset(),
    "lost": frozenset(),
}


def move_run(case: Case, status: RunStatus, event: Event | None, /, **fields: Any) -> Case:
    """The run in another status. Raises `Refused("invalid_transition")` for a step that the table does not have."""
    run = case.run
    if status not in RUN_EDGES[run.status]:
        raise Refused("invalid_transition", f"run.{run.status}.{status}")
    if event is None:
        return replace(case, run=replace(run, status=status, **fields))
    return replace(
        case,
        run=replace(run, status=status, event_sequence=event.sequence, **fields),
        events=(*case.events, event),
    )


def move_attempt(case: Case, status: AttemptStatus, event: Event, /, **fields: Any) -> Case:
    """The attempt in another status, with its event. Raises `Refused("invalid_transition")`."""
    attempt = case.attempt
    if attempt is None or status not in ATTEMPT_EDGES[attempt.status]:
        raise Refused("invalid_transition", f"attempt.{attempt.status if attempt else 'none'}.{status}")
    return replace(
        case,
        run=replace(case.run, event_sequence=event.sequence),
        attempt=replace(attempt, status=status, **fields),
        events=(*case.events, event),
    )


def note(case: Case, event: Event, /, **fields: Any) -> Case:
    """An event that moves nothing; `fields` are changes of the run."""
    return replace(case, run=replace(case.run, event_sequence=event.sequence, **fields), events=(*case.events, event))
