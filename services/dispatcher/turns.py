"""One turn of the timers: what is due, and when to look again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from services.dispatcher import reading
from services.dispatcher.store import due
from services.kit.database import Transaction

T = TypeVar("T")


async def look(tx: Transaction) -> tuple[due.Due, list[str]]:
    """What is due, and why a run could not be started now; one small read."""
    return await due.look(tx), await reading.could_run(tx)


def with_now(work: Callable[[Transaction, int], Awaitable[T]]) -> Callable[[Transaction], Awaitable[T]]:
    """A step that is given the database's time."""

    async def run(tx: Transaction) -> T:
        return await work(tx, await tx.now_ms())

    return run


def pause_s(now_due: due.Due, most_s: float) -> float:
    """Seconds until the next time comes, at most `most_s`."""
    # Times that are over already are those that somebody else holds; they are looked at again at the usual pace.
    ahead = [at - now_due.now for at in now_due[1:-1] if at is not None and at > now_due.now]
    return max(0.01, min([most_s, *(ms / 1000 for ms in ahead)]))
