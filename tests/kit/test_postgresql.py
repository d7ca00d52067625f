"""What the PostgreSQL adapter promises beyond the port: lost answers, lost servers, deadlocks, its session's limits."""

from __future__ import annotations

import asyncio
from urllib.parse import quote

import asyncpg
import pytest

from services.kit.database import (
    CommitUnknown,
    Database,
    DatabaseBusy,
    DatabaseConfig,
    DatabaseUnavailable,
    Statement,
    Transaction,
    UnsupportedServer,
    open_database,
)
from services.kit.database.postgresql import require_supported
from tests.fixtures_database import DatabaseFor, Postgres, database_configs, execute_as_owner, owner_dsn

_INSERT = Statement("INSERT INTO thing (id, n) VALUES ($1, 0)")
_INCREMENT = Statement("UPDATE thing SET n = n + 1 WHERE id = $1")
_ALL = Statement("SELECT id, n FROM thing ORDER BY id")


@pytest.fixture
async def database(database_on: DatabaseFor) -> Database:
    database = await database_on("postgresql", "plain")
    await execute_as_owner(database, "CREATE TABLE thing (id TEXT PRIMARY KEY, n INTEGER NOT NULL)")
    return database


async def contents(database: Database) -> dict[str, int]:
    return {row["id"]: row["n"] for row in await database.read(lambda tx: tx.fetch(_ALL))}


async def until_seen(database: Database, condition: str) -> int:
    """The pid of the first session of this database that meets `condition`, waited for."""
    admin = await asyncpg.connect(owner_dsn(database_configs[database]))
    query = f"SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND {condition}"
    try:
        async with asyncio.timeout(30):
            while (pid := await admin.fetchval(query)) is None:
                pass
        return pid
    finally:
        await admin.close()


async def terminate(database: Database, condition: str) -> None:
    admin = await asyncpg.connect(owner_dsn(database_configs[database]))
    await admin.execute(
        "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
        f"WHERE datname = current_database() AND pid <> pg_backend_pid() AND {condition}"
    )
    await admin.close()


async def test_a_commit_whose_answer_is_lost_is_told_as_unknown_and_not_repeated(database: Database):
    await execute_as_owner(
        database,
        """CREATE FUNCTION linger() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN PERFORM pg_sleep(30); RETURN NULL; END $$""",
        """CREATE CONSTRAINT TRIGGER linger AFTER INSERT ON thing DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW EXECUTE FUNCTION linger()""",
    )
    tries, rung = [], []

    async def work(tx: Transaction) -> None:
        tries.append(1)
        tx.after_commit(lambda: rung.append(1))
        await tx.execute(_INSERT, "a")

    committing = asyncio.create_task(database.transact(work))
    await until_seen(database, "query = 'COMMIT' AND state = 'active'")
    await terminate(database, "query = 'COMMIT' AND state = 'active'")
    with pytest.raises(CommitUnknown):
        await committing
    assert (len(tries), rung) == (1, [])
    assert await contents(database) == {}


async def test_a_connection_lost_inside_a_transaction_is_unavailable_and_the_next_one_works(database: Database):
    async def work(tx: Transaction) -> None:
        await tx.execute(_INSERT, "a")
        await terminate(database, "true")
        await tx.execute(_INSERT, "b")

    with pytest.raises(DatabaseUnavailable):
        await database.transact(work)
    await database.transact(lambda tx: tx.execute(_INSERT, "c"))
    assert await contents(database) == {"c": 0}


async def test_idle_connections_that_were_cut_do_not_stop_the_service(database: Database):
    await asyncio.gather(*(contents(database) for _ in range(8)))
    await terminate(database, "true")
    for _ in range(16):
        try:
            await contents(database)
            break
        except DatabaseUnavailable:
            continue
    assert await contents(database) == {}


async def test_a_deadlock_is_run_again_until_both_are_done(database: Database):
    await database.transact(lambda tx: tx.execute_many(_INSERT, [("a",), ("b",)]))
    held = {"a": asyncio.Event(), "b": asyncio.Event()}

    async def crossing(first: str, second: str) -> None:
        async def work(tx: Transaction) -> None:
            await tx.execute(_INCREMENT, first)
            held[first].set()
            await held[second].wait()
            await tx.execute(_INCREMENT, second)

        await database.transact(work)

    await asyncio.wait_for(asyncio.gather(crossing("a", "b"), crossing("b", "a")), 60)
    assert await contents(database) == {"a": 2, "b": 2}


async def test_a_lock_that_is_held_too_long_is_busy(database: Database):
    await database.transact(lambda tx: tx.execute(_INSERT, "a"))
    holding, release = asyncio.Event(), asyncio.Event()

    async def hold(tx: Transaction) -> None:
        await tx.execute(_INCREMENT, "a")
        holding.set()
        await release.wait()

    async def impatient(tx: Transaction) -> None:
        await tx.execute(Statement("SET LOCAL lock_timeout = '20ms'"))
        await tx.execute(_INCREMENT, "a")

    holder = asyncio.create_task(database.transact(hold))
    await asyncio.wait_for(holding.wait(), 10)
    with pytest.raises(DatabaseBusy):
        await database.transact(impatient)
    release.set()
    await holder
    assert await contents(database) == {"a": 1}


async def test_a_cancelled_statement_ends_and_its_connection_serves_again(postgres: Postgres, database: Database):
    config = database_configs[database]
    narrow = await open_database(DatabaseConfig(url=config.url, password=config.password, pool_size=1), "plain")

    async def sleeps(tx: Transaction) -> None:
        await tx.execute(_INSERT, "a")
        await tx.execute(Statement("SELECT pg_sleep(60)"))

    task = asyncio.create_task(narrow.transact(sleeps))
    await until_seen(database, "wait_event = 'PgSleep'")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 30)
    await asyncio.wait_for(narrow.transact(lambda tx: tx.execute(_INSERT, "b")), 30)
    assert await contents(database) == {"b": 0}
    await narrow.close()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("search_path", "ql3_plain"),
        ("statement_timeout", "15s"),
        ("lock_timeout", "5s"),
        ("idle_in_transaction_session_timeout", "15s"),
        ("transaction_isolation", "read committed"),
        ("TimeZone", "UTC"),
        ("application_name", "ql3-plain"),
    ],
)
async def test_every_session_has_its_limits(database: Database, setting: str, value: str):
    await execute_as_owner(
        database,
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET default_transaction_isolation = serializable', "
        "current_database()); END $$",
    )
    again = await open_database(database_configs[database], "plain")
    row = await again.transact(lambda tx: tx.fetch_one(Statement(f"SELECT current_setting('{setting}') AS value")))
    assert row == {"value": value}
    await again.close()


async def test_a_database_that_may_not_be_written_is_unavailable(database: Database):
    await execute_as_owner(
        database,
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET default_transaction_read_only = on', "
        "current_database()); END $$",
    )
    again = await open_database(database_configs[database], "plain")
    with pytest.raises(DatabaseUnavailable):
        await again.transact(lambda tx: tx.execute(_INSERT, "a"))
    await again.close()


@pytest.mark.parametrize("major", [15, 19])
def test_a_server_that_is_not_supported_is_refused(major: int):
    with pytest.raises(UnsupportedServer, match="16, 17 or 18"):
        require_supported(major)


async def test_a_server_that_is_not_there_is_unavailable(postgres: Postgres):
    url = f"postgresql:///nothing?host={quote('/nowhere', safe='')}"
    with pytest.raises(DatabaseUnavailable):
        await open_database(DatabaseConfig(url=url, password="x"), "plain")
    with pytest.raises(DatabaseUnavailable):
        await open_database(postgres.config("no_such_database"), "plain")


async def test_a_wrong_password_is_refused_and_not_told(database: Database):
    config = DatabaseConfig(url=database_configs[database].url, password="sesame-open")
    with pytest.raises(DatabaseUnavailable) as refused:
        await open_database(config, "plain")
    assert "sesame" not in str(refused.value)
    assert "sesame" not in repr(config)
