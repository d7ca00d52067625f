"""What both database adapters promise alike. Every test runs on a real SQLite file and on a real PostgreSQL server."""

from __future__ import annotations

import asyncio
import time

import pytest

from services.kit.database import (
    CheckViolation,
    Database,
    DatabaseBusy,
    DatabaseUnavailable,
    ForeignKeyViolation,
    NotNullViolation,
    Statement,
    Transaction,
    TransactionAborted,
    UniqueViolation,
    id_set,
    json_rows,
    json_set,
)
from services.kit.database.errors import Retryable
from tests.fixtures_database import DatabaseFor, execute_as_owner, shift_clock

_TABLES = (
    "CREATE TABLE shelf (id TEXT PRIMARY KEY)",
    """CREATE TABLE thing (
      id TEXT PRIMARY KEY,
      shelf TEXT REFERENCES shelf (id) DEFERRABLE INITIALLY DEFERRED,
      name TEXT,
      n INTEGER NOT NULL CONSTRAINT thing_n_check CHECK (n >= 0)
    )""",
    "CREATE UNIQUE INDEX thing_shelf_name ON thing (shelf, name)",
)
_INSERT = Statement("INSERT INTO thing (id, n) VALUES ($1, $2)")
_PUT = Statement("INSERT INTO thing (id, shelf, name, n) VALUES ($1, $2, $3, $4)")
_ALL = Statement("SELECT id, n FROM thing ORDER BY id")
_GET = Statement("SELECT id, shelf, name, n FROM thing WHERE id = $1 {for_update}")
_SET = Statement("UPDATE thing SET n = $2 WHERE id = $1")
_SHELF = Statement("INSERT INTO shelf (id) VALUES ($1)")


@pytest.fixture
async def database(database_for: DatabaseFor) -> Database:
    database = await database_for("plain")
    await execute_as_owner(database, *_TABLES)
    return database


async def put(database: Database, **things: int) -> None:
    await database.transact(lambda tx: tx.execute_many(_INSERT, list(things.items())))


async def contents(database: Database) -> dict[str, int]:
    rows = await database.read(lambda tx: tx.fetch(_ALL))
    return {row["id"]: row["n"] for row in rows}


# Rows and counts.


async def test_a_row_is_read_by_its_names(database: Database):
    await put(database, a=1)
    row = await database.read(lambda tx: tx.fetch_one(_GET_PLAIN, "a"))
    assert row == {"id": "a", "shelf": None, "name": None, "n": 1}
    assert list(row) == ["id", "shelf", "name", "n"]
    assert row.get("missing") is None
    assert await database.read(lambda tx: tx.fetch_one(_GET_PLAIN, "z")) is None
    assert await database.read(lambda tx: tx.fetch(_GET_PLAIN, "z")) == []


_GET_PLAIN = Statement("SELECT id, shelf, name, n FROM thing WHERE id = $1")


@pytest.mark.parametrize(
    ("sql", "count"),
    [
        ("UPDATE thing SET n = n + 1", 2),
        ("UPDATE thing SET n = 5 WHERE id = 'z'", 0),
        ("DELETE FROM thing WHERE id = 'a'", 1),
        ("INSERT INTO thing (id, n) VALUES ('a', 9) ON CONFLICT (id) DO NOTHING", 0),
        ("INSERT INTO thing (id, n) VALUES ('a', 9) ON CONFLICT (id) DO UPDATE SET n = 9", 1),
        ("INSERT INTO thing (id, n) SELECT id || 'x', n FROM thing", 2),
        ("WITH wanted AS (SELECT 'a' AS id) UPDATE thing SET n = 7 WHERE id IN (SELECT id FROM wanted)", 1),
        ("WITH wanted AS (SELECT 'z' AS id) UPDATE thing SET n = 7 WHERE id IN (SELECT id FROM wanted)", 0),
        ("UPDATE thing SET n = 3 RETURNING id", 2),
    ],
)
async def test_a_change_tells_how_many_rows_it_changed(database: Database, sql: str, count: int):
    await put(database, a=1, b=2)
    await put(database, c=3)
    await database.transact(lambda tx: tx.execute(Statement("DELETE FROM thing WHERE id = 'c'")))
    assert await database.transact(lambda tx: tx.execute(Statement(sql))) == count


async def test_returning_hands_over_what_changed(database: Database):
    await put(database, a=1, b=2)
    changed = Statement("UPDATE thing SET n = n + $1 WHERE n > $2 RETURNING id, n")
    assert await database.transact(lambda tx: tx.fetch(changed, 10, 1)) == [{"id": "b", "n": 12}]
    assert await contents(database) == {"a": 1, "b": 12}


async def test_many_rows_go_in_one_call_and_none_is_no_call(database: Database):
    await database.transact(lambda tx: tx.execute_many(_INSERT, [(f"t{n:04}", n) for n in range(600)]))
    await database.transact(lambda tx: tx.execute_many(_INSERT, []))
    assert len(await contents(database)) == 600


async def test_a_set_of_ids_is_one_argument(database: Database):
    await put(database, a=1, b=2, c=3)
    chosen = id_set("SELECT id FROM thing WHERE id {in:$1} AND n > $2 ORDER BY id")
    ids = json_set(["a", "b", "c", 'it\'s "quoted"'])
    assert [row["id"] for row in await database.read(lambda tx: tx.fetch(chosen, ids, 1))] == ["b", "c"]
    assert await database.read(lambda tx: tx.fetch(chosen, json_set([]), 0)) == []


async def test_rows_are_one_argument(database: Database):
    await put(database, a=1, b=2, c=3)
    update = Statement("""
        UPDATE thing SET n = r.n, name = r.name
        FROM {rows:$1 id text, expected integer, n bigint, name text} AS r
        WHERE thing.id = r.id AND thing.n = r.expected RETURNING thing.id
    """)
    rows = json_rows(
        [
            {"id": "a", "expected": 1, "n": 10, "name": None},
            {"id": "b", "expected": 9, "n": 20, "name": "x"},
            {"id": "c", "expected": 3, "n": 30, "name": "$.c"},
        ]
    )
    changed = await database.transact(lambda tx: tx.fetch(update, rows))
    assert sorted(row["id"] for row in changed) == ["a", "c"]
    assert await contents(database) == {"a": 10, "b": 2, "c": 30}


async def test_an_argument_may_stand_twice_and_out_of_order(database: Database):
    await put(database, a=1, b=2)
    statement = Statement("SELECT id FROM thing WHERE n >= $2 AND (id = $1 OR n > $2)")
    assert await database.read(lambda tx: tx.fetch(statement, "b", 1)) == [{"id": "b"}]


async def test_wide_numbers_flags_and_text_keep_their_value(database: Database):
    echo = Statement("SELECT CAST($1 AS BIGINT) AS wide, CAST($2 AS INTEGER) AS flag, CAST($3 AS TEXT) AS text")
    row = await database.read(lambda tx: tx.fetch_one(echo, 2**53, True, "Ünïcødé 汉字 '--"))
    assert row == {"wide": 2**53, "flag": 1, "text": "Ünïcødé 汉字 '--"}


# Transactions.


async def test_an_error_undoes_the_transaction(database: Database):
    async def work(tx: Transaction) -> None:
        await tx.execute(_INSERT, "a", 1)
        raise LookupError("mine")

    with pytest.raises(LookupError):
        await database.transact(work)
    assert await contents(database) == {}


async def test_the_result_of_the_work_is_handed_over(database: Database):
    async def work(tx: Transaction) -> str:
        return f"{await tx.execute(_INSERT, 'a', 1)} row"

    assert await database.transact(work) == "1 row"


async def test_concurrent_changes_of_a_row_are_all_counted(database: Database):
    await put(database, a=0)

    async def increment(tx: Transaction) -> None:
        row = await tx.fetch_one(_GET, "a")
        assert row is not None
        await tx.execute(_SET, "a", row["n"] + 1)

    await asyncio.gather(*(database.transact(increment) for _ in range(40)))
    assert await contents(database) == {"a": 40}


async def test_a_reader_sees_one_snapshot_beside_a_writer(database: Database):
    await put(database, a=1)

    async def look(tx: Transaction) -> tuple[int, int]:
        first = await tx.fetch(_ALL)
        await asyncio.create_task(put(database, b=2))
        return len(first), len(await tx.fetch(_ALL))

    assert await database.read(look) == (1, 1)
    assert len(await contents(database)) == 2


async def test_a_reader_does_not_see_what_is_not_committed(database: Database):
    async def work(tx: Transaction) -> dict[str, int]:
        await tx.execute(_INSERT, "a", 1)
        return await asyncio.create_task(contents(database))

    assert await database.transact(work) == {}


async def test_a_reader_cannot_write(database: Database):
    with pytest.raises(DatabaseUnavailable):
        await database.read(lambda tx: tx.execute(_INSERT, "a", 1))
    assert await contents(database) == {}


async def test_a_transaction_inside_a_transaction_is_refused_instead_of_waiting_for_itself(database: Database):
    async def outer(_: Transaction) -> None:
        await put(database, a=1)

    with pytest.raises(RuntimeError, match="inside a transaction"):
        await database.transact(outer)
    await put(database, b=1)


async def test_a_cancelled_transaction_leaves_nothing_and_blocks_nobody(database: Database):
    inside = asyncio.Event()

    async def work(tx: Transaction) -> None:
        await tx.execute(_INSERT, "a", 1)
        inside.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(database.transact(work))
    await asyncio.wait_for(inside.wait(), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(put(database, b=2), 10)
    assert await contents(database) == {"b": 2}


async def test_cancelling_at_any_moment_leaves_all_or_nothing(database: Database):
    """Cancels after more and more turns of the event loop until the work is done first, so every await is hit."""
    outcomes: set[bool] = set()
    turns, finished = 0, False
    while not finished:
        rung: list[int] = []

        async def work(tx: Transaction, n: int = turns, rung: list[int] = rung) -> None:
            await tx.execute(_INSERT, f"a{n:06}", n)
            await tx.execute(_INSERT, f"b{n:06}", n)
            tx.after_commit(lambda: rung.append(n))

        task = asyncio.create_task(database.transact(work))
        for _ in range(turns):
            await asyncio.sleep(0)
        finished = task.done()
        task.cancel()
        await asyncio.wait({task})
        there = await contents(database)
        assert (f"a{turns:06}" in there) == (f"b{turns:06}" in there) == bool(rung)
        outcomes.add(bool(rung))
        turns += 1 + turns // 8
    assert outcomes == {True, False}


# What a failed statement does.


async def test_a_failed_statement_ends_the_transaction_even_when_its_error_is_swallowed(database: Database):
    await put(database, a=1)

    async def work(tx: Transaction) -> None:
        await tx.execute(_INSERT, "b", 1)
        with pytest.raises(UniqueViolation):
            await tx.execute(_INSERT, "a", 1)
        with pytest.raises(TransactionAborted):
            await tx.execute(_INSERT, "c", 1)

    with pytest.raises(TransactionAborted):
        await database.transact(work)
    assert await contents(database) == {"a": 1}


async def failing(tx: Transaction, error: type[Exception], *things: str) -> None:
    """A savepoint that puts `things`, of which one is there already or after which LookupError is raised."""

    async def attempt() -> None:
        async with tx.savepoint():
            for thing in things:
                await tx.execute(_INSERT, thing, 1)
            raise LookupError

    with pytest.raises(error):
        await attempt()


async def test_a_savepoint_fails_alone(database: Database):
    await put(database, a=1)

    async def work(tx: Transaction) -> None:
        await tx.execute(_INSERT, "b", 1)
        await failing(tx, UniqueViolation, "c", "a")
        async with tx.savepoint():
            await tx.execute(_INSERT, "d", 1)
            await failing(tx, LookupError, "e")

    await database.transact(work)
    assert await contents(database) == {"a": 1, "b": 1, "d": 1}


async def test_a_savepoint_whose_error_is_swallowed_inside_fails_at_its_end(database: Database):
    await put(database, a=1)

    async def swallow(tx: Transaction) -> None:
        async with tx.savepoint():
            await tx.execute(_INSERT, "b", 1)
            with pytest.raises(UniqueViolation):
                await tx.execute(_INSERT, "a", 1)

    async def work(tx: Transaction) -> None:
        with pytest.raises(TransactionAborted):
            await swallow(tx)
        await tx.execute(_INSERT, "c", 1)

    await database.transact(work)
    assert await contents(database) == {"a": 1, "c": 1}


async def test_a_unique_violation_names_its_columns(database: Database):
    async def work(tx: Transaction) -> None:
        await tx.execute(_SHELF, "s")
        await tx.execute(_PUT, "a", "s", "same", 1)
        await tx.execute(_PUT, "b", "s", "same", 1)

    with pytest.raises(UniqueViolation) as refused:
        await database.transact(work)
    assert refused.value.table == "thing"
    assert refused.value.columns == ("shelf", "name")


async def test_a_primary_key_is_unique(database: Database):
    await put(database, a=1)
    with pytest.raises(UniqueViolation) as refused:
        await put(database, a=1)
    assert refused.value.columns == ("id",)


async def test_a_check_violation_names_its_constraint(database: Database):
    with pytest.raises(CheckViolation) as refused:
        await put(database, a=-1)
    assert refused.value.constraint == "thing_n_check"


async def test_a_required_column_is_named(database: Database):
    with pytest.raises(NotNullViolation) as refused:
        await database.transact(lambda tx: tx.execute(_INSERT, "a", None))
    assert refused.value.columns == ("n",)


async def test_a_deferred_foreign_key_is_judged_at_the_commit(database: Database):
    async def late(tx: Transaction) -> None:
        await tx.execute(_PUT, "a", "s", None, 1)
        await tx.execute(_SHELF, "s")

    await database.transact(late)
    with pytest.raises(ForeignKeyViolation):
        await database.transact(lambda tx: tx.execute(_PUT, "b", "nowhere", None, 1))
    assert await contents(database) == {"a": 1}
    with pytest.raises(ForeignKeyViolation):
        await database.transact(lambda tx: tx.execute(Statement("DELETE FROM shelf")))
    assert await contents(database) == {"a": 1}


async def test_an_error_never_holds_a_value(database: Database):
    async def work(tx: Transaction) -> None:
        await tx.execute(_SHELF, "sesame")
        await tx.execute(_SHELF, "sesame")

    with pytest.raises(UniqueViolation) as refused:
        await database.transact(work)
    assert "sesame" not in str(refused.value)


# Retries and callbacks.


async def test_a_lost_race_is_run_again_and_rings_once(database: Database):
    tries, rung = [], []

    async def work(tx: Transaction) -> str:
        tries.append(len(tries))
        await tx.execute(_INSERT, "a", len(tries))
        tx.after_commit(lambda: rung.append("one of its own each time"))
        if len(tries) < 5:
            raise Retryable
        return "done"

    assert await database.transact(work) == "done"
    assert await contents(database) == {"a": 5}
    assert len(rung) == 1


async def test_five_lost_races_are_busy(database: Database):
    tries = []

    async def work(_: Transaction) -> None:
        tries.append(1)
        raise Retryable

    with pytest.raises(DatabaseBusy):
        await database.transact(work)
    assert len(tries) == 5


async def test_a_callback_runs_after_the_commit_and_its_failure_is_not_the_callers(database: Database):
    seen: list[str] = []

    def fails() -> None:
        seen.append("fails")
        raise LookupError

    async def work(tx: Transaction) -> None:
        await tx.execute(_INSERT, "a", 1)
        tx.after_commit(fails)
        tx.after_commit(ring)
        tx.after_commit(ring)
        assert seen == []

    def ring() -> None:
        seen.append("ring")

    await database.transact(work)
    assert seen == ["fails", "ring"]


async def test_a_rolled_back_transaction_rings_nobody(database: Database):
    seen: list[str] = []

    async def work(tx: Transaction) -> None:
        tx.after_commit(lambda: seen.append("ring"))
        raise LookupError

    with pytest.raises(LookupError):
        await database.transact(work)
    assert seen == []


# Clock.


async def test_the_clock_stands_still_within_a_transaction_and_never_goes_back(database: Database):
    async def twice(tx: Transaction) -> tuple[int, int]:
        first = await tx.now_ms()
        while time.time_ns() // 1_000_000 <= first + 2:
            await tx.fetch(_ALL)
        return first, await tx.now_ms()

    first, second = await database.transact(twice)
    assert first == second
    times = [await database.transact(lambda tx: tx.now_ms()) for _ in range(20)]
    times += [await database.read(lambda tx: tx.now_ms()) for _ in range(20)]
    assert times == sorted(times)
    assert times[0] >= first


async def test_a_test_can_shift_the_clock(database: Database):
    before = await database.read(lambda tx: tx.now_ms())
    await shift_clock(database, 3_600_000)
    after = await database.read(lambda tx: tx.now_ms())
    assert 3_600_000 <= after - before < 3_700_000


# Closing.


async def test_a_closed_database_is_unavailable_and_may_be_closed_twice(database: Database):
    await contents(database)
    await database.close()
    with pytest.raises(DatabaseUnavailable):
        await put(database, a=1)
    with pytest.raises(DatabaseUnavailable):
        await contents(database)
    await database.close()
