"""Scheduled runs under a rule of their project: they wait for an approval, and ask for it ahead of their time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from schemas.approvals import ApprovalRule
from schemas.errors import Ql3Error
from schemas.runs import RunOrder
from schemas.tasks import Task
from schemas.triggers import TriggerDelete, TriggerSpec, TriggerUpdate, WebhookCall
from services.kit.clock import ManualClock
from services.kit.database import Statement
from services.kit.ids import new_id
from services.scheduler.decisions import decide
from services.scheduler.loops import WITHDRAW_ABSENT, WITHDRAW_KEPT_MS
from services.scheduler.projects import asked as question
from services.scheduler.triggers import plan
from tests.scheduler.conftest import ALICE, PROJECT, Room, at, cron, spec
from tests.scheduler.test_occasions import add, digest, ended, tell

HOUR = 3_600_000
PROD = {"env": "prod"}
DUE = Statement("UPDATE schedule_admissions SET ring_at_ms = 0 WHERE ring_at_ms IS NOT NULL")
SIX = at("2026-03-02 18:00:00")


def rule(ahead_ms: int = HOUR, **more: Any) -> ApprovalRule:
    return ApprovalRule(name="prod", permission="run.start", labels=PROD, ahead_ms=ahead_ms, **more)


async def nightly(room: Room, expression: str = "0 18 * * *", **more: Any) -> Task:
    return await room.create("deploy", cron(expression), spec=spec(labels=PROD), **more)


def orders(room: Room) -> list[RunOrder]:
    return list(room.ledger.runs.values())


async def until(room: Room, clock: ManualClock, instant_ms: int) -> None:
    clock.advance(instant_ms - clock.now_ms())
    await room.look()


async def test_a_run_asks_once_before_its_time(room: Room, clock: ManualClock) -> None:
    room.rules = [rule()]
    await nightly(room)
    await room.look()
    await until(room, clock, SIX - HOUR - 1)
    assert orders(room) == []
    await until(room, clock, SIX - HOUR)
    (order,) = orders(room)
    assert (order.hold, order.scheduled_for_ms, order.not_before_ms) == (True, SIX, SIX)
    assert (await room.trigger()).next_fire_at_ms == SIX
    for instant in (SIX - 1, SIX, SIX + HOUR):
        await until(room, clock, instant)
        assert len(orders(room)) == 1
    assert (await room.trigger()).next_fire_at_ms == SIX + 24 * HOUR
    assert await room.missed() == []
    await until(room, clock, SIX + 23 * HOUR)
    assert [order.scheduled_for_ms for order in orders(room)] == [SIX, SIX + 24 * HOUR]


async def test_a_new_trigger_asks_at_once_when_its_time_is_near(room: Room, clock: ManualClock) -> None:
    room.rules = [rule(12 * HOUR)]
    await nightly(room)
    await room.look()
    assert [order.not_before_ms for order in orders(room)] == [SIX]


async def test_runs_of_other_tasks_neither_ask_nor_wait(room: Room, clock: ManualClock) -> None:
    room.rules = [rule()]
    await room.create("plain", cron("0 18 * * *"))
    await until(room, clock, SIX - HOUR)
    assert orders(room) == []
    await until(room, clock, SIX)
    assert [(order.hold, order.not_before_ms) for order in orders(room)] == [(False, None)]


async def test_without_a_time_the_rule_holds_the_run_when_it_is_due(room: Room, clock: ManualClock) -> None:
    room.rules = [rule(0)]
    await nightly(room)
    await until(room, clock, SIX - HOUR)
    assert orders(room) == []
    await until(room, clock, SIX)
    assert [(order.hold, order.scheduled_for_ms) for order in orders(room)] == [(True, SIX)]


async def test_a_rule_about_every_task_does_not_stop_the_schedules(room: Room, clock: ManualClock) -> None:
    room.rules = [ApprovalRule(name="all", permission="run.start")]
    await room.create("plain", cron("0 18 * * *"))
    await until(room, clock, SIX)
    assert [order.hold for order in orders(room)] == [True]
    assert await room.missed() == []


async def test_one_at_a_time_however_early_the_rule_asks(room: Room, clock: ManualClock) -> None:
    room.rules = [rule(24 * HOUR)]
    await nightly(room, "0 * * * *")
    noon = clock.now_ms()
    await room.look()
    assert [order.scheduled_for_ms for order in orders(room)] == [noon + HOUR]
    await until(room, clock, noon + HOUR - 1)
    assert len(orders(room)) == 1
    await until(room, clock, noon + HOUR)
    assert [order.scheduled_for_ms for order in orders(room)] == [noon + HOUR, noon + 2 * HOUR]


async def test_a_request_lives_beyond_the_start_it_is_about(room: Room, clock: ManualClock) -> None:
    room.rules = [rule(24 * HOUR)]
    await nightly(room, "0 18 3 3 *")
    start = at("2026-03-03 18:00:00")
    await until(room, clock, start - 23 * HOUR - 1)
    assert orders(room) == []
    await until(room, clock, start - 23 * HOUR)
    assert [order.not_before_ms for order in orders(room)] == [start]


async def asked(room: Room, clock: ManualClock) -> tuple[Task, RunOrder]:
    room.rules = [rule()]
    task = await nightly(room)
    await until(room, clock, SIX - HOUR)
    (order,) = orders(room)
    return task, order


async def test_what_is_disabled_is_taken_back_and_may_ask_again(room: Room, clock: ManualClock) -> None:
    _, first = await asked(room, clock)
    trigger = await room.trigger()
    await room.enable_trigger(trigger, False)
    while await room.ringing.step():
        pass
    assert room.ledger.cancelled == [first.run_id]
    assert await room.missed() == []
    await room.look()
    await room.enable_trigger(await room.trigger(), True)
    await room.look()
    _, second = orders(room)
    assert (second.scheduled_for_ms, second.hold) == (SIX, True)
    assert second.run_id != first.run_id
    # Disabled over its time, the instant is missed, and says why.
    await room.enable_trigger(await room.trigger(), False)
    await until(room, clock, SIX + 1)
    await room.enable_trigger(await room.trigger(), True)
    assert await room.causes() == [("trigger_disabled", 1)]


async def test_a_disabled_task_takes_its_questions_back(room: Room, clock: ManualClock) -> None:
    task, first = await asked(room, clock)
    await room.enable(task, False)
    await room.ringing.step()
    assert room.ledger.cancelled == [first.run_id]
    await room.enable(task, True)
    await room.look()
    assert [order.scheduled_for_ms for order in orders(room)] == [SIX, SIX]


async def rung(room: Room) -> list[str]:
    """Ring what is open as though its time had come; answers how the orders stand."""
    await room.database.transact(lambda tx: tx.execute(DUE))
    await room.ringing.step()
    return [row["status"] for row in await room.rows("SELECT status FROM schedule_admissions ORDER BY id")]


@pytest.mark.parametrize("code", ["unavailable", "database_unavailable", "commit_unknown", "forbidden"])
async def test_what_is_taken_back_is_taken_back_however_long_it_takes(
    room: Room, clock: ManualClock, code: str
) -> None:
    _, first = await asked(room, clock)
    await room.enable_trigger(await room.trigger(), False)
    room.ledger.fails = code
    for _ in range(WITHDRAW_ABSENT + 2):
        assert await rung(room) == ["withdrawing"]
    clock.advance(HOUR + WITHDRAW_KEPT_MS)
    for _ in range(WITHDRAW_ABSENT + 2):
        assert await rung(room) == ["withdrawing"]
    room.ledger.fails = None
    assert await rung(room) == ["withdrawn"]
    assert room.ledger.cancelled == [first.run_id]


async def never_made(room: Room, clock: ManualClock) -> None:
    """A question that is taken back while its order lies in the queue of a dispatcher that is away."""
    room.rules = [rule()]
    room.ledger.away = True
    await nightly(room)
    await until(room, clock, SIX - HOUR)
    await room.enable_trigger(await room.trigger(), False)
    assert await rung(room) == ["withdrawing"]
    room.ledger.away = False


async def test_a_run_that_comes_to_be_after_it_was_taken_back_is_ended(room: Room, clock: ManualClock) -> None:
    await never_made(room, clock)
    for _ in range(WITHDRAW_ABSENT + 2):
        assert await rung(room) == ["withdrawing"]
    await room.deliver()
    (order,) = orders(room)
    assert await rung(room) == ["withdrawn"]
    assert room.ledger.cancelled == [order.run_id]


async def test_a_run_that_never_comes_to_be_is_given_up_long_after_its_time(room: Room, clock: ManualClock) -> None:
    await never_made(room, clock)
    clock.advance(HOUR + WITHDRAW_KEPT_MS)
    room.ledger.fails = "unavailable"
    for _ in range(WITHDRAW_ABSENT + 2):
        assert await rung(room) == ["withdrawing"]
    room.ledger.fails = None
    for _ in range(WITHDRAW_ABSENT - 1):
        assert await rung(room) == ["withdrawing"]
    assert await rung(room) == ["withdrawn"]
    # Even now its order may be read from the queue.
    await room.deliver()
    (order,) = orders(room)
    await rung(room)
    assert room.ledger.cancelled == [order.run_id]


@pytest.mark.parametrize("what", ["trigger", "task"])
async def test_what_is_deleted_is_taken_back(room: Room, clock: ManualClock, what: str) -> None:
    task, first = await asked(room, clock)
    if what == "task":
        await room.delete(task)
    else:
        trigger = await room.trigger()
        await room.timetable.delete(TriggerDelete(actor=ALICE, project=PROJECT, trigger=trigger.id), room.allow)
    await room.ringing.step()
    assert room.ledger.cancelled == [first.run_id]
    await until(room, clock, SIX)
    assert len(orders(room)) == 1


async def test_an_edited_trigger_asks_anew(room: Room, clock: ManualClock) -> None:
    _, first = await asked(room, clock)
    trigger = await room.trigger()

    async def edit(expression: str, revision: int) -> None:
        ask = TriggerUpdate(
            actor=ALICE, project=PROJECT, trigger=trigger.id, expected_revision=revision, spec=cron(expression)
        )
        await room.timetable.update(ask, room.allow)
        await room.ringing.step()
        await room.look()

    await edit("30 17 * * *", 1)
    assert room.ledger.cancelled == [first.run_id]
    assert [order.scheduled_for_ms for order in orders(room)] == [SIX, SIX - HOUR // 2]
    # Back to the same instant: it is another question, and no instant is lost between the two.
    await edit("0 18 * * *", 2)
    assert [order.scheduled_for_ms for order in orders(room)] == [SIX, SIX - HOUR // 2, SIX]
    assert len(set(room.ledger.cancelled)) == 2
    assert await room.missed() == []


async def test_an_edited_task_asks_about_its_new_revision(room: Room, clock: ManualClock) -> None:
    task, first = await asked(room, clock)
    await room.update(task, spec("/bin/echo", labels=PROD))
    await room.ringing.step()
    await room.look()
    assert room.ledger.cancelled == [first.run_id]
    _, second = orders(room)
    assert second.scheduled_for_ms == SIX
    assert room.ledger.revisions[second.revision].task_revision == 2
    # Without the label it has nothing to ask, and runs at its time.
    await room.update(await current(room), spec("/bin/echo"), expected=2)
    await room.ringing.step()
    await until(room, clock, SIX)
    assert [order.hold for order in orders(room)] == [True, True, False]
    assert len(room.ledger.cancelled) == 2


async def current(room: Room) -> Task:
    from schemas.tasks import TaskRead

    return await room.catalogue.get(TaskRead(actor=ALICE, project=PROJECT, task="deploy"))


async def test_a_clock_that_is_set_back_asks_nothing_twice(room: Room, clock: ManualClock) -> None:
    await asked(room, clock)
    clock.advance(-600_000)
    await room.look()
    await until(room, clock, SIX + 1)
    assert [order.scheduled_for_ms for order in orders(room)] == [SIX]


async def test_a_rule_that_comes_later_wakes_the_schedules(room: Room, clock: ManualClock) -> None:
    from services.scheduler.store import schedules

    await nightly(room)
    await room.look()
    room.rules = [rule(12 * HOUR)]
    room.projects.forget(PROJECT)
    now_ms = clock.now_ms()
    await room.database.transact(lambda tx: schedules.wake_project(tx, PROJECT, now_ms, all_of_it=True))
    await room.look()
    assert [order.not_before_ms for order in orders(room)] == [SIX]


async def test_runs_without_a_calendar_wait_too(room: Room) -> None:
    room.rules = [rule()]
    await room.create("first")
    for name, labels in (("deploy", PROD), ("plain", {})):
        await room.create(name, cron("@boot"), spec=spec(labels=labels))
        await add(room, name, TriggerSpec(kind="after_task", after_task="first"))
        hook = await add(room, name, TriggerSpec(kind="webhook"), token_digest=digest("s3cret"))
        call = WebhookCall(
            project=PROJECT,
            trigger=hook.id,
            token_digest=digest("s3cret"),
            signed=True,
            delivery=new_id(),
            payload={"a": 1},
        )
        await room.occasions.call(call)
    await room.occasions.boot()
    await tell(room, ended(room, "first", "succeeded"))
    seen = {(room.ledger.revisions[order.revision].task_name, order.trigger_type): order.hold for order in orders(room)}
    assert seen == {
        (name, kind): name == "deploy" for name in ("deploy", "plain") for kind in ("boot", "after_task", "webhook")
    }


KINDS = ("boot", "after_task", "webhook")


class Firing:
    """A trigger of one kind, of a task with this label, and what makes it fire."""

    def __init__(self, room: Room, kind: str, task: Task, ask: WebhookCall | None) -> None:
        self.room = room
        self.kind = kind
        self.task = task
        self.ask = ask

    @classmethod
    async def of(cls, room: Room, kind: str, **labels: str) -> Firing:
        await room.create("first")
        task = await room.create("deploy", *([cron("@boot")] if kind == "boot" else []), spec=spec(labels=labels))
        ask = None
        if kind == "after_task":
            await add(room, "deploy", TriggerSpec(kind="after_task", after_task="first"))
        if kind == "webhook":
            hook = await add(room, "deploy", TriggerSpec(kind="webhook"), token_digest=digest("s3cret"))
            ask = WebhookCall(
                project=PROJECT,
                trigger=hook.id,
                token_digest=digest("s3cret"),
                signed=True,
                delivery=new_id(),
                payload={"a": 1},
            )
        return cls(room, kind, task, ask)

    async def fire(self) -> None:
        if self.ask is not None:
            await self.room.occasions.call(self.ask)
        elif self.kind == "boot":
            await self.room.occasions.boot()
        else:
            await tell(self.room, ended(self.room, "first", "succeeded"))
        await self.room.submitter.stop()


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_known_of_a_rule_may_be_too_old_at_once(room: Room, kind: str) -> None:
    room.rules = [rule()]
    firing = await Firing.of(room, kind, **PROD)

    async def late(_project: str, _labels: Mapping[str, str]) -> None:
        room.late_s += 3.0

    room.asking = late
    await firing.fire()
    assert [order.hold for order in orders(room)] == [True]
    assert await room.missed() == []


@pytest.mark.parametrize("kind", KINDS)
async def test_an_answer_that_is_too_old_at_once_is_not_an_archived_project(room: Room, kind: str) -> None:
    firing = await Firing.of(room, kind, **PROD)

    async def late(_project: str, _labels: Mapping[str, str]) -> None:
        room.late_s += 3.0

    room.asking = late
    await firing.fire()
    assert [order.hold for order in orders(room)] == [False]
    assert await room.missed() == []


@pytest.mark.parametrize("kind", KINDS)
async def test_a_rule_that_is_made_while_a_trigger_fires_holds_its_run(room: Room, kind: str) -> None:
    firing = await Firing.of(room, kind, **PROD)

    async def changes(_project: str, _labels: Mapping[str, str]) -> None:
        room.asking = None
        room.rules = [rule()]
        # The fact is heard as soon as the answer, from before it, is there.
        asyncio.get_running_loop().call_soon(room.projects.forget, PROJECT)

    room.asking = changes
    await firing.fire()
    assert [order.hold for order in orders(room)] == [True]


@pytest.mark.parametrize("kind", KINDS)
async def test_what_changes_all_the_time_starts_nothing_and_loses_nothing(room: Room, kind: str) -> None:
    room.rules = [rule()]
    firing = await Firing.of(room, kind, **PROD)

    async def changes(_project: str, _labels: Mapping[str, str]) -> None:
        asyncio.get_running_loop().call_soon(room.projects.forget, PROJECT)

    room.asking = changes
    with pytest.raises(Ql3Error) as refused:
        await firing.fire()
    assert refused.value.code == "unavailable"
    assert orders(room) == []
    assert await room.missed() == []
    room.asking = None
    await firing.fire()
    assert [order.hold for order in orders(room)] == [True]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_label_that_comes_while_a_trigger_fires_holds_its_run(room: Room, kind: str) -> None:
    room.rules = [rule()]
    firing = await Firing.of(room, kind, team="web")

    async def relabels(_project: str, labels: Mapping[str, str]) -> None:
        if labels:
            room.asking = None
            await room.update(firing.task, spec(labels={"team": "web", **PROD}))

    room.asking = relabels
    await firing.fire()
    assert [order.hold for order in orders(room)] == [True]
    (order,) = orders(room)
    assert room.ledger.revisions[order.revision].task_revision == 2


@pytest.mark.parametrize("kind", KINDS)
async def test_a_project_that_is_archived_between_two_questions_starts_nothing(room: Room, kind: str) -> None:
    room.rules = [ApprovalRule(name="other", permission="run.start", labels={"team": "none"})]
    firing = await Firing.of(room, kind, **PROD)

    async def archives(_project: str, _labels: Mapping[str, str]) -> None:
        room.archived.add(PROJECT)

    room.asking = archives
    if kind == "webhook":
        with pytest.raises(Ql3Error) as refused:
            await firing.fire()
        assert refused.value.code == "project_archived"
    else:
        await firing.fire()
        assert await room.causes() == [("project_archived", 1)]
    assert orders(room) == []


async def test_what_was_asked_before_a_change_is_not_kept(room: Room) -> None:
    async def changes(project: str, _labels: Mapping[str, str]) -> None:
        room.projects.forget(project)

    about = question(PROJECT)
    room.asking = changes
    assert (await room.projects.learn([about]))[about].effect == "allow"
    assert room.projects.decision(about) is None
    room.asking = None
    await room.projects.learn([about])
    assert room.projects.decision(about) is not None


def test_a_paused_trigger_does_not_ask_before_its_pause_is_over() -> None:
    paused = cron("0 18 * * *", pause_until_ms=SIX - HOUR // 2)
    made = plan(new_id(), paused, SIX - 8 * HOUR)
    assert made is not None
    decision = decide(made, SIX - 8 * HOUR, SIX - HOUR, limit=8, ahead_ms=2 * HOUR)
    assert (decision.fires, decision.wake_at_ms, decision.next_fire_at_ms) == ((), SIX - HOUR // 2, SIX)
    after = decide(made, decision.decided_through_ms, SIX - HOUR // 2, limit=8, ahead_ms=2 * HOUR)
    assert [(fire.instant_ms, fire.asked) for fire in after.fires] == [(SIX, True)]
