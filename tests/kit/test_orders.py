"""Orders: the rhythm in which open ones are rung again, and acks in batches."""

from __future__ import annotations

import asyncio

from services.kit.clock import ManualClock
from services.kit.orders import FIRST_RING_MS, RING_MAX_MS, AckBatcher, OrderRinger, next_ring_ms
from tests.fixtures_nats import BusFactory, Heard


def test_rings_start_at_two_seconds_and_grow_to_five_minutes() -> None:
    waits = [next_ring_ms(rings, 0) for rings in range(1, 40)]
    assert 0.8 * FIRST_RING_MS <= waits[0] <= FIRST_RING_MS
    assert all(later <= RING_MAX_MS for later in waits)
    assert waits[-1] >= 0.8 * RING_MAX_MS
    assert 0.8 * FIRST_RING_MS <= next_ring_ms(0, 0) <= FIRST_RING_MS


async def test_open_orders_are_rung_until_they_are_closed() -> None:
    clock = ManualClock(0)
    table: dict[str, tuple[int, int]] = {"a": (1, 2_000), "b": (1, 2_000)}
    rung: list[list[str]] = []

    async def due(limit: int, now_ms: int) -> list[str]:
        return [key for key, (_, at) in table.items() if at <= now_ms][:limit]

    async def ring(rows: list[str], now_ms: int) -> None:  # type: ignore[type-arg]
        rung.append(list(rows))
        for key in rows:
            rings = table[key][0] + 1
            table[key] = (rings, next_ring_ms(rings, now_ms))

    ringer = OrderRinger("test", due=due, ring=ring, clock=clock, limit=2)
    assert await ringer.step() is False
    clock.advance(2_000)
    assert await ringer.step() is True
    assert await ringer.step() is False
    del table["a"]
    clock.advance(4_000)
    assert await ringer.step() is False
    assert rung == [["a", "b"], ["b"]]


async def test_acks_are_sent_together(bus_for: BusFactory) -> None:
    sender, receiver = await bus_for("scheduler"), await bus_for("dispatcher")
    heard, messages = Heard(), 0

    async def acked(ids: list[str]) -> None:
        nonlocal messages
        messages += 1
        await heard.add(*ids)

    await sender.on_ack("scheduler", acked)
    await sender.flush()
    batcher = AckBatcher(receiver)
    for number in range(500):
        batcher.add("scheduler", [f"order-{number}"])
    await batcher.start()
    await heard.count(500)
    assert messages == 1
    batcher.add("scheduler", ["last"])
    await batcher.stop()
    assert (await heard.count(501))[-1] == "last"


async def test_acks_that_cannot_be_sent_do_not_end_the_batcher(bus_for: BusFactory) -> None:
    receiver = await bus_for("dispatcher")
    batcher = AckBatcher(receiver)
    await receiver.stop()
    batcher.add("scheduler", ["x"])
    async with asyncio.timeout(30):
        await batcher.stop()
