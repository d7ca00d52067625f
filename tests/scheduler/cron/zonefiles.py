"""Changes of offset as the zone files themselves say them (RFC 8536): the listed ones, then the rule."""

from __future__ import annotations

import calendar
import re
import struct
from collections.abc import Iterator
from datetime import date
from importlib import resources
from pathlib import Path
from typing import NamedTuple
from zoneinfo import TZPATH, available_timezones

ZONES = sorted(available_timezones() - {"Factory", "localtime"})
EPOCH = date(1970, 1, 1).toordinal()
_NAME = r"(?:<[^>]+>|[A-Za-z]+)"
_OFFSET = r"([+-]?[0-9:]+)"
_RULE = re.compile(rf"{_NAME}{_OFFSET}(?:{_NAME}{_OFFSET}?,([^,]+),([^,]+))?")
_DAY = re.compile(r"M([0-9]+)\.([0-9]+)\.([0-9]+)(?:/(.+))?")


class Change(NamedTuple):
    """From the instant `at` on `after` holds, until then `before`; seconds."""

    at: int
    before: int
    after: int


def changes(name: str, start: int, end: int) -> list[Change]:
    """All changes with `start <= at < end`."""
    listed, rule = _read(name)
    last = listed[-1].at if listed else start - 1
    every = [*listed, *(change for change in _by_rule(rule, start, end) if change.at > last)]
    return [change for change in every if start <= change.at < end and change.before != change.after]


def recorded(name: str) -> list[Change]:
    """The changes that are listed one by one."""
    return [change for change in _read(name)[0] if change.before != change.after]


def _read(name: str) -> tuple[list[Change], str]:
    raw = zone_file(name)
    counts = struct.unpack(">6l", raw[20:44])  # isut, isstd, leap, time, type, char
    second = 44 + counts[3] * 5 + counts[4] * 6 + counts[5] + counts[2] * 8 + counts[1] + counts[0]
    isut, isstd, leaps, times, types, chars = struct.unpack(">6l", raw[second + 20 : second + 44])
    body = second + 44
    ats = struct.unpack(f">{times}q", raw[body : body + times * 8])
    kinds = raw[body + times * 8 : body + times * 9]
    offsets = [
        struct.unpack(">lbb", raw[at : at + 6])[0] for at in range(body + times * 9, body + times * 9 + types * 6, 6)
    ]
    listed: list[Change] = []
    before = offsets[0]
    for at, kind in zip(ats, kinds, strict=True):
        listed.append(Change(at, before, offsets[kind]))
        before = offsets[kind]
    footer = raw[body + times * 9 + types * 6 + chars + leaps * 12 + isstd + isut :]
    return listed, footer.decode().strip()


def _by_rule(rule: str, start: int, end: int) -> Iterator[Change]:
    """What a POSIX rule such as `CET-1CEST,M3.5.0,M10.5.0/3` says for the years of the span."""
    found = _RULE.fullmatch(rule)
    assert found is not None, rule
    if found[3] is None:
        return
    standard = -_seconds(found[1])
    summer = -_seconds(found[2]) if found[2] else standard + 3_600
    first, last = (date.fromordinal(at // 86_400 + EPOCH).year for at in (start, end))
    both: list[Change] = []
    for year in range(first, last + 1):
        both.append(Change(_wall(found[3], year) - standard, standard, summer))
        both.append(Change(_wall(found[4], year) - summer, summer, standard))
    yield from sorted(both)


def _wall(text: str, year: int) -> int:
    """The wall time of `M<month>.<week>.<weekday>/<time>` in a year, as seconds since the epoch."""
    found = _DAY.fullmatch(text)
    assert found is not None, text
    month, week, weekday = (int(found[index]) for index in (1, 2, 3))
    length = calendar.monthrange(year, month)[1]
    days = [day for day in range(1, length + 1) if date(year, month, day).isoweekday() % 7 == weekday]
    day = days[-1] if week == 5 else days[week - 1]
    return (date(year, month, day).toordinal() - EPOCH) * 86_400 + _seconds(found[4] or "2")


def _seconds(text: str) -> int:
    sign = -1 if text.startswith("-") else 1
    hours, minutes, seconds = (*map(int, text.lstrip("+-").split(":")), 0, 0)[:3]
    return sign * (hours * 3_600 + minutes * 60 + seconds)


def zone_file(name: str) -> bytes:
    """The file that `zoneinfo` reads for a zone."""
    for folder in TZPATH:
        if (path := Path(folder, name)).is_file():
            return path.read_bytes()
    folder, _, last = name.rpartition("/")
    package = ".".join(["tzdata", "zoneinfo", *folder.split("/")]) if folder else "tzdata.zoneinfo"
    return resources.files(package).joinpath(last).read_bytes()
