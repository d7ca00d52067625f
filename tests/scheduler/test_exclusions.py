"""Times at which a trigger does not fire, and inputs that a task takes."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from itertools import islice
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import Ql3Error
from schemas.tasks import Execution, TaskSpec
from schemas.triggers import TriggerSpec
from services.kit.clock import ManualClock
from services.scheduler import triggers
from services.scheduler.cron.rfc3339 import write_instant
from services.scheduler.exclusions import _holidays, read
from services.scheduler.parameters import check_inputs, check_schema
from services.scheduler.triggers import check, plan, preview
from tests.scheduler.conftest import Room, at, cron

NOW = at("2026-01-01 00:00:00")
SHIFTS = """BEGIN:VCALENDAR
VERSION:2.0
PRODID:-//shifts//EN
BEGIN:VEVENT
UID:1
DTSTART;VALUE=DATE:20260105
DTEND;VALUE=DATE:20260107
SUMMARY:closed
END:VEVENT
BEGIN:VEVENT
UID:2
DTSTART;TZID=Europe/Berlin:20260108T120000
DTEND;TZID=Europe/Berlin:20260108T140000
SUMMARY:maintenance
END:VEVENT
BEGIN:VEVENT
UID:3
DTSTART;VALUE=DATE:20260110
RRULE:FREQ=WEEKLY;COUNT=3
EXDATE;VALUE=DATE:20260117
SUMMARY:saturdays
END:VEVENT
END:VCALENDAR
"""


def instants(expression: str, count: int, *exclude: str, timezone: str = "UTC", **more: Any) -> list[str]:
    """The first instants from 2026 on."""
    spec = check(TriggerSpec(expression=expression, timezone=timezone, exclude=list(exclude), **more), NOW)
    found = plan("trigger", spec, NOW)
    assert found is not None
    return [write_instant(instant) for instant in islice(found.between(NOW - 1, NOW + 10**12), count)]


def days(expression: str, count: int, *exclude: str, **more: Any) -> list[str]:
    """The days of the first instants, as `MM-DD`."""
    return [instant[5:10] for instant in instants(expression, count, *exclude, **more)]


def test_days_and_spans_and_yearly_days() -> None:
    assert days("@daily", 4, "2026-01-02", "2026-01-04/2026-01-06") == ["01-01", "01-03", "01-07", "01-08"]
    assert days("0 0 25 12 *", 2, "12-25") == []
    assert days("0 0 24,25 12 *", 2, "12-25") == ["12-24", "12-24"]


def test_a_day_is_that_of_the_triggers_zone() -> None:
    found = instants("0 */6 * * *", 5, "2026-01-02", timezone="Asia/Shanghai")
    assert found == [
        "2026-01-01T04:00:00Z",
        "2026-01-01T10:00:00Z",
        "2026-01-02T16:00:00Z",
        "2026-01-02T22:00:00Z",
        "2026-01-03T04:00:00Z",
    ]


def test_a_span_of_instants_holds_its_beginning_and_not_its_end() -> None:
    found = instants("0 * * * *", 3, "2026-01-01T01:00:00Z/2026-01-01T03:00:00Z")
    assert found == ["2026-01-01T00:00:00Z", "2026-01-01T03:00:00Z", "2026-01-01T04:00:00Z"]


def test_public_holidays_of_a_part_of_a_country() -> None:
    assert days("@daily", 6, "holidays:de") == [f"01-0{day}" for day in range(2, 8)]  # the 6th is none in all of it
    assert "01-06" not in days("@daily", 6, "holidays:DE-BY")


def test_a_second_of_an_excluded_day_is_not_walked_through() -> None:
    assert instants("* * * * * *", 1, "2026-01-01/2026-12-31") == ["2027-01-01T00:00:00Z"]
    assert instants("@every 1s", 1, "2026-01-01/2026-12-31") == ["2027-01-01T00:00:00Z"]


def test_a_calendar_of_which_everything_is_excluded_is_over() -> None:
    assert instants("0 0 1 1 *", 1, "01-01") == []


def test_a_calendar_file_becomes_exclusions() -> None:
    spec = check(TriggerSpec(expression="0 * * * *", exclude_calendar=SHIFTS, exclude=["12-25"]), NOW)
    assert spec.exclude_calendar is None
    assert spec.exclude == [
        "12-25",
        "2026-01-05/2026-01-06",
        "2026-01-08T11:00:00Z/2026-01-08T13:00:00Z",
        "2026-01-10",
        "2026-01-24",
    ]


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"exclude": ["tomorrow"]}, "exclude[0]"),
        ({"exclude": ["12-25", "2026-02-30"]}, "exclude[1]"),
        ({"exclude": ["2026-02-02/2026-02-01"]}, "exclude[0]"),
        ({"exclude": ["13-01"]}, "exclude[0]"),
        ({"exclude": ["holidays:XX"]}, "exclude[0]"),
        ({"exclude": ["holidays:DE-QQ"]}, "exclude[0]"),
        ({"exclude": ["2026-01-01T00:00:00/2026-01-02T00:00:00"]}, "exclude[0]"),
        ({"exclude": ["2026-01-01T00:00:00Z/9999-12-31T23:59:59-12:00"]}, "exclude[0]"),
        ({"exclude": ["0001-01-01T00:00:00+12:00/2027-01-01T00:00:00Z"]}, "exclude[0]"),
        ({"exclude_calendar": "no calendar"}, "exclude_calendar"),
        ({"exclude_calendar": "BEGIN:VCALENDAR\nEND:VCALENDAR\n"}, "exclude_calendar"),
    ],
)
def test_a_wrong_exclusion_is_refused_by_field(more: dict[str, Any], field: str) -> None:
    with pytest.raises(Ql3Error) as refused:
        check(TriggerSpec(expression="@daily", **more), NOW)
    assert (refused.value.code, refused.value.field) == ("invalid", field)


def event(*lines: str) -> str:
    """A calendar of one event."""
    return "\n".join(["BEGIN:VCALENDAR", "BEGIN:VEVENT", *lines, "END:VEVENT", "END:VCALENDAR", ""])


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "Pacific/Apia"])
@pytest.mark.parametrize("item", ["0999-01-01/9999-12-31", "0999-01-01T00:00:00Z/9999-12-31T23:59:59Z"])
def test_an_exclusion_may_begin_and_end_as_far_away_as_it_can_be_written(zone: str, item: str) -> None:
    assert instants("* * * * *", 1, item, timezone=zone) == []


@pytest.mark.parametrize(
    ("lines", "stored"),
    [
        (("DTSTART;VALUE=DATE:00010101",), ["0001-01-01"]),
        (("DTSTART:09990101T000000Z", "DURATION:PT1S"), ["0999-01-01T00:00:00Z/0999-01-01T00:00:01Z"]),
        (("DTSTART;VALUE=DATE:99991231",), None),
        (("DTSTART:99991231T235959Z", "DURATION:P1D"), None),
    ],
)
def test_an_event_at_the_end_of_all_calendars(lines: tuple[str, ...], stored: list[str] | None) -> None:
    spec = TriggerSpec(expression="@daily", exclude_calendar=event(*lines))
    if stored is not None:
        checked = check(spec, NOW)
        assert checked.exclude == stored
        assert read(checked.exclude)
        return
    with pytest.raises(Ql3Error) as refused:
        check(spec, NOW)
    assert (refused.value.code, refused.value.field) == ("invalid", "exclude_calendar")


@pytest.mark.parametrize(
    ("calendar", "code", "said"),
    [
        (event("DTSTART:19700101T000000", "DURATION:PT1S", "RRULE:FREQ=SECONDLY"), "invalid", "FREQ=DAILY"),
        (event("DTSTART:19700101T000000", "DURATION:PT1S", "RRULE:FREQ=MINUTELY"), "invalid", "FREQ=DAILY"),
        (event("DTSTART:19700101T000000", "DURATION:PT1S", "RRULE:FREQ=HOURLY"), "invalid", "FREQ=DAILY"),
        (
            event(
                "DTSTART:20260101T000000", "DURATION:PT1S", f"RRULE:FREQ=DAILY;BYMINUTE={','.join(map(str, range(60)))}"
            ),
            "invalid",
            "FREQ=DAILY",
        ),
        (event("DTSTART:20260101T000000", "DURATION:PT1S", "RRULE:FREQ=DAILY;INTERVAL=0;BYMONTH=2"), "invalid", "read"),
        (event("DTSTART;VALUE=DATE:20260101", "RRULE:FREQ=YEARLY;BYMONTH=2;BYMONTHDAY=30"), "too_large", "too long"),
        (event("DTSTART;VALUE=DATE:20260101", "RRULE:FREQ=DAILY;BYMONTH=2;BYMONTHDAY=30"), "too_large", "too long"),
        (event("DTSTART;VALUE=DATE:00010101", "RRULE:FREQ=DAILY;COUNT=900000"), "too_large", "too long"),
        (event("DTSTART;VALUE=DATE:20260101", *["X:1"] * 10_000), "too_large", "lines"),
        (
            "BEGIN:VCALENDAR\nBEGIN:VTIMEZONE\nTZID:X\nBEGIN:STANDARD\nDTSTART:19700101T000000\nRRULE:FREQ=SECONDLY\n"
            "TZOFFSETFROM:+0100\nTZOFFSETTO:+0100\nEND:STANDARD\nEND:VTIMEZONE\nEND:VCALENDAR\n",
            "invalid",
            "Europe/Berlin",
        ),
    ],
    ids=["second", "minute", "hour", "minutes", "still", "never", "never-daily", "old", "lines", "zone"],
)
def test_a_calendar_that_takes_long_to_follow_is_refused(calendar: str, code: str, said: str) -> None:
    with pytest.raises(Ql3Error) as refused:
        check(TriggerSpec(expression="@daily", exclude_calendar=calendar), NOW)
    assert (refused.value.code, refused.value.field) == (code, "exclude_calendar")
    assert said in (refused.value.detail or "")


def test_a_calendar_may_bring_the_rules_of_its_zone() -> None:
    zone = """BEGIN:VTIMEZONE
TZID:Office
BEGIN:STANDARD
DTSTART:16011028T030000
RRULE:FREQ=YEARLY;BYDAY=-1SU;BYMONTH=10
TZOFFSETFROM:+0200
TZOFFSETTO:+0100
END:STANDARD
BEGIN:DAYLIGHT
DTSTART:16010325T020000
RRULE:FREQ=YEARLY;BYDAY=-1SU;BYMONTH=3
TZOFFSETFROM:+0100
TZOFFSETTO:+0200
END:DAYLIGHT
END:VTIMEZONE
"""
    one = event("DTSTART;TZID=Office:20260705T100000", "DURATION:PT1H")
    calendar = one.replace("BEGIN:VEVENT", f"{zone}BEGIN:VEVENT")
    checked = check(TriggerSpec(expression="@daily", exclude_calendar=calendar), NOW)
    assert checked.exclude == ["2026-07-05T08:00:00Z/2026-07-05T09:00:00Z"]


@pytest.mark.parametrize(
    ("starts", "rule"),
    [
        ("19100103", "FREQ=WEEKLY"),
        ("19100103", "FREQ=WEEKLY;INTERVAL=2"),
        ("19100103", "FREQ=WEEKLY;INTERVAL=3"),
        ("19120229", "FREQ=YEARLY"),
        ("19500131", "FREQ=MONTHLY;INTERVAL=5"),
        ("19700101", "FREQ=DAILY;INTERVAL=100;COUNT=210"),
    ],
)
def test_a_rule_that_began_long_ago_keeps_its_phase(starts: str, rule: str) -> None:
    from dateutil.rrule import rrulestr

    whole = rrulestr(rule, dtstart=datetime.strptime(starts, "%Y%m%d"))  # noqa: DTZ007 - days
    since = datetime.fromtimestamp(NOW / 1000, UTC).replace(tzinfo=None) - timedelta(days=366)
    expected = [f"{day:%Y-%m-%d}" for day in islice(whole.xafter(since, inc=True), 2)]
    checked = check(
        TriggerSpec(expression="@daily", exclude_calendar=event(f"DTSTART;VALUE=DATE:{starts}", f"RRULE:{rule}")), NOW
    )
    assert checked.exclude[:2] == expected


def test_public_holidays_are_of_a_few_countries() -> None:
    named = "AT BE BG CH CZ DE DK EE ES FI FR GB GR HU IE IT"
    few = [f"holidays:{name}" for name in named.split()]
    assert len(check(TriggerSpec(expression="@daily", exclude=few), NOW).exclude) == 16
    with pytest.raises(Ql3Error) as refused:
        check(TriggerSpec(expression="@daily", exclude=[*few, "holidays:PL"]), NOW)
    assert (refused.value.code, refused.value.field) == ("too_large", "exclude")


def test_holidays_are_worked_out_for_few_years() -> None:
    _holidays.cache_clear()
    assert instants("0 0 1 1 *", 1, "holidays:DE", "holidays:AT") == []
    yearly = preview(TriggerSpec(expression="0 0 2 7 *", exclude=["holidays:DE", "holidays:AT"]), NOW, 50)
    assert [write_instant(instant)[:10] for instant in yearly.instants] == [
        f"{year}-07-02" for year in range(2026, 2038)
    ]
    assert _holidays.cache_info().misses <= 4 * 13


def test_large_calendars_are_kept_in_small_number() -> None:
    days = [f"{date(2026, 1, 1) + timedelta(days=2 * number)}" for number in range(1_000)]
    spec = check(TriggerSpec(expression="0 0 * * *", exclude=days), NOW)
    small, large = triggers._kept.cache_info().currsize, triggers._kept_large.cache_info().maxsize
    for number in range(200):
        assert plan(f"trigger-{number}", spec, NOW) is not None
    assert triggers._kept.cache_info().currsize == small
    assert large is not None
    assert large <= 128


def test_spans_that_overlap_are_one() -> None:
    assert days("@daily", 2, "2026-01-01/2026-01-20", "2026-01-02/2026-01-03", "2026-01-05") == ["01-21", "01-22"]
    found = instants(
        "0 * * * *", 1, "2026-01-01T00:00:00Z/2026-01-01T09:00:00Z", "2026-01-01T01:00:00Z/2026-01-01T02:00:00Z"
    )
    assert found == ["2026-01-01T09:00:00Z"]


@given(
    first=st.dates(min_value=date(2026, 1, 1), max_value=date(2030, 1, 1)),
    length=st.integers(0, 40),
    zone=st.sampled_from(["UTC", "America/Sao_Paulo", "Pacific/Apia", "Australia/Lord_Howe", "Africa/Casablanca"]),
)
@settings(max_examples=60, deadline=None)
def test_what_is_left_is_what_is_not_excluded(first: Any, length: int, zone: str) -> None:

    last = first + timedelta(days=length)
    whole = plan("t", check(TriggerSpec(expression="17 */3 * * *", timezone=zone), NOW), NOW)
    left = plan(
        "t", check(TriggerSpec(expression="17 */3 * * *", timezone=zone, exclude=[f"{first}/{last}"]), NOW), NOW
    )
    assert whole is not None
    assert left is not None
    start = int(datetime(first.year, first.month, first.day, tzinfo=UTC).timestamp() * 1000) - 3 * 86_400_000
    end = start + (length + 7) * 86_400_000

    def day_of(instant: int) -> Any:
        return datetime.fromtimestamp(instant / 1000, ZoneInfo(zone)).date()

    expected = [instant for instant in whole.between(start, end) if not first <= day_of(instant) <= last]
    assert list(left.between(start, end)) == expected


async def test_an_excluded_instant_is_neither_run_nor_missed(room: Room, clock: ManualClock) -> None:
    await room.create("daily", cron("0 9 * * *", exclude=["2026-03-03/2026-03-05"]))
    clock.advance(4 * 86_400_000)
    await room.look()
    assert room.ledger.instants() == [at("2026-03-06 09:00:00")]
    assert await room.causes() == []


# Parameters

DEPTH = {
    "type": "object",
    "properties": {
        "depth": {"type": "integer", "minimum": 1, "default": 3},
        "ratio": {"type": "number", "maximum": 0.5},
    },
    "required": ["depth"],
    "additionalProperties": False,
}


def with_parameters(parameters: dict[str, Any]) -> TaskSpec:
    """A task that takes these inputs."""
    return TaskSpec(execution=Execution(command=["/bin/true"]), parameters=parameters)


def test_inputs_are_checked_and_defaults_filled_in() -> None:
    assert check_inputs(DEPTH, None) == {"depth": 3}
    assert check_inputs(DEPTH, {"depth": 9, "ratio": 0.25}) == {"depth": 9, "ratio": 0.25}
    assert check_inputs(None, {"anything": [1]}) == {"anything": [1]}
    for inputs, field in (
        ({"depth": "many"}, "inputs.depth"),
        ({"depth": 0}, "inputs.depth"),
        ({"ratio": 0.75}, "inputs.ratio"),
        ({"other": 1}, "inputs"),
    ):
        with pytest.raises(Ql3Error) as refused:
            check_inputs(DEPTH, inputs)
        assert (refused.value.code, refused.value.field) == ("invalid", field)


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"type": "array"}, "spec.parameters"),
        ({"type": "object", "properties": {"a": {"type": "nonsense"}}}, "spec.parameters.properties.a.type"),
        ({"properties": {"a": {"$ref": "https://example.org/schema"}}}, "spec.parameters"),
        ({"properties": {"a": {"description": "x" * 40_000}}}, "spec.parameters"),
    ],
)
def test_a_wrong_schema_is_refused(parameters: dict[str, Any], field: str) -> None:
    with pytest.raises(Ql3Error) as refused:
        check_schema(parameters)
    assert refused.value.field == field


async def test_a_run_gets_checked_inputs(room: Room, clock: ManualClock) -> None:
    await room.create("deep", spec=with_parameters(DEPTH))
    await room.run("deep", inputs={"depth": 5})
    with pytest.raises(Ql3Error) as refused:
        await room.run("deep", inputs={"depth": "x"})
    assert refused.value.field == "inputs.depth"
    assert [order.inputs for order in room.ledger.runs.values()] == [{"depth": 5}]


async def test_a_trigger_gives_inputs_and_is_refused_for_wrong_ones(room: Room, clock: ManualClock) -> None:
    with pytest.raises(Ql3Error) as refused:
        await room.create("deep", cron("@hourly", inputs={"depth": 0}), spec=with_parameters(DEPTH))
    assert refused.value.field == "triggers[0].inputs.depth"
    task = await room.create("deep", cron("@hourly", inputs={"ratio": 0.5}), spec=with_parameters(DEPTH))
    clock.advance(3_600_000)
    await room.look()
    assert [order.inputs for order in room.ledger.runs.values()] == [{"depth": 3, "ratio": 0.5}]
    # An edit that takes these inputs no more is not silent.
    await room.update(task, with_parameters({"type": "object", "properties": {}, "additionalProperties": False}))
    clock.advance(3_600_000)
    await room.look()
    assert await room.causes() == [("inputs_refused", 1)]
    assert len(room.ledger.runs) == 1
