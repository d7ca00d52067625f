"""Triggers without a calendar: the system's start, another task's end, a webhook's call, a backfill."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from schemas.base import encode
from schemas.errors import Ql3Error
from schemas.runs import RunChanged
from schemas.system import FeedItem, FeedPage
from schemas.tasks import Execution, Task, TaskSpec
from schemas.triggers import (
    Trigger,
    TriggerBackfill,
    TriggerCreate,
    TriggerSpec,
    TriggerUpdate,
    WebhookCall,
    WebhookRotate,
)
from services.kit.clock import ManualClock
from services.kit.ids import new_id
from tests.scheduler.conftest import ALICE, ALLOW, PROJECT, Room, at, cron, spec

HOUR = 3_600_000


def digest(secret: str) -> str:
    """What is stored of a webhook's secret."""
    return hashlib.sha256(secret.encode()).hexdigest()


async def add(room: Room, task: str, trigger: TriggerSpec, **more: Any) -> Trigger:
    """A trigger of a task that is there."""
    ask = TriggerCreate(actor=ALICE, project=PROJECT, task=task, spec=trigger, **more)
    return await room.timetable.create(ask, ALLOW)


def ended(room: Room, task: str, status: str, **more: Any) -> FeedItem:
    """The fact that a run of a task ended now."""
    fact = RunChanged(
        project=PROJECT,
        run_id=new_id(),
        task_id=new_id(),
        task_name=task,
        status=status,  # type: ignore[arg-type]
        version=5,
        trigger_type="manual",
        trigger_id=None,
        attempt_id=None,
        worker_id=None,
        exit_code=0,
        error_code=more.pop("error_code", None),
        at_ms=more.pop("at_ms", room.clock.now_ms()),
        events=[],
    )
    return FeedItem(subject="-", schema="run.changed/1", payload=msgspec.Raw(encode(fact)))


async def tell(room: Room, *items: FeedItem, position: str = "1") -> None:
    """Let the scheduler read facts."""
    await room.occasions.follow(FeedPage(items=list(items), position=position, more=False))
    await room.submitter.stop()


def ran(room: Room) -> list[tuple[str, str]]:
    """Tasks that were ordered to run, and why."""
    return [
        (room.ledger.revisions[order.revision].task_name, order.trigger_type) for order in room.ledger.runs.values()
    ]


# The system's start


async def test_a_boot_trigger_fires_at_each_start(room: Room, clock: ManualClock) -> None:
    await room.create("warm-up", cron("@boot"))
    await room.create("other", cron("@daily"))
    disabled = await room.create("off", cron("@boot"))
    await room.enable(disabled, False)
    assert await room.occasions.boot() == 1
    clock.advance(60_000)
    assert await room.occasions.boot() == 1
    await room.submitter.stop()
    assert ran(room) == [("warm-up", "boot")] * 2


async def test_a_start_after_the_clock_was_set_back_fires(room: Room, clock: ManualClock) -> None:
    await room.create("first", TriggerSpec(kind="boot"))
    for _ in range(3):
        assert await room.occasions.boot() == 1
        clock.advance(-HOUR)
    await room.submitter.stop()
    assert len(room.ledger.runs) == 3


async def test_schedulers_that_start_together_mean_one_start(room: Room, clock: ManualClock) -> None:
    if room.database.dialect == "sqlite":
        pytest.skip("one process alone uses a file")
    await room.create("warm-up", cron("@boot"))
    other = Room(room.database, clock, room.ledger)
    assert await room.occasions.boot() == 1
    clock.advance(900)
    assert await other.occasions.boot() == 0


async def test_many_boot_triggers_go_in_pages(room: Room) -> None:
    for number in range(10):
        await room.create(f"t{number}", *[cron("@boot")] * 32)
    assert await room.occasions.boot() == 320
    await room.submitter.stop()
    assert len(room.ledger.runs) == 320


async def test_a_start_goes_on_where_policy_could_not_be_asked(room: Room, clock: ManualClock) -> None:
    for number in range(8):
        await room.create(f"t{number}", *[cron("@boot")] * 32)
    await room.create("last", cron("@boot"), project="other")

    async def away(project: str, _labels: Mapping[str, str]) -> None:
        if project == "other":
            raise Ql3Error("unavailable")

    room.asking = away
    with pytest.raises(Ql3Error):
        await room.occasions.boot()
    room.asking = None
    clock.advance(60_000)
    assert await room.occasions.boot() == 1
    await room.submitter.stop()
    assert len(room.ledger.runs) == 257
    clock.advance(60_000)
    # The next start is another one.
    assert await room.occasions.boot() == 257


# The end of another task


@pytest.mark.parametrize(
    ("after_on", "statuses"),
    [
        ("success", ["succeeded"]),
        ("failure", ["failed", "timed_out"]),
        ("any", ["succeeded", "failed", "timed_out", "cancelled"]),
    ],
)
async def test_a_task_follows_another(room: Room, after_on: str, statuses: list[str]) -> None:
    await room.create("first")
    await room.create("second")
    await add(room, "second", TriggerSpec(kind="after_task", after_task="first", after_on=after_on))  # type: ignore[arg-type]
    facts = [ended(room, "first", status) for status in ("succeeded", "failed", "timed_out", "cancelled", "running")]
    await tell(room, *facts, ended(room, "third", "succeeded"))
    assert len(room.ledger.runs) == len(statuses)
    assert set(ran(room)) == {("second", "after_task")}


async def test_a_fact_that_is_read_twice_makes_one_run(room: Room) -> None:
    await room.create("first")
    await room.create("second")
    await add(room, "second", TriggerSpec(kind="after_task", after_task="first"))
    fact = ended(room, "first", "succeeded")
    await tell(room, fact)
    await tell(room, fact, position="2")
    (order,) = room.ledger.runs.values()
    assert order.parent_run_id is not None
    assert await room.occasions.position() == "2"


async def test_only_what_ended_after_the_trigger_was_made_counts(room: Room, clock: ManualClock) -> None:
    await room.create("first")
    await room.create("second")
    earlier = ended(room, "first", "succeeded")
    clock.advance(1_000)
    trigger = await add(room, "second", TriggerSpec(kind="after_task", after_task="first"))
    skipped = ended(room, "first", "cancelled", error_code="overlap_skipped")
    await tell(room, earlier, skipped)
    assert room.ledger.runs == {}
    await room.enable_trigger(trigger, False)
    meanwhile = ended(room, "first", "succeeded")
    await tell(room, meanwhile)
    clock.advance(1_000)
    await room.enable_trigger(trigger, True)
    await tell(room, meanwhile)
    assert room.ledger.runs == {}
    await tell(room, ended(room, "first", "succeeded"))
    assert len(room.ledger.runs) == 1


async def test_a_task_cannot_follow_itself(room: Room) -> None:
    for name in ("a", "b", "c"):
        await room.create(name)
    await add(room, "b", TriggerSpec(kind="after_task", after_task="a"))
    await add(room, "c", TriggerSpec(kind="after_task", after_task="b"))
    for after, code in (("a", "invalid"), ("c", "invalid"), ("nothing", "not_found")):
        with pytest.raises(Ql3Error) as refused:
            await add(room, "a", TriggerSpec(kind="after_task", after_task=after))
        assert (refused.value.code, refused.value.field) == (code, "spec.after_task")


async def test_two_that_follow_each_other_at_once_close_no_circle(room: Room) -> None:
    other = Room(room.database, room.clock, room.ledger)
    for number in range(8):
        one, two = f"one-{number}", f"two-{number}"
        await room.create(one)
        await room.create(two)
        outcomes = await asyncio.gather(
            add(room, one, TriggerSpec(kind="after_task", after_task=two)),
            add(other, two, TriggerSpec(kind="after_task", after_task=one)),
            return_exceptions=True,
        )
        (refused,) = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        assert isinstance(refused, Ql3Error)
        assert refused.code == "invalid"


async def test_a_new_task_closes_no_circle(room: Room) -> None:
    await room.create("a", TriggerSpec(kind="after_task", after_task="b"))
    for name, after in (("b", "a"), ("c", "c")):
        with pytest.raises(Ql3Error) as refused:
            await room.create(name, TriggerSpec(kind="manual"), TriggerSpec(kind="after_task", after_task=after))
        assert (refused.value.code, refused.value.field) == ("invalid", "triggers[1].after_task")


async def test_an_end_that_nothing_follows_asks_nobody(room: Room) -> None:
    async def away(*_: Any) -> None:
        raise Ql3Error("unavailable")

    await room.create("second", TriggerSpec(kind="after_task", after_task="first"))
    room.asking = away
    await tell(room, position="1")
    await tell(room, ended(room, "other", "succeeded"), position="2")
    assert await room.occasions.position() == "2"
    with pytest.raises(Ql3Error):
        await tell(room, ended(room, "first", "succeeded"), position="3")
    assert await room.occasions.position() == "2"


async def test_many_ends_that_nothing_follows_are_one_row(room: Room) -> None:
    await room.create("first")
    await room.create("second", TriggerSpec(kind="after_task", after_task="first"))
    await room.enable_trigger(await room.trigger(), False)
    for position in ("1", "2"):
        await tell(room, *(ended(room, "first", "succeeded") for _ in range(50)), position=position)
    assert await room.causes() == [("trigger_disabled", 100)]
    assert (await room.trigger()).missed_count == 100


# Webhooks


async def hook(room: Room, **more: Any) -> Trigger:
    """A webhook with the secret `s3cret`."""
    await room.create("deploy")
    return await add(room, "deploy", TriggerSpec(kind="webhook", **more), token_digest=digest("s3cret"))


def call(trigger: Trigger, delivery: str = "d1", **more: Any) -> WebhookCall:
    """A call as the gateway hands it on."""
    return WebhookCall(
        project=PROJECT,
        trigger=trigger.id,
        token_digest=more.pop("token_digest", digest("s3cret")),
        signed=more.pop("signed", True),
        delivery=delivery,
        payload=more.pop("payload", {"ref": "main", "size": 1.5}),
    )


async def test_a_delivery_makes_one_run_with_its_payload(room: Room) -> None:
    trigger = await hook(room, inputs={"place": "north"})
    first = await room.occasions.call(call(trigger))
    again = await room.occasions.call(call(trigger))
    other = await room.occasions.call(call(trigger, "d2"))
    assert first.run.id == again.run.id != other.run.id
    assert again.replayed
    orders = list(room.ledger.runs.values())
    assert orders[0].inputs == {"place": "north", "payload": {"ref": "main", "size": 1.5}}
    assert orders[0].trigger_type == "webhook"


async def test_a_delivery_that_comes_again_after_an_edit_makes_no_other_run(room: Room) -> None:
    trigger = await hook(room)
    first = await room.occasions.call(call(trigger))
    edit = TriggerSpec(kind="webhook", inputs={"x": 1})
    await room.timetable.update(
        TriggerUpdate(actor=ALICE, project=PROJECT, trigger=trigger.id, expected_revision=1, spec=edit), ALLOW
    )
    again = await room.occasions.call(call(trigger))
    assert (again.run.id, again.replayed) == (first.run.id, True)
    assert (await room.occasions.call(call(trigger, "d2"))).run.id != first.run.id


async def test_a_wrong_secret_looks_like_no_trigger(room: Room) -> None:
    trigger = await hook(room)
    absent = msgspec.structs.replace(call(trigger), trigger=new_id())
    for wrong in (call(trigger, token_digest=digest("guess")), absent):
        with pytest.raises(Ql3Error) as refused:
            await room.occasions.call(wrong)
        assert (refused.value.code, refused.value.field) == ("not_found", "trigger")
    assert room.ledger.runs == {}


async def test_an_unsigned_call_is_for_webhooks_that_want_no_signature(room: Room) -> None:
    trigger = await hook(room)
    with pytest.raises(Ql3Error) as refused:
        await room.occasions.call(call(trigger, signed=False))
    assert refused.value.code == "unauthenticated"
    ask = TriggerUpdate(
        actor=ALICE,
        project=PROJECT,
        trigger=trigger.id,
        expected_revision=1,
        spec=TriggerSpec(kind="webhook", signed=False),
    )
    await room.timetable.update(ask, ALLOW)
    assert (await room.occasions.call(call(trigger, signed=False))).run.trigger_id == trigger.id


async def test_a_new_secret_voids_the_old_one(room: Room) -> None:
    trigger = await hook(room)
    ask = WebhookRotate(actor=ALICE, project=PROJECT, trigger=trigger.id, token_digest=digest("new"))
    await room.timetable.rotate(ask, ALLOW)
    with pytest.raises(Ql3Error):
        await room.occasions.call(call(trigger))
    assert (await room.occasions.call(call(trigger, token_digest=digest("new")))).run
    stored = await room.rows("SELECT token_digest FROM webhooks")
    assert [row["token_digest"] for row in stored] == [digest("new")]


async def test_a_disabled_webhook_or_an_archived_project_takes_no_call(room: Room) -> None:
    trigger = await hook(room)
    await room.enable_trigger(trigger, False)
    with pytest.raises(Ql3Error, match="disabled"):
        await room.occasions.call(call(trigger))
    await room.enable_trigger(trigger, True)
    room.archived.add(PROJECT)
    with pytest.raises(Ql3Error) as refused:
        await room.occasions.call(call(trigger))
    assert refused.value.code == "project_archived"


async def test_a_webhook_is_made_with_its_secret_and_nothing_else_is(room: Room) -> None:
    await room.create("deploy")
    for one, more in ((TriggerSpec(kind="webhook"), {}), (cron("@daily"), {"token_digest": digest("x")})):
        with pytest.raises(Ql3Error) as refused:
            await add(room, "deploy", one, **more)
        assert refused.value.field == "spec.kind"


async def test_a_payload_is_checked_like_any_input(room: Room) -> None:
    parameters = {"properties": {"payload": {"type": "object", "required": ["ref"]}}}
    await room.create("deploy", spec=TaskSpec(execution=Execution(command=["x"]), parameters=parameters))
    trigger = await add(room, "deploy", TriggerSpec(kind="webhook"), token_digest=digest("s3cret"))
    with pytest.raises(Ql3Error) as refused:
        await room.occasions.call(call(trigger, payload={"no": "ref"}))
    assert refused.value.field == "inputs.payload"
    with pytest.raises(Ql3Error) as refused:
        await room.occasions.call(call(trigger, payload={"ref": "x" * 70_000}))
    assert refused.value.code == "too_large"


# Backfill


def window(trigger: Trigger, first: str, last: str, **more: Any) -> TriggerBackfill:
    """The instants of a window."""
    return TriggerBackfill(
        actor=ALICE, project=PROJECT, trigger=trigger.id, from_ms=at(first), until_ms=at(last), **more
    )


async def test_a_backfill_is_previewed_then_runs_throttled_and_once(room: Room, clock: ManualClock) -> None:
    await room.create("hourly", cron("0 * * * *"))
    trigger = await room.trigger()
    ask = window(trigger, "2026-03-02 03:00:00", "2026-03-02 06:30:00", every_ms=10_000)
    preview = await room.occasions.backfill(msgspec.structs.replace(ask, dry_run=True), ALLOW)
    assert preview.instants == [at(f"2026-03-02 0{hour}:00:00") for hour in (3, 4, 5, 6)]
    assert room.ledger.runs == {}
    done = await room.occasions.backfill(ask, ALLOW)
    await room.submitter.stop()
    assert done.instants == preview.instants == room.ledger.instants()
    starts = [order.not_before_ms for order in room.ledger.runs.values()]
    assert starts == [None, *(clock.now_ms() + number * 10_000 for number in (1, 2, 3))]
    assert {order.trigger_type for order in room.ledger.runs.values()} == {"backfill"}
    again = await room.occasions.backfill(ask, ALLOW)
    assert (again.instants, again.left_out) == ([], 4)


async def test_a_backfill_leaves_out_what_ran_unless_told_otherwise(room: Room, clock: ManualClock) -> None:
    await room.create("hourly", cron("0 * * * *"))
    trigger = await room.trigger()
    clock.advance(HOUR)
    await room.look()
    ask = window(trigger, "2026-03-02 12:00:00", "2026-03-02 13:00:00")
    assert (await room.occasions.backfill(ask, ALLOW)).left_out == 1
    forced = window(trigger, "2026-03-02 13:00:00", "2026-03-02 13:00:00", again=True, mutation_id=new_id())
    await room.occasions.backfill(forced, ALLOW)
    await room.occasions.backfill(forced, ALLOW)
    await room.submitter.stop()
    assert room.ledger.instants().count(at("2026-03-02 13:00:00")) == 2


async def test_a_backfill_that_runs_all_again_and_comes_twice_runs_once(room: Room, clock: ManualClock) -> None:
    await room.create("hourly", cron("0 * * * *"))
    trigger = await room.trigger()
    clock.advance(2 * HOUR)
    await room.look()
    window = {"from_ms": at("2026-03-02 10:00:00"), "until_ms": at("2026-03-02 14:00:00")}
    ask = TriggerBackfill(actor=ALICE, project=PROJECT, trigger=trigger.id, again=True, mutation_id=new_id(), **window)
    before = len(room.ledger.runs)
    for _ in range(2):
        answer = await room.occasions.backfill(ask, ALLOW)
        await room.submitter.stop()
        assert len(answer.instants) == 5
        assert len(room.ledger.runs) == before + 5
    for _ in range(2):
        await room.occasions.backfill(msgspec.structs.replace(ask, mutation_id=None), ALLOW)
    await room.submitter.stop()
    assert len(room.ledger.runs) == before + 15


async def test_a_backfill_is_bounded(room: Room) -> None:
    await room.create("secondly", cron("* * * * * *"))
    trigger = await room.trigger()
    wrong = [
        (window(trigger, "2026-03-02 03:00:00", "2026-03-02 02:00:00"), "until_ms"),
        (window(trigger, "2026-03-02 03:00:00", "2026-03-02 12:00:01"), "until_ms"),
        (window(trigger, "2026-03-02 03:00:00", "2026-03-02 04:00:00"), "until_ms"),
        (window(trigger, "2001-03-02 03:00:00", "2026-03-02 04:00:00"), "from_ms"),
    ]
    for ask, field in wrong:
        with pytest.raises(Ql3Error) as refused:
            await room.occasions.backfill(ask, ALLOW)
        assert refused.value.field == field


async def test_disabling_takes_back_the_rest_of_a_backfill(room: Room, clock: ManualClock) -> None:
    await room.create("hourly", cron("0 * * * *"))
    trigger = await room.trigger()
    await room.occasions.backfill(window(trigger, "2026-03-01 13:00:00", "2026-03-02 11:00:00", every_ms=60_000), ALLOW)
    await room.submitter.stop()
    clock.advance(150_000)
    await room.enable_trigger(trigger, False)
    await room.ringing.step()
    assert len(room.ledger.runs) == 23
    assert len(room.ledger.cancelled) == 20


# What does not fire is missed, with its cause


NEEDY = {"properties": {"n": {"type": "integer"}}, "required": ["n"]}


async def stop_for(room: Room, cause: str, task: Task, trigger: Trigger) -> None:
    """Bring a task, its trigger or its project into the state that has this cause."""
    if cause == "trigger_disabled":
        await room.enable_trigger(trigger, False)
    elif cause == "task_disabled":
        await room.enable(task, False)
    elif cause == "project_archived":
        room.archived.add(PROJECT)
        room.projects.forget(PROJECT)
    else:
        await room.update(task, msgspec.structs.replace(spec(), parameters=NEEDY))


CAUSES = ("trigger_disabled", "task_disabled", "project_archived", "inputs_refused")


@pytest.mark.parametrize("cause", CAUSES)
async def test_a_start_that_fires_nothing_is_missed(room: Room, clock: ManualClock, cause: str) -> None:
    task = await room.create("warm-up", cron("@boot"))
    await stop_for(room, cause, task, await room.trigger())
    clock.advance(60_000)
    assert await room.occasions.boot() == 0
    assert await room.causes() == [(cause, 1)]
    if room.database.dialect == "postgresql":
        # Another scheduler that starts together with it means the same start.
        other = Room(room.database, clock, room.ledger)
        other.archived |= room.archived
        assert await other.occasions.boot() == 0
        assert await room.causes() == [(cause, 1)]


@pytest.mark.parametrize("cause", CAUSES)
async def test_an_end_that_nothing_follows_is_missed(room: Room, clock: ManualClock, cause: str) -> None:
    await room.create("first")
    task = await room.create("second")
    trigger = await add(room, "second", TriggerSpec(kind="after_task", after_task="first"))
    await stop_for(room, cause, task, trigger)
    clock.advance(1_000)
    await tell(room, ended(room, "first", "failed"), ended(room, "first", "succeeded"))
    assert room.ledger.runs == {}
    (missed,) = await room.missed()
    assert (missed.cause, missed.count, missed.trigger_id) == (cause, 1, trigger.id)
    assert missed.scheduled_for_ms == clock.now_ms()
