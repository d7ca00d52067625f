"""A scheduler that dies at any step of an admission: another one goes on, and each instant is one run."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from schemas.base import decode
from schemas.runs import RunOrder, SubmitRuns
from services.kit.clock import ManualClock
from tests.fixtures_database import database_configs, shift_clock
from tests.scheduler.conftest import Room, at, cron
from tests.scheduler.doomed import POINTS, RINGING, FileLedger

TASKS = 6
MINUTE = 60_000


@pytest.fixture(scope="module")
def graveyard() -> Generator[subprocess.Popen[str]]:
    """The process whose forks die."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.scheduler.doomed"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield process
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    process.wait()
    process.stdout.close()


async def doomed(graveyard: subprocess.Popen[str], room: Room, ledger: Path, point: str) -> int:
    """Run a scheduler that dies at a point; its exit code."""
    case = {
        "config": msgspec.structs.asdict(database_configs[room.database]),
        "now_ms": room.clock.now_ms(),
        "ledger": str(ledger),
        "point": point,
    }
    assert graveyard.stdin is not None
    assert graveyard.stdout is not None
    graveyard.stdin.write(json.dumps(case) + "\n")
    graveyard.stdin.flush()
    code = int(await asyncio.to_thread(graveyard.stdout.readline))
    assert code in (0, -signal.SIGKILL)
    return code


def orders(ledger: Path) -> list[RunOrder]:
    """All orders that the dispatcher was given, also repeated ones."""
    lines = ledger.read_bytes().splitlines() if ledger.exists() else []
    return [order for line in lines for order in decode(line, SubmitRuns).runs]


async def go_on(room: Room, ledger: Path) -> None:
    """Another scheduler, until nothing is open."""
    other = Room(room.database, room.clock, FileLedger(ledger, "none"))
    await other.look()
    for _ in range(3):
        # The dead one's orders are rung when their time has come, and taken from the queue.
        await shift_clock(room.database, 10_000)
        await other.ringing.step()
        await other.deliver()
    assert await room.rows("SELECT id FROM schedule_admissions WHERE ring_at_ms IS NOT NULL") == []


@pytest.mark.parametrize("point", POINTS)
async def test_each_instant_is_one_run_wherever_a_scheduler_dies(
    graveyard: subprocess.Popen[str], room: Room, clock: ManualClock, tmp_path: Path, point: str
) -> None:
    for number in range(TASKS):
        # The last one has missed fires too.
        await room.create(f"task-{number}", cron("* * * * *", missed="skip" if number == TASKS - 1 else "fire_once"))
    ledger = tmp_path / "ledger"
    clock.advance(2 * MINUTE + 5_000)
    if point in RINGING:
        # What they are rung for: orders whose sender died before it asked.
        assert await doomed(graveyard, room, ledger, "admission committed") == -signal.SIGKILL
        await shift_clock(room.database, 10_000)
    died = await doomed(graveyard, room, ledger, point)
    assert died == -signal.SIGKILL, "the point was not reached"
    await go_on(room, ledger)
    by_key: defaultdict[str, set[tuple[Any, ...]]] = defaultdict(set)
    for order in orders(ledger):
        by_key[order.idempotency_key].add((order.run_id, order.order_id, order.scheduled_for_ms))
    # However often it was told, an instant is the same run.
    assert all(len(told) == 1 for told in by_key.values())
    instants = sorted(told[2] for (told,) in by_key.values())
    assert instants == [at("2026-03-02 12:02:00")] * TASKS
    missed = await room.missed()
    assert sum(row.count for row in missed) == TASKS
    assert {row.cause for row in missed} == {"scheduler_down"}
    # And the calendar goes on.
    clock.advance(MINUTE)
    await go_on(room, ledger)
    assert sum(order.scheduled_for_ms == at("2026-03-02 12:03:00") for order in orders(ledger)) == TASKS


async def test_two_schedulers_one_of_which_keeps_dying(
    graveyard: subprocess.Popen[str], room: Room, clock: ManualClock, tmp_path: Path
) -> None:
    """Side by side: one admits while the other is killed at one step after another."""
    if room.database.dialect == "sqlite":
        pytest.skip("one process alone uses a file")
    for number in range(TASKS):
        await room.create(f"task-{number}", cron("* * * * *"))
    ledger = tmp_path / "ledger"
    for point in POINTS:
        clock.advance(MINUTE)
        if point in RINGING:
            await doomed(graveyard, room, ledger, "admission committed")
            await shift_clock(room.database, 10_000)
        await asyncio.gather(doomed(graveyard, room, ledger, point), go_on(room, ledger))
        await go_on(room, ledger)
    found = {(order.trigger_id, order.scheduled_for_ms): order.run_id for order in orders(ledger)}
    assert len(found) == TASKS * len(POINTS)
    assert len({order.run_id for order in orders(ledger)}) == TASKS * len(POINTS)
    assert await room.causes() == []
