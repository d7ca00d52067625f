"""A schedule in words."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from services.scheduler.cron.grammar import parse
from services.scheduler.cron.words import explain
from tests.scheduler.cron.oracle import Written, expressions


@pytest.mark.parametrize(
    ("expression", "english", "chinese"),
    [
        ("* * * * *", "every minute", "每分钟"),
        ("*/5 * * * *", "every 5 minutes", "每 5 分钟"),
        ("30 2 * * *", "at 02:30 every day", "每天 02:30"),
        ("15 30 4 * * *", "at 04:30:15 every day", "每天 04:30:15"),
        ("* * * * * *", "every second", "每秒"),
        ("*/7 * * * * *", "every 7 seconds from second 0 to 56", "0 至 56 秒间每 7 秒"),
        ("0 9 * * 1-5", "at 09:00 on Monday to Friday", "周一至周五 09:00"),
        ("0 9,18 * * 0,6", "at 09:00 and 18:00 on Saturday and Sunday", "周六、周日 09:00、18:00"),
        ("5,35 * * * *", "at minutes 5 and 35 of every hour", "每小时 5、35 分"),
        ("0 0 1,15 * 5", "at 00:00 on days 1 and 15 of the month or on Friday", "每月 1、15 日或周五 00:00"),
        ("0 0 1 1 *", "at 00:00 on day 1 of the month in January", "1 月 1 日 00:00"),
        ("0 0 L * *", "at 00:00 on the last day of the month", "每月最后一天 00:00"),
        ("0 9 15W * *", "at 09:00 on the working day nearest to day 15 of the month", "每月最接近 15 日的工作日 09:00"),
        ("0 9 * * 1#2", "at 09:00 on the second Monday of the month", "每月第二个周一 09:00"),
        ("0 9 * * L5", "at 09:00 on the last Friday of the month", "每月最后一个周五 09:00"),
        ("@every 90s", "every 1 minute 30 seconds", "每隔 1 分钟 30 秒"),
        ("@every 1h", "every hour", "每隔 1 小时"),
        ("@boot", "each time the system starts", "系统每次启动时"),
        ("@once 2031-05-04T08:00:00+08:00", "once, at 2031-05-04T00:00:00Z", "仅一次,在 2031-05-04T00:00:00Z"),
    ],
)
def test_words(expression: str, english: str, chinese: str) -> None:
    assert explain(parse(expression)) == english
    assert explain(parse(expression), "zh") == chinese


@given(expressions())
@settings(max_examples=200)
def test_every_schedule_has_words(written: Written) -> None:
    english, chinese = explain(parse(written.text)), explain(parse(written.text), "zh")
    assert english == english.strip()
    assert english
    assert chinese == chinese.strip()
    assert chinese
    assert "  " not in english + chinese


def test_spread_is_said() -> None:
    assert explain(parse("H 3 * * *", seed="x")).endswith("(H differs from trigger to trigger)")
    assert explain(parse("H 3 * * *", seed="x"), "zh").endswith("(H 的取值因触发器而异)")
