"""Queries over runs: what exists, what waits, what is due, what people read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from schemas.ids import is_id
from services.dispatcher.records import AttemptRecord, RunRecord
from services.dispatcher.store.cases import columns, records, statement
from services.kit.database import Row, Statement, Transaction, json_set

_BY_KEYS = statement("SELECT <c> FROM runs WHERE project_id = $1 AND idempotency_key {in:$2}", c=columns(RunRecord))
_OPEN_OF_TASK = Statement("""
    SELECT id, status FROM runs WHERE project_id = $1 AND task_id = $2 AND finished_at_ms IS NULL
      AND NOT (status = 'waiting_approval' AND coalesce(not_before_ms, 0) > created_at_ms + $4)
    ORDER BY created_at_ms, id LIMIT $3
""")
_INPUTS = Statement("SELECT id, inputs FROM runs WHERE id {in:$1} AND inputs IS NOT NULL")

# A loose scan: one step into the index per lane, whatever stands in it.
_LANES = Statement("""
    WITH RECURSIVE lanes (lane) AS (
      SELECT * FROM (SELECT lane FROM runs WHERE status = 'queued' AND lane > $1 ORDER BY lane LIMIT 1) AS first
      UNION ALL
      SELECT (SELECT r.lane FROM runs r WHERE r.status = 'queued' AND r.lane > lanes.lane ORDER BY r.lane LIMIT 1)
      FROM lanes WHERE lanes.lane IS NOT NULL
    )
    SELECT lane FROM lanes WHERE lane IS NOT NULL LIMIT $2
""")
# The head of each lane, by one step into the index per run that is taken.
_WAITING = statement(
    """
    SELECT <c> FROM json_each($1) AS l CROSS JOIN runs AS r
    WHERE r.id IN (
      SELECT q.id FROM runs AS q WHERE q.lane = l.value AND q.status = 'queued' AND q.cancel_requested_at_ms IS NULL
      ORDER BY q.priority DESC, q.queued_at_ms, q.id LIMIT $2
    )
    ORDER BY r.lane, r.priority DESC, r.queued_at_ms, r.id
    """,
    postgresql="""
    SELECT <c> FROM jsonb_array_elements_text($1::text::jsonb) AS l (lane) CROSS JOIN LATERAL (
      SELECT q.* FROM runs AS q WHERE q.lane = l.lane AND q.status = 'queued' AND q.cancel_requested_at_ms IS NULL
      ORDER BY q.priority DESC, q.queued_at_ms, q.id LIMIT $2 {for_update_skip_locked}
    ) AS r
    ORDER BY r.lane, r.priority DESC, r.queued_at_ms, r.id
    """,
    c=columns(RunRecord, "r."),
)
_QUEUE_EXPIRED = Statement("""
    SELECT id FROM runs WHERE queue_deadline_ms IS NOT NULL AND queue_deadline_ms <= $1
    ORDER BY queue_deadline_ms, id LIMIT $2
""")
_RETRY_DUE = Statement("""
    SELECT run_id AS id FROM run_retry_policies WHERE next_attempt_at_ms IS NOT NULL AND next_attempt_at_ms <= $1
    ORDER BY next_attempt_at_ms, run_id LIMIT $2
""")
_OVERDUE = Statement("""
    SELECT a.run_id AS id FROM run_attempts a JOIN runs r ON r.id = a.run_id
    WHERE a.deadline_at_ms IS NOT NULL AND a.status IN ('starting', 'running') AND a.deadline_at_ms <= $1
      AND r.cancel_requested_at_ms IS NULL
    ORDER BY a.deadline_at_ms, a.id LIMIT $2
""")
_CANCEL_OPEN = Statement("""
    SELECT r.id FROM runs r WHERE r.cancel_requested_at_ms IS NOT NULL AND r.finished_at_ms IS NULL
      AND (r.cancel_requested_at_ms > $1 OR (r.cancel_requested_at_ms = $1 AND r.id > $2))
    ORDER BY r.cancel_requested_at_ms, r.id LIMIT $3
""")
_LIST = statement(
    """
    SELECT <c> FROM runs WHERE project_id = $1 AND (created_at_ms, id) < ($2, $3)
    ORDER BY created_at_ms DESC, id DESC LIMIT $4
    """,
    c=columns(RunRecord),
)
_LIST_OF_TASK = statement(
    """
    SELECT <c> FROM runs WHERE project_id = $1 AND task_name = $5 AND (created_at_ms, id) < ($2, $3)
      AND ($6 = '' OR task_id = $6)
    ORDER BY created_at_ms DESC, id DESC LIMIT $4
    """,
    c=columns(RunRecord),
)
_LIST_OF_STATUS = statement(
    """
    SELECT <c> FROM runs WHERE project_id = $1 AND (created_at_ms, id) < ($2, $3) AND status {in:$5}
    ORDER BY created_at_ms DESC, id DESC LIMIT $4
    """,
    c=columns(RunRecord),
)
_LIST_OF_TASK_STATUS = statement(
    """
    SELECT <c> FROM runs WHERE project_id = $1 AND task_name = $6 AND (created_at_ms, id) < ($2, $3)
      AND status {in:$5} AND ($7 = '' OR task_id = $7)
    ORDER BY created_at_ms DESC, id DESC LIMIT $4
    """,
    c=columns(RunRecord),
)
_LIST_OPEN = statement(
    """
    SELECT <c> FROM runs WHERE project_id = $1 AND finished_at_ms IS NULL AND (created_at_ms, id) < ($2, $3)
      AND status {in:$5}
    ORDER BY created_at_ms DESC, id DESC LIMIT $4
    """,
    c=columns(RunRecord),
)
_LIST_UNHAPPY = statement(
    """
    SELECT <c> FROM runs WHERE project_id = $1 AND status IN ('failed', 'cancelled', 'timed_out')
      AND (created_at_ms, id) < ($2, $3) AND status {in:$5}
    ORDER BY created_at_ms DESC, id DESC LIMIT $4
    """,
    c=columns(RunRecord),
)
_NAME_OF_TASK = Statement("SELECT task_name FROM pinned_revisions WHERE project_id = $1 AND task_id = $2 LIMIT 1")
_ATTEMPTS_OF_RUN = statement(
    "SELECT <c> FROM run_attempts WHERE run_id = $1 ORDER BY attempt", c=columns(AttemptRecord)
)
_EVENTS = Statement("""
    SELECT run_id, sequence, type, actor_type, actor_id, attempt_id, payload, created_at_ms
    FROM run_events WHERE run_id = $1 AND sequence > $2 ORDER BY sequence LIMIT $3
""")
_AHEAD = Statement("""
    SELECT count(*) AS ahead FROM (
      SELECT 1 FROM runs WHERE lane = $1 AND status = 'queued'
        AND (priority > $2 OR (priority = $2 AND (queued_at_ms, id) < ($3, $4))) LIMIT 1000
    ) AS first
""")

_OPEN_STATUSES = frozenset({"created", "queued", "dispatching", "running", "waiting_approval", "retry_wait", "lost"})
_UNHAPPY_STATUSES = frozenset({"failed", "cancelled", "timed_out"})


async def by_keys(tx: Transaction, project: str, keys: Iterable[str]) -> list[RunRecord]:
    """Runs of a project by idempotency key."""
    return records(await tx.fetch(_BY_KEYS, project, json_set(keys)), RunRecord)


async def open_of_task(
    tx: Transaction, project: str, task_id: str, limit: int, asks_ahead_ms: int
) -> list[tuple[str, str]]:
    """(id, status) of a task's runs that have not ended, oldest first.

    Left out are those that wait for an approval longer than `asks_ahead_ms` before they may start.
    """
    rows = await tx.fetch(_OPEN_OF_TASK, project, task_id, limit, asks_ahead_ms)
    return [(row["id"], row["status"]) for row in rows]


async def inputs(tx: Transaction, run_ids: Iterable[str]) -> dict[str, str]:
    """The inputs (JSON) of those runs that have any."""
    return {row["id"]: row["inputs"] for row in await tx.fetch(_INPUTS, json_set(run_ids))}


async def lanes(tx: Transaction, after: str, limit: int) -> list[str]:
    """Lanes in which runs wait, by name, behind `after`."""
    return [row["lane"] for row in await tx.fetch(_LANES, after, limit)]


async def waiting(tx: Transaction, lanes: Iterable[str], limit: int) -> dict[str, list[RunRecord]]:
    """The heads of lanes in their order, locked; what another dispatcher holds is left out."""
    found: dict[str, list[RunRecord]] = {}
    for run in records(await tx.fetch(_WAITING, json_set(lanes), limit), RunRecord):
        found.setdefault(run.lane, []).append(run)
    return found


async def queue_expired(tx: Transaction, now: int, limit: int) -> list[str]:
    """Runs that waited longer than they may."""
    return _ids(await tx.fetch(_QUEUE_EXPIRED, now, limit))


async def retry_due(tx: Transaction, now: int, limit: int) -> list[str]:
    """Runs whose next attempt is due. Lost runs never stand here, so they cannot stand before anybody."""
    return _ids(await tx.fetch(_RETRY_DUE, now, limit))


async def overdue(tx: Transaction, now: int, limit: int) -> list[str]:
    """Runs whose attempt's time is over. Those asked to end already stand here too until they have ended."""
    return _ids(await tx.fetch(_OVERDUE, now, limit))


async def cancel_open(tx: Transaction, after: tuple[int, str], limit: int) -> list[str]:
    """Runs that are asked to end and have not, behind (time, id)."""
    return _ids(await tx.fetch(_CANCEL_OPEN, after[0], after[1], limit))


async def page(
    tx: Transaction, project: str, before: tuple[int, str], limit: int, task: str | None, statuses: Sequence[str]
) -> list[RunRecord]:
    """Runs of a project before (created, id), newest first. `task` is an id or a name."""
    at, run_id = before
    if task is not None:
        name, task_id = task, ""
        if is_id(task):
            row = await tx.fetch_one(_NAME_OF_TASK, project, task)
            name, task_id = (row["task_name"] if row else ""), task
        if statuses:
            rows = await tx.fetch(_LIST_OF_TASK_STATUS, project, at, run_id, limit, json_set(statuses), name, task_id)
        else:
            rows = await tx.fetch(_LIST_OF_TASK, project, at, run_id, limit, name, task_id)
    elif not statuses:
        rows = await tx.fetch(_LIST, project, at, run_id, limit)
    else:
        wanted = frozenset(statuses)
        query = (
            _LIST_OPEN
            if wanted <= _OPEN_STATUSES
            else _LIST_UNHAPPY
            if wanted <= _UNHAPPY_STATUSES
            else _LIST_OF_STATUS
        )
        rows = await tx.fetch(query, project, at, run_id, limit, json_set(statuses))
    return records(rows, RunRecord)


async def attempts_of(tx: Transaction, run_id: str) -> list[AttemptRecord]:
    """All attempts of a run."""
    return records(await tx.fetch(_ATTEMPTS_OF_RUN, run_id), AttemptRecord)


async def events_of(tx: Transaction, run_id: str, after: int, limit: int) -> list[Mapping[str, object]]:
    """Events of a run behind a sequence."""
    return list(await tx.fetch(_EVENTS, run_id, after, limit))


async def ahead(tx: Transaction, run: RunRecord) -> int:
    """How many runs of the same lane stand before this one; at most 1,000 are counted."""
    row = await tx.fetch_one(_AHEAD, run.lane, run.priority, run.queued_at_ms or 0, run.id)
    return row["ahead"] if row else 0


def _ids(rows: list[Row]) -> list[str]:
    return [row["id"] for row in rows]
