"""Recovery of an execution whose outcome is in doubt: by evidence or a person's word, never by doing it again. Pure.

A control is armed in the transaction that crosses the start barrier. `armed → leased → armed | manual_required |
resolved`; a normal completion resolves it, a renewal of the execution arms it anew. Times are the database's clock.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

import msgspec

from schemas.errors import Ql3Error
from services.approval.executions import TERMINAL, VERSION_MAX, Execution

LEASE_MS: Final = 30_000
RETRY_BASE_MS: Final = 5_000
RETRY_MAX_MS: Final = 300_000

FindingKind = Literal[
    "verified_succeeded", "verified_failed", "still_running", "missing", "conflict", "unsupported", "unavailable"
]
RETRIED: Final[frozenset[FindingKind]] = frozenset({"still_running", "missing", "unavailable"})
MANUAL: Final[frozenset[FindingKind]] = frozenset({"conflict", "unsupported"})
RecoveryDecision = Literal["confirm_succeeded", "confirm_failed", "abandon_unknown"]
ControlStatus = Literal["armed", "leased", "manual_required", "resolved"]
ClaimOutcome = Literal["claimed", "not_due", "leased", "execution_active", "manual_required", "resolved"]


class Control(msgspec.Struct, frozen=True, kw_only=True):
    """One recovery control as stored."""

    dispatch_id: str
    project: str
    execution_version: int
    status: ControlStatus = "armed"
    version: int = 0
    next_scan_at_ms: int | None
    lease_owner: str | None = None
    lease_token: str | None = None
    lease_expires_at_ms: int | None = None
    finding_count: int = 0
    last_finding_mutation_id: str | None = None
    last_finding: FindingKind | None = None
    last_result_code: str | None = None
    last_evidence_digest: str | None = None
    resolution_mutation_id: str | None = None
    created_at_ms: int
    updated_at_ms: int


class Finding(NamedTuple):
    """What a provider saw. A verified finding has an evidence digest."""

    kind: FindingKind
    code: str
    evidence_digest: str | None = None
    resource: tuple[str, str] = ("evidence", "-")
    """Type and id of what a verified success has made."""


class Resolution(msgspec.Struct, frozen=True, kw_only=True):
    """How a doubt was ended, once for all."""

    dispatch_id: str
    project: str
    execution_version: int
    mutation_id: str
    source: Literal["automatic_evidence", "human"]
    decision: RecoveryDecision
    evidence_digest: str | None
    reason_code: str
    resolved_by: str | None
    resolved_at_ms: int


def armed(execution: Execution, now_ms: int) -> Control:
    """The control of an execution that has just crossed the barrier."""
    return Control(
        dispatch_id=execution.dispatch_id,
        project=execution.project,
        execution_version=execution.version,
        next_scan_at_ms=execution.lease_expires_at_ms,
        created_at_ms=now_ms,
        updated_at_ms=now_ms,
    )


def rearmed(control: Control, execution: Execution, now_ms: int) -> Control:
    """The control after the execution's lease was renewed: whoever was recovering has lost the right to."""
    _consistent(control, execution.version - 1)
    return _changed(
        control,
        now_ms,
        status="armed",
        execution_version=execution.version,
        next_scan_at_ms=execution.lease_expires_at_ms,
    )


def completed(control: Control, execution: Execution, now_ms: int) -> Control:
    """The control after a normal completion."""
    _consistent(control, execution.version - 1)
    return _changed(
        control,
        now_ms,
        status="resolved",
        execution_version=execution.version,
        next_scan_at_ms=None,
        resolution_mutation_id=execution.result_mutation_id,
    )


def claim(
    control: Control, execution: Execution, *, owner: str, token: str, now_ms: int, lease_ms: int = LEASE_MS
) -> tuple[ClaimOutcome, Control]:
    """Take the recovery lease. The record changes only with `claimed`."""
    if control.status == "resolved" or control.status == "manual_required":
        return control.status, control
    _consistent(control, execution.version)
    if now_ms < (execution.lease_expires_at_ms or 0):
        return "execution_active", control
    if control.status == "leased" and now_ms < (control.lease_expires_at_ms or 0):
        return "leased", control
    if now_ms < (control.next_scan_at_ms or 0):
        return "not_due", control
    expires = max(now_ms, control.updated_at_ms) + lease_ms
    return "claimed", _changed(
        control,
        now_ms,
        status="leased",
        next_scan_at_ms=expires,
        lease_owner=owner,
        lease_token=token,
        lease_expires_at_ms=expires,
    )


def retry_delay_ms(finding_count: int) -> int:
    """How long to wait after this many findings."""
    return min(RETRY_MAX_MS, RETRY_BASE_MS * 2 ** min(finding_count, 30))


def record(control: Control, finding: Finding, *, mutation_id: str, owner: str, token: str, now_ms: int) -> Control:
    """Note what does not settle it: look again later, or leave it to a person. Raises `fence_rejected`."""
    if control.last_finding_mutation_id == mutation_id and control.last_finding == finding.kind:
        return control
    require_lease(control, owner, token)
    again = finding.kind in RETRIED
    if not again and finding.kind not in MANUAL:
        raise ValueError("a verified finding resolves")
    now = max(now_ms, control.updated_at_ms)
    return _changed(
        control,
        now_ms,
        status="armed" if again else "manual_required",
        next_scan_at_ms=now + retry_delay_ms(control.finding_count) if again else None,
        finding_count=control.finding_count + 1,
        last_finding_mutation_id=mutation_id,
        last_finding=finding.kind,
        last_result_code=finding.code,
        last_evidence_digest=finding.evidence_digest,
    )


def require_lease(control: Control, owner: str, token: str) -> None:
    """Raises `fence_rejected` unless this is the holder of the recovery lease."""
    if control.status != "leased" or (control.lease_owner, control.lease_token) != (owner, token):
        raise Ql3Error("fence_rejected")


def admit_resolution(
    control: Control,
    execution: Execution,
    *,
    expected_execution_version: int,
    expected_recovery_version: int | None,
    now_ms: int,
) -> None:
    """Whether an unresolved doubt may be ended now. Raises `already_decided` or `fence_rejected`.

    An execution whose lease lives is not in doubt.
    """
    if execution.status in TERMINAL:
        raise Ql3Error("already_decided")
    if (
        execution.status != "executing"
        or execution.version != expected_execution_version
        or control.execution_version != expected_execution_version
        or (expected_recovery_version is not None and control.version != expected_recovery_version)
        or control.status == "resolved"
    ):
        raise Ql3Error("fence_rejected")
    if now_ms < (execution.lease_expires_at_ms or 0):
        raise Ql3Error("fence_rejected", "The action may still be running.")


def settled(
    control: Control, execution: Execution, resolution: Resolution, finding: Finding | None, now_ms: int
) -> Control:
    """The control after its resolution; `execution` is the one that the resolution ended."""
    changed = _changed(
        control,
        now_ms,
        status="resolved",
        execution_version=execution.version,
        next_scan_at_ms=None,
        resolution_mutation_id=resolution.mutation_id,
    )
    if finding is None:
        return changed
    return msgspec.structs.replace(
        changed,
        finding_count=control.finding_count + 1,
        last_finding_mutation_id=resolution.mutation_id,
        last_finding=finding.kind,
        last_result_code=finding.code,
        last_evidence_digest=finding.evidence_digest,
    )


def _changed(control: Control, now_ms: int, **changes: object) -> Control:
    if control.version >= VERSION_MAX:
        raise Ql3Error("conflict", "This recovery has had as many versions as it can have.")
    fields: dict[str, object] = {
        "lease_owner": None,
        "lease_token": None,
        "lease_expires_at_ms": None,
        "version": control.version + 1,
        "updated_at_ms": max(now_ms, control.updated_at_ms),
        **changes,
    }
    return msgspec.structs.replace(control, **fields)


def _consistent(control: Control, execution_version: int) -> None:
    if control.execution_version != execution_version:
        raise Ql3Error("internal_error", "An execution and its recovery control do not agree.")
