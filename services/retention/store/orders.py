"""The statements of open orders: to workers (drop your copy) and to the dispatcher (purge old runs)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from services.kit.database import Statement, Transaction, id_set, json_rows, json_set

OPEN_RETIRE = Statement(
    """INSERT INTO retire_orders (attempt_id, worker_id, artifact_id, ring_at_ms, created_at_ms)
    SELECT o.attempt_id, o.worker_id, o.artifact_id, CAST($2 AS BIGINT), CAST($2 AS BIGINT)
    FROM {rows:$1 attempt_id text, worker_id text, artifact_id text} AS o WHERE true ON CONFLICT DO NOTHING"""
)
DUE_RETIRE = Statement(
    """SELECT attempt_id, worker_id, artifact_id, rings FROM retire_orders
    WHERE ring_at_ms <= $1 ORDER BY ring_at_ms, attempt_id LIMIT $2 {for_update_skip_locked}"""
)
ANY_DUE = Statement("SELECT 1 AS due FROM retire_orders WHERE ring_at_ms <= $1 LIMIT 1")
RUNG_RETIRE = Statement(
    """UPDATE retire_orders SET rings = rings + 1, ring_at_ms = r.ring_at_ms
    FROM {rows:$1 attempt_id text, ring_at_ms bigint} AS r WHERE retire_orders.attempt_id = r.attempt_id"""
)
CLOSE_RETIRE = id_set("DELETE FROM retire_orders WHERE worker_id = $2 AND attempt_id {in:$1}")
DROP_RETIRE = Statement("DELETE FROM retire_orders WHERE created_at_ms < $1", long=True)

COUNT_ENDED = Statement(
    """INSERT INTO ended_hours (project, hour_ms, attempts)
    SELECT h.project, h.hour_ms, h.attempts FROM {rows:$1 project text, hour_ms bigint, attempts bigint} AS h
    WHERE true ON CONFLICT (project, hour_ms) DO UPDATE SET attempts = ended_hours.attempts + excluded.attempts"""
)
# A hold in a project stops every purge of its runs: the order names an age, not the runs to spare.
PURGEABLE = Statement(
    """SELECT e.project, MIN(e.hour_ms) AS hour_ms, p.runs_ms FROM ended_hours e
    JOIN retention_policies p ON p.project = e.project
    WHERE NOT EXISTS (SELECT 1 FROM holds h WHERE h.project = e.project)
        AND NOT EXISTS (SELECT 1 FROM purge_orders o WHERE o.project = e.project)
    GROUP BY e.project, p.runs_ms"""
)
OPEN_PURGE = Statement(
    """INSERT INTO purge_orders (project, order_id, hour_ms, finished_before_ms, ring_at_ms)
    VALUES ($1, $2, $3, $4, $5) ON CONFLICT DO NOTHING"""
)
DUE_PURGE = Statement(
    """SELECT project, order_id, finished_before_ms, rings FROM purge_orders
    WHERE ring_at_ms <= $1 ORDER BY ring_at_ms LIMIT $2 {for_update_skip_locked}"""
)
RUNG_PURGE = Statement("UPDATE purge_orders SET rings = rings + 1, ring_at_ms = $2 WHERE order_id = $1")
CLOSE_PURGE = id_set("DELETE FROM purge_orders WHERE order_id {in:$1} RETURNING project, hour_ms")
HOUR = Statement("SELECT attempts FROM ended_hours WHERE project = $1 AND hour_ms = $2")
HOUR_LEFT = Statement("UPDATE ended_hours SET attempts = $3 WHERE project = $1 AND hour_ms = $2")
HOUR_DONE = Statement("DELETE FROM ended_hours WHERE project = $1 AND hour_ms = $2")


class RetireOrder(NamedTuple):
    """An open order to a worker."""

    attempt_id: str
    worker_id: str
    artifact_id: str
    rings: int


class PurgeOrder(NamedTuple):
    """An open order to the dispatcher."""

    project: str
    order_id: str
    finished_before_ms: int
    rings: int


class OldHour(NamedTuple):
    """The oldest hour of a project in which attempts ended; `runs_ms` None means the default age."""

    project: str
    hour_ms: int
    runs_ms: int | None


async def open_retire(tx: Transaction, orders: Iterable[tuple[str, str, str]], now_ms: int) -> None:
    """Open orders of (attempt, worker, artifact), due at once."""
    rows = [
        {"attempt_id": attempt, "worker_id": worker, "artifact_id": artifact} for attempt, worker, artifact in orders
    ]
    if rows:
        await tx.execute(OPEN_RETIRE, json_rows(rows), now_ms)


async def due_retire(tx: Transaction, now_ms: int, limit: int) -> list[RetireOrder]:
    """Orders to be rung (again), locked on PostgreSQL so that two replicas do not both ring."""
    return [
        RetireOrder(row["attempt_id"], row["worker_id"], row["artifact_id"], row["rings"])
        for row in await tx.fetch(DUE_RETIRE, now_ms, limit)
    ]


async def any_due(tx: Transaction, now_ms: int) -> bool:
    """Whether an order to a worker is to be rung."""
    return await tx.fetch_one(ANY_DUE, now_ms) is not None


async def rung_retire(tx: Transaction, again: Iterable[tuple[str, int]]) -> None:
    """Store when (attempt, time) each is rung next."""
    rows = [{"attempt_id": attempt, "ring_at_ms": at_ms} for attempt, at_ms in again]
    if rows:
        await tx.execute(RUNG_RETIRE, json_rows(rows))


async def close_retire(tx: Transaction, worker: str, attempt_ids: Sequence[str]) -> int:
    """Close a worker's orders of these attempts; how many were open."""
    return await tx.execute(CLOSE_RETIRE, json_set(attempt_ids), worker) if attempt_ids else 0


async def drop_retire(tx: Transaction, before_ms: int) -> int:
    """Drop orders that were opened before a time; how many."""
    return await tx.execute(DROP_RETIRE, before_ms)


async def count_ended(tx: Transaction, hours: Iterable[tuple[str, int, int]]) -> None:
    """Add (project, hour, attempts)."""
    rows: list[dict[str, Any]] = [
        {"project": project, "hour_ms": hour_ms, "attempts": attempts} for project, hour_ms, attempts in hours
    ]
    if rows:
        await tx.execute(COUNT_ENDED, json_rows(rows))


async def purgeable(tx: Transaction) -> list[OldHour]:
    """The oldest hour of each project without a hold and without an open purge order."""
    return [OldHour(row["project"], row["hour_ms"], row["runs_ms"]) for row in await tx.fetch(PURGEABLE)]


async def open_purge(
    tx: Transaction, project: str, order_id: str, hour_ms: int, finished_before_ms: int, now_ms: int
) -> None:
    """Open an order, unless the project has one."""
    await tx.execute(OPEN_PURGE, project, order_id, hour_ms, finished_before_ms, now_ms)


async def due_purge(tx: Transaction, now_ms: int, limit: int) -> list[PurgeOrder]:
    """Purge orders to be rung (again)."""
    return [
        PurgeOrder(row["project"], row["order_id"], row["finished_before_ms"], row["rings"])
        for row in await tx.fetch(DUE_PURGE, now_ms, limit)
    ]


async def rung_purge(tx: Transaction, order_id: str, again_at_ms: int) -> None:
    """Store when an order is rung next."""
    await tx.execute(RUNG_PURGE, order_id, again_at_ms)


async def close_purge(tx: Transaction, order_ids: Sequence[str]) -> list[tuple[str, int]]:
    """Close these orders; (project, hour) of those that were open."""
    rows = await tx.fetch(CLOSE_PURGE, json_set(order_ids)) if order_ids else []
    return [(row["project"], row["hour_ms"]) for row in rows]


async def attempts_of_hour(tx: Transaction, project: str, hour_ms: int) -> int:
    """How many attempts of an hour are counted and not purged."""
    row = await tx.fetch_one(HOUR, project, hour_ms)
    return int(row["attempts"]) if row else 0


async def set_hour(tx: Transaction, project: str, hour_ms: int, attempts: int | None) -> None:
    """Store what is left of an hour; None removes it."""
    if attempts is None:
        await tx.execute(HOUR_DONE, project, hour_ms)
    else:
        await tx.execute(HOUR_LEFT, project, hour_ms, attempts)
