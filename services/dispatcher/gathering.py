"""Gathers what comes in while a transaction commits, so that the next one takes all of it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from services.kit.database import DatabaseUnavailable

I = TypeVar("I")  # noqa: E741
O = TypeVar("O")  # noqa: E741


class Gatherer(Generic[I, O]):
    """Runs `work` on batches, one batch at a time; each caller waits for the outcome of its own items.

    `size` weighs an item, `most` bounds a batch's weight. When a batch fails its callers are tried one by one, so that
    one bad item harms nobody else; when the database is away, nobody is tried again.
    """

    def __init__(
        self, work: Callable[[Sequence[I]], Awaitable[Sequence[O]]], *, most: int, size: Callable[[I], int]
    ) -> None:
        self._work = work
        self._most = most
        self._size = size
        self._waiting: deque[tuple[I, asyncio.Future[O]]] = deque()
        self._task: asyncio.Task[None] | None = None

    async def put(self, item: I) -> O:
        """The outcome of one item. Raises what its batch raised when it was tried alone."""
        future: asyncio.Future[O] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="gatherer")
        return await future

    async def close(self) -> None:
        """Waits until what was put is worked off."""
        while self._task is not None and not self._task.done():
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        while self._waiting:
            batch: list[tuple[I, asyncio.Future[O]]] = []
            weight = 0
            while self._waiting:
                more = self._size(self._waiting[0][0])
                if batch and weight + more > self._most:
                    break
                weight += more
                batch.append(self._waiting.popleft())
            batch = [entry for entry in batch if not entry[1].done()]
            if batch:
                await self._settle(batch)

    async def _settle(self, batch: list[tuple[I, asyncio.Future[O]]]) -> None:
        try:
            outcomes = await self._work([item for item, _ in batch])
        except Exception as error:
            if len(batch) > 1 and not isinstance(error, DatabaseUnavailable):
                for entry in batch:
                    await self._settle([entry])
                return
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), outcome in zip(batch, outcomes, strict=True):
            if not future.done():
                future.set_result(outcome)
