"""Migration steps on PostgreSQL: one transaction a step under an advisory lock, its history row in it.

The migrating role owns the schema and all in it; the service's own role, `ql3_<service>`, gets exactly the rights that
`grants` says and `privileges.py` checks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from services.kit.clock import wall_ms
from services.kit.database import asyncpg_driver, postgresql
from services.kit.database.asyncpg_driver import asyncpg
from services.kit.database.config import DatabaseConfig, schema_name
from services.kit.migrations.stream import (
    Applied,
    LeaderUnavailable,
    MigrationRefused,
    Purgeable,
    Step,
    StepChanged,
    StepFailed,
    StepPending,
    history_tables,
)

_LOCK = "SELECT pg_try_advisory_xact_lock(hashtextextended('ql3-migrate:' || current_database() || ':' || $1, 0))"

_HISTORY = (
    history_tables("postgresql")
    + """
CREATE TABLE IF NOT EXISTS purge_watermarks (
  table_name TEXT PRIMARY KEY,
  below_ms BIGINT NOT NULL
);
CREATE OR REPLACE FUNCTION kit_refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF TG_OP = 'DELETE' AND current_setting('ql3.purging', true) = TG_TABLE_NAME THEN
    RETURN OLD;
  END IF;
  RAISE EXCEPTION 'append-only: %', TG_TABLE_NAME USING ERRCODE = 'QL301';
END
$$;
"""
)


class PostgresqlStore:
    """The migrations of one service's schema."""

    def __init__(self, connection: asyncpg_driver.Connection, service: str) -> None:
        self._connection = connection
        self._service = service
        self._schema = schema_name(service)

    @classmethod
    async def open(cls, config: DatabaseConfig, service: str) -> PostgresqlStore:
        """Connects as the role of `config`, which owns the schema. Raises when the schema is not provisioned."""
        connection = await postgresql.connect(config, service)
        there = await connection.fetchval("SELECT 1 FROM pg_namespace WHERE nspname = $1", schema_name(service))
        if there is None:
            await connection.close()
            raise StepPending(f"{service} (schema {schema_name(service)} is not provisioned)")
        return cls(connection, service)

    async def history(self) -> list[Applied]:
        """What was applied."""
        if await self._connection.fetchval("SELECT to_regclass('schema_migrations')") is None:
            return []
        rows = await self._connection.fetch("SELECT stream, migration_id, dialect, checksum FROM schema_migrations")
        return [Applied(row["stream"], row["migration_id"], row["dialect"], row["checksum"]) for row in rows]

    async def apply(self, step: Step) -> bool:
        """Applies one step; False when another process did meanwhile."""
        await self._begin(step.name)
        try:
            await self._connection.execute(_HISTORY)
            found = await self._connection.fetchval(
                "SELECT checksum FROM schema_migrations WHERE stream = $1 AND migration_id = $2", step.stream, step.id
            )
            if found is not None:
                if found != step.checksum:
                    raise StepChanged(step.name)
                await self._connection.execute("ROLLBACK")
                return False
            await self._run(step)
            await self._record(step)
            await self._connection.execute("COMMIT")
        except BaseException:
            await self._rollback()
            raise
        return True

    async def finish(self, steps: list[Step]) -> None:
        """Grants the service's role what it needs and no more; safe to repeat."""
        await self._begin(self._service)
        try:
            # Rows of a restored copy carry transaction ids of another server's life; they lie before anything here.
            await self._connection.execute(
                "UPDATE outbox SET xid = '1' WHERE xid >= pg_snapshot_xmax(pg_current_snapshot())"
            )
            rows = await self._connection.fetch("SELECT tablename FROM pg_tables WHERE schemaname = $1", self._schema)
            for sql in grants(self._schema, [row["tablename"] for row in rows], steps):
                await self._connection.execute(sql)
            await self._connection.execute("COMMIT")
        except BaseException:
            await self._rollback()
            raise

    async def close(self) -> None:
        """Closes the connection."""
        await self._connection.close()

    async def _begin(self, step: str) -> None:
        # READ COMMITTED: the look at the history must see what was committed while the lock was waited for.
        await self._connection.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
        if not await self._connection.fetchval(_LOCK, self._schema):
            await self._connection.execute("ROLLBACK")
            raise LeaderUnavailable(step)

    async def _rollback(self) -> None:
        try:
            async with asyncio.timeout(5):
                if self._connection.is_in_transaction():
                    await self._connection.execute("ROLLBACK")
        except Exception:  # the first error counts; a lost connection has rolled back
            self._connection.terminate()

    async def _run(self, step: Step) -> None:
        try:
            await self._connection.execute(step.sql)
            for sql in _rules(step, self._schema):
                await self._connection.execute(sql)
        except asyncpg.PostgresError as error:
            raise StepFailed(step.name) from error

    async def _record(self, step: Step) -> None:
        now_ms = wall_ms()
        await self._connection.execute(
            "INSERT INTO schema_migrations (stream, migration_id, dialect, checksum, applied_at_ms) "
            "VALUES ($1, $2, 'postgresql', $3, $4)",
            step.stream,
            step.id,
            step.checksum,
            now_ms,
        )
        await self._connection.execute(
            "INSERT INTO schema_capabilities (contract_name, contract_version, migration_id, updated_at_ms) "
            "VALUES ($1, $2, $3, $4) ON CONFLICT (contract_name) DO UPDATE SET "
            "contract_version = excluded.contract_version, migration_id = excluded.migration_id, "
            "updated_at_ms = excluded.updated_at_ms",
            step.stream,
            int(step.id[:4]),
            step.id,
            now_ms,
        )


def _rules(step: Step, schema: str) -> Iterator[str]:
    for table in step.append_only:
        yield (
            f"CREATE TRIGGER ql3_append_only BEFORE UPDATE OR DELETE ON {table} "
            "FOR EACH ROW EXECUTE FUNCTION kit_refuse_change()"
        )
        yield (
            f"CREATE TRIGGER ql3_no_truncate BEFORE TRUNCATE ON {table} "
            "FOR EACH STATEMENT EXECUTE FUNCTION kit_refuse_change()"
        )
    for entry in step.purgeable:
        yield from _purge(entry, schema)


def _purge(entry: Purgeable, schema: str) -> Iterator[str]:
    """The one way round the refusal: a function with its owner's rights that deletes below the watermark only."""
    table = entry.table
    yield f"INSERT INTO purge_watermarks (table_name, below_ms) VALUES ('{table}', 0)"  # noqa: S608
    yield f"""
        CREATE FUNCTION kit_purge_{table}(keys text) RETURNS bigint
        LANGUAGE plpgsql SECURITY DEFINER SET search_path = {schema}, pg_catalog, pg_temp AS $$
        DECLARE purged bigint;
        BEGIN
          PERFORM set_config('ql3.purging', '{table}', true);
          DELETE FROM {table} WHERE {entry.key} = ANY(ARRAY(SELECT jsonb_array_elements_text(keys::jsonb)))
            AND {entry.time} < (SELECT below_ms FROM purge_watermarks WHERE table_name = '{table}');
          GET DIAGNOSTICS purged = ROW_COUNT;
          PERFORM set_config('ql3.purging', '', true);
          RETURN purged;
        END
        $$
    """  # noqa: S608
    yield f"REVOKE ALL ON FUNCTION kit_purge_{table}(text) FROM PUBLIC"


def rights_of(table: str, steps: list[Step]) -> frozenset[str]:
    """What the service's role may do with a table."""
    if any(table in step.read_only for step in steps):
        return frozenset({"SELECT"})
    if any(table in step.append_only for step in steps):
        return frozenset({"SELECT", "INSERT"})
    return frozenset({"SELECT", "INSERT", "UPDATE", "DELETE"})


def grants(schema: str, tables: list[str], steps: list[Step]) -> Iterator[str]:
    """The statements that give the role of `schema` its rights and take every other."""
    yield f"REVOKE ALL ON SCHEMA {schema} FROM PUBLIC"
    yield f"REVOKE ALL ON SCHEMA {schema} FROM {schema}"
    yield f"GRANT USAGE ON SCHEMA {schema} TO {schema}"
    for table in sorted(tables):
        yield f"REVOKE ALL ON {schema}.{table} FROM PUBLIC, {schema}"
        yield f"GRANT {', '.join(sorted(rights_of(table, steps)))} ON {schema}.{table} TO {schema}"
    yield f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA {schema} TO {schema}"
    for step in steps:
        for entry in step.purgeable:
            yield f"GRANT EXECUTE ON FUNCTION {schema}.kit_purge_{entry.table}(text) TO {schema}"


__all__ = ["MigrationRefused", "PostgresqlStore", "grants", "rights_of"]
