"""Workers, their sessions, and the liveness stamp of the ledger itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from services.dispatcher.records import WorkerRecord
from services.dispatcher.store.cases import columns, records, statement
from services.kit.database import Statement, Transaction, json_set

_NAMES = WorkerRecord.__struct_fields__
_PUT = statement(
    "INSERT INTO workers (<c>) VALUES (<m>) ON CONFLICT (id) DO UPDATE SET <s>",
    c=", ".join(_NAMES),
    m=", ".join(f"${n}" for n in range(1, len(_NAMES) + 1)),
    s=", ".join(f"{name} = excluded.{name}" for name in _NAMES if name != "id"),
)
_LOCK = statement("SELECT <c> FROM workers WHERE id {in:$1} ORDER BY id {for_update}", c=columns(WorkerRecord))
_READ = statement("SELECT <c> FROM workers WHERE id {in:$1}", c=columns(WorkerRecord))
_SEATS = statement(
    """
    SELECT <c> FROM workers
    WHERE status = 'online' AND drain_requested = 0 AND silent_since_ms IS NULL AND lease_expires_at_ms > $1
    ORDER BY id LIMIT 1000 {for_update_skip_locked}
    """,
    c=columns(WorkerRecord),
)
_SEATS_READ = statement(
    """
    SELECT <c> FROM workers
    WHERE status = 'online' AND drain_requested = 0 AND silent_since_ms IS NULL AND lease_expires_at_ms > $1
    ORDER BY id LIMIT 1000
    """,
    c=columns(WorkerRecord),
)
_LIVE = Statement("""
    SELECT worker_id, count(*) AS live FROM run_dispatch_leases
    WHERE status = 'leased' AND worker_id {in:$1} GROUP BY worker_id
""")
_PAGE = statement("SELECT <c> FROM workers WHERE id > $1 ORDER BY id LIMIT $2", c=columns(WorkerRecord))
_SILENT = Statement("""
    UPDATE workers SET silent_since_ms = $1, version = version + 1 WHERE id {in:$2} AND silent_since_ms IS NULL
""")
_STAMP_READ = Statement("SELECT alive_at_ms FROM dispatcher_stamp WHERE id = 1")
_STAMP_LOCK = Statement("SELECT alive_at_ms FROM dispatcher_stamp WHERE id = 1 {for_update}")
_STAMP = Statement("UPDATE dispatcher_stamp SET alive_at_ms = $1 WHERE id = 1 AND alive_at_ms < $1")


async def put(tx: Transaction, worker: WorkerRecord) -> None:
    """A worker as it stands now."""
    await tx.execute(_PUT, *msgspec.structs.astuple(worker))


async def lock(tx: Transaction, ids: Iterable[str]) -> dict[str, WorkerRecord]:
    """Workers by id, locked in the order of their ids. Locked before any run."""
    return {w.id: w for w in records(await tx.fetch(_LOCK, json_set(ids)), WorkerRecord)}


async def read(tx: Transaction, ids: Iterable[str]) -> dict[str, WorkerRecord]:
    """Workers by id."""
    return {w.id: w for w in records(await tx.fetch(_READ, json_set(ids)), WorkerRecord)}


async def seats(tx: Transaction, now: int, *, lock: bool = True) -> list[WorkerRecord]:
    """Workers that may be given work, locked; those that another dispatcher is filling are left out."""
    return records(await tx.fetch(_SEATS if lock else _SEATS_READ, now), WorkerRecord)


async def live_leases(tx: Transaction, ids: Iterable[str]) -> Mapping[str, int]:
    """Leases of each worker that are not judged yet: its taken slots. One that ran out holds its slot until then, for
    its process may still run, and an outage of ours may yet be forgiven."""
    return {row["worker_id"]: row["live"] for row in await tx.fetch(_LIVE, json_set(ids))}


async def page(tx: Transaction, after: str, limit: int) -> list[WorkerRecord]:
    """Workers by id behind `after`."""
    return records(await tx.fetch(_PAGE, after, limit), WorkerRecord)


async def fell_silent(tx: Transaction, ids: Iterable[str], now: int) -> None:
    """These let a lease run out: they get nothing more until they are heard again."""
    await tx.execute(_SILENT, now, json_set(ids))


async def stamp(tx: Transaction, *, lock: bool = False) -> int:
    """When this ledger was last looked after."""
    row = await tx.fetch_one(_STAMP_LOCK if lock else _STAMP_READ)
    return row["alive_at_ms"] if row else 0


async def set_stamp(tx: Transaction, now: int) -> None:
    """The ledger is looked after now."""
    await tx.execute(_STAMP, now)
