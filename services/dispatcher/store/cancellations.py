"""Deliveries of cancel intents, one row per attempt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from services.dispatcher.records import CancellationRecord
from services.dispatcher.store.cases import columns, records, statement
from services.kit.database import Statement, Transaction, json_set

_COUNT = len(CancellationRecord.__struct_fields__)
_INSERT = statement(
    "INSERT INTO run_cancellation_dispatches (<c>) VALUES (<m>)",
    c=columns(CancellationRecord),
    m=", ".join(f"${n}" for n in range(1, _COUNT + 1)),
)
_READ = statement("SELECT <c> FROM run_cancellation_dispatches WHERE attempt_id {in:$1}", c=columns(CancellationRecord))
_DUE = Statement("""
    SELECT attempt_id, run_id FROM run_cancellation_dispatches
    WHERE next_attempt_at_ms IS NOT NULL AND next_attempt_at_ms <= $1 ORDER BY next_attempt_at_ms, attempt_id LIMIT $2
""")
_OF_WORKER = statement(
    """
    SELECT <c> FROM run_cancellation_dispatches
    WHERE worker_id = $1 AND settled_at_ms IS NULL AND status <> 'blocked' ORDER BY attempt_id LIMIT $2
    """,
    c=columns(CancellationRecord),
)
_UPDATE = Statement("""
    UPDATE run_cancellation_dispatches SET status = $1, version = $2, dispatch_count = $3, worker_id = $4,
      lease_generation = $5, reason = $6, next_attempt_at_ms = $7, last_dispatched_at_ms = $8
    WHERE attempt_id = $9 AND settled_at_ms IS NULL
""")


async def add(tx: Transaction, rows: Sequence[CancellationRecord]) -> None:
    """New deliveries."""
    await tx.execute_many(_INSERT, [msgspec.structs.astuple(row) for row in rows])


async def read(tx: Transaction, attempt_ids: Iterable[str]) -> dict[str, CancellationRecord]:
    """Deliveries by attempt. Whoever changes one holds its run."""
    rows = records(await tx.fetch(_READ, json_set(attempt_ids)), CancellationRecord)
    return {row.attempt_id: row for row in rows}


async def due(tx: Transaction, now: int, limit: int) -> list[str]:
    """Runs with a delivery that is due."""
    return [row["run_id"] for row in await tx.fetch(_DUE, now, limit)]


async def of_worker(tx: Transaction, worker: str, limit: int) -> list[CancellationRecord]:
    """What a worker has been asked to end and has not."""
    return records(await tx.fetch(_OF_WORKER, worker, limit), CancellationRecord)


async def update(tx: Transaction, rows: Sequence[CancellationRecord]) -> None:
    """Open deliveries after a step."""
    await tx.execute_many(
        _UPDATE,
        [
            (
                row.status, row.version, row.dispatch_count, row.worker_id, row.lease_generation, row.reason,
                row.next_attempt_at_ms, row.last_dispatched_at_ms, row.attempt_id,
            )
            for row in rows
        ],
    )  # fmt: skip
