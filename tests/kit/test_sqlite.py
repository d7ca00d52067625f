"""What the SQLite adapter promises beyond the port: durability, one writer among processes, full and broken disks."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import threading
from asyncio.subprocess import PIPE
from contextlib import closing
from pathlib import Path

import pytest

from services.kit.clock import ManualClock, SteadyClock
from services.kit.database import (
    CommitUnknown,
    Database,
    DatabaseBusy,
    DatabaseConfig,
    DatabaseUnavailable,
    Statement,
    Transaction,
)
from services.kit.database.sqlite import Connection, open_sqlite, path_of
from services.kit.migrations import migrate
from tests.fixtures_database import DatabaseFor, database_configs, reopen

_INSERT = Statement("INSERT INTO thing (n, text) VALUES ($1, $2)")
_ALL = Statement("SELECT n FROM thing ORDER BY n")


@pytest.fixture
async def database(database_on: DatabaseFor) -> Database:
    database = await database_on("sqlite", "plain")
    await database.transact(lambda tx: tx.execute(Statement("CREATE TABLE thing (n INTEGER PRIMARY KEY, text TEXT)")))
    return database


def path(database: Database) -> Path:
    return path_of(database_configs[database], database.service)


async def contents(database: Database) -> list[int]:
    return [row["n"] for row in await database.read(lambda tx: tx.fetch(_ALL))]


@pytest.mark.parametrize(
    ("pragma", "value"),
    [("journal_mode", "wal"), ("synchronous", 2), ("foreign_keys", 1), ("recursive_triggers", 1), ("query_only", 0)],
)
async def test_the_writer_is_durable_and_strict(database: Database, pragma: str, value: object):
    row = await database.transact(lambda tx: tx.fetch_one(Statement(f"PRAGMA {pragma}")))
    assert row == {pragma: value}


async def test_new_files_are_for_their_owner_only(tmp_path: Path):
    config = DatabaseConfig(url=f"sqlite:{tmp_path / 'new' / 'db'}")
    database = await open_sqlite(config, "plain")
    await database.transact(lambda tx: tx.execute(Statement("CREATE TABLE thing (n INTEGER)")))
    folder = tmp_path / "new" / "db"
    assert folder.stat().st_mode & 0o077 == 0
    assert {file.stat().st_mode & 0o077 for file in folder.iterdir()} == {0}
    await database.close()


async def test_a_write_lock_of_another_process_is_waited_for_then_busy(database: Database):
    other = await open_sqlite(database_configs[database], database.service, busy_s=0.01)
    with closing(sqlite3.connect(path(database), isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(DatabaseBusy):
            await other.transact(lambda tx: tx.execute(_INSERT, 1, ""))
        holder.execute("ROLLBACK")
    await other.transact(lambda tx: tx.execute(_INSERT, 2, ""))
    assert await contents(database) == [2]
    await other.close()


async def test_whoever_waits_for_another_process_may_leave_and_holds_nothing(database: Database):
    with closing(sqlite3.connect(path(database), isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        waiting = asyncio.create_task(database.transact(lambda tx: tx.execute(_INSERT, 1, "")))
        while not database._writer._jobs:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0)
        # The event loop is free meanwhile, and so are readers.
        assert await contents(database) == []
        waiting.cancel()
        holder.execute("ROLLBACK")
        with pytest.raises(asyncio.CancelledError):
            await waiting
    await database.transact(lambda tx: tx.execute(_INSERT, 2, ""))
    assert await contents(database) == [2]


_COUNT_FAR = Statement("""
    WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < $1) SELECT count(*) AS count FROM n
""")


async def test_a_long_read_does_not_keep_the_event_loop(database: Database):
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    row = await database.read(lambda tx: tx.fetch_one(_COUNT_FAR, 500_000))
    beside.cancel()
    assert row == {"count": 500_000}
    assert turns > 10


async def test_many_short_statements_let_others_have_their_turn(database: Database):
    others = asyncio.Event()

    async def until_then(tx: Transaction) -> None:
        asyncio.get_running_loop().call_soon(others.set)
        while not others.is_set():
            await tx.fetch(_ALL)

    async with asyncio.timeout(30):
        await database.read(until_then)
        others.clear()
        await database.transact(until_then)


async def test_a_statement_that_says_it_is_long_leaves_the_event_loop_free(database: Database):
    await database.transact(lambda tx: tx.execute(_INSERT, 1, ""))
    database._writer._conn.create_function("thread", 0, threading.get_ident)

    async def thread_of(statement: Statement) -> int:
        await database.transact(lambda tx: tx.execute(statement))
        (ran_on,) = await contents(database)
        return ran_on

    text = "UPDATE thing SET n = thread()"
    assert await thread_of(Statement(text)) == threading.get_ident()
    assert await thread_of(Statement(text, long=True)) != threading.get_ident()


async def test_a_full_disk_changes_nothing_and_heals(database: Database):
    await database.transact(lambda tx: tx.execute(_INSERT, 1, ""))
    pages = await database.transact(lambda tx: tx.fetch_one(Statement("PRAGMA page_count")))
    assert pages is not None
    limit = Statement(f"PRAGMA max_page_count = {pages['page_count'] + 2}")
    await database.transact(lambda tx: tx.fetch(limit))
    with pytest.raises(DatabaseUnavailable) as refused:
        await database.transact(lambda tx: tx.execute(_INSERT, 2, "x" * 100_000))
    assert "full" in str(refused.value)
    assert await contents(database) == [1]
    await database.transact(lambda tx: tx.execute(_INSERT, 3, ""))
    await database.transact(lambda tx: tx.fetch(Statement("PRAGMA max_page_count = 1000000")))
    await database.transact(lambda tx: tx.execute(_INSERT, 4, "x" * 100_000))
    assert await contents(database) == [1, 3, 4]


async def test_a_disk_that_fails_at_the_commit_leaves_the_outcome_open(
    database: Database, monkeypatch: pytest.MonkeyPatch
):
    call = Connection.call

    async def failing(self, function, *args, **kwargs):
        if args == ("COMMIT",):
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
            raise DatabaseUnavailable from error
        return await call(self, function, *args, **kwargs)

    monkeypatch.setattr(Connection, "call", failing)
    with pytest.raises(CommitUnknown):
        await database.transact(lambda tx: tx.execute(_INSERT, 1, ""))
    monkeypatch.undo()
    await database.transact(lambda tx: tx.execute(_INSERT, 2, ""))


async def test_a_file_that_is_no_database_is_unavailable_and_its_path_not_told(tmp_path: Path):
    (tmp_path / "plain.sqlite3").write_bytes(b"not a database, but long enough to look at" * 100)
    with pytest.raises(DatabaseUnavailable) as refused:
        await open_sqlite(DatabaseConfig(url=f"sqlite:{tmp_path}"), "plain")
    assert str(tmp_path) not in str(refused.value)


async def test_a_folder_that_cannot_be_made_is_unavailable(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DatabaseUnavailable):
        await open_sqlite(DatabaseConfig(url=f"sqlite:{tmp_path / 'file' / 'db'}"), "plain")


_COMMITTER = """
import asyncio, sys
from services.kit.database import DatabaseConfig, Statement, open_database
INSERT = Statement("INSERT INTO thing (n, text) VALUES ($1, '')")
async def main():
    database = await open_database(DatabaseConfig(url=sys.argv[1]), "plain")
    n = 0
    while True:
        await database.transact(lambda tx: tx.execute(INSERT, n))
        print(n, flush=True)
        n += 1
asyncio.run(main())
"""


async def test_what_was_committed_survives_a_killed_process(database: Database):
    await database.close()
    config = database_configs[database]
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", _COMMITTER, config.url, stdout=PIPE)
    assert process.stdout is not None
    async with asyncio.timeout(60):
        told = [int(await process.stdout.readline()) for _ in range(20)]
        process.kill()
        told += [int(line) for line in (await process.stdout.read()).split()]
        await process.wait()
    again = await reopen(database)
    there = await contents(again)
    assert there[: len(told)] == told
    assert len(there) <= len(told) + 1
    await again.close()


async def test_a_process_that_never_closed_its_database_can_end(database: Database):
    script = """
import asyncio, sys
from services.kit.database import DatabaseConfig, open_database
async def main():
    database = await open_database(DatabaseConfig(url=sys.argv[1]), "plain")
    await database.read(lambda tx: tx.now_ms())
    print("used")
asyncio.run(main())
"""
    command = (sys.executable, "-W", "ignore", "-c", script, database_configs[database].url)
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
    async with asyncio.timeout(60):
        told, _ = await process.communicate()
    assert (process.returncode, told) == (0, b"used\n")


# The clock of a file.


async def test_time_does_not_go_back_over_a_restart_with_a_wrong_clock(tmp_path: Path):
    config = DatabaseConfig(url=f"sqlite:{tmp_path}")
    await migrate(config, "plain")
    wall, monotonic = ManualClock(10_000_000), ManualClock(0)
    first = await open_sqlite(config, "plain", clock=SteadyClock(wall.now_ms, monotonic.now_ms))
    for _ in range(5):
        wall.advance(700)
        monotonic.advance(700)
        last = await first.transact(lambda tx: tx.now_ms())
    assert last == 10_003_500
    await first.close()
    wall.advance(-3_600_000)
    second = await open_sqlite(config, "plain", clock=SteadyClock(wall.now_ms, monotonic.now_ms))
    again = await second.transact(lambda tx: tx.now_ms())
    assert last <= again <= last + 1_000
    await second.close()


async def test_the_mark_is_written_once_a_second_at_most(tmp_path: Path):
    config = DatabaseConfig(url=f"sqlite:{tmp_path}")
    await migrate(config, "plain")
    wall, monotonic = ManualClock(10_000_000), ManualClock(0)
    database = await open_sqlite(config, "plain", clock=SteadyClock(wall.now_ms, monotonic.now_ms))
    marks: set[int] = set()
    mark = Statement("SELECT mark_ms FROM kit_clock")
    for _ in range(100):
        wall.advance(50)
        monotonic.advance(50)
        await database.transact(lambda tx: tx.now_ms())
        row = await database.read(lambda tx: tx.fetch_one(mark))
        assert row is not None
        marks.add(row["mark_ms"])
        now_ms = await database.read(lambda tx: tx.now_ms())
        assert row["mark_ms"] >= now_ms
    assert len(marks) == 5
    await database.close()
