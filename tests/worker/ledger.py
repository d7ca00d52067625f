"""A dispatcher's side of the bus for tests of the worker alone: it grants, hears, and keeps what it was told.

It checks what the real one checks about a single message (fence, proof); it has no tables and decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from schemas import proof, subjects
from schemas.endpoints import ATTEMPTS_START, WORKERS_BEAT, WORKERS_REGISTER
from schemas.errors import Ql3Error
from schemas.tasks import Execution, ExecutionRevision
from schemas.workers import (
    BeatItem,
    CancelAttempts,
    JournalEntry,
    OfferAttempts,
    OfferItem,
    Refusal,
    ReportAttempts,
    ReportBody,
    SessionFence,
    StartAnswer,
    StartAttempts,
    StartGrant,
    StopItem,
    WorkerBeat,
    WorkerBeaten,
    WorkerRegister,
    WorkerRegistered,
)
from services.kit.bus import Bus, Caller, Route
from services.kit.ids import new_id
from tests.fixtures_nats import WAIT_S, WORKER, Heard


class Ledger:
    """What a dispatcher would know, as far as these tests ask."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.fence: SessionFence | None = None
        self.registrations: list[WorkerRegister] = []
        self.beats: list[WorkerBeat] = []
        self.starts: list[str] = []
        self.digests: dict[str, str] = {}
        self.reports = Heard()
        """(attempt id, ReportBody) in the order they came, repeats left out."""
        self.acking = True
        self.granting = True
        self.before_grant: Callable[[], Awaitable[None]] | None = None
        self.released: set[str] = set()
        self.refused: set[str] = set()
        self.beat_error: str | None = None
        self.beat_refused: list[str] = []
        self.stops: list[StopItem] = []
        self.start_within_ms = 15_000
        self.timeout_ms: int | None = None
        self._changed = asyncio.Condition()
        self._seen: dict[tuple[str, int], bytes] = {}
        self.contradictions: list[str] = []
        """Attempts of which two different things were told under one number."""
        self._generation = 0
        self._offered: dict[str, OfferItem] = {}

    async def start(self) -> None:
        await self.bus.serve(
            "dispatcher",
            "1.0.0",
            [
                Route(WORKERS_REGISTER, self._register),
                Route(WORKERS_BEAT, self._beat),
                Route(ATTEMPTS_START, self._start),
            ],
        )
        await self.bus.consume("dispatcher", {ReportAttempts: self._report})

    # -- what a test does

    async def offer(self, *argv: str, revision: ExecutionRevision | None = None, **more: Any) -> str:
        """Offer one attempt of a command; returns its id."""
        (attempt,) = await self.offer_many([argv], revision=revision, **more)
        return attempt

    async def offer_many(
        self, commands: list[tuple[str, ...]], *, revision: ExecutionRevision | None = None, **more: Any
    ) -> list[str]:
        await self.until(lambda: self.fence is not None)
        assert self.fence is not None
        revisions = [revision or make_revision(*argv) for argv in commands]
        items = [
            OfferItem(
                offer_id=new_id(),
                attempt_id=new_id(),
                run_id=new_id(),
                project=one.project,
                attempt=1,
                lease_generation=1,
                revision=one.digest,
                **more,
            )
            for one in revisions
        ]
        self._offered |= {item.attempt_id: item for item in items}
        distinct = {one.digest: one for one in revisions}
        message = OfferAttempts(fence=self.fence, revisions=list(distinct.values()), offers=items)
        await self.bus.publish(subjects.to_worker(WORKER, "offer"), message)
        return [item.attempt_id for item in items]

    async def offer_again(self, attempt: str, **changes: Any) -> None:
        """Send the same attempt's offer once more, perhaps with a higher generation."""
        assert self.fence is not None
        item = msgspec.structs.replace(self._offered[attempt], **changes)
        self._offered[attempt] = item
        revision = self._revision_of(item)
        await self.bus.publish(
            subjects.to_worker(WORKER, "offer"),
            OfferAttempts(fence=self.fence, revisions=[revision], offers=[item]),
        )

    async def cancel(self, attempt: str, reason: Any = "user", grace_ms: int = 1000) -> None:
        stop = StopItem(attempt_id=attempt, dispatch_id=new_id(), lease_generation=1, reason=reason, grace_ms=grace_ms)
        await self.bus.publish(subjects.to_worker(WORKER, "cancel"), CancelAttempts(worker=WORKER, stops=[stop]))

    def forget(self) -> None:
        """As if no report had come yet."""
        self.reports.items.clear()
        self._seen.clear()

    def item(self, attempt: str) -> OfferItem:
        return self._offered[attempt]

    def told(self, attempt: str, *kinds: str) -> list[ReportBody]:
        """Bodies about an attempt, of these kinds (all kinds when none is named)."""
        items: list[Any] = self.reports.items
        return [body for name, body in items if name == attempt and (not kinds or body.kind in kinds)]

    async def end(self, attempt: str, timeout: float = WAIT_S) -> ReportBody:
        """The report of an attempt's end."""
        ends = ("ended", "start_failed", "not_started", "vanished")
        await self.reports.until(lambda _: bool(self.told(attempt, *ends)), timeout)
        return self.told(attempt, *ends)[0]

    async def running(self, attempt: str) -> ReportBody:
        await self.reports.until(lambda _: bool(self.told(attempt, "started")))
        return self.told(attempt, "started")[0]

    async def until(self, predicate: Callable[[], bool], timeout: float = WAIT_S) -> None:
        async with self._changed, asyncio.timeout(timeout):
            await self._changed.wait_for(predicate)

    # -- what the worker asks

    async def _note(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _register(self, question: WorkerRegister, caller: Caller) -> WorkerRegistered:
        assert caller.token == WORKER
        self.registrations.append(question)
        self._generation += 1
        self.fence = SessionFence(worker=WORKER, session_id=question.session_id, generation=self._generation)
        adopted = [e.attempt_id for e in question.journal if self._authentic(e) and e.attempt_id not in self.refused]
        adopted = [name for name in adopted if name not in self.released]
        refused = [e.attempt_id for e in question.journal if e.attempt_id not in {*adopted, *self.released}]
        await self._note()
        return WorkerRegistered(
            generation=self._generation, adopted=adopted, released=sorted(self.released), refused=refused
        )

    def _authentic(self, entry: JournalEntry) -> bool:
        digest = self.digests.get(entry.attempt_id)
        body = proof.register_body(entry.state)
        return digest is not None and proof.proof_holds(digest, entry.attempt_id, entry.sequence, body, entry.proof)

    async def _beat(self, question: WorkerBeat, caller: Caller) -> WorkerBeaten:
        assert caller.token == WORKER
        if self.beat_error is not None:
            raise Ql3Error(self.beat_error)
        assert question.fence == self.fence
        assert all(self._may_beat(item) for item in question.attempts)
        self.beats.append(question)
        await self._note()
        refused = [Refusal(attempt_id=name, code="fence_rejected") for name in self.beat_refused]
        return WorkerBeaten(refused=refused, stops=self.stops)

    def _may_beat(self, item: BeatItem) -> bool:
        digest = self.digests.get(item.attempt_id)
        # What never asked at the barrier is not known, and refused.
        return digest is None or proof.proof_holds(digest, item.attempt_id, item.sequence, proof.BEAT_BODY, item.proof)

    async def _start(self, question: StartAttempts, caller: Caller) -> StartAnswer:
        assert caller.token == WORKER
        assert question.fence == self.fence
        for item in question.attempts:
            self.starts.append(item.attempt_id)
            self.digests[item.attempt_id] = item.token_digest
        await self._note()
        if self.before_grant is not None:
            await self.before_grant()
        if not self.granting:
            raise Ql3Error("unavailable")
        return StartAnswer(
            grants=[
                StartGrant(attempt_id=item.attempt_id, start_within_ms=self.start_within_ms, timeout_ms=self.timeout_ms)
                for item in question.attempts
                if item.attempt_id not in self.refused
            ],
            refused=[
                Refusal(attempt_id=item.attempt_id, code="fence_rejected")
                for item in question.attempts
                if item.attempt_id in self.refused
            ],
        )

    async def _report(self, messages: list[ReportAttempts]) -> None:
        acks: list[str] = []
        for message in messages:
            for report in message.reports:
                raw = bytes(report.body)
                acks.append(report.order_id)
                digest = self.digests.get(report.attempt_id)
                if digest is None:
                    continue  # it never passed the barrier: heard, and of no effect
                assert proof.proof_holds(digest, report.attempt_id, report.sequence, raw, report.proof)
                key = (report.attempt_id, report.sequence)
                if self._seen.get(key, raw) != raw:
                    self.contradictions.append(report.attempt_id)
                if key not in self._seen:
                    self._seen[key] = raw
                    await self.reports.add((report.attempt_id, msgspec.json.decode(raw, type=ReportBody)))
        if self.acking:
            await self.bus.acknowledge(WORKER, acks)

    def _revision_of(self, item: OfferItem) -> ExecutionRevision:
        return _revisions[item.revision]


_revisions: dict[str, ExecutionRevision] = {}


def make_revision(*argv: str, project: str = "default", **more: Any) -> ExecutionRevision:
    """A compiled revision of a command."""
    revision = ExecutionRevision(
        project=project,
        task_id=new_id(),
        task_name="task",
        task_revision=1,
        execution=Execution(command=list(argv), **more),
    )
    _revisions[revision.digest] = revision
    return revision
