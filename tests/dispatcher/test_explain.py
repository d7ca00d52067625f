"""`explain` is right for each cause for which a run can stand still."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.runs import Explanation
from schemas.tasks import Concurrency, Overlap, Placement, RetryPolicy, Terms
from services.dispatcher import cancel, cancelling, holding, reading, recovery
from services.dispatcher.placement import Limit
from services.dispatcher.store import limits
from tests.dispatcher.house import Hand, Ledger, revision, running, started


async def explain(ledger: Ledger, run_id: str, project: str = "default") -> Explanation:
    return await ledger.database.read(lambda tx: reading.explanation(tx, ledger.revisions, project, run_id))


async def test_no_worker(ledger: Ledger) -> None:
    (run,) = await ledger.submit(revision())
    found = await explain(ledger, run.id)
    assert (found.cause, found.sentence) == ("no_worker", "No worker is online.")
    assert found.run.waiting_reason == "No worker is online."


async def test_no_matching_worker(ledger: Ledger, hand: Hand) -> None:
    (run,) = await ledger.submit(revision(terms=Terms(placement=Placement(required={"gpu": "yes"}))))
    found = await explain(ledger, run.id)
    assert (found.cause, found.sentence) == ("no_matching_worker", "No worker has label gpu=yes.")


async def test_no_free_slot_and_behind_others(ledger: Ledger) -> None:
    hand = Hand(ledger, slots=1)
    await hand.register()
    await running(ledger, hand)
    (run,) = await ledger.submit(revision())
    found = await explain(ledger, run.id)
    assert (found.cause, found.sentence) == ("no_free_slot", "All 1 slots of the workers it may go to are taken.")


async def test_next_and_behind_others(ledger: Ledger, hand: Hand) -> None:
    first, second = await ledger.submit(revision(), 2)
    assert (await explain(ledger, first.id)).cause == "next"
    found = await explain(ledger, second.id)
    assert (found.cause, found.sentence) == ("behind_others", "There is one run before it.")


@pytest.mark.parametrize(
    ("terms", "cause"),
    [
        (Terms(overlap=Overlap(policy="allow", limit=1)), "task_limit"),
        (Terms(concurrency=[Concurrency(key="db", limit=1)]), "key_limit"),
    ],
)
async def test_limits(ledger: Ledger, hand: Hand, terms: Terms, cause: str) -> None:
    of = revision(terms=terms)
    await running(ledger, hand, of)
    (run,) = await ledger.submit(of)
    assert (await explain(ledger, run.id)).cause == cause


async def test_project_limit(ledger: Ledger, hand: Hand) -> None:
    async def put(tx: Any) -> None:
        await limits.put(tx, {Limit("default", "project", "default"): 1}, await tx.now_ms())

    await ledger.database.transact(put)
    await running(ledger, hand)
    (run,) = await ledger.submit(revision())
    assert (await explain(ledger, run.id)).cause == "project_limit"


async def test_approval_not_asked_and_waiting_for_it(ledger: Ledger) -> None:
    (run,) = await ledger.submit(revision(terms=Terms(needs_approval=True)))
    assert (await explain(ledger, run.id)).cause == "approval_not_asked"
    message, _ = await ledger.database.transact(lambda tx: holding.ring(tx, ledger.revisions))
    assert message is not None
    await ledger.database.transact(lambda tx: holding.acked(tx, [r.order_id for r in message.requests]))
    found = await explain(ledger, run.id)
    assert found.cause == "waiting_approval"
    assert found.facts["expires_at_ms"] == message.requests[0].expires_at_ms


async def test_an_approval_that_ran_out(ledger: Ledger) -> None:
    (run,) = await ledger.submit(revision(terms=Terms(needs_approval=True, approval_ttl_ms=60_000)))
    await ledger.later(121_000)
    await ledger.database.transact(recovery.end_unapproved)
    assert (await explain(ledger, run.id)).cause == "approval_expired"
    assert (await ledger.run(run.id)).status == "timed_out"


async def test_offered_starting_running(ledger: Ledger, hand: Hand) -> None:
    (run,) = await ledger.submit(revision())
    hand.take(await ledger.place())
    assert (await explain(ledger, run.id)).cause == "offered"
    await hand.start(run.attempt_id or "")
    assert (await explain(ledger, run.id)).cause == "starting"
    await hand.report(run.attempt_id or "", kind="started", pid=2)
    assert (await explain(ledger, run.id)).cause == "running"
    await ledger.later(12_000)
    assert (await explain(ledger, run.id)).cause == "silent_worker"
    await ledger.later(18_000)
    assert (await explain(ledger, run.id)).cause == "lease_over"
    await ledger.reap_all()
    assert (await explain(ledger, run.id)).cause == "worker_lost"


async def test_retry_wait(ledger: Ledger, hand: Hand) -> None:
    policy = RetryPolicy(max_attempts=2, backoff_base_ms=60_000, jitter_percent=0)
    run_id, attempt_id = await running(ledger, hand, revision(terms=Terms(retry=policy)))
    await hand.report(attempt_id, kind="ended", exit_code=4)
    found = await explain(ledger, run_id)
    assert found.cause == "retry_wait"
    assert "Attempt 1 of 2 ended (process_exit)" in found.sentence
    assert found.facts["next_attempt_at_ms"]


async def test_a_cancel_on_its_way_delivered_and_blocked(ledger: Ledger, hand: Hand) -> None:
    run_id, _ = await running(ledger, hand)
    await ledger.cancel(run_id)
    assert (await explain(ledger, run_id)).cause == "cancel_undelivered"
    await ledger.deliver()
    assert (await explain(ledger, run_id)).cause == "cancel_delivered"
    for _ in range(cancel.DELIVERIES_MOST):
        await ledger.later(60_000)
        await ledger.deliver()
    found = await explain(ledger, run_id)
    assert found.cause == "cancel_blocked"
    assert "cancelling again" in found.next_step
    assert "run.cancel_dispatch_blocked" in await ledger.events(run_id)
    assert (await ledger.cancel(run_id)).deliver
    assert await ledger.deliver()


async def test_queue_timeout(ledger: Ledger) -> None:
    (run,) = await ledger.submit(revision(terms=Terms(queue_timeout_ms=5_000)))
    await ledger.database.transact(recovery.end_unplaced)
    assert (await ledger.run(run.id)).status == "queued"
    await ledger.later(5_000)
    await ledger.database.transact(recovery.end_unplaced)
    assert (await explain(ledger, run.id)).cause == "queue_timeout"
    (attempt,) = await ledger.attempts(run.id)
    assert attempt.status == "cancelled"


async def test_a_queue_timeout_ends_with_the_start(ledger: Ledger, hand: Hand) -> None:
    run_id, _ = await started(ledger, hand, revision(terms=Terms(queue_timeout_ms=5_000)))
    await ledger.later(6_000)
    await ledger.database.transact(recovery.end_unplaced)
    assert (await ledger.run(run_id)).status == "dispatching"


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ({"kind": "ended", "exit_code": 0}, "succeeded"),
        ({"kind": "ended", "exit_code": 9}, "process_exit"),
        ({"kind": "ended", "signal": 9}, "process_exit"),
        ({"kind": "start_failed"}, "executor_start_failed"),
        ({"kind": "not_started", "error_code": "context_unavailable"}, "context_unavailable"),
        ({"kind": "vanished"}, "process_vanished"),
        ({"kind": "ended", "signal": 15, "stopped_for": "shutdown"}, "cancelled_by_shutdown"),
        ({"kind": "ended", "signal": 15, "stopped_for": "timeout"}, "run_timeout"),
    ],
)
async def test_ends(ledger: Ledger, hand: Hand, body: dict[str, Any], cause: str) -> None:
    run_id, attempt_id = await started(ledger, hand)
    await hand.report(attempt_id, **body)
    found = await explain(ledger, run_id)
    assert found.cause == cause
    assert found.run.finished_at_ms is not None


async def test_a_stuck_cancel_hides_no_other(ledger: Ledger, hand: Hand) -> None:
    """More stuck intents than a page: the sweep's position moves on and comes back."""
    stuck = Hand(ledger, "stuck", slots=cancelling.PAGE + 2)
    await stuck.register()
    runs = await ledger.submit(revision(), cancelling.PAGE + 2)
    while offers := await ledger.place():
        stuck.take(offers)
        hand.take(offers)
    for hands in (stuck, hand):
        if hands.offers:
            await hands.start(*list(hands.offers))
    for run in runs:
        await ledger.cancel(run.id)
    position = cancelling.Position()
    seen: list[cancelling.Position] = []
    for _ in range(3):
        position = await ledger.database.transact(lambda tx, at=position: _sweep(tx, ledger, at))
        seen.append(position)
    assert seen[0].run_id
    assert seen[1] == cancelling.Position()
    orders: list[str] = []
    while found := await ledger.deliver():
        orders += [stop.attempt_id for _, message in found for stop in message.stops]
    assert len(orders) == len(runs)


async def _sweep(tx: Any, ledger: Ledger, at: cancelling.Position) -> cancelling.Position:
    return await cancelling.sweep(tx, ledger.revisions, at, await tx.now_ms())
