"""The right instant: against a clock walked second by second, and by table where the rule is written down."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import islice
from zoneinfo import ZoneInfo

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from schemas.errors import Ql3Error
from services.scheduler.cron.grammar import Cron, parse
from services.scheduler.cron.instants import instants, next_instant, refuse_never
from services.scheduler.cron.rfc3339 import read_instant, write_instant
from services.scheduler.cron.zones import zone
from tests.scheduler.cron.oracle import Written, changes_in, expressions, walk, wall_of
from tests.scheduler.cron.zonefiles import ZONES

YEARS = st.integers(1970, 2099)
HOUR = 3_600


def second(year: int, month: int = 1, day: int = 1) -> int:
    """An instant at midnight UTC, in seconds."""
    return int(datetime(year, month, day, tzinfo=UTC).timestamp())


def fires(expression: str, name: str, after: str, count: int) -> list[str]:
    """The next instants as text."""
    return [write_instant(at) for at in islice(instants(parse(expression), zone(name), read_instant(after)), count)]


@given(data=st.data(), name=st.sampled_from(ZONES), year=YEARS, kind=st.sampled_from(["fixed", "wildcard", "any"]))
@settings(max_examples=60, deadline=None)
def test_nothing_skipped_or_repeated_around_a_transition(data: st.DataObject, name: str, year: int, kind: str) -> None:
    info = ZoneInfo(name)
    changes = list(changes_in(info, second(year), second(year + 1)))
    assume(changes or data.draw(st.integers(0, 9)) == 0)
    middle = data.draw(st.sampled_from(changes or [second(year, 6)]))
    start = middle - data.draw(st.integers(HOUR, 4 * HOUR))
    end = middle + 4 * HOUR
    written = data.draw(expressions(kind=kind, days=data.draw(st.booleans())))
    expected = walk(written, info, start, end)
    schedule = parse(written.text)
    found: list[int] = []
    for at_ms in instants(schedule, zone(name), (start - 1) * 1000):
        if at_ms > end * 1000:
            break
        found.append(at_ms // 1000)
    assert found == expected
    # From any instant in between, whatever was asked before.
    for _ in range(5):
        after = data.draw(st.integers(start, end))
        later = [at for at in expected if at > after]
        got = next_instant(schedule, zone(name), after * 1000 + data.draw(st.integers(0, 999)))
        assert later[:1] == [got // 1000] if later else got is None or got > end * 1000


@given(written=expressions(), name=st.sampled_from(ZONES), year=YEARS, data=st.data())
@settings(max_examples=300, deadline=None)
def test_days_are_those_of_the_calendar(written: Written, name: str, year: int, data: st.DataObject) -> None:
    """Strictly increasing, each a match, and no matching day without one, over a quarter of a year."""
    start = second(year) + data.draw(st.integers(0, 360)) * 86_400
    end = start + 90 * 86_400
    info = ZoneInfo(name)
    assume(not any(True for _ in changes_in(info, start - 86_400, end + 2 * 86_400)))
    schedule, where = parse(written.text), zone(name)
    assert isinstance(schedule, Cron)
    offset = wall_of(info, start) - start
    on = set[int]()
    after = start * 1000
    # One step a day: from the first match of a day to the second before the next day's first second.
    while (at := next_instant(schedule, where, after)) is not None and at < end * 1000:
        assert at > after
        wall = at // 1000 + offset
        assert written.at(wall)
        on.add(wall // 86_400)
        after = ((wall // 86_400 + 1) * 86_400 - offset - 1) * 1000
    whole = range((start + offset) // 86_400 + 1, (end + offset) // 86_400)
    assert on & set(whole) == {day for day in whole if written.on_day(day)}


@given(written=expressions(), year=YEARS)
@settings(max_examples=100, deadline=None)
def test_it_never_goes_back_and_always_matches(written: Written, year: int) -> None:
    schedule = parse(written.text)
    try:
        refuse_never(schedule)
    except Ql3Error:
        assert not any(written.on_day(day) for day in range(second(2000) // 86_400, second(2100) // 86_400))
        return
    previous = second(year) * 1000
    for at in islice(instants(schedule, zone("UTC"), previous), 50):
        assert at > previous
        assert written.at(at // 1000)
        previous = at


@given(name=st.sampled_from(ZONES), year=st.integers(1970, 2098))
@settings(max_examples=60, deadline=None)
def test_changes_of_a_zone_are_found(name: str, year: int) -> None:
    info, where = ZoneInfo(name), zone(name)
    at, end = second(year), second(year + 2)
    expected = list(changes_in(info, at, end))
    found: list[int] = []
    while (change := where.next_change(at, end)) is not None:
        assert (change.before, change.after) == (where.offset(change.at - 1), where.offset(change.at))
        found.append(change.at)
        at = change.at
    assert found == expected
    for instant in expected:
        for near in (instant - 1, instant, instant + 1):
            assert near + where.offset(near) == wall_of(info, near)


# Where the rule is written down


CASES = [
    # A fixed time in a gap fires once, at the first instant after it.
    ("30 2 * * *", "Europe/Berlin", "2026-03-28T12:00:00Z", ["2026-03-29T01:00:00Z", "2026-03-30T00:30:00Z"]),
    # Several in one gap, and one that matches right after it, are one.
    ("0,15,30,45 2 * * *", "Europe/Berlin", "2026-03-29T00:00:00Z", ["2026-03-29T01:00:00Z", "2026-03-30T00:00:00Z"]),
    ("0 2,3 * * *", "Europe/Berlin", "2026-03-29T00:00:00Z", ["2026-03-29T01:00:00Z", "2026-03-30T00:00:00Z"]),
    ("*/10 30 2 * * *", "Europe/Berlin", "2026-03-29T00:00:00Z", ["2026-03-29T01:00:00Z", "2026-03-30T00:30:00Z"]),
    # A repeated time fires the first time only.
    ("30 2 * * *", "Europe/Berlin", "2026-10-24T12:00:00Z", ["2026-10-25T00:30:00Z", "2026-10-26T01:30:00Z"]),
    ("30 2 * * *", "Europe/Berlin", "2026-10-25T00:30:00Z", ["2026-10-26T01:30:00Z", "2026-10-27T01:30:00Z"]),
    ("30 1 * * *", "America/New_York", "2026-11-01T05:31:00Z", ["2026-11-02T06:30:00Z"]),
    # Also when asked in the middle of the second pass; what comes after it is not lost.
    ("30 2 * * *", "Europe/Berlin", "2026-10-25T01:10:00Z", ["2026-10-26T01:30:00Z"]),
    ("0 3 * * *", "Europe/Berlin", "2026-10-25T01:10:00Z", ["2026-10-25T02:00:00Z"]),
    # A wildcard fires at each existing instant: not in a gap, twice in a repeated hour.
    ("*/30 2 * * *", "Europe/Berlin", "2026-03-29T00:00:00Z", ["2026-03-30T00:00:00Z", "2026-03-30T00:30:00Z"]),
    (
        "*/30 2 * * *",
        "Europe/Berlin",
        "2026-10-25T00:00:00Z",
        ["2026-10-25T00:30:00Z", "2026-10-25T01:00:00Z", "2026-10-25T01:30:00Z", "2026-10-26T01:00:00Z"],
    ),
    ("0 * * * *", "Europe/Berlin", "2026-10-24T23:30:00Z", ["2026-10-25T00:00:00Z", "2026-10-25T01:00:00Z"]),
    ("15 * * * *", "Europe/Berlin", "2026-03-29T00:20:00Z", ["2026-03-29T01:15:00Z", "2026-03-29T02:15:00Z"]),
    # Half an hour, in Lord Howe.
    ("15 2 * * *", "Australia/Lord_Howe", "2026-10-03T12:00:00Z", ["2026-10-03T15:30:00Z", "2026-10-04T15:15:00Z"]),
    ("45 1 * * *", "Australia/Lord_Howe", "2026-04-04T12:00:00Z", ["2026-04-04T14:45:00Z", "2026-04-05T15:15:00Z"]),
    # Samoa had no 30 December 2011.
    ("0 12 * * *", "Pacific/Apia", "2011-12-29T23:00:00Z", ["2011-12-30T10:00:00Z", "2011-12-30T22:00:00Z"]),
    ("0 12 30 * *", "Pacific/Apia", "2011-12-01T00:00:00Z", ["2011-12-30T10:00:00Z", "2012-01-29T22:00:00Z"]),
    ("0 * 30 * *", "Pacific/Apia", "2011-12-02T00:00:00Z", ["2012-01-29T10:00:00Z"]),
    # Midnight itself does not exist on some days.
    ("0 0 * * *", "America/Sao_Paulo", "2018-11-03T12:00:00Z", ["2018-11-04T03:00:00Z", "2018-11-05T02:00:00Z"]),
    ("@daily", "Asia/Beirut", "2021-03-27T12:00:00Z", ["2021-03-27T22:00:00Z", "2021-03-28T21:00:00Z"]),
    ("59 23 * * *", "America/Havana", "2026-10-31T12:00:00Z", ["2026-11-01T03:59:00Z", "2026-11-02T04:59:00Z"]),
    # Offsets with seconds.
    ("30 12 * * *", "Africa/Monrovia", "1972-01-05T00:00:00Z", ["1972-01-05T13:14:30Z", "1972-01-06T13:14:30Z"]),
    ("20 0 * * *", "Africa/Monrovia", "1972-01-06T13:00:00Z", ["1972-01-07T00:44:30Z", "1972-01-08T00:20:00Z"]),
    # Negative daylight saving, and a zone that suspends it for a month.
    ("30 1 * * *", "Europe/Dublin", "2026-03-28T12:00:00Z", ["2026-03-29T01:00:00Z", "2026-03-30T00:30:00Z"]),
    ("30 2 * * *", "Africa/Casablanca", "2026-03-21T12:00:00Z", ["2026-03-22T02:00:00Z", "2026-03-23T01:30:00Z"]),
    # Leap days; 2100 is not one.
    ("0 0 29 2 *", "UTC", "2096-02-28T00:00:00Z", ["2096-02-29T00:00:00Z", "2104-02-29T00:00:00Z"]),
    # Day of month and day of week: either.
    ("0 0 13 * 5", "UTC", "2026-02-01T00:00:00Z", ["2026-02-06T00:00:00Z", "2026-02-13T00:00:00Z"]),
    ("0 0 1 * 1#2", "UTC", "2026-06-01T00:00:00Z", ["2026-06-08T00:00:00Z", "2026-07-01T00:00:00Z"]),
    ("0 0 L * *", "UTC", "2028-02-01T00:00:00Z", ["2028-02-29T00:00:00Z", "2028-03-31T00:00:00Z"]),
    ("0 0 1W * *", "UTC", "2026-07-31T00:00:00Z", ["2026-08-03T00:00:00Z", "2026-09-01T00:00:00Z"]),
    ("0 0 * * L5", "UTC", "2026-05-01T00:00:00Z", ["2026-05-29T00:00:00Z", "2026-06-26T00:00:00Z"]),
    ("0 0 * 2 1#5", "UTC", "2026-01-01T00:00:00Z", ["2044-02-29T00:00:00Z", "2072-02-29T00:00:00Z"]),
    ("0 0 * * 5-7", "UTC", "2026-11-26T12:00:00Z", ["2026-11-27T00:00:00Z", "2026-11-28T00:00:00Z"]),
    # Leading seconds; fractions of the instant asked from.
    ("30 0 0 * * *", "UTC", "2026-01-01T00:00:29.999Z", ["2026-01-01T00:00:30Z", "2026-01-02T00:00:30Z"]),
    ("* * * * * *", "UTC", "2026-01-01T00:00:00.001Z", ["2026-01-01T00:00:01Z", "2026-01-01T00:00:02Z"]),
    ("@every 90s", "UTC", "2026-01-01T00:00:05Z", ["2026-01-01T00:01:35Z", "2026-01-01T00:03:05Z"]),
    ("@once 2026-05-04T08:00:00+08:00", "UTC", "2026-05-03T23:59:59Z", ["2026-05-04T00:00:00Z"]),
    ("@once 2026-05-04T08:00:00+08:00", "UTC", "2026-05-04T00:00:00Z", []),
    ("@boot", "UTC", "2026-05-04T00:00:00Z", []),
]


@pytest.mark.parametrize(("expression", "name", "after", "expected"), CASES)
def test_the_written_rule(expression: str, name: str, after: str, expected: list[str]) -> None:
    assert fires(expression, name, after, len(expected) or 1) == expected


def test_every_counts_from_its_anchor() -> None:
    schedule, utc = parse("@every 1m30s"), zone("UTC")
    anchor = read_instant("2026-01-01T00:00:05Z")
    assert next_instant(schedule, utc, anchor - 86_400_000, anchor_ms=anchor) == anchor + 90_000
    assert next_instant(schedule, utc, anchor + 90_000, anchor_ms=anchor) == anchor + 180_000
    assert next_instant(schedule, utc, anchor + 90_000 * 7 + 1, anchor_ms=anchor) == anchor + 90_000 * 8


def test_a_spread_schedule_stays_with_its_trigger_and_differs_between_them() -> None:
    def first(trigger: str) -> int | None:
        return next_instant(parse("H H(0-5) H * *", seed=trigger), zone("UTC"), 0)

    seen = {first(f"0198c0de-0000-7000-8000-{number:012}") for number in range(200)}
    assert len(seen) > 100
    assert first("one") == first("one")
    days = {
        day
        for number in range(200)
        for day in (parse("0 0 H * *", seed=str(number)),)
        if isinstance(day, Cron) and day.days is not None and max(day.days) > 28
    }
    assert not days


@pytest.mark.parametrize("expression", ["0 0 30 2 *", "0 0 31 4,6,9,11 *", "0 0 30,31 2 *"])
def test_a_schedule_that_never_fires_is_refused(expression: str) -> None:
    schedule = parse(expression)
    with pytest.raises(Ql3Error) as refused:
        refuse_never(schedule)
    assert refused.value.code == "cron_never_fires"
    assert refused.value.field == "day of month"
    assert next_instant(schedule, zone("UTC"), 0) is None


@pytest.mark.parametrize("expression", ["0 0 29 2 *", "0 0 30 2 1", "0 0 31W 2 *", "0 0 L 2 *", "0 0 * 2 3#5"])
def test_a_schedule_that_fires_seldom_is_kept(expression: str) -> None:
    refuse_never(parse(expression))
    assert next_instant(parse(expression), zone("UTC"), 0) is not None


@given(st.integers(-2_208_988_800_000, 32_000_000_000_000))
def test_instants_are_written_as_they_are_read(at_ms: int) -> None:
    assert read_instant(write_instant(at_ms)) == at_ms // 1000 * 1000


@pytest.mark.parametrize(
    "text",
    [
        "2026-01-01T00:00:00",
        "2026-01-01",
        "now",
        "2026-13-01T00:00:00Z",
        "2026-W01-1T00:00:00Z",
        "20260101T000000Z",
        "",
    ],
)
def test_instants_without_an_offset_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        read_instant(text)
