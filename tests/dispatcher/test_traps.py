"""Traps that ledgers of this kind are known to fall into, one test each. docs/traps.md lists them all."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.artifacts import PurgeRuns
from schemas.tasks import Overlap, RetryPolicy, Terms
from services.dispatcher import attempt as attempts
from services.dispatcher import lease as leasing
from services.dispatcher import purging, recovery
from services.dispatcher.store import leases, runs
from services.kit.database import CheckViolation, ForeignKeyViolation, Statement
from services.kit.ids import new_id
from tests.dispatcher.house import Hand, Ledger, revision, running, started

RETRIED = Terms(retry=RetryPolicy(max_attempts=3, safety="idempotent", backoff_base_ms=0, jitter_percent=0))


async def execute(ledger: Ledger, sql: str, *args: Any) -> None:
    await ledger.database.transact(lambda tx: tx.execute(Statement(sql), *args))


@pytest.mark.parametrize(
    "change",
    [
        "runs SET status = 'paused'",
        "runs SET cancel_requested_at_ms = 1",
        "runs SET cancel_reason = 'user'",
        "runs SET cancel_requested_at_ms = 1, cancel_reason = 'mood'",
        "runs SET status = 'succeeded'",
        "runs SET finished_at_ms = 1",
        "runs SET attempt = 17",
        "runs SET attempt_id = NULL",
        "runs SET worker_id = NULL",
        "runs SET queue_deadline_ms = 5",
        "runs SET version = 0",
        "run_attempts SET status = 'paused'",
        "run_attempts SET status = 'lost'",
        "run_attempts SET token_digest = NULL",
        "run_attempts SET token_digest = 'a raw token'",
        "run_attempts SET attempt = 0",
        "run_attempts SET pid = 0",
        "run_dispatch_leases SET status = 'held'",
        "run_dispatch_leases SET status = 'released'",
        "run_dispatch_leases SET status = 'completed'",
        "run_dispatch_leases SET release_reason = 'expired'",
        "run_dispatch_leases SET status = 'released', released_at_ms = 1, release_reason = 'tired'",
        "run_dispatch_leases SET expires_at_ms = renewed_at_ms",
        "run_dispatch_leases SET renewed_at_ms = acquired_at_ms - 1",
        "run_dispatch_leases SET lease_generation = 0",
        "run_dispatch_leases SET token_digest = 'a raw token'",
        "run_dispatch_leases SET token_digest = NULL",
        "run_cancellation_dispatches SET status = 'sent'",
        "run_cancellation_dispatches SET status = 'settled'",
        "run_cancellation_dispatches SET status = 'blocked'",
        "run_cancellation_dispatches SET next_attempt_at_ms = NULL",
        "run_cancellation_dispatches SET dispatch_count = -1",
        "run_retry_policies SET max_attempts = 17",
        "run_retry_policies SET max_attempts = 0",
        "run_retry_policies SET safety = 'surely'",
        "run_retry_policies SET backoff_base_ms = 86400001",
        "run_retry_policies SET jitter_percent = 101",
        "workers SET status = 'asleep'",
        "workers SET slots = -1",
        "workers SET generation = 0",
        "workers SET last_heartbeat_at_ms = registered_at_ms - 1",
        "concurrency_limits SET max_live = 0",
        "concurrency_limits SET set_live = 0",
        "concurrency_limits SET kind = 'planet'",
    ],
)
async def test_a_row_that_cannot_be_is_refused_by_the_database(ledger: Ledger, hand: Hand, change: str) -> None:
    terms = Terms(retry=RETRIED.retry, overlap=Overlap(policy="allow", limit=5))
    run_id, _ = await running(ledger, hand, revision(terms=terms))
    await ledger.cancel(run_id)
    if "cancel_re" in change:
        run_id, _ = await running(ledger, hand)
        change += f" WHERE id = '{run_id}'"
    with pytest.raises(CheckViolation):
        await execute(ledger, f"UPDATE {change}")


async def test_deleting_a_run_takes_nothing_with_it(ledger: Ledger, hand: Hand) -> None:
    run_id, attempt_id = await running(ledger, hand)
    for table, name, key in (("runs", "id", run_id), ("run_attempts", "id", attempt_id), ("workers", "id", "w1")):
        with pytest.raises(ForeignKeyViolation):
            await execute(ledger, f"DELETE FROM {table} WHERE {name} = $1", key)
    assert (await ledger.run(run_id)).status == "running"


@pytest.mark.parametrize("table", ["run_dispatch_leases", "run_cancellation_dispatches"])
async def test_nothing_ties_an_attempt_to_a_run_that_is_not_its_own(ledger: Ledger, hand: Hand, table: str) -> None:
    run_id, _ = await running(ledger, hand)
    await ledger.cancel(run_id)
    (other,) = await ledger.submit(revision())
    with pytest.raises(ForeignKeyViolation):
        await execute(ledger, f"UPDATE {table} SET run_id = $1", other.id)


async def test_a_cancel_reaches_the_attempt_of_now_whatever_became_of_an_earlier_one(
    ledger: Ledger, hand: Hand
) -> None:
    """A delivery belongs to an attempt: that to an attempt whose time was over binds no later one."""
    run_id, first = await running(ledger, hand, revision(terms=RETRIED))
    await ledger.cancel(run_id, "timeout")
    assert await ledger.deliver()
    await hand.report(first, kind="ended", signal=15, stopped_for="timeout")
    assert (await ledger.run(run_id)).status == "retry_wait"
    await ledger.wake_retries()
    hand.take(await ledger.place())
    second = (await ledger.run(run_id)).attempt_id or ""
    assert second != first
    await hand.start(second)
    assert (await ledger.cancel(run_id)).deliver
    ((_, message),) = await ledger.deliver()
    assert [stop.attempt_id for stop in message.stops] == [second]
    await hand.report(second, kind="ended", signal=15)
    assert (await ledger.run(run_id)).status == "cancelled"


async def test_a_run_that_is_asked_to_end_gets_no_further_attempt(ledger: Ledger, hand: Hand) -> None:
    run_id, attempt_id = await running(ledger, hand, revision(terms=RETRIED))
    await ledger.cancel(run_id)
    await ledger.later(30_000)
    await ledger.reap_all()
    assert (await ledger.run(run_id)).status == "cancelled"
    assert [attempt.id for attempt in await ledger.attempts(run_id)] == [attempt_id]


async def test_lost_runs_do_not_stand_before_due_retries(ledger: Ledger) -> None:
    """More runs are lost at once than a page holds, none of which may be repeated; one retry is due meanwhile."""
    hand = Hand(ledger, slots=recovery.PAGE + 20)
    await hand.register()
    due, attempt_id = await running(ledger, hand, revision(terms=RETRIED))
    await ledger.submit(revision(), recovery.PAGE + 10)
    while offers := await ledger.place():
        hand.take(offers)
    lost = [name for name in hand.offers if name != attempt_id]
    for at in range(0, len(lost), 100):
        await hand.start(*lost[at : at + 100])
    await hand.report(attempt_id, kind="ended", exit_code=1)
    assert (await ledger.run(due)).status == "retry_wait"
    await ledger.later(30_000)
    await ledger.reap()
    await ledger.wake_retries()
    assert (await ledger.run(due)).status == "queued"
    await ledger.reap_all()
    assert await ledger.rows("SELECT id FROM runs WHERE status = 'lost'") == []


async def test_a_retry_whose_run_ended_otherwise_is_taken_out_of_the_way(ledger: Ledger, hand: Hand) -> None:
    run_id, attempt_id = await running(ledger, hand, revision(terms=RETRIED))
    await hand.report(attempt_id, kind="ended", exit_code=1)
    await ledger.cancel(run_id)
    assert (await ledger.wake_retries()).moved == 0
    assert await ledger.rows("SELECT run_id FROM run_retry_policies WHERE next_attempt_at_ms IS NOT NULL") == []
    assert (await ledger.run(run_id)).status == "cancelled"


async def test_the_result_of_an_older_attempt_does_not_end_the_newer_one(ledger: Ledger) -> None:
    slow, quick = Hand(ledger, "slow"), Hand(ledger, "quick")
    await slow.register()
    run_id, first = await running(ledger, slow, revision(terms=RETRIED))
    await ledger.later(30_000)
    await ledger.reap_all()
    await ledger.wake_retries()
    await quick.register()
    quick.take(await ledger.place())
    second = (await ledger.run(run_id)).attempt_id or ""
    await quick.start(second)
    await quick.report(second, kind="started", pid=3)
    await slow.report(first, kind="ended", exit_code=0)
    run = await ledger.run(run_id)
    assert (run.status, run.attempt_id, run.exit_code) == ("running", second, None)
    old, new = await ledger.attempts(run_id)
    assert (old.status, old.late_exit_code, new.status) == ("lost", 0, "running")
    await quick.report(second, kind="ended", exit_code=7)
    assert (await ledger.run(run_id)).exit_code == 7


async def test_a_dead_worker_is_judged_though_every_slot_is_taken(ledger: Ledger) -> None:
    """Whoever looks after the dead is no run itself and needs no slot."""
    hand = Hand(ledger, slots=3)
    await hand.register()
    held = [(await running(ledger, hand))[0] for _ in range(3)]
    (waiting,) = await ledger.submit(revision())
    assert await ledger.place() == []
    await ledger.later(30_000)
    await ledger.reap_all()
    assert {(await ledger.run(run_id)).error_code for run_id in held} == {"worker_lost"}
    other = Hand(ledger, "w2", slots=1)
    await other.register()
    assert other.take(await ledger.place()) == [waiting.attempt_id]


async def test_a_dead_worker_does_not_block_the_rule_about_overlaps(ledger: Ledger, hand: Hand) -> None:
    of = revision(terms=Terms(overlap=Overlap(policy="skip")))
    await running(ledger, hand, of)
    (skipped,) = await ledger.submit(of)
    assert skipped.error_code == "overlap_skipped"
    await ledger.later(30_000)
    await ledger.reap_all()
    (entered,) = await ledger.submit(of)
    assert entered.status == "queued"


async def test_a_worker_that_comes_back_under_its_name_does_not_keep_its_old_leases_alive(
    ledger: Ledger, hand: Hand
) -> None:
    """The machine was installed anew: same name, empty journal."""
    run_id, attempt_id = await running(ledger, hand)
    await hand.register()
    for _ in range(7):
        await ledger.later(5_000)
        await hand.beat()
    await ledger.reap_all()
    assert (await ledger.run(run_id)).error_code == "worker_lost"
    assert [refusal.code for refusal in (await hand.beat(attempt_id)).refused] == ["session_replaced"]


async def test_a_lease_ends_exactly_at_its_time(ledger: Ledger, hand: Hand) -> None:
    """Expired is `expires_at <= now`, live is `> now`: at no instant both, at no instant neither."""
    run_id, attempt_id = await started(ledger, hand)
    case = await ledger.case(run_id)
    assert case.lease is not None
    at = case.lease.expires_at_ms

    async def over(now: int) -> list[str]:
        found = await ledger.database.read(lambda tx: leases.expired(tx, now, 10, started_by=now))
        return [lease.attempt_id for lease in found]

    for now in (at - 1, at, at + 1):
        assert leasing.is_live(case.lease, now) is (now < at)
        assert await over(now) == ([] if now < at else [attempt_id])


async def test_a_time_is_over_exactly_at_its_instant(ledger: Ledger, hand: Hand) -> None:
    run_id, attempt_id = await running(ledger, hand, revision(terms=RETRIED))
    await execute(ledger, "UPDATE run_attempts SET deadline_at_ms = 5000 WHERE id = $1", attempt_id)
    case = await ledger.case(run_id)
    for now in (4_999, 5_000, 5_001):
        assert attempts.overdue(case, now) is (now >= 5_000)
        found = await ledger.database.read(lambda tx, at=now: runs.overdue(tx, at, 10))
        assert found == ([run_id] if now >= 5_000 else [])
    await hand.report(attempt_id, kind="ended", exit_code=1)
    due = (await ledger.rows("SELECT next_attempt_at_ms AS at FROM run_retry_policies"))[0]["at"]
    for now in (due - 1, due):
        found = await ledger.database.read(lambda tx, at=now: runs.retry_due(tx, at, 10))
        assert found == ([run_id] if now >= due else [])


async def test_nothing_keeps_a_workers_row_once_its_runs_are_purged(ledger: Ledger, hand: Hand) -> None:
    _, attempt_id = await running(ledger, hand)
    await hand.report(attempt_id, kind="ended", exit_code=0)
    await ledger.later(10_000)
    order = PurgeRuns(order_id=new_id(), project="default", finished_before_ms=2**52, limit=10)
    assert await ledger.database.transact(lambda tx: purging.purge_runs(tx, order)) == 1
    await execute(ledger, "DELETE FROM workers WHERE id = 'w1'")
    assert await ledger.rows("SELECT id FROM workers") == []
