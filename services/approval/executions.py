"""The execution of an approved action: leased, past the start barrier exactly once, ended once. Pure.

`pending → leased → executing → succeeded | failed | blocked`, with `retry_wait` between leases. Before the barrier a
failure may be tried again; behind it nothing is ever repeated, and a lapsed lease means that the outcome is in doubt
(`recovery_required`, computed). Times are the database's clock.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

import msgspec

from schemas.errors import Ql3Error

LEASE_MS: Final = 30_000
LEASE_MAX_MS: Final = 600_000
MAX_ATTEMPTS: Final = 5
RETRY_BASE_MS: Final = 1_000
RETRY_MAX_MS: Final = 60_000
VERSION_MAX: Final = 2_147_483_647

Status = Literal["pending", "leased", "executing", "retry_wait", "succeeded", "failed", "blocked"]
End = Literal["succeeded", "failed", "blocked"]
TERMINAL: Final = frozenset({"succeeded", "failed", "blocked"})


class Execution(msgspec.Struct, frozen=True, kw_only=True):
    """One execution as stored."""

    dispatch_id: str
    project: str
    status: Status = "pending"
    version: int = 0
    attempt_count: int = 0
    max_attempts: int = MAX_ATTEMPTS
    eligible_at_ms: int | None
    next_attempt_at_ms: int | None = None
    lease_owner: str | None = None
    lease_token: str | None = None
    lease_expires_at_ms: int | None = None
    started_at_ms: int | None = None
    result_mutation_id: str | None = None
    last_result_code: str | None = None
    completed_at_ms: int | None = None
    created_at_ms: int
    updated_at_ms: int


class Lease(NamedTuple):
    """Who holds an execution, and at which version it was last seen."""

    owner: str
    token: str
    version: int


ClaimOutcome = Literal[
    "claimed", "replayed", "not_due", "leased", "executing", "recovery_required", "succeeded", "failed", "blocked"
]


def created(dispatch_id: str, project: str, now_ms: int) -> Execution:
    """The baseline that is inserted with the dispatch."""
    return Execution(
        dispatch_id=dispatch_id, project=project, eligible_at_ms=now_ms, created_at_ms=now_ms, updated_at_ms=now_ms
    )


def effective_status(execution: Execution, now_ms: int) -> str:
    """The status as people see it."""
    if execution.status == "executing" and now_ms >= (execution.lease_expires_at_ms or 0):
        return "recovery_required"
    return execution.status


def retry_delay_ms(attempt: int) -> int:
    """How long to wait after this many attempts."""
    return min(RETRY_MAX_MS, RETRY_BASE_MS * 2 ** min(max(attempt - 1, 0), 30))


def claim(
    execution: Execution, *, owner: str, token: str, now_ms: int, lease_ms: int = LEASE_MS
) -> tuple[ClaimOutcome, Execution]:
    """Take the lease. The record changes only with `claimed`, and with `blocked` when the attempts are used up."""
    _lease_length(lease_ms)
    status = effective_status(execution, now_ms)
    if status == "recovery_required":
        return "recovery_required", execution
    if status == "executing" or status in TERMINAL:
        return execution.status, execution  # pyright: ignore[reportReturnType]
    if status == "leased" and now_ms < (execution.lease_expires_at_ms or 0):
        held = (execution.lease_owner, execution.lease_token) == (owner, token)
        return "replayed" if held else "leased", execution
    if now_ms < (execution.eligible_at_ms or 0):
        return "not_due", execution
    now_ms = max(now_ms, execution.updated_at_ms)
    if execution.attempt_count >= execution.max_attempts:
        spent = _ended(
            execution,
            "blocked",
            mutation_id=f"exhausted:{execution.version}",
            code="attempt_budget_exhausted",
            now_ms=now_ms,
        )
        return "blocked", spent
    expires = now_ms + lease_ms
    return "claimed", msgspec.structs.replace(
        execution,
        status="leased",
        version=_next(execution.version),
        attempt_count=execution.attempt_count + 1,
        eligible_at_ms=expires,
        next_attempt_at_ms=None,
        lease_owner=owner,
        lease_token=token,
        lease_expires_at_ms=expires,
        result_mutation_id=None,
        last_result_code=None,
        updated_at_ms=now_ms,
    )


def start(execution: Execution, lease: Lease, now_ms: int) -> Execution:
    """Cross the barrier. Raises `fence_rejected`; what was started under the same lease before is a replay."""
    if (
        execution.status == "executing"
        and execution.version == lease.version + 1
        and (execution.lease_owner, execution.lease_token) == (lease.owner, lease.token)
    ):
        return execution
    _fence(execution, lease, "leased")
    if now_ms >= (execution.lease_expires_at_ms or 0):
        raise Ql3Error("fence_rejected", "The lease has lapsed.")
    now_ms = max(now_ms, execution.updated_at_ms)
    return msgspec.structs.replace(
        execution,
        status="executing",
        version=_next(execution.version),
        eligible_at_ms=None,
        started_at_ms=now_ms,
        updated_at_ms=now_ms,
    )


def renew(execution: Execution, lease: Lease, now_ms: int, lease_ms: int = LEASE_MS) -> Execution:
    """Hold the lease longer; also one that lapsed and that nobody took. Raises `fence_rejected`."""
    _lease_length(lease_ms)
    _fence(execution, lease, "leased", "executing")
    now_ms = max(now_ms, execution.updated_at_ms)
    expires = now_ms + lease_ms
    return msgspec.structs.replace(
        execution,
        version=_next(execution.version),
        lease_expires_at_ms=expires,
        eligible_at_ms=expires if execution.status == "leased" else None,
        updated_at_ms=now_ms,
    )


def release(
    execution: Execution, lease: Lease, *, mutation_id: str, code: str, now_ms: int, retry_at_ms: int | None
) -> Execution:
    """Give the lease back before the barrier: wait for `retry_at_ms`, or end as blocked. Raises `fence_rejected`."""
    if (
        execution.status in ("retry_wait", "blocked")
        and execution.version == lease.version + 1
        and (execution.result_mutation_id, execution.last_result_code) == (mutation_id, code)
    ):
        return execution
    _fence(execution, lease, "leased")
    now_ms = max(now_ms, execution.updated_at_ms)
    if retry_at_ms is None or execution.attempt_count >= execution.max_attempts:
        return _ended(execution, "blocked", mutation_id=mutation_id, code=code, now_ms=now_ms)
    retry_at_ms = max(retry_at_ms, now_ms + 1)
    return msgspec.structs.replace(
        execution,
        status="retry_wait",
        version=_next(execution.version),
        eligible_at_ms=retry_at_ms,
        next_attempt_at_ms=retry_at_ms,
        lease_owner=None,
        lease_token=None,
        lease_expires_at_ms=None,
        result_mutation_id=mutation_id,
        last_result_code=code,
        updated_at_ms=now_ms,
    )


def complete(
    execution: Execution,
    lease: Lease,
    *,
    outcome: Literal["succeeded", "failed", "indeterminate"],
    mutation_id: str,
    code: str,
    now_ms: int,
) -> Execution:
    """End behind the barrier; `indeterminate` ends as blocked. A late owner whom nobody superseded still may.

    Raises `fence_rejected`.
    """
    end: End = "blocked" if outcome == "indeterminate" else outcome
    if (
        execution.status == end
        and execution.version == lease.version + 1
        and (execution.result_mutation_id, execution.last_result_code) == (mutation_id, code)
    ):
        return execution
    _fence(execution, lease, "executing")
    return _ended(execution, end, mutation_id=mutation_id, code=code, now_ms=max(now_ms, execution.updated_at_ms))


def resolved(
    execution: Execution, decision: Literal["confirm_succeeded", "confirm_failed", "abandon_unknown"],
    *, mutation_id: str, code: str, now_ms: int,
) -> Execution:  # fmt: skip
    """Ended by a recovery, which has checked its own fence."""
    ends: dict[str, End] = {
        "confirm_succeeded": "succeeded",
        "confirm_failed": "failed",
        "abandon_unknown": "blocked",
    }
    return _ended(
        execution,
        ends[decision],
        mutation_id=mutation_id,
        code=code,
        now_ms=max(now_ms, execution.updated_at_ms),
    )


def _ended(execution: Execution, end: End, *, mutation_id: str, code: str, now_ms: int) -> Execution:
    return msgspec.structs.replace(
        execution,
        status=end,
        version=_next(execution.version),
        eligible_at_ms=None,
        next_attempt_at_ms=None,
        lease_owner=None,
        lease_token=None,
        lease_expires_at_ms=None,
        result_mutation_id=mutation_id,
        last_result_code=code,
        completed_at_ms=now_ms,
        updated_at_ms=now_ms,
    )


def _fence(execution: Execution, lease: Lease, *statuses: Status) -> None:
    if (
        execution.status not in statuses
        or execution.version != lease.version
        or (execution.lease_owner, execution.lease_token) != (lease.owner, lease.token)
    ):
        raise Ql3Error("fence_rejected")


def _lease_length(lease_ms: int) -> None:
    if not 0 < lease_ms <= LEASE_MAX_MS:
        raise ValueError("a lease lasts up to ten minutes")


def _next(version: int) -> int:
    if version >= VERSION_MAX:
        raise Ql3Error("conflict", "This action has had as many versions as it can have.")
    return version + 1
