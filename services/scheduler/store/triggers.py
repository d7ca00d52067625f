"""Triggers, their revisions, and missed fires."""

from __future__ import annotations

from services.kit.database import Row, Statement, Transaction, json_rows, json_set

_VIEW = (
    "g.id, g.project, g.task_id, t.name AS task_name, g.kind, g.revision, g.version, g.enabled, g.deleted, "
    "g.missed_count, g.created_at_ms, g.updated_at_ms, r.spec, r.content_digest, s.next_fire_at_ms, "
    "s.last_scheduled_at_ms, s.anchor_ms"
)
_FROM = """
    FROM triggers g
    JOIN trigger_revisions r ON r.trigger_id = g.id AND r.revision = g.revision
    JOIN task_definitions t ON t.id = g.task_id
    LEFT JOIN schedules s ON s.trigger_id = g.id
"""

_INSERT = Statement("""
    INSERT INTO triggers (id, project, task_id, kind, revision, version, enabled, created_at_ms, updated_at_ms)
    VALUES ($1, $2, $3, $4, 1, 1, $5, $6, $6)
""")
_INSERT_REVISION = Statement("""
    INSERT INTO trigger_revisions
      (trigger_id, revision, spec, content_digest, mutation_id, request_digest, created_by_type, created_by_id,
       created_at_ms)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)
""")
_ADVANCE = Statement("""
    UPDATE triggers SET revision = revision + 1, version = version + 1, kind = $3, enabled = $4, updated_at_ms = $5
    WHERE id = $1 AND revision = $2 AND deleted = 0
""")
_SET_ENABLED = Statement("""
    UPDATE triggers SET enabled = $2, version = version + 1, updated_at_ms = $3
    WHERE id = $1 AND deleted = 0 AND enabled <> $2
""")
_DELETE = Statement("""
    UPDATE triggers SET deleted = 1, enabled = 0, version = version + 1, updated_at_ms = $2
    WHERE id = $1 AND deleted = 0
""")
_DELETE_OF_TASK = Statement("""
    UPDATE triggers SET deleted = 1, enabled = 0, version = version + 1, updated_at_ms = $2
    WHERE task_id = $1 AND deleted = 0
""")
_FIND = Statement(f"SELECT {_VIEW} {_FROM} WHERE g.project = $1 AND g.id = $2 AND g.deleted = 0")
_OF_TASKS = Statement(f"""
    SELECT {_VIEW} {_FROM} WHERE g.task_id {{in:$1}} AND g.deleted = 0 ORDER BY g.id
""")
_LIST = Statement(f"""
    SELECT {_VIEW} {_FROM} WHERE g.project = $1 AND g.deleted = 0 AND g.id > $2 ORDER BY g.id LIMIT $3
""")
_LIST_OF_TASK = Statement(f"""
    SELECT {_VIEW} {_FROM} WHERE g.task_id = $1 AND g.deleted = 0 AND g.id > $2 ORDER BY g.id LIMIT $3
""")
_OF_KIND = Statement(f"""
    SELECT {_VIEW} {_FROM} WHERE g.kind = $1 AND g.deleted = 0 AND g.kind IN ('boot', 'after_task') AND g.id > $2
    ORDER BY g.id LIMIT $3
""")
_COUNT_OF_TASK = Statement("SELECT count(*) AS count FROM triggers WHERE task_id = $1 AND deleted = 0")
_BY_MUTATION = Statement("""
    SELECT r.trigger_id, r.revision, r.request_digest, g.project FROM trigger_revisions r
    JOIN triggers g ON g.id = r.trigger_id WHERE r.mutation_id = $1
""")

_SET_WEBHOOK = Statement("""
    INSERT INTO webhooks (trigger_id, token_digest, updated_at_ms) VALUES ($1, $2, $3)
    ON CONFLICT (trigger_id) DO UPDATE SET token_digest = excluded.token_digest, updated_at_ms = excluded.updated_at_ms
""")
_WEBHOOK = Statement("SELECT token_digest FROM webhooks WHERE trigger_id = $1")
_POSITION = Statement("SELECT position FROM feed_positions WHERE owner = $1")
_MOVE_POSITION = Statement("""
    INSERT INTO feed_positions (owner, position, updated_at_ms) VALUES ($1, $2, $3)
    ON CONFLICT (owner) DO UPDATE SET position = excluded.position, updated_at_ms = excluded.updated_at_ms
""")
_LAST_MISSED = Statement("""
    SELECT m.id, m.trigger_id, m.trigger_revision, m.cause FROM missed_fires m
    WHERE m.id IN (SELECT max(id) FROM missed_fires WHERE trigger_id {in:$1} GROUP BY trigger_id)
""")
_EXTEND_MISSED = Statement(
    """
    UPDATE missed_fires SET last_ms = r.last_ms, count = missed_fires.count + r.count,
      at_least = max(missed_fires.at_least, r.at_least), recorded_at_ms = r.recorded_at_ms
    FROM {rows:$1 id text, last_ms bigint, count bigint, at_least bigint, recorded_at_ms bigint} AS r
    WHERE missed_fires.id = r.id
""",
    postgresql="""
    UPDATE missed_fires SET last_ms = r.last_ms, count = missed_fires.count + r.count,
      at_least = greatest(missed_fires.at_least, r.at_least::integer), recorded_at_ms = r.recorded_at_ms
    FROM {rows:$1 id text, last_ms bigint, count bigint, at_least bigint, recorded_at_ms bigint} AS r
    WHERE missed_fires.id = r.id
""",
)
_INSERT_MISSED = Statement("""
    INSERT INTO missed_fires
      (id, trigger_id, task_id, project, trigger_revision, cause, first_ms, last_ms, count, at_least, recorded_at_ms)
    SELECT r.id, r.trigger_id, r.task_id, r.project, r.trigger_revision, r.cause, r.first_ms, r.last_ms, r.count,
      r.at_least, r.recorded_at_ms
    FROM {rows:$1 id text, trigger_id text, task_id text, project text, trigger_revision bigint, cause text,
      first_ms bigint, last_ms bigint, count bigint, at_least integer, recorded_at_ms bigint} AS r
""")
_ADD_MISSED = Statement("""
    UPDATE triggers SET missed_count = missed_count + r.count
    FROM {rows:$1 trigger_id text, count bigint} AS r WHERE triggers.id = r.trigger_id
""")
_MISSED = Statement("SELECT * FROM missed_fires WHERE project = $1 AND id < $2 ORDER BY id DESC LIMIT $3")
_MISSED_OF_TRIGGER = Statement("""
    SELECT * FROM missed_fires WHERE project = $1 AND trigger_id = $4 AND id < $2 ORDER BY id DESC LIMIT $3
""")


async def insert(
    tx: Transaction, trigger_id: str, project: str, task_id: str, kind: str, *, enabled: bool, now_ms: int
) -> None:
    """A new trigger at revision 1."""
    await tx.execute(_INSERT, trigger_id, project, task_id, kind, int(enabled), now_ms)


async def insert_revision(
    tx: Transaction,
    trigger_id: str,
    revision: int,
    spec: str,
    content_digest: str,
    *,
    mutation_id: str | None,
    request_digest: str,
    created_by: tuple[str, str],
    now_ms: int,
) -> None:
    """One revision of a trigger."""
    await tx.execute(
        _INSERT_REVISION,
        trigger_id,
        revision,
        spec,
        content_digest,
        mutation_id,
        request_digest,
        *created_by,
        now_ms,
    )


async def advance(tx: Transaction, trigger_id: str, expected: int, kind: str, *, enabled: bool, now_ms: int) -> bool:
    """Moves the head from `expected` to the next revision; False when somebody was quicker."""
    return await tx.execute(_ADVANCE, trigger_id, expected, kind, int(enabled), now_ms) == 1


async def set_enabled(tx: Transaction, trigger_id: str, enabled: bool, now_ms: int) -> bool:
    """False when it already was so."""
    return await tx.execute(_SET_ENABLED, trigger_id, int(enabled), now_ms) == 1


async def delete(tx: Transaction, trigger_id: str, now_ms: int) -> bool:
    """False when it already was gone."""
    return await tx.execute(_DELETE, trigger_id, now_ms) == 1


async def delete_of_task(tx: Transaction, task_id: str, now_ms: int) -> None:
    """All triggers of a task that is deleted."""
    await tx.execute(_DELETE_OF_TASK, task_id, now_ms)


async def find(tx: Transaction, project: str, trigger_id: str) -> Row | None:
    """One trigger with its current specification and its place on the calendar."""
    return await tx.fetch_one(_FIND, project, trigger_id)


async def of_tasks(tx: Transaction, task_ids: list[str]) -> list[Row]:
    """The triggers of some tasks."""
    return await tx.fetch(_OF_TASKS, json_set(task_ids))


async def page(tx: Transaction, project: str, task_id: str | None, after: str, limit: int) -> list[Row]:
    """Triggers by id after `after`, of one task when given."""
    if task_id is not None:
        return await tx.fetch(_LIST_OF_TASK, task_id, after, limit)
    return await tx.fetch(_LIST, project, after, limit)


async def of_kind(tx: Transaction, kind: str, after: str, limit: int) -> list[Row]:
    """Triggers of kind `boot` or `after_task`, by id after `after`."""
    return await tx.fetch(_OF_KIND, kind, after, limit)


async def set_webhook(tx: Transaction, trigger_id: str, token_digest: str, now_ms: int) -> None:
    """The digest of a webhook's secret."""
    await tx.execute(_SET_WEBHOOK, trigger_id, token_digest, now_ms)


async def webhook(tx: Transaction, trigger_id: str) -> str | None:
    """The digest of a webhook's secret."""
    row = await tx.fetch_one(_WEBHOOK, trigger_id)
    return row["token_digest"] if row else None


async def position(tx: Transaction, owner: str) -> str | None:
    """How far the facts of another service were read."""
    row = await tx.fetch_one(_POSITION, owner)
    return row["position"] if row else None


async def move_position(tx: Transaction, owner: str, position: str, now_ms: int) -> None:
    """Facts were read up to here."""
    await tx.execute(_MOVE_POSITION, owner, position, now_ms)


async def count_of_task(tx: Transaction, task_id: str) -> int:
    """How many triggers a task has."""
    row = await tx.fetch_one(_COUNT_OF_TASK, task_id)
    return int(row["count"]) if row else 0


async def by_mutation(tx: Transaction, mutation_id: str) -> Row | None:
    """What a mutation id made."""
    return await tx.fetch_one(_BY_MUTATION, mutation_id)


async def record_missed(tx: Transaction, rows: list[dict[str, str | int]]) -> None:
    """Count missed instants. A row whose trigger, revision and cause are those of the trigger's last one extends it."""
    if not rows:
        return
    ids = sorted({str(row["trigger_id"]) for row in rows})
    last = {
        (found["trigger_id"], found["trigger_revision"], found["cause"]): found["id"]
        for found in await tx.fetch(_LAST_MISSED, json_set(ids))
    }
    fresh: list[dict[str, str | int]] = []
    longer: dict[str, dict[str, str | int]] = {}
    totals: dict[str, int] = dict.fromkeys(ids, 0)
    for row in rows:
        totals[str(row["trigger_id"])] += int(row["count"])
        known = last.pop((row["trigger_id"], row["trigger_revision"], row["cause"]), None)
        if known is None:
            fresh.append(row)
        else:
            longer[known] = {**row, "id": known}
    if longer:
        await tx.execute(_EXTEND_MISSED, json_rows(longer.values()))
    if fresh:
        await tx.execute(_INSERT_MISSED, json_rows(fresh))
    await tx.execute(_ADD_MISSED, json_rows({"trigger_id": key, "count": count} for key, count in totals.items()))


async def missed_page(tx: Transaction, project: str, trigger_id: str | None, before: str, limit: int) -> list[Row]:
    """Missed fires, newest first, before the id `before`."""
    if trigger_id is not None:
        return await tx.fetch(_MISSED_OF_TRIGGER, project, before, limit, trigger_id)
    return await tx.fetch(_MISSED, project, before, limit)
