"""PostgreSQL 16 to 18: one schema and one login role per service, a pool of connections.

Nothing of the session is ever changed after it is made, so a connection goes back to the pool without a reset.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, ParamSpec, TypeVar

from services.kit.database import asyncpg_driver, errors
from services.kit.database.asyncpg_driver import Connection, Pool, asyncpg
from services.kit.database.config import DatabaseConfig, schema_name
from services.kit.database.port import Database, Row, Transaction, uninterrupted
from services.kit.database.statement import Dialect, Statement

T = TypeVar("T")
P = ParamSpec("P")

SUPPORTED_MAJORS = range(16, 19)
STATEMENT_TIMEOUT_MS = 15_000
LOCK_TIMEOUT_MS = 5_000
IDLE_TIMEOUT_MS = 15_000
_ANSWER_S = 20.0
"""The client's own limit for an answer, above the server's, for a server that has silently gone."""
_CONNECTION_S = 5.0
"""How long to wait for a free connection of the pool, or for a new one."""


def session_settings(service: str) -> dict[str, str]:
    """What every session of a service starts with."""
    return {
        "application_name": f"ql3-{service}",
        "search_path": schema_name(service),
        "timezone": "UTC",
        "default_transaction_isolation": "read committed",
        "statement_timeout": str(STATEMENT_TIMEOUT_MS),
        "lock_timeout": str(LOCK_TIMEOUT_MS),
        "idle_in_transaction_session_timeout": str(IDLE_TIMEOUT_MS),
    }


async def connect(config: DatabaseConfig, service: str) -> Connection:
    """One connection outside any pool, for migrations. The caller closes it."""
    try:
        connection = await asyncpg_driver.connect(
            config.dsn(schema_name(service)),
            settings=session_settings(service),
            password=config.password,
            timeout=_CONNECTION_S,
        )
    except Exception as error:
        raise translated(error) from error
    try:
        require_supported(connection.get_server_version().major)
    except BaseException:
        await connection.close()
        raise
    return connection


def require_supported(major: int) -> None:
    """Refuses a server of another major version."""
    if major not in SUPPORTED_MAJORS:
        raise errors.UnsupportedServer(major)


async def open_postgresql(config: DatabaseConfig, service: str) -> PostgresqlDatabase:
    """Opens a pool for the service, with one connection made and looked at."""
    try:
        pool = await asyncpg_driver.create_pool(
            config.dsn(schema_name(service)),
            password=config.password,
            min_size=1,
            max_size=config.pool_size,
            max_inactive_connection_lifetime=300,
            statement_cache_size=1024,
            max_cached_statement_lifetime=0,
            command_timeout=_ANSWER_S,
            timeout=_CONNECTION_S,
            server_settings=session_settings(service),
            reset=_keep,
        )
    except Exception as error:
        raise translated(error) from error
    try:
        connection = await pool.acquire(timeout=_CONNECTION_S)
        require_supported(connection.get_server_version().major)
        await pool.release(connection)
    except BaseException:
        pool.terminate()
        raise
    return PostgresqlDatabase(service, pool)


async def _keep(connection: Any) -> None:
    """Instead of asyncpg's reset, a round trip that would find nothing to reset."""


class PostgresqlDatabase(Database):
    """One service's schema, through a pool."""

    dialect: Dialect = "postgresql"

    def __init__(self, service: str, pool: Pool) -> None:
        super().__init__(service)
        self._pool = pool

    async def _transact_once(self, work: Callable[[Transaction], Awaitable[T]]) -> T:
        async with self._begun("BEGIN") as (connection, transaction):
            result = await work(transaction)
            transaction.refuse_aborted()
            await uninterrupted(self._commit(connection, transaction))
            return result

    async def _commit(self, connection: Connection, transaction: Transaction) -> None:
        try:
            status = await connection.execute("COMMIT")
        except Exception as error:
            answer = translated(error)
            # A deferred constraint or a serialization failure is an answer; silence is not.
            if isinstance(answer, errors.DatabaseUnavailable):
                with suppress(Exception):
                    connection.terminate()
                raise errors.CommitUnknown from error
            raise answer from error
        if status != "COMMIT":
            raise errors.TransactionAborted("the server rolled the transaction back")
        transaction.committed()

    async def _read_once(self, work: Callable[[Transaction], Awaitable[T]]) -> T:
        async with self._begun("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY") as (_, transaction):
            return await work(transaction)

    @asynccontextmanager
    async def _begun(self, begin: str) -> AsyncGenerator[tuple[Connection, PostgresqlTransaction]]:
        """A connection in a transaction; whatever is left open at the end is rolled back."""
        try:
            connection = await self._pool.acquire(timeout=_CONNECTION_S)
        except Exception as error:
            raise translated(error) from error
        try:
            transaction = PostgresqlTransaction(self, connection)
            try:
                await transaction.begin(begin)
                yield connection, transaction
            finally:
                with suppress(Exception):
                    if connection.is_in_transaction():
                        await connection.execute("ROLLBACK")
        finally:
            with suppress(Exception):  # a broken connection is replaced by the pool; the first error counts
                await self._pool.release(connection)

    async def close(self) -> None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self._pool.close()
        except TimeoutError:
            self._pool.terminate()


class PostgresqlTransaction(Transaction):
    """A transaction on one connection of the pool."""

    dialect: Dialect = "postgresql"

    def __init__(self, database: PostgresqlDatabase, connection: Connection) -> None:
        super().__init__(database)
        self._connection = connection

    async def begin(self, sql: str) -> None:
        """Opens the transaction. A connection that died in the pool has done nothing yet: the next one is tried."""
        try:
            await self._answered(self._connection.execute, sql)
        except errors.DatabaseUnavailable as error:
            raise errors.Retryable from error

    async def fetch(self, statement: Statement, *args: Any) -> list[Row]:
        self.refuse_aborted()
        records = await self._answered(self._connection.fetch, statement.postgresql, *args)
        return [dict(record.items()) for record in records]

    async def execute(self, statement: Statement, *args: Any) -> int:
        self.refuse_aborted()
        status = await self._answered(self._connection.execute, statement.postgresql, *args)
        count = status.rpartition(" ")[2]
        return int(count) if count.isdecimal() else 0

    async def execute_many(self, statement: Statement, rows: Sequence[Sequence[Any]]) -> None:
        self.refuse_aborted()
        if rows:
            await self._answered(self._connection.executemany, statement.postgresql, rows)

    async def _control(self, sql: str) -> None:
        await self._answered(self._connection.execute, sql)

    async def _read_clock(self) -> int:
        self.refuse_aborted()
        return await self._answered(self._connection.fetchval, "SELECT kit_now_ms()")

    async def _answered(self, ask: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await ask(*args, **kwargs)  # a connection that is gone refuses at the call already
        except Exception as error:
            self.aborted = True
            raise translated(error) from error
        except BaseException:
            self.aborted = True
            raise


# Errors.

_integrity = {
    "23505": errors.UniqueViolation,
    "23514": errors.CheckViolation,
    "23001": errors.ForeignKeyViolation,  # ON DELETE RESTRICT
    "23503": errors.ForeignKeyViolation,
    "23502": errors.NotNullViolation,
}
_unavailable = {
    "08": "The database cannot be reached.",
    "28": "The database refuses our credential.",
    "3D": "There is no such database.",
    "53": "The database has no room for us.",
    "57": "The database is being shut down or restarted.",
    "58": "The disk of the database fails.",
    "25006": "The database cannot be written.",
    "25P03": "The transaction waited too long for us.",
}
_key = re.compile(r"Key \((.+?)\)=")


def translated(error: Exception) -> Exception:
    """The kit's error for the driver's. No text of the server is taken over: it may hold values."""
    if isinstance(error, asyncpg.PostgresError):
        return _translated_state(error)
    if isinstance(error, TimeoutError):
        return errors.DatabaseUnavailable("The database does not answer.")
    if isinstance(error, (OSError, asyncpg.InternalClientError)):
        return errors.DatabaseUnavailable("The database cannot be reached.")
    if isinstance(error, asyncpg.InterfaceError) and ("clos" in str(error) or "released" in str(error)):
        return errors.DatabaseUnavailable("The connection to the database is closed.")
    return error


def _translated_state(error: Exception) -> Exception:
    state = _text(error, "sqlstate") or ""
    if state in ("40001", "40P01"):
        return errors.Retryable()
    if state in ("55P03", "57014"):
        return errors.DatabaseBusy("Others held the same rows for too long.")
    if state in ("42501", "QL301"):
        return errors.NotPermitted(constraint=_text(error, "message"), table=_text(error, "table_name"))
    kind = _integrity.get(state)
    if kind is not None:
        found = _key.match(_text(error, "detail") or "")
        columns = tuple(name.strip() for name in found[1].split(",")) if found else ()
        if kind is errors.NotNullViolation:
            columns = (_text(error, "column_name") or "",)
        return kind(constraint=_text(error, "constraint_name"), table=_text(error, "table_name"), columns=columns)
    detail = _unavailable.get(state) or _unavailable.get(state[:2])
    return errors.DatabaseUnavailable(detail) if detail else error


def _text(error: Exception, name: str) -> str | None:
    value = getattr(error, name, None)
    return value if isinstance(value, str) else None
