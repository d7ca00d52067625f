"""The outbox: what is committed goes out, once or again under the same id, and stays readable as the feed."""

from __future__ import annotations

import asyncio

import pytest

from schemas.base import Message
from schemas.errors import Ql3Error
from services.kit import outbox
from services.kit.clock import ManualClock
from services.kit.database import Database, Statement, Transaction
from services.kit.outbox import Pruner, Relay, read_feed
from tests.fixtures_database import DatabaseFor, reopen, shift_clock

DAY_MS = 86_400_000


class Happened(Message, frozen=True, kw_only=True, tag="thing.happened/1"):
    n: int


class FakeBus:
    """Stores what it is given, as a stream does: a repeat of an id is dropped. Refuses while `down`."""

    def __init__(self) -> None:
        self.down = False
        self.refuse: set[int] = set()
        self.stored: dict[str, tuple[str, bytes]] = {}
        self.calls = 0
        self.entered = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def publish_many(self, items, *, facts=()):
        self.calls += 1
        self.entered.set()
        await self.may_answer.wait()
        if self.down:
            return [Ql3Error("unavailable") for _ in items]
        outcomes: list[Exception | None] = []
        for subject, payload, headers in items:
            if int(payload.rpartition(b":")[2].rstrip(b"}")) in self.refuse:
                outcomes.append(Ql3Error("unavailable"))
                continue
            self.stored.setdefault(headers["Nats-Msg-Id"], (subject, payload))
            outcomes.append(None)
        return outcomes

    def numbers(self) -> list[int]:
        return [int(payload.rpartition(b":")[2].rstrip(b"}")) for _, payload in self.stored.values()]


@pytest.fixture
def bus() -> FakeBus:
    return FakeBus()


async def write(database: Database, *numbers: int) -> None:
    async def work(tx: Transaction) -> None:
        await outbox.facts(tx, [(f"ql3.evt.thing.default.{n}.happened", Happened(n=n)) for n in numbers])

    await database.transact(work)


async def test_a_committed_fact_is_published_once_with_its_headers(database: Database, bus: FakeBus):
    ids = []

    async def work(tx: Transaction) -> None:
        ids.append(await outbox.fact(tx, "ql3.evt.thing.default.1.happened", Happened(n=1)))

    await database.transact(work)
    relay = Relay(database, bus)
    assert await relay.step() is None
    assert await relay.step() is None
    assert bus.stored == {ids[0]: ("ql3.evt.thing.default.1.happened", b'{"schema":"thing.happened/1","n":1}')}
    assert bus.calls == 1


async def test_a_rolled_back_fact_is_never_published(database: Database, bus: FakeBus):
    async def work(tx: Transaction) -> None:
        await outbox.fact(tx, "ql3.evt.thing.default.1.happened", Happened(n=1))
        raise LookupError

    with pytest.raises(LookupError):
        await database.transact(work)
    assert not database.bell(outbox.BELL).is_set()
    assert await Relay(database, bus).step() is None
    assert bus.stored == {}


async def test_a_commit_rings_the_relay(database: Database, bus: FakeBus):
    relay = Relay(database, bus)
    assert not relay.bell.is_set()
    await write(database, 1)
    assert relay.bell.is_set()


async def test_orders_and_facts_go_out_in_the_order_of_their_ids(database: Database, bus: FakeBus):
    async def work(tx: Transaction) -> None:
        await outbox.order(tx, "ql3.cmd.dispatcher.submit", Happened(n=1))
        await outbox.facts(tx, [("ql3.evt.thing.default.x.happened", Happened(n=n)) for n in (2, 3)])
        await outbox.orders(tx, [("ql3.cmd.dispatcher.submit", Happened(n=4))])

    await database.transact(work)
    await Relay(database, bus).step()
    assert bus.numbers() == [1, 2, 3, 4]


async def test_a_full_batch_says_that_more_waits(database: Database, bus: FakeBus):
    await write(database, *range(5))
    relay = Relay(database, bus, batch=2)
    assert [await relay.step() for _ in range(3)] == [True, True, None]
    assert bus.numbers() == list(range(5))


async def test_a_bus_that_is_down_loses_nothing_and_is_asked_ever_more_seldom(database: Database, bus: FakeBus):
    await write(database, 1, 2)
    bus.down = True
    clock = ManualClock()
    relay = Relay(database, bus, monotonic=clock.now_ms)
    pauses = []
    for _ in range(8):
        pauses.append(pause := await relay.step())
        assert await relay.step() == pause  # rung too early: nothing is sent
        clock.advance(round(pause * 1000))
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    assert bus.calls == 8
    bus.down = False
    assert await relay.step() is None
    assert bus.numbers() == [1, 2]
    bus.down = True
    await write(database, 3)
    assert await relay.step() == 0.05


async def test_what_the_bus_took_is_marked_though_its_neighbour_was_refused(database: Database, bus: FakeBus):
    await write(database, 1, 2, 3)
    bus.refuse = {2}
    clock = ManualClock()
    relay = Relay(database, bus, monotonic=clock.now_ms)
    assert await relay.step() == 0.05
    assert bus.numbers() == [1, 3]
    bus.refuse = set()
    clock.advance(50)
    calls = bus.calls
    assert await relay.step() is None
    assert bus.numbers() == [1, 3, 2]
    assert bus.calls == calls + 1


async def test_a_relay_that_dies_before_its_mark_repeats_the_same_ids(database: Database, bus: FakeBus):
    await write(database, 1)
    bus.may_answer.clear()
    dying = asyncio.create_task(Relay(database, bus).step())
    await asyncio.wait_for(bus.entered.wait(), 10)
    dying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dying
    bus.may_answer.set()
    assert await Relay(database, bus).step() is None
    assert bus.numbers() == [1]
    assert bus.calls == 2


async def test_a_message_beyond_the_limit_is_refused_before_it_is_stored(database: Database):
    class Large(Message, frozen=True, kw_only=True, tag="thing.large/1"):
        text: str

    with pytest.raises(Ql3Error) as refused:
        await database.transact(lambda tx: outbox.fact(tx, "ql3.evt.x", Large(text="x" * 600_000)))
    assert refused.value.code == "too_large"


async def test_two_replicas_publish_every_row_and_none_twice(database_on: DatabaseFor):
    database = await database_on("postgresql", "plain")
    await write(database, *range(6))
    first, second = FakeBus(), FakeBus()
    first.may_answer.clear()
    holding = asyncio.create_task(Relay(database, first, batch=3).step())
    await asyncio.wait_for(first.entered.wait(), 10)
    other = await reopen(database)
    assert await Relay(other, second, batch=6).step() is None
    assert second.numbers() == [3, 4, 5]
    first.may_answer.set()
    assert await holding is True
    assert first.numbers() == [0, 1, 2]
    await other.close()


async def test_the_writer_does_not_wait_for_the_bus(database_on: DatabaseFor, bus: FakeBus):
    database = await database_on("sqlite", "plain")
    await write(database, 1)
    bus.may_answer.clear()
    publishing = asyncio.create_task(Relay(database, bus).step())
    await asyncio.wait_for(bus.entered.wait(), 10)
    await asyncio.wait_for(write(database, 2), 10)
    bus.may_answer.set()
    await publishing


# Feed.


async def feed(database: Database, after: str | None, limit: int = 256, subjects: tuple[str, ...] = ()):
    return await database.read(lambda tx: read_feed(tx, after, limit, subjects))


def numbers(page) -> list[int]:
    return [int(bytes(item.payload).rpartition(b":")[2].rstrip(b"}")) for item in page.items]


async def test_the_feed_pages_through_facts_in_order_published_or_not(database: Database, bus: FakeBus):
    await write(database, 1, 2, 3)
    await Relay(database, bus).step()
    await write(database, 4, 5)
    seen: list[int] = []
    after = None
    for _ in range(3):
        page = await feed(database, after, 2)
        seen += numbers(page)
        after = page.position
    assert seen == [1, 2, 3, 4, 5]
    assert not page.more
    assert (await feed(database, after)).items == []
    assert (await feed(database, after)).position == after
    assert not page.gap


class Wide(Message, frozen=True, kw_only=True, tag="thing.wide/1"):
    text: str


async def test_a_page_of_the_feed_fits_into_a_message(database: Database):
    async def work(tx: Transaction) -> None:
        await outbox.facts(tx, [(f"ql3.evt.thing.default.{n}.wide", Wide(text="x" * 200_000)) for n in range(5)])
        await outbox.fact(tx, "ql3.evt.thing.default.5.wide", Wide(text="x" * 520_000))

    await database.transact(work)
    sizes, after, more = [], None, True
    while more:
        page = await feed(database, after)
        sizes.append([item.subject.split(".")[4] for item in page.items])
        after, more = page.position, page.more
    assert sizes == [["0", "1"], ["2", "3"], ["4"], ["5"]]


async def test_the_feed_holds_facts_only_and_only_the_wanted_ones(database: Database):
    async def work(tx: Transaction) -> None:
        await outbox.order(tx, "ql3.cmd.dispatcher.submit", Happened(n=1))
        await outbox.fact(tx, "ql3.evt.run.default.a.queued", Happened(n=2))
        await outbox.fact(tx, "ql3.evt.task.default.a.saved", Happened(n=3))

    await database.transact(work)
    assert numbers(await feed(database, None)) == [2, 3]
    assert numbers(await feed(database, None, subjects=("ql3.evt.run.",))) == [2]


async def test_the_feed_shows_nothing_that_an_open_transaction_may_still_precede(database_on: DatabaseFor):
    database = await database_on("postgresql", "plain")
    other = await reopen(database)
    written, may_commit = asyncio.Event(), asyncio.Event()

    async def slow(tx: Transaction) -> None:
        await outbox.fact(tx, "ql3.evt.thing.default.1.happened", Happened(n=1))
        written.set()
        await may_commit.wait()

    late = asyncio.create_task(other.transact(slow))
    await asyncio.wait_for(written.wait(), 10)
    await write(database, 2)
    page = await feed(database, None)
    assert numbers(page) == []
    may_commit.set()
    await late
    page = await feed(database, page.position)
    assert numbers(page) == [1, 2]
    await other.close()


@pytest.mark.parametrize("after", ["x", "1.2.3" * 20, "-1", "²", "9" * 20])
async def test_a_position_that_is_none_is_refused(database: Database, after: str):
    with pytest.raises(Ql3Error) as refused:
        await feed(database, after)
    assert refused.value.field == "after"


async def test_a_position_of_another_life_starts_anew_and_says_so(database: Database):
    await write(database, 1)
    page = await feed(database, "999999999999.zzz" if database.dialect == "postgresql" else "999999999999")
    assert numbers(page) == [1]
    assert page.gap


# Pruning.

_COUNT = Statement("SELECT count(*) AS n FROM outbox")


async def count(database: Database) -> int:
    row = await database.read(lambda tx: tx.fetch_one(_COUNT))
    assert row is not None
    return row["n"]


async def test_published_rows_go_after_a_day_and_unpublished_ones_never(database: Database, bus: FakeBus):
    await write(database, 1, 2)
    bus.refuse = {2}
    await Relay(database, bus).step()
    pruner = Pruner(database)
    await shift_clock(database, DAY_MS - 10_000)
    assert await pruner.step() is None
    assert await count(database) == 2
    await shift_clock(database, 20_000)
    assert await pruner.step() is None
    assert await count(database) == 1
    bus.refuse = set()
    await Relay(database, bus).step()
    assert bus.numbers() == [1, 2]


async def test_a_reader_that_was_away_for_longer_than_a_day_is_told(database: Database, bus: FakeBus):
    await write(database, 1)
    early = await feed(database, None)
    await write(database, 2)
    late = await feed(database, early.position)
    await Relay(database, bus).step()
    await shift_clock(database, DAY_MS + 10_000)
    await Pruner(database).step()
    await write(database, 3)
    assert (await feed(database, early.position)).gap
    page = await feed(database, late.position)
    assert not page.gap
    assert numbers(page) == [3]
