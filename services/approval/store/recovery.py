"""Recovery controls, resolutions and the authorization facts of manual ones; and actions as people read them."""

from __future__ import annotations

from typing import NamedTuple

from schemas.approvals import ApprovedAction
from schemas.errors import Ql3Error
from schemas.identity import Assurance
from services.approval.digests import fact_digest
from services.approval.recovery import Control, Resolution
from services.approval.store.cursors import decode_time_id, encode
from services.kit.database import Row, Statement, Transaction


class Authorization(NamedTuple):
    """Who answered for a manual recovery, how they had proved who they are, and on which fence."""

    dispatch_id: str
    project: str
    mutation_id: str
    resolved_by: str
    authentication_id: str
    assurance: Assurance
    authenticated_at_ms: int
    authorized_at_ms: int
    project_version: int
    binding_version: int | None

    @property
    def digest(self) -> str:
        """The canonical digest of the fact."""
        return fact_digest(
            {
                "dispatchId": self.dispatch_id,
                "projectId": self.project,
                "mutationId": self.mutation_id,
                "resolvedByType": "user",
                "resolvedById": self.resolved_by,
                "authenticationId": self.authentication_id,
                "assurance": self.assurance,
                "authenticatedAtMs": self.authenticated_at_ms,
                "projectVersion": self.project_version,
                "bindingVersion": self.binding_version,
                "authorizedAtMs": self.authorized_at_ms,
            }
        )


_CONTROL = (
    "c.dispatch_id, c.project_id, c.execution_version, c.status, c.version, c.next_scan_at_ms, c.lease_owner, "
    "c.lease_token, c.lease_expires_at_ms, c.finding_count, c.last_finding_mutation_id, c.last_finding, "
    "c.last_result_code, c.last_evidence_digest, c.resolution_mutation_id, c.created_at_ms, c.updated_at_ms"
)
_GET = Statement(f"SELECT {_CONTROL} FROM approved_action_recovery_controls AS c WHERE c.dispatch_id = $1")  # noqa: S608
_LOCK = Statement(
    f"SELECT {_CONTROL} FROM approved_action_recovery_controls AS c WHERE c.dispatch_id = $1 {{for_update}}"  # noqa: S608
)
_INSERT = Statement("""
    INSERT INTO approved_action_recovery_controls (dispatch_id, project_id, execution_version, status, version,
      next_scan_at_ms, finding_count, created_at_ms, updated_at_ms)
    VALUES ($1, $2, $3, 'armed', 0, $4, 0, $5, $5)
""")
_UPDATE = Statement("""
    UPDATE approved_action_recovery_controls SET execution_version = $3, status = $4, version = $5,
      next_scan_at_ms = $6, lease_owner = $7, lease_token = $8, lease_expires_at_ms = $9, finding_count = $10,
      last_finding_mutation_id = $11, last_finding = $12, last_result_code = $13, last_evidence_digest = $14,
      resolution_mutation_id = $15, updated_at_ms = $16
    WHERE dispatch_id = $1 AND version = $2
""")
_DUE = Statement("""
    SELECT c.dispatch_id FROM approved_action_recovery_controls AS c
    JOIN approved_action_dispatch_executions AS e ON e.dispatch_id = c.dispatch_id
    WHERE c.status IN ('armed', 'leased') AND c.next_scan_at_ms <= $1 AND e.status = 'executing'
      AND e.lease_expires_at_ms <= $1
    ORDER BY c.next_scan_at_ms, c.dispatch_id LIMIT $2
""")

_RESOLUTION = Statement("""
    SELECT dispatch_id, project_id, execution_version, mutation_id, source, decision, evidence_digest, reason_code,
      resolved_by_id, resolved_at_ms
    FROM approved_action_recovery_resolutions WHERE dispatch_id = $1
""")
_INSERT_RESOLUTION = Statement("""
    INSERT INTO approved_action_recovery_resolutions (dispatch_id, project_id, execution_version, mutation_id, source,
      decision, evidence_digest, reason_code, resolved_by_type, resolved_by_id, resolved_at_ms)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)
""")
_INSERT_AUTHORIZATION = Statement("""
    INSERT INTO approved_action_recovery_authorizations (dispatch_id, project_id, mutation_id, resolved_by_id,
      authentication_id, assurance, authenticated_at_ms, authorized_at_ms, project_version, binding_version,
      fact_digest)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)
""")
_AUTHORIZATION = Statement("""
    SELECT dispatch_id, project_id, mutation_id, resolved_by_id, authentication_id, assurance, authenticated_at_ms,
      authorized_at_ms, project_version, binding_version, fact_digest
    FROM approved_action_recovery_authorizations WHERE dispatch_id = $1
""")

_ACTION = (
    "d.id, d.approval_request_id, d.project_id, d.action_type, d.action_ref, d.created_at_ms AS dispatched_at_ms, "
    "e.status, e.version, e.attempt_count, e.max_attempts, e.last_result_code, e.started_at_ms, e.completed_at_ms, "
    "e.lease_expires_at_ms, t.resource_type, t.resource_id, t.evidence_digest, c.status AS recovery_status, "
    "c.version AS recovery_version, c.last_finding, c.last_result_code AS finding_code, c.finding_count"
)
_JOINED = (
    "approved_action_dispatches AS d "
    "JOIN approved_action_dispatch_executions AS e ON e.dispatch_id = d.id "
    "LEFT JOIN approved_action_recovery_controls AS c ON c.dispatch_id = d.id "
    "LEFT JOIN approved_action_receipts AS t ON t.dispatch_id = d.id"
)
_AFTER = "d.project_id = $1 AND (d.created_at_ms, d.id) < ($2, $3)"
_ORDER = "ORDER BY d.created_at_ms DESC, d.id DESC LIMIT $4"
_LIST = Statement(f"SELECT {_ACTION} FROM {_JOINED} WHERE {_AFTER} {_ORDER}")  # noqa: S608
_LIST_DOUBT = Statement(
    f"SELECT {_ACTION} FROM {_JOINED} WHERE {_AFTER} AND e.status = 'executing' "  # noqa: S608
    f"AND e.lease_expires_at_ms <= $5 {_ORDER}"
)
_VIEW = Statement(f"SELECT {_ACTION} FROM {_JOINED} WHERE d.id = $1 AND d.project_id = $2")  # noqa: S608


async def control(tx: Transaction, dispatch_id: str, *, lock: bool = False) -> Control | None:
    """The control of an execution that crossed the barrier."""
    row = await tx.fetch_one(_LOCK if lock else _GET, dispatch_id)
    return _control(row) if row else None


async def insert_control(tx: Transaction, made: Control) -> None:
    """An armed control."""
    await tx.execute(
        _INSERT, made.dispatch_id, made.project, made.execution_version, made.next_scan_at_ms, made.created_at_ms
    )


async def update_control(tx: Transaction, before: Control, after: Control) -> None:
    """Store a step of the machine; an unchanged record is a replay. Raises `fence_rejected` when the row has moved."""
    if before == after:
        return
    changed = await tx.execute(
        _UPDATE,
        before.dispatch_id,
        before.version,
        after.execution_version,
        after.status,
        after.version,
        after.next_scan_at_ms,
        after.lease_owner,
        after.lease_token,
        after.lease_expires_at_ms,
        after.finding_count,
        after.last_finding_mutation_id,
        after.last_finding,
        after.last_result_code,
        after.last_evidence_digest,
        after.resolution_mutation_id,
        after.updated_at_ms,
    )
    if changed != 1:
        raise Ql3Error("fence_rejected")


async def due(tx: Transaction, now_ms: int, limit: int) -> list[str]:
    """Dispatches whose outcome is in doubt and which may be looked at now."""
    return [row["dispatch_id"] for row in await tx.fetch(_DUE, now_ms, limit)]


async def resolution(tx: Transaction, dispatch_id: str) -> Resolution | None:
    """How a doubt was ended."""
    row = await tx.fetch_one(_RESOLUTION, dispatch_id)
    if row is None:
        return None
    return Resolution(
        dispatch_id=row["dispatch_id"],
        project=row["project_id"],
        execution_version=row["execution_version"],
        mutation_id=row["mutation_id"],
        source=row["source"],
        decision=row["decision"],
        evidence_digest=row["evidence_digest"],
        reason_code=row["reason_code"],
        resolved_by=row["resolved_by_id"],
        resolved_at_ms=row["resolved_at_ms"],
    )


async def insert_resolution(tx: Transaction, made: Resolution) -> None:
    """The one resolution of a doubt."""
    await tx.execute(
        _INSERT_RESOLUTION,
        made.dispatch_id,
        made.project,
        made.execution_version,
        made.mutation_id,
        made.source,
        made.decision,
        made.evidence_digest,
        made.reason_code,
        "user" if made.resolved_by else None,
        made.resolved_by,
        made.resolved_at_ms,
    )


async def insert_authorization(tx: Transaction, made: Authorization) -> None:
    """The fact behind a manual resolution."""
    await tx.execute(_INSERT_AUTHORIZATION, *made, made.digest)


async def authorization(tx: Transaction, dispatch_id: str) -> Authorization | None:
    """The fact behind a manual resolution. Raises `unavailable` when its digest does not hold."""
    row = await tx.fetch_one(_AUTHORIZATION, dispatch_id)
    if row is None:
        return None
    fact = Authorization(
        row["dispatch_id"],
        row["project_id"],
        row["mutation_id"],
        row["resolved_by_id"],
        row["authentication_id"],
        row["assurance"],
        row["authenticated_at_ms"],
        row["authorized_at_ms"],
        row["project_version"],
        row["binding_version"],
    )
    if fact.digest != row["fact_digest"]:
        raise Ql3Error("unavailable", "An authorization fact does not match its digest.")
    return fact


async def actions(
    tx: Transaction, project: str, doubtful: bool, limit: int, cursor: str | None
) -> tuple[list[ApprovedAction], str | None]:
    """Approved actions of a project, newest first; with `doubtful`, those whose outcome is in doubt."""
    at_ms, last = decode_time_id(cursor)
    now_ms = await tx.now_ms()
    if doubtful:
        rows = await tx.fetch(_LIST_DOUBT, project, at_ms, last, limit + 1, now_ms)
    else:
        rows = await tx.fetch(_LIST, project, at_ms, last, limit + 1)
    items = [_action(row, now_ms) for row in rows[:limit]]
    more = encode(rows[limit - 1]["dispatched_at_ms"], items[-1].dispatch_id) if len(rows) > limit else None
    return items, more


async def action(tx: Transaction, project: str, dispatch_id: str) -> ApprovedAction | None:
    """One approved action of this project."""
    row = await tx.fetch_one(_VIEW, dispatch_id, project)
    return _action(row, await tx.now_ms()) if row else None


def _action(row: Row, now_ms: int) -> ApprovedAction:
    lapsed = row["status"] == "executing" and now_ms >= (row["lease_expires_at_ms"] or 0)
    return ApprovedAction(
        dispatch_id=row["id"],
        approval_id=row["approval_request_id"],
        project=row["project_id"],
        action_type=row["action_type"],
        action_ref=row["action_ref"],
        status="recovery_required" if lapsed else row["status"],
        version=row["version"],
        attempt_count=row["attempt_count"],
        max_attempts=row["max_attempts"],
        result_code=row["last_result_code"],
        started_at_ms=row["started_at_ms"],
        completed_at_ms=row["completed_at_ms"],
        created_at_ms=row["dispatched_at_ms"],
        resource_type=row["resource_type"],
        resource_id=row["resource_id"],
        evidence_digest=row["evidence_digest"],
        recovery_status=row["recovery_status"],
        recovery_version=row["recovery_version"],
        finding=row["last_finding"],
        finding_code=row["finding_code"],
        finding_count=row["finding_count"] or 0,
    )


def _control(row: Row) -> Control:
    return Control(
        dispatch_id=row["dispatch_id"],
        project=row["project_id"],
        execution_version=row["execution_version"],
        status=row["status"],
        version=row["version"],
        next_scan_at_ms=row["next_scan_at_ms"],
        lease_owner=row["lease_owner"],
        lease_token=row["lease_token"],
        lease_expires_at_ms=row["lease_expires_at_ms"],
        finding_count=row["finding_count"],
        last_finding_mutation_id=row["last_finding_mutation_id"],
        last_finding=row["last_finding"],
        last_result_code=row["last_result_code"],
        last_evidence_digest=row["last_evidence_digest"],
        resolution_mutation_id=row["resolution_mutation_id"],
        created_at_ms=row["created_at_ms"],
        updated_at_ms=row["updated_at_ms"],
    )
