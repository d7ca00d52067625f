"""One shape of background work: a step, a bell, and a pace. Every service's loops are of this kind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from schemas.errors import Ql3Error
from services.kit.metrics import LOOP_ERRORS

BACKOFF_MIN_S: Final = 0.05
BACKOFF_MAX_S: Final = 5.0
STOP_S: Final = 10.0
UNWELL: Final = 5
"""Failures in a row after which a loop counts as not well: more than a passing outage."""

log: structlog.stdlib.BoundLogger = structlog.get_logger("ql3.loop")

Step = Callable[[], Awaitable[bool | float | None]]
"""Answers True for "there is more, at once", a number of seconds to wait at most, or None for the loop's own pace."""

Aside = Callable[[], Awaitable[None]]
"""Returns, within a bounded time, when more urgent work leaves room."""


class Loop:
    """Runs `step` again and again, at the latest every `every_s` seconds, sooner when rung.

    A step that raises is logged and tried again with backoff; it never ends the loop. A ring during a step is kept.
    `aside` is waited for before a step, but not while more waits: a load that never ends must not let it grow.
    """

    def __init__(
        self, name: str, step: Step, *, every_s: float, bell: asyncio.Event | None = None, aside: Aside | None = None
    ) -> None:
        if every_s <= 0:
            raise ValueError("every_s must be positive")
        self.name = name
        self._step = step
        self._every_s = every_s
        self._bell = bell or asyncio.Event()
        self._aside = aside
        self._more = False
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self.failures = 0
        """Steps that failed in a row; 0 when the last one went well."""
        self.steps = 0
        """Steps that went well, ever."""
        self.first_done = asyncio.Event()
        """Set once a first step went well, for readiness."""

    def ring(self) -> None:
        """There is work now. Safe to call at any time, also after the loop's end."""
        self._bell.set()

    async def start(self) -> None:
        """Begin; the first step runs at once."""
        if self._task is None:
            self._stopping.clear()
            self._bell.set()
            self._task = asyncio.create_task(self._run(), name=f"loop:{self.name}")

    async def stop(self, timeout: float = STOP_S) -> None:
        """End after the step that runs now; one that needs longer than `timeout` seconds is cancelled."""
        self._stopping.set()
        self._bell.set()
        task, self._task = self._task, None
        if task is None:
            return
        _, late = await asyncio.wait({task}, timeout=timeout)
        if late:
            log.warning("step cancelled, it did not end in time", loop=self.name)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def health(self) -> list[str]:
        """Reasons why this loop is not well; empty when it is."""
        if self._task is None or self._task.done():
            return [f"loop {self.name} is not running"]
        return [f"loop {self.name} failed {self.failures} times in a row"] if self.failures >= UNWELL else []

    async def _run(self) -> None:
        wait_s: float = self._every_s
        while not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._bell.wait(), wait_s)
            if self._stopping.is_set():
                return
            self._bell.clear()
            wait_s = await self._once()

    async def _once(self) -> float:
        try:
            if self._aside is not None and not self._more:
                await self._aside()
            self._more = False  # unless this goes well
            answer = await self._step()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Something that the step waited for was cancelled, not the loop.
            return await self._failed(asyncio.CancelledError())
        except Exception as error:  # a loop that ended would forget work in silence
            return await self._failed(error)
        self.failures = 0
        self.steps += 1
        self.first_done.set()
        if answer is True:
            self._more = True
            self._bell.set()
            return 0.0
        if answer is None or answer is False:
            return self._every_s
        return max(0.0, min(float(answer), self._every_s))

    async def _failed(self, error: BaseException) -> float:
        self.failures += 1
        LOOP_ERRORS.labels(self.name).inc()
        wait_s = min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2 ** min(self.failures - 1, 10))
        details = None if isinstance(error, Ql3Error | asyncio.CancelledError) else error
        log.warning("step failed", loop=self.name, failures=self.failures, error=_name(error), exc_info=details)
        # A bell must not turn the backoff into a spin; only the end interrupts it.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), wait_s)
        return 0.0


def _name(error: BaseException) -> str:
    return error.code if isinstance(error, Ql3Error) else type(error).__name__
