"""Concurrency limits: one row per task, project or named key, locked in sorted order; live leases are counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

from services.dispatcher.placement import Limit, LimitKind
from services.kit.database import Row, Statement, Transaction, json_rows, json_set

_LOCK = Statement("""
    SELECT c.project_id, c.kind, c.limit_key, coalesce(c.set_live, c.max_live) AS max_live
    FROM {rows:$1 project_id text, kind text, limit_key text} AS w
    JOIN concurrency_limits c ON c.project_id = w.project_id AND c.kind = w.kind AND c.limit_key = w.limit_key
    ORDER BY c.project_id, c.kind, c.limit_key
""", postgresql="""
    SELECT c.project_id, c.kind, c.limit_key, coalesce(c.set_live, c.max_live) AS max_live
    FROM {rows:$1 project_id text, kind text, limit_key text} AS w
    JOIN concurrency_limits c ON c.project_id = w.project_id AND c.kind = w.kind AND c.limit_key = w.limit_key
    ORDER BY c.project_id, c.kind, c.limit_key FOR UPDATE OF c
""")  # fmt: skip
_READ = Statement("""
    SELECT c.project_id, c.kind, c.limit_key, coalesce(c.set_live, c.max_live) AS max_live
    FROM {rows:$1 project_id text, kind text, limit_key text} AS w
    JOIN concurrency_limits c ON c.project_id = w.project_id AND c.kind = w.kind AND c.limit_key = w.limit_key
""")
_PAGE = Statement("""
    SELECT project_id, kind, limit_key, coalesce(set_live, max_live) AS max_live FROM concurrency_limits
    WHERE project_id = $1 AND (kind, limit_key) > ($2, $3) ORDER BY kind, limit_key LIMIT $4
""")
_PUT = Statement("""
    INSERT INTO concurrency_limits (project_id, kind, limit_key, max_live, updated_at_ms) VALUES ($1, $2, $3, $4, $5)
    ON CONFLICT (project_id, kind, limit_key) DO UPDATE
    SET max_live = excluded.max_live, updated_at_ms = excluded.updated_at_ms
    WHERE concurrency_limits.max_live <> excluded.max_live
""")
# A key that no task has named yet has nothing else to fall back to than what was set.
_SET = Statement("""
    INSERT INTO concurrency_limits (project_id, kind, limit_key, max_live, set_live, updated_at_ms)
    VALUES ($1, $2, $3, $4, $4, $5)
    ON CONFLICT (project_id, kind, limit_key) DO UPDATE
    SET set_live = excluded.set_live, updated_at_ms = excluded.updated_at_ms
""")
_UNSET = Statement("""
    UPDATE concurrency_limits SET set_live = NULL, updated_at_ms = $4
    WHERE project_id = $1 AND kind = $2 AND limit_key = $3
""")
_DROP = Statement("DELETE FROM concurrency_limits WHERE project_id = $1 AND kind = $2 AND limit_key = $3")
_LIVE_BY_PROJECT = Statement("""
    SELECT project_id AS name, count(*) AS live FROM run_dispatch_leases
    WHERE status = 'leased' AND project_id {in:$1} GROUP BY project_id
""")
_LIVE_BY_TASK = Statement("""
    SELECT project_id, task_id AS name, count(*) AS live FROM run_dispatch_leases
    WHERE status = 'leased' AND project_id {in:$1} AND task_id {in:$2}
    GROUP BY project_id, task_id
""")
# CROSS JOIN keeps SQLite at the few leases that are open; a key's own rows are as many as it ever had runs.
_LIVE_BY_KEY = Statement("""
    SELECT k.project_id, k.limit_key AS name, count(*) AS live
    FROM run_dispatch_leases l CROSS JOIN run_lease_keys k
    WHERE l.status = 'leased' AND l.project_id {in:$1} AND k.attempt_id = l.attempt_id AND k.limit_key {in:$2}
    GROUP BY k.project_id, k.limit_key
""")
_HOLD_KEY = Statement("""
    INSERT INTO run_lease_keys (attempt_id, project_id, limit_key) VALUES ($1, $2, $3)
    ON CONFLICT (attempt_id, limit_key) DO NOTHING
""")


async def put(tx: Transaction, limits: Mapping[Limit, int], now: int) -> None:
    """Sets limits, in sorted order; a row that says so already is only locked by whoever counts."""
    await tx.execute_many(_PUT, [(*limit, limits[limit], now) for limit in sorted(limits)])


async def set_apart(tx: Transaction, limit: Limit, most: int, now: int) -> None:
    """Sets a limit that stands before what the tasks' terms say, until `unset`."""
    await tx.execute(_SET, *limit, most, now)


async def unset(tx: Transaction, limit: Limit, now: int) -> None:
    """What the tasks' terms say counts again."""
    await tx.execute(_UNSET, *limit, now)


async def drop(tx: Transaction, limit: Limit) -> None:
    """Takes a limit away."""
    await tx.execute(_DROP, *limit)


async def lock(tx: Transaction, wanted: Iterable[Limit]) -> dict[Limit, int]:
    """The limits that have a row, locked in sorted order."""
    return _named(await tx.fetch(_LOCK, _rows(wanted)))


async def read(tx: Transaction, wanted: Iterable[Limit]) -> dict[Limit, int]:
    """The limits that have a row."""
    return _named(await tx.fetch(_READ, _rows(wanted)))


async def page(tx: Transaction, project: str, after: tuple[str, str], limit: int) -> dict[Limit, int]:
    """Limits of a project behind (kind, key), in that order."""
    return _named(await tx.fetch(_PAGE, project, *after, limit))


async def live_by_project(tx: Transaction, projects: Iterable[str]) -> dict[str, int]:
    """Live leases of each project."""
    return {row["name"]: row["live"] for row in await tx.fetch(_LIVE_BY_PROJECT, json_set(projects))}


async def live_by_limit(tx: Transaction, wanted: Iterable[Limit]) -> dict[Limit, int]:
    """Live leases that count under each limit."""
    limits = list(wanted)
    projects = json_set(sorted({limit.project for limit in limits}))
    live: dict[Limit, int] = {}
    if any(limit.kind == "project" for limit in limits):
        for row in await tx.fetch(_LIVE_BY_PROJECT, projects):
            live[Limit(row["name"], "project", row["name"])] = row["live"]
    tasks = [limit.key for limit in limits if limit.kind == "task"]
    if tasks:
        for row in await tx.fetch(_LIVE_BY_TASK, projects, json_set(tasks)):
            live[Limit(row["project_id"], "task", row["name"])] = row["live"]
    keys = [limit.key for limit in limits if limit.kind == "key"]
    if keys:
        for row in await tx.fetch(_LIVE_BY_KEY, projects, json_set(keys)):
            live[Limit(row["project_id"], "key", row["name"])] = row["live"]
    return live


async def hold_keys(tx: Transaction, held: Iterable[tuple[str, Limit]]) -> None:
    """Says under which named keys an attempt's lease counts."""
    await tx.execute_many(_HOLD_KEY, [(attempt_id, limit.project, limit.key) for attempt_id, limit in held])


def _rows(limits: Iterable[Limit]) -> str:
    return json_rows({"project_id": p, "kind": kind, "limit_key": key} for p, kind, key in sorted(set(limits)))


def _named(rows: list[Row]) -> dict[Limit, int]:
    return {Limit(row["project_id"], cast("LimitKind", row["kind"]), row["limit_key"]): row["max_live"] for row in rows}
