"""Purging whole terminal runs, below a stored watermark, on retention's order."""

from __future__ import annotations

from collections.abc import Sequence

from services.kit import purge as guarded
from services.kit.database import Statement, Transaction, json_set

_ENDED = Statement("""
    SELECT id FROM runs WHERE project_id = $1 AND finished_at_ms IS NOT NULL AND finished_at_ms < $2
    ORDER BY finished_at_ms, id LIMIT $3 {for_update_skip_locked}
""")
_LAST_EVENT = Statement("SELECT max(created_at_ms) AS at FROM run_events WHERE run_id {in:$1}")
_DELETIONS = (
    Statement("DELETE FROM run_holds WHERE run_id {in:$1}"),
    Statement(
        "DELETE FROM run_cancellation_dispatches WHERE attempt_id IN (SELECT id FROM run_attempts WHERE run_id {in:$1})"
    ),
    Statement("DELETE FROM run_lease_keys WHERE attempt_id IN (SELECT id FROM run_attempts WHERE run_id {in:$1})"),
    Statement("DELETE FROM run_dispatch_leases WHERE attempt_id IN (SELECT id FROM run_attempts WHERE run_id {in:$1})"),
    Statement("DELETE FROM run_retry_policies WHERE run_id {in:$1}"),
    Statement("DELETE FROM run_attempts WHERE run_id {in:$1}"),
    Statement("DELETE FROM runs WHERE id {in:$1}"),
)


async def ended(tx: Transaction, project: str, before_ms: int, limit: int) -> list[str]:
    """Terminal runs of a project that ended before a time, oldest first."""
    return [row["id"] for row in await tx.fetch(_ENDED, project, before_ms, limit)]


async def delete(tx: Transaction, run_ids: Sequence[str], now: int) -> None:
    """Deletes these runs with all that belongs to them. Their events go through the guarded function alone."""
    keys = json_set(run_ids)
    row = await tx.fetch_one(_LAST_EVENT, keys)
    # A late receipt may be younger than the run's end; nothing that was written in this very moment is purged.
    youngest = min(now, (row["at"] if row and row["at"] is not None else 0) + 1)
    await guarded.raise_watermark(tx, "run_events", youngest)
    await guarded.purge(tx, "run_events", run_ids)
    for deletion in _DELETIONS:
        await tx.execute(deletion, keys)
