"""Where each trigger stands on the calendar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.kit.database import Row, Statement, Transaction, json_rows, json_set

_CLAIMED = (
    "s.trigger_id, s.project, s.task_id, s.trigger_revision, s.anchor_ms, s.decided_through_ms, s.stopped_at_ms, "
    "s.stopped_by, s.last_scheduled_at_ms, s.wake_at_ms"
)

_INSERT = Statement("""
    INSERT INTO schedules
      (trigger_id, project, task_id, trigger_revision, anchor_ms, decided_through_ms, next_fire_at_ms, wake_at_ms,
       stopped_at_ms, stopped_by, updated_at_ms)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)
""")
_CLAIM = Statement(f"""
    SELECT {_CLAIMED} FROM schedules s WHERE s.wake_at_ms <= $1
    ORDER BY s.wake_at_ms, s.trigger_id LIMIT $2 {{for_update_skip_locked}}
""")  # noqa: S608
_SPECS = Statement("""
    SELECT r.trigger_id, r.revision, r.spec, r.content_digest, g.kind FROM triggers g
    JOIN trigger_revisions r ON r.trigger_id = g.id AND r.revision = g.revision WHERE g.id {in:$1}
""")
_LOCK = Statement(f"SELECT {_CLAIMED} FROM schedules s WHERE s.trigger_id = $1 {{for_update}}")  # noqa: S608
_LOCK_OF_TASK = Statement(f"""
    SELECT {_CLAIMED} FROM schedules s WHERE s.task_id = $1 ORDER BY s.trigger_id {{for_update}}
""")  # noqa: S608
_MOVE = Statement("""
    UPDATE schedules SET decided_through_ms = r.decided_through_ms, next_fire_at_ms = r.next_fire_at_ms,
      wake_at_ms = r.wake_at_ms, last_scheduled_at_ms = coalesce(r.last_ms, schedules.last_scheduled_at_ms),
      stopped_at_ms = r.stopped_at_ms, stopped_by = r.stopped_by, version = schedules.version + 1,
      updated_at_ms = r.updated_at_ms
    FROM {rows:$1 trigger_id text, decided_through_ms bigint, next_fire_at_ms bigint, wake_at_ms bigint,
      last_ms bigint, stopped_at_ms bigint, stopped_by text, updated_at_ms bigint} AS r
    WHERE schedules.trigger_id = r.trigger_id
""")
_REVISE = Statement("""
    UPDATE schedules SET trigger_revision = $2, anchor_ms = $3, version = version + 1 WHERE trigger_id = $1
""")
_POSTPONE = Statement("UPDATE schedules SET wake_at_ms = $2, version = version + 1 WHERE trigger_id {in:$1}")
_DROP = Statement("DELETE FROM schedules WHERE trigger_id = $1")
_DROP_OF_TASK = Statement("DELETE FROM schedules WHERE task_id = $1")
_NEXT_WAKE = Statement("SELECT min(wake_at_ms) AS wake_at_ms FROM schedules WHERE wake_at_ms IS NOT NULL")
_WAKE_PROJECT = Statement(
    """
    UPDATE schedules SET wake_at_ms = $2 WHERE project = $1 AND stopped_by = 'project_archived' AND wake_at_ms > $2
    """,
    long=True,
)
_WAKE_ALL = Statement("UPDATE schedules SET wake_at_ms = $2 WHERE project = $1 AND wake_at_ms > $2", long=True)
_TAKEN_BACK = Statement("""
    UPDATE schedules SET decided_through_ms = $2, last_scheduled_at_ms = NULL,
      wake_at_ms = CASE WHEN stopped_by IS NULL THEN $3 ELSE wake_at_ms END,
      version = version + 1, updated_at_ms = $3
    WHERE trigger_id = $1 AND decided_through_ms > $2
""")
_LOOK_NOW = Statement("UPDATE schedules SET wake_at_ms = $2 WHERE task_id = $1 AND wake_at_ms > $2")
_AHEAD = Statement(f"""
    SELECT {_CLAIMED} FROM schedules s WHERE s.trigger_id > $1 AND s.decided_through_ms > $2
    ORDER BY s.trigger_id LIMIT $3 {{for_update}}
""")  # noqa: S608
_CLOCK = Statement("SELECT seen_ms, pruned_through_ms FROM schedule_clock WHERE id = 1")
_SEE = Statement("UPDATE schedule_clock SET seen_ms = $1 WHERE id = 1 AND seen_ms <> $1")
_PRUNED = Statement("UPDATE schedule_clock SET pruned_through_ms = $1 WHERE id = 1 AND pruned_through_ms < $1")

_START = Statement("""
    UPDATE system_start SET started_at_ms = CASE WHEN started_at_ms <= $1 THEN $1 ELSE started_at_ms + 1 END
    WHERE id = 1 AND (started_at_ms <= $2 OR started_at_ms > $3)
""")
_STARTED = Statement("SELECT started_at_ms FROM system_start WHERE id = 1")


async def insert(
    tx: Transaction,
    trigger_id: str,
    project: str,
    task_id: str,
    revision: int,
    anchor_ms: int,
    decided_through_ms: int,
    next_fire_at_ms: int | None,
    wake_at_ms: int | None,
    stopped: tuple[int | None, str | None],
    now_ms: int,
) -> None:
    """The row of a new trigger."""
    await tx.execute(
        _INSERT,
        trigger_id,
        project,
        task_id,
        revision,
        anchor_ms,
        decided_through_ms,
        next_fire_at_ms,
        wake_at_ms,
        *stopped,
        now_ms,
    )


async def claim(tx: Transaction, until_ms: int, limit: int) -> list[Row]:
    """The rows to look at now, the oldest first; held against other schedulers until this transaction ends."""
    return await tx.fetch(_CLAIM, until_ms, limit)


async def specs(tx: Transaction, trigger_ids: Sequence[str]) -> dict[str, Row]:
    """The current specification of each trigger."""
    return {row["trigger_id"]: row for row in await tx.fetch(_SPECS, json_set(trigger_ids))}


async def lock(tx: Transaction, trigger_id: str) -> Row | None:
    """The row of one trigger, held against the schedulers."""
    return await tx.fetch_one(_LOCK, trigger_id)


async def lock_of_task(tx: Transaction, task_id: str) -> list[Row]:
    """The rows of a task's triggers, held against the schedulers."""
    return await tx.fetch(_LOCK_OF_TASK, task_id)


async def move(tx: Transaction, rows: Sequence[dict[str, Any]]) -> None:
    """Writes where rows stand now; `last_ms` None keeps the last scheduled instant."""
    if rows:
        await tx.execute(_MOVE, json_rows(rows))


async def revise(tx: Transaction, trigger_id: str, revision: int, anchor_ms: int) -> None:
    """The row follows another revision of its trigger."""
    await tx.execute(_REVISE, trigger_id, revision, anchor_ms)


async def postpone(tx: Transaction, trigger_ids: Sequence[str], wake_at_ms: int) -> None:
    """Look at these later; nothing is settled."""
    if trigger_ids:
        await tx.execute(_POSTPONE, json_set(trigger_ids), wake_at_ms)


async def drop(tx: Transaction, trigger_id: str) -> None:
    """The trigger is on the calendar no more."""
    await tx.execute(_DROP, trigger_id)


async def drop_of_task(tx: Transaction, task_id: str) -> None:
    """A task's triggers are on the calendar no more."""
    await tx.execute(_DROP_OF_TASK, task_id)


async def next_wake(tx: Transaction) -> int | None:
    """When the next row has to be looked at."""
    row = await tx.fetch_one(_NEXT_WAKE)
    return row["wake_at_ms"] if row else None


async def wake_project(tx: Transaction, project: str, now_ms: int, *, all_of_it: bool = False) -> None:
    """A project changed: look again at what waits for its return, or at all of it when its rules changed."""
    await tx.execute(_WAKE_ALL if all_of_it else _WAKE_PROJECT, project, now_ms)


async def look_now(tx: Transaction, task_id: str, now_ms: int) -> None:
    """A task changed in a project with rules: they may say something else about its next runs."""
    await tx.execute(_LOOK_NOW, task_id, now_ms)


async def taken_back(tx: Transaction, trigger_id: str, through_ms: int, now_ms: int) -> None:
    """What lay ahead of this instant is open again."""
    await tx.execute(_TAKEN_BACK, trigger_id, through_ms, now_ms)


async def ahead_of(tx: Transaction, after_id: str, now_ms: int, limit: int) -> list[Row]:
    """Rows that are settled beyond `now_ms`, by id after `after_id`."""
    return await tx.fetch(_AHEAD, after_id, now_ms, limit)


async def clock(tx: Transaction) -> Row:
    """The wall time seen last, and through which instant admissions were pruned."""
    row = await tx.fetch_one(_CLOCK)
    assert row is not None
    return row


async def see(tx: Transaction, now_ms: int) -> None:
    """Notes the wall time."""
    await tx.execute(_SEE, now_ms)


async def note_pruned(tx: Transaction, through_ms: int) -> None:
    """Nothing at or before this instant is admitted again."""
    await tx.execute(_PRUNED, through_ms)


async def note_start(tx: Transaction, now_ms: int, together_ms: int) -> tuple[int, bool]:
    """The time of this start of the system: that of another start less than `together_ms` ago, or now, and whether this
    is the first to note it."""
    # A start that the clock puts before the last one is another one too, and its time is still a later one.
    first = await tx.execute(_START, now_ms, max(0, now_ms - together_ms), now_ms + together_ms) == 1
    row = await tx.fetch_one(_STARTED)
    return int(row["started_at_ms"]) if row else now_ms, first
