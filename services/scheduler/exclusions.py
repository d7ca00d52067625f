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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from functools import lru_cache
from itertools import islice
from typing import Any, Final, cast

from schemas.errors import Ql3Error
from services.scheduler.cron.instants import reach
from services.scheduler.cron.rfc3339 import read_instant, write_instant
from services.scheduler.cron.zones import DAY_S, Zone

ITEMS: Final = 1_000
CALENDAR_CHARS: Final = 256 * 1024
_EPOCH_DAY: Final = date(1970, 1, 1).toordinal()
_AHEAD: Final = timedelta(days=10 * 366)
"""Repeating events of a calendar file are taken over for so long."""

_DAYS = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2})(?:/([0-9]{4}-[0-9]{2}-[0-9]{2}))?")
_YEARLY = re.compile(r"([0-9]{2})-([0-9]{2})")
_HOLIDAYS = re.compile(r"holidays:([A-Za-z]{2})(?:-([A-Za-z0-9]{1,6}))?")


@dataclass(frozen=True, slots=True)
class Exclusions:
    """Days as (first, last) since the epoch, instants as [from, until) in seconds, all sorted."""

    days: tuple[tuple[int, int], ...]
    yearly: frozenset[tuple[int, int]]
    spans: tuple[tuple[int, int], ...]
    countries: tuple[tuple[str, str | None], ...]

    def free_from(self, at_ms: int, zone: Zone) -> int | None:
        """None when the trigger may fire at an instant; otherwise the first instant at which it may have ended."""
        at = at_ms // 1000
        for first, until in self.spans:
            if first <= at < until:
                return until * 1000
        day = (at + zone.offset(at)) // DAY_S
        last = self._last_of(day)
        if last is None:
            return None
        return reach(zone, at, (last + 1) * DAY_S) * 1000

    def _last_of(self, day: int) -> int | None:
        """The last day of a span of excluded days that holds this one."""
        for first, last in self.days:
            if first <= day <= last:
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
    return Exclusions(tuple(sorted(days)), frozenset(yearly), tuple(sorted(spans)), tuple(countries))


def check(items: Sequence[str], calendar: str | None, zone: Zone, now_ms: int) -> list[str]:
    """The items in their stored spelling, with those of a calendar file. Raises `invalid`, naming the item."""
    stored = {_check_item(item.strip(), f"exclude[{index}]") for index, item in enumerate(items)}
    if calendar is not None:
        stored |= set(_of_calendar(calendar, zone, now_ms))
    if len(stored) > ITEMS:
        raise Ql3Error("too_large", f"At most {ITEMS} exclusions; write spans of days instead.", field="exclude")
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


@lru_cache(maxsize=1_024)
def _holidays(country: str, part: str | None, year: int) -> frozenset[date]:
    import holidays

    days = cast(Any, holidays).country_holidays(country, subdiv=part, years=year)
    return frozenset(cast("dict[date, str]", days))


# Calendar files


def _of_calendar(text: str, zone: Zone, now_ms: int) -> Iterator[str]:
    if len(text) > CALENDAR_CHARS:
        raise Ql3Error("too_large", f"A calendar has at most {CALENDAR_CHARS} characters.", field="exclude_calendar")
    import icalendar

    try:
        parsed = cast(Any, icalendar).Calendar.from_ical(text)
        events: list[Any] = list(parsed.walk("VEVENT"))
        items = [item for event in events for item in _of_event(event, zone, now_ms)]
    except (ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        raise Ql3Error("invalid", "The calendar cannot be read as iCalendar.", field="exclude_calendar") from error
    if not items:
        raise Ql3Error("invalid", "The calendar has no event.", field="exclude_calendar")
    yield from items


def _of_event(event: Any, zone: Zone, now_ms: int) -> Iterator[str]:
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
    for start in _starts(event, begins, now_ms):
        if whole_days:
            last = start + length - timedelta(days=1)
            yield f"{start:%Y-%m-%d}" if last <= start else f"{start:%Y-%m-%d}/{last:%Y-%m-%d}"
        else:
            first_ms = _instant(cast(datetime, start), zone)
            yield f"{write_instant(first_ms)}/{write_instant(first_ms + length // timedelta(milliseconds=1))}"


def _starts(event: Any, begins: Any, now_ms: int) -> Iterator[Any]:
    if "RRULE" not in event:
        yield begins
        return
    from dateutil.rrule import rrulestr

    whole_days = not isinstance(begins, datetime)
    naive = datetime.combine(begins, time()) if whole_days else begins.replace(tzinfo=None)
    # Wall times repeat, so the rule is followed without a zone and each start gets the zone back.
    rule = re.sub(r"(UNTIL=[0-9]{8}(?:T[0-9]{6})?)Z", r"\1", event["RRULE"].to_ical().decode())
    ends = datetime.fromtimestamp(now_ms / 1000, UTC).replace(tzinfo=None) + _AHEAD
    since = datetime.fromtimestamp(now_ms / 1000, UTC).replace(tzinfo=None) - timedelta(days=366)
    dropped = {_naive(value.dt) for value in _listed(event.get("EXDATE"))}
    for found in islice(cast(Any, rrulestr)(rule, dtstart=naive).xafter(since, inc=True), ITEMS + 1):
        if found > ends:
            return
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
