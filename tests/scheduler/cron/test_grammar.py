"""What is accepted, what is refused, and that a refusal names the field and the mend."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from itertools import islice

import pytest
from croniter import croniter
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from schemas.errors import Ql3Error
from services.scheduler.cron.grammar import Boot, Cron, Every, Once, normalise, parse
from services.scheduler.cron.instants import instants
from services.scheduler.cron.zones import zone
from tests.scheduler.cron.oracle import Written, expressions

REFUSED = [
    # expression, field, what the mend must say
    ("", "expression", "five fields"),
    ("   ", "expression", "five fields"),
    ("* * * *", "expression", "4 fields"),
    ("* * * * * * *", "expression", "start and an end date"),
    ("? * * * *", "minute", "`*`"),
    ("0 0 ? * 1", "day of month", "`*`"),
    ("0 0 1 * ?", "day of week", "`*`"),
    ("/6 * * * *", "minute", "`*/6`"),
    ("0 /2 * * *", "hour", "`*/2`"),
    ("60 * * * *", "minute", "The full one is 0"),
    ("0 24 * * *", "hour", "Midnight is hour 0"),
    ("0 0 0 * *", "day of month", "1 to 31"),
    ("0 0 32 * *", "day of month", "1 to 31"),
    ("0 0 * 13 *", "month", "1 to 12"),
    ("0 0 * 0 *", "month", "1 to 12"),
    ("0 0 * * 8", "day of week", "0 to 7"),
    ("0 0 * january *", "month", "`jan`"),
    ("0 0 * xyz *", "month", "1 to 12, or jan to dec"),
    ("0 0 * * friday", "day of week", "`fri`"),
    ("0 0 * * fr", "day of week", "sun to sat"),
    ("61 * * * * *", "second", "0 to 59"),
    ("0 0 * * 5L", "day of week", "`L5`"),
    ("0 0 * * friL", "day of week", "`L5`"),
    ("0 0 * * L", "day of week", "`L"),
    ("0 0 LW * *", "day of month", "31W"),
    ("0 0 L-3 * *", "day of month", "last day"),
    ("0 0 1W,15 * *", "day of month", "two triggers"),
    ("0 0 32W * *", "day of month", "15W"),
    ("0 0 * * 1#6", "day of week", "mon#2"),
    ("0 0 * * 1#0", "day of week", "mon#2"),
    ("0 0 * * 1,2#1", "day of week", "two triggers"),
    ("0~30 * * * *", "minute", "`H(0-59)`"),
    ("R * * * *", "minute", "`H`"),
    ("H,5 * * * *", "minute", "stands alone"),
    ("H(5-3) * * * *", "minute", "a < b"),
    ("H(0-99) * * * *", "minute", "a < b"),
    ("H/0 * * * *", "minute", "1 or more"),
    ("*/0 * * * *", "minute", "1 or more"),
    ("*,5 * * * *", "minute", "stands alone"),
    ("1,,2 * * * *", "minute", "comma"),
    ("1-5-9 * * * *", "minute", "1-5"),
    ("1..5 * * * *", "minute", "`1-5`"),
    ("-1 * * * *", "minute", "1-5"),
    ("9-9 * * * *", "minute", "write `9`"),
    ("0 0 * * 7-0", "day of week", "write `7`"),
    ("50-10/5 * * * *", "minute", "list"),
    ("a * * * *", "minute", "0 to 59"),
    ("٣ * * * *", "expression", "ASCII"),
    ("0 0 * * *\n1 1 * * *", "expression", "one line"),
    ("0 0\u00a0* * *", "expression", "ASCII"),
    ("*" * 256, "expression", "at most 255"),
    ("TZ=Asia/Tokyo 0 0 * * *", "expression", "time zone"),
    ("CRON_TZ=UTC 0 0 * * *", "expression", "time zone"),
    ("rate(5 minutes)", "expression", "@every 5m"),
    ("cron(0 10 * * ? *)", "expression", "fields"),
    ("@reboot", "expression", "`@boot`"),
    ("@fortnightly", "expression", "@weekly"),
    ("@daily 5", "expression", "Nothing may follow"),
    ("@every", "expression", "@every 90s"),
    ("@every 0s", "expression", "1 second"),
    ("@every 5", "expression", "@every 90s"),
    ("@every 1.5h", "expression", "@every 90s"),
    ("@every 5s1h", "expression", "in this order"),
    ("@every 999999999d", "expression", "100 years"),
    ("@once", "expression", "with its offset"),
    ("@once 2031-05-04T08:00:00", "expression", "with its offset"),
    ("@once 2031-05-04T08:00:00.5Z", "expression", "whole second"),
    ("@once tomorrow", "expression", "with its offset"),
]


@pytest.mark.parametrize(("expression", "field", "mend"), REFUSED)
def test_refused_with_the_field_and_the_mend(expression: str, field: str, mend: str) -> None:
    with pytest.raises(Ql3Error) as refused:
        parse(expression)
    assert refused.value.code == "cron_invalid"
    assert refused.value.field == field
    assert mend in refused.value.sentence


@given(st.text(max_size=40) | st.text("0123456789*/-,#@LWHhlw() abc\t", max_size=40))
@settings(max_examples=500)
def test_any_text_is_read_or_refused(text: str) -> None:
    schedule = None
    with suppress(Ql3Error):
        schedule = parse(text)
    if schedule is None:
        with pytest.raises(Ql3Error) as refused:
            parse(text)
        assert refused.value.code == "cron_invalid"
        assert refused.value.field
        return
    # What was read once is read again, with the same meaning.
    assert parse(normalise(text)) == schedule
    assert normalise(normalise(text)) == normalise(text)


@pytest.mark.parametrize(
    ("written", "stored"),
    [
        ("  5   0 * * MON-Fri ", "5 0 * * mon-fri"),
        ("05 00 01 * *", "5 0 1 * *"),
        ("@Daily", "0 0 * * *"),
        ("@annually", "0 0 1 1 *"),
        ("@every 1h 30m", "@every 1h30m"),
        ("0 0 w15 * l5", "0 0 15W * L5"),
        ("h h(0-5) * * *", "H H(0-5) * * *"),
        ("0 0 * * 1-5#1", "0 0 * * mon-fri#1"),
        ("0 0 25-L * *", "0 0 25-31 * *"),
        ("@once 2031-05-04t08:00:00z", "@once 2031-05-04T08:00:00Z"),
    ],
)
def test_one_spelling_is_stored(written: str, stored: str) -> None:
    assert normalise(written) == stored
    assert parse(written) == parse(stored)


def test_kinds() -> None:
    assert parse("@boot") == Boot("@boot")
    assert parse("@every 2d3h") == Every("@every 2d3h", 51 * 3_600)
    assert parse("@once 1970-01-01T01:00:00+01:00") == Once("@once 1970-01-01T01:00:00+01:00", 0)


@pytest.mark.parametrize(
    ("expression", "fixed"),
    [
        ("30 2 * * *", True),
        ("* 30 2 * * *", True),
        ("0 0-23 * * *", True),
        ("*/30 2 * * *", False),
        ("30 */2 * * *", False),
        ("@hourly", False),
        ("@daily", True),
        ("H 2 * * *", False),
        ("0 H * * *", False),
        ("0 2 H * *", True),
    ],
)
def test_which_schedules_have_a_fixed_time(expression: str, fixed: bool) -> None:
    schedule = parse(expression)
    assert isinstance(schedule, Cron)
    assert schedule.fixed is fixed


@given(written=expressions())
@settings(max_examples=200, deadline=None)
def test_matches_are_those_of_croniter_where_both_read_the_same(written: Written) -> None:
    # Given both days, croniter lets `#` and `W` narrow the other field, where ours is "either".
    assume(written.nearest is None or (written.weekdays is None and written.nth is None))
    assume(written.nth is None or written.days is None)
    start = datetime(2023, 12, 31, 23, 59, 59)  # noqa: DTZ001
    six = written.text if len(written.text.split(" ")) == 6 else f"0 {written.text}"
    theirs = croniter(six, start, ret_type=float, second_at_beginning=True, max_years_between_matches=30)
    ours = [at // 1000 for at in islice(instants(parse(written.text), zone("UTC"), 1_704_067_199_000), 12)]
    assume(ours and ours[-1] < 2_600_000_000)
    assert [int(theirs.get_next()) for _ in ours] == ours
