"""The composition root: which services there are, what each needs, and in which order they start and stop."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import structlog

from schemas.errors import Ql3Error
from schemas.subjects import SERVICES
from services.kit.config import Config
from services.kit.database import Database, DatabaseConfig, open_database
from services.kit.migrations import migrate, verify

if TYPE_CHECKING:
    from services.kit.bus import Bus, BusOptions

log: structlog.stdlib.BoundLogger = structlog.get_logger("ql3")


class Service(Protocol):
    """What every service offers to the process that runs it."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def health(self) -> list[str]: ...


OptionsFor = Callable[[str], "BusOptions"]
"""How a service's user connects to NATS."""
ORDER: Final = SERVICES
"""Start order; the end is in reverse, so that the dispatcher still hears the worker's last reports."""


def check_names(names: Sequence[str]) -> list[str]:
    """The named services in start order. Raises `invalid` for a name that is none."""
    for name in names:
        if name not in ORDER:
            raise Ql3Error("invalid", f"There is no service {name!r}; there are {', '.join(ORDER)}.", field="SERVICE")
    return [name for name in ORDER if name in names]


def database_config(config: Config, service: str) -> DatabaseConfig:
    """Where a service's tables are. The worker's journal is local SQLite, always."""
    if service == "worker":
        return DatabaseConfig(url=f"sqlite:{config.data.absolute() / 'worker'}")
    return DatabaseConfig(
        url=config.database, password=config.database_password_for(service), pool_size=config.database_pool
    )


class House:
    """The services of this process: opened, started and stopped together."""

    def __init__(self, config: Config, names: Sequence[str], options_for: OptionsFor, *, stop_runs: bool) -> None:
        self.config = config
        self.names = check_names(names)
        self.services: dict[str, Service] = {}
        self._options_for = options_for
        self._stop_runs = stop_runs
        self._databases: list[Database] = []
        self._buses: list[Bus] = []

    async def start(self, *, migrating: bool) -> None:
        """Open every database and connection at once, then start the services in order."""
        try:
            databases = await asyncio.gather(*(self._open(name, migrating=migrating) for name in self.names))
            buses = await asyncio.gather(*(self._connect(name) for name in self.names))
            for name, database, bus in zip(self.names, databases, buses, strict=True):
                service = build(name, self.config, database, bus, stop_runs=self._stop_runs)
                self.services[name] = service
                await service.start()
                log.info("service started", service=name)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop in reverse order; what fails to stop is logged and does not keep the others."""
        for name in reversed(list(self.services)):
            await _quietly(name, self.services.pop(name).stop())
        while self._buses:
            await _quietly("bus", self._buses.pop().stop())
        while self._databases:
            await _quietly("database", self._databases.pop().close())

    def reasons(self) -> list[str]:
        """Why the services of this process are not ready yet; empty when all are."""
        missing = [f"{name}: it has not started" for name in self.names if name not in self.services]
        return missing + [f"{name}: {reason}" for name, service in self.services.items() for reason in service.health()]

    async def _open(self, name: str, *, migrating: bool) -> Database:
        where = database_config(self.config, name)
        if where.dialect == "sqlite":
            await asyncio.to_thread(Path(where.directory).mkdir, 0o700, parents=True, exist_ok=True)
        if migrating or name == "worker":
            await migrate(where, name)
        database = await open_database(where, name)
        self._databases.append(database)
        await verify(database, name)
        return database

    async def _connect(self, name: str) -> Bus:
        from services.kit.bus import Bus

        bus = Bus(self._options_for(name))
        self._buses.append(bus)
        return await bus.start(streams=name != "worker")


async def _quietly(name: str, work: Awaitable[None]) -> None:
    try:
        await work
    except Exception:  # the others have to stop too
        log.exception("did not stop cleanly", part=name)


def build(name: str, config: Config, database: Database, bus: Bus, *, stop_runs: bool) -> Any:
    """One service from its parts. Imported here, so that `serve` of one service loads that one alone."""
    from services.kit.clock import WallClock

    module = importlib.import_module(f"services.{name}.service")
    kind = getattr(module, f"{name.capitalize()}Service")
    extra = {"stop_runs": stop_runs} if name == "worker" else {}
    return kind(config=config, database=database, bus=bus, clock=WallClock(), **extra)
