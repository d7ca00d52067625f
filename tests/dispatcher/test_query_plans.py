"""No statement of the store reads a whole table: with a million runs, a loop's step must cost what it works on.

Every statement of the store is explained on both databases. A scan of a partial index that holds only what is open is
fine; a scan of a table, or of an index over everything, is not.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing

import asyncpg
import pytest

import services.dispatcher.store as store
from services.kit.database import Statement
from services.kit.database.sqlite import path_of
from tests.fixtures_database import DatabaseFor, database_configs, owner_dsn

OPEN_ONLY = frozenset({
    "runs_queue", "runs_open", "runs_queue_deadline_due", "runs_cancel_open", "run_attempts_deadline_due",
    "run_attempts_one_active", "run_retry_policies_due", "run_dispatch_leases_expiry", "run_dispatch_leases_worker",
    "run_dispatch_leases_task", "run_dispatch_leases_offer_due", "run_cancellation_dispatches_due_at",
    "run_cancellation_dispatches_worker", "run_holds_due", "run_holds_expiry",
})  # fmt: skip
"""Partial indexes over what is open or due; as large as the work at hand, whatever the ledger's age."""

SMALL = frozenset({"workers", "dispatcher_stamp", "concurrency_limits"})
"""Tables that do not grow with runs."""

RUNS = 40_000


def statements() -> Iterator[tuple[str, Statement]]:
    for module in pkgutil.iter_modules(store.__path__):
        loaded = importlib.import_module(f"{store.__name__}.{module.name}")
        for name, value in vars(loaded).items():
            found = value if isinstance(value, tuple) else (value,)
            for index, one in enumerate(found):
                if isinstance(one, Statement) and not one.sqlite.startswith("INSERT"):
                    yield f"{module.name}.{name}" + (f"[{index}]" if isinstance(value, tuple) else ""), one


STATEMENTS = dict(statements())


def test_the_store_was_found() -> None:
    assert len(STATEMENTS) > 50
    assert "runs._WAITING" in STATEMENTS


async def test_sqlite_searches_and_never_scans_what_grows(database_on: DatabaseFor) -> None:
    database = await database_on("sqlite", "dispatcher")
    bad: list[str] = []
    with closing(sqlite3.connect(path_of(database_configs[database], "dispatcher"))) as connection:
        for name, one in STATEMENTS.items():
            count = max((int(n) for n in re.findall(r"\?(\d+)", one.sqlite)), default=0)
            plan = connection.execute(f"EXPLAIN QUERY PLAN {one.sqlite}", (None,) * count).fetchall()
            for row in plan:
                match = re.match(r"SCAN (\w+)(?: USING (?:COVERING )?INDEX (\w+))?", row[3])
                if match is None or match[1] in ("lanes", "first", "json_each", "CONSTANT", "held", *SMALL):
                    continue
                if match[2] in OPEN_ONLY or _small_alias(one.sqlite, match[1]):
                    continue
                bad.append(f"{name}: {row[3]}")
    assert not bad, "\n".join(bad)


def _small_alias(sql: str, name: str) -> bool:
    tables = "|".join((*SMALL, "json_each", r"\(SELECT json_extract"))
    return re.search(rf"(?:{tables})[^,;]*?(?:AS )?\b{name}\b", sql, re.DOTALL) is not None and name not in (
        "runs", "run_attempts", "run_events", "run_dispatch_leases",
    )  # fmt: skip


FILL = f"""
INSERT INTO pinned_revisions VALUES (repeat('a', 64), 'default', 't', 'job', 1, '{{}}', 1);
INSERT INTO workers VALUES ('w1', 's', 1, 'online', 0, 0, 8, '{{}}', repeat('a', 64), 'k', 1, 1, 1, NULL);
INSERT INTO runs (id, project_id, task_id, task_name, task_revision, revision_digest, lane, trigger_type,
  requested_by_type, requested_by_id, idempotency_key, request_digest, status, version, event_sequence, attempt,
  attempt_id, created_at_ms, queued_at_ms, finished_at_ms)
SELECT lpad(n::text, 36, '0'), 'p' || n % 5, 't' || n % 50, 'job' || n % 50, 1, repeat('a', 64), 'l' || n % 9, 'cron',
  'user', 'ada', n::text, repeat('b', 64), CASE WHEN n % 1000 = 0 THEN 'queued' ELSE 'succeeded' END, 4, 9, 1,
  lpad(n::text, 36, 'a'), n, n, CASE WHEN n % 1000 = 0 THEN NULL ELSE n END
FROM generate_series(1, {RUNS}) AS n;
INSERT INTO run_attempts (id, run_id, attempt, status, executor, created_at_ms, finished_at_ms)
SELECT lpad(n::text, 36, 'a'), lpad(n::text, 36, '0'), 1, CASE WHEN n % 1000 = 0 THEN 'claimed' ELSE 'succeeded' END,
  'local_process', n, CASE WHEN n % 1000 = 0 THEN NULL ELSE n END
FROM generate_series(1, {RUNS}) AS n;
INSERT INTO run_events (run_id, sequence, type, actor_type, payload, created_at_ms)
SELECT lpad(n::text, 36, '0'), s, 'run.created', 'system', '{{}}', n
FROM generate_series(1, {RUNS}) AS n, generate_series(1, 3) AS s;
INSERT INTO run_dispatch_leases (attempt_id, run_id, project_id, task_id, status, version, lease_generation, worker_id,
  worker_session_id, worker_generation, offer_id, offers, acquired_at_ms, renewed_at_ms, expires_at_ms, completed_at_ms)
SELECT lpad(n::text, 36, 'a'), lpad(n::text, 36, '0'), 'p' || n % 5, 't' || n % 50, 'completed', 3, 1, 'w1', 's', 1,
  'o' || n, 1, n, n, n + 1, n
FROM generate_series(1, {RUNS}) AS n WHERE n % 1000 <> 0;
INSERT INTO run_retry_policies SELECT lpad(n::text, 36, '0'), 3, 'failed', 'unknown', 1, 1, 0, NULL, 0
FROM generate_series(1, {RUNS}) AS n;
INSERT INTO run_cancellation_dispatches
SELECT lpad(n::text, 36, 'a'), lpad(n::text, 36, '0'), 'd' || n, 'settled', 1, 1, 'w1', 1, 'user', 1, NULL, n, n, n
FROM generate_series(1, {RUNS}) AS n WHERE n % 2 = 0;
INSERT INTO run_holds SELECT lpad(n::text, 36, '0'), 'o' || n, repeat('c', 64), n, 1, NULL, n
FROM generate_series(1, {RUNS}) AS n WHERE n % 2 = 0;
INSERT INTO run_lease_keys SELECT lpad(n::text, 36, 'a'), 'p' || n % 5, 'db'
FROM generate_series(1, {RUNS}) AS n WHERE n % 1000 <> 0;
INSERT INTO approved_run_action_receipts
SELECT 'd' || n, 'p1', NULL, NULL, NULL, 'closed', NULL, repeat('d', 64), n FROM generate_series(1, {RUNS}) AS n;
INSERT INTO refused_instants SELECT 'p' || n % 5, n::text, repeat('b', 64), 'overlap_skipped', '', n
FROM generate_series(1, {RUNS}) AS n;
"""


@pytest.mark.timeout(300)
async def test_postgresql_searches_and_never_scans_what_grows(database_on: DatabaseFor) -> None:
    database = await database_on("postgresql", "dispatcher")
    config = database_configs[database]
    connection = await asyncpg.connect(owner_dsn(config))
    bad: list[str] = []
    try:
        (schema,) = await connection.fetch(
            "SELECT table_schema FROM information_schema.tables WHERE table_name = 'runs'"
        )
        await connection.execute(f"SET search_path = {schema['table_schema']}")
        await connection.execute(FILL)
        await connection.execute("ANALYZE")
        await connection.execute("SET plan_cache_mode = force_generic_plan")
        for name, one in STATEMENTS.items():
            count = max((int(n) for n in re.findall(r"\$(\d+)", one.postgresql)), default=0)
            arguments = f"({', '.join(['NULL'] * count)})" if count else ""
            await connection.execute(f"PREPARE looked_at AS {one.postgresql}")
            plan = await connection.fetch(f"EXPLAIN EXECUTE looked_at{arguments}")
            await connection.execute("DEALLOCATE looked_at")
            for row in plan:
                line = row[0]
                scan = re.search(r"Seq Scan on (\w+)", line)
                if scan and scan[1] not in SMALL and scan[1] != "pinned_revisions":
                    bad.append(f"{name}: {line.strip()}")
    finally:
        await connection.close()
    assert not bad, "\n".join(bad)
