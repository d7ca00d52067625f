"""Approved actions: the immutable dispatch, its execution and its receipt."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from schemas.approvals import Binding
from schemas.errors import Ql3Error
from schemas.identity import Assurance, Subject
from services.approval.executions import Execution
from services.kit.database import Row, Statement, Transaction


class Dispatch(NamedTuple):
    """One approved action, as it was approved; its id is the idempotency key of whoever carries it out."""

    id: str
    approval_id: str
    project: str
    binding: Binding
    requested_by: Subject
    approved_by: Subject
    approved_assurance: Assurance
    approved_at_ms: int
    expires_at_ms: int
    consumed_by: Subject
    created_at_ms: int


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """The proof that an approved action took effect."""

    dispatch_id: str
    approval_request_id: str
    project: str
    action_type: str
    action_digest: str
    execution_attempt: int
    execution_version: int
    started_at_ms: int
    result_code: str
    resource_type: str
    resource_id: str
    finished_at_ms: int
    evidence_digest: str


_DISPATCH = (
    "d.id, d.approval_request_id, d.project_id, d.permission, d.action_type, d.action_ref, d.action_digest, "
    "d.preview_digest, d.requested_by_type, d.requested_by_id, d.approved_by_type, d.approved_by_id, "
    "d.approved_assurance, d.approved_at_ms, d.expires_at_ms, d.consumed_by_type, d.consumed_by_id, d.created_at_ms"
)
_GET = Statement(f"SELECT {_DISPATCH} FROM approved_action_dispatches AS d WHERE d.id = $1")  # noqa: S608
_INSERT = Statement("""
    INSERT INTO approved_action_dispatches (id, approval_request_id, approval_request_version, project_id, state,
      permission, action_type, action_ref, action_digest, preview_digest, requested_by_type, requested_by_id,
      approved_by_type, approved_by_id, approved_assurance, approved_at_ms, expires_at_ms, consumed_by_type,
      consumed_by_id, created_at_ms)
    VALUES ($1, $2, 3, $3, 'pending', $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18)
""")

_EXECUTION = (
    "e.dispatch_id, e.project_id, e.status, e.version, e.attempt_count, e.max_attempts, e.eligible_at_ms, "
    "e.next_attempt_at_ms, e.lease_owner, e.lease_token, e.lease_expires_at_ms, e.started_at_ms, "
    "e.result_mutation_id, e.last_result_code, e.completed_at_ms, e.created_at_ms, e.updated_at_ms"
)
_EXECUTION_GET = Statement(
    f"SELECT {_EXECUTION} FROM approved_action_dispatch_executions AS e WHERE e.dispatch_id = $1"  # noqa: S608
)
_EXECUTION_LOCK = Statement(
    f"SELECT {_EXECUTION} FROM approved_action_dispatch_executions AS e WHERE e.dispatch_id = $1 {{for_update}}"  # noqa: S608
)
_EXECUTION_INSERT = Statement("""
    INSERT INTO approved_action_dispatch_executions (dispatch_id, project_id, status, version, attempt_count,
      max_attempts, eligible_at_ms, created_at_ms, updated_at_ms)
    VALUES ($1, $2, 'pending', 0, 0, $3, $4, $4, $4)
""")
_EXECUTION_UPDATE = Statement("""
    UPDATE approved_action_dispatch_executions SET status = $4, version = $5, attempt_count = $6, eligible_at_ms = $7,
      next_attempt_at_ms = $8, lease_owner = $9, lease_token = $10, lease_expires_at_ms = $11, started_at_ms = $12,
      result_mutation_id = $13, last_result_code = $14, completed_at_ms = $15, updated_at_ms = $16
    WHERE dispatch_id = $1 AND version = $2 AND status = $3
""")
_DUE = Statement("""
    SELECT dispatch_id FROM approved_action_dispatch_executions
    WHERE status IN ('pending', 'leased', 'retry_wait') AND eligible_at_ms <= $1
    ORDER BY eligible_at_ms, dispatch_id LIMIT $2
""")

_RECEIPT_INSERT = Statement("""
    INSERT INTO approved_action_receipts (dispatch_id, approval_request_id, project_id, schema_version, action_type,
      action_digest, execution_attempt, execution_version, started_at_ms, idempotency_key, outcome, result_code,
      resource_type, resource_id, finished_at_ms, evidence_digest, created_at_ms)
    VALUES ($1, $2, $3, 1, $4, $5, $6, $7, $8, $1, 'succeeded', $9, $10, $11, $12, $13, $12)
""")
_RECEIPT_GET = Statement("""
    SELECT dispatch_id, approval_request_id, project_id, action_type, action_digest, execution_attempt,
      execution_version, started_at_ms, result_code, resource_type, resource_id, finished_at_ms, evidence_digest
    FROM approved_action_receipts WHERE dispatch_id = $1
""")


async def dispatch(tx: Transaction, dispatch_id: str) -> Dispatch | None:
    """An approved action."""
    row = await tx.fetch_one(_GET, dispatch_id)
    return _dispatch(row) if row else None


async def insert_dispatch(tx: Transaction, made: Dispatch) -> None:
    """The one dispatch of a request."""
    await tx.execute(
        _INSERT,
        made.id,
        made.approval_id,
        made.project,
        made.binding.permission,
        made.binding.action_type,
        made.binding.action_ref,
        made.binding.action_digest,
        made.binding.preview_digest,
        made.requested_by.type,
        made.requested_by.id,
        made.approved_by.type,
        made.approved_by.id,
        made.approved_assurance,
        made.approved_at_ms,
        made.expires_at_ms,
        made.consumed_by.type,
        made.consumed_by.id,
        made.created_at_ms,
    )


async def execution(tx: Transaction, dispatch_id: str, *, lock: bool = False) -> Execution | None:
    """The execution of a dispatch."""
    row = await tx.fetch_one(_EXECUTION_LOCK if lock else _EXECUTION_GET, dispatch_id)
    return _execution(row) if row else None


async def insert_execution(tx: Transaction, made: Execution) -> None:
    """The baseline of an execution."""
    await tx.execute(_EXECUTION_INSERT, made.dispatch_id, made.project, made.max_attempts, made.created_at_ms)


async def update_execution(tx: Transaction, before: Execution, after: Execution) -> None:
    """Store a step of the machine; an unchanged record is a replay. Raises `fence_rejected` when the row has moved."""
    if before == after:
        return
    changed = await tx.execute(
        _EXECUTION_UPDATE,
        before.dispatch_id,
        before.version,
        before.status,
        after.status,
        after.version,
        after.attempt_count,
        after.eligible_at_ms,
        after.next_attempt_at_ms,
        after.lease_owner,
        after.lease_token,
        after.lease_expires_at_ms,
        after.started_at_ms,
        after.result_mutation_id,
        after.last_result_code,
        after.completed_at_ms,
        after.updated_at_ms,
    )
    if changed != 1:
        raise Ql3Error("fence_rejected")


async def due(tx: Transaction, now_ms: int, limit: int) -> list[str]:
    """Dispatches whose execution may be claimed; `executing` ones never."""
    return [row["dispatch_id"] for row in await tx.fetch(_DUE, now_ms, limit)]


async def insert_receipt(tx: Transaction, made: Receipt) -> None:
    """The one receipt of a dispatch."""
    await tx.execute(
        _RECEIPT_INSERT,
        made.dispatch_id,
        made.approval_request_id,
        made.project,
        made.action_type,
        made.action_digest,
        made.execution_attempt,
        made.execution_version,
        made.started_at_ms,
        made.result_code,
        made.resource_type,
        made.resource_id,
        made.finished_at_ms,
        made.evidence_digest,
    )


async def receipt(tx: Transaction, dispatch_id: str) -> Receipt | None:
    """The receipt of a dispatch."""
    row = await tx.fetch_one(_RECEIPT_GET, dispatch_id)
    if row is None:
        return None
    return Receipt(
        dispatch_id=row["dispatch_id"],
        approval_request_id=row["approval_request_id"],
        project=row["project_id"],
        action_type=row["action_type"],
        action_digest=row["action_digest"],
        execution_attempt=row["execution_attempt"],
        execution_version=row["execution_version"],
        started_at_ms=row["started_at_ms"],
        result_code=row["result_code"],
        resource_type=row["resource_type"],
        resource_id=row["resource_id"],
        finished_at_ms=row["finished_at_ms"],
        evidence_digest=row["evidence_digest"],
    )


def _dispatch(row: Row) -> Dispatch:
    return Dispatch(
        id=row["id"],
        approval_id=row["approval_request_id"],
        project=row["project_id"],
        binding=Binding(
            permission=row["permission"],
            action_type=row["action_type"],
            action_ref=row["action_ref"],
            action_digest=row["action_digest"],
            preview_digest=row["preview_digest"],
        ),
        requested_by=Subject(type=row["requested_by_type"], id=row["requested_by_id"]),
        approved_by=Subject(type=row["approved_by_type"], id=row["approved_by_id"]),
        approved_assurance=row["approved_assurance"],
        approved_at_ms=row["approved_at_ms"],
        expires_at_ms=row["expires_at_ms"],
        consumed_by=Subject(type=row["consumed_by_type"], id=row["consumed_by_id"]),
        created_at_ms=row["created_at_ms"],
    )


def _execution(row: Row) -> Execution:
    return Execution(
        dispatch_id=row["dispatch_id"],
        project=row["project_id"],
        status=row["status"],
        version=row["version"],
        attempt_count=row["attempt_count"],
        max_attempts=row["max_attempts"],
        eligible_at_ms=row["eligible_at_ms"],
        next_attempt_at_ms=row["next_attempt_at_ms"],
        lease_owner=row["lease_owner"],
        lease_token=row["lease_token"],
        lease_expires_at_ms=row["lease_expires_at_ms"],
        started_at_ms=row["started_at_ms"],
        result_mutation_id=row["result_mutation_id"],
        last_result_code=row["last_result_code"],
        completed_at_ms=row["completed_at_ms"],
        created_at_ms=row["created_at_ms"],
        updated_at_ms=row["updated_at_ms"],
    )
