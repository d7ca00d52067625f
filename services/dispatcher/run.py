"""A run's own steps: admission, hold and release, queue, end."""

from __future__ import annotations

import hashlib

import msgspec

from schemas.canonical import canonical, digest, digest_bytes
from schemas.runs import ActorType, CancelReason, RunOrder
from schemas.tasks import ExecutionRevision
from services.dispatcher.records import (
    AttemptRecord,
    Case,
    Event,
    PolicyRecord,
    Refused,
    RunRecord,
    move_attempt,
    move_run,
)

_sorted = msgspec.json.Encoder(order="sorted")


def request_digest(order: RunOrder) -> str:
    """What one idempotency key stands for: everything of the order but the ids and times of its sending."""
    content = (
        order.project,
        order.revision,
        order.trigger_type,
        order.trigger_id,
        order.scheduled_for_ms,
        order.priority,
        order.parent_run_id,
        order.inputs,
    )
    return digest_bytes("ql3.run-request.v1", _sorted.encode(content))


def lane_of(revision: ExecutionRevision) -> str:
    """The queue that a run of this revision stands in.

    Runs of one lane may go to the same workers under the same limits: when its head cannot be placed, none can.
    """
    terms = revision.terms
    limited = terms.overlap.policy != "allow" or terms.overlap.limit is not None
    shape = {
        "placement": terms.placement,
        "task": revision.task_id if limited else "",
        "keys": sorted(limit.key for limit in terms.concurrency),
    }
    return f"{revision.project}:{hashlib.sha256(canonical(shape)).hexdigest()[:24]}"


def admit(order: RunOrder, revision: ExecutionRevision, lane: str, digest_of_request: str, now: int) -> Case:
    """A new run in `created`, with its retry policy when it has more than one attempt."""
    run = RunRecord(
        id=order.run_id,
        project_id=order.project,
        task_id=revision.task_id,
        task_name=revision.task_name,
        task_revision=revision.task_revision,
        revision_digest=order.revision,
        lane=lane,
        trigger_type=order.trigger_type,
        trigger_id=order.trigger_id,
        scheduled_for_ms=order.scheduled_for_ms,
        not_before_ms=order.not_before_ms,
        requested_by_type=order.requested_by.type,
        requested_by_id=order.requested_by.id,
        request_id=order.request_id,
        parent_run_id=order.parent_run_id,
        idempotency_key=order.idempotency_key,
        request_digest=digest_of_request,
        priority=order.priority if order.priority is not None else revision.terms.priority,
        status="created",
        version=0,
        event_sequence=1,
        created_at_ms=now,
    )
    actor_type, actor_id = _asker(order)
    created = Event(1, "run.created", actor_type=actor_type, actor_id=actor_id)
    return Case(run, policy=policy_of(run.id, revision), events=(created,))


def policy_of(run_id: str, revision: ExecutionRevision) -> PolicyRecord | None:
    """The retry policy that is frozen with a run; None for a single attempt."""
    retry = revision.terms.retry
    if retry.max_attempts == 1:
        return None
    return PolicyRecord(
        run_id=run_id,
        max_attempts=retry.max_attempts,
        retry_on=",".join(sorted(set(retry.retry_on))),
        safety=retry.safety,
        backoff_base_ms=retry.backoff_base_ms,
        backoff_max_ms=max(retry.backoff_base_ms, retry.backoff_max_ms),
        jitter_percent=retry.jitter_percent,
    )


def hold(case: Case) -> Case:
    """The run waits for an approval; nothing is created that could be placed."""
    return move_run(case, "waiting_approval", Event(case.run.event_sequence + 1, "run.waiting_approval"))


def queue(case: Case, attempt_id: str, executor: str, queue_timeout_ms: int | None, now: int) -> Case:
    """The run may be placed: it gets its next attempt, in `claimed`."""
    run = case.run
    number = run.attempt + 1
    queued = move_run(
        case,
        "queued",
        Event(run.event_sequence + 1, "run.queued"),
        attempt=number,
        attempt_id=attempt_id,
        worker_id=None,
        exit_code=None,
        error_code=None,
        error_summary=None,
        queued_at_ms=now,
        queue_deadline_ms=None if queue_timeout_ms is None else now + queue_timeout_ms,
    )
    attempt = AttemptRecord(
        id=attempt_id, run_id=run.id, attempt=number, status="claimed", executor=executor, created_at_ms=now
    )
    claimed = Event(queued.run.event_sequence + 1, "attempt.claimed", attempt_id, {"attempt": number})
    policy = queued.policy
    if policy is not None and policy.next_attempt_at_ms is not None:
        policy = msgspec.structs.replace(policy, next_attempt_at_ms=None, version=policy.version + 1)
    return Case(
        msgspec.structs.replace(queued.run, event_sequence=claimed.sequence),
        attempt,
        None,
        policy,
        (*queued.events, claimed),
    )


def end_unstarted(
    case: Case,
    status: str,
    now: int,
    *,
    error_code: str | None,
    summary: str | None = None,
    actor_type: ActorType = "system",
    actor_id: str | None = None,
) -> Case:
    """Ends a run (`cancelled`, `timed_out`) of which no process can exist; a claimed attempt ends as cancelled."""
    attempt = case.attempt
    if attempt is not None and attempt.status == "claimed":
        case = move_attempt(
            case,
            "cancelled",
            Event(case.run.event_sequence + 1, "attempt.cancelled", attempt.id, {"error_code": error_code}),
            error_code=error_code,
            finished_at_ms=now,
        )
    elif attempt is not None and attempt.status in ("starting", "running"):
        raise Refused("invalid_transition", f"run.end_unstarted.{attempt.status}")
    return end(case, status, now, error_code=error_code, summary=summary, actor_type=actor_type, actor_id=actor_id)


def end(
    case: Case,
    status: str,
    now: int,
    *,
    error_code: str | None,
    summary: str | None = None,
    exit_code: int | None = None,
    actor_type: ActorType = "system",
    actor_id: str | None = None,
) -> Case:
    """The run's last status; final."""
    if status not in ("succeeded", "failed", "cancelled", "timed_out"):
        raise Refused("invalid_transition", f"run.end.{status}")
    payload: dict[str, object] = {}
    if error_code is not None:
        payload["error_code"] = error_code
    if exit_code is not None:
        payload["exit_code"] = exit_code
    policy = case.policy
    if policy is not None and policy.next_attempt_at_ms is not None:
        case = msgspec.structs.replace(
            case, policy=msgspec.structs.replace(policy, next_attempt_at_ms=None, version=policy.version + 1)
        )
    return move_run(
        case,
        status,
        Event(case.run.event_sequence + 1, f"run.{status}", case.run.attempt_id, payload, actor_type, actor_id),
        error_code=error_code,
        error_summary=summary,
        exit_code=exit_code,
        queue_deadline_ms=None,
        finished_at_ms=now,
    )


def request_cancel(
    case: Case, reason: CancelReason, now: int, *, actor_type: ActorType = "system", actor_id: str | None = None
) -> Case | None:
    """Records the intent to end a run. None when it is recorded already, or the run has ended.

    A person's cancel replaces a timeout's intent, for a timed-out run could be retried and this one must not be.
    """
    run = case.run
    if run.finished_at_ms is not None:
        return None
    if run.cancel_reason is not None and not (run.cancel_reason == "timeout" and reason != "timeout"):
        return None
    event = Event(
        run.event_sequence + 1, "run.cancel_requested", run.attempt_id, {"reason": reason}, actor_type, actor_id
    )
    changed = msgspec.structs.replace(
        run, event_sequence=event.sequence, cancel_requested_at_ms=now, cancel_reason=reason
    )
    return msgspec.structs.replace(case, run=changed, events=(*case.events, event))


def action_digest(run: RunRecord, inputs: str | None) -> str:
    """What an approval of this run's release binds: the run, its frozen revision and its inputs."""
    return digest(
        "ql3.run-release.v1",
        {"run": run.id, "project": run.project_id, "revision": run.revision_digest, "inputs": inputs or ""},
    )


def _asker(order: RunOrder) -> tuple[ActorType, str]:
    """Who is told to have asked: the trigger, unless a person ran it."""
    if order.trigger_id is not None and order.requested_by.type == "system":
        return "trigger", order.trigger_id
    return order.requested_by.type, order.requested_by.id
