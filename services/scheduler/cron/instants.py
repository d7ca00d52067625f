"""The next instant of a schedule: matches on the wall clock, and what becomes of them where the clock is moved.

The wall clock is counted in seconds as if it were UTC: `wall = instant + offset`. Two rules (Debian's cron has them):

* A *fixed-time* schedule (neither the minute nor the hour field begins with `*`) follows the highest wall time reached
  so far. A time in a gap is reached at the first instant after the gap, several there at once, and a time that comes
  round again was already reached: it fires the first time only.
* A *wildcard* schedule fires at every instant whose wall time matches, so twice in a repeated hour and not in a gap.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from calendar import isleap
from collections.abc import Iterator
from datetime import date
from typing import Final

from schemas.errors import Ql3Error
from services.scheduler.cron.grammar import Boot, Cron, Every, Once, Schedule
from services.scheduler.cron.zones import DAY_S, WIDEST_S, Zone

HORIZON_YEARS: Final = 100
"""A schedule that does not fire within 100 years does not fire."""
FIRST_S: Final = -2_208_988_800
"""1900-01-01: instants before it are not asked for."""
LAST_S: Final = 32_503_680_000
"""3000-01-01: nothing fires from then on."""
REMEMBERED: Final = 32
"""Answers that a schedule keeps."""

_EPOCH_DAY: Final = date(1970, 1, 1).toordinal()
_LENGTHS: Final = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def next_instant(schedule: Schedule, zone: Zone, after_ms: int, *, anchor_ms: int | None = None) -> int | None:
    """The first instant strictly later than `after_ms`, in milliseconds UTC; None when there is none.

    `anchor_ms` is where `@every` counts from, `after_ms` when absent. Instants are whole seconds.
    """
    after = after_ms // 1000
    if isinstance(schedule, Boot):
        return None
    if isinstance(schedule, Once):
        found = schedule.at_s if schedule.at_s > after else None
    elif isinstance(schedule, Every):
        anchor = after if anchor_ms is None else anchor_ms // 1000
        found = anchor + max(1, (after - anchor) // schedule.seconds + 1) * schedule.seconds
    elif after >= LAST_S or after < FIRST_S:
        return None
    else:
        found = _next(schedule, zone, after)
    return None if found is None or found >= LAST_S else found * 1000


def instants(schedule: Schedule, zone: Zone, after_ms: int, *, anchor_ms: int | None = None) -> Iterator[int]:
    """All later instants in order, in milliseconds UTC."""
    anchor = after_ms if anchor_ms is None else anchor_ms
    found = next_instant(schedule, zone, after_ms, anchor_ms=anchor)
    while found is not None:
        yield found
        found = next_instant(schedule, zone, found, anchor_ms=anchor)


def refuse_never(schedule: Schedule) -> None:
    """Raise `cron_never_fires` for a schedule whose days do not exist, such as `0 0 30 2 *`."""
    if isinstance(schedule, Cron) and _next_day(schedule, 0) is None:
        raise Ql3Error("cron_never_fires", "No such day exists in the months of this expression.", field="day of month")


def _next(cron: Cron, zone: Zone, after: int) -> int | None:
    key = (zone.name, after)
    try:
        return cron.answers[key]
    except KeyError:
        found = _next_fixed(cron, zone, after) if cron.fixed else _next_wildcard(cron, zone, after)
    if len(cron.answers) >= REMEMBERED:
        cron.answers.clear()
    cron.answers[key] = found
    return found


def _next_fixed(cron: Cron, zone: Zone, after: int) -> int | None:
    reached = after + zone.offset(after)
    # After the clock was put back, the highest wall time reached is that of the last second before.
    at = after - WIDEST_S
    while (change := zone.next_change(at, after)) is not None:
        reached = max(reached, change.at + change.before - 1)
        at = change.at
    wall = _next_wall(cron, reached)
    return None if wall is None else reach(zone, after, wall)


def reach(zone: Zone, after: int, wall: int) -> int:
    """The first second later than `after` at which the wall clock shows `wall` or more, which it did not before."""
    at, offset = after, zone.offset(after)
    while (change := zone.next_change(at, wall - offset)) is not None:
        if change.at + change.after > wall:
            return change.at
        at, offset = change.at, change.after
    return wall - offset


def _next_wildcard(cron: Cron, zone: Zone, after: int) -> int | None:
    at, offset = after, zone.offset(after)
    passed = after + offset
    while (wall := _next_wall(cron, passed)) is not None:
        change = zone.next_change(at, wall - offset)
        if change is None:
            return wall - offset
        # The clock is moved before that: look on from there, as the new offset counts it.
        at, offset = change.at, change.after
        passed = at + offset - 1
    return None


# Matches on the wall clock


def _next_wall(cron: Cron, wall: int) -> int | None:
    """The first match strictly later than `wall`, within 100 years."""
    day, second = divmod(wall, DAY_S)
    if _is_day(cron, day) and (time := _next_time(cron, second + 1)) is not None:
        return day * DAY_S + time
    next_day = _next_day(cron, day)
    first = _next_time(cron, 0)
    return None if next_day is None or first is None else next_day * DAY_S + first


def _next_time(cron: Cron, second: int) -> int | None:
    """The first time of day that is not earlier than `second` of the day."""
    hours, minutes, seconds = cron.hours, cron.minutes, cron.seconds
    hour, rest = divmod(second, 3_600)
    minute, rest = divmod(rest, 60)
    index = bisect_left(hours, hour)
    if index < len(hours) and hours[index] == hour:
        at = bisect_left(minutes, minute)
        if at < len(minutes) and minutes[at] == minute:
            found = bisect_left(seconds, rest)
            if found < len(seconds):
                return hour * 3_600 + minute * 60 + seconds[found]
            at += 1
        if at < len(minutes):
            return hour * 3_600 + minutes[at] * 60 + seconds[0]
        index += 1
    return hours[index] * 3_600 + minutes[0] * 60 + seconds[0] if index < len(hours) else None


def _is_day(cron: Cron, day: int) -> bool:
    if cron.days is None and cron.weekdays is None and len(cron.months) == 12:
        return True
    known = date.fromordinal(day + _EPOCH_DAY)
    return known.month in cron.months and known.day in _month_days(cron, known.year, known.month, day - known.day + 1)


def _next_day(cron: Cron, day: int) -> int | None:
    """The first matching day later than `day` (days since the epoch), within 100 years."""
    known = date.fromordinal(day + _EPOCH_DAY)
    for year in range(known.year, known.year + HORIZON_YEARS + 1):
        for month in cron.months:
            if year == known.year and month < known.month:
                continue
            first = date(year, month, 1).toordinal() - _EPOCH_DAY
            days = _month_days(cron, year, month, first)
            index = bisect_right(days, day - first + 1)
            if index < len(days):
                return first + days[index] - 1
    return None


def _month_days(cron: Cron, year: int, month: int, first: int) -> tuple[int, ...]:
    """The matching days of a month whose first day is `first`. Months of one shape share their answer."""
    length = _LENGTHS[month - 1] + (month == 2 and isleap(year))
    shape = (first % 7, length)
    days = cron.month_days.get(shape)
    if days is None:
        days = cron.month_days[shape] = tuple(sorted(_find_days(cron, first, length)))
    return days


def _find_days(cron: Cron, first: int, length: int) -> set[int]:
    every = range(1, length + 1)
    if cron.days is None and cron.weekdays is None:
        return set(every)
    matching: set[int] = set()
    if cron.days is not None:
        matching.update(day for day in cron.days if day <= length)
        matching.update(_nearest_workday(first, length, day) for day in cron.nearest)
        if cron.last_day:
            matching.add(length)
    if cron.weekdays is not None:
        if cron.nth:
            matching.update(_nth_weekdays(cron, first, length))
        else:
            matching.update(day for day in every if _weekday(first, day) in cron.weekdays)
    return matching


def _weekday(first: int, day: int) -> int:
    return (first + day - 1 + 4) % 7  # the epoch was a Thursday


def _nearest_workday(first: int, length: int, day: int) -> int:
    day = min(day, length)
    weekday = _weekday(first, day)
    if weekday == 6:
        return day - 1 if day > 1 else day + 2
    if weekday == 0:
        return day + 1 if day < length else day - 2
    return day


def _nth_weekdays(cron: Cron, first: int, length: int) -> Iterator[int]:
    for weekday, n in cron.nth:
        all_days = [day for day in range(1, length + 1) if _weekday(first, day) == weekday]
        if n == -1 or n <= len(all_days):
            yield all_days[n if n == -1 else n - 1]
