"""Held runs that end without us: what was asked for them is void.

The dispatcher's facts tell it; a fact may be lost, so its feed is read too, from a stored position. Where the feed has
a gap, and for a run whose request came after its end, the dispatcher is asked about the run itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from schemas.errors import Ql3Error
from schemas.runs import RUN_TERMINAL, Run, RunChanged
from schemas.system import FeedItem, FeedPage
from services.approval.approvals import Approvals
from services.approval.gate import Gate
from services.approval.store import holds
from services.approval.store.holds import Held
from services.kit.outbox import fact_of

SOURCE: Final = "dispatcher"
HELD: Final = "held"
"""The bell of the loop that watches over held runs."""
PAGE: Final = 64
UNSEEN: Final = 4_096
"""So many new requests are looked at for themselves; beyond that all of them are."""

Read = Callable[[str | None], Awaitable[FeedPage]]
Look = Callable[[Held], Awaitable[Run]]


class HeldRuns:
    """The watch over runs that wait. Several may watch: voiding is done once."""

    def __init__(self, gate: Gate, approvals: Approvals, *, read: Read, look: Look) -> None:
        self._gate = gate
        self._database = gate.database
        self._approvals = approvals
        self._read = read
        self._look = look
        self._unseen: set[str] = set()
        self._all_unseen = True

    def asked(self, runs: Iterable[str]) -> None:
        """Requests for these runs were just stored; the runs may be over already."""
        self._unseen.update(runs)
        if len(self._unseen) > UNSEEN:
            self._unseen.clear()
            self._all_unseen = True
        self._database.bell(HELD).set()

    async def ended(self, runs: Iterable[str]) -> None:
        """These runs are over, as somebody says who knows."""
        named = sorted(set(runs))
        if not named:
            return
        for held in await self._database.read(lambda tx: holds.among(tx, named)):
            await self._approvals.run_ended(held.run)

    async def step(self) -> bool | None:
        """Look at what was not looked at, and read one page of facts. True when there may be more."""
        try:
            await self._look_at_unseen()
            return await self.read_page()
        except Ql3Error as error:
            if error.code != "unavailable":
                raise
            return None  # nobody answers: the next turn begins here again

    async def _look_at_unseen(self) -> None:
        if self._all_unseen:
            await self._look_at_all()
            self._all_unseen = False
        while self._unseen:
            named = sorted(self._unseen)[:PAGE]
            for held in await self._database.read(lambda tx, named=named: holds.among(tx, named)):
                await self._check(held)
            self._unseen.difference_update(named)

    async def _look_at_all(self) -> None:
        after = ""
        while True:
            now_ms = self._gate.now_ms()
            found = await self._database.read(lambda tx, after=after, now=now_ms: holds.page(tx, now, after, PAGE))
            for held in found:
                await self._check(held)
            if len(found) < PAGE:
                return
            after = found[-1].run

    async def _check(self, held: Held) -> None:
        try:
            over = (await self._look(held)).status in RUN_TERMINAL
        except Ql3Error as error:
            if error.code != "not_found":
                raise
            over = True
        if over:
            await self._approvals.run_ended(held.run)

    async def read_page(self) -> bool | None:
        """Deal with one page of facts; True when there is another. Raises `unavailable`."""
        position = await self._database.read(lambda tx: holds.position(tx, SOURCE))
        page = await self._read(position)
        if page.gap:
            await self._look_at_all()
        await self.ended(run for item in page.items if (run := _ended_run(item)) is not None)
        moved = page.position
        if moved is not None and moved != position:
            now_ms = self._gate.now_ms()
            await self._database.transact(lambda tx: holds.move(tx, SOURCE, moved, now_ms))
        return True if page.more else None


def _ended_run(item: FeedItem) -> str | None:
    fact = fact_of(item, RunChanged)
    return fact.run_id if fact is not None and ended_unqueued(fact) else None


def ended_unqueued(fact: RunChanged) -> bool:
    """Whether a run ended that was never queued; about any other nothing waits for a decision."""
    return fact.status in RUN_TERMINAL and fact.attempt_id is None
