"""Running a task now: one run a request, also when the answer is lost."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from schemas.errors import Ql3Error
from schemas.triggers import TriggerCreate, TriggerSpec
from services.kit.ids import new_id
from services.scheduler import running
from services.scheduler.running import RunAsk
from tests.fixtures_database import shift_clock
from tests.scheduler.conftest import ALICE, ALLOW, PROJECT, Room, cron, spec


async def states(room: Room) -> list[str]:
    """States of the orders."""
    return [row["status"] for row in await room.rows("SELECT status FROM schedule_admissions ORDER BY id")]


async def test_the_answer_is_the_committed_run(room: Room) -> None:
    await room.create("backup")
    result = await room.run("backup", inputs={"depth": 1.5})
    (order,) = room.ledger.runs.values()
    assert result.run.id == order.run_id
    assert order.inputs == {"depth": 1.5}
    assert (order.requested_by.type, order.requested_by.id) == ("user", "alice")
    await room.submitter.stop()
    assert await states(room) == ["committed"]


async def test_a_request_with_a_key_makes_one_run(room: Room) -> None:
    await room.create("backup")
    first = await room.run("backup", idempotency_key="k")
    again = await room.run("backup", idempotency_key="k")
    assert again.run.id == first.run.id
    assert again.replayed
    with pytest.raises(Ql3Error) as refused:
        await room.run("backup", idempotency_key="k", inputs={"other": True})
    assert refused.value.code == "idempotency_conflict"
    assert len(room.ledger.runs) == 1


async def test_a_key_keeps_its_run_after_an_edit(room: Room) -> None:
    task = await room.create("backup")
    first = await room.run("backup", idempotency_key="k")
    await room.update(task, spec("/bin/echo"))
    assert (await room.run("backup", idempotency_key="k")).run.id == first.run.id


async def test_many_at_once_with_one_key_make_one_run(room: Room) -> None:
    await room.create("backup")
    results = await asyncio.gather(*(room.run("backup", idempotency_key="k") for _ in range(20)))
    assert len({result.run.id for result in results}) == 1
    assert len(room.ledger.runs) == 1


async def test_two_schedulers_with_one_key_make_one_run(room: Room) -> None:
    from tests.fixtures_database import reopen

    await room.create("backup")
    database = await reopen(room.database)
    try:
        other = Room(database, room.clock, room.ledger)
        tries = [one.run("backup", idempotency_key=f"k{n}") for n in range(10) for one in (room, other)]
        results = await asyncio.gather(*tries)
        assert len({result.run.id for result in results}) == 10
        await other.submitter.stop()
    finally:
        await database.close()


async def test_a_lost_answer_leaves_an_open_order_that_is_rung(room: Room) -> None:
    await room.create("backup")
    room.ledger.away = True
    with pytest.raises(Ql3Error) as refused:
        await room.run("backup", idempotency_key="k")
    assert refused.value.code == "unavailable"
    assert await states(room) == ["open"]
    room.ledger.away = False
    await shift_clock(room.database, 10_000)
    await room.ringing.step()
    await room.deliver()
    assert await states(room) == ["committed"]
    again = await room.run("backup", idempotency_key="k")
    assert again.replayed
    assert len(room.ledger.runs) == 1


async def test_a_refusal_of_the_dispatcher_closes_the_order(room: Room) -> None:
    await room.create("backup")
    room.ledger.refuses = "capacity"
    with pytest.raises(Ql3Error) as refused:
        await room.run("backup")
    assert refused.value.code == "capacity"
    await room.submitter.stop()
    assert await states(room) == ["refused"]


async def test_a_disabled_or_absent_task_starts_nothing(room: Room) -> None:
    task = await room.create("backup")
    await room.enable(task, False)
    for name, code in (("backup", "conflict"), ("nothing", "not_found")):
        with pytest.raises(Ql3Error) as refused:
            await room.run(name)
        assert (refused.value.code, refused.value.field) == (code, "task")
    with pytest.raises(Ql3Error) as refused:
        await room.run((await room.create("other")).name, expected_revision=2)
    assert refused.value.code == "version_conflict"
    assert room.ledger.runs == {}


async def test_a_batch_is_answered_item_by_item(room: Room) -> None:
    await room.create("one")
    await room.create("two")
    asks = [
        RunAsk(actor=ALICE, decision=ALLOW, project=PROJECT, task=task, trigger_type="api", idempotency_key=key)
        for task, key in (("one", "a"), ("nothing", None), ("two", None), ("one", "a"), ("two", "a"))
    ]
    results = await room.desk.run_many(asks)
    assert [result.error for result in results] == [None, "not_found", None, None, "idempotency_conflict"]
    assert results[0].run is not None
    assert results[3].run is not None
    assert results[0].run.id == results[3].run.id
    assert len(room.ledger.runs) == 2


async def test_a_large_batch_is_one_transaction_and_two_messages(room: Room) -> None:
    await room.create("one")
    asks = [RunAsk(actor=ALICE, decision=ALLOW, project=PROJECT, task="one", trigger_type="api")] * 256
    results = await room.desk.run_many(asks)
    assert len({result.run.id for result in results if result.run}) == 256
    audits = await room.rows("SELECT detail FROM audit_events WHERE action = 'run.start'")
    assert len(audits) == 1


def test_keys_and_inputs_are_bounded() -> None:
    with pytest.raises(Ql3Error) as refused:
        running.check({"x": "y" * 70_000}, None)
    assert (refused.value.code, refused.value.field) == ("too_large", "inputs")
    with pytest.raises(Ql3Error) as refused:
        running.check(None, "ql3:cron:v1:x")
    assert (refused.value.code, refused.value.field) == ("invalid", "idempotency_key")


async def test_a_manual_trigger_gives_its_inputs_and_takes_others_over_them(room: Room) -> None:
    parameters = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 1}, "who": {"type": "string", "default": "you"}},
        "required": ["n"],
    }
    task = await room.create(
        "hello",
        TriggerSpec(kind="manual", inputs={"n": 3}),
        spec=msgspec.structs.replace(spec(), parameters=parameters),
    )
    trigger = await room.trigger()
    assert trigger.next_fire_at_ms is None
    await room.run("hello", trigger=trigger.id)
    await room.run("hello", trigger=trigger.id, inputs={"n": 5, "who": "me"})
    orders = list(room.ledger.runs.values())
    assert [order.inputs for order in orders] == [{"n": 3, "who": "you"}, {"n": 5, "who": "me"}]
    # The run tells both who asked and through what; it is that person's run.
    assert {(order.trigger_id, order.trigger_type, order.requested_by.id) for order in orders} == {
        (trigger.id, "manual", "alice")
    }
    with pytest.raises(Ql3Error) as refused:
        await room.run("hello", trigger=trigger.id, inputs={"n": 0})
    assert (refused.value.code, refused.value.field) == ("invalid", "inputs.n")
    await room.enable_trigger(trigger, False)
    with pytest.raises(Ql3Error) as refused:
        await room.run("hello", trigger=trigger.id)
    assert (refused.value.code, refused.value.field) == ("conflict", "trigger")
    assert task.name == "hello"
    assert len(room.ledger.runs) == 2


async def test_only_a_manual_trigger_of_the_task_is_run(room: Room) -> None:
    await room.create("other", TriggerSpec(kind="manual"))
    foreign = await room.trigger()
    task = await room.create("hello", cron("0 3 * * *"))
    for trigger, code in ((foreign.id, "not_found"), (task.triggers[0].id, "invalid"), (new_id(), "not_found")):
        with pytest.raises(Ql3Error) as refused:
            await room.run("hello", trigger=trigger)
        assert (refused.value.code, refused.value.field) == (code, "trigger")
    assert room.ledger.runs == {}


async def test_inputs_of_a_manual_trigger_are_checked_when_it_is_saved(room: Room) -> None:
    typed = msgspec.structs.replace(spec(), parameters={"properties": {"n": {"type": "integer"}}})
    with pytest.raises(Ql3Error) as refused:
        await room.create("hello", TriggerSpec(kind="manual", inputs={"n": "three"}), spec=typed)
    assert refused.value.code == "invalid"
    assert (refused.value.field or "").endswith("inputs.n")


async def test_a_trigger_that_gives_too_little_is_refused_when_it_is_saved(room: Room) -> None:
    """Unless somebody may add the rest: whoever runs a manual one, or what calls a webhook."""
    needy = {"properties": {"n": {"type": "integer"}}, "required": ["n"]}
    typed = msgspec.structs.replace(spec(), parameters=needy)
    with pytest.raises(Ql3Error) as refused:
        await room.create("hello", cron("0 3 * * *"), spec=typed)
    assert (refused.value.code, refused.value.field) == ("invalid", "triggers[0].inputs")
    await room.create("hello", TriggerSpec(kind="manual"), cron("0 3 * * *", inputs={"n": 1}), spec=typed)
    ask = TriggerCreate(actor=ALICE, project=PROJECT, task="hello", spec=cron("0 4 * * *"))
    with pytest.raises(Ql3Error) as refused:
        await room.timetable.create(ask, ALLOW)
    assert refused.value.field == "spec.inputs"
