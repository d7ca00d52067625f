"""SQLite: one file per service, one writer connection, readers beside it, each with a thread of its own.

A statement takes tens of microseconds, a hop to a thread and back takes more. So statements run where they are called,
and the thread has what may take long: every COMMIT (it waits for the disk), the wait for another process that writes,
a statement that says it is long, and a read that was not done within `PATIENCE_S`. Whatever follows work on the thread
that is not over (its caller was cancelled) goes there too, so that the ROLLBACK runs before whatever comes next.
"""

from __future__ import annotations

import asyncio
import os
import re
import sqlite3
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import aiosqlite

from services.kit.clock import SteadyClock
from services.kit.database import errors
from services.kit.database.config import DatabaseConfig
from services.kit.database.port import Database, Row, Transaction, uninterrupted
from services.kit.database.statement import Dialect, Statement
from services.kit.whole_files import make_folders

T = TypeVar("T")
P = ParamSpec("P")

READERS = 2
BUSY_S = 2.0
"""How long SQLite itself waits for another process that writes, before the port's retries."""
PATIENCE_S = 0.002
"""How long a read may keep the event loop before it is given up and done again on the thread."""
_SLICE_S = 0.002
"""After so much work on the event loop, others get their turn."""
_LOOK_EVERY = 2_000
"""Steps of SQLite's machine, tens of microseconds, between two looks at the time."""
_OPEN_TRIES, _OPEN_PAUSE_S = 100, 0.05
_MARK_AHEAD_MS = 1_000
"""How far the stored high-water mark runs ahead of the clock, and so how often a write transaction renews it."""

_READ_MARK = "SELECT mark_ms, shift_ms FROM kit_clock"
_RAISE_MARK = "UPDATE kit_clock SET mark_ms = ? WHERE mark_ms < ?"


def path_of(config: DatabaseConfig, service: str) -> Path:
    """The service's file."""
    return Path(config.directory) / f"{service}.sqlite3"


async def open_sqlite(
    config: DatabaseConfig, service: str, *, clock: SteadyClock | None = None, busy_s: float = BUSY_S
) -> SqliteDatabase:
    """Opens the service's file, making it (and its folder, for the owner only) when there is none."""
    path = prepared(config, service)
    writer = await connect(path, read_only=False, busy_s=busy_s)
    await writer.call(_wait_for_others, 0.0)
    return SqliteDatabase(service, path, writer, clock or SteadyClock(), busy_s)


def prepared(config: DatabaseConfig, service: str) -> Path:
    """The service's file, made when missing, with its folder; new ones are for their owner only."""
    path = path_of(config, service)
    try:
        make_folders(path.parent)
        # SQLite gives its log the rights of the file.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise errors.DatabaseUnavailable("The file of the database cannot be opened.") from error
    return path


class SqliteDatabase(Database):
    """One service's SQLite file. Its clock holds while one process writes the file, which is how it is run."""

    dialect: Dialect = "sqlite"

    def __init__(self, service: str, path: Path, writer: Connection, clock: SteadyClock, busy_s: float) -> None:
        super().__init__(service)
        self.clock = clock
        self._busy_s = busy_s
        self._path = path
        self._writer = writer
        self._write_lock = asyncio.Lock()
        self._idle: list[Connection] = []
        self._reading = asyncio.Semaphore(READERS)
        self._closed = False

    async def _transact_once(self, work: Callable[[Transaction], Awaitable[T]]) -> T:
        writer = self._writer
        async with self._write_lock:
            transaction = SqliteTransaction(self, writer, writable=True)
            try:
                await self._begin()
                result = await work(transaction)
                transaction.refuse_aborted()
            except BaseException:
                await writer.do(_rollback)
                raise
            await uninterrupted(self._commit(transaction))
            return result

    async def _begin(self) -> None:
        try:
            await self._writer.do(_begin)
        except errors.Retryable:  # another process writes
            await self._writer.call(_begin_after_others, self._busy_s)

    async def _commit(self, transaction: SqliteTransaction) -> None:
        try:
            await self._writer.call(_run, "COMMIT")
        except errors.DatabaseUnavailable as error:
            await self._writer.do(_rollback)
            # A failed sync leaves a whole commit in the log that a crash may bring back; any other failure does not.
            if _code(error.__cause__) == sqlite3.SQLITE_IOERR:
                raise errors.CommitUnknown from error
            raise
        except BaseException:  # a deferred foreign key, checked now
            await self._writer.do(_rollback)
            raise
        transaction.committed()

    async def _read_once(self, work: Callable[[Transaction], Awaitable[T]]) -> T:
        async with self._reader() as reader:
            try:
                await reader.do(_run, "BEGIN")
                return await work(SqliteTransaction(self, reader, writable=False))
            finally:
                await reader.do(_rollback)

    @asynccontextmanager
    async def _reader(self) -> AsyncGenerator[Connection]:
        async with self._reading:
            if self._closed:
                raise errors.DatabaseUnavailable("The database is closed.")
            reader = self._idle.pop() if self._idle else await connect(self._path, read_only=True)
            try:
                yield reader
            finally:
                if self._closed:
                    await reader.close()
                else:
                    self._idle.append(reader)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        async with self._write_lock:
            for reader in self._idle:
                await reader.close()
            self._idle.clear()
            await self._writer.close()


class SqliteTransaction(Transaction):
    """A transaction on one connection."""

    dialect: Dialect = "sqlite"

    def __init__(self, database: SqliteDatabase, connection: Connection, *, writable: bool) -> None:
        super().__init__(database)
        self._clock = database.clock
        self._connection = connection
        self._writable = writable

    async def fetch(self, statement: Statement, *args: Any) -> list[Row]:
        return await self._call(statement.long, _fetch, statement.sqlite, args)

    async def execute(self, statement: Statement, *args: Any) -> int:
        return await self._call(statement.long, _change, statement.sqlite, args)

    async def execute_many(self, statement: Statement, rows: Sequence[Sequence[Any]]) -> None:
        if rows:
            await self._call(statement.long, _change_many, statement.sqlite, rows)

    async def _control(self, sql: str) -> None:
        await self._connection.do(_run, sql)

    async def _read_clock(self) -> int:
        return await self._call(False, _tick, self._clock, self._writable)

    async def _call(
        self, long: bool, function: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        self.refuse_aborted()
        run = self._connection.call if long else self._connection.do
        try:
            return await run(function, *args, **kwargs)
        except BaseException:
            self.aborted = True
            raise


class Connection(aiosqlite.Connection):
    """A connection that runs whole functions, here or on its thread, and answers in the kit's errors."""

    def __init__(self, connector: Callable[[], sqlite3.Connection], *, read_only: bool) -> None:
        super().__init__(connector, iter_chunk_size=64)
        self._thread.daemon = True  # a database that nobody closed must not keep a process alive
        self._read_only = read_only
        self._jobs: deque[None] = deque()
        """One entry per function that the thread has not ended; its caller may be gone already."""
        self._here_s = 0.0
        self._give_up_at = float("inf")

    async def opened(self) -> Connection:
        """Opens it; a connection that cannot be opened has ended its thread when this raises."""
        try:
            await self
        except sqlite3.Error as error:
            await asyncio.to_thread(self._thread.join)
            raise translated(error) from error
        if self._read_only:
            self._conn.set_progress_handler(self._is_late, _LOOK_EVERY)
        return self

    async def do(
        self, function: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Runs `function(connection, …)`, which does not wait for the disk, on the caller's own thread."""
        if self._jobs or self._connection is None:
            return await self.call(function, *args, **kwargs)
        started_s = time.monotonic()
        self._give_up_at = started_s + PATIENCE_S
        try:
            result = function(self._connection, *args, **kwargs)
        except sqlite3.Error as error:
            # Only a reader gives up, and what a reader does can be done again.
            if _code(error) == sqlite3.SQLITE_INTERRUPT:
                return await self.call(function, *args, **kwargs)
            raise translated(error) from error
        self._here_s += time.monotonic() - started_s
        if self._here_s > _SLICE_S:
            self._here_s = 0.0
            await asyncio.sleep(0)
        return result

    async def call(
        self, function: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Runs `function(connection, …)` on the connection's thread, after what was given to it before."""
        connection = self._connection
        if connection is None or not self._running:
            raise errors.DatabaseUnavailable("The database is closed.")

        def work() -> T:
            try:
                self._give_up_at = float("inf")
                return function(connection, *args, **kwargs)
            finally:
                self._jobs.pop()

        self._jobs.append(None)
        try:
            return await self._execute(work)  # pyright: ignore[reportUnknownMemberType]
        except sqlite3.Error as error:
            if self._connection is None:
                raise errors.DatabaseUnavailable("The database is closed.") from error
            raise translated(error) from error

    def _is_late(self) -> int:
        return time.monotonic() > self._give_up_at


async def connect(path: Path, *, read_only: bool, busy_s: float = BUSY_S) -> Connection:
    def connector() -> sqlite3.Connection:
        # Used by the event loop's thread and by its own, never at the same time.
        connection = sqlite3.connect(
            path, timeout=busy_s, isolation_level=None, cached_statements=512, check_same_thread=False
        )
        try:
            if not read_only and connection.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
                raise sqlite3.OperationalError("no write-ahead log here")
            for pragma in (
                "synchronous = FULL",
                "foreign_keys = ON",
                "recursive_triggers = ON",  # INSERT OR REPLACE must not go around an append-only trigger
                "temp_store = MEMORY",
                "journal_size_limit = 67108864",
                "wal_autocheckpoint = 4000",  # 16 MiB: what changes all the time is copied back once for many commits
                f"query_only = {'ON' if read_only else 'OFF'}",
            ):
                connection.execute(f"PRAGMA {pragma}")
        except BaseException:
            connection.close()
            raise
        return connection

    for _ in range(_OPEN_TRIES):
        try:
            return await Connection(connector, read_only=read_only).opened()
        except errors.Retryable:
            # Switching a new file to its log does not wait for others as statements do.
            await asyncio.sleep(_OPEN_PAUSE_S)
    raise errors.DatabaseBusy("Another process holds the file of the database.")


# What runs on a connection.


def _begin(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")


def _begin_after_others(connection: sqlite3.Connection, patience_s: float) -> None:
    _wait_for_others(connection, patience_s)
    try:
        _begin(connection)
    finally:
        _wait_for_others(connection, 0.0)


def _wait_for_others(connection: sqlite3.Connection, patience_s: float) -> None:
    connection.execute(f"PRAGMA busy_timeout = {int(patience_s * 1000)}")


def _rollback(connection: sqlite3.Connection) -> None:
    # A full disk may have rolled back already.
    if connection.in_transaction:
        connection.execute("ROLLBACK")


def _run(connection: sqlite3.Connection, sql: str) -> None:
    connection.execute(sql)


def _fetch(connection: sqlite3.Connection, sql: str, args: Sequence[Any]) -> list[Row]:
    cursor = connection.execute(sql, args)
    rows = cursor.fetchall()
    if not rows:
        return []
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in rows]


def _change(connection: sqlite3.Connection, sql: str, args: Sequence[Any]) -> int:
    before = connection.total_changes
    cursor = connection.execute(sql, args)
    cursor.fetchall()
    if cursor.rowcount >= 0:
        return cursor.rowcount
    # The module counts only statements that begin with their verb; a change that begins with WITH is asked for.
    return 0 if connection.total_changes == before else connection.execute("SELECT changes()").fetchone()[0]


def _change_many(connection: sqlite3.Connection, sql: str, rows: Sequence[Sequence[Any]]) -> None:
    connection.executemany(sql, rows)


def _tick(connection: sqlite3.Connection, clock: SteadyClock, writable: bool) -> int:
    mark_ms, shift_ms = connection.execute(_READ_MARK).fetchone()
    if not clock.marked:
        clock.not_before(mark_ms)
    now_ms = clock.now_ms()
    if writable and now_ms > mark_ms:
        # Stored ahead, so that no later life of this file hands out a time that this one has given away.
        connection.execute(_RAISE_MARK, (now_ms + _MARK_AHEAD_MS, now_ms))
    return now_ms + shift_ms


# Errors.

_integrity = {
    "SQLITE_CONSTRAINT_UNIQUE": errors.UniqueViolation,
    "SQLITE_CONSTRAINT_PRIMARYKEY": errors.UniqueViolation,
    "SQLITE_CONSTRAINT_ROWID": errors.UniqueViolation,
    "SQLITE_CONSTRAINT_CHECK": errors.CheckViolation,
    "SQLITE_CONSTRAINT_FOREIGNKEY": errors.ForeignKeyViolation,
    "SQLITE_CONSTRAINT_NOTNULL": errors.NotNullViolation,
    "SQLITE_CONSTRAINT_TRIGGER": errors.NotPermitted,
}
_unavailable = {
    sqlite3.SQLITE_FULL: "The disk of the database is full.",
    sqlite3.SQLITE_READONLY: "The database cannot be written.",
    sqlite3.SQLITE_CANTOPEN: "The file of the database cannot be opened.",
    sqlite3.SQLITE_IOERR: "The disk of the database fails.",
    sqlite3.SQLITE_CORRUPT: "The file of the database is damaged.",
    sqlite3.SQLITE_NOTADB: "The file is not a database.",
    sqlite3.SQLITE_PERM: "The file of the database may not be used.",
    sqlite3.SQLITE_NOMEM: "There is no memory for the database.",
}
_about = re.compile(r"constraint failed: (?:index ')?([^']*)")


def translated(error: sqlite3.Error) -> Exception:
    """The kit's error for the module's."""
    code = _code(error)
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return errors.Retryable()
    if code in _unavailable:
        return errors.DatabaseUnavailable(_unavailable[code])
    kind = _integrity.get(getattr(error, "sqlite_errorname", ""))
    if kind is None:
        return error
    if kind is errors.NotPermitted:
        return kind(constraint=str(error))
    found = _about.search(str(error))
    about = found[1].strip() if found else ""
    if kind in (errors.UniqueViolation, errors.NotNullViolation) and "." in about:
        names = [name.strip().rpartition(".") for name in about.split(",")]
        return kind(table=names[0][0], columns=tuple(name[2] for name in names))
    return kind(constraint=about or None)


def _code(error: BaseException | None) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF
