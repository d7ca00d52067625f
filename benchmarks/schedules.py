"""How many triggers one scheduler carries, and how fast it admits what is due in one and the same second.

`just bench schedules [--quick] [--database sqlite|postgresql] [--triggers N]`. N triggers lie far ahead (100,000 on
SQLite, 1,000,000 on PostgreSQL); 10,000 are due in one second. Measured are the time until all of these are admitted
and whether each was in its turn, the memory that a scheduler takes with and without the N, what a look costs when
nothing is due, how late the loop wakes for a due row, and which statements of the loops would read a whole table. The
limit is the same number of rows written bare, in the same batches. No bus and no dispatcher: orders are answered at
once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import asyncpg

from schemas.identity import Actor, PolicyDecision, Subject
from schemas.runs import Run, SubmitAnswer, SubmitRuns, Submitted
from schemas.tasks import Execution, TaskCreate, TaskSpec
from schemas.triggers import TriggerSpec
from services.kit.clock import Clock, ManualClock, WallClock
from services.kit.database import Database, DatabaseConfig, Statement, open_database
from services.kit.loops import Loop
from services.kit.migrations import migrate
from services.scheduler.catalogue import Catalogue
from services.scheduler.executions import Executions
from services.scheduler.loops import SLEEP_S, AdmissionLoop
from services.scheduler.projects import Projects
from services.scheduler.submitting import Submitter
from tests.fixtures_database import owner_dsn, postgres_server
from tests.scheduler.plans import count as counted
from tests.scheduler.plans import scans

MANY = {"sqlite": 100_000, "postgresql": 1_000_000}
QUICK = 10_000
DUE = 10_000
BATCH = 256
SLICE = 50_000
WAKES = 20
LIMIT_S = 600
IDLE = "0 0 1 1 *"
ALLOW = PolicyDecision(effect="allow", reasons=[], project_version=1, binding_version=None)
ACTOR = Actor(
    type="user", id="bench", authentication_id="bench", assurance="service", authenticated_at_ms=0, expires_at_ms=2**52
)
NOBODY = Subject(type="system", id="bench")

_WAKE = Statement("UPDATE schedules SET wake_at_ms = $2 WHERE trigger_id = $1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer triggers, for a first look")
    parser.add_argument("--database", choices=sorted(MANY), default=None, help="one of them alone")
    parser.add_argument("--triggers", type=int, default=None)
    options = parser.parse_args()
    if options.database is None:
        # A process each: what is measured is one scheduler's memory.
        arguments = [sys.executable, "-m", "benchmarks.schedules", *sys.argv[1:], "--database"]
        figures = {
            name: json.loads(subprocess.run([*arguments, name], check=True, capture_output=True).stdout)
            for name in MANY
        }
        print(json.dumps({"benchmark": "schedules", **figures, "cores": os.cpu_count()}))
        return
    count = options.triggers or (QUICK if options.quick else MANY[options.database])
    figure = asyncio.run(asyncio.wait_for(measured_on(options.database, count), LIMIT_S))
    print(json.dumps({"triggers": count, "due": DUE, **figure}))


async def measured_on(dialect: str, count: int) -> dict[str, Any]:
    """All figures on one database."""
    with tempfile.TemporaryDirectory(prefix="ql3-bench-") as folder:
        if dialect == "sqlite":
            config = DatabaseConfig(url=f"sqlite:{folder}")
            await migrate(config, "scheduler")
            figure = await measured(config, count)
            return {**figure, **ratio(figure, bare_sqlite_ms(Path(folder, "bare.sqlite3")))}
    with postgres_server(durable=True) as server:
        config = server.config(await server.create("scheduler"))
        figure = await measured(config, count)
        return {**figure, **ratio(figure, await bare_postgresql_ms(owner_dsn(config)))}


async def measured(config: DatabaseConfig, count: int) -> dict[str, Any]:
    """All figures of the scheduler itself."""
    database = await open_database(config, "scheduler")
    wall = WallClock()
    due_ms = (wall.now_ms() // 60_000 + 120) * 60_000
    due = f"{datetime.fromtimestamp(due_ms / 1000, UTC):%-M %-H %-d %-m} *"
    try:
        triggers = [TriggerSpec(expression=IDLE), TriggerSpec(expression=due)]
        spec = TaskSpec(execution=Execution(command=["/bin/true"]))
        task = TaskCreate(actor=ACTOR, project="default", name="bench", spec=spec, triggers=triggers)
        await Catalogue(database, wall).create(task, ALLOW)
        loop, _ = scheduler(database, wall)
        await loop.step()
        bare = rss_kib()
        started = time.perf_counter()
        await copies(database, IDLE, count, "0199")
        await copies(database, due, DUE - 1, "019a")
        filled_s = time.perf_counter() - started
        await counted(config)
        started = time.perf_counter()
        for _ in range(200):
            await loop.step()
        idle_us = (time.perf_counter() - started) / 200 * 1e6
        with_triggers = rss_kib()
        late = await wake_late_ms(database)
        clock = ManualClock(due_ms - 1_000)
        loop, submitter = scheduler(database, clock)
        started, cpu = time.perf_counter(), time.process_time()
        while await loop.step() is True:
            pass
        admitted_ms = (time.perf_counter() - started) * 1000
        await submitter.stop()
        cpu_ms = (time.process_time() - cpu) * 1000
        await counted(config)
        return {
            "filled_in_s": round(filled_s, 1),
            "admitted": (await rows(database, "SELECT count(*) AS n FROM schedule_admissions"))[0]["n"],
            "admitted_in_ms": round(admitted_ms, 1),
            "cpu_ms": round(cpu_ms, 1),
            "out_of_turn": await out_of_turn(database),
            "idle_look_us": round(idle_us, 1),
            "wake_late_p50_ms": round(sorted(late)[len(late) // 2], 2),
            "wake_late_max_ms": round(max(late), 2),
            "whole_table_reads": sorted(await scans(database)),
            "rss_bare_mib": round(bare / 1024, 1),
            "rss_with_triggers_mib": round(with_triggers / 1024, 1),
            "rss_after_mib": round(rss_kib() / 1024, 1),
        }
    finally:
        await database.close()


def ratio(figure: dict[str, Any], limit_ms: float) -> dict[str, float]:
    """The bare writes beside the time that admission took."""
    return {"limit_ms": round(limit_ms, 1), "ratio": round(figure["admitted_in_ms"] / limit_ms, 2)}


def scheduler(database: Database, clock: Clock) -> tuple[AdmissionLoop, Submitter]:
    """A scheduler's loop with a dispatcher that answers at once."""

    async def submit(message: SubmitRuns) -> SubmitAnswer:
        return SubmitAnswer(
            results=[Submitted(order_id=order.order_id, run=run_of(order.run_id)) for order in message.runs]
        )

    async def allow(_: str, _labels: Mapping[str, str]) -> PolicyDecision:
        return ALLOW

    executions = Executions()
    submitter = Submitter(database, clock, executions, submit)
    return AdmissionLoop(database, clock, executions, Projects(allow), submitter), submitter


def run_of(run_id: str) -> Run:
    """A run of which nobody reads more than that it is there."""
    nothing: dict[str, Any] = dict.fromkeys(Run.__struct_fields__)
    return Run(**{**nothing, "id": run_id, "status": "queued", "requested_by": NOBODY})


async def copies(database: Database, expression: str, count: int, prefix: str) -> None:
    """That many triggers like the one with this expression, in statements that keep within a service's time limit."""
    for first in range(1, count + 1, SLICE):
        await copy_slice(database, expression, first, min(count, first + SLICE - 1), prefix)


async def copy_slice(database: Database, expression: str, first: int, last: int, prefix: str) -> None:
    """Those with these numbers."""
    numbers, new_id = {
        "sqlite": (
            f"(WITH RECURSIVE n(x) AS (SELECT {first} UNION ALL SELECT x + 1 FROM n WHERE x < {last}) SELECT x FROM n)",
            f"printf('{prefix}0000-0000-7000-8000-%012d', n.x)",
        ),
        "postgresql": (
            f"(SELECT x FROM generate_series({first}, {last}) AS s(x))",
            f"'{prefix}0000-0000-7000-8000-' || lpad(n.x::text, 12, '0')",
        ),
    }[database.dialect]
    like = "WHERE r.spec LIKE '%' || $1 || '%' ORDER BY r.trigger_id DESC LIMIT 1"
    for sql in (
        f"INSERT INTO triggers (id, project, task_id, kind, revision, version, enabled, created_at_ms, updated_at_ms) "
        f"SELECT {new_id}, t.project, t.task_id, t.kind, 1, 1, 1, t.created_at_ms, t.updated_at_ms "
        f"FROM (SELECT t.* FROM triggers t JOIN trigger_revisions r ON r.trigger_id = t.id {like}) t, {numbers} n",
        f"INSERT INTO trigger_revisions (trigger_id, revision, spec, content_digest, request_digest, created_by_type, "
        f"created_by_id, created_at_ms) SELECT {new_id}, 1, r.spec, r.content_digest, r.request_digest, "
        f"'user', 'x', r.created_at_ms FROM (SELECT r.* FROM trigger_revisions r {like}) r, {numbers} n",
        f"INSERT INTO schedules (trigger_id, project, task_id, trigger_revision, anchor_ms, decided_through_ms, "
        f"next_fire_at_ms, wake_at_ms, updated_at_ms) SELECT {new_id}, s.project, s.task_id, 1, s.anchor_ms, "
        f"s.decided_through_ms, s.next_fire_at_ms, s.wake_at_ms, 0 FROM (SELECT s.* FROM schedules s JOIN "
        f"trigger_revisions r ON r.trigger_id = s.trigger_id {like}) s, {numbers} n",
    ):
        await database.transact(lambda tx, sql=sql: tx.execute(Statement(sql), expression))


async def out_of_turn(database: Database) -> int:
    """How many of the due ones were admitted before one that stood before them."""
    found = await rows(database, "SELECT trigger_id FROM schedule_admissions ORDER BY id")
    order = [row["trigger_id"] for row in found]
    return sum(one > two for one, two in pairwise(order))


async def rows(database: Database, sql: str, *args: Any) -> list[Any]:
    """Rows of a question that only this benchmark has."""
    return await database.read(lambda tx: tx.fetch(Statement(sql), *args))


def bare_sqlite_ms(path: Path) -> float:
    """The same number of rows in the same batches: an order inserted and a schedule moved, nothing else."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("CREATE TABLE orders (id TEXT PRIMARY KEY, body TEXT)")
    connection.execute("CREATE TABLE schedules (id INTEGER PRIMARY KEY, next BIGINT)")
    connection.executemany("INSERT INTO schedules VALUES (?, 0)", ((number,) for number in range(DUE)))
    started = time.perf_counter()
    for first in range(0, DUE, BATCH):
        numbers = range(first, min(DUE, first + BATCH))
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany("INSERT INTO orders VALUES (?, ?)", ((f"{number:036}", "x" * 600) for number in numbers))
        connection.executemany("UPDATE schedules SET next = 1 WHERE id = ?", ((number,) for number in numbers))
        connection.execute("COMMIT")
    elapsed = time.perf_counter() - started
    connection.close()
    return elapsed * 1000


async def bare_postgresql_ms(dsn: str) -> float:
    """The same on PostgreSQL, each kind of row in one round trip."""
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute("CREATE TEMPORARY TABLE bare_schedules (id INTEGER PRIMARY KEY, next BIGINT)")
        await connection.execute("CREATE TABLE bare_orders (id TEXT PRIMARY KEY, body TEXT)")
        await connection.execute(f"INSERT INTO bare_schedules SELECT x, 0 FROM generate_series(0, {DUE}) AS s(x)")
        started = time.perf_counter()
        for first in range(0, DUE, BATCH):
            numbers = list(range(first, min(DUE, first + BATCH)))
            async with connection.transaction():
                orders = [(f"{number:036}", "x" * 600) for number in numbers]
                await connection.copy_records_to_table("bare_orders", records=orders)
                await connection.execute("UPDATE bare_schedules SET next = 1 WHERE id = ANY ($1)", numbers)
        return (time.perf_counter() - started) * 1000
    finally:
        await connection.close()


async def wake_late_ms(database: Database) -> list[float]:
    """How late the admission loop looks at a row after the time at which it has to: of 20 rows, a tenth apart."""
    wall, late = WallClock(), list[float]()
    looking, _ = scheduler(database, wall)
    first = wall.now_ms() + 500
    expected = [first + number * 103 for number in range(WAKES)]
    found = await rows(database, "SELECT trigger_id FROM schedules ORDER BY trigger_id LIMIT $1", WAKES)
    for row, at_ms in zip(found, expected, strict=True):
        await database.transact(lambda tx, row=row, at_ms=at_ms: tx.execute(_WAKE, row["trigger_id"], at_ms))
    done = asyncio.Event()

    async def step() -> bool | float:
        now = time.time() * 1000
        while len(late) < WAKES and expected[len(late)] <= now:
            late.append(now - expected[len(late)])
        if len(late) == WAKES:
            done.set()
        return await looking.step()

    loop = Loop("bench", step, every_s=SLEEP_S)
    await loop.start()
    await done.wait()
    await loop.stop()
    return late


def rss_kib() -> int:
    """Resident memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    return 0


if __name__ == "__main__":
    main()
