"""One worker's data folder and its lives, for tests that start, crash and start again."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from pathlib import Path
from typing import Any

from services.kit.clock import WallClock
from services.kit.config import Config
from services.kit.database import DatabaseConfig, open_database
from services.kit.migrations import migrate
from services.worker.service import WorkerService
from tests.fixtures_nats import WORKER, BusFactory
from tests.worker.conftest import Client


class Worker:
    """One worker's data folder and its lives."""

    def __init__(self, data: Path, bus_for: BusFactory) -> None:
        self.data = data
        self._bus_for = bus_for
        self.service: WorkerService | None = None
        self._database: Any = None

    async def start(self, **settings: Any) -> WorkerService:
        config = Config(data=self.data, worker_id=WORKER, worker_slots=64, worker_min_free=0, **settings)
        where = DatabaseConfig(url=f"sqlite:{self.data / 'worker'}")
        await migrate(where, "worker")
        self._database = await open_database(where, "worker")
        bus = await self._bus_for("worker", worker=WORKER, streams=False)
        self.service = WorkerService(config=config, database=self._database, bus=bus, clock=WallClock())
        await self.service.start()
        return self.service

    async def crash(self) -> None:
        """End this life without a word, as far as one process can: nothing is drained, told or retired."""
        service = self.service
        assert service is not None
        holdings = service.holdings
        loops = [service.session.loop, service.intake.loop, holdings.reports.loop, holdings._settling, holdings._ends]
        for loop in (*loops, holdings.logs.live, holdings.logs.publishing):
            await loop.stop()
        await service._bus.stop()
        await holdings.host.stop(retire=False)
        service._directories.release()
        await self._database.close()
        self.service = None

    async def stop(self) -> None:
        if self.service is not None:
            service, self.service = self.service, None
            service._stop_runs = True
            await service.stop()
            await self._database.close()
        self.end_host()

    def host(self) -> Client:
        return Client(self.data / "worker" / "host")

    def host_pid(self) -> int:
        return int((self.data / "worker" / "host" / "host.lock").read_text())

    def end_host(self) -> None:
        try:
            client = self.host()
        except OSError:
            return
        rows = [row["attempt"] for row in client.hello["attempts"]]
        client.send({"op": "kill", "items": [{"attempt": a, "reason": "user", "grace_ms": 0} for a in rows]})
        client.send({"op": "retire"})
        with contextlib.suppress(EOFError):
            while True:
                assert client.read(30), "the host did not end"
        client.close()

    async def lose_journal(self) -> None:
        """As after a restore of an old copy, or a hand that deleted it."""
        for path in (self.data / "worker").glob("worker.sqlite3*"):
            path.unlink()

    def journal(self) -> list[str]:
        path = self.data / "worker" / "worker.sqlite3"
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        try:
            return [row[0] for row in connection.execute("SELECT attempt_id FROM execution_offers")]
        finally:
            connection.close()


async def settled(worker: Worker) -> None:
    """Until the worker holds nothing and its journal is empty."""
    assert worker.service is not None
    async with asyncio.timeout(30):
        await worker.service.holdings.nothing_held()
        while worker.journal():
            await worker.service.holdings.settle()
            await asyncio.sleep(0)  # its own loop may be at it already
