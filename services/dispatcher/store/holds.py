"""Runs that wait for an approval, and what was committed for approved actions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from services.dispatcher.store.cases import columns, records, statement
from services.kit.database import Statement, Transaction, json_set


class HoldRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `run_holds`."""

    run_id: str
    order_id: str
    action_digest: str
    expires_at_ms: int
    rings: int = 0
    next_ring_at_ms: int | None = None
    closed_at_ms: int | None = None


class ReceiptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `approved_run_action_receipts`."""

    dispatch_id: str
    project_id: str
    outcome: str
    evidence_digest: str
    created_at_ms: int
    run_id: str | None = None
    approval_id: str | None = None
    action_digest: str | None = None
    run_status: str | None = None


_INSERT = statement("INSERT INTO run_holds (<c>) VALUES ($1, $2, $3, $4, $5, $6, $7)", c=columns(HoldRecord))
_DUE = statement(
    """
    SELECT <c> FROM run_holds WHERE next_ring_at_ms <= $1 ORDER BY next_ring_at_ms, run_id LIMIT $2
    {for_update_skip_locked}
    """,
    c=columns(HoldRecord),
)
_RUNG = Statement("UPDATE run_holds SET rings = rings + 1, next_ring_at_ms = $1 WHERE run_id = $2")
_ACKED = Statement("UPDATE run_holds SET next_ring_at_ms = NULL WHERE order_id {in:$1}")
_CLOSE = Statement("""
    UPDATE run_holds SET closed_at_ms = $1, next_ring_at_ms = NULL WHERE run_id {in:$2} AND closed_at_ms IS NULL
""")
_READ = statement("SELECT <c> FROM run_holds WHERE run_id {in:$1}", c=columns(HoldRecord))
_EXPIRED = Statement("""
    SELECT run_id FROM run_holds WHERE closed_at_ms IS NULL AND expires_at_ms <= $1
    ORDER BY expires_at_ms, run_id LIMIT $2
""")
_RECEIPT = statement("SELECT <c> FROM approved_run_action_receipts WHERE dispatch_id {in:$1}", c=columns(ReceiptRecord))
_ADD_RECEIPT = statement(
    "INSERT INTO approved_run_action_receipts (<c>) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)",
    c=columns(ReceiptRecord),
)


async def add(tx: Transaction, holds: Sequence[HoldRecord]) -> None:
    """New holds, with their orders open."""
    await tx.execute_many(_INSERT, [msgspec.structs.astuple(hold) for hold in holds])


async def read(tx: Transaction, run_ids: Iterable[str]) -> dict[str, HoldRecord]:
    """Holds by run."""
    return {hold.run_id: hold for hold in records(await tx.fetch(_READ, json_set(run_ids)), HoldRecord)}


async def due(tx: Transaction, now: int, limit: int) -> list[HoldRecord]:
    """Holds whose order is to be rung."""
    return records(await tx.fetch(_DUE, now, limit), HoldRecord)


async def rung(tx: Transaction, rows: Sequence[tuple[int, str]]) -> None:
    """The next ring's time of each run's order."""
    await tx.execute_many(_RUNG, rows)


async def acked(tx: Transaction, order_ids: Iterable[str]) -> int:
    """Approval has these orders."""
    return await tx.execute(_ACKED, json_set(order_ids))


async def close(tx: Transaction, run_ids: Iterable[str], now: int) -> None:
    """These runs wait no more."""
    await tx.execute(_CLOSE, now, json_set(run_ids))


async def expired(tx: Transaction, before: int, limit: int) -> list[str]:
    """Runs whose hold ran out before this time and was not closed."""
    return [row["run_id"] for row in await tx.fetch(_EXPIRED, before, limit)]


async def receipts(tx: Transaction, dispatch_ids: Iterable[str]) -> dict[str, ReceiptRecord]:
    """What was committed for these dispatch ids."""
    rows = records(await tx.fetch(_RECEIPT, json_set(dispatch_ids)), ReceiptRecord)
    return {receipt.dispatch_id: receipt for receipt in rows}


async def add_receipt(tx: Transaction, receipt: ReceiptRecord) -> None:
    """Commits a dispatch id's outcome; final."""
    await tx.execute(_ADD_RECEIPT, *msgspec.structs.astuple(receipt))
