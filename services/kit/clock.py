"""Clocks that are handed in, so that a test can move them.

Schedules and what people see use wall time. Leases use the database's clock (`Transaction.now_ms`), never this one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

JUMP_MS = 5_000
"""A step of the wall clock larger than this is not time that passed: a wrong clock was set, or the machine slept."""

_SLOWING_MS = 100
"""How often a clock that is ahead gives back its tenth."""


class Clock(Protocol):
    """Whatever tells wall time."""

    def now_ms(self) -> int:
        """Milliseconds since 1970, UTC."""
        ...


class WallClock:
    """The machine's wall clock."""

    def now_ms(self) -> int:
        """Milliseconds since 1970, UTC."""
        return wall_ms()


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms

    def now_ms(self) -> int:
        """Milliseconds since 1970, UTC."""
        return self._now_ms

    def advance(self, ms: int) -> None:
        """Moves the clock; a negative number moves it back, as a wrong clock that is set does."""
        self._now_ms += ms


def monotonic_ms() -> int:
    """Milliseconds of a clock that is never set; only differences mean anything."""
    return time.monotonic_ns() // 1_000_000


def wall_ms() -> int:
    """Milliseconds since 1970, UTC, of the machine's wall clock."""
    return time.time_ns() // 1_000_000


class SteadyClock:
    """Wall time that never goes back and does not jump: the clock of an SQLite database.

    It runs on monotonic time. A wall clock up to `JUMP_MS` ahead is followed; a larger step is ignored until the
    process starts anew (whoever holds leases finds its own last-alive stamp old then, and extends them first). When it
    is a little ahead of the wall, which a restart after a crash leaves behind, it runs a tenth slower until they meet.
    """

    def __init__(self, wall: Callable[[], int] = wall_ms, monotonic: Callable[[], int] = monotonic_ms) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._base: int = wall()
        self._last: int = self._base
        self._at = monotonic()
        self.marked = False
        self._lock = threading.Lock()  # readers and the writer ask from threads of their own

    def not_before(self, mark_ms: int) -> None:
        """Never hand out a time below `mark_ms`, which another life of this database may have handed out."""
        with self._lock:
            self._base = max(self._base, mark_ms)
            self.marked = True

    def now_ms(self) -> int:
        """Milliseconds since 1970, UTC; never less than before."""
        with self._lock:
            at = self._monotonic()
            elapsed = max(0, at - self._at)
            steady = self._base + elapsed
            ahead = steady - self._wall()
            if -JUMP_MS <= ahead <= 0:
                steady -= ahead
                self._base, self._at = steady, at
            elif 0 < ahead <= JUMP_MS and elapsed >= _SLOWING_MS:
                steady -= min(elapsed // 10, ahead)
                self._base, self._at = steady, at
            self._last = max(self._last, steady)
            return self._last
