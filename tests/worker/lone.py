"""A worker alone in a process, for tests that kill it: `python -m tests.worker.lone DATA`, bus options on stdin.

With `POINT VICTIM` behind DATA it sees to its own death, or its host's (`tests.worker.doomed`).
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import msgspec

from services.kit.bus import Bus, BusOptions
from services.kit.clock import WallClock
from services.kit.config import Config
from services.kit.database import DatabaseConfig, open_database
from services.kit.migrations import migrate
from services.worker import launch
from services.worker.service import WorkerService
from tests.fixtures_nats import WORKER
from tests.worker import doomed


async def main() -> None:
    """Run until SIGTERM; prints `ready` when started."""
    options = msgspec.json.decode(sys.stdin.readline(), type=BusOptions)
    data = Path(sys.argv[1])
    where = DatabaseConfig(url=f"sqlite:{data / 'worker'}")
    await migrate(where, "worker")
    database = await open_database(where, "worker")
    bus = await Bus(options).start(streams=False)
    config = Config(data=data, worker_id=WORKER, worker_slots=256, worker_min_free=0)
    service = WorkerService(config=config, database=database, bus=bus, clock=WallClock(), stop_runs=True)
    if len(sys.argv) > 2:
        _doom(service, sys.argv[2], sys.argv[3])
    await service.start()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    print("ready", flush=True)
    await ended.wait()
    await service.stop()
    await bus.stop()
    await database.close()


def _doom(service: WorkerService, point: str, victim: str) -> None:
    doom = doomed.Doom(point, victim, sys.argv[1])
    if point in doomed.WORKER_POINTS:
        doom.arm_worker(service)
        return
    begin = "from services.worker.host.main"
    arm = f"from tests.worker.doomed import Doom; Doom({point!r}, {victim!r}, {sys.argv[1]!r}).arm_host(); "
    launch._CODE = launch._CODE.replace(begin, arm + begin)


if __name__ == "__main__":
    asyncio.run(main())
