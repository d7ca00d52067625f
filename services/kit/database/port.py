"""The port: what a store may ask of a database, whichever one stands behind it."""

from __future__ import annotations

import abc
import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from services.kit.database.errors import DatabaseBusy, DatabaseUnavailable, Retryable, TransactionAborted
from services.kit.database.statement import Dialect, Statement

T = TypeVar("T")
Row = Mapping[str, Any]
"""A row by column names."""

_BACKOFF_MS = (1, 2, 4, 8)

_log = logging.getLogger(__name__)


class Transaction(abc.ABC):
    """One transaction, used by one task, gone when the function it was handed to returns.

    A failing statement ends the transaction on both dialects, unless it runs inside `savepoint()`.
    """

    dialect: Dialect

    def __init__(self, database: Database) -> None:
        self.database = database
        self.aborted = False
        self._depth = 0
        self._now_ms: int | None = None
        self._callbacks: dict[Callable[[], None], None] = {}

    @abc.abstractmethod
    async def fetch(self, statement: Statement, *args: Any) -> list[Row]:
        """The rows of a query, or of a change with RETURNING."""

    async def fetch_one(self, statement: Statement, *args: Any) -> Row | None:
        """The first row, or None."""
        rows = await self.fetch(statement, *args)
        return rows[0] if rows else None

    @abc.abstractmethod
    async def execute(self, statement: Statement, *args: Any) -> int:
        """Runs a change; answers how many rows it changed."""

    @abc.abstractmethod
    async def execute_many(self, statement: Statement, rows: Sequence[Sequence[Any]]) -> None:
        """Runs a change once for each row of arguments, in one round trip."""

    @asynccontextmanager
    async def savepoint(self) -> AsyncGenerator[None]:
        """A part that may fail alone: an error that leaves the block undoes the block and nothing else."""
        self.refuse_aborted()
        self._depth += 1
        name = f"s{self._depth}"
        await self._control(f"SAVEPOINT {name}")
        try:
            yield
            self.refuse_aborted()
        except BaseException:
            await self._control(f"ROLLBACK TO SAVEPOINT {name}")
            await self._control(f"RELEASE SAVEPOINT {name}")
            self.aborted = False
            raise
        else:
            await self._control(f"RELEASE SAVEPOINT {name}")
        finally:
            self._depth -= 1

    @abc.abstractmethod
    async def _control(self, sql: str) -> None: ...

    async def now_ms(self) -> int:
        """The database's clock in ms UTC, the same for the whole transaction. Leases are judged by it alone."""
        if self._now_ms is None:
            self._now_ms = await self._read_clock()
        return self._now_ms

    @abc.abstractmethod
    async def _read_clock(self) -> int: ...

    def after_commit(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once after COMMIT succeeded; the same callback asked for twice is called once."""
        self._callbacks[callback] = None

    def refuse_aborted(self) -> None:
        """Raises when an earlier statement failed: PostgreSQL would refuse too, SQLite would go on. For adapters."""
        if self.aborted:
            raise TransactionAborted("an earlier statement of this transaction failed")

    def committed(self) -> None:
        """Runs what waits for the commit. For adapters."""
        for callback in self._callbacks:
            try:
                callback()
            except Exception:  # the commit stands; a bell that fails must not tell its caller otherwise
                _log.exception("a callback after commit failed")


class Database(abc.ABC):
    """One service's database."""

    dialect: Dialect

    def __init__(self, service: str) -> None:
        self.service = service
        self._bells: dict[str, asyncio.Event] = {}
        self._inside: set[asyncio.Task[Any] | None] = set()

    def bell(self, name: str) -> asyncio.Event:
        """An event of this process by name, such as `outbox`, for loops that are rung after a commit."""
        return self._bells.setdefault(name, asyncio.Event())

    async def transact(self, work: Callable[[Transaction], Awaitable[T]]) -> T:
        """Runs `work` in a write transaction and commits it.

        `work` may run up to five times (busy, serialization failure, deadlock): keep it free of side effects and use
        `tx.after_commit`. Raises `CommitUnknown` when the answer to COMMIT is lost, `DatabaseUnavailable`,
        `DatabaseBusy` when every try lost, and an `IntegrityViolation` that `work` lets through.
        """
        task = asyncio.current_task()
        if task in self._inside:
            raise RuntimeError("a transaction inside a transaction of the same database would wait for itself")
        self._inside.add(task)
        try:
            return await self._tried(self._transact_once, work)
        finally:
            self._inside.discard(task)

    async def read(self, work: Callable[[Transaction], Awaitable[T]]) -> T:
        """Runs `work` on one read-only snapshot, beside writers. `work` may run again, as in `transact`."""
        return await self._tried(self._read_once, work)

    async def _tried(
        self,
        once: Callable[[Callable[[Transaction], Awaitable[T]]], Awaitable[T]],
        work: Callable[[Transaction], Awaitable[T]],
    ) -> T:
        attempt = 0
        while True:
            try:
                return await once(work)
            except Retryable as lost:
                if attempt == len(_BACKOFF_MS):
                    if isinstance(lost.__cause__, DatabaseUnavailable):
                        raise lost.__cause__ from None
                    raise DatabaseBusy("Others kept changing the same rows.") from lost
                pause_ms = _BACKOFF_MS[attempt] * (1 + random.random())  # noqa: S311 - jitter
            attempt += 1
            await asyncio.sleep(pause_ms / 1000)

    @abc.abstractmethod
    async def _transact_once(self, work: Callable[[Transaction], Awaitable[T]]) -> T: ...

    @abc.abstractmethod
    async def _read_once(self, work: Callable[[Transaction], Awaitable[T]]) -> T: ...

    @abc.abstractmethod
    async def close(self) -> None:
        """Gives back every connection."""


async def uninterrupted(commit: Coroutine[Any, Any, None]) -> None:
    """Awaits a commit to its end even when the caller is cancelled meanwhile: it is sent, its answer is to come."""
    task = asyncio.ensure_future(commit)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()
        raise
