"""From offers to processes: journal a batch, pass the start barrier with one request, hand the grants to the host.

Nothing is started twice: what the journal held when this process began is never handed to the host again (`reconcile`
decides about it), and what this process handed over once is not handed over again either.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import structlog

from schemas import limits
from schemas.errors import Ql3Error
from schemas.workers import (
    OfferAttempts,
    OfferItem,
    SessionFence,
    StartAnswer,
    StartAttempts,
    StartGrant,
    StartItem,
)
from services.kit.clock import Clock
from services.kit.database import Database
from services.kit.loops import Loop
from services.kit.rush import rush
from services.worker import store
from services.worker.attempt import Held, hold
from services.worker.command import Builder, Extras, Prepared
from services.worker.holdings import Holdings
from services.worker.place import Room
from services.worker.refusal import Refused
from services.worker.store import OfferRow

ASK_FOR_S: Final = 30.0
"""A barrier that did not answer for so long has let the lease run out: the attempt is given back."""
NS_PER_MS: Final = 1_000_000

log: structlog.stdlib.BoundLogger = structlog.get_logger("ql3.worker")


class Intake:
    """The way of an attempt into this worker."""

    def __init__(
        self,
        *,
        clock: Clock,
        database: Database,
        holdings: Holdings,
        builder: Builder,
        room: Room,
        make_directory: Callable[[str], None],
        fence: Callable[[], SessionFence | None],
        ask: Callable[[StartAttempts], Awaitable[StartAnswer]],
        extras: Callable[[Held, Prepared, list[str], int], Awaitable[Extras]],
    ) -> None:
        self.key = b""
        """The worker's own key, set before the first offer."""
        self._holdings = holdings
        self._held = holdings.held
        self._clock = clock
        self._database = database
        self.builder = builder
        self._room = room
        self._make_directory = make_directory
        self._fence = fence
        self._ask = ask
        self._extras = extras
        holdings.withdraw = self._withdraw
        holdings.ready = lambda: self.loop.ring()
        self._waiting: dict[str, Held] = {}
        self._directories: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.loop = Loop("worker.barrier", self._step, every_s=1.0)

    async def take(self, messages: list[OfferAttempts]) -> None:
        """Journal offers of this session; older ones are let go, their leases are not this session's."""
        fence = self._fence()
        if fence is None:
            return
        now_ms, now_s, host = self._clock.now_ms(), time.monotonic(), self._holdings.host_name
        rows: list[OfferRow] = []
        fresh: list[Held] = []
        for message in messages:
            if message.fence != fence:
                continue
            revisions = {revision.digest: revision for revision in message.revisions}
            for offer in message.offers:
                revision = revisions.get(offer.revision)
                known = self._held.get(offer.attempt_id)
                if revision is None or not self._wanted(known, offer):
                    continue
                one = hold(self.key, offer, revision, host, self.builder.place.engine, now_s)
                fresh.append(one)
                rows.append(_row(one, now_ms))
        if not fresh:
            return
        await self._database.transact(lambda tx: store.accept(tx, rows))
        for one in fresh:
            self._held[one.attempt_id] = one
            self._waiting[one.attempt_id] = one
        self.loop.ring()

    def _withdraw(self, attempt_id: str) -> bool:
        return self._waiting.pop(attempt_id, None) is not None

    def _wanted(self, known: Held | None, offer: OfferItem) -> bool:
        # A repeated offer is known; one with a higher generation comes only if the older never passed the barrier.
        if known is None:
            return len(self._held) < store.MAX_JOURNAL
        return known.state == "accepted" and known.lease_generation < offer.lease_generation

    async def _step(self) -> bool | float | None:
        fence = self._fence()
        if fence is None or not self._waiting or not self._holdings.host.connected:
            return None
        now_ms = self._clock.now_ms()
        ready: list[Held] = []
        more = False
        wait_ms = 60_000
        for one in self._waiting.values():
            not_before = one.offer.not_before_ms if one.offer else None
            if not_before is not None and not_before > now_ms:
                wait_ms = min(wait_ms, not_before - now_ms)
            elif len(ready) < limits.BATCH_ITEMS:
                ready.append(one)
            else:
                more = True
        if not ready:
            return wait_ms / 1000
        asked_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        for one in ready:
            one.asked = True
        try:
            answer = await self._ask(StartAttempts(fence=fence, attempts=[_start_item(one) for one in ready]))
        except Ql3Error:
            self._give_up(ready)
            raise
        await self._start(ready, answer, asked_ns)
        return more or wait_ms / 1000

    async def _start(self, ready: list[Held], answer: StartAnswer, asked_ns: int) -> None:
        grants = {grant.attempt_id: grant for grant in answer.grants}
        refused = {refusal.attempt_id for refusal in answer.refused}
        items: list[dict[str, Any]] = []
        for one in ready:
            if self._waiting.get(one.attempt_id) is not one:
                continue  # withdrawn, or offered anew, meanwhile
            grant = grants.get(one.attempt_id)
            if grant is None:
                if one.attempt_id in refused:
                    # Somebody else holds it now, or nobody wants it: there is nothing to tell.
                    del self._waiting[one.attempt_id]
                    self._holdings.forget(one)
                continue
            del self._waiting[one.attempt_id]
            item = await self._item(one, grant, asked_ns)
            if item is not None:
                items.append(item)
        if items:
            self._holdings.spawn(items)
            rush.starts(len(items))

    async def _item(self, one: Held, grant: StartGrant, asked_ns: int) -> dict[str, Any] | None:
        """What the host is asked to start; None when it is started later or not at all."""
        offer, revision = one.offer, one.revision
        assert offer is not None
        assert revision is not None
        one.state = "launching"
        not_after_ns = asked_ns + grant.start_within_ms * NS_PER_MS
        try:
            prepared = self.builder.prepare(offer.revision, revision)
            if not self._room.reserve(one, revision.execution.log_quota_bytes):
                raise Refused("disk_full", "There is too little room on the worker's disk.")
            if one.project not in self._directories:
                self._make_directory(one.project)
                self._directories.add(one.project)
            if prepared.slow(offer):
                task = asyncio.create_task(self._slowly(one, prepared, grant, not_after_ns))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                return None
            item = self.builder.item(one, prepared, offer, not_after_ns=not_after_ns, timeout_ms=grant.timeout_ms)
        except (Refused, OSError) as error:
            code, summary = _why(error)
            self._holdings.not_started(one, code, summary)
            return None
        one.offer = one.revision = None
        return item

    async def _slowly(self, one: Held, prepared: Prepared, grant: StartGrant, not_after_ns: int) -> None:
        """The slower way: values from the vault, files, an environment of packages; or the attempt is not started."""
        offer = one.offer
        assert offer is not None
        try:
            extras = await self._extras(one, prepared, prepared.fixed["argv"], not_after_ns)
            if one.stop_reason is not None:
                raise Refused("stopped", "It was stopped before it started.")
            item = self.builder.item(
                one, prepared, offer, not_after_ns=not_after_ns, timeout_ms=grant.timeout_ms, extras=extras
            )
            one.offer = one.revision = None
            self._holdings.spawn([item])
        except Exception as error:  # whatever it is, an attempt that was granted must not be left open
            if not isinstance(error, Refused | Ql3Error):
                log.exception("an attempt could not be prepared")
            code, summary = _why(error)
            self._holdings.not_started(one, code, summary)

    def _give_up(self, ready: Sequence[Held]) -> None:
        now_s = time.monotonic()
        for one in ready:
            if now_s - one.accepted_s > ASK_FOR_S and self._waiting.pop(one.attempt_id, None) is one:
                self._holdings.not_started(one, "start_window_passed", "The start was not granted in time.")


def _why(error: Exception) -> tuple[str, str]:
    if isinstance(error, Refused):
        return error.code, error.summary
    if isinstance(error, Ql3Error) and error.code == "secret_unavailable":
        return "context_unavailable", error.detail or error.kind.title
    if isinstance(error, Ql3Error):
        return "context_unavailable", "The run's secrets were not delivered in time."
    return "executor_start_failed", "The worker could not prepare the start."


def _row(one: Held, now_ms: int) -> OfferRow:
    return OfferRow(
        attempt_id=one.attempt_id,
        offer_id=one.offer_id,
        run_id=one.run_id,
        project=one.project,
        lease_generation=one.lease_generation,
        host=one.host,
        accepted_at_ms=now_ms,
        engine=one.engine or "",
    )


def _start_item(one: Held) -> StartItem:
    return StartItem(
        attempt_id=one.attempt_id,
        offer_id=one.offer_id,
        lease_generation=one.lease_generation,
        token_digest=one.digest,
    )
