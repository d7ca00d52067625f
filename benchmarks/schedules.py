"""How many triggers one scheduler carries, and how fast it admits what is due in one and the same second.

`just bench schedules [--quick] [--triggers N]`. N triggers lie far ahead; 10,000 are due in one second. Measured are
the time until all of these are admitted, the memory that a scheduler takes with and without the N, what a look costs
when nothing is due, and how late a sleeping loop wakes. The limit is the same number of rows written bare, in the same
batches. No bus and no dispatcher: orders are answered at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sqlite3
import tempfile
import time
from pathlib import Path
from typing import Any

from schemas.identity import Actor, PolicyDecision, Subject
from schemas.runs import Run, SubmitAnswer, SubmitRuns, Submitted
from schemas.tasks import Execution, TaskCreate, TaskSpec
from schemas.triggers import TriggerSpec
from services.kit.clock import ManualClock, WallClock
from services.kit.database import Database, DatabaseConfig, Statement, open_database
from services.kit.loops import Loop
from services.kit.migrations import migrate
from services.scheduler.catalogue import Catalogue
from services.scheduler.executions import Executions
from services.scheduler.loops import AdmissionLoop
from services.scheduler.projects import Projects
from services.scheduler.submitting import Submitter

DUE = 10_000
BATCH = 256
ALLOW = PolicyDecision(effect="allow", reasons=[], project_version=1, binding_version=None)
ACTOR = Actor(
    type="user", id="bench", authentication_id="bench", assurance="service", authenticated_at_ms=0, expires_at_ms=2**52
)
NOBODY = Subject(type="system", id="bench")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer triggers, for a first look")
    parser.add_argument("--triggers", type=int, default=None)
    options = parser.parse_args()
    count = options.triggers or (10_000 if options.quick else 100_000)
    with tempfile.TemporaryDirectory(prefix="ql3-bench-") as folder:
        figure = asyncio.run(measured(Path(folder), count))
    print(json.dumps({"benchmark": "schedules", "triggers": count, "due": DUE, **figure, "cores": os.cpu_count()}))


async def measured(folder: Path, count: int) -> dict[str, Any]:
    """All figures."""
    config = DatabaseConfig(url=f"sqlite:{folder}")
    await migrate(config, "scheduler")
    database = await open_database(config, "scheduler")
    clock = ManualClock(int(time.time() * 1000) // 60_000 * 60_000)
    try:
        await Catalogue(database, clock).create(
            TaskCreate(
                actor=ACTOR,
                project="default",
                name="bench",
                spec=TaskSpec(execution=Execution(command=["/bin/true"])),
                triggers=[TriggerSpec(expression="0 0 1 1 *"), TriggerSpec(expression="* * * * *")],
            ),
            ALLOW,
        )
        bare = rss_kib()
        await copies(database, "0 0 1 1 *", count, "0199")
        await copies(database, "* * * * *", DUE - 1, "019a")
        loop = admission_loop(database, clock)
        await loop.step()
        before = rss_kib()
        started = time.perf_counter()
        for _ in range(200):
            await loop.step()
        idle_us = (time.perf_counter() - started) / 200 * 1e6
        clock.advance(60_000)
        started = time.perf_counter()
        while await loop.step() is True:
            pass
        admitted_ms = (time.perf_counter() - started) * 1000
        admitted = await rows(database, "SELECT count(*) AS n FROM schedule_admissions")
        peak = rss_kib()
    finally:
        await database.close()
    limit_ms = bare_ms(folder / "bare.sqlite3")
    return {
        "admitted": admitted,
        "admitted_in_ms": round(admitted_ms, 1),
        "limit_ms": round(limit_ms, 1),
        "ratio": round(admitted_ms / limit_ms, 2),
        "idle_look_us": round(idle_us, 1),
        "wake_late_ms": round(await wake_late_ms(), 2),
        "rss_bare_mib": round(bare / 1024, 1),
        "rss_with_triggers_mib": round(before / 1024, 1),
        "rss_after_mib": round(peak / 1024, 1),
    }


def admission_loop(database: Database, clock: ManualClock) -> AdmissionLoop:
    """A scheduler's loop with a dispatcher that answers at once."""

    async def submit(message: SubmitRuns) -> SubmitAnswer:
        return SubmitAnswer(
            results=[Submitted(order_id=order.order_id, run=run_of(order.run_id)) for order in message.runs]
        )

    async def allow(_: str) -> PolicyDecision:
        return ALLOW

    executions = Executions()
    return AdmissionLoop(database, clock, executions, Projects(allow), Submitter(database, clock, executions, submit))


def run_of(run_id: str) -> Run:
    """A run of which nobody reads more than that it is there."""
    nothing: dict[str, Any] = dict.fromkeys(Run.__struct_fields__)
    return Run(**{**nothing, "id": run_id, "status": "queued", "requested_by": NOBODY})


async def copies(database: Database, expression: str, count: int, prefix: str) -> None:
    """That many triggers like the one with this expression."""
    numbers = f"WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < {count})"
    new_id = f"printf('{prefix}0000-0000-7000-8000-%012d', n.x)"
    like = "r.spec LIKE '%' || $1 || '%'"
    for sql in (
        f"INSERT INTO triggers (id, project, task_id, kind, revision, version, enabled, created_at_ms, updated_at_ms) "
        f"{numbers} SELECT {new_id}, t.project, t.task_id, t.kind, 1, 1, 1, t.created_at_ms, t.updated_at_ms "
        f"FROM (SELECT t.* FROM triggers t JOIN trigger_revisions r ON r.trigger_id = t.id WHERE {like} LIMIT 1) t, n",
        f"INSERT INTO trigger_revisions (trigger_id, revision, spec, content_digest, request_digest, created_by_type, "
        f"created_by_id, created_at_ms) {numbers} SELECT {new_id}, 1, r.spec, r.content_digest, r.request_digest, "
        f"'user', 'x', r.created_at_ms FROM (SELECT r.* FROM trigger_revisions r WHERE {like} LIMIT 1) r, n",
        f"INSERT INTO schedules (trigger_id, project, task_id, trigger_revision, anchor_ms, decided_through_ms, "
        f"next_fire_at_ms, wake_at_ms, updated_at_ms) {numbers} SELECT {new_id}, s.project, s.task_id, 1, s.anchor_ms, "
        f"s.decided_through_ms, s.next_fire_at_ms, s.wake_at_ms, 0 FROM (SELECT s.* FROM schedules s JOIN "
        f"trigger_revisions r ON r.trigger_id = s.trigger_id WHERE {like} LIMIT 1) s, n",
    ):
        await database.transact(lambda tx, sql=sql: tx.execute(Statement(sql), expression))


async def rows(database: Database, sql: str) -> int:
    """One number."""
    found = await database.read(lambda tx: tx.fetch_one(Statement(sql)))
    return int(found["n"]) if found else 0


def bare_ms(path: Path) -> float:
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


async def wake_late_ms() -> float:
    """How late a loop wakes that sleeps until an instant: the median of 20."""
    clock, late = WallClock(), list[float]()
    due = 0.0
    done = asyncio.Event()

    async def step() -> float | None:
        nonlocal due
        if due:
            late.append(time.time() * 1000 - due)
        if len(late) == 20:
            done.set()
            return None
        due = clock.now_ms() + 100.0
        return (due - time.time() * 1000) / 1000

    loop = Loop("bench", step, every_s=1.0)
    await loop.start()
    await done.wait()
    await loop.stop()
    return sorted(late)[10]


def rss_kib() -> int:
    """Resident memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    return 0


if __name__ == "__main__":
    main()
