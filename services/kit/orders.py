"""Orders: rung again by their sender until the receiver's answer after commit closes them.

The sender's table is the truth. Its rows carry when they are to be rung next; a ring is a new outbox row (a repeat
under the same message id would be dropped inside the stream's two-minute window), and `next_ring_ms` says when the one
after it is due.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, Generic, TypeVar

import structlog

from schemas.errors import Ql3Error
from schemas.limits import BATCH_ITEMS
from services.kit.bus import Bus
from services.kit.clock import Clock
from services.kit.loops import Loop

FIRST_RING_MS: Final = 2_000
RING_MAX_MS: Final = 300_000
PENDING_ACKS: Final = 65_536

R = TypeVar("R")

log: structlog.stdlib.BoundLogger = structlog.get_logger("ql3.orders")


def next_ring_ms(rings: int, now_ms: int) -> int:
    """When an order that was rung `rings` times (the first sending included) is rung again, if it is still open.

    2 s after the first, then twice as long each time up to 5 minutes, each shortened by up to a fifth so that what was
    sent together does not come back together.
    """
    wait_ms = min(RING_MAX_MS, FIRST_RING_MS * 2 ** min(max(rings, 1) - 1, 20))
    return now_ms + round(wait_ms * random.uniform(0.8, 1.0))  # noqa: S311 - spreads, not a secret


class OrderRinger(Generic[R]):
    """Rings open orders again.

    `due(limit, now_ms)` returns open rows whose time has come; `ring(rows, now_ms)` writes a new outbox row for each
    and moves its time on with `next_ring_ms`, in one transaction that looks again whether they are open (another
    replica may have been quicker). `loop` is started and stopped by the service; ring it when a row may be due sooner.
    """

    def __init__(
        self,
        name: str,
        *,
        due: Callable[[int, int], Awaitable[Sequence[R]]],
        ring: Callable[[Sequence[R], int], Awaitable[None]],
        clock: Clock,
        every_s: float = 1.0,
        limit: int = BATCH_ITEMS,
    ) -> None:
        self._due = due
        self._ring = ring
        self._clock = clock
        self._limit = limit
        self.loop = Loop(name, self.step, every_s=every_s)

    async def step(self) -> bool:
        """Ring what is due once; True when there may be more."""
        now_ms = self._clock.now_ms()
        rows = await self._due(self._limit, now_ms)
        if not rows:
            return False
        await self._ring(rows, now_ms)
        return len(rows) >= self._limit


class AckBatcher:
    """Collects the ids of orders that are committed here and tells their senders, many in one message.

    An answer that is lost is no loss: the sender rings again, the receiver finds the order done and answers again.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._pending: defaultdict[str, list[str]] = defaultdict(list)
        self._count = 0
        self.loop = Loop("acks", self._send, every_s=60.0)

    async def start(self) -> None:
        """Begin answering."""
        await self.loop.start()

    async def stop(self) -> None:
        """Send what is collected, then end."""
        await self.loop.stop()
        try:
            await self._send()
        except Ql3Error as error:
            log.info("last acks were not sent", error=error.code)

    def add(self, sender: str, ids: Iterable[str]) -> None:
        """These orders of `sender` are committed. Call it after the commit, never inside the transaction."""
        for order in ids:
            if self._count >= PENDING_ACKS:
                log.warning("acks dropped, their senders will ring again", sender=sender)
                break
            self._pending[sender].append(order)
            self._count += 1
        self.loop.ring()

    async def _send(self) -> None:
        while self._pending:
            sender, ids = self._pending.popitem()
            self._count -= len(ids)
            await self._bus.acknowledge(sender, ids)
