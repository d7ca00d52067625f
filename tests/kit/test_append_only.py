"""Append-only tables: nobody edits, and rows leave only through the guarded purge below the stored watermark."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from services.kit.database import (
    Database,
    DatabaseConfig,
    ForeignKeyViolation,
    NotPermitted,
    Statement,
    Transaction,
    open_database,
)
from services.kit.migrations import migrate, provision_postgresql
from services.kit.purge import purge, raise_watermark
from tests.fixtures_database import Postgres

_STREAM = """
-- ql3: append-only happening
-- ql3: purgeable happening by run_id before created_at_ms
-- ql3: append-only stone
CREATE TABLE run (id TEXT PRIMARY KEY);
CREATE TABLE happening (
  id TEXT PRIMARY KEY,
  run_id TEXT NOT NULL REFERENCES run (id),
  created_at_ms BIGINT NOT NULL
);
CREATE TABLE stone (id TEXT PRIMARY KEY);
"""
_ROWS = Statement("SELECT id FROM happening ORDER BY id")


@pytest.fixture
async def owner(request: pytest.FixtureRequest, dialect: str, tmp_path: Path) -> AsyncGenerator[DatabaseConfig]:
    """The configuration that migrated; on PostgreSQL that of the schema's owner."""
    streams = tmp_path / "streams" / "thing"
    streams.mkdir(parents=True)
    (streams / "0001_first.sql").write_text(_STREAM)
    if dialect == "sqlite":
        config = DatabaseConfig(url=f"sqlite:{tmp_path / 'db'}")
        await migrate(config, "thing", root=streams.parent)
        yield config
        return
    (streams.parent / "kit").mkdir()
    (streams.parent / "kit" / "0001_core.sql").write_text("CREATE TABLE outbox (id TEXT PRIMARY KEY, xid xid8);")
    server: Postgres = request.getfixturevalue("postgres")
    name = await server.empty()
    config = DatabaseConfig(url=server.admin_dsn(name))
    await provision_postgresql(config.url, ["thing"], {"thing": server.password})
    await migrate(config, "thing", root=streams.parent)
    yield config
    await server.drop(name)


@pytest.fixture
async def database(owner: DatabaseConfig, request: pytest.FixtureRequest) -> AsyncGenerator[Database]:
    """The database as the service itself opens it, with two runs of two happenings each."""
    config = owner
    if owner.dialect == "postgresql":
        server: Postgres = request.getfixturevalue("postgres")
        config = server.config(owner.url.partition("@/")[2].partition("?")[0])
    database = await open_database(config, "thing")

    async def fill(tx: Transaction) -> None:
        await tx.execute(Statement("INSERT INTO run (id) VALUES ('a'), ('b')"))
        await tx.execute(
            Statement(
                "INSERT INTO happening (id, run_id, created_at_ms) "
                "VALUES ('a1', 'a', 10), ('a2', 'a', 20), ('b1', 'b', 30), ('b2', 'b', 40)"
            )
        )
        await tx.execute(Statement("INSERT INTO stone (id) VALUES ('s')"))

    await database.transact(fill)
    yield database
    await database.close()


async def rows(database: Database) -> list[str]:
    return [row["id"] for row in await database.read(lambda tx: tx.fetch(_ROWS))]


CHANGES = [
    "UPDATE happening SET created_at_ms = 0",
    "DELETE FROM happening WHERE id = 'a1'",
    "UPDATE stone SET id = 't'",
    "DELETE FROM stone",
]


@pytest.mark.parametrize("change", CHANGES)
async def test_a_service_cannot_change_or_remove_a_row(database: Database, change: str):
    with pytest.raises(NotPermitted):
        await database.transact(lambda tx: tx.execute(Statement(change)))
    assert await rows(database) == ["a1", "a2", "b1", "b2"]


@pytest.mark.parametrize("change", CHANGES)
async def test_nor_can_the_owner_by_accident(owner: DatabaseConfig, database: Database, change: str):
    as_owner = await open_database(owner, "thing")
    with pytest.raises(NotPermitted):
        await as_owner.transact(lambda tx: tx.execute(Statement(change)))
    await as_owner.close()


async def test_replacing_a_row_is_no_way_round(database: Database):
    if database.dialect == "postgresql":
        sql = "INSERT INTO stone (id) VALUES ('s') ON CONFLICT (id) DO UPDATE SET id = 'u'"
    else:
        sql = "INSERT OR REPLACE INTO stone (id) VALUES ('s')"
    with pytest.raises(NotPermitted):
        await database.transact(lambda tx: tx.execute(Statement(sql)))


async def test_the_owner_cannot_truncate(owner: DatabaseConfig, database: Database):
    if owner.dialect == "sqlite":
        return  # it has no TRUNCATE
    as_owner = await open_database(owner, "thing")
    with pytest.raises(NotPermitted):
        await as_owner.transact(lambda tx: tx.execute(Statement("TRUNCATE stone")))
    await as_owner.close()


async def test_nothing_is_purged_without_a_watermark(database: Database):
    assert await database.transact(lambda tx: purge(tx, "happening", ["a", "b"])) == 0
    assert await rows(database) == ["a1", "a2", "b1", "b2"]


async def test_a_purge_takes_the_named_rows_below_the_watermark_and_no_other(database: Database):
    async def work(tx: Transaction) -> int:
        await raise_watermark(tx, "happening", 40)
        return await purge(tx, "happening", ["b", "z"])

    assert await database.transact(work) == 1
    assert await rows(database) == ["a1", "a2", "b2"]


async def test_a_watermark_is_never_lowered(database: Database):
    async def work(tx: Transaction) -> int:
        await raise_watermark(tx, "happening", 25)
        await raise_watermark(tx, "happening", 15)
        return await purge(tx, "happening", ["a"])

    assert await database.transact(work) == 2


async def test_the_guard_closes_with_the_purge(database: Database):
    async def work(tx: Transaction) -> None:
        await raise_watermark(tx, "happening", 100)
        await purge(tx, "happening", ["a"])
        await tx.execute(Statement("DELETE FROM happening WHERE id = 'b1'"))

    with pytest.raises(NotPermitted):
        await database.transact(work)
    assert await rows(database) == ["a1", "a2", "b1", "b2"]


async def test_a_whole_run_goes_in_one_transaction_and_half_a_run_does_not(database: Database):
    async def whole(tx: Transaction, run: str) -> None:
        await raise_watermark(tx, "happening", 35)
        await purge(tx, "happening", [run])
        await tx.execute(Statement("DELETE FROM run WHERE id = $1"), run)

    await database.transact(lambda tx: whole(tx, "a"))
    with pytest.raises(ForeignKeyViolation):
        await database.transact(lambda tx: whole(tx, "b"))
    assert await rows(database) == ["b1", "b2"]


async def test_a_table_that_is_not_purgeable_has_no_purge(database: Database):
    with pytest.raises(Exception, match="kit_purge_stone"):
        await database.transact(lambda tx: purge(tx, "stone", ["s"]))
    with pytest.raises(ValueError, match="not a table's name"):
        await database.transact(lambda tx: purge(tx, "stone; DROP TABLE stone", ["s"]))
