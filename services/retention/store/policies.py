"""The statements of ages, holds, and how far the facts of others were read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from schemas.artifacts import Hold
from services.kit.database import Row, Statement, Transaction, json_set

SEEN = Statement(
    """INSERT INTO retention_policies (project, logs_ms, runs_ms, version, updated_at_ms)
    SELECT value, NULL, NULL, 0, CAST($2 AS BIGINT) FROM json_each($1) WHERE true ON CONFLICT DO NOTHING""",
    postgresql="""INSERT INTO retention_policies (project, logs_ms, runs_ms, version, updated_at_ms)
    SELECT value, NULL, NULL, 0, $2::bigint FROM jsonb_array_elements_text($1::text::jsonb) AS t(value)
    ON CONFLICT DO NOTHING""",
)
POLICY = Statement(
    "SELECT project, logs_ms, runs_ms, version, updated_at_ms FROM retention_policies WHERE project = $1 {for_update}"
)
READ_POLICY = Statement(
    "SELECT project, logs_ms, runs_ms, version, updated_at_ms FROM retention_policies WHERE project = $1"
)
SET_POLICY = Statement(
    """UPDATE retention_policies SET logs_ms = $2, runs_ms = $3, version = version + 1, updated_at_ms = $4
    WHERE project = $1 AND version = $5"""
)
OLDEST = Statement(
    """SELECT p.project, p.logs_ms, p.runs_ms,
        (SELECT MIN(a.finished_at_ms) FROM artifacts a WHERE a.project = p.project AND a.state <> 'gone') AS oldest_ms
    FROM retention_policies p ORDER BY p.project"""
)
HOLD = Statement(
    """INSERT INTO holds (project, run_id, reason, held_by, held_at_ms) VALUES ($1, $2, $3, $4, $5)
    ON CONFLICT (project, run_id) DO UPDATE SET reason = excluded.reason
    RETURNING project, run_id, reason, held_by, held_at_ms"""
)
RELEASE = Statement(
    """DELETE FROM holds WHERE project = $1 AND run_id = $2
    RETURNING project, run_id, reason, held_by, held_at_ms"""
)
HOLDS = Statement(
    """SELECT project, run_id, reason, held_by, held_at_ms FROM holds
    WHERE project = $1 AND run_id > $2 ORDER BY run_id LIMIT $3"""
)
HOLDS_FIRST = Statement(
    """SELECT project, run_id, reason, held_by, held_at_ms FROM holds WHERE project = $1 ORDER BY run_id LIMIT $2"""
)
POSITION = Statement("SELECT position FROM feed_positions WHERE source = $1")
FORGET_POSITION = Statement("DELETE FROM feed_positions WHERE source = $1")
MOVE_POSITION = Statement(
    """INSERT INTO feed_positions (source, position, updated_at_ms) VALUES ($1, $2, $3)
    ON CONFLICT (source) DO UPDATE SET position = excluded.position, updated_at_ms = excluded.updated_at_ms"""
)


class Policy(NamedTuple):
    """A project's own ages (None: the default of the profile); version 0 means never set."""

    logs_ms: int | None
    runs_ms: int | None
    version: int
    updated_at_ms: int


class Aged(NamedTuple):
    """A project with its own ages and the end of its oldest artifact that is not gone."""

    project: str
    logs_ms: int | None
    runs_ms: int | None
    oldest_ms: int | None


async def seen(tx: Transaction, projects: Iterable[str], now_ms: int) -> None:
    """Make a row for projects that have none."""
    await tx.execute(SEEN, json_set(sorted(set(projects))), now_ms)


async def policy(tx: Transaction, project: str, *, lock: bool = False) -> Policy:
    """A project's ages."""
    row = await tx.fetch_one(POLICY if lock else READ_POLICY, project)
    if row is None:
        return Policy(None, None, 0, 0)
    return Policy(row["logs_ms"], row["runs_ms"], row["version"], row["updated_at_ms"])


async def set_policy(
    tx: Transaction, project: str, *, logs_ms: int, runs_ms: int, expected_version: int, now_ms: int
) -> bool:
    """Compare and set; False when the version is another."""
    await seen(tx, [project], now_ms)
    return await tx.execute(SET_POLICY, project, logs_ms, runs_ms, now_ms, expected_version) == 1


async def oldest(tx: Transaction) -> list[Aged]:
    """Every known project with its oldest artifact."""
    return [Aged(row["project"], row["logs_ms"], row["runs_ms"], row["oldest_ms"]) for row in await tx.fetch(OLDEST)]


async def hold(tx: Transaction, project: str, run_id: str | None, reason: str, held_by: str, now_ms: int) -> Hold:
    """Hold a run, or the whole project. Who held it first stays named; the reason is the latest."""
    (row,) = await tx.fetch(HOLD, project, run_id or "", reason, held_by, now_ms)
    return _hold(row)


async def release(tx: Transaction, project: str, run_id: str | None) -> Hold | None:
    """End a hold; the one that ended, or None."""
    row = await tx.fetch_one(RELEASE, project, run_id or "")
    return _hold(row) if row else None


def _hold(row: Row) -> Hold:
    return Hold(
        project=row["project"],
        run_id=row["run_id"] or None,
        reason=row["reason"],
        held_by=row["held_by"],
        held_at_ms=row["held_at_ms"],
    )


async def holds(tx: Transaction, project: str, after: str | None, limit: int) -> list[Hold]:
    """A project's holds by run; the whole project's first."""
    rows = await (tx.fetch(HOLDS_FIRST, project, limit) if after is None else tx.fetch(HOLDS, project, after, limit))
    return [_hold(row) for row in rows]


async def position(tx: Transaction, source: str) -> str | None:
    """How far a service's facts were read."""
    row = await tx.fetch_one(POSITION, source)
    return row["position"] if row else None


async def move_position(tx: Transaction, source: str, at: str, now_ms: int) -> None:
    """Store how far a service's facts were read."""
    await tx.execute(MOVE_POSITION, source, at, now_ms)


async def forget_position(tx: Transaction, source: str) -> None:
    """A source was read to its end and is not read again."""
    await tx.execute(FORGET_POSITION, source)
