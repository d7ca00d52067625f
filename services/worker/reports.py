"""Reports to the dispatcher: in batches, sent again until they are acknowledged.

A report is an order: open here until the dispatcher says that it is committed. The ends are durable before they are
told (in the process host's receipts or in the journal), so what is open lives in memory only.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

import structlog

from schemas import limits
from schemas.errors import Ql3Error
from schemas.workers import AttemptReport, ReportBody, SessionFence
from services.kit.clock import Clock, monotonic_ms
from services.kit.ids import new_id
from services.kit.loops import Loop
from services.kit.orders import next_ring_ms
from services.worker.attempt import END_SEQUENCE, START_SEQUENCE, Held, Receipt, report, sign
from services.worker.hostlink import Started

TELL_START_AFTER_MS: Final = 200
"""A run that ends sooner is told in one report."""
GATHER_S: Final = 0.01
"""How long a few reports wait for others, while many attempts run: one message and one transaction serve them all."""
ONE_REPORT_BYTES: Final = 700
"""About what a report takes on the wire besides its body, generously."""

Send = Callable[[SessionFence, list[AttemptReport]], Awaitable[None]]

log: structlog.stdlib.BoundLogger = structlog.get_logger("ql3.worker")


class _Open(NamedTuple):
    held: Held
    report: AttemptReport
    rings: int


class Reports:
    """Everything that was told or is to be told. `ended` is called with attempts whose ends were acknowledged.

    `more_coming` answers, for a number of reports that are ready, whether it is worth waiting a moment for others.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        send: Send,
        fence: Callable[[], SessionFence | None],
        ended: Callable[[list[Held]], None],
        more_coming: Callable[[int], bool],
    ) -> None:
        self._clock = clock
        self._send = send
        self._fence = fence
        self._ended = ended
        self._more_coming = more_coming
        self._ready: deque[str] = deque()
        self._open: dict[str, _Open] = {}
        self._order_of: dict[tuple[str, int], str] = {}
        self._due: list[tuple[int, str]] = []
        self._starts: deque[tuple[int, Held, Started]] = deque()
        self.loop = Loop("worker.reports", self._step, every_s=1.0)

    @property
    def outstanding(self) -> int:
        """Reports that are not acknowledged."""
        return len(self._open)

    def started(self, held: Held, started: Started) -> None:
        """A process exists; told soon, unless its end comes first."""
        self._starts.append((monotonic_ms() + TELL_START_AFTER_MS, held, started))
        if len(self._starts) == 1:
            self.loop.ring()

    def end(self, held: Held, receipt: Receipt) -> None:
        """The end of an attempt, which is durable."""
        # What was said of the start is in this report too.
        self._drop(self._order_of.get((held.attempt_id, START_SEQUENCE)))
        self._add(held, receipt)

    def forget(self, held: Held) -> None:
        """Nothing about this attempt is to be told any more."""
        for sequence in (START_SEQUENCE, END_SEQUENCE):
            self._drop(self._order_of.get((held.attempt_id, sequence)))

    def again(self) -> None:
        """Send everything open at once, as after a new session."""
        self._due.clear()
        self._ready = deque(self._open)
        self.loop.ring()

    async def heard(self, order_ids: list[str]) -> None:
        """The dispatcher has committed these."""
        done: list[Held] = []
        for order_id in order_ids:
            found = self._open.get(order_id)
            if found is not None:
                self._drop(order_id)
                if found.report.sequence == END_SEQUENCE:
                    done.append(found.held)
        if done:
            self._ended(done)

    def _add(self, held: Held, receipt: Receipt) -> None:
        key = (held.attempt_id, receipt.sequence)
        if key in self._order_of:
            return
        order_id = new_id()
        self._open[order_id] = _Open(held, report(held, receipt, order_id), 0)
        self._order_of[key] = order_id
        self._ready.append(order_id)
        self.loop.ring()

    def _drop(self, order_id: str | None) -> None:
        found = self._open.pop(order_id, None) if order_id else None
        if found is not None:
            del self._order_of[found.held.attempt_id, found.report.sequence]

    async def _step(self) -> bool | float | None:
        now = monotonic_ms()
        self._take_starts(now)
        while self._due and self._due[0][0] <= now:
            _, order_id = heapq.heappop(self._due)
            if order_id in self._open:
                self._ready.append(order_id)
        if self._ready and self._more_coming(len(self._ready)):
            await asyncio.sleep(GATHER_S)
        fence = self._fence()
        if fence is None:
            return None
        batch = self._next_batch()
        if batch:
            try:
                await self._send(fence, [self._open[order_id].report for order_id in batch])
            except Ql3Error as error:
                log.info("reports wait", reports=len(batch), error=error.code)
            finally:  # whatever happened to this message, they are sent again
                self._again_later(batch, now)
        if self._ready:
            return True
        return self._starts[0][0] / 1000 - now / 1000 if self._starts else None

    def _again_later(self, batch: list[str], now: int) -> None:
        for order_id in batch:
            found = self._open.get(order_id)
            if found is not None:
                self._open[order_id] = found._replace(rings=found.rings + 1)
                heapq.heappush(self._due, (next_ring_ms(found.rings + 1, now), order_id))

    def _next_batch(self) -> list[str]:
        batch: list[str] = []
        size = 0
        while self._ready and len(batch) < limits.BATCH_ITEMS:
            found = self._open.get(self._ready[0])
            if found is not None:
                size += ONE_REPORT_BYTES + len(bytes(found.report.body))
                if batch and size > limits.BATCH_BYTES:
                    break
                batch.append(self._ready[0])
            self._ready.popleft()
        return batch

    def _take_starts(self, now: int) -> None:
        while self._starts and self._starts[0][0] <= now:
            _, held, started = self._starts.popleft()
            if held.state == "running" and not held.told_start:
                held.told_start = True
                body = ReportBody(kind="started", started_at_ms=started.at_ms, pid=started.pid)
                self._add(held, sign(held, body, START_SEQUENCE))
