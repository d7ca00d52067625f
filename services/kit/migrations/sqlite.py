"""Migration steps on SQLite: one exclusive transaction a step, its history row in it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from typing import Concatenate, ParamSpec, TypeVar

from services.kit.clock import wall_ms
from services.kit.database.config import DatabaseConfig
from services.kit.database.errors import Retryable
from services.kit.database.sqlite import Connection, connect, prepared
from services.kit.migrations.stream import (
    KIT,
    Applied,
    LeaderUnavailable,
    Purgeable,
    Step,
    StepChanged,
    StepFailed,
    history_tables,
)

T = TypeVar("T")
P = ParamSpec("P")

_HISTORY = (
    history_tables("sqlite")
    + """
CREATE TABLE IF NOT EXISTS purge_watermarks (
  table_name TEXT PRIMARY KEY,
  below_ms BIGINT NOT NULL,
  is_open INTEGER NOT NULL DEFAULT 0 CHECK (is_open IN (0, 1)),
  last_purged BIGINT NOT NULL DEFAULT 0
);
"""
)


class SqliteStore:
    """The migrations of one service's file."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @classmethod
    async def open(cls, config: DatabaseConfig, service: str) -> SqliteStore:
        """Opens the file, making it and its folder when missing."""
        return cls(await connect(prepared(config, service), read_only=False))

    async def history(self) -> list[Applied]:
        """What was applied."""
        return await self._call(KIT, _history)

    async def apply(self, step: Step) -> bool:
        """Applies one step; False when another process did meanwhile."""
        return await self._call(step.name, _apply, step)

    async def finish(self, steps: list[Step]) -> None:
        """Nothing: a file has no roles."""

    async def close(self) -> None:
        """Closes the file."""
        await self._connection.close()

    async def _call(
        self, step: str, function: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        try:
            return await self._connection.call(function, *args, **kwargs)
        except Retryable as busy:
            raise LeaderUnavailable(step) from busy


def _history(connection: sqlite3.Connection) -> list[Applied]:
    there = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'schema_migrations'").fetchone()
    if there is None:
        return []
    rows = connection.execute("SELECT stream, migration_id, dialect, checksum FROM schema_migrations")
    return [Applied(*row) for row in rows]


def _apply(connection: sqlite3.Connection, step: Step) -> bool:
    connection.execute("BEGIN IMMEDIATE")
    try:
        for sql in split(_HISTORY):
            connection.execute(sql)
        found = connection.execute(
            "SELECT checksum FROM schema_migrations WHERE stream = ? AND migration_id = ?", (step.stream, step.id)
        ).fetchone()
        if found is not None:
            if found[0] != step.checksum:
                raise StepChanged(step.name)
            connection.execute("ROLLBACK")
            return False
        try:
            for sql in split(step.sql):
                connection.execute(sql)
            for sql in _rules(step):
                connection.execute(sql)
        except sqlite3.Error as error:
            raise StepFailed(step.name) from error
        now_ms = wall_ms()
        connection.execute(
            "INSERT INTO schema_migrations (stream, migration_id, dialect, checksum, applied_at_ms) "
            "VALUES (?, ?, 'sqlite', ?, ?)",
            (step.stream, step.id, step.checksum, now_ms),
        )
        connection.execute(
            "INSERT INTO schema_capabilities (contract_name, contract_version, migration_id, updated_at_ms) "
            "VALUES (?, ?, ?, ?) ON CONFLICT (contract_name) DO UPDATE SET "
            "contract_version = excluded.contract_version, migration_id = excluded.migration_id, "
            "updated_at_ms = excluded.updated_at_ms",
            (step.stream, int(step.id[:4]), step.id, now_ms),
        )
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return True


def split(script: str) -> Iterator[str]:
    """The statements of a script; a trigger's body is one with its head."""
    text = ""
    for part in script.split(";")[:-1]:
        text += part + ";"
        if sqlite3.complete_statement(text):
            yield text
            text = ""
    rest = text + script.rpartition(";")[2]
    if any(line.strip() and not line.strip().startswith("--") for line in rest.splitlines()):
        yield rest


def _rules(step: Step) -> Iterator[str]:
    purgeable = {entry.table: entry for entry in step.purgeable}
    for table in step.append_only:
        yield (
            f"CREATE TRIGGER ql3_{table}_no_update BEFORE UPDATE ON {table} "
            f"BEGIN SELECT RAISE(ABORT, 'append-only: {table}'); END"
        )
        if table not in purgeable:
            yield _refuse_delete(table, "")
    for entry in step.purgeable:
        # Its table may be of an earlier step, and refuses without exception until now.
        yield f"DROP TRIGGER IF EXISTS ql3_{entry.table}_no_delete"
        yield _refuse_delete(entry.table, _guard(entry))
        yield from _purge(entry)


def _refuse_delete(table: str, guard: str) -> str:
    return (
        f"CREATE TRIGGER ql3_{table}_no_delete BEFORE DELETE ON {table} {guard} "
        f"BEGIN SELECT RAISE(ABORT, 'append-only: {table}'); END"
    )


def _guard(entry: Purgeable) -> str:
    return (
        f"WHEN NOT EXISTS (SELECT 1 FROM purge_watermarks WHERE table_name = '{entry.table}' "  # noqa: S608
        f"AND is_open = 1 AND OLD.{entry.time} < below_ms)"
    )


def _purge(entry: Purgeable) -> Iterator[str]:
    """The one way round the refusal: a view whose INSERT opens the guard, deletes below the watermark, closes it."""
    table = entry.table
    mine = f"WHERE table_name = '{table}'"
    yield f"INSERT INTO purge_watermarks (table_name, below_ms) VALUES ('{table}', 0)"  # noqa: S608
    yield f"CREATE VIEW kit_purge_{table} AS SELECT '' AS keys"
    yield (
        f"CREATE TRIGGER ql3_purge_{table} INSTEAD OF INSERT ON kit_purge_{table} BEGIN "  # noqa: S608
        f"UPDATE purge_watermarks SET is_open = 1 {mine}; "
        f"DELETE FROM {table} WHERE {entry.key} IN (SELECT value FROM json_each(NEW.keys)) "
        f"AND {entry.time} < (SELECT below_ms FROM purge_watermarks {mine}); "
        f"UPDATE purge_watermarks SET is_open = 0, last_purged = changes() {mine}; END"
    )
