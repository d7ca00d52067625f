"""A model of everything that can happen to runs, in any order, with the real store on both databases.

Workers crash, messages are late, doubled, reordered or lost, time passes with and without somebody who looks after the
ledger. After every step the ledger must be whole; in the end every run must have ended.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from schemas import proof
from schemas.runs import RunOrder
from schemas.tasks import Concurrency, Execution, ExecutionRevision, Overlap, RetryPolicy, Terms
from schemas.workers import AttemptReport, OfferAttempts, SessionFence
from services.dispatcher import cancelling, placing, recovery
from services.dispatcher.records import RUN_EDGES, TERMINAL
from services.dispatcher.store import runs
from services.kit.database import Database, DatabaseConfig, open_database
from services.kit.migrations import migrate
from tests.dispatcher.house import Hand, Ledger, order, revision
from tests.fixtures_database import Postgres, database_configs

RETRY = RetryPolicy(max_attempts=3, safety="idempotent", backoff_base_ms=1_000, jitter_percent=0)
KINDS: tuple[ExecutionRevision, ...] = (
    revision(number=1),
    revision(number=2, terms=Terms(retry=RETRY)),
    revision(number=3, terms=Terms(retry=RetryPolicy(max_attempts=2, safety="unknown", backoff_base_ms=0))),
    revision(
        number=4, task="01890000-0000-7000-8000-0000000000b0", name="single",
        terms=Terms(overlap=Overlap(policy="allow", limit=1), retry=RETRY),
    ),
    revision(
        number=5, task="01890000-0000-7000-8000-0000000000c0", name="skips", terms=Terms(overlap=Overlap(policy="skip"))
    ),
    revision(
        number=6, task="01890000-0000-7000-8000-0000000000d0", name="replaces",
        terms=Terms(overlap=Overlap(policy="replace"), concurrency=[Concurrency(key="db", limit=2)]),
    ),
    revision(number=7, project="other", execution=Execution(command=["/bin/true"], timeout_ms=20_000)),
    revision(number=8, terms=Terms(queue_timeout_ms=30_000)),
)  # fmt: skip

Make = Callable[[], Awaitable[tuple[Database, Callable[[], Awaitable[None]]]]]


class LedgerMachine(RuleBasedStateMachine):
    """Steps over one ledger with two workers."""

    make: Make

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        database, self.drop = self.do(type(self).make())
        self.ledger = Ledger(database)
        self.hands = [Hand(self.ledger, "w1", slots=2), Hand(self.ledger, "w2", slots=3)]
        self.orders: list[tuple[ExecutionRevision, RunOrder]] = []
        self.offers: list[tuple[str, OfferAttempts]] = []
        self.reports: list[tuple[Hand, SessionFence, AttemptReport]] = []
        self.alive: dict[str, tuple[Hand, str]] = {}
        """Processes: attempt -> (worker, what its journal says)."""
        self.granted: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)
        self.ended: dict[str, str] = {}
        self.versions: dict[str, int] = {}
        self.statuses: dict[str, str] = {}

    def do(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def teardown(self) -> None:
        try:
            self.finish()
        finally:
            self.do(self.drop())
            self.loop.close()

    # -- what happens

    @initialize()
    def begin(self) -> None:
        self.do(self.ledger.outage_over())
        for hand in self.hands:
            self.do(hand.register())

    @rule(kind=st.sampled_from(KINDS), count=st.integers(1, 3), priority=st.integers(-1, 1))
    def submit(self, kind: ExecutionRevision, count: int, priority: int) -> None:
        made = [order(kind, priority=priority) for _ in range(count)]
        self.orders += [(kind, one) for one in made]
        outcomes = self.do(self.ledger.submit_orders([kind], made))
        assert all(outcome.error is None for outcome in outcomes)

    @precondition(lambda self: self.orders)
    @rule(data=st.data())
    def submit_again(self, data: st.DataObject) -> None:
        kind, one = data.draw(st.sampled_from(self.orders))
        (outcome,) = self.do(self.ledger.submit_orders([kind], [one]))
        assert outcome.replayed
        assert outcome.run.id == one.run_id

    @rule()
    def place(self) -> None:
        self.offers += self.do(self.ledger.place())

    @rule()
    def reoffer(self) -> None:
        async def work(tx: Any) -> Any:
            return await placing.reoffer(tx, self.ledger.revisions, await tx.now_ms(), 256)

        offers, _ = self.do(self.ledger.database.transact(work))
        self.offers += offers

    @precondition(lambda self: self.offers)
    @rule(data=st.data(), keep=st.booleans())
    def offer_arrives(self, data: st.DataObject, keep: bool) -> None:
        index = data.draw(st.integers(0, len(self.offers) - 1))
        worker, message = self.offers[index] if keep else self.offers.pop(index)
        hand = next(h for h in self.hands if h.name == worker)
        if message.fence != hand.fence:
            return
        for item in message.offers:
            known = hand.offers.get(item.attempt_id)
            if known is None or known.lease_generation <= item.lease_generation:
                hand.offers[item.attempt_id] = item

    @rule(which=st.integers(0, 1))
    def start(self, which: int) -> None:
        hand = self.hands[which]
        waiting = [a for a in hand.offers if a not in self.alive]
        if not waiting:
            return
        answer = self.do(hand.start(*waiting))
        for grant in answer.grants:
            offer = hand.offers[grant.attempt_id]
            self.granted[grant.attempt_id].add((offer.offer_id, offer.lease_generation))
            self.alive[grant.attempt_id] = (hand, "running")
        for refusal in answer.refused:
            hand.offers.pop(refusal.attempt_id, None)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), exit_code=st.integers(0, 1), kind=st.sampled_from(["started", "ended", "not_started"]))
    def process_reports(self, data: st.DataObject, exit_code: int, kind: str) -> None:
        attempt_id = data.draw(st.sampled_from(sorted(self.alive)))
        hand, _ = self.alive[attempt_id]
        body: dict[str, Any] = {"kind": kind}
        if kind == "ended":
            body["exit_code"] = exit_code
        if kind != "started":
            self.alive[attempt_id] = (hand, "ended")
        self.reports.append((hand, hand.fence, hand.signed(attempt_id, **body)))

    @precondition(lambda self: self.reports)
    @rule(data=st.data(), keep=st.booleans(), old_session=st.booleans())
    def reports_arrive(self, data: st.DataObject, keep: bool, old_session: bool) -> None:
        count = data.draw(st.integers(1, min(4, len(self.reports))))
        chosen = data.draw(st.permutations(self.reports))[:count]
        for hand, fence, report in chosen:
            settled = self.do(hand.send(report, fence=fence if old_session else hand.fence))
            acked = report.order_id in settled.acks.get(hand.name, [])
            if acked and not keep:
                self.reports = [item for item in self.reports if item[2].order_id != report.order_id]
                if self.alive.get(report.attempt_id, (hand, ""))[1] == "ended":
                    self.alive.pop(report.attempt_id, None)

    @rule(which=st.integers(0, 1))
    def beat(self, which: int) -> None:
        hand = self.hands[which]
        held = [a for a, (owner, state) in self.alive.items() if owner is hand and state == "running"]
        answer = self.do(hand.beat(*held))
        for refusal in answer.refused:
            self.alive.pop(refusal.attempt_id, None)

    @rule(which=st.integers(0, 1), gone=st.booleans())
    def crash(self, which: int, gone: bool) -> None:
        """A worker comes back with what its journal knows; with `gone` its processes did not outlive it."""
        hand = self.hands[which]
        mine = {a: state for a, (owner, state) in self.alive.items() if owner is hand}
        journal = [hand.journal(a, "gone" if gone and state == "running" else state) for a, state in mine.items()]
        answer = self.do(hand.register(journal=journal))
        for attempt_id in mine:
            if attempt_id not in answer.adopted and mine[attempt_id] == "running":
                self.alive.pop(attempt_id, None)
        for attempt_id in list(hand.offers):
            if attempt_id not in self.alive and attempt_id not in answer.adopted:
                hand.offers.pop(attempt_id, None)

    @rule(ms=st.sampled_from([500, 4_000, 16_000, 31_000]))
    def time_passes(self, ms: int) -> None:
        self.do(self.ledger.later(ms))

    @rule(ms=st.sampled_from([20_000, 600_000]))
    def nobody_looks(self, ms: int) -> None:
        self.do(self.ledger.outage(ms))

    @rule()
    def loops(self) -> None:
        self.turn()

    @precondition(lambda self: self.orders)
    @rule(data=st.data(), reason=st.sampled_from(["user", "policy", "shutdown"]))
    def cancel(self, data: st.DataObject, reason: str) -> None:
        _, one = data.draw(st.sampled_from(self.orders))
        self.do(self.ledger.cancel(one.run_id, reason))

    def turn(self) -> None:
        """Every loop of the dispatcher once."""
        ledger, transact = self.ledger, self.ledger.database.transact
        self.do(ledger.reap())
        self.do(ledger.wake_retries())
        self.do(transact(lambda tx: recovery.end_overdue(tx, ledger.revisions)))
        self.do(transact(recovery.end_unplaced))

        async def sweep(tx: Any) -> Any:
            return await cancelling.sweep(tx, ledger.revisions, cancelling.Position(), await tx.now_ms())

        self.do(transact(sweep))
        for worker, message in self.do(ledger.deliver()):
            hand = next(h for h in self.hands if h.name == worker)
            for stop in message.stops:
                if self.alive.get(stop.attempt_id, (None, ""))[1] == "running":
                    self.alive[stop.attempt_id] = (hand, "ended")
                    body = {"kind": "ended", "signal": 15, "stopped_for": stop.reason}
                    self.reports.append((hand, hand.fence, hand.signed(stop.attempt_id, **body)))

    # -- what must hold

    @invariant()
    def whole(self) -> None:
        rows = self.do(self.look())
        active = [row for row in rows["attempts"] if row["status"] in ("claimed", "starting", "running")]
        assert len({row["run_id"] for row in active}) == len(active), "two active attempts of a run"
        sequences: defaultdict[str, list[int]] = defaultdict(list)
        for row in rows["events"]:
            sequences[row["run_id"]].append(row["sequence"])
        numbers: defaultdict[str, list[int]] = defaultdict(list)
        for row in rows["attempts"]:
            numbers[row["run_id"]].append(row["attempt"])
        leases = {row["attempt_id"]: row for row in rows["leases"]}
        live: defaultdict[str, int] = defaultdict(int)
        for row in rows["leases"]:
            live[row["worker_id"]] += row["status"] == "leased"
        for hand in self.hands:
            assert live[hand.name] <= hand.slots, "more leases than slots"
        waiting = {row["lane"] for row in rows["runs"] if row["status"] == "queued"}
        assert waiting == set(rows["lanes"]), "a queued run that no lane shows"
        for run in rows["runs"]:
            self.one_run(run, sequences[run["id"]], numbers[run["id"]], leases, rows)
        for attempt_id, grants in self.granted.items():
            assert len(grants) == 1, f"{attempt_id} passed the barrier twice"

    def one_run(
        self, run: Any, sequences: list[int], numbers: list[int], leases: dict[str, Any], rows: dict[str, Any]
    ) -> None:
        run_id, status = run["id"], run["status"]
        assert sequences == list(range(1, run["event_sequence"] + 1)), "a hole in the events"
        assert sorted(numbers) == list(range(1, run["attempt"] + 1)), "a hole in the attempts"
        assert run["version"] >= self.versions.get(run_id, 0)
        before = self.statuses.get(run_id)
        if before in TERMINAL:
            assert status == before, "an end that changed"
        elif before is not None and before != status:
            assert _reachable(before, status), f"{before} -> {status}"
        self.versions[run_id], self.statuses[run_id] = run["version"], status
        lease = leases.get(run["attempt_id"])
        if status in ("dispatching", "running"):
            assert lease is not None
            assert lease["status"] == "leased", "work that nobody holds"
        elif lease is not None:
            assert lease["status"] != "leased", "a lease without work"
        if status == "retry_wait":
            assert run_id in rows["retries"], "a retry that no loop will wake"
        else:
            assert run_id not in rows["retries"]
        assert status not in ("created", "lost"), "a state in which nothing would move the run"

    async def look(self) -> dict[str, Any]:
        ledger = self.ledger
        found = {
            "runs": await ledger.rows("SELECT * FROM runs"),
            "attempts": await ledger.rows("SELECT run_id, attempt, status FROM run_attempts"),
            "events": await ledger.rows("SELECT run_id, sequence FROM run_events ORDER BY run_id, sequence"),
            "leases": await ledger.rows("SELECT * FROM run_dispatch_leases"),
            "retries": {
                row["run_id"]
                for row in await ledger.rows(
                    "SELECT run_id FROM run_retry_policies WHERE next_attempt_at_ms IS NOT NULL"
                )
            },
            "lanes": await ledger.database.read(lambda tx: runs.lanes(tx, "", 1000)),
        }
        text = str(found["leases"])
        for hand in self.hands:
            for attempt_id, offer in hand.offers.items():
                token = proof.token(hand.key, attempt_id, offer.offer_id, offer.lease_generation)
                assert token.hex() not in text, "a token at rest"
        return found

    def finish(self) -> None:
        """With workers that work and loops that turn, every run comes to its end, and every process is of one grant."""
        for _ in range(60):
            if all(status in TERMINAL for status in self.statuses.values()):
                break
            for hand in self.hands:
                self.do(hand.beat(*[a for a, (h, s) in self.alive.items() if h is hand and s == "running"]))
            self.place()
            while self.offers:
                worker, message = self.offers.pop(0)
                hand = next(h for h in self.hands if h.name == worker)
                if message.fence == hand.fence:
                    hand.take([(worker, message)])
            for which in (0, 1):
                self.start(which)
            for attempt_id, (hand, state) in list(self.alive.items()):
                if state == "running":
                    self.alive[attempt_id] = (hand, "ended")
                    self.reports.append((hand, hand.fence, hand.signed(attempt_id, kind="ended", exit_code=0)))
            for hand, _, report in self.reports:
                self.do(hand.send(report))
            self.reports = []
            self.alive = {}
            self.do(self.ledger.later(4_000))
            self.turn()
            self.whole()
        left = {run_id: status for run_id, status in self.statuses.items() if status not in TERMINAL}
        assert not left, f"runs without an end: {left}"


def _reachable(before: str, after: str) -> bool:
    """Whether some path of legal steps leads there; several may be taken in one transaction."""
    seen, edge = {before}, {before}
    while edge:
        edge = {step for status in edge for step in RUN_EDGES[status]} - seen
        if after in edge:
            return True
        seen |= edge
    return False


def _check(make: Make, examples: int, steps: int) -> None:
    machine = type("Machine", (LedgerMachine,), {"make": staticmethod(make)})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=int(os.environ.get("QL3_MODEL_EXAMPLES", examples)),
            stateful_step_count=steps,
            deadline=None,
            derandomize="QL3_MODEL_EXAMPLES"
            not in os.environ,  # the same examples each time, unless more are asked for
            phases=(Phase.generate,),  # shrinking runs the real store thousands of times
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )


@pytest.mark.timeout(600)
def test_any_order_of_events_keeps_the_ledger_whole_on_sqlite(tmp_path: Path) -> None:
    template = tmp_path / "template"
    template.mkdir()
    asyncio.run(migrate(DatabaseConfig(url=f"sqlite:{template}"), "dispatcher"))

    async def make() -> tuple[Database, Callable[[], Awaitable[None]]]:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        shutil.copy(template / "dispatcher.sqlite3", folder)
        config = DatabaseConfig(url=f"sqlite:{folder}")
        database = await open_database(config, "dispatcher")
        database_configs[database] = config

        async def drop() -> None:
            await database.close()
            database_configs.pop(database, None)
            shutil.rmtree(folder)

        return database, drop

    _check(make, examples=30, steps=40)


@pytest.mark.timeout(600)
def test_any_order_of_events_keeps_the_ledger_whole_on_postgresql(postgres: Postgres) -> None:
    async def make() -> tuple[Database, Callable[[], Awaitable[None]]]:
        name = await postgres.create("dispatcher")
        config = postgres.config(name)
        database = await open_database(config, "dispatcher")
        database_configs[database] = config

        async def drop() -> None:
            await database.close()
            database_configs.pop(database, None)
            await postgres.drop(name)

        return database, drop

    _check(make, examples=8, steps=30)
