"""A rush: many processes wait to be started. What nobody waits for stands aside meanwhile, for a bounded time.

Where one machine has few cores, every fact that is published and every log that is moved while a thousand runs are due
delays the starts behind it. Whoever hands over starts tells the rush; background loops wait for its end, and once they
have begun they work off all that waits. One rush for a process: its services share a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from services.kit.clock import monotonic_ms

MANY: Final = 8
"""Starts handed over at once that make a rush; fewer leave room for everything else."""
LASTS_MS: Final = 100
"""How long a hand-over counts: the next one follows sooner while a rush lasts."""
ASIDE_MS: Final = 2_000
"""The longest that anything stands aside, so that under a load that never ends everything still gets done."""


class Rush:
    """Whether many starts are under way. Times are monotonic milliseconds."""

    def __init__(
        self,
        monotonic: Callable[[], int] = monotonic_ms,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._monotonic = monotonic
        self._sleep = sleep
        self._until_ms = 0

    def starts(self, count: int) -> None:
        """So many attempts were handed over just now."""
        if count >= MANY:
            self._until_ms = self._monotonic() + LASTS_MS

    async def over(self) -> None:
        """Return when no rush is on, or when it has lasted for `ASIDE_MS` from now."""
        last_ms = self._monotonic() + ASIDE_MS
        while (now_ms := self._monotonic()) < min(self._until_ms, last_ms):
            await self._sleep((min(self._until_ms, last_ms) - now_ms) / 1000)


rush: Final = Rush()
