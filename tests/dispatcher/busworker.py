"""A worker on the real bus that keeps the protocol and runs nothing: a process is an entry in a list."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import Any

import msgspec

from schemas import proof, subjects
from schemas.endpoints import ATTEMPTS_START, WORKERS_BEAT, WORKERS_REGISTER
from schemas.system import OrdersAck
from schemas.workers import (
    AttemptReport,
    BeatItem,
    CancelAttempts,
    Capabilities,
    OfferAttempts,
    OfferItem,
    ReportAttempts,
    ReportBody,
    SessionFence,
    StartAttempts,
    StartItem,
    WorkerBeat,
    WorkerBeaten,
    WorkerRegister,
    WorkerRegistered,
)
from services.kit.bus import Bus, Delivery
from services.kit.ids import new_id
from tests.dispatcher.house import PUBLIC_KEY

Decide = Callable[[OfferItem], dict[str, Any] | None]
"""The end of an attempt as a report's fields; None: it runs until it is told otherwise."""


def succeed(_: OfferItem) -> dict[str, Any]:
    return {"exit_code": 0}


class BusWorker:
    """One session on the bus. `started` holds every attempt that passed the barrier, in order, with repeats."""

    def __init__(self, bus: Bus, name: str = "w1", *, slots: int = 64, decide: Decide = succeed, **caps: Any) -> None:
        self.bus = bus
        self.name = name
        self.slots = slots
        self.decide = decide
        self.capabilities = Capabilities(**caps)
        self.key = secrets.token_bytes(32)
        self.session_id = new_id()
        self.generation = 0
        self.offers: dict[str, OfferItem] = {}
        self.running: dict[str, OfferItem] = {}
        self.started: list[str] = []
        self.stops: list[str] = []
        self.acked: set[str] = set()
        self.open: dict[str, AttemptReport] = {}
        self.sequences: dict[str, int] = {}
        self.heard = asyncio.Condition()

    @property
    def fence(self) -> SessionFence:
        return SessionFence(worker=self.name, session_id=self.session_id, generation=self.generation)

    async def begin(self) -> WorkerRegistered:
        question = WorkerRegister(
            worker=self.name,
            session_id=self.session_id,
            slots=self.slots,
            capabilities=self.capabilities,
            public_key=PUBLIC_KEY,
        )
        answer = await self.bus.request(WORKERS_REGISTER, question, token=self.name)
        self.generation = answer.generation
        await self.bus.subscribe(subjects.ack(self.name), self._hear_ack)
        await self.bus.consume_worker(self.name, {OfferAttempts: self._take_offers, CancelAttempts: self._take_cancels})
        return answer

    async def _take_offers(self, messages: list[OfferAttempts]) -> None:
        items = [item for m in messages if m.fence == self.fence for item in m.offers]
        for item in items:
            self.offers[item.attempt_id] = item
        if not items:
            return
        question = StartAttempts(
            fence=self.fence,
            attempts=[
                StartItem(
                    attempt_id=item.attempt_id,
                    offer_id=item.offer_id,
                    lease_generation=item.lease_generation,
                    token_digest=self.digest(item.attempt_id),
                )
                for item in items
            ],
        )
        answer = await self.bus.request(ATTEMPTS_START, question, token=self.name)
        ends: list[AttemptReport] = []
        for grant in answer.grants:
            if grant.attempt_id in self.started:
                continue
            self.started.append(grant.attempt_id)
            item = self.offers[grant.attempt_id]
            end = self.decide(item)
            if end is None:
                self.running[grant.attempt_id] = item
                ends.append(self.signed(grant.attempt_id, kind="started", pid=7))
            else:
                ends.append(self.signed(grant.attempt_id, kind="ended", **end))
        await self.report(*ends)
        async with self.heard:
            self.heard.notify_all()

    async def _take_cancels(self, messages: list[CancelAttempts]) -> None:
        for message in messages:
            for stop in message.stops:
                self.stops.append(stop.attempt_id)
                if self.running.pop(stop.attempt_id, None) is not None:
                    await self.report(self.signed(stop.attempt_id, kind="ended", signal=15, stopped_for=stop.reason))
        async with self.heard:
            self.heard.notify_all()

    async def _hear_ack(self, delivery: Delivery) -> None:
        ids = delivery.decode(OrdersAck).ids
        self.acked.update(ids)
        for order_id in ids:
            self.open.pop(order_id, None)
        async with self.heard:
            self.heard.notify_all()

    def digest(self, attempt_id: str) -> str:
        offer = self.offers[attempt_id]
        return proof.token_digest(proof.token(self.key, attempt_id, offer.offer_id, offer.lease_generation))

    def signed(self, attempt_id: str, **body: Any) -> AttemptReport:
        offer = self.offers[attempt_id]
        sequence = self.sequences[attempt_id] = self.sequences.get(attempt_id, 0) + 1
        text = msgspec.json.encode(ReportBody(**body))
        return AttemptReport(
            order_id=new_id(),
            attempt_id=attempt_id,
            run_id=offer.run_id,
            lease_generation=offer.lease_generation,
            sequence=sequence,
            proof=proof.proof(self.digest(attempt_id), attempt_id, sequence, text),
            body=msgspec.Raw(text),
        )

    async def report(self, *reports: AttemptReport) -> None:
        if reports:
            self.open |= {report.order_id: report for report in reports}
            await self.bus.publish(subjects.report(self.name), ReportAttempts(fence=self.fence, reports=list(reports)))

    async def beat(self) -> WorkerBeaten:
        items = [
            BeatItem(
                attempt_id=attempt_id,
                lease_generation=item.lease_generation,
                sequence=0,
                proof=proof.proof(self.digest(attempt_id), attempt_id, 0, proof.BEAT_BODY),
            )
            for attempt_id, item in self.running.items()
        ]
        question = WorkerBeat(fence=self.fence, slots=self.slots, attempts=items)
        return await self.bus.request(WORKERS_BEAT, question, token=self.name)

    async def until(self, predicate: Callable[[], bool], timeout: float = 30.0) -> None:
        async with self.heard, asyncio.timeout(timeout):
            await self.heard.wait_for(predicate)


async def until(look: Callable[[], Any], wanted: Callable[[Any], bool], timeout: float = 30.0) -> Any:
    """What `look` answers once it is as wanted. Asks again and again: the ledger rings nobody in a test."""
    end = time.monotonic() + timeout
    while True:
        found = await look()
        if wanted(found):
            return found
        if time.monotonic() > end:
            raise AssertionError(f"not as wanted: {found!r}")
        await asyncio.sleep(0.02)
