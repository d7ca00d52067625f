"""A schedule said in words, in English and Chinese."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal

from services.scheduler.cron.grammar import Boot, Cron, Every, Once, Schedule
from services.scheduler.cron.rfc3339 import write_instant

Language = Literal["en", "zh"]

_TIMES_SHOWN: Final = 6
_WEEKDAYS_EN: Final = ("Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
_MONTHS_EN: Final = (
    *("January", "February", "March", "April", "May", "June", "July"),
    *("August", "September", "October", "November", "December"),
)
_NTH_EN: Final = ("first", "second", "third", "fourth", "fifth")
_WEEKDAYS_ZH: Final = ("周日", "周一", "周二", "周三", "周四", "周五", "周六")
_NTH_ZH: Final = ("第一个", "第二个", "第三个", "第四个", "第五个")
_UNITS: Final = ((86_400, "day", "天"), (3_600, "hour", "小时"), (60, "minute", "分钟"), (1, "second", "秒"))


def explain(schedule: Schedule, language: Language = "en") -> str:
    """One sentence without its full stop."""
    chinese = language == "zh"
    if isinstance(schedule, Boot):
        return "系统每次启动时" if chinese else "each time the system starts"
    if isinstance(schedule, Once):
        at = write_instant(schedule.at_s * 1000)
        return f"仅一次,在 {at}" if chinese else f"once, at {at}"
    if isinstance(schedule, Every):
        return _distance(schedule.seconds, chinese=chinese)
    said = _chinese(schedule) if chinese else _english(schedule)
    if "H" in schedule.text:
        said += "(H 的取值因触发器而异)" if chinese else " (H differs from trigger to trigger)"
    return said


def _distance(seconds: int, *, chinese: bool) -> str:
    parts: list[str] = []
    for size, english, unit in _UNITS:
        count, seconds = divmod(seconds, size)
        if count:
            parts.append(f"{count} {unit}" if chinese else f"{count} {english}{'s' if count > 1 else ''}")
    if chinese:
        return f"每隔 {' '.join(parts)}"
    if len(parts) == 1 and parts[0].startswith("1 "):
        return f"every {parts[0][2:]}"
    return f"every {' '.join(parts)}"


# The shapes of a set of values


def _step(values: Sequence[int], count: int) -> int | None:
    """The n of "every n" when the values are 0, n, 2n … and n divides the cycle evenly."""
    if len(values) < 2 or values[0] != 0:
        return None
    step = values[1]
    return step if count % step == 0 and list(values) == list(range(0, count, step)) else None


def _progression(values: Sequence[int]) -> int | None:
    """The distance of at least three evenly spaced values that are not neighbours."""
    if len(values) < 3:
        return None
    step = values[1] - values[0]
    return step if step > 1 and list(values) == list(range(values[0], values[-1] + 1, step)) else None


def _runs(values: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbouring values as (first, last)."""
    runs: list[tuple[int, int]] = []
    for value in values:
        if runs and runs[-1][1] == value - 1:
            runs[-1] = (runs[-1][0], value)
        else:
            runs.append((value, value))
    return runs


def _listed(values: Sequence[int], say: Callable[[int], str], through: str, comma: str, last: str) -> str:
    """Values as "1 to 5, 8 and 10"; two neighbours are listed one by one."""
    said: list[str] = []
    for first, end in _runs(values):
        if end - first >= 2:
            said.append(f"{say(first)}{through}{say(end)}")
        else:
            said.extend(say(value) for value in range(first, end + 1))
    return said[0] if len(said) == 1 else f"{comma.join(said[:-1])}{last}{said[-1]}"


def _clock_times(cron: Cron) -> list[str] | None:
    """The times of day, when they are few."""
    if len(cron.hours) * len(cron.minutes) * len(cron.seconds) > _TIMES_SHOWN:
        return None
    with_seconds = cron.seconds != (0,)
    return [
        f"{hour:02}:{minute:02}" + (f":{second:02}" if with_seconds else "")
        for hour in cron.hours
        for minute in cron.minutes
        for second in cron.seconds
    ]


# English


def _en(values: Sequence[int], say: Callable[[int], str] = str) -> str:
    return _listed(values, say, " to ", ", ", " and ")


def _english(cron: Cron) -> str:
    times = _clock_times(cron)
    if times is None:
        when = _english_cycle(cron)
    else:
        when = "at " + (times[0] if len(times) == 1 else f"{', '.join(times[:-1])} and {times[-1]}")
    days = _english_days(cron)
    if not days and times is not None:
        days = "every day"
    months = "" if len(cron.months) == 12 else f"in {_en(cron.months, lambda month: _MONTHS_EN[month - 1])}"
    return " ".join(part for part in (when, days, months) if part)


def _english_cycle(cron: Cron) -> str:
    parts: list[str] = []
    if cron.seconds != (0,):
        parts.append(_english_part(cron.seconds, 60, "second"))
    if not (cron.seconds != (0,) and len(cron.minutes) == 60):
        parts.append(_english_part(cron.minutes, 60, "minute"))
    if len(cron.hours) < 24 or (len(parts) == 1 and len(cron.minutes) < 60 and _step(cron.minutes, 60) is None):
        parts.append(_english_part(cron.hours, 24, "hour"))
    said = " of ".join(parts)
    return said if said.startswith("every") else f"at {said}"


def _english_part(values: Sequence[int], count: int, unit: str) -> str:
    step = _step(values, count)
    if step == 1:
        return f"every {unit}"
    if step is not None:
        return f"every {step} {unit}s"
    if (step := _progression(values)) is not None:
        return f"every {step} {unit}s from {unit} {values[0]} to {values[-1]}"
    return f"{unit}{'s' if len(values) > 1 else ''} {_en(values)}"


def _english_days(cron: Cron) -> str:
    said: list[str] = []
    if cron.days is not None:
        if cron.days:
            said.append(f"on day{'s' if len(cron.days) > 1 else ''} {_en(cron.days)} of the month")
        if cron.last_day:
            said.append("on the last day of the month")
        said.extend(f"on the working day nearest to day {day} of the month" for day in cron.nearest)
    if cron.nth:
        said.extend(
            f"on the {'last' if n == -1 else _NTH_EN[n - 1]} {_WEEKDAYS_EN[day]} of the month" for day, n in cron.nth
        )
    elif cron.weekdays is not None:
        said.append(f"on {_en(_from_monday(cron.weekdays), lambda day: _WEEKDAYS_EN[day % 7])}")
    return " or ".join(said)


def _from_monday(weekdays: Sequence[int]) -> list[int]:
    # A week reads Monday to Sunday, so that a weekend is "Saturday and Sunday".
    return sorted(day or 7 for day in weekdays)


# Chinese


def _zh(values: Sequence[int], say: Callable[[int], str] = str) -> str:
    return _listed(values, say, " 至 " if say is str else "至", "、", "、")


def _chinese(cron: Cron) -> str:
    months = "" if len(cron.months) == 12 else f"{_zh(cron.months)} 月"
    days = _chinese_days(cron, month="的" if len(cron.months) > 1 else "") if months else _chinese_days(cron)
    times = _clock_times(cron)
    when = _chinese_cycle(cron) if times is None else "、".join(times)
    if not days and times is not None:
        days = "每天"
    return " ".join(part for part in (months, days, when) if part)


def _chinese_cycle(cron: Cron) -> str:
    parts: list[str] = []
    if len(cron.hours) < 24 or (cron.seconds == (0,) and len(cron.minutes) < 60 and _step(cron.minutes, 60) is None):
        parts.append(_chinese_part(cron.hours, 24, "小时", "点"))
    if not (cron.seconds != (0,) and len(cron.minutes) == 60):
        parts.append(_chinese_part(cron.minutes, 60, "分钟", "分"))
    if cron.seconds != (0,):
        parts.append(_chinese_part(cron.seconds, 60, "秒", "秒"))
    return " ".join(parts)


def _chinese_part(values: Sequence[int], count: int, length: str, place: str) -> str:
    step = _step(values, count)
    if step == 1:
        return f"每{length}"
    if step is not None:
        return f"每 {step} {length}"
    if (step := _progression(values)) is not None:
        return f"{values[0]} 至 {values[-1]} {place}间每 {step} {length}"
    return f"{_zh(values)} {place}"


def _chinese_days(cron: Cron, *, month: str = "每月") -> str:
    said: list[str] = []
    if cron.days is not None:
        if cron.days:
            said.append(f"{month} {_zh(cron.days)} 日".strip())
        if cron.last_day:
            said.append(f"{month}最后一天")
        said.extend(f"{month}最接近 {day} 日的工作日" for day in cron.nearest)
    if cron.nth:
        said.extend(f"{month}{'最后一个' if n == -1 else _NTH_ZH[n - 1]}{_WEEKDAYS_ZH[day]}" for day, n in cron.nth)
    elif cron.weekdays is not None:
        said.append(_zh(_from_monday(cron.weekdays), lambda day: _WEEKDAYS_ZH[day % 7]))
    return "或".join(said)
