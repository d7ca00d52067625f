"""The right instant, once: admission, missed fires by cause, and clocks that jump."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from schemas.errors import Ql3Error
from schemas.triggers import TriggerSpec, TriggerUpdate
from services.kit.clock import ManualClock
from services.scheduler.cron import instants
from services.scheduler.cron.instants import next_instant
from services.scheduler.triggers import check, plan, preview
from tests.fixtures_database import reopen, shift_clock
from tests.scheduler.conftest import ALICE, ALLOW, PROJECT, Room, at, cron, spec

MINUTE = 60_000
HOUR = 60 * MINUTE
DAY = 24 * HOUR


async def test_an_instant_is_admitted_a_second_ahead_and_once(room: Room, clock: ManualClock) -> None:
    await room.create("hourly", cron("0 * * * *"))
    assert await room.look() == 1.0
    clock.advance(HOUR - 1_001)
    assert await room.look() <= 0.002
    assert room.ledger.runs == {}
    clock.advance(1)
    await room.look()
    (order,) = room.ledger.runs.values()
    assert order.scheduled_for_ms == order.not_before_ms == at("2026-03-02 13:00:00")
    assert order.trigger_type == "cron"
    for _ in range(3):
        clock.advance(500)
        await room.look()
    assert len(room.ledger.runs) == 1
    trigger = await room.trigger()
    assert trigger.last_scheduled_at_ms == at("2026-03-02 13:00:00")
    assert trigger.next_fire_at_ms == at("2026-03-02 14:00:00")


async def test_a_late_look_within_the_grace_is_on_time(room: Room, clock: ManualClock) -> None:
    await room.create("minutely", cron("* * * * *", missed="skip"))
    clock.advance(MINUTE + 30_000)
    await room.look()
    assert room.ledger.instants() == [at("2026-03-02 12:01:00")]
    assert [order.not_before_ms for order in room.ledger.runs.values()] == [None]
    assert await room.causes() == []


async def test_skip_starts_nothing_late_and_says_what_was_missed(room: Room, clock: ManualClock) -> None:
    await room.create("hourly", cron("0 * * * *", missed="skip"))
    clock.advance(3 * HOUR + 31_000)
    await room.look()
    assert room.ledger.runs == {}
    (missed,) = await room.missed()
    assert (missed.cause, missed.count, missed.at_least) == ("scheduler_down", 3, False)
    assert (missed.scheduled_for_ms, missed.last_ms) == (at("2026-03-02 13:00:00"), at("2026-03-02 15:00:00"))
    trigger = await room.trigger()
    assert trigger.missed_count == 3
    assert trigger.next_fire_at_ms == at("2026-03-02 16:00:00")


async def test_fire_once_starts_the_latest(room: Room, clock: ManualClock) -> None:
    await room.create("hourly", cron("0 * * * *"))
    clock.advance(3 * HOUR + 5 * MINUTE)
    await room.look()
    assert room.ledger.instants() == [at("2026-03-02 15:00:00")]
    assert await room.causes() == [("scheduler_down", 2)]


async def test_fire_once_does_not_add_a_late_run_to_one_that_is_on_time(room: Room, clock: ManualClock) -> None:
    await room.create("hourly", cron("0 * * * *"))
    clock.advance(3 * HOUR + 5_000)
    await room.look()
    assert room.ledger.instants() == [at("2026-03-02 15:00:00")]
    assert await room.causes() == [("scheduler_down", 2)]


async def test_catch_up_starts_the_latest_n_in_order(room: Room, clock: ManualClock) -> None:
    await room.create("hourly", cron("0 * * * *", missed="catch_up", catch_up=3))
    clock.advance(7 * HOUR + 5 * MINUTE)
    await room.look()
    assert room.ledger.instants() == [at(f"2026-03-02 {hour}:00:00") for hour in (17, 18, 19)]
    assert await room.causes() == [("scheduler_down", 4)]


async def test_catch_up_of_more_than_a_batch(room: Room, clock: ManualClock) -> None:
    await room.create("minutely", cron("* * * * *", missed="catch_up", catch_up=600))
    clock.advance(700 * MINUTE + 45_000)
    await room.look()
    found = room.ledger.instants()
    assert len(found) == 600
    assert all(later - earlier == MINUTE for earlier, later in pairwise(found))
    assert found[-1] == at("2026-03-02 23:40:00")
    assert await room.causes() == [("scheduler_down", 100)]


async def test_years_of_missed_seconds_are_counted_to_a_bound_and_no_flood(room: Room, clock: ManualClock) -> None:
    await room.create("secondly", cron("* * * * * *"))
    clock.advance(3 * 366 * DAY + 500)
    await room.look()
    assert len(room.ledger.runs) <= 32  # those within the grace
    (missed,) = await room.missed()
    assert missed.at_least
    assert missed.count == 10_000
    assert missed.last_ms == clock.now_ms() - 500 - 30_000


@pytest.mark.parametrize("more", [{"expression": "* * * * 1-6 *"}, {"expression": "* * * * * *", "end_at_ms": 1}])
async def test_what_was_dense_long_ago_is_counted_without_walking_through_it(
    room: Room, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    steps = 0

    def counted(*args: Any, **named: Any) -> int | None:
        nonlocal steps
        steps += 1
        return next_instant(*args, **named)

    monkeypatch.setattr(instants, "next_instant", counted)
    end = at("2026-06-30 23:59:59")
    await room.create("dense", TriggerSpec(**({**more, "end_at_ms": end} if "end_at_ms" in more else more)))
    await room.create("daily", cron("0 0 * * *"))
    room.archived.add(PROJECT)
    await room.look()
    clock.advance(at("2026-12-31 12:00:00") - clock.now_ms())
    room.archived.clear()
    room.late_s += 60
    await room.look()
    missed = {row.at_least: (row.count, row.last_ms) for row in await room.missed()}
    assert missed == {True: (10_000, end), False: (303, at("2026-12-30 00:00:00"))}
    assert steps < 50_000


async def test_the_latest_of_many_are_found_over_a_gap() -> None:
    found = plan("trigger", check(cron("* * * * 1-6 *"), 0), 0)
    assert found is not None
    end = at("2026-06-30 23:59:59")
    assert found.last(0, at("2026-12-01 00:00:00"), 1_000) == [end - 1_000 * left for left in reversed(range(1_000))]


async def test_one_transaction_is_not_busy_for_long(room: Room, clock: ManualClock) -> None:
    for name in ("a", "b", "c"):
        await room.create(name, cron("0 * * * *"))
    ticks = iter(range(1_000))
    room.admitting._monotonic = lambda: float(next(ticks))
    clock.advance(6 * HOUR)
    while len(room.ledger.runs) < 3:
        before = len(room.ledger.runs)
        assert await room.admitting.step() is True
        await room.submitter.stop()
        assert len(room.ledger.runs) <= before + 1


async def test_a_disabled_trigger_starts_nothing_and_its_instants_are_missed(room: Room, clock: ManualClock) -> None:
    await room.create("hourly", cron("0 * * * *"))
    trigger = await room.trigger()
    clock.advance(30 * MINUTE)
    await room.enable_trigger(trigger, False)
    clock.advance(5 * HOUR)
    await room.look()
    assert (await room.trigger()).next_fire_at_ms is None
    await room.enable_trigger(trigger, True)
    await room.look()
    assert room.ledger.runs == {}
    assert await room.causes() == [("trigger_disabled", 5)]
    assert (await room.trigger()).next_fire_at_ms == at("2026-03-02 18:00:00")
    clock.advance(30 * MINUTE)
    await room.look()
    assert room.ledger.instants() == [at("2026-03-02 18:00:00")]


async def test_a_trigger_that_is_written_back_stays_as_it_is(room: Room, clock: ManualClock) -> None:
    await room.create("hourly", cron("0 * * * *"))
    for enabled in (False, True):
        trigger = await room.enable_trigger(await room.trigger(), enabled)
        spec = msgspec.structs.replace(trigger.spec, jitter_ms=trigger.spec.jitter_ms + 1_000)
        ask = TriggerUpdate(
            actor=ALICE, project=PROJECT, trigger=trigger.id, expected_revision=trigger.revision, spec=spec
        )
        assert (await room.timetable.update(ask, ALLOW)).enabled is enabled
        trigger = await room.trigger()
        assert (trigger.enabled, trigger.spec.enabled) == (enabled, enabled)


async def test_a_disabled_task_says_so(room: Room, clock: ManualClock) -> None:
    task = await room.create("hourly", cron("0 * * * *"))
    await room.enable(task, False)
    clock.advance(2 * HOUR)
    await room.look()
    await room.enable(task, True)
    await room.look()
    assert room.ledger.runs == {}
    assert await room.causes() == [("task_disabled", 2)]


async def test_a_trigger_that_is_disabled_after_its_task_stays_so(room: Room, clock: ManualClock) -> None:
    task = await room.create("hourly", cron("0 * * * *"))
    await room.enable(task, False)
    trigger = await room.enable_trigger(await room.trigger(), False)
    await room.enable(task, True)
    clock.advance(2 * HOUR)
    await room.look()
    assert room.ledger.runs == {}
    await room.enable_trigger(trigger, True)
    assert await room.causes() == [("trigger_disabled", 2)]
    clock.advance(HOUR)
    await room.look()
    assert len(room.ledger.runs) == 1


async def test_what_is_disabled_within_the_second_does_not_start(room: Room, clock: ManualClock) -> None:
    await room.create("hourly", cron("0 * * * *"))
    trigger = await room.trigger()
    clock.advance(HOUR - 800)
    await room.look()
    (order,) = room.ledger.runs.values()
    await room.enable_trigger(trigger, False)
    await room.ringing.step()
    assert room.ledger.cancelled == [order.run_id]
    assert await room.causes() == [("trigger_disabled", 1)]
    # Taken back for good: neither the end of the second nor a repeat brings it back.
    clock.advance(5_000)
    await room.enable_trigger(trigger, True)
    await room.look()
    await room.ringing.step()
    assert len(room.ledger.runs) == 1
    assert [row["status"] for row in await room.rows("SELECT status FROM schedule_admissions")] == ["withdrawn"]


async def test_a_deleted_task_takes_back_what_was_admitted_ahead(room: Room, clock: ManualClock) -> None:
    task = await room.create("hourly", cron("0 * * * *"))
    clock.advance(HOUR - 500)
    await room.look()
    await room.delete(task)
    await room.ringing.step()
    assert len(room.ledger.cancelled) == 1
    clock.advance(3 * HOUR)
    await room.look()
    assert len(room.ledger.runs) == 1


async def test_a_paused_trigger_begins_again_by_itself(room: Room, clock: ManualClock) -> None:
    await room.create("hourly", cron("0 * * * *", pause_until_ms=at("2026-03-02 15:30:00")))
    assert (await room.trigger()).next_fire_at_ms == at("2026-03-02 16:00:00")
    for _ in range(5):
        clock.advance(HOUR)
        await room.look()
    assert room.ledger.instants() == [at("2026-03-02 16:00:00"), at("2026-03-02 17:00:00")]
    assert await room.causes() == [("paused", 3)]


async def test_an_archived_project_starts_nothing_until_it_is_back(room: Room, clock: ManualClock) -> None:
    await room.create("hourly", cron("0 * * * *"))
    room.archived.add(PROJECT)
    for _ in range(3):
        clock.advance(HOUR)
        await room.look()
    assert room.ledger.runs == {}
    room.archived.clear()
    room.projects.forget(PROJECT)
    clock.advance(30 * MINUTE)
    await room.look()
    assert room.ledger.runs == {}
    assert await room.causes() == [("project_archived", 3)]
    clock.advance(30 * MINUTE)
    await room.look()
    assert room.ledger.instants() == [at("2026-03-02 16:00:00")]


async def test_a_clock_set_back_repeats_nothing_and_holds_nothing_up(room: Room, clock: ManualClock) -> None:
    await room.create("hourly", cron("0 * * * *"))
    for _ in range(3):
        clock.advance(HOUR)
        await room.look()
    done = room.ledger.instants()
    assert len(done) == 3
    clock.advance(-2 * HOUR)
    for _ in range(8):
        await room.look()
        clock.advance(30 * MINUTE)
    await room.look()
    assert room.ledger.instants() == [*done, at("2026-03-02 16:00:00"), at("2026-03-02 17:00:00")]
    assert await room.causes() == []


async def test_a_wrong_clock_that_is_set_right_does_not_kill_a_trigger(room: Room, clock: ManualClock) -> None:
    """A year ahead for a moment: the trigger follows its policy there, and is back at once when the clock is."""
    await room.create("hourly", cron("0 * * * *"))
    clock.advance(365 * DAY)
    await room.look()
    assert room.ledger.instants() == [at("2027-03-02 12:00:00")]
    clock.advance(-365 * DAY + HOUR)
    await room.look()
    assert room.ledger.instants()[1:] == [at("2026-03-02 13:00:00")]


@pytest.mark.parametrize(
    ("policy", "instants", "missed"),
    [
        ({"missed": "skip"}, [], 5),
        ({"missed": "fire_once"}, ["17:00"], 4),
        ({"missed": "catch_up", "catch_up": 2}, ["16:00", "17:00"], 3),
    ],
)
async def test_a_clock_set_forward_follows_the_missed_policy(
    room: Room, clock: ManualClock, policy: dict[str, Any], instants: list[str], missed: int
) -> None:
    await room.create("hourly", cron("0 * * * *", **policy))
    await room.look()
    clock.advance(5 * HOUR + 10 * MINUTE)
    await room.look()
    assert room.ledger.instants() == [at(f"2026-03-02 {time}:00") for time in instants]
    assert await room.causes() == [("scheduler_down", missed)]
    clock.advance(50 * MINUTE)
    await room.look()
    assert room.ledger.instants()[-1] == at("2026-03-02 18:00:00")


async def test_what_a_wrong_clock_admitted_is_kept_until_its_instant(room: Room, clock: ManualClock) -> None:
    await room.create("minutely", cron("* * * * *"))
    await room.look()
    clock.advance(365 * DAY)
    await room.look()
    clock.advance(-365 * DAY)
    await room.look()
    await shift_clock(room.database, 4 * DAY)
    clock.advance(4 * DAY)
    await room.look()
    await room.pruning.step()
    clock.advance(-3_000)
    await room.look()
    before = len(room.ledger.runs)
    for _ in range(5):
        clock.advance(MINUTE)
        await room.look()
    assert len(room.ledger.runs) == before + 4  # the first of the five was met before


async def test_a_clock_that_is_drawn_back_a_second_repeats_nothing(room: Room, clock: ManualClock) -> None:
    """As a time server does it: not a jump, and nothing is met twice for it."""
    await room.create("secondly", cron("* * * * * *"))
    for step in (1_000, 1_000, -900, 1_000, -1_000, 500, 500, 1_000):
        clock.advance(step)
        await room.look()
    found = room.ledger.instants()
    assert found == sorted(set(found))
    assert all(later - earlier == 1_000 for earlier, later in pairwise(found))
    assert await room.causes() == []


@pytest.mark.parametrize("stop", ["disabled", "paused"])
async def test_a_clock_that_jumps_while_a_trigger_stands_still(room: Room, clock: ManualClock, stop: str) -> None:
    pause = {"pause_until_ms": at("2026-03-02 16:30:00")} if stop == "paused" else {}
    await room.create("hourly", cron("0 * * * *", **pause))
    trigger = await room.trigger()
    if stop == "disabled":
        await room.enable_trigger(trigger, False)
    for jump in (2 * HOUR, -HOUR, 3 * HOUR, -2 * HOUR):
        clock.advance(jump)
        await room.look()
    assert clock.now_ms() == at("2026-03-02 14:00:00")
    assert room.ledger.runs == {}
    clock.advance(3 * HOUR - MINUTE)
    if stop == "disabled":
        await room.enable_trigger(trigger, True)
    await room.look()
    assert room.ledger.runs == {}
    clock.advance(MINUTE)
    await room.look()
    assert room.ledger.instants() == [at("2026-03-02 17:00:00")]
    (missed,) = await room.missed()
    assert (missed.cause, missed.count) == (f"trigger_{stop}" if stop == "disabled" else stop, 4)


async def test_a_clock_far_beyond_all_calendars_does_not_kill_a_trigger(room: Room, clock: ManualClock) -> None:
    await room.create("hourly", cron("0 * * * *", missed="skip"))
    await room.create("interval", cron("@every 1h", missed="skip"))
    wrong = at("2999-12-31 23:59:59") - clock.now_ms()
    clock.advance(wrong)
    await room.look()
    clock.advance(10 * 366 * DAY)
    await room.look()
    clock.advance(-wrong - 10 * 366 * DAY + HOUR)
    await room.look()
    await room.look()
    assert room.ledger.instants().count(at("2026-03-02 13:00:00")) == 2


async def test_a_clock_that_was_set_back_while_it_was_down(room: Room, clock: ManualClock) -> None:
    await room.create("hourly", cron("0 * * * *"))
    clock.advance(3 * HOUR)
    await room.look()
    clock.advance(-2 * HOUR)
    again = Room(room.database, clock, room.ledger)
    clock.advance(HOUR)
    await again.look()
    assert room.ledger.instants() == [at("2026-03-02 15:00:00"), at("2026-03-02 14:00:00")]


async def test_after_an_edit_the_next_instant_is_after_the_edit(room: Room, clock: ManualClock) -> None:
    await room.create("hourly", cron("0 * * * *"))
    trigger = await room.trigger()
    clock.advance(HOUR - 600)
    await room.look()
    assert len(room.ledger.runs) == 1  # 13:00, ahead
    ask = TriggerUpdate(
        actor=ALICE, project=PROJECT, trigger=trigger.id, expected_revision=1, spec=cron("*/30 * * * *")
    )
    edited = await room.timetable.update(ask, ALLOW)
    assert edited.revision == 2
    assert edited.next_fire_at_ms == at("2026-03-02 13:30:00")
    clock.advance(31 * MINUTE)
    await room.look()
    assert room.ledger.instants() == [at("2026-03-02 13:00:00"), at("2026-03-02 13:30:00")]


async def test_a_run_pins_the_revision_of_its_admission(room: Room, clock: ManualClock) -> None:
    task = await room.create("hourly", cron("0 * * * *"), spec=spec("/bin/echo", "one"))
    clock.advance(HOUR)
    await room.look()
    await room.update(task, spec("/bin/echo", "two"))
    clock.advance(HOUR)
    await room.look()
    ran = [room.ledger.revisions[order.revision] for order in room.ledger.runs.values()]
    assert [revision.execution.command for revision in ran] == [["/bin/echo", "one"], ["/bin/echo", "two"]]
    assert [revision.task_revision for revision in ran] == [1, 2]


async def test_an_order_is_rung_until_it_is_answered(room: Room, clock: ManualClock) -> None:
    await room.create("hourly", cron("0 * * * *"))
    room.ledger.away = True
    clock.advance(HOUR)
    await room.look()
    await shift_clock(room.database, 3_000)
    await room.ringing.step()
    assert room.ledger.runs == {}
    assert len(await room.rows("SELECT id FROM outbox WHERE kind = 'order'")) == 2
    room.ledger.away = False
    await room.deliver()
    # Sent twice, made once; and closed, so that it is rung no more.
    assert room.ledger.instants() == [at("2026-03-02 13:00:00")]
    rows = await room.rows("SELECT status, ring_at_ms FROM schedule_admissions")
    assert [(row["status"], row["ring_at_ms"]) for row in rows] == [("committed", None)]


async def test_what_overlap_kept_from_starting_is_missed(room: Room, clock: ManualClock) -> None:
    await room.create("hourly", cron("0 * * * *"))
    room.ledger.overlaps = True
    clock.advance(HOUR)
    await room.look()
    # Also when the first answer was lost and the order came by the queue.
    room.ledger.away = True
    clock.advance(HOUR)
    await room.look()
    room.ledger.away = False
    await room.deliver()
    await room.deliver()
    assert await room.causes() == [("blocked_by_overlap", 2)]
    assert room.ledger.runs == {}


async def test_start_and_end(room: Room, clock: ManualClock) -> None:
    bounds = {"start_at_ms": at("2026-03-02 14:00:00"), "end_at_ms": at("2026-03-02 15:30:00")}
    await room.create("hourly", cron("0 * * * *", **bounds))
    for _ in range(6):
        clock.advance(HOUR)
        await room.look()
    assert room.ledger.instants() == [at("2026-03-02 14:00:00"), at("2026-03-02 15:00:00")]
    assert (await room.trigger()).next_fire_at_ms is None


async def test_an_interval_counts_from_its_trigger(room: Room, clock: ManualClock) -> None:
    await room.create("often", cron("@every 90m"))
    trigger = await room.trigger()
    assert trigger.spec.kind == "interval"
    for _ in range(6):
        clock.advance(HOUR)
        await room.look()
    assert room.ledger.instants() == [at(f"2026-03-02 {time}:00") for time in ("13:30", "15:00", "16:30", "18:00")]


async def test_once(room: Room, clock: ManualClock) -> None:
    await room.create("once", cron("@once 2026-03-02T15:00:00Z"))
    assert (await room.trigger()).spec.kind == "once"
    clock.advance(2 * DAY)
    await room.look()
    assert room.ledger.instants() == [at("2026-03-02 15:00:00")]
    assert (await room.trigger()).next_fire_at_ms is None


async def test_jitter_starts_later_but_always_by_the_same(room: Room, clock: ManualClock) -> None:
    await room.create("hourly", cron("0 * * * *", jitter_ms=10 * MINUTE))
    trigger = await room.trigger()
    found = plan(trigger.id, trigger.spec, 0)
    assert found is not None
    for _ in range(4 * 12):
        clock.advance(5 * MINUTE)
        await room.look()
    orders = list(room.ledger.runs.values())
    assert [order.scheduled_for_ms for order in orders][:3] == [at(f"2026-03-02 {hour}:00:00") for hour in (13, 14, 15)]
    for order in orders:
        instant = order.scheduled_for_ms or 0
        starts = instant + found.jitter_ms(instant)
        assert starts - 1_000 <= order.created_at_ms <= starts + 5 * MINUTE


async def test_a_jitter_longer_than_the_distance_of_fires_loses_none(room: Room, clock: ManualClock) -> None:
    await room.create("minutely", cron("* * * * *", jitter_ms=10 * MINUTE, missed="skip"))
    begins = clock.now_ms()
    for _ in range(3 * 60 * 4):
        clock.advance(15_000)
        await room.look()
    orders = list(room.ledger.runs.values())
    assert await room.causes() == []
    due = [order.scheduled_for_ms or 0 for order in orders]
    assert due == [begins + number * MINUTE for number in range(1, len(due) + 1)]
    assert len(due) >= 170
    assert all(
        instant <= order.created_at_ms <= instant + 10 * MINUTE + 15_000
        for instant, order in zip(due, orders, strict=True)
    )


def test_jitter_spreads_over_its_whole_width() -> None:
    found = plan("trigger", check(cron("0 * * * *", jitter_ms=10), 0), 0)
    assert found is not None
    assert {found.jitter_ms(hour * HOUR) for hour in range(500)} == set(range(11))


async def test_two_schedulers_share_the_rows_and_admit_each_once(room: Room, clock: ManualClock) -> None:
    for number in range(40):
        await room.create(f"task-{number}", cron("0 * * * *"))
    other_database = await reopen(room.database)
    try:
        other = Room(other_database, clock, room.ledger)
        clock.advance(HOUR)
        await asyncio.gather(room.look(), other.look())
        assert len(room.ledger.runs) == 40
        assert set(room.ledger.instants()) == {at("2026-03-02 13:00:00")}
    finally:
        await other_database.close()


def test_a_trigger_is_previewed_as_it_would_be() -> None:
    now = at("2026-03-28 12:00:00")
    found = preview(cron("30 2 * * SAT,SUN", timezone="Europe/Berlin", exclude=["2026-04-04"]), now, 3)
    assert found.spec.expression == "30 2 * * sat,sun"
    assert (found.english, found.chinese) == ("at 02:30 on Saturday and Sunday", "周六、周日 02:30")
    # The first falls into the gap of that night.
    assert found.instants == [at("2026-03-29 01:00:00"), at("2026-04-05 00:30:00"), at("2026-04-11 00:30:00")]
    paused = preview(cron("@daily", pause_until_ms=at("2026-05-01 12:00:00")), now, 1)
    assert paused.instants == [at("2026-05-02 00:00:00")]
    assert preview(cron("@boot"), now, 3).instants == []
    with pytest.raises(Ql3Error) as refused:
        preview(cron("? * * * *"), now, 3)
    assert refused.value.field == "spec.expression.minute"
