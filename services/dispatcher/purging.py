"""Purge orders of retention: whole terminal runs at a time."""

from __future__ import annotations

from schemas.artifacts import PurgeRuns
from schemas.identity import Subject
from services.dispatcher.store import purge
from services.kit import audit
from services.kit.database import Transaction


async def purge_runs(tx: Transaction, order: PurgeRuns) -> int:
    """Deletes up to `order.limit` runs that ended before `order.finished_before_ms`; answers how many. Idempotent."""
    now = await tx.now_ms()
    run_ids = await purge.ended(tx, order.project, min(order.finished_before_ms, now), order.limit)
    if run_ids:
        await purge.delete(tx, run_ids, now)
        await audit.append(
            tx,
            Subject(type="system", id="retention"),
            "runs.purge",
            order.project,
            order.order_id,
            "allow",
            {"runs": len(run_ids), "finished_before_ms": order.finished_before_ms},
        )
    return len(run_ids)
