"""The grammar of schedule expressions: what is accepted, what it means on the wall clock, what is refused and why.

    minute hour day-of-month month day-of-week            five fields
    second minute hour day-of-month month day-of-week     six fields, seconds lead
    @hourly @daily @midnight @weekly @monthly @yearly @annually
    @every 1h30m     @boot     @once 2031-05-04T08:00:00+08:00

croniter expands the fields into sets of values. What cron dialects read in different ways is refused before it gets
there, so that no schedule fires at a time its author did not mean. Zones and transitions are not known here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from functools import lru_cache
from typing import Any, Final, cast

from croniter import CroniterError, croniter  # pyright: ignore[reportMissingTypeStubs]

from schemas.errors import Ql3Error
from services.scheduler.cron.rfc3339 import read_instant

EXPRESSION_CHARS: Final = 255
EVERY_MAX_S: Final = 100 * 366 * 86_400

SECOND, MINUTE, HOUR, DAY, MONTH, WEEKDAY = "second", "minute", "hour", "day of month", "month", "day of week"
FIELDS: Final = (SECOND, MINUTE, HOUR, DAY, MONTH, WEEKDAY)
MACROS: Final[Mapping[str, str]] = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}

_BOUNDS: Final = {SECOND: (0, 59), MINUTE: (0, 59), HOUR: (0, 23), DAY: (1, 31), MONTH: (1, 12), WEEKDAY: (0, 7)}
_MONTHS: Final = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_WEEKDAYS: Final = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_NAMES: Final[Mapping[str, Mapping[str, int]]] = {
    MONTH: {name: number for number, name in enumerate(_MONTHS, 1)},
    WEEKDAY: {name: number for number, name in enumerate(_WEEKDAYS)},
}

_ITEM = re.compile(
    r"(?:(?P<star>\*)|(?P<low>[0-9]{1,4}|[a-z]+)(?:-(?P<high>[0-9]{1,4}|[a-z]+))?)(?:/(?P<step>[0-9]{1,4}))?"
)
_HASH = re.compile(r"h(?:\((?P<low>[0-9]{1,2})-(?P<high>[0-9]{1,2})\))?(?:/(?P<step>[0-9]{1,4}))?")
_NEAREST = re.compile(r"([0-9]{1,2})w|w([0-9]{1,2})")
_NTH = re.compile(r"(?P<low>[0-7]|[a-z]{3})(?:-(?P<high>[0-7]|[a-z]{3}))?#(?P<nth>[0-9]+)")
_LAST_WEEKDAY = re.compile(r"l([0-7])")
_EVERY = re.compile(r"(?:([0-9]{1,9})d)?(?:([0-9]{1,9})h)?(?:([0-9]{1,9})m)?(?:([0-9]{1,10})s)?")
_WHITE = re.compile(r"[ \t]+")


class MonthDays(dict[tuple[int, int], tuple[int, ...]]):
    """The matching days of a month, by (first day modulo 7, length)."""


class Answers(dict[tuple[str, int], int | None]):
    """The next instant in seconds, by (zone, after)."""


@dataclass(frozen=True, slots=True)
class Cron:
    """A calendar schedule on the wall clock. All sets are sorted tuples; weekdays count from Sunday = 0.

    `days` and `weekdays` are None where the field is `*`; both given means either. `last_day` is `L`, `nearest` the
    days of `W`, `nth` pairs of (weekday, 1..5 or -1 for the last). `fixed` tells whether neither the minute nor the
    hour field begins with `*` or is spread by `H`, which decides what happens at transitions.
    """

    text: str
    seconds: tuple[int, ...]
    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: tuple[int, ...] | None
    months: tuple[int, ...]
    weekdays: tuple[int, ...] | None
    last_day: bool
    nearest: tuple[int, ...]
    nth: tuple[tuple[int, int], ...]
    fixed: bool
    month_days: MonthDays = dataclass_field(default_factory=MonthDays, repr=False, compare=False)
    """A memory, filled as it is asked."""
    answers: Answers = dataclass_field(default_factory=Answers, repr=False, compare=False)
    """Another one: thousands of triggers have the same expression, and each asks the same more than once."""


@dataclass(frozen=True, slots=True)
class Every:
    """A fixed distance in seconds, counted from an anchor."""

    text: str
    seconds: int


@dataclass(frozen=True, slots=True)
class Once:
    """One instant, in seconds since the epoch."""

    text: str
    at_s: int


@dataclass(frozen=True, slots=True)
class Boot:
    """Each start of the system; it has no instant on the calendar."""

    text: str


Schedule = Cron | Every | Once | Boot


def parse(expression: str, *, seed: str = "") -> Schedule:
    """What an expression means. `seed` spreads `H` (a trigger's id). Raises `cron_invalid`, naming field and mend."""
    text = normalise(expression)
    if text.startswith("@every"):
        return _every(text)
    if text.startswith("@once"):
        return _once(text)
    if text == "@boot":
        return Boot(text)
    # Only `H` makes the same text mean different times; all other triggers share one expansion.
    return _cron(text, seed if "H" in text else "")


@lru_cache(maxsize=16_384)
def normalise(expression: str) -> str:
    """The one spelling of an expression that is stored: single spaces, lower-case names, upper-case L, W and H."""
    if len(expression) > EXPRESSION_CHARS:
        raise _refuse("expression", f"It has {len(expression)} characters; at most {EXPRESSION_CHARS} are read.")
    if any(not (" " <= char <= "~" or char == "\t") for char in expression):
        raise _refuse("expression", "Only ASCII letters, digits, signs and blanks are read; write it on one line.")
    words = _WHITE.split(expression.strip(" \t").lower())
    if words == [""]:
        raise _refuse("expression", "It is empty; write five fields such as `30 2 * * *`, or a macro such as @daily.")
    _refuse_foreign(words)
    if words[0].startswith("@"):
        return _macro(words)
    if len(words) not in (5, 6):
        year = " A year field is not known: give the trigger a start and an end date." if len(words) == 7 else ""
        raise _refuse("expression", f"It has {len(words)} fields; write five, or six with leading seconds.{year}")
    names = FIELDS[-len(words) :]
    return " ".join(_read_field(name, word) for name, word in zip(names, words, strict=True))


def _refuse(field: str, detail: str) -> Ql3Error:
    return Ql3Error("cron_invalid", detail, field=field)


def _refuse_foreign(words: list[str]) -> None:
    first = words[0]
    if first.startswith(("tz=", "cron_tz=")):
        raise _refuse("expression", "The time zone is not part of the expression; give it as the trigger's time zone.")
    if first.startswith("rate("):
        raise _refuse("expression", "`rate(…)` is of another dialect; write `@every 5m`.")
    if first.startswith("cron("):
        raise _refuse("expression", "`cron(…)` is of another dialect; write its fields without the year and with `*`.")


def _macro(words: list[str]) -> str:
    name = words[0]
    if name == "@every":
        return " ".join(["@every", "".join(words[1:])]).rstrip()
    if name == "@once":
        return " ".join(["@once", *(word.upper() for word in words[1:])])
    if len(words) > 1:
        raise _refuse("expression", f"Nothing may follow `{_shown(name)}`.")
    if name in MACROS:
        return MACROS[name]
    if name == "@boot":
        return name
    if name in ("@reboot", "@startup", "@start"):
        raise _refuse("expression", f"`{name}` is not known here; write `@boot`.")
    known = ", ".join([*MACROS, "@every", "@boot", "@once"])
    raise _refuse("expression", f"There is no macro `{_shown(name)}`; known are {known}.")


def _shown(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}…"


# Fields


def _read_field(field: str, text: str) -> str:
    # A field is checked and brought to its stored spelling here; croniter only ever sees what passed.
    if "?" in text:
        raise _refuse(field, "`?` is of another dialect; write `*`.")
    if "~" in text:
        low, high = _BOUNDS[field]
        raise _refuse(field, f"`~` is of another dialect; write `H`, or `H({low}-{high})` for a part of the range.")
    if ".." in text:
        raise _refuse(field, f"Ranges are written with one hyphen: `{_shown(text.replace('..', '-'))}`.")
    if re.fullmatch(r"r(\(.*\))?(/.*)?", text):
        raise _refuse(field, "`R` would change at every start; write `H`, which spreads and stays.")
    if text.startswith("h"):
        return _read_hash(field, text)
    items = text.split(",")
    if "" in items:
        raise _refuse(field, "A list has an empty item; remove the extra comma.")
    read = [_read_item(field, item, alone=len(items) == 1) for item in items]
    if field == WEEKDAY and len({_is_nth(item) for item in items}) > 1:
        raise _refuse(field, "Plain weekdays and `#` or `L` do not mix; write two triggers.")
    return ",".join(read)


def _read_hash(field: str, text: str) -> str:
    found = _HASH.fullmatch(text)
    if found is None:
        raise _refuse(field, "`H` stands alone in its field: `H`, `H/15`, `H(0-29)` or `H(0-29)/10`.")
    low, high = _BOUNDS[field]
    if field == WEEKDAY:
        high = 6
    if found["low"] is not None:
        first, last = int(found["low"]), int(found["high"])
        if not low <= first < last <= high:
            raise _refuse(field, f"`H(a-b)` needs {low} <= a < b <= {high}.")
    if found["step"] is not None and int(found["step"]) == 0:
        raise _refuse(field, "A step of 0 never moves; write 1 or more.")
    return text.upper()


def _read_item(field: str, item: str, *, alone: bool) -> str:
    if field == DAY:
        if item == "l":
            return "L"
        if (found := _NEAREST.fullmatch(item)) is not None:
            day = int(found[1] or found[2])
            if not 1 <= day <= 31:
                raise _refuse(field, "`W` follows a day from 1 to 31, as in `15W`.")
            if not alone:
                raise _refuse(field, "`W` stands alone in its field; write two triggers.")
            return f"{day}W"
        if item in ("lw", "wl"):
            raise _refuse(field, "`LW` is not known; `L` is the last day of the month, `31W` its last working day.")
        if item.startswith("l-"):
            raise _refuse(field, "Days before the last are not known; `L` is the last day of the month.")
    if field == WEEKDAY:
        if (found := _LAST_WEEKDAY.fullmatch(item)) is not None:
            return f"L{int(found[1]) % 7}"
        if "#" in item:
            return _read_nth(item)
        if item == "l" or re.fullmatch(r"([0-7]|[a-z]{3})l", item):
            day = _NAMES[WEEKDAY].get(item[:-1], item[:-1] or 6)
            raise _refuse(field, f"The last weekday of a month is written `L` first: `L{day}`.")
    return _read_range(field, item, alone=alone)


def _is_nth(item: str) -> bool:
    return "#" in item or _LAST_WEEKDAY.fullmatch(item) is not None


def _read_nth(item: str) -> str:
    found = _NTH.fullmatch(item)
    if found is None or not 1 <= int(found["nth"]) <= 5:
        raise _refuse(WEEKDAY, "`#` stands between a weekday and a number from 1 to 5, as in `mon#2`.")
    # croniter reads a range before `#` in names only.
    low = _WEEKDAYS[_value(WEEKDAY, found["low"]) % 7]
    if found["high"] is None:
        return f"{low}#{found['nth']}"
    high = _WEEKDAYS[_value(WEEKDAY, found["high"]) % 7]
    if low == high:
        raise _equal_range(WEEKDAY, low)
    return f"{low}-{high}#{found['nth']}"


def _read_range(field: str, item: str, *, alone: bool) -> str:
    if item.startswith("/"):
        raise _refuse(field, f"A step follows a range; write `*{_shown(item)}`.")
    found = _ITEM.fullmatch(item)
    if found is None:
        raise _refuse(field, f"`{_shown(item)}` is not a value, range or step; write such as `5`, `1-5`, `*/10`.")
    step = found["step"]
    if step is not None and int(step) == 0:
        raise _refuse(field, "A step of 0 never moves; write 1 or more.")
    if found["star"]:
        if not alone:
            raise _refuse(field, "`*` stands alone in its field, since it already means every value.")
        return item if step is None else f"*/{int(step)}"
    low_text, high_text = found["low"], found["high"]
    low = _value(field, low_text)
    if high_text is None:
        return _spelled(low_text) if step is None else f"{_spelled(low_text)}/{int(step)}"
    high = 31 if field == DAY and high_text == "l" else _value(field, high_text)
    if low == high or (field == WEEKDAY and (low, high) == (7, 0)):
        # croniter fires on the whole cycle, Debian's cron on the one value.
        raise _equal_range(field, low_text)
    if low > high and step is not None:
        raise _refuse(field, "A range that goes over the end takes no step; write its values as a list.")
    spelled = f"{_spelled(low_text)}-{_spelled('31' if high_text == 'l' else high_text)}"
    return spelled if step is None else f"{spelled}/{int(step)}"


def _equal_range(field: str, value: str) -> Ql3Error:
    return _refuse(
        field, f"From `{value}` to itself is one value to some crons and every value to others; write `{value}`."
    )


def _spelled(text: str) -> str:
    return str(int(text)) if text.isdigit() else text


def _value(field: str, text: str) -> int:
    low, high = _BOUNDS[field]
    if text.isdigit():
        value = int(text)
        if low <= value <= high:
            return value
        meant = ""
        if (field, value) == (HOUR, 24):
            meant = " Midnight is hour 0."
        elif field in (SECOND, MINUTE) and value == 60:
            meant = " The full one is 0."
        raise _refuse(field, f"{value} is out of range; write {low} to {high}.{meant}")
    names = _NAMES.get(field, {})
    if text in names:
        return names[text]
    if text[:3] in names:
        raise _refuse(field, f"`{_shown(text)}` is written short: `{text[:3]}`.")
    allowed = f", or {next(iter(names))} to {list(names)[-1]}" if names else ""
    raise _refuse(field, f"`{_shown(text)}` is not known; write {low} to {high}{allowed}.")


# Meaning


@lru_cache(maxsize=16_384)
def _cron(text: str, seed: str) -> Cron:
    words = text.lower().split(" ")
    texts = dict(zip(FIELDS[-len(words) :], words, strict=True))
    if texts[DAY].startswith("h") and "(" not in texts[DAY]:
        # A spread day must exist in every month.
        texts[DAY] = f"h(1-28){texts[DAY][1:]}"
    full = [texts.get(SECOND, "0"), *(texts[name] for name in FIELDS[1:])]
    try:
        known = cast(Any, croniter)(" ".join(full), 0.0, second_at_beginning=True, hash_id=seed)
    except CroniterError as error:
        raise _refuse("expression", "Its fields do not make a schedule.") from error
    expanded = cast(list[list[int | str]], known.expanded)
    minutes, hours, days, months, weekdays, seconds = expanded
    nth = cast(dict[int, set[int | str]], known.nth_weekday_of_month)
    nearest = tuple(sorted(cast(set[int], known.nearest_weekday)))
    if nearest:
        days = []  # croniter repeats the day of `W` there, where it would fire on weekends too
    return Cron(
        text=text,
        seconds=_values(seconds, 60, 0),
        minutes=_values(minutes, 60, 0),
        hours=_values(hours, 24, 0),
        days=None if days == ["*"] else tuple(sorted(day for day in days if isinstance(day, int))),
        months=_values(months, 12, 1),
        weekdays=None if weekdays == ["*"] else tuple(sorted(day for day in weekdays if isinstance(day, int))),
        last_day="l" in days,
        nearest=nearest,
        nth=tuple(sorted((day, -1 if n == "l" else int(n)) for day, many in nth.items() for n in many)),
        fixed=not any(texts[name].startswith(("*", "h")) for name in (MINUTE, HOUR)),
    )


def _values(expanded: list[int | str], count: int, first: int) -> tuple[int, ...]:
    if expanded == ["*"]:
        return tuple(range(first, first + count))
    return tuple(sorted(value for value in expanded if isinstance(value, int)))


def _every(text: str) -> Every:
    word = text.removeprefix("@every").strip(" ")
    found = _EVERY.fullmatch(word)
    if not word or found is None:
        raise _refuse("expression", "Write a distance in d, h, m and s, in this order: `@every 90s`, `@every 1h30m`.")
    seconds = sum(int(part or 0) * unit for part, unit in zip(found.groups(), (86_400, 3_600, 60, 1), strict=True))
    if not 1 <= seconds <= EVERY_MAX_S:
        raise _refuse("expression", "The distance is from 1 second to 100 years.")
    return Every(f"@every {word}", seconds)


def _once(text: str) -> Once:
    try:
        at_ms = read_instant(text.removeprefix("@once").strip(" "))
    except ValueError:
        at_ms = 1
    if at_ms % 1000:
        raise _refuse("expression", "Write a whole second with its offset: `@once 2031-05-04T08:00:00+08:00`.")
    return Once(text, at_ms // 1000)
