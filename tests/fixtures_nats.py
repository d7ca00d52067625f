"""A real nats-server for a test, on a free port, with the users and permissions of the product."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest_asyncio

from services.kit.bus import Bus
from services.kit.natsserver import NatsServer

WORKER = "w1"
OTHER_WORKER = "w2"
"""The id of the worker that has a user on the server of a test."""
WAIT_S = 30.0
"""How long a test waits for what must happen; generous, because the machine may be slow."""

BusFactory = Callable[..., Awaitable[Bus]]


@pytest_asyncio.fixture
async def nats_server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """A running server of this test alone; `kill()` makes it crash and its keeper start it again."""
    server = NatsServer(tmp_path / "nats", workers=(WORKER, OTHER_WORKER))
    await server.start()
    yield server
    await server.stop()


@pytest_asyncio.fixture
async def bus_for(nats_server: NatsServer) -> AsyncIterator[BusFactory]:
    """`await bus_for("scheduler")`: a started bus of that service (or `worker="w1"`), stopped after the test.

    Further arguments replace options, for example `redelivery_s=0.01`.
    """
    buses: list[Bus] = []

    async def make(service: str, *, worker: str | None = None, streams: bool | None = None, **changes: Any) -> Bus:
        bus = Bus(msgspec.structs.replace(nats_server.options(service, worker=worker), **changes))
        # A worker may not declare streams; it waits for the services that do.
        await bus.start(wait_s=WAIT_S, streams=worker is None if streams is None else streams)
        buses.append(bus)
        return bus

    yield make
    await asyncio.gather(*(bus.stop() for bus in buses))


class Heard:
    """Collects what a handler was given, and lets a test wait for it instead of sleeping."""

    def __init__(self) -> None:
        self.items: list[object] = []
        self._changed = asyncio.Condition()

    async def add(self, *items: object) -> None:
        """Note items and wake whoever waits."""
        async with self._changed:
            self.items.extend(items)
            self._changed.notify_all()

    async def until(self, predicate: Callable[[list[object]], bool], timeout: float = WAIT_S) -> None:
        """Return when `predicate(items)` holds; fail after `timeout` seconds."""
        async with self._changed, asyncio.timeout(timeout):
            await self._changed.wait_for(lambda: predicate(self.items))

    async def count(self, number: int, timeout: float = WAIT_S) -> list[object]:
        """Return the items when there are at least `number`."""
        await self.until(lambda items: len(items) >= number, timeout)
        return self.items
