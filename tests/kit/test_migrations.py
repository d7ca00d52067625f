"""Migrations: every step once, in order, as a whole; a history that does not fit is refused by name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

import asyncpg
import pytest

from schemas.subjects import SERVICES
from services.kit.database import Database, DatabaseConfig, Statement, open_database, schema_name
from services.kit.database.sqlite import path_of
from services.kit.migrations import (
    InvalidStream,
    LeaderUnavailable,
    StepChanged,
    StepFailed,
    StepMissing,
    StepPending,
    StepUnknown,
    migrate,
    provision_postgresql,
    verify,
)
from services.kit.migrations.sqlite import split
from services.kit.migrations.stream import load
from tests.fixtures_database import Postgres

STEPS = {
    "0001_first.sql": "CREATE TABLE first (id TEXT PRIMARY KEY);",
    "0002_second.sql": "CREATE TABLE second (id TEXT PRIMARY KEY); INSERT INTO second (id) VALUES ('a;b');",
    "0003_third.sql": "-- a comment; with a semicolon\nALTER TABLE second ADD COLUMN n INTEGER NOT NULL DEFAULT 7",
}


class House:
    """A place to migrate: a folder of streams and an empty database."""

    def __init__(self, root: Path, owner: DatabaseConfig, service: DatabaseConfig) -> None:
        self.root = root
        self.owner = owner
        self.config = service
        (root / "kit").mkdir(parents=True)
        (root / "thing").mkdir()

    def write(self, **files: str) -> None:
        for name, text in files.items():
            (self.root / "thing" / name).write_text(text)

    def remove(self, name: str) -> None:
        (self.root / "thing" / name).unlink()

    async def migrate(self, **options: float) -> list[str]:
        return await migrate(self.owner, "thing", root=self.root, **options)

    async def on(self, work: Callable[[Database], Awaitable[object]]) -> object:
        database = await open_database(self.owner, "thing")
        try:
            return await work(database)
        finally:
            await database.close()

    async def verify(self) -> None:
        await self.on(lambda database: verify(database, "thing", root=self.root))

    async def fetch(self, sql: str) -> list[dict[str, object]]:
        rows = await self.on(lambda database: database.read(lambda tx: tx.fetch(Statement(sql))))
        assert isinstance(rows, list)
        return rows

    async def execute(self, sql: str) -> None:
        await self.on(lambda database: database.transact(lambda tx: tx.execute(Statement(sql))))

    async def tables(self) -> set[str]:
        names = await self.fetch(
            "SELECT name FROM sqlite_master WHERE type = 'table'"
            if self.owner.dialect == "sqlite"
            else "SELECT tablename AS name FROM pg_tables WHERE schemaname = current_schema()"
        )
        return {str(row["name"]) for row in names}


OUTBOX = "CREATE TABLE outbox (id TEXT PRIMARY KEY, xid xid8);"


@pytest.fixture
async def house(request: pytest.FixtureRequest, dialect: str, tmp_path: Path) -> AsyncGenerator[House]:
    if dialect == "sqlite":
        config = DatabaseConfig(url=f"sqlite:{tmp_path / 'db'}")
        yield House(tmp_path / "streams", config, config)
        return
    server: Postgres = request.getfixturevalue("postgres")
    name = await server.empty()
    dsn = server.admin_dsn(name)
    await provision_postgresql(dsn, ["thing"], {"thing": server.password})
    made = House(tmp_path / "streams", DatabaseConfig(url=dsn), server.config(name))
    (made.root / "kit" / "0001_core.sql").write_text(OUTBOX)
    yield made
    await server.drop(name)


def own(names: list[str]) -> list[str]:
    return [name for name in names if name.startswith("thing/")]


async def test_steps_are_applied_in_order_once(house: House):
    house.write(**STEPS)
    assert own(await house.migrate()) == ["thing/0001_first", "thing/0002_second", "thing/0003_third"]
    assert await house.migrate() == []
    assert await house.fetch("SELECT id, n FROM second") == [{"id": "a;b", "n": 7}]
    await house.verify()


@pytest.mark.parametrize("earlier", [0, 1, 2, 3])
async def test_an_earlier_version_is_brought_forward(house: House, earlier: int):
    names = sorted(STEPS)
    house.write(**{name: STEPS[name] for name in names[:earlier]})
    await house.migrate()
    house.write(**STEPS)
    if earlier < 3:
        with pytest.raises(StepPending) as refused:
            await house.verify()
        assert refused.value.step == f"thing/{names[earlier][:-4]}"
    assert own(await house.migrate()) == [f"thing/{name[:-4]}" for name in names[earlier:]]
    await house.verify()


async def test_a_failing_step_leaves_nothing_of_itself_and_is_resumed(house: House):
    broken = "CREATE TABLE second (id TEXT PRIMARY KEY); INSERT INTO nowhere (id) VALUES ('a');"
    house.write(**{**STEPS, "0002_second.sql": broken})
    with pytest.raises(StepFailed) as refused:
        await house.migrate()
    assert refused.value.step == "thing/0002_second"
    assert "first" in await house.tables()
    assert "second" not in await house.tables()
    house.write(**STEPS)
    assert own(await house.migrate()) == ["thing/0002_second", "thing/0003_third"]


async def test_a_changed_step_is_refused_and_named(house: House):
    house.write(**STEPS)
    await house.migrate()
    house.write(**{"0002_second.sql": STEPS["0002_second.sql"] + " "})
    for act in (house.migrate, house.verify):
        with pytest.raises(StepChanged, match="thing/0002_second"):
            await act()


async def test_a_newer_database_is_refused_and_untouched(house: House):
    house.write(**STEPS)
    await house.migrate()
    house.remove("0003_third.sql")
    for act in (house.migrate, house.verify):
        with pytest.raises(StepUnknown, match="thing/0003_third"):
            await act()


async def test_a_gap_is_refused_and_names_the_missing_step(house: House):
    house.write(**STEPS)
    await house.migrate()
    await house.execute("DELETE FROM schema_migrations WHERE migration_id = '0002_second'")
    for act in (house.migrate, house.verify):
        with pytest.raises(StepMissing, match="thing/0002_second"):
            await act()


async def test_an_empty_database_is_pending(house: House):
    house.write(**STEPS)
    with pytest.raises(StepPending, match="ql3 migrate"):
        await house.verify()


async def test_migrators_at_once_apply_each_step_once(house: House):
    house.write(**STEPS)
    done = await asyncio.gather(*(house.migrate() for _ in range(4)))
    assert sorted(own([name for names in done for name in names])) == [f"thing/{name[:-4]}" for name in sorted(STEPS)]


async def test_a_migrator_that_cannot_lead_gives_up_in_time(postgres: Postgres, tmp_path: Path):
    name = await postgres.empty()
    await provision_postgresql(postgres.admin_dsn(name), ["thing"], {})
    house = House(tmp_path / "streams", DatabaseConfig(url=postgres.admin_dsn(name)), postgres.config(name))
    house.write(**STEPS)
    holder = await asyncpg.connect(postgres.admin_dsn(name))
    await holder.execute(
        "SELECT pg_advisory_lock(hashtextextended('ql3-migrate:' || current_database() || ':ql3_thing', 0))"
    )
    with pytest.raises(LeaderUnavailable):
        await house.migrate(wait_s=0.3)
    await holder.close()
    await postgres.drop(name)


async def test_a_schema_that_is_not_provisioned_is_pending(postgres: Postgres):
    name = await postgres.empty()
    with pytest.raises(StepPending, match="ql3_dispatcher"):
        await migrate(DatabaseConfig(url=postgres.admin_dsn(name)), "dispatcher")
    await postgres.drop(name)


async def test_the_version_of_each_stream_is_told(house: House):
    house.write(**STEPS)
    await house.migrate()
    rows = await house.fetch("SELECT contract_name, contract_version, migration_id FROM schema_capabilities")
    assert {"contract_name": "thing", "contract_version": 3, "migration_id": "0003_third"} in rows


@pytest.mark.parametrize("service", SERVICES)
async def test_every_service_migrates_from_every_earlier_version(
    service: str, dialect: str, tmp_path: Path, request: pytest.FixtureRequest
):
    """The real streams: each prefix of the steps is applied first, then the rest, as an upgrade does."""
    steps = load(service, dialect)  # pyright: ignore[reportArgumentType]
    for earlier in range(1, len(steps) + 1):
        root = tmp_path / f"{earlier}"
        for step in steps[:earlier]:
            folder = root / step.stream
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{step.id}.sql").write_text(step.sql)
        if dialect == "sqlite":
            config = DatabaseConfig(url=f"sqlite:{root / 'db'}")
            assert len(await migrate(config, service, root=root)) == earlier
            assert len(await migrate(config, service)) == len(steps) - earlier
            continue
        server: Postgres = request.getfixturevalue("postgres")
        name = await server.empty()
        config = DatabaseConfig(url=server.admin_dsn(name))
        await provision_postgresql(config.url, [service], {})
        assert len(await migrate(config, service, root=root)) == earlier
        assert len(await migrate(config, service)) == len(steps) - earlier
        await server.drop(name)


# Files of a stream.


@pytest.mark.parametrize(
    "files",
    [
        {"first.sql": ""},
        {"0002_second.sql": ""},
        {"0001_a.sql": "", "0001_b.sql": ""},
        {"0001_Upper.sql": ""},
        {"0001_first.postgresql.sql": ""},
        {"0001_first.sql": "-- ql3: append_only thing"},
        {"0001_first.sql": "-- ql3: append-only thing; DROP TABLE x"},
        {"0001_first.sql": "-- ql3: purgeable thing by id before at_ms"},
    ],
)
def test_a_folder_that_is_no_stream_is_refused_before_any_database_is_touched(tmp_path: Path, files: dict[str, str]):
    (tmp_path / "thing").mkdir()
    for name, text in files.items():
        (tmp_path / "thing" / name).write_text(text)
    with pytest.raises(InvalidStream):
        load("thing", "sqlite", tmp_path)


def test_each_dialect_takes_its_own_text_and_line_ends_do_not_count(tmp_path: Path):
    (tmp_path / "thing").mkdir()
    (tmp_path / "thing" / "0001_a.sql").write_bytes(b"one\r\ntwo")
    (tmp_path / "thing" / "0001_a.postgresql.sql").write_text("three")
    (sqlite,) = load("thing", "sqlite", tmp_path)
    (postgresql,) = load("thing", "postgresql", tmp_path)
    assert (sqlite.sql, postgresql.sql) == ("one\ntwo", "three")
    (tmp_path / "thing" / "0001_a.sql").write_text("one\ntwo")
    assert load("thing", "sqlite", tmp_path) == [sqlite]


def test_a_script_is_split_into_statements():
    script = """
    CREATE TABLE a (t TEXT DEFAULT 'x;y'); -- and; so
    CREATE TRIGGER t BEFORE DELETE ON a BEGIN SELECT 1; SELECT 2; END;
    INSERT INTO a VALUES ('b')
    """
    statements = [" ".join(text.split()) for text in split(script)]
    assert len(statements) == 3
    assert statements[1].endswith("SELECT 2; END;")
    assert list(split("-- nothing;\n")) == []


async def test_a_file_migrated_while_nobody_else_may_see_it(tmp_path: Path):
    config = DatabaseConfig(url=f"sqlite:{tmp_path / 'db'}")
    await migrate(config, "plain")
    assert path_of(config, "plain").stat().st_mode & 0o077 == 0
    assert schema_name("plain") == "ql3_plain"
