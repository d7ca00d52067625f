"""The statements of `artifacts`, `artifact_retentions` and the sweep's cursors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from schemas.artifacts import Artifact
from schemas.runs import AttemptEnded
from services.kit.artifact_store import Retired
from services.kit.database import Row, Statement, Transaction, id_set, json_rows, json_set
from services.kit.purge import purge, raise_watermark
from services.retention.artifact import Candidate, Look

# A fact may come twice, and an attempt may be told of again when its receipt arrives late: the first row stands.
INSERT = Statement(
    """INSERT INTO artifacts (id, project, run_id, attempt_id, task_id, worker_id, kind, state, size, produced, sha256,
        truncated, run_terminal, finished_at_ms, created_at_ms, look_at_ms)
    SELECT f.id, f.project, f.run_id, f.attempt_id, f.task_id, f.worker_id, 'log', 'pending', f.size, f.produced,
        f.sha256, f.truncated, f.run_terminal, f.finished_at_ms, CAST($2 AS BIGINT), CAST($2 AS BIGINT)
    FROM {rows:$1 id text, project text, run_id text, attempt_id text, task_id text, worker_id text, size bigint, """
    """produced bigint, sha256 text, truncated integer, run_terminal integer, finished_at_ms bigint} AS f
    WHERE true ON CONFLICT DO NOTHING"""
)
RUNS_ENDED = id_set("UPDATE artifacts SET run_terminal = 1 WHERE run_id {in:$1} AND run_terminal = 0")
TO_LOOK_FOR = Statement(
    """SELECT id, project, run_id, attempt_id, worker_id, state, size, looks, finished_at_ms FROM artifacts
    WHERE look_at_ms <= $1 ORDER BY look_at_ms, id LIMIT $2"""
)
NEXT_LOOK = Statement("SELECT MIN(look_at_ms) AS at_ms FROM artifacts WHERE look_at_ms IS NOT NULL")
LOOKED = Statement(
    """UPDATE artifacts SET state = l.state, look_at_ms = l.again_at_ms, looks = looks + 1,
        stored_at_ms = CASE WHEN l.state = 'stored' THEN CAST($2 AS BIGINT) ELSE stored_at_ms END
    FROM {rows:$1 id text, state text, again_at_ms bigint} AS l
    WHERE artifacts.id = l.id AND artifacts.state IN ('pending', 'missing')
    RETURNING artifacts.id"""
)
OF_ATTEMPT = Statement(
    """SELECT a.id, a.project, a.run_id, a.attempt_id, a.kind, a.state, a.size, a.produced, a.sha256, a.truncated,
        a.worker_id, a.created_at_ms, r.recorded_at_ms, r.disposition, r.bytes_reclaimed
    FROM artifacts a LEFT JOIN artifact_retentions r ON r.artifact_id = a.id
    WHERE a.project = $1 AND a.attempt_id = $2 AND a.kind = 'log'"""
)
OF_RUN = Statement(
    """SELECT a.id, a.project, a.run_id, a.attempt_id, a.kind, a.state, a.size, a.produced, a.sha256, a.truncated,
        a.worker_id, a.created_at_ms, r.recorded_at_ms, r.disposition, r.bytes_reclaimed
    FROM artifacts a LEFT JOIN artifact_retentions r ON r.artifact_id = a.id
    WHERE a.project = $1 AND a.run_id = $2 AND a.id > $3 ORDER BY a.id LIMIT $4"""
)
CANDIDATES = Statement(
    """SELECT a.finished_at_ms, a.id, a.attempt_id, a.run_id, a.worker_id, a.state FROM artifacts a
    WHERE a.project = $1 AND a.state <> 'gone' AND a.state <> 'pending' AND a.finished_at_ms <= $2
        AND (a.run_terminal = 1 OR a.finished_at_ms <= $3)
        AND (a.finished_at_ms > $4 OR (a.finished_at_ms = $4 AND a.id > $5))
        AND NOT EXISTS (SELECT 1 FROM holds h WHERE h.project = a.project AND (h.run_id = '' OR h.run_id = a.run_id))
    ORDER BY a.finished_at_ms, a.id LIMIT $6"""
)
TOMBSTONES = Statement(
    """INSERT INTO artifact_retentions (artifact_id, attempt_id, project, finished_at_ms, eligible_at_ms,
        recorded_at_ms, disposition, bytes_reclaimed)
    SELECT t.artifact_id, t.attempt_id, CAST($2 AS TEXT), t.finished_at_ms, t.eligible_at_ms, CAST($3 AS BIGINT),
        t.disposition, t.bytes_reclaimed
    FROM {rows:$1 artifact_id text, attempt_id text, finished_at_ms bigint, eligible_at_ms bigint, """
    """disposition text, bytes_reclaimed bigint} AS t
    WHERE true ON CONFLICT DO NOTHING"""
)
GONE = id_set("UPDATE artifacts SET state = 'gone', look_at_ms = NULL WHERE id {in:$1} AND state <> 'gone'")
CURSOR = Statement(
    "SELECT cursor_finished_at_ms, cursor_artifact_id, version FROM artifact_maintenance_cursors WHERE project = $1"
)
CURSOR_FIRST = Statement(
    """INSERT INTO artifact_maintenance_cursors
        (project, cursor_finished_at_ms, cursor_artifact_id, version, updated_at_ms)
    VALUES ($1, $2, $3, 1, $4) ON CONFLICT DO NOTHING"""
)
CURSOR_NEXT = Statement(
    """UPDATE artifact_maintenance_cursors
    SET cursor_finished_at_ms = $2, cursor_artifact_id = $3, version = version + 1, updated_at_ms = $4
    WHERE project = $1 AND version = $5"""
)
FORGETTABLE = Statement(
    """SELECT a.id FROM artifacts a JOIN artifact_retentions r ON r.artifact_id = a.id
    WHERE a.project = $1 AND a.state = 'gone' AND a.finished_at_ms < $2 AND r.recorded_at_ms < $3
    ORDER BY a.finished_at_ms, a.id LIMIT $4"""
)
FORGET = id_set("DELETE FROM artifacts WHERE id {in:$1} AND state = 'gone'")


class Sought(NamedTuple):
    """An artifact whose file has not been seen in the store."""

    id: str
    project: str
    run_id: str
    attempt_id: str
    worker_id: str
    state: Literal["pending", "missing"]
    size: int
    looks: int
    finished_at_ms: int


class Found(NamedTuple):
    """An artifact as read; the tombstone's facts are None unless it is gone."""

    artifact: Artifact
    worker_id: str
    disposition: str | None
    bytes_reclaimed: int | None


class Cursor(NamedTuple):
    """Where a project's sweep stands; version 0 means that none was stored."""

    finished_at_ms: int
    artifact_id: str
    version: int


def _found(row: Row) -> Found:
    artifact = Artifact(
        id=row["id"],
        project=row["project"],
        run_id=row["run_id"],
        attempt_id=row["attempt_id"],
        kind=row["kind"],
        state=row["state"],
        size=row["size"],
        produced=row["produced"],
        sha256=row["sha256"],
        truncated=bool(row["truncated"]),
        created_at_ms=row["created_at_ms"],
        retired_at_ms=row["recorded_at_ms"],
    )
    return Found(artifact, row["worker_id"], row["disposition"], row["bytes_reclaimed"])


async def register(tx: Transaction, facts: Sequence[AttemptEnded], now_ms: int) -> None:
    """Make rows for the logs of ended attempts, and note which runs have ended."""
    rows: list[dict[str, Any]] = [
        {
            "id": fact.log.artifact_id,
            "project": fact.project,
            "run_id": fact.run_id,
            "attempt_id": fact.attempt_id,
            "task_id": fact.task_id,
            "worker_id": fact.worker_id,
            "size": fact.log.size,
            "produced": max(fact.log.produced, fact.log.size),
            "sha256": fact.log.sha256,
            "truncated": int(fact.log.truncated),
            "run_terminal": int(fact.run_terminal),
            "finished_at_ms": fact.finished_at_ms,
        }
        for fact in facts
        # Without its worker nobody could be told to let go of it; an attempt that wrote a log has one.
        if fact.log.artifact_id is not None and fact.worker_id
    ]
    if rows:
        await tx.execute(INSERT, json_rows(rows), now_ms)
    ended = [fact.run_id for fact in facts if fact.run_terminal]
    if ended:
        await tx.execute(RUNS_ENDED, json_set(ended))


async def to_look_for(tx: Transaction, now_ms: int, limit: int) -> list[Sought]:
    """Artifacts whose next look is due."""
    return [
        Sought(
            row["id"],
            row["project"],
            row["run_id"],
            row["attempt_id"],
            row["worker_id"],
            row["state"],
            row["size"],
            row["looks"],
            row["finished_at_ms"],
        )
        for row in await tx.fetch(TO_LOOK_FOR, now_ms, limit)
    ]


async def next_look_ms(tx: Transaction) -> int | None:
    """When the next look is due."""
    row = await tx.fetch_one(NEXT_LOOK)
    return row["at_ms"] if row else None


async def looked(tx: Transaction, looks: Mapping[str, Look], now_ms: int) -> set[str]:
    """Store what looks found; the ids of rows that this changed (a row gone meanwhile is not among them)."""
    rows = [{"id": key, "state": look.state, "again_at_ms": look.again_at_ms} for key, look in looks.items()]
    return {str(row["id"]) for row in await tx.fetch(LOOKED, json_rows(rows), now_ms)} if rows else set()


async def of_attempt(tx: Transaction, project: str, attempt_id: str) -> Found | None:
    """The log of an attempt."""
    row = await tx.fetch_one(OF_ATTEMPT, project, attempt_id)
    return _found(row) if row else None


async def of_run(tx: Transaction, project: str, run_id: str, after: str, limit: int) -> list[Artifact]:
    """Artifacts of a run by id, after an id."""
    return [_found(row).artifact for row in await tx.fetch(OF_RUN, project, run_id, after, limit)]


async def candidates(
    tx: Transaction, project: str, *, cutoff_ms: int, unended_cutoff_ms: int, after: Cursor, limit: int
) -> list[Candidate]:
    """What is old enough and not held, oldest first, after the cursor. Pending files are never among them."""
    rows = await tx.fetch(
        CANDIDATES, project, cutoff_ms, unended_cutoff_ms, after.finished_at_ms, after.artifact_id, limit
    )
    return [
        Candidate(row["finished_at_ms"], row["id"], row["attempt_id"], row["run_id"], row["worker_id"], row["state"])
        for row in rows
    ]


async def bury(
    tx: Transaction, project: str, retired: Iterable[tuple[Candidate, Retired]], *, age_ms: int, now_ms: int
) -> None:
    """Write tombstones; where one stands already it stays: the first evidence wins."""
    rows: list[dict[str, Any]] = [
        {
            "artifact_id": candidate.artifact_id,
            "attempt_id": candidate.attempt_id,
            "finished_at_ms": candidate.finished_at_ms,
            "eligible_at_ms": candidate.finished_at_ms + age_ms,
            "disposition": outcome.disposition,
            "bytes_reclaimed": outcome.bytes_reclaimed,
        }
        for candidate, outcome in retired
    ]
    if rows:
        await tx.execute(TOMBSTONES, json_rows(rows), project, now_ms)
        await tx.execute(GONE, json_set(str(row["artifact_id"]) for row in rows))


async def cursor(tx: Transaction, project: str) -> Cursor:
    """Where the sweep of a project stands; before everything when it starts anew."""
    row = await tx.fetch_one(CURSOR, project)
    if row is None:
        return Cursor(-1, "", 0)
    if row["cursor_artifact_id"] is None:
        return Cursor(-1, "", row["version"])
    return Cursor(row["cursor_finished_at_ms"], row["cursor_artifact_id"], row["version"])


async def move_cursor(tx: Transaction, project: str, expected_version: int, at: Candidate | None, now_ms: int) -> bool:
    """Compare and set the cursor (None: start anew); False when another sweeper moved it."""
    finished, artifact_id = (at.finished_at_ms, at.artifact_id) if at else (None, None)
    if expected_version == 0:
        return await tx.execute(CURSOR_FIRST, project, finished, artifact_id, now_ms) == 1
    return await tx.execute(CURSOR_NEXT, project, finished, artifact_id, now_ms, expected_version) == 1


async def forget(tx: Transaction, project: str, *, finished_before_ms: int, recorded_before_ms: int, limit: int) -> int:
    """Delete rows and tombstones of artifacts whose runs are purged as well; how many."""
    rows = await tx.fetch(FORGETTABLE, project, finished_before_ms, recorded_before_ms, limit)
    if not rows:
        return 0
    ids = [str(row["id"]) for row in rows]
    await raise_watermark(tx, "artifact_retentions", recorded_before_ms)
    await purge(tx, "artifact_retentions", ids)
    await tx.execute(FORGET, json_set(ids))
    return len(ids)
