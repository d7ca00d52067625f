"""Ordered, checksummed steps for every service's database: applied by `ql3 migrate`, verified before serving."""

from __future__ import annotations

import asyncio
import logging
from importlib.resources.abc import Traversable
from typing import Protocol

from services.kit.clock import monotonic_ms
from services.kit.database import Database, DatabaseConfig, Statement, Transaction
from services.kit.migrations.postgresql import PostgresqlStore
from services.kit.migrations.privileges import PrivilegesInvalid, provision_postgresql, verify_privileges
from services.kit.migrations.sqlite import SqliteStore
from services.kit.migrations.stream import (
    Applied,
    InvalidStream,
    LeaderUnavailable,
    MigrationRefused,
    Step,
    StepChanged,
    StepFailed,
    StepMissing,
    StepPending,
    StepUnknown,
    load,
    pending,
)

__all__ = [
    "InvalidStream",
    "LeaderUnavailable",
    "MigrationRefused",
    "PrivilegesInvalid",
    "StepChanged",
    "StepFailed",
    "StepMissing",
    "StepPending",
    "StepUnknown",
    "migrate",
    "provision_postgresql",
    "verify",
    "verify_privileges",
]

_log = logging.getLogger(__name__)
_LEADER_PAUSE_S = 0.1


class Store(Protocol):
    """What the engine needs of a dialect."""

    async def history(self) -> list[Applied]: ...
    async def apply(self, step: Step) -> bool: ...
    async def finish(self, steps: list[Step]) -> None: ...
    async def close(self) -> None: ...


async def migrate(
    config: DatabaseConfig, service: str, *, root: Traversable | None = None, wait_s: float = 30.0
) -> list[str]:
    """Applies what is not applied yet and answers the names of the steps this call applied.

    On PostgreSQL `config` names the role that owns the schema (see `provision_postgresql`), not the service's. While
    another process migrates the same schema this waits up to `wait_s`, then raises `LeaderUnavailable`. Raises
    `MigrationRefused` before anything is changed when history and steps do not fit; `StepFailed` leaves the steps
    before it applied.
    """
    steps = load(service, config.dialect, root)
    kind = SqliteStore if config.dialect == "sqlite" else PostgresqlStore
    store: Store = await kind.open(config, service)
    done: list[str] = []
    until_ms = monotonic_ms() + round(wait_s * 1000)
    try:
        while True:
            try:
                for step in pending(steps, await store.history(), config.dialect):
                    if await store.apply(step):
                        _log.info("applied migration %s", step.name)
                        done.append(step.name)
                await store.finish(steps)
            except LeaderUnavailable:
                if monotonic_ms() >= until_ms:
                    raise
                await asyncio.sleep(_LEADER_PAUSE_S)
            else:
                return done
    finally:
        await store.close()


_HAS_HISTORY = Statement(
    "SELECT 1 AS there FROM sqlite_master WHERE name = 'schema_migrations'",
    postgresql="SELECT 1 AS there FROM pg_class WHERE oid = to_regclass('schema_migrations')",
)
_HISTORY = Statement("SELECT stream, migration_id, dialect, checksum FROM schema_migrations")


async def verify(database: Database, service: str, *, root: Traversable | None = None) -> None:
    """Refuses a database whose history is not exactly this version's steps. Raises `MigrationRefused`."""
    steps = load(service, database.dialect, root)

    async def read_history(tx: Transaction) -> list[Applied]:
        if await tx.fetch_one(_HAS_HISTORY) is None:
            return []
        rows = await tx.fetch(_HISTORY)
        return [Applied(row["stream"], row["migration_id"], row["dialect"], row["checksum"]) for row in rows]

    waiting = pending(steps, await database.read(read_history), database.dialect)
    if waiting:
        raise StepPending(waiting[0].name)
