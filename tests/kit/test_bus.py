"""The bus against a real server: questions, orders, facts, and what the server's tools see."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from schemas.base import Message, encode, schema_of
from schemas.endpoints import Endpoint
from schemas.errors import Ql3Error
from schemas.subjects import command, event
from services.kit.bus import MSG_ID, TRACEPARENT, Bus, Caller, Delivery, Route, current_traceparent, headers_for
from services.kit.bus.streams import jetstream_api
from tests.fixtures_nats import WAIT_S, WORKER, BusFactory, Heard


class Ask(Message, frozen=True, kw_only=True, tag="test.ask/1"):
    text: str


class Told(Message, frozen=True, kw_only=True, tag="test.told/1"):
    text: str


class Order(Message, frozen=True, kw_only=True, tag="test.order/1"):
    number: int


class Other(Message, frozen=True, kw_only=True, tag="test.other/1"):
    number: int


ASK = Endpoint("scheduler", "test.ask", Ask, Told)
BEAT = Endpoint("dispatcher", "workers.beat", Ask, Told, wildcard=True)


async def echo(question: Ask, caller: Caller) -> Told:
    return Told(text=question.text + (f" from {caller.token}" if caller.token else ""))


async def test_a_question_gets_its_typed_answer(bus_for: BusFactory) -> None:
    asked, asker = await bus_for("scheduler"), await bus_for("gateway")
    await asked.serve("scheduler", "1.0.0", [Route(ASK, echo)])
    await asked.flush()
    assert await asker.request(ASK, Ask(text="hello")) == Told(text="hello")


async def test_a_wildcard_endpoint_knows_which_worker_asks(bus_for: BusFactory) -> None:
    asked, asker = await bus_for("dispatcher"), await bus_for("worker", worker=WORKER, streams=False)
    await asked.serve("dispatcher", "1.0.0", [Route(BEAT, echo)])
    await asked.flush()
    assert await asker.request(BEAT, Ask(text="hi"), token=WORKER, timeout=WAIT_S) == Told(text=f"hi from {WORKER}")


async def test_a_refusal_arrives_as_the_same_error(bus_for: BusFactory) -> None:
    async def refuse(question: Ask, caller: Caller) -> Told:
        raise Ql3Error("name_taken", "There is one already.", field="task.name", data={"version": 3})

    asked, asker = await bus_for("scheduler"), await bus_for("gateway")
    await asked.serve("scheduler", "1.0.0", [Route(ASK, refuse)])
    await asked.flush()
    with pytest.raises(Ql3Error) as caught:
        await asker.request(ASK, Ask(text="x"), timeout=WAIT_S)
    error = caught.value
    assert (error.code, error.detail, error.field, error.data) == (
        "name_taken",
        "There is one already.",
        "task.name",
        {"version": 3},
    )


async def test_an_unknown_exception_tells_nothing_to_the_asker(bus_for: BusFactory) -> None:
    async def fail(question: Ask, caller: Caller) -> Told:
        raise RuntimeError("the password is hunter2")

    asked, asker = await bus_for("scheduler"), await bus_for("gateway")
    await asked.serve("scheduler", "1.0.0", [Route(ASK, fail)])
    await asked.flush()
    with pytest.raises(Ql3Error) as caught:
        await asker.request(ASK, Ask(text="x"), timeout=WAIT_S)
    assert caught.value.code == "internal_error"
    assert "hunter2" not in str(caught.value)
    stats = await _control(await bus_for("maintenance", streams=False), "STATS.ql3-scheduler")
    assert b"hunter2" not in stats


async def test_nobody_answering_is_unavailable_at_once(bus_for: BusFactory) -> None:
    asker = await bus_for("gateway")
    with pytest.raises(Ql3Error) as caught:
        await asker.request(ASK, Ask(text="x"), timeout=WAIT_S)
    assert caught.value.code == "unavailable"
    assert "not running" in str(caught.value)


async def test_an_answer_that_does_not_come_is_unavailable(bus_for: BusFactory) -> None:
    release = asyncio.Event()

    async def late(question: Ask, caller: Caller) -> Told:
        await release.wait()
        return Told(text="late")

    asked, asker = await bus_for("scheduler"), await bus_for("gateway")
    await asked.serve("scheduler", "1.0.0", [Route(ASK, late)])
    await asked.flush()
    with pytest.raises(Ql3Error) as caught:
        await asker.request(ASK, Ask(text="x"), timeout=0.05)
    assert caught.value.code == "unavailable"
    release.set()


async def test_an_unreadable_question_names_its_field(bus_for: BusFactory) -> None:
    class AskWrong(Message, frozen=True, kw_only=True, tag="test.ask/1"):
        text: int

    wrong = Endpoint("scheduler", "test.ask", AskWrong, Told)
    asked, asker = await bus_for("scheduler"), await bus_for("gateway")
    await asked.serve("scheduler", "1.0.0", [Route(ASK, echo)])
    await asked.flush()
    with pytest.raises(Ql3Error) as caught:
        await asker.request(wrong, AskWrong(text=7), timeout=WAIT_S)
    assert (caught.value.code, caught.value.field) == ("message_invalid", "text")


async def test_one_slow_question_does_not_hold_up_others(bus_for: BusFactory) -> None:
    release = asyncio.Event()

    async def maybe_slow(question: Ask, caller: Caller) -> Told:
        if question.text == "slow":
            await release.wait()
        return Told(text=question.text)

    asked, asker = await bus_for("scheduler"), await bus_for("gateway")
    await asked.serve("scheduler", "1.0.0", [Route(ASK, maybe_slow, concurrency=2)])
    await asked.flush()
    slow = asyncio.create_task(asker.request(ASK, Ask(text="slow"), timeout=WAIT_S))
    assert await asker.request(ASK, Ask(text="fast"), timeout=WAIT_S) == Told(text="fast")
    assert not slow.done()
    release.set()
    assert await slow == Told(text="slow")


async def test_no_more_than_the_bound_is_handled_at_once(bus_for: BusFactory) -> None:
    running, most = 0, 0
    entered, release = Heard(), asyncio.Event()

    async def count(question: Ask, caller: Caller) -> Told:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await entered.add(question.text)
        await release.wait()
        running -= 1
        return Told(text=question.text)

    asked, asker = await bus_for("scheduler"), await bus_for("gateway")
    await asked.serve("scheduler", "1.0.0", [Route(ASK, count, concurrency=3)])
    await asked.flush()
    questions = [asyncio.create_task(asker.request(ASK, Ask(text=str(n)), timeout=WAIT_S)) for n in range(10)]
    await entered.count(3)
    release.set()
    assert len(await asyncio.gather(*questions)) == 10
    assert most == 3


async def test_stopping_finishes_the_questions_at_work(bus_for: BusFactory) -> None:
    entered, release = asyncio.Event(), asyncio.Event()

    async def slow(question: Ask, caller: Caller) -> Told:
        entered.set()
        await release.wait()
        return Told(text="done")

    asked, asker = await bus_for("scheduler"), await bus_for("gateway")
    await asked.serve("scheduler", "1.0.0", [Route(ASK, slow)])
    await asked.flush()
    question = asyncio.create_task(asker.request(ASK, Ask(text="x"), timeout=WAIT_S))
    await entered.wait()
    stopping = asyncio.create_task(asked.stop())
    release.set()
    assert await question == Told(text="done")
    await stopping


async def test_tools_see_the_service_and_its_endpoints(bus_for: BusFactory) -> None:
    asked, asker = await bus_for("scheduler"), await bus_for("gateway")
    await asked.serve("scheduler", "1.2.3", [Route(ASK, echo)])
    await asked.flush()
    await asker.request(ASK, Ask(text="x"), timeout=WAIT_S)
    looker = await bus_for("maintenance", streams=False)
    ping = msgspec.json.decode(await _control(looker, "PING"))
    assert (ping["type"], ping["name"], ping["version"]) == ("io.nats.micro.v1.ping_response", "ql3-scheduler", "1.2.3")
    info = msgspec.json.decode(await _control(looker, f"INFO.ql3-scheduler.{ping['id']}"))
    assert [(e["name"], e["subject"]) for e in info["endpoints"]] == [("test-ask", "ql3.rpc.scheduler.test.ask")]
    stats = msgspec.json.decode(await _control(looker, "STATS.ql3-scheduler"))
    assert [(e["num_requests"], e["num_errors"]) for e in stats["endpoints"]] == [(1, 0)]


async def test_orders_come_in_batches_by_type_and_are_acked(bus_for: BusFactory) -> None:
    sender, receiver = await bus_for("scheduler"), await bus_for("dispatcher")
    heard = Heard()

    async def orders(batch: list[Order]) -> None:
        assert {type(item) for item in batch} == {Order}
        await heard.add(*batch)

    async def others(batch: list[Other]) -> None:
        assert {type(item) for item in batch} == {Other}
        await heard.add(*batch)

    for number in range(5):
        await sender.publish(command("dispatcher", "submit"), Order(number=number))
        await sender.publish(command("dispatcher", "close"), Other(number=number))
    await receiver.consume("dispatcher", {Order: orders, Other: others})
    items = await heard.count(10)
    assert [i.number for i in items if isinstance(i, Order)] == [0, 1, 2, 3, 4]
    assert len(items) == 10
    await empty(receiver, "QL3_COMMANDS")


async def test_a_worker_reads_only_its_own_orders(bus_for: BusFactory) -> None:
    sender, worker = await bus_for("dispatcher"), await bus_for("worker", worker=WORKER, streams=False)
    heard = Heard()

    async def orders(batch: list[Order]) -> None:
        await heard.add(*batch)

    await worker.consume_worker(WORKER, {Order: orders})
    await sender.publish("ql3.worker.w2.offer", Order(number=1))
    await sender.publish(f"ql3.worker.{WORKER}.offer", Order(number=2))
    assert await heard.count(1) == [Order(number=2)]
    maintenance = await bus_for("maintenance", streams=False)
    info = await jetstream_api(maintenance._connection, f"CONSUMER.INFO.QL3_WORKERS.{WORKER}")
    assert info["config"]["inactive_threshold"] == 3600 * 10**9


async def test_many_messages_are_stored_at_once_and_each_outcome_is_known(bus_for: BusFactory) -> None:
    sender = await bus_for("scheduler")
    items = [
        (command("dispatcher", "submit"), encode(Order(number=n)), headers_for(Order(number=n), f"id-{n}"))
        for n in range(256)
    ]
    items.append(("ql3.nowhere.x", b"{}", {MSG_ID: "lost"}))
    outcomes = await sender.publish_many(items, timeout=1.0)
    assert outcomes[:256] == [None] * 256
    assert isinstance(outcomes[256], Ql3Error)


async def test_facts_with_one_answer_are_stored_once_each_and_the_bad_one_is_found(bus_for: BusFactory) -> None:
    sender, maintenance = await bus_for("scheduler"), await bus_for("maintenance", streams=False)
    items = [
        (event("task", "default", f"t{n}", "changed"), encode(Order(number=n)), headers_for(Order(number=n), f"id-{n}"))
        for n in range(256)
    ]
    assert await sender.publish_many(items, facts=range(256)) == [None] * 256
    assert await count(sender, "QL3_EVENTS", maintenance) == 256
    too_large = (event("task", "default", "large", "changed"), b"x" * 2_000_000, {MSG_ID: "large"})
    last = (event("task", "default", "last", "changed"), b"{}", {MSG_ID: "last"})
    for where in (0, 3):
        again = [*items[:3], last]
        again.insert(where, too_large)
        outcomes = await sender.publish_many(again, facts=range(5))
        assert [isinstance(outcome, Ql3Error) for outcome in outcomes] == [n == where for n in range(5)]
    assert await count(sender, "QL3_EVENTS", maintenance) == 257
    nowhere = ("ql3.nowhere.x", b"{}", {MSG_ID: "lost"})
    outcomes = await sender.publish_many([nowhere, nowhere], facts=[0, 1], timeout=1.0)
    assert all(isinstance(outcome, Ql3Error) for outcome in outcomes)


async def test_the_same_message_id_is_stored_once(bus_for: BusFactory) -> None:
    sender = await bus_for("scheduler")
    for _ in range(3):
        await sender.publish(command("dispatcher", "submit"), Order(number=1), msg_id="same")
    assert await count(sender, "QL3_COMMANDS", await bus_for("maintenance", streams=False)) == 1


async def test_facts_reach_core_subscribers_readable(bus_for: BusFactory) -> None:
    sender, hearer = await bus_for("scheduler"), await bus_for("gateway")
    heard = Heard()

    async def fact(delivery: Delivery) -> None:
        await heard.add((delivery.subject, delivery.headers["Ql3-Schema"], delivery.decode(Order)))

    await hearer.on_event("ql3.evt.task.>", fact)
    await hearer.flush()
    subject = event("task", "default", "nightly", "changed")
    await sender.publish(subject, Order(number=3))
    assert await heard.count(1) == [(subject, schema_of(Order), Order(number=3))]


async def test_acknowledged_orders_reach_their_sender(bus_for: BusFactory) -> None:
    sender, receiver = await bus_for("scheduler"), await bus_for("dispatcher")
    heard = Heard()

    async def acked(ids: list[str]) -> None:
        await heard.add(*ids)

    await sender.on_ack("scheduler", acked)
    await sender.flush()
    await receiver.acknowledge("scheduler", ["a", "b"])
    assert await heard.count(2) == ["a", "b"]


async def test_a_failing_subscriber_hears_the_next_message(bus_for: BusFactory) -> None:
    sender, hearer = await bus_for("scheduler"), await bus_for("gateway")
    heard = Heard()

    async def fact(delivery: Delivery) -> None:
        number = delivery.decode(Order).number
        if number == 1:
            raise RuntimeError("once")
        if number == 2:
            raise asyncio.CancelledError
        await heard.add(number)

    await hearer.on_event("ql3.evt.task.>", fact)
    await hearer.flush()
    for number in (1, 2, 3):
        await sender.publish(event("task", "default", "nightly", "changed"), Order(number=number))
    assert await heard.count(1) == [3]


async def test_the_trace_goes_with_the_question_and_what_follows(bus_for: BusFactory) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    asked, asker = await bus_for("scheduler"), await bus_for("gateway")
    heard = Heard()

    async def handler(question: Ask, caller: Caller) -> Told:
        await asked.publish(event("task", "default", "nightly", "changed"), Order(number=1))
        return Told(text=current_traceparent() or "")

    async def fact(delivery: Delivery) -> None:
        await heard.add(delivery.headers.get(TRACEPARENT))

    await asked.serve("scheduler", "1.0.0", [Route(ASK, handler)])
    await asker.on_event("ql3.evt.task.>", fact)
    await asked.flush()
    await asker.flush()
    from services.kit.bus.envelope import set_traceparent

    set_traceparent(trace)
    assert (await asker.request(ASK, Ask(text="x"), timeout=WAIT_S)).text == trace
    assert await heard.count(1) == [trace]
    set_traceparent("not a trace\r\nX: y")
    assert current_traceparent() is None


async def _control(bus: Bus, what: str) -> bytes:
    return (await bus._connection.request(f"$SRV.{what}", b"", timeout=WAIT_S)).data


async def count(_: Bus, stream: str, maintenance: Bus) -> int:
    return (await jetstream_api(maintenance._connection, f"STREAM.INFO.{stream}"))["state"]["messages"]


async def empty(bus: Bus, stream: str) -> None:
    """Return when the consumer of the bus's service has nothing left; acks are not confirmed, so this asks again."""
    async with asyncio.timeout(WAIT_S):
        while True:
            info = await jetstream_api(bus._connection, f"CONSUMER.INFO.{stream}.{bus.options.service}")
            if info["num_pending"] == 0 and info["num_ack_pending"] == 0:
                return
