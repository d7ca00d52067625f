"""An independent reading of schedules: it walks the clock second by second and knows nothing of the code under test.

It takes the sets of values that a generated expression was written from, not the expression's text.
"""

from __future__ import annotations

import calendar
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

from hypothesis import strategies as st

EPOCH = date(1970, 1, 1).toordinal()
WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")


@dataclass(frozen=True)
class Written:
    """An expression with the values it was written from. Day rules are functions of a date's facts."""

    text: str
    seconds: frozenset[int]
    minutes: frozenset[int]
    hours: frozenset[int]
    months: frozenset[int]
    days: frozenset[int] | None
    weekdays: frozenset[int] | None
    last_day: bool = False
    nearest: int | None = None
    nth: tuple[int, int] | None = None
    _known: dict[int, bool] = field(default_factory=dict, compare=False, repr=False)

    @property
    def fixed(self) -> bool:
        minute, hour = self.text.split(" ")[-5:-3]
        return not minute.startswith("*") and not hour.startswith("*")

    def on_day(self, day: int) -> bool:
        """Whether a day (since the epoch) matches."""
        known = self._known.get(day)
        if known is None:
            known = self._known[day] = self._on_date(date.fromordinal(day + EPOCH))
        return known

    def _on_date(self, on: date) -> bool:
        if on.month not in self.months:
            return False
        restricted = [self._by_month_day(on), self._by_weekday(on)]
        given = [answer for answer in restricted if answer is not None]
        return any(given) if given else True

    def _by_month_day(self, on: date) -> bool | None:
        last = calendar.monthrange(on.year, on.month)[1]
        if self.nearest is not None:
            wanted = date(on.year, on.month, min(self.nearest, last))
            workdays = [
                date(on.year, on.month, day) for day in range(1, last + 1) if date(on.year, on.month, day).weekday() < 5
            ]
            # The nearest one, a Friday before a Saturday, a Monday after a Sunday.
            return on == min(workdays, key=lambda day: (abs((day - wanted).days), day))
        if self.days is None:
            return None
        return on.day in self.days or (self.last_day and on.day == last)

    def _by_weekday(self, on: date) -> bool | None:
        if self.nth is not None:
            weekday, n = self.nth
            if on.isoweekday() % 7 != weekday:
                return False
            if n > 0:
                return (on.day - 1) // 7 + 1 == n
            return (on + timedelta(days=7)).month != on.month
        return None if self.weekdays is None else on.isoweekday() % 7 in self.weekdays

    def at(self, wall: int) -> bool:
        """Whether a wall time (seconds since the epoch as if it were UTC) matches."""
        day, second = divmod(wall, 86_400)
        return (
            second % 60 in self.seconds
            and second // 60 % 60 in self.minutes
            and second // 3_600 in self.hours
            and self.on_day(day)
        )


def wall_of(zone: ZoneInfo, instant: int) -> int:
    """The wall time at an instant."""
    local = datetime.fromtimestamp(instant, zone)
    return (local.toordinal() - EPOCH) * 86_400 + local.hour * 3_600 + local.minute * 60 + local.second


def walk(written: Written, zone: ZoneInfo, start: int, end: int) -> list[int]:
    """The instants from `start` to `end` at which it fires. No clock was put back within a day before `start`."""
    fires: list[int] = []
    seen: set[int] = set()
    before = wall_of(zone, start - 1)
    seen.add(before)
    for instant in range(start, end + 1):
        wall = wall_of(zone, instant)
        if written.fixed:
            passed = range(before + 1, wall + 1) if wall > before else range(wall, wall + 1)
            if any(time not in seen and written.at(time) for time in passed):
                fires.append(instant)
            seen.update(passed)
        elif written.at(wall):
            fires.append(instant)
        before = wall
    return fires


def changes_in(zone: ZoneInfo, start: int, end: int) -> Iterator[int]:
    """Each instant in the span from which another offset holds, found by asking every half hour."""
    before = datetime.fromtimestamp(start, UTC).astimezone(zone).utcoffset()
    for high in range(start + 1_800, end, 1_800):
        after = datetime.fromtimestamp(high, UTC).astimezone(zone).utcoffset()
        if after != before:
            yield next(
                instant
                for instant in range(high - 1_799, high + 1)
                if datetime.fromtimestamp(instant, UTC).astimezone(zone).utcoffset() == after
            )
        before = after


# Expressions together with their values


@st.composite
def _values(draw: st.DrawFn, low: int, high: int, *, star: bool) -> tuple[str, frozenset[int]]:
    shapes = ["one", "list", "range", "step", "from"] + (["star", "star step"] if star else [])
    shape = draw(st.sampled_from(shapes))
    every = range(low, high + 1)
    if shape == "star":
        return "*", frozenset(every)
    step = draw(st.integers(1, high))
    if shape == "star step":
        return f"*/{step}", frozenset(every[::step])
    first = draw(st.integers(low, high))
    if shape == "one":
        return str(first), frozenset({first})
    if shape == "list":
        values = draw(st.lists(st.integers(low, high), min_size=2, max_size=6))
        return ",".join(map(str, values)), frozenset(values)
    if shape == "from":
        return f"{first}/{step}", frozenset(range(first, high + 1, step))
    last = draw(st.integers(low, high).filter(lambda value: value != first))
    if first > last:
        return f"{first}-{last}", frozenset([*range(first, high + 1), *range(low, last + 1)])
    if shape == "step":
        return f"{first}-{last}/{step}", frozenset(range(first, last + 1, step))
    return f"{first}-{last}", frozenset(range(first, last + 1))


@st.composite
def expressions(draw: st.DrawFn, *, kind: str = "any", days: bool = True) -> Written:
    """Five or six fields. `kind` is `fixed`, `wildcard` or `any`; `days=False` leaves the days free."""
    if kind == "wildcard":
        minute = draw(_values(0, 59, star=True))
        hour = draw(_values(0, 23, star=True)) if minute[0].startswith("*") else ("*", frozenset(range(24)))
    else:
        minute = draw(_values(0, 59, star=kind == "any"))
        hour = draw(_values(0, 23, star=kind == "any"))
    second = draw(st.none() | _values(0, 59, star=True))
    day: tuple[str, frozenset[int] | None] = ("*", None)
    month: tuple[str, frozenset[int]] = ("*", frozenset(range(1, 13)))
    weekday: tuple[str, frozenset[int] | None] = ("*", None)
    last_day, nearest, nth = False, None, None
    if days:
        shape = draw(st.sampled_from(["*", "values", "L", "W"]))
        if shape == "values":
            day = draw(_values(1, 31, star=False))
        elif shape == "L":
            also = draw(st.integers(1, 31))
            day, last_day = (f"{also},L", frozenset({also})), True
        elif shape == "W":
            nearest = draw(st.integers(1, 31))
            day = (f"{nearest}W", frozenset())
        month = draw(st.just(month) | _values(1, 12, star=True))
        shape = draw(st.sampled_from(["*", "values", "names", "#", "L"]))
        if shape == "values":
            # `5/2` counts to 6 or to 7; `7-0` is refused.
            clear = lambda value: ("/" not in value[0] or "-" in value[0]) and value[0] != "7-0"  # noqa: E731
            text, values = draw(_values(0, 7, star=False).filter(clear))
            first, _, last = text.partition("-")
            if last.isdigit() and int(first) > int(last):
                values = frozenset([*range(int(first), 7), *range(int(last) + 1), int(first)])
            weekday = (text, frozenset(value % 7 for value in values))
        elif shape == "names":
            values = draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))
            weekday = (",".join(WEEKDAYS[value] for value in values), frozenset(values))
        elif shape in ("#", "L"):
            nth = (draw(st.integers(0, 6)), draw(st.integers(1, 5)) if shape == "#" else -1)
            weekday = (f"{nth[0]}#{nth[1]}" if shape == "#" else f"L{nth[0]}", frozenset())
    fields = [minute[0], hour[0], day[0], month[0], weekday[0]]
    return Written(
        text=" ".join(fields if second is None else [second[0], *fields]),
        seconds=frozenset({0}) if second is None else second[1],
        minutes=minute[1],
        hours=hour[1],
        months=month[1],
        days=day[1],
        weekdays=weekday[1],
        last_day=last_day,
        nearest=nearest,
        nth=nth,
    )
