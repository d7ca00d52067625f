"""Could a run be submitted, placed and started now? Asked of the services, not guessed."""

from __future__ import annotations

import asyncio
from itertools import chain
from typing import Final

from schemas import endpoints
from schemas.base import View
from schemas.errors import Ql3Error
from schemas.system import HealthRead
from schemas.workers import ReadinessRead
from services.kit.bus import Bus
from services.kit.clock import monotonic_ms

TIMEOUT_S: Final = 1.0
KEPT_MS: Final = 500
"""An answer is good for this long, so that probes, however many, ask the services twice a second at most."""
NEEDED: Final = ("approval", "scheduler", "dispatcher")
"""Without one of these no run starts. The others cost something else: secrets, old logs."""
ALSO: Final = ("vault", "retention")


class ReadinessReport(View, frozen=True, kw_only=True):
    """`reasons` why no run could start; `degraded` is what else is missing."""

    ready: bool
    reasons: list[str]
    degraded: list[str]


class Readiness:
    """Asks all services at once; calls that come meanwhile share the answer."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._last: tuple[ReadinessReport, int] | None = None
        self._asking: asyncio.Task[ReadinessReport] | None = None
        self.draining = False

    async def report(self) -> ReadinessReport:
        """The present state; never raises."""
        if self.draining:
            return ReadinessReport(ready=False, reasons=["gateway: shutting down"], degraded=[])
        if self._last is not None and monotonic_ms() - self._last[1] < KEPT_MS:
            return self._last[0]
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask())
        return await asyncio.shield(self._asking)

    async def _ask(self) -> ReadinessReport:
        try:
            *healths, placing = await asyncio.gather(
                *(self._health(name) for name in (*NEEDED, *ALSO)), self._placing()
            )
            needed, also = healths[: len(NEEDED)], healths[len(NEEDED) :]
            reasons = [*chain.from_iterable(needed), *(placing if not needed[-1] else ())]
            report = ReadinessReport(ready=not reasons, reasons=reasons, degraded=list(chain.from_iterable(also)))
            self._last = (report, monotonic_ms())
            return report
        finally:
            self._asking = None

    async def _health(self, service: str) -> list[str]:
        try:
            answer = await self._bus.request(endpoints.HEALTH[service], HealthRead(), timeout=TIMEOUT_S)
        except Ql3Error as error:
            return [f"{service}: {error.detail or error.code}"]
        return [reason if reason.startswith(f"{service}:") else f"{service}: {reason}" for reason in answer.reasons]

    async def _placing(self) -> list[str]:
        try:
            answer = await self._bus.request(endpoints.READINESS, ReadinessRead(), timeout=TIMEOUT_S)
        except Ql3Error as error:
            return [f"dispatcher: {error.detail or error.code}"]
        return [f"dispatcher: {reason}" for reason in answer.reasons]
