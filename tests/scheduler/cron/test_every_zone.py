"""Every zone of the database and every change of its clock from 1970 to 2100: nothing skipped, nothing repeated.

Many names mean the same clock; each distinct one is looked at once. The changes come from the zone files, and what has
to fire around one from the clock that is walked second by second. That walk is the same for all changes that move the
clock from the same time of day by the same distance, as long as no day is asked for; so there is one walk for each kind
of change, and every change is held against its kind's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from functools import cache
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest

from services.scheduler.cron.grammar import parse
from services.scheduler.cron.instants import instants, next_instant
from services.scheduler.cron.zones import WIDEST_S, zone
from tests.scheduler.cron.oracle import Written, walk, wall_of
from tests.scheduler.cron.zonefiles import ZONES, Change, changes, recorded

HOUR, DAY = 3_600, 86_400
FIRST, LAST = 0, 4_102_444_800  # 1970 to 2100
PARTS = 8


def _written(text: str, second: int, minutes: set[int], hours: set[int]) -> Written:
    return Written(
        text=text,
        seconds=frozenset({second}),
        minutes=frozenset(minutes),
        hours=frozenset(hours),
        months=frozenset(range(1, 13)),
        days=None,
        weekdays=None,
    )


SCHEDULES = (
    _written("0,30 0-23 * * *", 0, {0, 30}, set(range(24))),  # fixed: neither field begins with a star
    _written("*/20 * * * *", 0, {0, 20, 40}, set(range(24))),
    _written("10 59 0-23 * * *", 10, {59}, set(range(24))),
)


@cache
def clocks() -> dict[tuple[Change, ...], list[str]]:
    """The names of each distinct clock, by its changes and what holds before the first."""
    found: dict[tuple[Change, ...], list[str]] = defaultdict(list)
    for name in ZONES:
        start = zone(name).offset(FIRST)
        found[(Change(FIRST, start, start), *changes(name, FIRST, LAST))].append(name)
    return dict(found)


@cache
def expected(number: int, wall: int, moved: int) -> tuple[int, ...]:
    """When a schedule fires around a change, in seconds from it; `wall` is the time of day when it comes."""
    for steps, names in clocks().items():
        for step in steps[1:]:
            if ((step.at + step.before) % DAY, step.after - step.before) == (wall, moved):
                before, behind = reach(moved)
                fires = walk(SCHEDULES[number], ZoneInfo(names[0]), step.at - before, step.at + behind)
                return tuple(at - step.at for at in fires)
    raise AssertionError("no such change")


def reach(moved: int) -> tuple[int, int]:
    """How far to look before and behind a change that moves the clock so far."""
    return abs(moved) + HOUR, abs(moved) + 2 * HOUR


def test_all_names_are_looked_at() -> None:
    names = [name for group in clocks().values() for name in group]
    assert sorted(names) == ZONES
    assert len(names) > 550
    assert sum(len(steps) - 1 for steps in clocks()) > 10_000


def test_no_zone_changes_twice_within_two_days_nor_moves_further_than_assumed() -> None:
    """What `zones` relies on when it looks once a day, and the walks when they look at one change alone."""
    for name in ZONES:
        every = [*recorded(name), *changes(name, FIRST, LAST)]
        for earlier, later in pairwise(every):
            assert later.at - earlier.at > 2 * DAY or later.at <= earlier.at, name
        assert all(abs(change.after - change.before) <= WIDEST_S - 3_000 for change in every), name


@pytest.mark.parametrize("part", range(PARTS))
def test_every_change_of_every_zone(part: int) -> None:
    schedules = [parse(written.text) for written in SCHEDULES]
    for steps, names in list(clocks().items())[part::PARTS]:
        found: list[Change] = []
        where = zone(names[0])
        at = FIRST - 1
        while (change := where.next_change(at, LAST - 1)) is not None:
            found.append(Change(*change))
            at = change.at
        assert found == list(steps[1:]), names
        info = ZoneInfo(names[0])
        for step in found:
            moved = step.after - step.before
            assert wall_of(info, step.at) - wall_of(info, step.at - 1) == moved + 1, names
            before, behind = reach(moved)
            for number, schedule in enumerate(schedules):
                times = expected(number, (step.at + step.before) % DAY, moved)
                got: list[int] = []
                for fires in instants(schedule, where, (step.at - before - 1) * 1000):
                    if fires > (step.at + behind) * 1000:
                        break
                    got.append(fires // 1000 - step.at)
                assert tuple(got) == times, (names, step, SCHEDULES[number].text)
                # Also when asked from right before, at, in the middle of, and after what is skipped or comes twice.
                for after in (-1, 0, abs(moved) // 2, abs(moved)):
                    later = times[bisect_right(times, after)]
                    asked = next_instant(schedule, where, (step.at + after) * 1000)
                    assert asked == (step.at + later) * 1000, (names, step, after, SCHEDULES[number].text)


def test_a_kind_of_change_stands_for_all_of_its_kind() -> None:
    """The walk of another change of the same kind, elsewhere and years later, is the same."""
    kinds: dict[tuple[int, int], list[tuple[str, Change]]] = defaultdict(list)
    for steps, names in clocks().items():
        for step in steps[1:]:
            kinds[(step.at + step.before) % DAY, step.after - step.before].append((names[0], step))
    assert len(kinds) < 200
    for (wall, moved), seen in kinds.items():
        name, step = seen[-1]
        before, behind = reach(moved)
        fires = walk(SCHEDULES[0], ZoneInfo(name), step.at - before, step.at + behind)
        assert tuple(at - step.at for at in fires) == expected(0, wall, moved), (name, step)
