"""How the databases would run the statements of the scheduler's loops."""

from __future__ import annotations

import re
from typing import Any, Final

import asyncpg

from services.kit.database import Database, DatabaseConfig, Statement
from services.scheduler.store import admissions, schedules, triggers
from tests.fixtures_database import owner_dsn

_ID = "01990000-0000-7000-8000-000000000001"
LOOPS: Final[dict[str, tuple[Statement, tuple[Any, ...]]]] = {
    "claim": (schedules._CLAIM, (1, 256)),
    "next wake": (schedules._NEXT_WAKE, ()),
    "specifications": (schedules._SPECS, (f'["{_ID}"]',)),
    "move": (schedules._MOVE, (f'[{{"trigger_id": "{_ID}", "decided_through_ms": 1, "updated_at_ms": 1}}]',)),
    "postpone": (schedules._POSTPONE, (f'["{_ID}"]', 1)),
    "wake a project": (schedules._WAKE_PROJECT, ("default", 1)),
    "orders to ring": (admissions._DUE, (1, 256)),
    "open orders": (admissions._OPEN_BY_IDS, ('["x"]',)),
    "prune": (admissions._PRUNE, (1, 256, 1)),
    "last missed": (triggers._LAST_MISSED, (f'["{_ID}"]',)),
    "count missed": (triggers._ADD_MISSED, (f'[{{"trigger_id": "{_ID}", "count": 1}}]',)),
    "of a kind": (triggers._OF_KIND, ("boot", "", 256)),
}
"""What the loops run while nobody asks for anything."""

_SCAN = re.compile(
    r"SCAN (?!json_each|\(|r\b|CONSTANT)(\w+)(?! USING)|Seq Scan on (schedules|triggers|trigger_r\w+|schedule_a\w+)"
)
_TABLES = ("schedules", "triggers", "trigger_revisions", "schedule_admissions", "missed_fires")


async def count(config: DatabaseConfig) -> None:
    """Bring PostgreSQL's statistics up to date, as it does by itself after a while."""
    if config.dialect == "postgresql":
        connection = await asyncpg.connect(owner_dsn(config))
        try:
            for table in _TABLES:
                await connection.execute(f"VACUUM (ANALYZE) ql3_scheduler.{table}")
        finally:
            await connection.close()


async def scans(database: Database) -> dict[str, str]:
    """The statements that would read a whole table, with their plans."""
    plans = {name: await _plan(database, statement, *args) for name, (statement, args) in LOOPS.items()}
    return {name: plan for name, plan in plans.items() if _SCAN.search(plan)}


async def _plan(database: Database, statement: Statement, *args: Any) -> str:
    if database.dialect == "sqlite":
        explained = Statement(f"EXPLAIN QUERY PLAN {statement.sqlite}")
        rows = await database.transact(lambda tx: tx.fetch(explained, *args))
        return "\n".join(str(row["detail"]) for row in rows)
    explained = Statement("-", postgresql=f"EXPLAIN {statement.postgresql}")
    rows = await database.transact(lambda tx: tx.fetch(explained, *args))
    return "\n".join(str(row["QUERY PLAN"]) for row in rows)
