"""The approval service as a process that kills itself (-9) at a named point: `python -m tests.approval.crashing`.

A point is `<step>:<when>`. Steps are the audited acts (`approval.request`, `approval.decide`, `approval.consume`,
`action.start`, `action.succeeded`, `approval.recover`) with `inside` (before COMMIT) and `after` (before anybody hears
of it), and `execute` with `before` and `after` its question to another service.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from schemas.runs import RunRelease
from schemas.tasks import TaskRun
from services.approval.service import ApprovalService
from services.kit import audit
from services.kit.bus import Bus, BusOptions
from services.kit.clock import WallClock
from services.kit.config import Config
from services.kit.database import Database, DatabaseConfig, open_database


class Order(msgspec.Struct, frozen=True):
    """What the child is told on standard input."""

    database: DatabaseConfig
    bus: BusOptions
    point: str


def die() -> None:
    """As a power cut would have it."""
    os.kill(os.getpid(), signal.SIGKILL)


def arm(point: str) -> None:
    """Set the trap."""
    step, _, when = point.partition(":")
    if not step:
        return
    sprung = False
    append, transact = audit.append, Database.transact

    async def trapped(tx: Any, actor: Any, action: str, *rest: Any, **more: Any) -> str:
        nonlocal sprung
        made = await append(tx, actor, action, *rest, **more)
        if action == step:
            sprung = True
            if when == "inside":
                die()
        return made

    async def transacted(self: Database, work: Callable[[Any], Awaitable[Any]]) -> Any:
        result = await transact(self, work)
        if sprung and when == "after":
            die()
        return result

    audit.append = trapped
    Database.transact = transacted  # type: ignore[method-assign]
    request = Bus.request

    async def asked(self: Bus, endpoint: Any, message: Any, **more: Any) -> Any:
        executing = step == "execute" and isinstance(message, RunRelease | TaskRun)
        if executing and when == "before":
            die()
        answer = await request(self, endpoint, message, **more)
        if executing and when == "after":
            die()
        return answer

    Bus.request = asked  # type: ignore[method-assign]


async def main() -> None:
    """Serve until killed or until standard input ends."""
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    arm(order.point)
    database = await open_database(order.database, "approval")
    bus = await Bus(order.bus).start()
    service = ApprovalService(config=Config(), database=database, bus=bus, clock=WallClock())
    await service.start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.buffer.read)
    await service.stop()
    await bus.stop()
    await database.close()


if __name__ == "__main__":
    asyncio.run(main())
