"""A ledger under test: the real store on a real database, and a worker that does what the protocol asks."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from schemas import proof
from schemas.identity import Actor, Subject
from schemas.runs import RunOrder
from schemas.tasks import Execution, ExecutionRevision, Terms
from schemas.workers import (
    AttemptReport,
    BeatItem,
    Capabilities,
    JournalEntry,
    OfferAttempts,
    OfferItem,
    ReportBody,
    SessionFence,
    StartAnswer,
    StartAttempts,
    StartItem,
    WorkerBeat,
    WorkerBeaten,
    WorkerRegister,
    WorkerRegistered,
)
from services.dispatcher import barrier, cancelling, placing, recovery, reporting, sessions, submission
from services.dispatcher.records import AttemptRecord, Case, RunRecord
from services.dispatcher.reporting import Sent, Settled
from services.dispatcher.store import cases, runs, workers
from services.dispatcher.store.revisions import Revisions
from services.dispatcher.submission import Outcome
from services.kit.database import Database, Statement, Transaction
from services.kit.ids import new_id
from tests.fixtures_database import shift_clock

TASK = "01890000-0000-7000-8000-0000000000aa"
PUBLIC_KEY = "A" * 43
ADA = Actor(
    type="user", id="ada", authentication_id="t", assurance="single_factor", authenticated_at_ms=1,
    expires_at_ms=2**52,
)  # fmt: skip
EVEN = 0.5
"""A chance that means no jitter."""


def revision(
    *, project: str = "default", task: str = TASK, name: str = "job", number: int = 1, terms: Terms | None = None,
    execution: Execution | None = None,
) -> ExecutionRevision:  # fmt: skip
    return ExecutionRevision(
        project=project,
        task_id=task,
        task_name=name,
        task_revision=number,
        execution=execution or Execution(command=["/bin/true"]),
        terms=terms or Terms(),
    )


def order(of: ExecutionRevision, **fields: Any) -> RunOrder:
    run_id = fields.pop("run_id", None) or new_id()
    return RunOrder(
        **{
            "order_id": run_id,
            "run_id": run_id,
            "project": of.project,
            "revision": of.digest,
            "trigger_type": "manual",
            "requested_by": Subject(type="user", id="ada"),
            "created_at_ms": 1,
            "idempotency_key": run_id,
            **fields,
        }
    )


class Ledger:
    """The dispatcher's transactions on one database, without a bus."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.revisions = Revisions()

    async def submit(self, of: ExecutionRevision, count: int = 1, **fields: Any) -> list[RunRecord]:
        """Commits orders for a revision; answers the runs."""
        outcomes = await self.submit_orders([of], [order(of, **fields) for _ in range(count)])
        assert all(outcome.error is None for outcome in outcomes), outcomes
        return [outcome.run for outcome in outcomes if outcome.run is not None]

    async def submit_orders(self, revisions: Sequence[ExecutionRevision], orders: Sequence[RunOrder]) -> list[Outcome]:
        offered = {item.digest: item for item in revisions}
        return await self.database.transact(lambda tx: submission.submit(tx, self.revisions, offered, orders))

    async def place(self) -> list[tuple[str, OfferAttempts]]:
        placed = await self.database.transact(lambda tx: placing.place(tx, self.revisions))
        return placed.offers

    async def reap(self) -> recovery.Step:
        return await self.database.transact(lambda tx: recovery.reap(tx, lambda: EVEN))

    async def reap_all(self) -> None:
        """Judges everything that is over."""
        while (await self.reap()).more:
            pass

    async def reoffer(self) -> list[tuple[str, OfferAttempts]]:
        """Rings again what was offered and not taken."""

        async def work(tx: Transaction) -> list[tuple[str, OfferAttempts]]:
            return (await placing.reoffer(tx, self.revisions, await tx.now_ms(), 256))[0]

        return await self.database.transact(work)

    async def wake_retries(self) -> recovery.Step:
        return await self.database.transact(lambda tx: recovery.wake_retries(tx, self.revisions))

    async def cancel(self, run_id: str, reason: Any = "user") -> cancelling.Requested:
        async def work(tx: Any) -> cancelling.Requested:
            held = await cases.load(tx, [run_id])
            return await cancelling.request(
                tx, list(held.values()), reason, actor_type="user", actor_id="ada", grace_of=lambda _: 5_000,
                now=await tx.now_ms(),
            )  # fmt: skip

        return await self.database.transact(work)

    async def deliver(self) -> list[tuple[str, Any]]:
        async def work(tx: Any) -> Any:
            return await cancelling.deliver(tx, await tx.now_ms())

        return (await self.database.transact(work))[0]

    async def case(self, run_id: str) -> Case:
        return (await self.database.read(lambda tx: cases.load(tx, [run_id], lock=False)))[run_id]

    async def run(self, run_id: str) -> RunRecord:
        return (await self.case(run_id)).run

    async def attempts(self, run_id: str) -> list[AttemptRecord]:
        return await self.database.read(lambda tx: runs.attempts_of(tx, run_id))

    async def events(self, run_id: str) -> list[str]:
        rows = await self.database.read(lambda tx: runs.events_of(tx, run_id, 0, 1000))
        assert [row["sequence"] for row in rows] == list(range(1, len(rows) + 1))
        return [str(row["type"]) for row in rows]

    async def rows(self, sql: str, *args: Any) -> list[Any]:
        return await self.database.read(lambda tx: tx.fetch(Statement(sql), *args))

    async def spoil_revision(self, run_id: str) -> None:
        """The revision that a run is pinned to cannot be read any more: its content does not match its digest."""
        digest = "f" * 64

        async def work(tx: Transaction) -> None:
            await tx.execute(_SPOILED, digest)
            await tx.execute(Statement("UPDATE runs SET revision_digest = $1 WHERE id = $2"), digest, run_id)

        await self.database.transact(work)
        self.revisions = Revisions()

    async def later(self, ms: int) -> None:
        """Time passes while the ledger is looked after."""
        await shift_clock(self.database, ms)
        await self.database.transact(_stamp)

    async def outage(self, ms: int) -> None:
        """Time passes while nobody looks after the ledger."""
        await self.database.transact(_stamp)
        await shift_clock(self.database, ms)

    async def outage_over(self) -> None:
        """What a dispatcher does at its start after it was away."""
        await self.database.transact(recovery.forgive)


_SPOILED = Statement("""
    INSERT INTO pinned_revisions (digest, project_id, task_id, task_name, task_revision, content, created_at_ms)
    VALUES ($1, 'default', 'x', 'x', 1, '{}', 1)
""")


async def _stamp(tx: Transaction) -> None:
    await workers.set_stamp(tx, await tx.now_ms())


class Hand:
    """A worker's hand: one session at a time, a key of its own, a journal of what it was offered."""

    def __init__(self, ledger: Ledger, name: str = "w1", *, slots: int = 8, **capabilities: Any) -> None:
        self.ledger = ledger
        self.name = name
        self.slots = slots
        self.capabilities = Capabilities(**capabilities)
        self.key = secrets.token_bytes(32)
        self.session_id = new_id()
        self.generation = 0
        self.offers: dict[str, OfferItem] = {}
        self.sequences: dict[str, int] = {}

    @property
    def fence(self) -> SessionFence:
        return SessionFence(worker=self.name, session_id=self.session_id, generation=self.generation)

    async def register(self, *, new_session: bool = True, journal: Sequence[JournalEntry] = ()) -> WorkerRegistered:
        if new_session and self.generation:
            self.session_id = new_id()
        question = WorkerRegister(
            worker=self.name,
            session_id=self.session_id,
            slots=self.slots,
            capabilities=self.capabilities,
            public_key=PUBLIC_KEY,
            journal=list(journal),
        )
        answer = await self.ledger.database.transact(lambda tx: sessions.register(tx, question, lambda: EVEN))
        self.generation = answer.generation
        return answer

    def journal(self, attempt_id: str, state: Any) -> JournalEntry:
        offer = self.offers[attempt_id]
        sequence = self.next(attempt_id)
        return JournalEntry(
            attempt_id=attempt_id,
            offer_id=offer.offer_id,
            lease_generation=offer.lease_generation,
            state=state,
            sequence=sequence,
            proof=proof.proof(self.digest(attempt_id), attempt_id, sequence, proof.register_body(state)),
        )

    def take(self, offers: Sequence[tuple[str, OfferAttempts]]) -> list[str]:
        """Journals what is offered to this session; answers the attempts."""
        taken: list[str] = []
        for worker, message in offers:
            if worker == self.name:
                for item in message.offers:
                    self.offers[item.attempt_id] = item
                    taken.append(item.attempt_id)
        return taken

    def digest(self, attempt_id: str) -> str:
        offer = self.offers[attempt_id]
        return proof.token_digest(proof.token(self.key, attempt_id, offer.offer_id, offer.lease_generation))

    def next(self, attempt_id: str) -> int:
        self.sequences[attempt_id] = self.sequences.get(attempt_id, 0) + 1
        return self.sequences[attempt_id]

    async def start(self, *attempt_ids: str, fence: SessionFence | None = None) -> StartAnswer:
        question = StartAttempts(
            fence=fence or self.fence,
            attempts=[
                StartItem(
                    attempt_id=attempt_id,
                    offer_id=self.offers[attempt_id].offer_id,
                    lease_generation=self.offers[attempt_id].lease_generation,
                    token_digest=self.digest(attempt_id),
                )
                for attempt_id in attempt_ids
            ],
        )
        answers = await self.ledger.database.transact(lambda tx: barrier.start(tx, self.ledger.revisions, [question]))
        return answers[0]

    def signed(self, attempt_id: str, **body: Any) -> AttemptReport:
        offer = self.offers[attempt_id]
        sequence = self.next(attempt_id)
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

    async def send(self, *reports: AttemptReport, fence: SessionFence | None = None) -> Settled:
        sent = [Sent(self.name, fence or self.fence, report) for report in reports]
        return await self.ledger.database.transact(lambda tx: reporting.settle(tx, sent, lambda: EVEN))

    async def report(self, attempt_id: str, **body: Any) -> Settled:
        return await self.send(self.signed(attempt_id, **body))

    async def beat(self, *attempt_ids: str, fence: SessionFence | None = None, draining: bool = False) -> WorkerBeaten:
        items: list[BeatItem] = []
        for attempt_id in attempt_ids:
            sequence = self.sequences.get(attempt_id, 0)
            items.append(
                BeatItem(
                    attempt_id=attempt_id,
                    lease_generation=self.offers[attempt_id].lease_generation,
                    sequence=sequence,
                    proof=proof.proof(self.digest(attempt_id), attempt_id, sequence, proof.BEAT_BODY),
                )
            )
        question = WorkerBeat(fence=fence or self.fence, slots=self.slots, attempts=items, draining=draining)
        return (await self.ledger.database.transact(lambda tx: sessions.beat(tx, question))).answer


async def started(ledger: Ledger, hand: Hand, of: ExecutionRevision | None = None) -> tuple[str, str]:
    """A run whose attempt has passed the start barrier: (run id, attempt id)."""
    (run,) = await ledger.submit(of or revision())
    hand.take(await ledger.place())
    attempt_id = (await ledger.run(run.id)).attempt_id
    assert attempt_id is not None
    answer = await hand.start(attempt_id)
    assert [grant.attempt_id for grant in answer.grants] == [attempt_id], answer
    return run.id, attempt_id


async def running(ledger: Ledger, hand: Hand, of: ExecutionRevision | None = None) -> tuple[str, str]:
    """A run whose process exists: (run id, attempt id)."""
    run_id, attempt_id = await started(ledger, hand, of)
    await hand.report(attempt_id, kind="started", pid=42)
    return run_id, attempt_id
