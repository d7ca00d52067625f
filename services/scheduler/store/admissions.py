"""Orders for runs, open until the dispatcher has committed them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from services.kit.database import Row, Statement, Transaction, json_rows, json_set

JITTER_MAX_MS: Final = 86_400_000
"""A fire starts at most so much later than its instant; bounds a look at what is ahead."""

_INSERT = Statement("""
    INSERT INTO schedule_admissions
      (id, run_id, project, task_id, task_revision, trigger_id, trigger_revision, scheduled_for_ms, not_before_ms,
       idempotency_key, request_digest, run_order, status, ring_at_ms, created_at_ms)
    SELECT r.id, r.run_id, r.project, r.task_id, r.task_revision, r.trigger_id, r.trigger_revision,
      r.scheduled_for_ms, r.not_before_ms, r.idempotency_key, r.request_digest, r.run_order, 'open', $2, $3
    FROM {rows:$1 id text, run_id text, project text, task_id text, task_revision bigint, trigger_id text,
      trigger_revision bigint, scheduled_for_ms bigint, not_before_ms bigint, idempotency_key text,
      request_digest text, run_order text} AS r
    WHERE true
    ON CONFLICT DO NOTHING RETURNING id
""")
_BY_KEYS = Statement("""
    SELECT id, run_id, idempotency_key, request_digest, run_order, task_id, task_revision, status
    FROM schedule_admissions WHERE project = $1 AND idempotency_key {in:$2}
""")
_ADMITTED = Statement("""
    SELECT scheduled_for_ms FROM schedule_admissions
    WHERE trigger_id = $1 AND scheduled_for_ms BETWEEN $2 AND $3
""")
_COMMIT = Statement("""
    UPDATE schedule_admissions SET status = 'committed', ring_at_ms = NULL, closed_at_ms = $2
    WHERE id {in:$1} AND status = 'open'
""")
_REFUSE = Statement("""
    UPDATE schedule_admissions SET status = 'refused', error_code = r.code, ring_at_ms = NULL, closed_at_ms = $2
    FROM {rows:$1 id text, code text} AS r
    WHERE schedule_admissions.id = r.id AND schedule_admissions.status = 'open'
    RETURNING schedule_admissions.trigger_id, schedule_admissions.trigger_revision,
      schedule_admissions.scheduled_for_ms, schedule_admissions.task_id, schedule_admissions.project,
      schedule_admissions.error_code
""")
_OPEN_BY_IDS = Statement("""
    SELECT id, task_id, task_revision, run_order FROM schedule_admissions WHERE id {in:$1} AND status = 'open'
""")
_WITHDRAW_TRIGGER = Statement("""
    UPDATE schedule_admissions SET status = 'withdrawing', ring_at_ms = $3, closed_at_ms = NULL, rings = 1
    WHERE trigger_id = $1 AND scheduled_for_ms > $4 AND not_before_ms > $2
      AND status IN ('open', 'committed')
    RETURNING trigger_id, trigger_revision, scheduled_for_ms, run_id, project, task_id
""")
_WITHDRAW_TASK = Statement("""
    UPDATE schedule_admissions SET status = 'withdrawing', ring_at_ms = $3, closed_at_ms = NULL, rings = 1
    WHERE task_id = $1 AND not_before_ms > $2 AND trigger_id IS NOT NULL AND status IN ('open', 'committed')
    RETURNING trigger_id, trigger_revision, scheduled_for_ms, run_id, project, task_id
""")
_ASKING = Statement("""
    SELECT id, trigger_id, scheduled_for_ms FROM schedule_admissions
    WHERE task_id = $1 AND not_before_ms > $2 AND scheduled_for_ms > $2 AND trigger_id IS NOT NULL
      AND status IN ('open', 'committed')
    ORDER BY id
""")
_TAKE_BACK = Statement("""
    UPDATE schedule_admissions
    SET status = 'withdrawing', scheduled_for_ms = NULL, ring_at_ms = $2, closed_at_ms = NULL, rings = 1
    WHERE id {in:$1} AND status IN ('open', 'committed')
""")
_DUE = Statement("""
    SELECT id, run_id, project, task_id, task_revision, run_order, status, rings, not_before_ms, created_at_ms
    FROM schedule_admissions WHERE ring_at_ms <= $1
    ORDER BY ring_at_ms, id LIMIT $2 {for_update_skip_locked}
""")
_RING = Statement("""
    UPDATE schedule_admissions SET rings = schedule_admissions.rings + 1, ring_at_ms = r.ring_at_ms
    FROM {rows:$1 id text, ring_at_ms bigint} AS r WHERE schedule_admissions.id = r.id
""")
_WITHDRAWN = Statement("""
    UPDATE schedule_admissions SET status = 'withdrawn', ring_at_ms = NULL, closed_at_ms = $2
    WHERE id {in:$1} AND status = 'withdrawing'
""")
_BORN = Statement("""
    UPDATE schedule_admissions SET status = 'withdrawing', ring_at_ms = $2, closed_at_ms = NULL, rings = 1
    WHERE id {in:$1} AND status IN ('withdrawing', 'withdrawn')
""")
_PRUNE = Statement(
    """
    DELETE FROM schedule_admissions WHERE id IN (
      SELECT id FROM schedule_admissions
      WHERE closed_at_ms < $1 AND (scheduled_for_ms IS NULL OR scheduled_for_ms < $3)
      ORDER BY closed_at_ms, id LIMIT $2
    ) RETURNING scheduled_for_ms
    """,
    postgresql="""
    DELETE FROM schedule_admissions WHERE id = ANY (ARRAY (
      SELECT id FROM schedule_admissions
      WHERE closed_at_ms < $1 AND (scheduled_for_ms IS NULL OR scheduled_for_ms < $3)
      ORDER BY closed_at_ms, id LIMIT $2
    )) RETURNING scheduled_for_ms
    """,
)
_OPEN = Statement("SELECT count(*) AS count FROM schedule_admissions WHERE ring_at_ms IS NOT NULL")


async def insert(tx: Transaction, rows: Sequence[dict[str, Any]], ring_at_ms: int, now_ms: int) -> set[str]:
    """New open orders; answers the ids of those that are new. An instant or a key that is there stays as it is."""
    return {row["id"] for row in await tx.fetch(_INSERT, json_rows(rows), ring_at_ms, now_ms)}


async def by_keys(tx: Transaction, project: str, keys: Sequence[str]) -> dict[str, Row]:
    """Orders by idempotency key."""
    return {row["idempotency_key"]: row for row in await tx.fetch(_BY_KEYS, project, json_set(keys))}


async def admitted(tx: Transaction, trigger_id: str, from_ms: int, until_ms: int) -> set[int]:
    """The instants of a window that are known to have been admitted."""
    return {row["scheduled_for_ms"] for row in await tx.fetch(_ADMITTED, trigger_id, from_ms, until_ms)}


async def commit(tx: Transaction, ids: Sequence[str], now_ms: int) -> int:
    """The dispatcher has these runs."""
    return await tx.execute(_COMMIT, json_set(ids), now_ms)


async def refuse(tx: Transaction, codes: dict[str, str], now_ms: int) -> list[Row]:
    """These will never run, for the error named; answers those that were still open."""
    return await tx.fetch(_REFUSE, json_rows({"id": key, "code": code} for key, code in codes.items()), now_ms)


async def open_by_ids(tx: Transaction, ids: Sequence[str]) -> list[Row]:
    """Those of these orders that are open."""
    return await tx.fetch(_OPEN_BY_IDS, json_set(ids))


async def withdraw_of_trigger(tx: Transaction, trigger_id: str, now_ms: int, ring_at_ms: int) -> list[Row]:
    """Take back what was admitted ahead and may not start yet."""
    return await tx.fetch(_WITHDRAW_TRIGGER, trigger_id, now_ms, ring_at_ms, now_ms - JITTER_MAX_MS - 1)


async def withdraw_of_task(tx: Transaction, task_id: str, now_ms: int, ring_at_ms: int) -> list[Row]:
    """The same for all triggers of a task."""
    return await tx.fetch(_WITHDRAW_TASK, task_id, now_ms, ring_at_ms)


async def asking(tx: Transaction, task_id: str, beyond_ms: int) -> list[Row]:
    """A task's runs that ask ahead of their time for instants later than this one."""
    return await tx.fetch(_ASKING, task_id, beyond_ms)


async def take_back(tx: Transaction, ids: Sequence[str], ring_at_ms: int) -> None:
    """These runs are not to be; their instants are free to be admitted again."""
    await tx.execute(_TAKE_BACK, json_set(ids), ring_at_ms)


async def due(tx: Transaction, now_ms: int, limit: int) -> list[Row]:
    """Open orders to ring again; held against other schedulers."""
    return await tx.fetch(_DUE, now_ms, limit)


async def rung(tx: Transaction, ring_at: dict[str, int]) -> None:
    """They were rung; when again."""
    rows = json_rows({"id": key, "ring_at_ms": value} for key, value in ring_at.items())
    await tx.execute(_RING, rows)


async def withdrawn(tx: Transaction, ids: Sequence[str], now_ms: int) -> None:
    """These runs can start no more."""
    await tx.execute(_WITHDRAWN, json_set(ids), now_ms)


async def born(tx: Transaction, ids: Sequence[str], ring_at_ms: int) -> int:
    """The dispatcher made runs of these orders; those that were withdrawn have to be taken back now. How many."""
    return await tx.execute(_BORN, json_set(ids), ring_at_ms)


async def prune(tx: Transaction, before_ms: int, limit: int, passed_ms: int) -> tuple[int, int]:
    """Deletes a page of long closed orders whose instants have passed; answers how many and the last instant (0: none).

    What a wrong clock admitted far ahead stays, and its instant is known when it comes.
    """
    rows = await tx.fetch(_PRUNE, before_ms, limit, passed_ms)
    return len(rows), max((row["scheduled_for_ms"] or 0 for row in rows), default=0)


async def count_open(tx: Transaction) -> int:
    """Orders without an answer."""
    row = await tx.fetch_one(_OPEN)
    return int(row["count"]) if row else 0
