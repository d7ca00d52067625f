"""Many triggers: the loops look at what is due and at nothing else, in batches, in order."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from services.kit.clock import ManualClock
from services.kit.database import Statement, Transaction
from services.scheduler.projects import asked
from services.scheduler.store import schedules
from tests.fixtures_database import database_configs
from tests.scheduler.conftest import PROJECT, Room, cron
from tests.scheduler.plans import count, scans

MANY = 3_000
PLANNED = 50_000
"""Large enough that a planner that may choose does so as it does with a million."""
DUE = 700


async def populate(room: Room, count: int) -> None:
    """That many triggers of one task, a second apart from each other, copied from one that was made properly."""
    await room.create("many", cron("0 0 1 1 *"))
    numbers = {
        "sqlite": f"WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < {count}) SELECT x FROM n",
        "postgresql": f"SELECT x FROM generate_series(1, {count}) AS s(x)",
    }[room.database.dialect]
    new_id = {
        "sqlite": "printf('01990000-0000-7000-8000-%012d', n.x)",
        "postgresql": "'01990000-0000-7000-8000-' || lpad(n.x::text, 12, '0')",
    }[room.database.dialect]
    for sql in (
        f"INSERT INTO triggers (id, project, task_id, kind, revision, version, enabled, created_at_ms, updated_at_ms) "
        f"SELECT {new_id}, t.project, t.task_id, t.kind, 1, 1, 1, t.created_at_ms, t.updated_at_ms "
        f"FROM triggers t, ({numbers}) n",
        f"INSERT INTO trigger_revisions (trigger_id, revision, spec, content_digest, request_digest, created_by_type, "
        f"created_by_id, created_at_ms) SELECT {new_id}, 1, r.spec, r.content_digest, r.request_digest, 'user', 'x', "
        f"r.created_at_ms FROM trigger_revisions r, ({numbers}) n",
        f"INSERT INTO schedules (trigger_id, project, task_id, trigger_revision, anchor_ms, decided_through_ms, "
        f"next_fire_at_ms, wake_at_ms, updated_at_ms) SELECT {new_id}, s.project, s.task_id, 1, s.anchor_ms, "
        f"s.decided_through_ms, s.next_fire_at_ms, s.wake_at_ms + n.x * 1000, 0 FROM schedules s, ({numbers}) n",
        f"INSERT INTO schedule_admissions (id, run_id, project, task_id, task_revision, idempotency_key, "
        f"request_digest, run_order, status, created_at_ms, closed_at_ms) "
        f"SELECT {new_id}, {new_id}, t.project, t.id, 1, {new_id}, "
        f"'{'0' * 64}', '{'x' * 500}', 'committed', n.x, n.x FROM task_definitions t, ({numbers}) n",
    ):
        await room.database.transact(lambda tx, sql=sql: tx.execute(Statement(sql)))


async def test_no_loop_scans_a_table(room: Room) -> None:
    await populate(room, PLANNED)
    await count(database_configs[room.database])
    assert await scans(room.database) == {}


async def test_what_is_due_is_admitted_in_batches_in_order(room: Room, clock: ManualClock) -> None:
    await populate(room, MANY)
    first = (await room.rows("SELECT min(wake_at_ms) AS wake FROM schedules"))[0]["wake"]
    fetched: list[int] = []
    claim = schedules.claim

    async def counted(tx: Transaction, until_ms: int, limit: int) -> Any:
        rows = await claim(tx, until_ms, limit)
        fetched.append(len(rows))
        assert all(one["wake_at_ms"] <= two["wake_at_ms"] for one, two in pairwise(rows))
        return rows

    clock.advance(first + DUE * 1000 - clock.now_ms())
    await room.projects.learn([asked(PROJECT)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedules, "claim", counted)
        await room.look()
    assert len(room.ledger.runs) == DUE + 1
    assert max(fetched) <= 256
    assert sum(fetched) == DUE + 1
    left = (await room.rows("SELECT count(*) AS count FROM schedules WHERE wake_at_ms <= $1", clock.now_ms()))[0]
    assert left["count"] == 0
