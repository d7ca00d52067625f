"""Time zones as steps of an offset: which offset holds at an instant, and when it changes next.

All instants are whole seconds since the epoch (UTC), offsets are seconds east of UTC. `zoneinfo` answers the offset at
an instant but does not list its changes; they are found by looking once a day and then halving. No zone has ever
changed its offset twice within a day (a test holds this against the whole database).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from datetime import datetime
from functools import lru_cache
from typing import Final, NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from schemas.errors import Ql3Error

DAY_S: Final = 86_400
WIDEST_S: Final = DAY_S + 3_600
"""No change moves the clock further: the widest, Samoa crossing the date line, moved it by a day and 184 s."""

_BLOCK_S: Final = 400 * DAY_S
_NAME = re.compile(r"[A-Za-z0-9_+-]{1,32}(/[A-Za-z0-9_+-]{1,32}){0,2}")
_NOT_ZONES: Final = ("posix", "right", "localtime", "posixrules", "Factory")


class Change(NamedTuple):
    """From the instant `at` on, the offset is `after`; until then it was `before`."""

    at: int
    before: int
    after: int


class Zone:
    """One IANA time zone. Make it with `zone(name)`, which keeps the one of each name."""

    def __init__(self, name: str, info: ZoneInfo) -> None:
        self.name = name
        self._info = info
        self._blocks: dict[int, tuple[int, list[int], list[Change]]] = {}

    def offset(self, at: int) -> int:
        """The offset that holds at an instant."""
        first, ats, changes = self._block(at // _BLOCK_S)
        index = bisect_right(ats, at)
        return changes[index - 1].after if index else first

    def next_change(self, after: int, until: int) -> Change | None:
        """The first change with `after < at <= until`."""
        for number in range(after // _BLOCK_S, until // _BLOCK_S + 1):
            _, ats, changes = self._block(number)
            index = bisect_right(ats, after)
            if index < len(ats):
                return changes[index] if ats[index] <= until else None
        return None

    def _block(self, number: int) -> tuple[int, list[int], list[Change]]:
        # Two schedulers' threads may both fill a block; they write the same.
        block = self._blocks.get(number)
        if block is None:
            block = self._blocks[number] = self._look(number * _BLOCK_S)
        return block

    def _look(self, start: int) -> tuple[int, list[int], list[Change]]:
        first = before = self._ask(start - 1)
        changes: list[Change] = []
        low = start - 1
        for high in range(start - 1 + DAY_S, start + _BLOCK_S, DAY_S):
            after = self._ask(high)
            if after != before:
                changes.append(Change(self._halve(low, high, before), before, after))
            low, before = high, after
        return first, [change.at for change in changes], changes

    def _halve(self, low: int, high: int, before: int) -> int:
        while high - low > 1:
            middle = (low + high) // 2
            if self._ask(middle) == before:
                low = middle
            else:
                high = middle
        return high

    def _ask(self, at: int) -> int:
        offset = datetime.fromtimestamp(at, self._info).utcoffset()
        assert offset is not None
        return offset.days * DAY_S + offset.seconds


@lru_cache(maxsize=1_024)
def zone(name: str) -> Zone:
    """The zone of an IANA name. Raises `timezone_invalid`, with the name that was meant where that is clear."""
    if _NAME.fullmatch(name) is not None and name.split("/")[0] not in _NOT_ZONES:
        try:
            return Zone(name, ZoneInfo(name))
        except (ZoneInfoNotFoundError, ValueError, OSError):
            pass
    raise Ql3Error("timezone_invalid", _meant(name), field="timezone")


def _meant(name: str) -> str:
    shown = name if len(name) <= 40 else f"{name[:40]}…"
    shown = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in shown)
    fixed = re.fullmatch(r"(?i)(?:utc|gmt)?([+-])([0-9]{1,2})(?::?00)?", name)
    if fixed is not None and int(fixed[2]) <= 12:
        # POSIX counts these the other way round.
        sign = "-" if fixed[1] == "+" else "+"
        return f"`{shown}` is not an IANA zone; a fixed offset is written Etc/GMT{sign}{int(fixed[2])}."
    from zoneinfo import available_timezones  # reads the whole database: only when refusing

    known = {candidate.casefold(): candidate for candidate in available_timezones()}
    if (meant := known.get(name.strip().replace(" ", "_").casefold())) is not None:
        return f"`{shown}` is not an IANA zone; it is written {meant}."
    last = name.rpartition("/")[2].strip().replace(" ", "_").casefold()
    near = sorted(zone_name for folded, zone_name in known.items() if folded.rpartition("/")[2] == last)
    if last in ("beijing", "peking"):
        near = ["Asia/Shanghai"]
    return f"`{shown}` is not an IANA zone" + (f"; perhaps {near[0]}." if near else ".")
