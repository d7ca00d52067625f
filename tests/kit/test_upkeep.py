"""A commit alone brings a message out and seals its audit row: nobody asks, nobody waits for a timer."""

from __future__ import annotations

import asyncio

import pytest

from schemas.base import Message
from services.kit import audit, outbox
from services.kit.database import Database, Transaction
from services.kit.upkeep import upkeep


class Told(Message, frozen=True, kw_only=True, tag="thing.told/1"):
    pass


class Listener:
    def __init__(self) -> None:
        self.heard: asyncio.Queue[str] = asyncio.Queue()

    async def publish_many(self, items, *, facts=()):
        for subject, _, _ in items:
            self.heard.put_nowait(subject)
        return [None for _ in items]


async def test_a_commit_wakes_the_relay_and_the_sealer(database: Database, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(outbox, "FALLBACK_S", 3600.0)
    monkeypatch.setattr(audit, "FALLBACK_S", 3600.0)
    listener = Listener()
    loops = upkeep(database, listener)
    for loop in loops:
        await loop.start()
    for loop in loops:
        await asyncio.wait_for(loop.first_done.wait(), 10)

    async def work(tx: Transaction) -> None:
        await outbox.fact(tx, "ql3.evt.thing.default.a.told", Told())
        await audit.append(tx, None, "thing.tell", None, "a", "allow")

    await database.transact(work)
    assert await asyncio.wait_for(listener.heard.get(), 10) == "ql3.evt.thing.default.a.told"
    async with asyncio.timeout(10):
        while (await audit.verify(database)).sealed == 0:
            pass
    for loop in loops:
        await loop.stop()


async def test_the_relay_alone_stands_aside(database: Database):
    stood, room = asyncio.Event(), asyncio.Event()

    async def aside() -> None:
        stood.set()
        await room.wait()

    listener = Listener()
    loops = upkeep(database, listener, aside=aside)
    await database.transact(lambda tx: outbox.fact(tx, "ql3.evt.thing.default.a.told", Told()))
    async with asyncio.timeout(10):
        for loop in loops:
            await loop.start()
        for loop in loops[1:]:
            await loop.first_done.wait()
        await stood.wait()
        assert listener.heard.empty()
        room.set()
        await listener.heard.get()
    for loop in loops:
        await loop.stop()
