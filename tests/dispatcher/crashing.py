"""A dispatcher in a process of its own that kills itself, really and at once, at a named point.

`python -m tests.dispatcher.crashing CONFIG`, where CONFIG is a JSON file of `Child`. A point is `<what>:<who>:<when>`,
for example `commit:_place:after`: the transaction of `DispatcherService._place` has committed, nothing was sent yet.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from services.dispatcher.service import DispatcherService
from services.kit.bus import Bus, BusOptions
from services.kit.clock import WallClock
from services.kit.config import Config
from services.kit.database import Database, DatabaseConfig, open_database

POINTS = (
    "commit:_committed:before",  # submission
    "commit:_committed:after",  # committed, the answer or ack not sent
    "ack:_take_submissions:before",
    "ack:_take_submissions:after",  # answered, the message not yet taken off its stream
    "commit:_place:before",
    "commit:_place:after",  # leased, the offer not sent
    "publish:offer:after",  # offered, nothing of it remembered
    "commit:_start_many:before",
    "commit:_start_many:after",  # granted, the answer not sent
    "commit:_settle:before",
    "commit:_settle:after",  # settled, the ack not sent
    "ack:_settle:after",  # settled and told, the message not yet taken off its stream
    "commit:register:before",
    "commit:register:after",
    "commit:cancel:before",
    "commit:cancel:after",  # the intent stands, nobody was told
    "commit:_deliver:after",  # the delivery is in hand, its message not sent
    "publish:cancel:after",
    "commit:_ring:after",  # the approval's order is marked as rung and was not sent
    "publish:request:after",
    "commit:release:before",
    "commit:release:after",  # released, the answer not sent
    "relay:publish:before",
    "relay:publish:after",  # facts are out, not marked as published
)
"""Each commit, publish, ack and answer of the dispatcher in the table of who sends what, before and after."""


class Child(msgspec.Struct, frozen=True, kw_only=True):
    """How the child connects, and where it ends (None: never)."""

    database: DatabaseConfig
    bus: BusOptions
    point: str | None = None


class Fuse:
    """Ends the process when its point is reached for the first time."""

    def __init__(self, point: str | None) -> None:
        self._point = point

    def reach(self, what: str, who: str, when: str) -> None:
        if f"{what}:{who}:{when}" == self._point:
            os.kill(os.getpid(), signal.SIGKILL)


class FusedBus(Bus):
    """A bus whose publishes and acks pass the fuse."""

    def __init__(self, options: BusOptions, fuse: Fuse) -> None:
        super().__init__(options)
        self._fuse = fuse

    async def publish(self, subject: str, message: msgspec.Struct, **options: Any) -> None:
        who = subject.rpartition(".")[2]
        self._fuse.reach("publish", who, "before")
        await super().publish(subject, message, **options)
        self._fuse.reach("publish", who, "after")

    async def publish_many(self, items: Sequence[Any], **options: Any) -> list[Exception | None]:
        facts = bool(items) and items[0][0].startswith("ql3.evt.")
        if facts:
            self._fuse.reach("relay", "publish", "before")
        outcomes = await super().publish_many(items, **options)
        if facts:
            self._fuse.reach("relay", "publish", "after")
        return outcomes

    async def acknowledge(self, sender: str, ids: Sequence[str]) -> None:
        who = _caller(2)  # _acknowledge, and who calls it
        self._fuse.reach("ack", who, "before")
        await super().acknowledge(sender, ids)
        await self.flush()
        self._fuse.reach("ack", who, "after")


def fused(database: Database, fuse: Fuse) -> Database:
    """The same database, whose commits pass the fuse under the name of the service's method that asks for them."""
    transact = database.transact

    async def watched(work: Callable[[Any], Awaitable[Any]]) -> Any:
        who = _caller(1)

        async def before(tx: Any) -> Any:
            result = await work(tx)
            fuse.reach("commit", who, "before")
            return result

        result = await transact(before)
        fuse.reach("commit", who, "after")
        return result

    database.transact = watched  # type: ignore[method-assign]
    return database


def _caller(depth: int) -> str:
    return sys._getframe(depth + 1).f_code.co_name


async def main(child: Child) -> None:
    fuse = Fuse(child.point)
    database = fused(await open_database(child.database, "dispatcher"), fuse)
    bus = FusedBus(child.bus, fuse)
    await bus.start()
    service = DispatcherService(config=Config(), database=database, bus=bus, clock=WallClock())
    await service.start()
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Child)))
