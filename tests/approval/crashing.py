"""The approval service as a process that kills itself (-9) at a named point.

A point is `<step>:<when>`. Steps are the audited acts (`approval.request`, `approval.decide`, `approval.consume`,
`action.start`, `action.succeeded`, `approval.recover`) with `inside` (before COMMIT) and `after` (before anybody hears
of it), `execute` and `close` with `before` and `after` their questions to another service.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from schemas.approvals import ActionClose
from schemas.runs import DispatchClose, RunRelease
from schemas.tasks import TaskRun, TaskUpdate
from services.approval.service import ApprovalService
from services.kit import audit
from services.kit.bus import Bus, BusOptions
from services.kit.clock import WallClock
from services.kit.config import Config
from services.kit.database import Database, DatabaseConfig, open_database

ASKED: dict[str, tuple[type, ...]] = {
    "execute": (RunRelease, TaskRun, TaskUpdate),
    "close": (DispatchClose, ActionClose),
}
"""The questions to other services by which an action is carried out, and closed."""


class Order(msgspec.Struct, frozen=True):
    """What the child is told."""

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
        asking = isinstance(message, ASKED.get(step, ()))
        if asking and when == "before":
            die()
        answer = await request(self, endpoint, message, **more)
        if asking and when == "after":
            die()
        return answer

    Bus.request = asked  # type: ignore[method-assign]


def live(order: Order, parent: Connection) -> None:
    """Serve until killed; the whole life of a process."""
    asyncio.run(_live(order, parent))


async def _live(order: Order, parent: Connection) -> None:
    arm(order.point)
    database = await open_database(order.database, "approval")
    bus = await Bus(order.bus).start()
    service = ApprovalService(config=Config(profile="standalone"), database=database, bus=bus, clock=WallClock())
    await service.start()
    parent.send("ready")
    # Nobody says anything more: this returns when the parent is gone.
    await asyncio.to_thread(parent.poll, None)
    os._exit(0)
