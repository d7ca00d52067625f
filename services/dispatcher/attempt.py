"""An attempt's steps: the start barrier, what its worker reports, and what is decided when nobody holds it any more."""

from __future__ import annotations

from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from schemas import proof
from schemas.runs import CancelReason, LogFact
from schemas.workers import AttemptReport, ReportBody, SessionFence, StartGrant, StartItem
from services.dispatcher import retry
from services.dispatcher.lease import Held, check, completed, is_live, released, renewed
from services.dispatcher.records import (
    ATTEMPT_EDGES,
    AttemptRecord,
    Case,
    Event,
    LeaseRecord,
    Refused,
    move_attempt,
    move_run,
    note,
)
from services.dispatcher.run import end

WORKER_LOST: Final = "worker_lost"
UNTRIED: Final = frozenset({"not_started", "start_window_passed"})
"""Codes of an attempt whose worker was restarted or stood still between the barrier and the spawn. Nothing ran, and the
task has no part in it; other codes (a full disk, secrets that could not be had) tell what would happen again."""
START_MARGIN_MS: Final = 5_000


def start(
    case: Case, fence: SessionFence, item: StartItem, timeout_ms: int | None, now: int
) -> tuple[Case, StartGrant]:
    """Passes the start barrier: from here on a process may exist. The same request again gets the same grant.

    Raises `Refused` when the fence does not hold or the attempt went further already.
    """
    held = Held(item.attempt_id, item.lease_generation, item.offer_id)
    lease = check(case.lease, fence, held, now, "attempts.start")
    attempt = case.attempt
    assert attempt is not None
    if attempt.status == "starting" and attempt.token_digest == item.token_digest:
        return case, _grant(lease, timeout_ms, now)
    if attempt.status != "claimed":
        raise Refused("invalid_transition", "attempts.start")
    run = case.run
    event = Event(
        run.event_sequence + 1,
        "attempt.starting",
        attempt.id,
        {"lease_generation": lease.lease_generation},
        "worker",
        fence.worker,
    )
    moved = move_attempt(
        case,
        "starting",
        event,
        worker_id=fence.worker,
        token_digest=item.token_digest,
        deadline_at_ms=None if timeout_ms is None else now + timeout_ms,
    )
    passed = replace(renewed(lease, now), token_digest=item.token_digest, next_offer_at_ms=None)
    if moved.run.queue_deadline_ms is not None:
        moved = replace(moved, run=replace(moved.run, queue_deadline_ms=None))
    return replace(moved, lease=passed), _grant(passed, timeout_ms, now)


def _grant(lease: LeaseRecord, timeout_ms: int | None, now: int) -> StartGrant:
    # The worker counts from before its request, so its window closes before the lease can be judged dead; the margin is
    # for what may come between its last look at the clock and the spawn.
    within = max(0, lease.expires_at_ms - now - START_MARGIN_MS)
    return StartGrant(attempt_id=lease.attempt_id, start_within_ms=within, timeout_ms=timeout_ms)


def read_body(report: AttemptReport) -> ReportBody:
    """What a report says. Raises `Refused("message_invalid")`."""
    try:
        return msgspec.json.decode(report.body, type=ReportBody)
    except msgspec.DecodeError as error:
        raise Refused("message_invalid", "attempts.report") from error


def is_authentic(attempt: AttemptRecord, report: AttemptReport) -> bool:
    """Whether the holder of the attempt's token signed exactly this body under this sequence."""
    digest = attempt.token_digest
    return digest is not None and proof.proof_holds(
        digest, attempt.id, report.sequence, bytes(report.body), report.proof
    )


def settle(
    case: Case, fence: SessionFence, report: AttemptReport, body: ReportBody, now: int, chance: float
) -> Case | None:
    """What an authentic report changes; None when it is known already.

    A holder whose lease has run out but was not yet judged may still tell the end: whoever commits first is right.
    Raises `Refused` when somebody else, or nobody, holds the attempt.
    """
    attempt, lease = case.attempt, case.lease
    if attempt is None or lease is None:
        raise Refused("not_found", "attempts.report")
    if lease.worker_id != fence.worker or lease.lease_generation != report.lease_generation:
        raise Refused("fence_rejected", "attempts.report")
    if report.sequence <= attempt.callback_sequence:
        return None
    if attempt.finished_at_ms is not None:
        return _late(case, attempt, report, body, now)
    if lease.status != "leased":
        raise Refused("fence_rejected", "attempts.report")
    if lease.worker_session_id != fence.session_id or lease.worker_generation != fence.generation:
        raise Refused("session_replaced", "attempts.report")
    case = replace(case, attempt=replace(attempt, callback_sequence=report.sequence))
    worker = fence.worker
    if body.kind == "started":
        return _started(case, body, now, worker)
    if body.kind == "ended":
        return _ended(_started(case, body, now, worker), body, now, chance, worker)
    if body.kind == "vanished":
        return lost(case, now, chance, error_code="process_vanished", worker=worker, log=body.log)
    code = body.error_code or ("executor_start_failed" if body.kind == "start_failed" else "not_started")
    return _failed_to_start(case, body, code, now, chance, worker)


def _started(case: Case, body: ReportBody, now: int, worker: str) -> Case:
    attempt, lease, run = case.attempt, case.lease, case.run
    assert attempt is not None
    assert lease is not None
    if attempt.status == "running":
        return case
    at = _between(lease.acquired_at_ms, body.started_at_ms, now)
    case = move_attempt(
        case,
        "running",
        Event(run.event_sequence + 1, "attempt.running", attempt.id, {}, "worker", worker),
        started_at_ms=at,
        pid=body.pid,
    )
    if run.status == "running":
        return case
    event = Event(case.run.event_sequence + 1, "run.running", attempt.id)
    return move_run(case, "running", event, started_at_ms=run.started_at_ms or at, queue_deadline_ms=None)


def _ended(case: Case, body: ReportBody, now: int, chance: float, worker: str) -> Case:
    attempt, lease, run = case.attempt, case.lease, case.run
    assert attempt is not None
    assert lease is not None
    at = _between(attempt.started_at_ms or lease.acquired_at_ms, body.finished_at_ms, now)
    stopped_for: CancelReason | None = run.cancel_reason or body.stopped_for
    # An intent that was committed before the end decides it, whatever the command still answered.
    status: Literal["succeeded", "failed", "cancelled", "timed_out"]
    code: str | None
    if stopped_for == "timeout":
        status, code, summary = "timed_out", "run_timeout", "The run's time was over."
    elif stopped_for is not None:
        status, code, summary = "cancelled", retry.cancel_code(stopped_for), None
    elif body.exit_code == 0 and body.signal is None:
        status, code, summary = "succeeded", None, None
    else:
        status, code = "failed", body.error_code or "process_exit"
        summary = body.error_summary or (
            f"The process was ended by signal {body.signal}."
            if body.signal is not None
            else f"The process ended with code {body.exit_code}."
        )
    case = _close(case, status, body, code, summary, at, now, worker)
    if status == "succeeded" or status == "cancelled":
        return end(case, status, at, error_code=code, summary=summary, exit_code=body.exit_code)
    return retry.decide(
        case, status, at, chance, error_code=code or "failed", summary=summary, exit_code=body.exit_code
    )


def _failed_to_start(case: Case, body: ReportBody, code: str, now: int, chance: float, worker: str) -> Case:
    run = case.run
    stopped_for = run.cancel_reason or body.stopped_for
    if stopped_for == "timeout":
        code, summary = "run_timeout", "The run's time was over before it could be started."
        case = _close(case, "timed_out", body, code, summary, now, now, worker)
        return retry.decide(case, "timed_out", now, chance, error_code=code, summary=summary)
    if stopped_for is not None:
        code = retry.cancel_code(stopped_for)
        case = _close(case, "cancelled", body, code, None, now, now, worker)
        return end(case, "cancelled", now, error_code=code)
    case = _close(case, "failed", body, code, body.error_summary, now, now, worker)
    if body.kind == "not_started" and code in UNTRIED:
        return retry.untried(case, now, error_code=code, summary=body.error_summary)
    return retry.decide(case, "failed", now, chance, error_code=code, summary=body.error_summary)


def _close(
    case: Case,
    status: Literal["succeeded", "failed", "cancelled", "timed_out"],
    body: ReportBody,
    code: str | None,
    summary: str | None,
    at: int,
    now: int,
    worker: str,
) -> Case:
    attempt, lease = case.attempt, case.lease
    assert attempt is not None
    assert lease is not None
    payload: dict[str, object] = {}
    if body.exit_code is not None:
        payload["exit_code"] = body.exit_code
    if body.signal is not None:
        payload["signal"] = body.signal
    if code is not None:
        payload["error_code"] = code
    event = Event(case.run.event_sequence + 1, f"attempt.{status}", attempt.id, payload, "worker", worker)
    if attempt.status == "claimed" or status not in ATTEMPT_EDGES[attempt.status]:
        raise Refused("invalid_transition", "attempts.report")
    moved = move_attempt(
        case,
        status,
        event,
        exit_code=body.exit_code,
        signal=body.signal,
        error_code=code,
        error_summary=summary,
        log=_log(body.log),
        finished_at_ms=at,
    )
    return replace(moved, lease=completed(lease, now))


def lost(
    case: Case,
    now: int,
    chance: float,
    *,
    error_code: str = WORKER_LOST,
    worker: str | None = None,
    log: LogFact | None = None,
) -> Case:
    """The end of a started attempt of which nobody can say what became of it; decided at once, never left open.

    `log` is what of its output is there; whether that is all, nobody can say either.
    """
    attempt, lease, run = case.attempt, case.lease, case.run
    if attempt is None or lease is None or attempt.status not in ("starting", "running"):
        raise Refused("invalid_transition", "attempt.lost")
    actor = "worker" if worker else "reconciler"
    case = move_attempt(
        case,
        "lost",
        Event(run.event_sequence + 1, "attempt.lost", attempt.id, {"error_code": error_code}, actor, worker),
        error_code=error_code,
        error_summary=_LOST_SUMMARY.get(error_code),
        log=_log(log),
        finished_at_ms=now,
    )
    case = replace(case, lease=released(lease, "lost", now) if lease.status == "leased" else lease)
    case = move_run(case, "lost", Event(case.run.event_sequence + 1, "run.lost", attempt.id))
    return retry.decide(case, "lost", now, chance, error_code=error_code, summary=_LOST_SUMMARY.get(error_code))


_LOST_SUMMARY: Final = {
    WORKER_LOST: "The worker stopped renewing its lease; what became of the process is not known.",
    "process_vanished": "The process is gone and left no exit code.",
}


def overdue(case: Case, now: int) -> bool:
    """Whether the attempt's time is over and nobody has asked for its end yet."""
    attempt = case.attempt
    return (
        attempt is not None
        and attempt.status in ("starting", "running")
        and attempt.deadline_at_ms is not None
        and attempt.deadline_at_ms <= now
        and case.run.cancel_requested_at_ms is None
        and case.lease is not None
        and is_live(case.lease, now)
    )


def _late(case: Case, attempt: AttemptRecord, report: AttemptReport, body: ReportBody, now: int) -> Case | None:
    """A receipt that comes after the attempt was decided is kept and shown; it decides nothing any more."""
    if attempt.late_receipt or attempt.status not in ("lost", "cancelled"):
        return None
    if body.kind == "vanished" and body.log is not None and attempt.log is None:
        kept = {"size": body.log.size}
        event = Event(case.run.event_sequence + 1, "attempt.late_log", attempt.id, kept, "worker", attempt.worker_id)
        changed = replace(attempt, callback_sequence=report.sequence, log=_log(body.log))
        return replace(note(case, event), attempt=changed)
    if body.kind != "ended":
        return None
    event = Event(
        case.run.event_sequence + 1,
        "attempt.late_receipt",
        attempt.id,
        {"exit_code": body.exit_code, "signal": body.signal, "was": attempt.status},
        "worker",
        attempt.worker_id,
    )
    changed = replace(
        attempt,
        callback_sequence=report.sequence,
        late_receipt=1,
        late_exit_code=body.exit_code,
        log=attempt.log or _log(body.log),
    )
    return replace(note(case, event), attempt=changed)


def _log(log: LogFact | None) -> str | None:
    return None if log is None else msgspec.json.encode(log).decode()


def _between(low: int, given: int | None, high: int) -> int:
    """A worker's wall time, kept between what the ledger knows for certain."""
    return high if given is None else max(low, min(given, high))
