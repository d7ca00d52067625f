"""Several dispatchers on one ledger, at the same moment: one of them is right, the other changes nothing.

On PostgreSQL the transactions really run beside each other, on connections of their own.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from schemas.runs import RunRelease
from schemas.tasks import Concurrency, Overlap, RetryPolicy, Terms
from services.dispatcher import holding
from services.dispatcher.store import holds
from services.kit.database import UniqueViolation
from services.kit.ids import new_id
from tests.dispatcher.house import Hand, Ledger, order, revision, running, started

ROUNDS = 5
SAFE = Terms(retry=RetryPolicy(max_attempts=3, safety="idempotent", backoff_base_ms=0, jitter_percent=0))


@pytest.fixture
def other(ledger: Ledger) -> Ledger:
    """A second dispatcher's view of the same ledger, with nothing remembered."""
    return Ledger(ledger.database)


async def test_two_dispatchers_place_each_run_once_and_never_beyond_the_slots(ledger: Ledger, other: Ledger) -> None:
    hands = [Hand(ledger, f"w{n}", slots=7) for n in range(3)]
    for hand in hands:
        await hand.register()
    await ledger.submit(revision(), 60)
    placed = Counter[str]()
    for _ in range(6):
        for offers in await asyncio.gather(ledger.place(), other.place(), ledger.place(), other.place()):
            placed.update(item.attempt_id for _, message in offers for item in message.offers)
    assert max(placed.values()) == 1
    assert len(placed) == 21
    rows = await ledger.rows("SELECT worker_id, count(*) AS n FROM run_dispatch_leases GROUP BY worker_id")
    assert {row["worker_id"]: row["n"] for row in rows} == {"w0": 7, "w1": 7, "w2": 7}


async def test_a_limit_holds_against_two_dispatchers(ledger: Ledger, other: Ledger) -> None:
    for name in ("w1", "w2"):
        await Hand(ledger, name, slots=20).register()
    terms = Terms(concurrency=[Concurrency(key="db", limit=3)], overlap=Overlap(policy="allow", limit=5))
    await ledger.submit(revision(terms=terms), 30)
    for _ in range(3):
        await asyncio.gather(ledger.place(), other.place(), ledger.place(), other.place())
    (row,) = await ledger.rows("SELECT count(*) AS n FROM run_dispatch_leases")
    assert row["n"] == 3


async def test_two_reapers_judge_one_expired_lease_once(ledger: Ledger, other: Ledger, hand: Hand) -> None:
    for _ in range(ROUNDS):
        run_id, _ = await running(ledger, hand)
        await ledger.later(30_000)
        steps = await asyncio.gather(ledger.reap(), other.reap(), ledger.reap(), other.reap())
        assert sum(step.moved for step in steps) == 1
        events = Counter(await ledger.events(run_id))
        assert (events["attempt.lost"], events["run.lost"], events["run.failed"]) == (1, 1, 1)
        await hand.beat()


async def test_a_reaper_against_a_late_success_leaves_one_truth(ledger: Ledger, hand: Hand) -> None:
    for _ in range(ROUNDS):
        run_id, attempt_id = await running(ledger, hand)
        report = hand.signed(attempt_id, kind="ended", exit_code=0)
        await ledger.later(30_000)
        await asyncio.gather(ledger.reap(), hand.send(report))
        run = await ledger.run(run_id)
        (attempt,) = await ledger.attempts(run_id)
        if run.status == "succeeded":
            assert (attempt.status, attempt.late_receipt) == ("succeeded", 0)
        else:
            assert (run.error_code, attempt.status) == ("worker_lost", "lost")
            assert (attempt.late_receipt, attempt.late_exit_code) == (1, 0)
        await hand.beat()


async def test_a_stale_worker_that_wakes_after_its_attempt_was_leased_anew(ledger: Ledger) -> None:
    slow, quick = Hand(ledger, "slow"), Hand(ledger, "quick")
    await slow.register()
    (run,) = await ledger.submit(revision())
    slow.take(await ledger.place())
    await ledger.later(15_000)
    await ledger.reap_all()
    await quick.register()
    quick.take(await ledger.place())
    assert run.attempt_id is not None
    answers = await asyncio.gather(slow.start(run.attempt_id), quick.start(run.attempt_id))
    assert [len(answer.grants) for answer in answers] == [0, 1]
    await slow.report(run.attempt_id, kind="ended", exit_code=1)
    assert (await ledger.run(run.id)).status == "dispatching"
    await quick.report(run.attempt_id, kind="ended", exit_code=0)
    assert (await ledger.run(run.id)).status == "succeeded"
    assert "attempt.fence_refused" in await ledger.events(run.id)


async def test_two_wakers_make_one_attempt(ledger: Ledger, other: Ledger, hand: Hand) -> None:
    run_id, attempt_id = await running(ledger, hand, revision(terms=SAFE))
    await hand.report(attempt_id, kind="ended", exit_code=1)
    await asyncio.gather(*(one.wake_retries() for one in (ledger, other, ledger, other)))
    assert [attempt.attempt for attempt in await ledger.attempts(run_id)] == [1, 2]


async def test_a_cancel_against_the_start_barrier(ledger: Ledger, hand: Hand) -> None:
    for _ in range(ROUNDS):
        (run,) = await ledger.submit(revision())
        hand.take(await ledger.place())
        assert run.attempt_id is not None
        answer, _ = await asyncio.gather(hand.start(run.attempt_id), ledger.cancel(run.id))
        if answer.grants:
            assert (await ledger.run(run.id)).cancel_reason == "user"
            assert await ledger.deliver()
            await hand.report(run.attempt_id, kind="ended", signal=15)
        assert (await ledger.run(run.id)).status == "cancelled"


async def test_one_decision_is_carried_out(ledger: Ledger) -> None:
    (run,) = await ledger.submit(revision(terms=Terms(needs_approval=True)))
    hold = (await ledger.database.read(lambda tx: holds.read(tx, [run.id])))[run.id]

    async def release(outcome: Any) -> Any:
        question = RunRelease(
            dispatch_id=new_id(), run=run.id, project="default", outcome=outcome, approval_id=run.id,
            action_digest=hold.action_digest,
        )  # fmt: skip
        return await ledger.database.transact(lambda tx: holding.release(tx, ledger.revisions, question))

    answers = await asyncio.gather(*(release(outcome) for outcome in ("approved", "rejected", "approved", "expired")))
    assert sorted(Counter(answer.outcome for answer, _ in answers).values()) == [1, 3]
    assert len([1 for answer, _ in answers if answer.outcome != "not_waiting"]) == 1


async def test_beats_reports_and_reapers_beside_each_other_lose_nothing(ledger: Ledger, other: Ledger) -> None:
    hand = Hand(ledger, slots=40)
    await hand.register()
    held = [await started(ledger, hand) for _ in range(24)]
    ids = [attempt_id for _, attempt_id in held]
    ending = [hand.signed(attempt_id, kind="ended", exit_code=0) for attempt_id in ids]
    await asyncio.gather(
        *(hand.beat(*ids) for _ in range(6)),
        *(hand.send(*ending[n : n + 6]) for n in range(0, 24, 6)),
        *(hand.send(*reversed(ending[n : n + 8])) for n in range(0, 24, 8)),
        ledger.reap(),
        other.reap(),
        ledger.place(),
    )
    assert {(await ledger.run(run_id)).status for run_id, _ in held} == {"succeeded"}
    for run_id, _ in held:
        assert (await ledger.events(run_id)).count("run.succeeded") == 1


async def test_concurrent_submissions_of_a_skipping_task_let_one_in(ledger: Ledger, other: Ledger) -> None:
    of = revision(terms=Terms(overlap=Overlap(policy="skip")))

    async def submit(at: Ledger) -> str | None:
        for _ in range(5):
            try:
                (outcome,) = await at.submit_orders([of], [order(of)])
            except UniqueViolation:
                continue
            assert outcome.run is not None
            return outcome.run.error_code
        raise AssertionError("no end")

    codes = await asyncio.gather(*(submit(at) for at in (ledger, other) * 4))
    assert Counter(codes) == {None: 1, "overlap_skipped": 7}


@pytest.mark.parametrize("step", ["submit", "start", "report", "register", "cancel"])
async def test_an_answer_that_is_lost_is_asked_for_again(ledger: Ledger, hand: Hand, step: str) -> None:
    """The commit stands, its answer is lost: the same request again has the same result and no second effect."""
    of = revision()
    one = order(of)
    first, again = [await ledger.submit_orders([of], [one]) for _ in range(2)]
    assert first[0].run is not None
    assert again[0].run is not None
    assert (first[0].run.id, again[0].replayed) == (again[0].run.id, True)
    if step == "submit":
        return
    hand.take(await ledger.place())
    attempt_id = first[0].run.attempt_id or ""
    grants = [(await hand.start(attempt_id)).grants for _ in range(2)]
    assert [grant.attempt_id for grant in grants[0]] == [grant.attempt_id for grant in grants[1]] == [attempt_id]
    events = await ledger.events(one.run_id)
    if step == "register":
        journal = [hand.journal(attempt_id, "running")]
        hand.session_id = new_id()
        answers = [await hand.register(new_session=False, journal=journal) for _ in range(2)]
        assert answers[0] == answers[1]
        assert answers[0].adopted == [attempt_id]
        assert (await ledger.events(one.run_id)).count("attempt.adopted") == 1
    elif step == "report":
        report = hand.signed(attempt_id, kind="ended", exit_code=0)
        acks = [(await hand.send(report)).acks for _ in range(2)]
        assert acks[0] == acks[1]
        assert (await ledger.events(one.run_id)).count("attempt.succeeded") == 1
    elif step == "cancel":
        await ledger.cancel(one.run_id)
        await ledger.cancel(one.run_id)
        assert (await ledger.events(one.run_id)).count("run.cancel_requested") == 1
    else:
        assert events.count("attempt.starting") == 1
