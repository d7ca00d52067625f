"""What follows a failed attempt: another one, by the run's own frozen policy, or the run's end."""

from __future__ import annotations

from typing import Final, Literal

from msgspec.structs import replace

from schemas import limits
from services.dispatcher.records import Case, Event, PolicyRecord, move_run
from services.dispatcher.run import end

Outcome = Literal["failed", "timed_out", "lost"]
UNTRIED_PAUSE_MS: Final = 500
UNTRIED_PAUSE_MAX_MS: Final = 60_000


def allows(policy: PolicyRecord | None, attempt: int, outcome: Outcome) -> bool:
    """Whether another attempt may follow attempt number `attempt`.

    What became of a lost attempt's effects is not known, so only a run that is safe to repeat is repeated.
    """
    if policy is None or attempt >= policy.max_attempts or outcome not in policy.retry_on.split(","):
        return False
    return not (outcome == "lost" and policy.safety == "unknown")


def delay_ms(policy: PolicyRecord, attempt: int, chance: float) -> int:
    """The pause after attempt number `attempt`: min(max, base * 2^(n-1)), moved by up to `jitter_percent` either way.

    `chance` is in 0..1; 0.5 means no jitter.
    """
    plain = min(policy.backoff_max_ms, policy.backoff_base_ms * 2 ** min(attempt - 1, 32))
    spread = plain * policy.jitter_percent / 100
    return max(0, min(policy.backoff_max_ms, round(plain + spread * (2 * chance - 1))))


def decide(
    case: Case,
    outcome: Outcome,
    now: int,
    chance: float,
    *,
    error_code: str,
    summary: str | None = None,
    exit_code: int | None = None,
) -> Case:
    """The run after an attempt that ended so: `retry_wait` with its time, or the end.

    A cancel intent of a person or a policy ends the run instead; a timeout's intent is over with its attempt.
    """
    run = case.run
    if run.cancel_reason is not None and run.cancel_reason != "timeout":
        return end(case, "cancelled", now, error_code=cancel_code(run.cancel_reason), exit_code=exit_code)
    if not allows(case.policy, run.attempt, outcome):
        status = "timed_out" if outcome == "timed_out" or run.cancel_reason == "timeout" else "failed"
        return end(case, status, now, error_code=error_code, summary=summary, exit_code=exit_code)
    policy = case.policy
    assert policy is not None
    at = now + delay_ms(policy, run.attempt, chance)
    return _wait(case, policy, outcome, at, error_code=error_code, summary=summary, exit_code=exit_code)


def untried(case: Case, now: int, *, error_code: str, summary: str | None) -> Case:
    """The run after an attempt that was granted and, as its worker proves, never started: it has another one.

    Nothing was tried, so nothing counts: the policy allows one attempt more, up to what a run may have at all.
    """
    run = case.run
    if run.attempt >= limits.MAX_ATTEMPTS:
        return end(case, "failed", now, error_code=error_code, summary=summary)
    policy = case.policy or PolicyRecord(
        run_id=run.id,
        max_attempts=1,
        retry_on="",
        safety="unknown",
        backoff_base_ms=0,
        backoff_max_ms=0,
        jitter_percent=0,
    )
    policy = replace(policy, max_attempts=min(limits.MAX_ATTEMPTS, policy.max_attempts + 1))
    # Doubling, so that a worker that cannot start anything is not asked again at once and for ever.
    at = now + min(UNTRIED_PAUSE_MAX_MS, UNTRIED_PAUSE_MS * 2 ** (run.attempt - 1))
    return _wait(case, policy, "not_started", at, error_code=error_code, summary=summary)


def _wait(
    case: Case,
    policy: PolicyRecord,
    after: str,
    at: int,
    *,
    error_code: str,
    summary: str | None,
    exit_code: int | None = None,
) -> Case:
    run = case.run
    event = Event(
        run.event_sequence + 1,
        "run.retry_wait",
        run.attempt_id,
        {"attempt": run.attempt, "after": after, "next_attempt_at_ms": at},
    )
    waiting = move_run(
        case,
        "retry_wait",
        event,
        cancel_requested_at_ms=None,
        cancel_reason=None,
        error_code=error_code,
        error_summary=summary,
        exit_code=exit_code,
        queue_deadline_ms=None,
    )
    return replace(waiting, policy=replace(policy, next_attempt_at_ms=at, version=policy.version + 1))


def cancel_code(reason: str) -> str:
    """The error code of a run that ended by a cancel intent."""
    return {"user": "cancelled_by_user", "policy": "cancelled_by_policy", "shutdown": "cancelled_by_shutdown"}.get(
        reason, "cancelled"
    )
