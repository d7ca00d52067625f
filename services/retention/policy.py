"""Rules of ages: how long a project keeps its logs and its ended runs. Times and ages in milliseconds."""

from __future__ import annotations

from typing import Final

import msgspec

from schemas import limits
from schemas.errors import Ql3Error

HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS
MAX_AGE_MS: Final = 3650 * DAY_MS
UNENDED_GRACE_MS: Final = limits.MAX_ATTEMPTS * limits.BACKOFF_MAX_MS
"""How much older an attempt's log has to be while nobody has said that its run ended.

A run may end without a further attempt (cancelled between two), which no fact about attempts tells. After the longest
time that its retries can take, the log is old by any measure.
"""
TOMBSTONE_MS: Final = 30 * DAY_MS
"""A tombstone answers "gone, since then" at least this long, even where runs are kept shorter."""


class Ages(msgspec.Struct, frozen=True, kw_only=True):
    """How old a log and a run become before they are removed, and what counts as too little free space.

    Below `free_bytes` of free space a log older than `pressure_ms` goes; pressure only ever shortens an age.
    """

    logs_ms: int
    runs_ms: int
    pressure_ms: int = DAY_MS
    free_bytes: int = 256 * 1024 * 1024


EDGE_FREE_BYTES: Final = 64 * 1024 * 1024
RUNS_MS: Final = 90 * DAY_MS


def defaults(logs_ms: int, *, edge: bool) -> Ages:
    """The ages of projects that have set none; `logs_ms` is configured, runs are kept at least as long."""
    ages = Ages(logs_ms=logs_ms, runs_ms=max(RUNS_MS, logs_ms))
    return Ages(logs_ms=ages.logs_ms, runs_ms=ages.runs_ms, free_bytes=EDGE_FREE_BYTES) if edge else ages


def check(logs_ms: int, runs_ms: int) -> None:
    """Refuse ages that make no sense together. Raises `invalid`, naming the field."""
    for field, age in (("logs_ms", logs_ms), ("runs_ms", runs_ms)):
        if not HOUR_MS <= age <= MAX_AGE_MS:
            raise Ql3Error("invalid", "Use an hour to ten years, in milliseconds.", field=field)
    if runs_ms < logs_ms:
        raise Ql3Error("invalid", "Runs are kept at least as long as their logs.", field="runs_ms")


def logs_age(logs_ms: int | None, defaults: Ages, *, pressure: bool) -> int:
    """The age in force for a project's logs."""
    age = logs_ms if logs_ms is not None else defaults.logs_ms
    return min(age, defaults.pressure_ms) if pressure else age


def runs_age(runs_ms: int | None, defaults: Ages) -> int:
    """The age in force for a project's ended runs."""
    return runs_ms if runs_ms is not None else defaults.runs_ms


def cutoff(now_ms: int, age_ms: int) -> int:
    """What ended at or before this is old enough."""
    return max(0, now_ms - age_ms)


def hour_of(at_ms: int) -> int:
    """The beginning of the hour in which something ended."""
    return at_ms - at_ms % HOUR_MS
