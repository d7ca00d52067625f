"""Times at which a trigger does not fire: days, spans, public holidays, and what an iCalendar file says. No I/O.

An item is one of

    2026-12-25                                    a day, in the trigger's zone
    2026-12-24/2027-01-02                         days, both included
    12-25                                         a day of every year
    2026-05-01T10:00:00Z/2026-05-01T12:00:00Z     from an instant until just before another
    holidays:DE-BY                                public holidays of a country, or of a part of it

An excluded instant is not missed: it is not on the trigger's calendar.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from functools import lru_cache
from typing import Any, Final, cast

from schemas.errors import Ql3Error
from services.scheduler.cron.instants import LAST_S, reach
from services.scheduler.cron.rfc3339 import read_instant, write_instant
from services.scheduler.cron.zones import DAY_S, Zone

ITEMS: Final = 1_000
HOLIDAYS: Final = 16
CALENDAR_CHARS: Final = 256 * 1024
CALENDAR_LINES: Final = 10_000
_LATEST: Final = 1 << 62
_EPOCH_DAY: Final = date(1970, 1, 1).toordinal()
_AHEAD: Final = timedelta(days=10 * 366)
"""Repeating events of a calendar file are taken over for so long."""
_STEPS: Final = 200_000
"""What following the rules of a calendar file may take; a step is about a microsecond."""
_REBUILT: Final = 50
"""Steps of a rule's entering another month, or another year when it repeats by years."""
_AGAIN: Final = timedelta(days=10_227)
"""Dates and weekdays fall together again after 28 years, from 1901 to 2099."""
_FREQUENCIES: Final = {"DAILY": 10_227, "WEEKLY": 1_461, "MONTHLY": 336, "YEARLY": 28}
"""How many of each these years have."""
_RULE_PART = re.compile(r"[A-Z]+=[A-Z0-9,+-]+")
_ZONE_RULES: Final = 16
_ZONE_RULE = re.compile(
    r"RRULE:FREQ=YEARLY(?:;(?:BYMONTH=[0-9]{1,2}|BYDAY=[+-]?[1-4][A-Z]{2}|INTERVAL=1|WKST=[A-Z]{2}|UNTIL=[0-9TZ]{8,16}))*"
)

_DAYS = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2})(?:/([0-9]{4}-[0-9]{2}-[0-9]{2}))?")
_YEARLY = re.compile(r"([0-9]{2})-([0-9]{2})")
_HOLIDAYS = re.compile(r"holidays:([A-Za-z]{2})(?:-([A-Za-z0-9]{1,6}))?")


@dataclass(frozen=True, slots=True)
class Exclusions:
    """Days as (first, last) since the epoch, instants as [from, until) in seconds, sorted, none within another."""

    days: tuple[tuple[int, int], ...]
    yearly: frozenset[tuple[int, int]]
    spans: tuple[tuple[int, int], ...]
    countries: tuple[tuple[str, str | None], ...]

    def free_from(self, at_ms: int, zone: Zone) -> int | None:
        """None when the trigger may fire at an instant; otherwise the first instant at which it may have ended."""
        at = at_ms // 1000
        index = bisect_right(self.spans, (at, _LATEST))
        if index and at < (until := self.spans[index - 1][1]):
            return until * 1000
        day = (at + zone.offset(at)) // DAY_S
        last = self._last_of(day)
        if last is None:
            return None
        wall = (last + 1) * DAY_S
        # The wall clock is within two days of UTC: of what lies between, no change of the zone matters.
        return LAST_S * 1000 if wall >= LAST_S else reach(zone, max(at, wall - 3 * DAY_S), wall) * 1000

    def _last_of(self, day: int) -> int | None:
        """The last day of a span of excluded days that holds this one."""
        index = bisect_right(self.days, (day, _LATEST))
        if index and day <= (last := self.days[index - 1][1]):
            return last
        on = date.fromordinal(day + _EPOCH_DAY)
        if (on.month, on.day) in self.yearly:
            return day
        if any(on in _holidays(country, part, on.year) for country, part in self.countries):
            return day
        return None


def read(items: Sequence[str]) -> Exclusions:
    """What checked items mean."""
    days: list[tuple[int, int]] = []
    yearly: set[tuple[int, int]] = set()
    spans: list[tuple[int, int]] = []
    countries: list[tuple[str, str | None]] = []
    for item in items:
        if (found := _DAYS.fullmatch(item)) is not None:
            first = date.fromisoformat(found[1])
            last = date.fromisoformat(found[2]) if found[2] else first
            days.append((first.toordinal() - _EPOCH_DAY, last.toordinal() - _EPOCH_DAY))
        elif (found := _YEARLY.fullmatch(item)) is not None:
            yearly.add((int(found[1]), int(found[2])))
        elif (found := _HOLIDAYS.fullmatch(item)) is not None:
            countries.append((found[1].upper(), found[2].upper() if found[2] else None))
        else:
            begins, _, ends = item.partition("/")
            spans.append((read_instant(begins) // 1000, read_instant(ends) // 1000))
    return Exclusions(_merged(days), frozenset(yearly), _merged(spans), tuple(countries))


def _merged(spans: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Spans that overlap, as one."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return tuple(found)


def check(items: Sequence[str], calendar: str | None, zone: Zone, now_ms: int) -> list[str]:
    """The items in their stored spelling, with those of a calendar file. Raises `invalid`, naming the item."""
    if len(items) > ITEMS:
        raise Ql3Error("too_large", f"At most {ITEMS} exclusions; write spans of days instead.", field="exclude")
    stored = {_check_item(item.strip(), f"exclude[{index}]") for index, item in enumerate(items)}
    if calendar is not None:
        stored |= set(_of_calendar(calendar, zone, now_ms))
    if len(stored) > ITEMS:
        raise Ql3Error("too_large", f"At most {ITEMS} exclusions; write spans of days instead.", field="exclude")
    if sum(item.startswith("holidays:") for item in stored) > HOLIDAYS:
        raise Ql3Error(
            "too_large", f"At most {HOLIDAYS} items of public holidays; write other days as dates.", field="exclude"
        )
    return sorted(stored)


def _check_item(item: str, field: str) -> str:
    try:
        if (found := _DAYS.fullmatch(item)) is not None:
            first = date.fromisoformat(found[1])
            if found[2] and date.fromisoformat(found[2]) < first:
                raise ValueError("it ends before it begins")
            return item
        if (found := _YEARLY.fullmatch(item)) is not None:
            date(2024, int(found[1]), int(found[2]))
            return item
        if (found := _HOLIDAYS.fullmatch(item)) is not None:
            return _check_country(found[1].upper(), found[2].upper() if found[2] else None)
        begins, slash, ends = item.partition("/")
        if not slash:
            raise ValueError("write 2026-12-25, 2026-12-24/2027-01-02, 12-25, two instants or holidays:DE")
        if read_instant(ends) <= read_instant(begins):
            raise ValueError("it ends before it begins")
        return f"{write_instant(read_instant(begins))}/{write_instant(read_instant(ends))}"
    except ValueError as error:
        raise Ql3Error("invalid", f"This is not an exclusion: {error}.", field=field) from error


def _check_country(country: str, part: str | None) -> str:
    known = _countries()
    if country not in known:
        raise ValueError(f"no public holidays are known for {country}")
    if part is not None and part not in known[country]:
        raise ValueError(f"no part {part} of {country} is known")
    return f"holidays:{country}-{part}" if part else f"holidays:{country}"


@lru_cache(maxsize=1)
def _countries() -> dict[str, frozenset[str]]:
    import holidays  # eight megabytes of calendars: only for who asks

    supported = cast("dict[str, list[str]]", cast(Any, holidays).list_supported_countries())
    return {country: frozenset(part.upper() for part in parts) for country, parts in supported.items()}


@lru_cache(maxsize=4_096)
def _holidays(country: str, part: str | None, year: int) -> frozenset[date]:
    import holidays

    days = cast(Any, holidays).country_holidays(country, subdiv=part, years=year)
    return frozenset(cast("dict[date, str]", days))


# Calendar files


def _of_calendar(text: str, zone: Zone, now_ms: int) -> Iterator[str]:
    if len(text) > CALENDAR_CHARS:
        raise Ql3Error("too_large", f"A calendar has at most {CALENDAR_CHARS} characters.", field="exclude_calendar")
    unfolded = re.sub(r"\r?\n[ \t]", "", text).upper()
    if unfolded.count("\n") > CALENDAR_LINES:
        raise Ql3Error("too_large", f"A calendar has at most {CALENDAR_LINES} lines.", field="exclude_calendar")
    _check_zones(unfolded)
    import icalendar

    left = _Steps()
    try:
        parsed = cast(Any, icalendar).Calendar.from_ical(text)
        events: list[Any] = list(parsed.walk("VEVENT"))
        items = [item for event in events for item in _of_event(event, zone, now_ms, left)]
    except (ValueError, KeyError, IndexError, AttributeError, TypeError, OverflowError) as error:
        raise Ql3Error("invalid", "The calendar cannot be read as iCalendar.", field="exclude_calendar") from error
    if not items:
        raise Ql3Error("invalid", "The calendar has no event.", field="exclude_calendar")
    yield from items


class _Steps:
    """What is left of the work that the rules of one calendar may be."""

    def __init__(self) -> None:
        self._left = _STEPS

    def take(self, count: int) -> None:
        """Raises `too_large` when nothing is left."""
        self._left -= count
        if self._left < 0:
            raise Ql3Error(
                "too_large",
                "The rules of the calendar take too long to follow; begin them later, or write days and spans.",
                field="exclude_calendar",
            )


def _check_zones(unfolded: str) -> None:
    """The rules of a calendar's own time zones are followed elsewhere: only those that find a day in each year."""
    zones = [part.partition("END:VTIMEZONE")[0] for part in unfolded.split("BEGIN:VTIMEZONE")[1:]]
    rules = [line.strip() for lines in zones for line in lines.split("\n") if line.startswith("RRULE")]
    if len(rules) > _ZONE_RULES or not all(_ZONE_RULE.fullmatch(rule) for rule in rules):
        raise Ql3Error(
            "invalid",
            "A time zone of the calendar has rules that are not read here; name a zone as Europe/Berlin.",
            field="exclude_calendar",
        )


def _check_rule(rule: str) -> dict[str, str]:
    """The parts of a rule that repeats by days or longer, whose interval moves on. Raises `invalid`."""
    parts = rule.upper().split(";")
    found = dict(part.split("=", 1) for part in parts if _RULE_PART.fullmatch(part))
    times = 1
    for name in ("BYHOUR", "BYMINUTE", "BYSECOND"):
        times *= found.get(name, "").count(",") + 1
    if found.get("FREQ") not in _FREQUENCIES or times > 24:
        raise Ql3Error(
            "invalid",
            "A rule of the calendar repeats within a day; write FREQ=DAILY, WEEKLY, MONTHLY or YEARLY.",
            field="exclude_calendar",
        )
    if len(found) < len(parts) or len(rule) > 256 or int(found.get("INTERVAL", "1")) < 1:
        raise Ql3Error("invalid", "The calendar cannot be read as iCalendar.", field="exclude_calendar")
    return found


def _of_event(event: Any, zone: Zone, now_ms: int, left: _Steps) -> Iterator[str]:
    begins: date | datetime = event["DTSTART"].dt
    whole_days = not isinstance(begins, datetime)
    if "DTEND" in event:
        length: timedelta = event["DTEND"].dt - begins
    elif "DURATION" in event:
        length = event["DURATION"].dt
    else:
        length = timedelta(days=1) if whole_days else timedelta(0)
    if length <= timedelta(0):
        return
    for start in _starts(event, begins, now_ms, left):
        if whole_days:
            last = start + length - timedelta(days=1)
            yield start.isoformat() if last <= start else f"{start.isoformat()}/{last.isoformat()}"
        else:
            first_ms = _instant(cast(datetime, start), zone)
            yield f"{write_instant(first_ms)}/{write_instant(first_ms + length // timedelta(milliseconds=1))}"


def _starts(event: Any, begins: Any, now_ms: int, left: _Steps) -> Iterator[Any]:
    if "RRULE" not in event:
        yield begins
        return
    from dateutil.rrule import rrule, rrulestr

    whole_days = not isinstance(begins, datetime)
    naive = datetime.combine(begins, time()) if whole_days else begins.replace(tzinfo=None)
    # Wall times repeat, so the rule is followed without a zone and each start gets the zone back.
    rule = re.sub(r"(UNTIL=[0-9]{8}(?:T[0-9]{6})?)Z", r"\1", event["RRULE"].to_ical().decode())
    ends = datetime.fromtimestamp(now_ms / 1000, UTC).replace(tzinfo=None) + _AHEAD
    since = datetime.fromtimestamp(now_ms / 1000, UTC).replace(tzinfo=None) - timedelta(days=366)
    parts = _check_rule(rule)
    if (
        "COUNT" not in parts
        and naive.year > 1900
        and _FREQUENCIES[parts["FREQ"]] % int(parts.get("INTERVAL", "1")) == 0
    ):
        while naive + _AGAIN < since:
            naive += _AGAIN

    class Counted(cast(Any, rrule)):
        """Looks for Easter whenever it comes to another month or year: also where it finds nothing for long."""

        @property
        def _byeaster(self) -> Any:
            left.take(_REBUILT)
            return self.__dict__["_byeaster"]

        @_byeaster.setter
        def _byeaster(self, value: Any) -> None:
            self.__dict__["_byeaster"] = value

    dropped = {_naive(value.dt) for value in _listed(event.get("EXDATE"))}
    followed = cast(Any, rrulestr)(rule, dtstart=naive)
    followed.__class__ = Counted
    count = 0
    for found in followed:
        left.take(1)
        if found > ends or count > ITEMS:
            return
        if found >= since:
            count += 1
            if found not in dropped:
                yield found.date() if whole_days else found.replace(tzinfo=begins.tzinfo)


def _naive(value: Any) -> datetime:
    return value.replace(tzinfo=None) if isinstance(value, datetime) else datetime.combine(value, time())


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    many: list[Any] = cast("list[Any]", value) if isinstance(value, list) else [value]
    return [one for part in many for one in part.dts]


def _instant(at: datetime, zone: Zone) -> int:
    if at.tzinfo is not None:
        return int(at.timestamp()) * 1000
    # A floating time is a wall time of the trigger's zone.
    wall = int(at.replace(tzinfo=UTC).timestamp())
    return (wall - zone.offset(wall - zone.offset(wall))) * 1000
