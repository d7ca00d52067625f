"""Requests that were closed long ago, taken out as a whole with what came of them."""

from __future__ import annotations

from typing import Final, NamedTuple

from services.kit import purge as guarded
from services.kit.database import Statement, Transaction, id_set, json_set

_CLOSED = Statement("""
    SELECT r.id, r.dispatch_id, r.action_ref FROM approval_requests AS r
    LEFT JOIN approved_action_dispatch_executions AS e ON e.dispatch_id = r.dispatch_id
    LEFT JOIN approval_endings AS n ON n.request_id = r.id
    WHERE r.expires_at_ms < $1
      AND (r.dispatch_id IS NULL
        OR (e.status IN ('succeeded', 'failed', 'blocked') AND e.completed_at_ms < $1))
      AND (n.answered_at_ms < $1 OR (n.request_id IS NULL AND (r.state = 'consumed' OR r.action_type <> 'run.release')))
    ORDER BY r.expires_at_ms, r.id LIMIT $2
""")
_CONTROLS = id_set("DELETE FROM approved_action_recovery_controls WHERE dispatch_id {in:$1}")
_EXECUTIONS = id_set("DELETE FROM approved_action_dispatch_executions WHERE dispatch_id {in:$1}")
_ENDINGS = id_set("DELETE FROM approval_endings WHERE request_id {in:$1}")
_REQUESTS = id_set("DELETE FROM approval_requests WHERE id {in:$1}")
_GUARDED: Final = (
    "approved_action_recovery_authorizations",
    "approved_action_recovery_resolutions",
    "approved_action_receipts",
    "approved_action_dispatches",
    "approval_decisions",
    "approved_action_plans",
)


class Closed(NamedTuple):
    """A request of which nothing is open any more."""

    id: str
    dispatch_id: str | None
    action_ref: str


async def closed(tx: Transaction, before_ms: int, limit: int) -> list[Closed]:
    """Requests that ended, with all that came of them, before this time; the oldest first."""
    rows = await tx.fetch(_CLOSED, before_ms, limit)
    return [Closed(row["id"], row["dispatch_id"], row["action_ref"]) for row in rows]


async def delete(tx: Transaction, found: list[Closed], watermark_ms: int) -> None:
    """Delete these with everything that belongs to them; append-only rows go through the guarded function alone."""
    requests = [one.id for one in found]
    dispatches = [one.dispatch_id for one in found if one.dispatch_id is not None]
    for table in _GUARDED:
        await guarded.raise_watermark(tx, table, watermark_ms)
    await guarded.purge(tx, "approved_action_recovery_authorizations", dispatches)
    await guarded.purge(tx, "approved_action_recovery_resolutions", dispatches)
    await tx.execute(_CONTROLS, json_set(dispatches))
    await guarded.purge(tx, "approved_action_receipts", dispatches)
    await tx.execute(_EXECUTIONS, json_set(dispatches))
    await guarded.purge(tx, "approved_action_dispatches", requests)
    await guarded.purge(tx, "approval_decisions", requests)
    await tx.execute(_ENDINGS, json_set(requests))
    await tx.execute(_REQUESTS, json_set(requests))
    await guarded.purge(tx, "approved_action_plans", [one.action_ref for one in found])
