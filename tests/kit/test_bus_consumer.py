"""Orders that fail: repeated, run one by one, buried with their reason, and sent again by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
from nats.aio.msg import Msg

from schemas.base import Message, encode
from schemas.errors import Ql3Error
from schemas.limits import MAX_DELIVERIES
from schemas.subjects import command
from services.kit.bus import Bus
from services.kit.bus.connection import Connection
from services.kit.bus.dead import CUT_BYTES
from services.kit.bus.envelope import place_of
from services.kit.bus.streams import command_consumer, jetstream_api
from tests.fixtures_nats import WAIT_S, BusFactory, Heard


class Order(Message, frozen=True, kw_only=True, tag="test.order/1"):
    number: int


SUBMIT = command("dispatcher", "submit")


async def test_one_bad_item_does_not_hold_up_the_rest_of_its_batch(bus_for: BusFactory) -> None:
    sender = await bus_for("scheduler")
    receiver = await bus_for("dispatcher", redelivery_s=0.001)
    batches: list[list[int]] = []
    heard = Heard()

    async def handle(batch: list[Order]) -> None:
        batches.append([order.number for order in batch])
        if any(order.number == 3 for order in batch):
            raise RuntimeError("cannot")
        await heard.add(*(order.number for order in batch))

    for number in range(6):
        await sender.publish(SUBMIT, Order(number=number))
    await receiver.consume("dispatcher", {Order: handle})
    assert sorted(await heard.count(5)) == [0, 1, 2, 4, 5]
    letter = await buried(receiver, await bus_for("maintenance", streams=False))
    assert batches[:7] == [[0, 1, 2, 3, 4, 5], [0], [1], [2], [3], [4], [5]]
    assert letter.payload == encode(Order(number=3))
    assert (letter.reason, letter.subject, letter.deliveries) == ("too-many-deliveries", SUBMIT, MAX_DELIVERIES + 1)
    # Delivered eight times to the handler: once in the batch and alone, then seven times alone.
    assert sum(1 for batch in batches if 3 in batch) == 1 + MAX_DELIVERIES
    await left(receiver, 0)


async def test_a_handler_may_answer_item_by_item(bus_for: BusFactory) -> None:
    sender, receiver = await bus_for("scheduler"), await bus_for("dispatcher", redelivery_s=0.01)
    failed = 0
    heard = Heard()

    async def handle(batch: list[Order]) -> list[BaseException | None]:
        nonlocal failed
        outcomes: list[BaseException | None] = []
        for order in batch:
            if order.number == 1 and failed < 2:
                failed += 1
                outcomes.append(Ql3Error("unavailable"))
            else:
                outcomes.append(None)
                await heard.add(order.number)
        return outcomes

    for number in range(3):
        await sender.publish(SUBMIT, Order(number=number))
    await receiver.consume("dispatcher", {Order: handle})
    assert sorted(await heard.count(3)) == [0, 1, 2]
    assert failed == 2
    await left(receiver, 0)


async def test_an_outage_of_the_database_uses_up_no_deliveries(bus_for: BusFactory) -> None:
    sender, receiver = await bus_for("scheduler"), await bus_for("dispatcher", redelivery_s=0.001)
    tried, heard = Heard(), Heard()
    away = True

    async def handle(batch: list[Order]) -> None:
        await tried.add(len(batch))
        if away:
            raise Ql3Error("database_unavailable")
        await heard.add(*(order.number for order in batch))

    for number in range(3):
        await sender.publish(SUBMIT, Order(number=number))
    await receiver.consume("dispatcher", {Order: handle})
    await tried.count(4)
    away = False
    assert sorted(await heard.count(3)) == [0, 1, 2]
    assert set(tried.items) == {3}, "always the whole batch, never item by item"
    info = await jetstream_api(receiver._connection, "CONSUMER.INFO.QL3_COMMANDS.dispatcher")
    assert info["num_redelivered"] == 0
    await left(receiver, 0)


@pytest.mark.parametrize(
    ("payload", "headers"),
    [
        (b"not json", {}),
        (b'{"schema":"test.unknown/9","number":1}', {"Ql3-Schema": "test.unknown/9"}),
        (b'{"schema":"test.order/1","number":"one"}', {"Ql3-Schema": "test.order/1"}),
        (b"", {}),
    ],
)
async def test_what_cannot_be_decoded_is_dead_at_once(
    bus_for: BusFactory, payload: bytes, headers: Mapping[str, str]
) -> None:
    sender, receiver = await bus_for("scheduler"), await bus_for("dispatcher")
    heard = Heard()

    async def handle(batch: list[Order]) -> None:
        await heard.add(*batch)

    assert await sender.publish_many([(SUBMIT, payload, {"Nats-Msg-Id": "x", **headers})]) == [None]
    await sender.publish(SUBMIT, Order(number=1))
    await receiver.consume("dispatcher", {Order: handle})
    letter = await buried(receiver, await bus_for("maintenance", streams=False))
    assert (letter.payload, letter.reason, letter.service, letter.deliveries) == (
        payload,
        "undecodable",
        "dispatcher",
        1,
    )
    assert dict(letter.headers) == dict(headers)
    assert await heard.count(1) == [Order(number=1)]


async def test_a_handler_may_say_that_no_repetition_helps(bus_for: BusFactory) -> None:
    sender, receiver = await bus_for("scheduler"), await bus_for("dispatcher")

    async def handle(batch: list[Order]) -> list[BaseException | None]:
        return [Ql3Error("schema_unsupported") for _ in batch]

    await sender.publish(SUBMIT, Order(number=1))
    await receiver.consume("dispatcher", {Order: handle})
    letter = await buried(receiver, await bus_for("maintenance", streams=False))
    assert (letter.reason, letter.deliveries) == ("schema_unsupported", 1)


async def test_a_message_that_kills_its_reader_is_buried_before_it_is_decoded(bus_for: BusFactory) -> None:
    """Deliveries are counted by the server, so that it does not matter that no reader lived to count them."""
    sender = await bus_for("scheduler")
    await sender.publish(SUBMIT, Order(number=13))
    reader = await bus_for("dispatcher")
    await reader._streams.declare_consumer(command_consumer("dispatcher"))
    for _ in range(MAX_DELIVERIES):
        message = await take_one(reader)
        await reader._connection.publish(message.reply, b"-NAK", None)
    survivor = await bus_for("dispatcher")
    heard = Heard()

    async def handle(batch: list[Order]) -> None:
        await heard.add(*batch)

    await survivor.consume("dispatcher", {Order: handle})
    letter = await buried(survivor, await bus_for("maintenance", streams=False))
    assert (letter.reason, letter.deliveries) == ("too-many-deliveries", MAX_DELIVERIES + 1)
    assert heard.items == []


async def test_a_consumer_has_no_bound_on_deliveries_and_one_filter(bus_for: BusFactory) -> None:
    """A bound would strand the message in the work queue; a finer filter beside it is refused by the server."""
    receiver = await bus_for("dispatcher")
    await receiver._streams.declare_consumer(command_consumer("dispatcher"))
    info = await jetstream_api(receiver._connection, "CONSUMER.INFO.QL3_COMMANDS.dispatcher")
    assert info["config"]["max_deliver"] == -1
    assert info["config"]["filter_subject"] == "ql3.cmd.dispatcher.>"
    maintenance = await bus_for("maintenance", streams=False)
    finer = {"name": "finer", "durable_name": "finer", "ack_policy": "explicit", "filter_subject": SUBMIT}
    with pytest.raises(Exception, match="not unique on workqueue"):
        await jetstream_api(
            maintenance._connection,
            f"CONSUMER.CREATE.QL3_COMMANDS.finer.{SUBMIT}",
            {"stream_name": "QL3_COMMANDS", "action": "create", "config": finer},
        )


async def test_a_repeat_under_the_same_id_is_dropped_even_after_it_was_consumed(bus_for: BusFactory) -> None:
    """Why a ring is a new outbox row."""
    sender, receiver = await bus_for("scheduler"), await bus_for("dispatcher")
    heard = Heard()

    async def handle(batch: list[Order]) -> None:
        await heard.add(*(order.number for order in batch))

    await receiver.consume("dispatcher", {Order: handle})
    await sender.publish(SUBMIT, Order(number=1), msg_id="one")
    await heard.count(1)
    await left(receiver, 0)
    await sender.publish(SUBMIT, Order(number=1), msg_id="one")
    await sender.publish(SUBMIT, Order(number=2), msg_id="two")
    assert await heard.count(2) == [1, 2]


async def test_a_slow_handler_keeps_its_orders(bus_for: BusFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is told that work goes on, before it would hand the order to another reader."""
    said = Heard()
    publish = Connection.publish

    async def spying(self: Connection, subject: str, payload: bytes, *args: object, **kwargs: object) -> None:
        await publish(self, subject, payload, *args, **kwargs)  # type: ignore[arg-type]
        if subject.startswith("$JS.ACK."):
            await said.add(payload)

    monkeypatch.setattr(Connection, "publish", spying)
    sender, receiver = await bus_for("scheduler"), await bus_for("dispatcher", ack_wait_s=0.3)
    release = asyncio.Event()

    async def handle(batch: list[Order]) -> None:
        await release.wait()

    await sender.publish(SUBMIT, Order(number=1))
    await receiver.consume("dispatcher", {Order: handle})
    await said.until(lambda items: items.count(b"+WPI") >= 2)
    release.set()
    await said.until(lambda items: b"+ACK" in items)


async def test_stopping_lets_the_batch_at_work_end_and_hands_back_the_rest(bus_for: BusFactory) -> None:
    sender, first = await bus_for("scheduler"), await bus_for("dispatcher")
    entered, release = asyncio.Event(), asyncio.Event()
    done: list[int] = []

    async def slow(batch: list[Order]) -> None:
        entered.set()
        await release.wait()
        done.extend(order.number for order in batch)

    await first.consume("dispatcher", {Order: slow})
    await sender.publish(SUBMIT, Order(number=1))
    await entered.wait()
    await sender.publish(SUBMIT, Order(number=2))
    stopping = asyncio.create_task(first.stop())
    release.set()
    await stopping
    assert done == [1]
    second = await bus_for("dispatcher")
    heard = Heard()

    async def handle(batch: list[Order]) -> None:
        await heard.add(*(order.number for order in batch))

    await second.consume("dispatcher", {Order: handle})
    assert await heard.count(1) == [2]


@pytest.mark.parametrize("by", ["maintenance", "gateway"])
async def test_a_dead_letter_can_be_sent_again(bus_for: BusFactory, by: str) -> None:
    sender, receiver = await bus_for("scheduler"), await bus_for("dispatcher")
    mended = False
    heard = Heard()

    async def handle(batch: list[Order]) -> list[BaseException | None]:
        if mended:
            await heard.add(*batch)
            return [None] * len(batch)
        return [Ql3Error("schema_unsupported") for _ in batch]

    await receiver.consume("dispatcher", {Order: handle})
    await sender.publish(SUBMIT, Order(number=7), msg_id="first")
    maintenance = await bus_for(by, streams=False)
    letter = await buried(receiver, maintenance)
    mended = True
    msg_id = await maintenance.replay(letter.sequence)
    assert msg_id != "first"
    assert await heard.count(1) == [Order(number=7)]
    assert await maintenance.dead_letters() == []
    with pytest.raises(Ql3Error) as caught:
        await maintenance.replay(letter.sequence)
    assert caught.value.code == "not_found"


async def test_of_what_is_too_large_to_be_ours_only_the_beginning_is_kept(bus_for: BusFactory) -> None:
    sender, receiver = await bus_for("scheduler"), await bus_for("dispatcher")

    async def handle(batch: list[Order]) -> None:
        raise AssertionError("it cannot be decoded")

    size = 900_000
    assert await sender.publish_many([(SUBMIT, b"x" * size, {"Nats-Msg-Id": "big"})]) == [None]
    await receiver.consume("dispatcher", {Order: handle})
    maintenance = await bus_for("maintenance", streams=False)
    letter = await buried(receiver, maintenance)
    assert (len(letter.payload), letter.cut) == (CUT_BYTES, size)
    with pytest.raises(Ql3Error) as caught:
        await maintenance.replay(letter.sequence)
    assert caught.value.code == "too_large"


async def test_dead_letters_are_paged_and_told_apart_by_service(bus_for: BusFactory) -> None:
    sender = await bus_for("scheduler")
    maintenance = await bus_for("maintenance", streams=False)
    for number in range(3):
        items = [(f"ql3.dead.scheduler.test-{number}", b"{}", {"Nats-Msg-Id": f"d{number}"})]
        assert await sender.publish_many(items) == [None]
    assert [letter.reason for letter in await maintenance.dead_letters(limit=2)] == ["test-0", "test-1"]
    assert [letter.reason for letter in await maintenance.dead_letters(after=2)] == ["test-2"]
    assert await maintenance.dead_letters(service="dispatcher") == []


def test_the_place_of_a_message_is_read_from_both_forms_of_its_ack_subject() -> None:
    short = place_of("$JS.ACK.S.c.3.10.20.1700000000000000000.5")
    long = place_of("$JS.ACK.domain.hash.S.c.3.10.20.1700000000000000000.5.token")
    assert short == long
    assert short is not None
    assert (short.stream, short.consumer, short.delivered, short.sequence) == ("S", "c", 3, 10)
    assert place_of("_INBOX.x") is None
    assert place_of("") is None
    assert place_of("$JS.ACK.S.c.x.10.20.17.5") is None


async def buried(receiver: Bus, maintenance: Bus):
    """The first dead letter of the receiver's service, when it is there."""
    async with asyncio.timeout(WAIT_S):
        while not (letters := await maintenance.dead_letters(service=receiver.options.service, limit=1)):
            await receiver.flush()
    return letters[0]


async def left(receiver: Bus, number: int) -> None:
    """Return when the service's consumer has exactly `number` orders left, acks included."""
    async with asyncio.timeout(WAIT_S):
        while True:
            info = await jetstream_api(receiver._connection, f"CONSUMER.INFO.QL3_COMMANDS.{receiver.options.service}")
            if info["num_pending"] + info["num_ack_pending"] == number:
                return


async def take_one(bus: Bus) -> Msg:
    """One message of the service's consumer, as a reader that dies would take it."""
    taken: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()

    async def take(message: Msg) -> None:
        if message.reply and not taken.done():
            taken.set_result(message)

    inbox = f"{bus._connection.inbox}.test"
    subscription = await bus._connection.subscribe(inbox, take)
    pull = b'{"batch":1,"expires":20000000000}'
    await bus._connection.publish("$JS.API.CONSUMER.MSG.NEXT.QL3_COMMANDS.dispatcher", pull, None, reply=inbox)
    try:
        return await asyncio.wait_for(taken, WAIT_S)
    finally:
        await subscription.close(0.0)
