"""The bus while its server is killed, away, or has lost everything it stored."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import signal
from pathlib import Path

import pytest

from schemas.base import Message
from schemas.endpoints import Endpoint
from schemas.errors import Ql3Error
from schemas.subjects import STREAMS, command, event
from services.kit.bus import Bus, Caller, Delivery, Route
from services.kit.bus.connection import Connection
from services.kit.bus.streams import jetstream_api
from services.kit.natsserver import NatsServer
from tests.fixtures_nats import WAIT_S, WORKER, BusFactory, Heard


class Ask(Message, frozen=True, kw_only=True, tag="test.ask/1"):
    text: str


class Order(Message, frozen=True, kw_only=True, tag="test.order/1"):
    number: int


ASK = Endpoint("dispatcher", "test.ask", Ask, Ask)
SUBMIT = command("dispatcher", "submit")


async def echo(question: Ask, caller: Caller) -> Ask:
    return question


async def asked(bus: Bus, text: str) -> None:
    """Ask until it is answered, as a client would."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                answer = await bus.request(ASK, Ask(text=text), timeout=1.0)
            except Ql3Error as error:
                if error.code != "unavailable":
                    raise
            else:
                assert answer == Ask(text=text)
                return


async def stored(bus: Bus, order: Order) -> None:
    """Publish until it is stored, as an outbox relay would."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                await bus.publish(SUBMIT, order, msg_id=f"order-{order.number}")
            except Ql3Error as error:
                if error.code != "unavailable":
                    raise
            else:
                return


async def restart(server: NatsServer, *buses: Bus, wipe: bool = False) -> None:
    """Kill the server as a crash would, start it again, and return when every bus has a new connection."""
    before = [bus._connection.generation for bus in buses]
    await server.kill()
    if wipe:
        shutil.rmtree(server.store)
    await server._launch()
    async with asyncio.timeout(WAIT_S):
        for bus, generation in zip(buses, before, strict=True):
            while True:
                with contextlib.suppress(Ql3Error):
                    await bus.flush()
                    if bus._connection.generation > generation:
                        break
                await asyncio.sleep(0)


@pytest.fixture
async def unkept(nats_server: NatsServer) -> NatsServer:
    """The test's server without its keeper: the test itself says when it comes back."""
    keeper, nats_server._keeper = nats_server._keeper, None
    assert keeper is not None
    keeper.cancel()
    await asyncio.gather(keeper, return_exceptions=True)
    return nats_server


async def collecting(bus: Bus, heard: Heard) -> None:
    async def handle(batch: list[Order]) -> None:
        await heard.add(*(order.number for order in batch))

    await bus.consume("dispatcher", {Order: handle})


async def test_everything_goes_on_after_a_restart(unkept: NatsServer, bus_for: BusFactory) -> None:
    sender, receiver = await bus_for("scheduler"), await bus_for("dispatcher")
    orders, facts = Heard(), Heard()

    async def fact(delivery: Delivery) -> None:
        await facts.add(delivery.decode(Order).number)

    await receiver.serve("dispatcher", "1.0.0", [Route(ASK, echo)])
    await receiver.on_event("ql3.evt.task.>", fact)
    await collecting(receiver, orders)
    await stored(sender, Order(number=1))
    await orders.count(1)
    await restart(unkept, sender, receiver)
    await asked(sender, "after")
    await stored(sender, Order(number=2))
    await orders.until(lambda items: 2 in items)
    await sender.publish(event("task", "default", "nightly", "changed"), Order(number=3))
    await facts.count(1)


async def test_orders_survive_a_crash_of_the_server(unkept: NatsServer, bus_for: BusFactory) -> None:
    sender, receiver = await bus_for("scheduler"), await bus_for("dispatcher")
    for number in range(50):
        await stored(sender, Order(number=number))
    await restart(unkept, sender, receiver)
    heard = Heard()
    await collecting(receiver, heard)
    await heard.until(lambda items: set(items) == set(range(50)))


@pytest.mark.parametrize("while_running", [False, True])
async def test_a_wiped_store_is_declared_again(unkept: NatsServer, bus_for: BusFactory, while_running: bool) -> None:
    """Of a work queue that is gone nothing comes back: senders ring again from their own tables."""
    sender, receiver = await bus_for("scheduler"), await bus_for("dispatcher")
    worker = await bus_for("worker", worker=WORKER, streams=False)
    heard, offered = Heard(), Heard()

    async def offer(batch: list[Order]) -> None:
        await offered.add(*batch)

    await collecting(receiver, heard)
    await worker.consume_worker(WORKER, {Order: offer})
    await stored(sender, Order(number=1))
    await heard.count(1)
    if while_running:
        shutil.rmtree(unkept.store)
        await restart(unkept, sender, receiver, worker)
    else:
        await restart(unkept, sender, receiver, worker, wipe=True)
    # The first may fall to a consumer that is not there yet: a work queue keeps it until it is.
    await stored(sender, Order(number=2))
    await heard.until(lambda items: 2 in items)
    await receiver.publish(f"ql3.worker.{WORKER}.offer", Order(number=3))
    await offered.count(1)
    maintenance = await bus_for("maintenance", streams=False)
    names = (await jetstream_api(maintenance._connection, "STREAM.NAMES"))["streams"]
    assert sorted(names) == sorted(stream.name for stream in STREAMS)


async def test_a_store_wiped_under_a_running_server_mends_itself(nats_server: NatsServer, bus_for: BusFactory) -> None:
    """The server works on until it needs a new file, then takes nothing more; its keeper starts it anew."""
    sender, receiver = await bus_for("scheduler"), await bus_for("dispatcher")
    heard = Heard()
    await collecting(receiver, heard)
    await stored(sender, Order(number=1))
    await heard.count(1)
    pid = nats_server.pid
    shutil.rmtree(nats_server.store)
    bulk = [("ql3.evt.task.default.x.filled", b"x" * 900_000, {"Nats-Msg-Id": f"fill-{n}"}) for n in range(40)]
    # Whether these go through depends on how quickly the server is started anew; what counts is what comes after.
    await sender.publish_many(bulk, timeout=2.0)
    await stored(sender, Order(number=2))
    await heard.until(lambda items: 2 in items)
    async with asyncio.timeout(WAIT_S):
        while nats_server.pid in (pid, None):  # noqa: ASYNC110 - another process's state has no event
            await asyncio.sleep(0.01)


async def test_streams_deleted_under_a_running_server_are_declared_again(
    nats_server: NatsServer, bus_for: BusFactory
) -> None:
    sender, receiver = await bus_for("scheduler"), await bus_for("dispatcher")
    maintenance = await bus_for("maintenance", streams=False)
    heard = Heard()
    await collecting(receiver, heard)
    await stored(sender, Order(number=1))
    await heard.count(1)
    for stream in STREAMS:
        await jetstream_api(maintenance._connection, f"STREAM.DELETE.{stream.name}")
    await sender.publish(SUBMIT, Order(number=2))
    await heard.until(lambda items: 2 in items)


async def test_a_consumer_deleted_by_hand_comes_back(nats_server: NatsServer, bus_for: BusFactory) -> None:
    sender, receiver = await bus_for("scheduler"), await bus_for("dispatcher")
    maintenance = await bus_for("maintenance", streams=False)
    heard = Heard()
    await collecting(receiver, heard)
    await jetstream_api(maintenance._connection, "CONSUMER.DELETE.QL3_COMMANDS.dispatcher")
    await stored(sender, Order(number=1))
    await heard.count(1)


async def test_nothing_spins_while_the_server_is_away(
    unkept: NatsServer, bus_for: BusFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = await bus_for("dispatcher")
    heard = Heard()
    await collecting(receiver, heard)
    attempts = Heard()
    connect = Connection._connect

    async def counting(self: Connection, server: str) -> bool:
        await attempts.add(asyncio.get_running_loop().time())
        return await connect(self, server)

    monkeypatch.setattr(Connection, "_connect", counting)
    await unkept.kill()
    times = await attempts.count(6)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times[1:])]  # type: ignore[operator]
    assert sum(gaps) >= 0.5, "the wait between attempts grows"
    assert receiver.health() == ["no connection to the message server"]
    await unkept._launch()
    sender = await bus_for("scheduler")
    await stored(sender, Order(number=1))
    await heard.count(1)


async def test_publishing_goes_through_an_outage_without_loss_or_double(
    unkept: NatsServer, bus_for: BusFactory
) -> None:
    """What was not confirmed is sent again under its own id, and stored once."""
    sender, receiver = await bus_for("scheduler"), await bus_for("dispatcher")
    heard = Heard()
    await collecting(receiver, heard)
    numbers = range(400)
    begun = Heard()

    async def publish_all() -> None:
        for number in numbers:
            await stored(sender, Order(number=number))
            await begun.add(number)

    publishing = asyncio.create_task(publish_all())
    for when in (50, 150, 250):
        await begun.count(when)
        await restart(unkept, sender, receiver)
    async with asyncio.timeout(WAIT_S):
        await publishing
    await heard.until(lambda items: set(items) == set(numbers))


async def test_a_publish_waits_for_a_server_that_is_away(unkept: NatsServer, bus_for: BusFactory) -> None:
    sender = await bus_for("scheduler")
    await unkept.kill()
    publishing = asyncio.create_task(sender.publish(SUBMIT, Order(number=1), timeout=WAIT_S))
    await unkept._launch()
    await publishing


async def test_a_publish_ends_in_time_when_nobody_comes_back(unkept: NatsServer, bus_for: BusFactory) -> None:
    sender = await bus_for("scheduler")
    await unkept.kill()
    with pytest.raises(Ql3Error) as caught:
        await sender.publish(SUBMIT, Order(number=1), timeout=0.2)
    assert caught.value.code == "unavailable"


async def test_an_open_question_fails_at_once_when_the_connection_ends(unkept: NatsServer, bus_for: BusFactory) -> None:
    entered, release = asyncio.Event(), asyncio.Event()

    async def slow(question: Ask, caller: Caller) -> Ask:
        entered.set()
        await release.wait()
        return question

    answering, asking = await bus_for("dispatcher"), await bus_for("scheduler")
    await answering.serve("dispatcher", "1.0.0", [Route(ASK, slow)])
    await answering.flush()
    question = asyncio.create_task(asking.request(ASK, Ask(text="x"), timeout=600.0))
    await entered.wait()
    await unkept.kill()
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(Ql3Error) as caught:
            await question
    assert caught.value.code == "unavailable"
    release.set()


async def test_a_handler_at_work_is_not_cancelled_by_a_lost_connection(unkept: NatsServer, bus_for: BusFactory) -> None:
    """It may be inside a transaction; what it did is committed and its answer is asked for again."""
    entered, release, finished = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def handle(batch: list[Order]) -> None:
        entered.set()
        await release.wait()
        finished.set()

    sender, receiver = await bus_for("scheduler"), await bus_for("dispatcher")
    await receiver.consume("dispatcher", {Order: handle})
    await stored(sender, Order(number=1))
    await entered.wait()
    await restart(unkept, sender, receiver)
    release.set()
    async with asyncio.timeout(WAIT_S):
        await finished.wait()


async def test_stopping_does_not_wait_for_a_server_that_is_away(unkept: NatsServer, bus_for: BusFactory) -> None:
    receiver = await bus_for("dispatcher")
    heard = Heard()
    await collecting(receiver, heard)
    await receiver.serve("dispatcher", "1.0.0", [Route(ASK, echo)])
    await unkept.kill()
    loop = asyncio.get_running_loop()
    started = loop.time()
    await receiver.stop()
    assert loop.time() - started < 8.0


async def test_a_server_that_asks_everybody_to_leave_is_left_and_joined_again(
    unkept: NatsServer, bus_for: BusFactory
) -> None:
    sender, receiver = await bus_for("scheduler"), await bus_for("dispatcher")
    await receiver.serve("dispatcher", "1.0.0", [Route(ASK, echo)])
    await unkept.kill(signal.SIGTERM)
    await unkept._launch()
    await asked(sender, "again")


async def test_a_wrong_password_is_told_at_start(nats_server: NatsServer) -> None:
    import msgspec

    options = msgspec.structs.replace(nats_server.options("scheduler"), password="wrong")
    bus = Bus(options)
    with pytest.raises(Ql3Error) as caught:
        await bus.start(wait_s=600.0)
    assert caught.value.code == "unavailable"
    assert "user or password" in str(caught.value)
    assert "wrong" not in str(caught.value)


async def test_no_server_is_told_at_start(tmp_path: Path) -> None:
    from services.kit.bus import BusOptions

    bus = Bus(BusOptions(servers=("nats://127.0.0.1:9",), service="scheduler"))
    with pytest.raises(Ql3Error) as caught:
        await bus.start(wait_s=0.3)
    assert "no server answered" in str(caught.value)
