"""One suite for both databases: what the ledger promises about runs, attempts, leases and events."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from schemas import proof
from schemas.runs import AttemptEnded, LogFact
from schemas.tasks import Execution, RetryPolicy, Terms
from services.dispatcher import recovery
from services.dispatcher.views import attempt_view
from services.kit.database import ForeignKeyViolation, NotPermitted, Statement, UniqueViolation
from tests.dispatcher.house import Hand, Ledger, order, revision, running, started

RETRIES = Terms(retry=RetryPolicy(max_attempts=3, safety="idempotent", backoff_base_ms=60_000, jitter_percent=0))


async def test_a_run_goes_from_submission_to_its_end(ledger: Ledger, hand: Hand) -> None:
    (run,) = await ledger.submit(revision())
    assert (run.status, run.attempt, run.version) == ("queued", 1, 1)
    assert hand.take(await ledger.place()) == [run.attempt_id]
    assert run.attempt_id is not None
    answer = await hand.start(run.attempt_id)
    assert answer.grants[0].start_within_ms == 25_000
    settled = await hand.report(run.attempt_id, kind="ended", exit_code=0, pid=7)
    assert settled.ended == 1
    assert len(settled.acks["w1"]) == 1
    ended = await ledger.run(run.id)
    assert (ended.status, ended.exit_code, ended.error_code) == ("succeeded", 0, None)
    assert await ledger.events(run.id) == [
        "run.created", "run.queued", "attempt.claimed", "run.dispatching", "attempt.starting", "attempt.running",
        "run.running", "attempt.succeeded", "run.succeeded",
    ]  # fmt: skip
    case = await ledger.case(run.id)
    assert case.lease is not None
    assert case.lease.status == "completed"


async def test_the_same_order_again_makes_no_second_run(ledger: Ledger) -> None:
    of = revision()
    first = order(of, idempotency_key="k")
    (made,) = await ledger.submit_orders([of], [first])
    (again, other) = await ledger.submit_orders([of], [first, order(of, idempotency_key="k")])
    assert made.run is not None
    assert again.replayed
    assert again.run is not None
    assert again.run.id == made.run.id
    assert other.run is not None
    assert (other.run.id, other.replayed) == (made.run.id, True)
    assert len(await ledger.rows("SELECT id FROM runs")) == 1


async def test_the_same_key_for_another_request_is_a_conflict(ledger: Ledger) -> None:
    of = revision()
    await ledger.submit_orders([of], [order(of, idempotency_key="k")])
    (refused,) = await ledger.submit_orders([of], [order(of, idempotency_key="k", inputs={"a": 1.5})])
    assert (refused.run, refused.error) == (None, "idempotency_conflict")


async def test_keys_are_of_their_project(ledger: Ledger) -> None:
    one, two = revision(project="one"), revision(project="two")
    outcomes = await ledger.submit_orders(
        [one, two], [order(one, idempotency_key="k"), order(two, idempotency_key="k")]
    )
    assert len({outcome.run.id for outcome in outcomes if outcome.run}) == 2


async def test_concurrent_orders_with_one_key_make_one_run(ledger: Ledger) -> None:
    of = revision()

    async def submit() -> str:
        for _ in range(5):
            try:
                (outcome,) = await ledger.submit_orders([of], [order(of, idempotency_key="k")])
            except UniqueViolation:
                continue  # the loser finds the winner's run when it looks again
            assert outcome.run is not None
            return outcome.run.id
        raise AssertionError("no end")

    assert len(set(await asyncio.gather(*(submit() for _ in range(8))))) == 1


async def test_events_cannot_be_changed_or_deleted(ledger: Ledger) -> None:
    (run,) = await ledger.submit(revision())
    for sql in ("UPDATE run_events SET type = 'x' WHERE run_id = $1", "DELETE FROM run_events WHERE run_id = $1"):
        with pytest.raises(NotPermitted):
            await ledger.database.transact(lambda tx, sql=sql: tx.execute(Statement(sql), run.id))
    assert await ledger.events(run.id)


async def test_a_failed_command_is_retried_by_its_own_policy_and_then_fails(ledger: Ledger, hand: Hand) -> None:
    run_id, attempt_id = await running(ledger, hand, revision(terms=RETRIES))
    for number in (1, 2):
        await hand.report(attempt_id, kind="ended", exit_code=3)
        run = await ledger.run(run_id)
        assert (run.status, run.attempt, run.exit_code) == ("retry_wait", number, 3)
        await ledger.later(60_000 * 2 ** (number - 1) - 30_000)
        await ledger.wake_retries()
        assert (await ledger.run(run_id)).status == "retry_wait"
        await ledger.later(30_000)
        await ledger.wake_retries()
        hand.take(await ledger.place())
        attempt_id = (await ledger.run(run_id)).attempt_id or ""
        await hand.start(attempt_id)
    await hand.report(attempt_id, kind="ended", exit_code=3)
    run = await ledger.run(run_id)
    assert (run.status, run.attempt, run.error_code) == ("failed", 3, "process_exit")
    assert [a.status for a in await ledger.attempts(run_id)] == ["failed"] * 3


async def next_attempt(ledger: Ledger, hand: Hand, run_id: str, pause_ms: int) -> str:
    """The run's next attempt after its pause, past the start barrier."""
    assert (await ledger.run(run_id)).status == "retry_wait"
    await ledger.later(pause_ms)
    await hand.beat()
    await ledger.wake_retries()
    hand.take(await ledger.place())
    attempt_id = (await ledger.run(run_id)).attempt_id
    assert attempt_id is not None
    assert (await hand.start(attempt_id)).refused == []
    return attempt_id


async def test_an_attempt_that_was_never_tried_costs_nothing_of_the_retry_budget(ledger: Ledger, hand: Hand) -> None:
    run_id, attempt_id = await started(ledger, hand, revision(terms=RETRIES))
    await hand.report(attempt_id, kind="not_started", error_code="start_window_passed")
    for number in (2, 3):
        attempt_id = await next_attempt(ledger, hand, run_id, 60_000 * 2 ** (number - 1))
        await hand.report(attempt_id, kind="ended", exit_code=3)
    attempt_id = await next_attempt(ledger, hand, run_id, 240_000)
    await hand.report(attempt_id, kind="ended", exit_code=3)
    run = await ledger.run(run_id)
    assert (run.status, run.attempt, run.error_code, run.exit_code) == ("failed", 4, "process_exit", 3)


async def test_a_run_without_retries_whose_attempt_was_never_tried_has_another(ledger: Ledger, hand: Hand) -> None:
    run_id, attempt_id = await started(ledger, hand)
    await hand.report(attempt_id, kind="not_started", error_code="not_started")
    attempt_id = await next_attempt(ledger, hand, run_id, 500)
    await hand.report(attempt_id, kind="ended", exit_code=3)
    run = await ledger.run(run_id)
    assert (run.status, run.attempt, run.exit_code) == ("failed", 2, 3)


async def test_a_run_of_which_nothing_can_be_started_ends(ledger: Ledger, hand: Hand) -> None:
    run_id, attempt_id = await started(ledger, hand)
    for _ in range(15):
        await hand.report(attempt_id, kind="not_started", error_code="not_started")
        attempt_id = await next_attempt(ledger, hand, run_id, 60_000)
    await hand.report(attempt_id, kind="not_started", error_code="not_started")
    run = await ledger.run(run_id)
    assert (run.status, run.attempt, run.error_code) == ("failed", 16, "not_started")


async def test_a_lease_that_runs_out_before_the_start_gives_the_same_attempt_back(ledger: Ledger, hand: Hand) -> None:
    (run,) = await ledger.submit(revision())
    hand.take(await ledger.place())
    await ledger.later(8_000)
    await ledger.reap()
    assert (await ledger.run(run.id)).status == "dispatching"
    await ledger.later(7_000)
    await ledger.reap_all()
    back = await ledger.case(run.id)
    assert (back.run.status, back.run.attempt, back.run.attempt_id) == ("queued", 1, run.attempt_id)
    assert back.lease is not None
    assert (back.lease.status, back.lease.release_reason) == ("released", "expired")
    stale = await hand.start(run.attempt_id or "")
    assert stale.refused[0].code == "fence_rejected"
    assert "attempt.fence_refused" in await ledger.events(run.id)


async def test_a_silent_worker_gets_nothing_until_it_is_heard(ledger: Ledger, hand: Hand) -> None:
    await ledger.submit(revision())
    await ledger.place()
    await ledger.later(15_000)
    await ledger.reap_all()
    assert await ledger.place() == []
    await hand.beat()
    ((_, message),) = await ledger.place()
    assert message.offers[0].lease_generation == 2


async def test_a_started_lease_that_runs_out_is_lost_and_a_late_receipt_is_kept(ledger: Ledger, hand: Hand) -> None:
    run_id, attempt_id = await running(ledger, hand)
    await ledger.later(30_000)
    await ledger.reap_all()
    run = await ledger.run(run_id)
    assert (run.status, run.error_code) == ("failed", "worker_lost")
    settled = await hand.report(attempt_id, kind="ended", exit_code=0)
    assert len(settled.acks["w1"]) == 1
    (attempt,) = await ledger.attempts(run_id)
    assert (attempt.status, attempt.late_receipt, attempt.late_exit_code) == ("lost", 1, 0)
    assert (await ledger.run(run_id)).status == "failed"
    assert (await ledger.events(run_id))[-1] == "attempt.late_receipt"


KEPT = LogFact(artifact_id="01890000-0000-7000-8000-0000000000bb", size=7, produced=7, truncated=True)


async def _told_log(ledger: Ledger, attempt_id: str) -> LogFact:
    """What the last fact about the attempt's end says of its log."""
    rows = await ledger.rows("SELECT payload FROM outbox WHERE subject LIKE $1 ORDER BY id", f"%{attempt_id}.ended")
    return msgspec.json.decode(rows[-1]["payload"], type=AttemptEnded).log


async def test_what_a_vanished_process_had_written_is_kept(ledger: Ledger, hand: Hand) -> None:
    run_id, attempt_id = await running(ledger, hand)
    await hand.report(attempt_id, kind="vanished", log=KEPT)
    (attempt,) = await ledger.attempts(run_id)
    assert (attempt.status, attempt.error_code) == ("lost", "process_vanished")
    assert attempt_view(attempt).log == KEPT
    assert await _told_log(ledger, attempt_id) == KEPT


async def test_what_a_lost_attempt_had_written_is_kept_when_it_is_told_late(ledger: Ledger, hand: Hand) -> None:
    run_id, attempt_id = await running(ledger, hand)
    await ledger.later(30_000)
    await ledger.reap_all()
    assert await _told_log(ledger, attempt_id) == LogFact()
    report = hand.signed(attempt_id, kind="vanished", log=KEPT)
    await hand.send(report)
    assert (await hand.send(report)).acks["w1"] == [report.order_id]
    (attempt,) = await ledger.attempts(run_id)
    assert (attempt.status, attempt.error_code, attempt.late_receipt) == ("lost", "worker_lost", 0)
    assert attempt_view(attempt).log == KEPT
    assert await _told_log(ledger, attempt_id) == KEPT
    assert (await ledger.events(run_id)).count("attempt.late_log") == 1
    assert (await ledger.run(run_id)).status == "failed"


async def test_a_lost_attempt_is_retried_only_when_that_is_safe(ledger: Ledger, hand: Hand) -> None:
    unsafe = Terms(retry=RetryPolicy(max_attempts=3, safety="unknown"))
    safe, _ = await running(ledger, hand, revision(terms=RETRIES))
    never, _ = await running(ledger, hand, revision(terms=unsafe, number=2))
    await ledger.later(30_000)
    await ledger.reap_all()
    assert (await ledger.run(safe)).status == "retry_wait"
    assert (await ledger.run(never)).status == "failed"


async def test_our_own_outage_kills_nobodys_job(ledger: Ledger, hand: Hand) -> None:
    run_id, attempt_id = await running(ledger, hand)
    await ledger.outage(600_000)
    step = await ledger.reap()
    assert (step.moved, step.more) == (0, True)
    assert (await ledger.reap()).moved == 0
    await hand.beat(attempt_id)
    assert (await hand.report(attempt_id, kind="ended", exit_code=0)).ended == 1
    assert (await ledger.run(run_id)).status == "succeeded"


async def test_only_offers_are_judged_while_nobody_could_have_been_heard(ledger: Ledger, hand: Hand) -> None:
    run_id, _ = await running(ledger, hand)
    (offered,) = await ledger.submit(revision())
    hand.take(await ledger.place())
    await ledger.later(30_000)
    await ledger.database.transact(lambda tx: recovery.reap(tx, lambda: 0.5, patience_ms=60_000))
    assert (await ledger.run(offered.id)).status == "queued"
    assert (await ledger.run(run_id)).status == "running"
    await ledger.later(60_000)
    await ledger.database.transact(lambda tx: recovery.reap(tx, lambda: 0.5, patience_ms=60_000))
    assert (await ledger.run(run_id)).error_code == "worker_lost"


async def test_cancel_before_the_start_ends_the_run_at_once_and_closes_the_barrier(ledger: Ledger, hand: Hand) -> None:
    (queued, offered) = await ledger.submit(revision(), 2)
    await ledger.cancel(queued.id)
    assert (await ledger.run(queued.id)).status == "cancelled"
    hand.take(await ledger.place())
    await ledger.cancel(offered.id)
    case = await ledger.case(offered.id)
    assert (case.run.status, case.run.error_code) == ("cancelled", "cancelled_by_user")
    assert (await hand.start(offered.attempt_id or "")).refused[0].code == "fence_rejected"


async def test_cancel_of_a_running_run_is_delivered_until_the_end_is_proved(ledger: Ledger, hand: Hand) -> None:
    run_id, attempt_id = await running(ledger, hand)
    assert (await ledger.cancel(run_id)).deliver
    assert not (await ledger.cancel(run_id)).cases
    ((worker, message),) = await ledger.deliver()
    assert (worker, message.stops[0].attempt_id, message.stops[0].reason) == ("w1", attempt_id, "user")
    assert await ledger.deliver() == []
    assert [stop.attempt_id for stop in (await hand.beat(attempt_id)).stops] == [attempt_id]
    await ledger.later(6_000)
    assert await ledger.deliver()
    await hand.report(attempt_id, kind="ended", exit_code=0)
    assert (await ledger.run(run_id)).status == "cancelled"
    await ledger.later(600_000)
    assert await ledger.deliver() == []
    (row,) = await ledger.rows("SELECT status, dispatch_count FROM run_cancellation_dispatches")
    assert (row["status"], row["dispatch_count"]) == ("settled", 2)


async def test_a_stale_session_can_write_nothing(ledger: Ledger, hand: Hand) -> None:
    run_id, attempt_id = await running(ledger, hand)
    stale = hand.fence
    answer = await hand.register(journal=[hand.journal(attempt_id, "running")])
    assert answer.adopted == [attempt_id]
    report = hand.signed(attempt_id, kind="ended", exit_code=0)
    settled = await hand.send(report, fence=stale)
    assert settled.acks == {}
    assert (await ledger.run(run_id)).status == "running"
    assert (await hand.send(report)).ended == 1
    assert (await ledger.run(run_id)).status == "succeeded"


async def test_registration_adopts_releases_and_loses(ledger: Ledger, hand: Hand) -> None:
    kept, kept_attempt = await running(ledger, hand)
    gone, gone_attempt = await running(ledger, hand)
    (waiting,) = await ledger.submit(revision())
    hand.take(await ledger.place())
    answer = await hand.register(journal=[hand.journal(kept_attempt, "running"), hand.journal(gone_attempt, "gone")])
    assert answer.generation == 2
    assert answer.adopted == [kept_attempt]
    assert answer.released == [waiting.attempt_id]
    assert answer.refused == [gone_attempt]
    assert (await ledger.run(kept)).status == "running"
    assert (await ledger.run(gone)).error_code == "process_vanished"
    assert (await ledger.run(waiting.id)).status == "queued"
    again = await hand.register(new_session=False, journal=[hand.journal(kept_attempt, "running")])
    assert (again.generation, again.adopted) == (2, [kept_attempt])


async def test_a_forged_proof_changes_nothing_and_is_recorded(ledger: Ledger, hand: Hand) -> None:
    run_id, attempt_id = await running(ledger, hand)
    thief = Hand(ledger)
    thief.session_id, thief.generation, thief.offers = hand.session_id, hand.generation, hand.offers
    thief.sequences = dict(hand.sequences)
    await thief.report(attempt_id, kind="ended", exit_code=0)
    assert (await ledger.run(run_id)).status == "running"
    assert (await ledger.events(run_id))[-1] == "attempt.fence_refused"
    refused = await thief.beat(attempt_id)
    assert [item.code for item in refused.refused] == ["fence_rejected"]


async def test_why_a_lease_was_released_is_kept(ledger: Ledger, hand: Hand) -> None:
    async def why(run_id: str) -> tuple[str, str | None]:
        lease = (await ledger.case(run_id)).lease
        assert lease is not None
        return lease.status, lease.release_reason

    async def placed() -> str:
        (run,) = await ledger.submit(revision())
        hand.take(await ledger.place())
        return run.id

    cancelled = await placed()
    await ledger.cancel(cancelled)
    assert await why(cancelled) == ("released", "cancelled")
    replaced = await placed()
    await hand.register()
    assert await why(replaced) == ("released", "session_replaced")
    await ledger.cancel(replaced)
    expired = await placed()
    lost, _ = await running(ledger, hand)
    never, never_attempt = await started(ledger, hand)
    await hand.report(never_attempt, kind="not_started")
    assert await why(never) == ("completed", None)
    await ledger.later(30_000)
    await ledger.reap_all()
    assert await why(expired) == ("released", "expired")
    assert await why(lost) == ("released", "lost")


async def test_one_beat_renews_everything_and_refuses_the_rest(ledger: Ledger, hand: Hand) -> None:
    held = [await running(ledger, hand) for _ in range(3)]
    ids = [attempt_id for _, attempt_id in held]
    await ledger.later(20_000)
    assert (await hand.beat(*ids)).refused == []
    await ledger.later(20_000)
    await ledger.reap()
    assert {(await ledger.run(run_id)).status for run_id, _ in held} == {"running"}
    await ledger.later(10_000)
    assert [item.code for item in (await hand.beat(*ids)).refused] == ["fence_rejected"] * 3


async def test_a_start_is_answered_again_with_the_same_grant(ledger: Ledger, hand: Hand) -> None:
    _, attempt_id = await started(ledger, hand)
    again = await hand.start(attempt_id)
    assert [grant.attempt_id for grant in again.grants] == [attempt_id]
    hand.key = b"another"
    assert (await hand.start(attempt_id)).refused[0].code == "invalid_transition"


async def test_two_reports_of_one_batch_and_their_repeats_settle_once(ledger: Ledger, hand: Hand) -> None:
    run_id, attempt_id = await started(ledger, hand)
    first = hand.signed(attempt_id, kind="started", pid=9)
    last = hand.signed(attempt_id, kind="ended", exit_code=0)
    settled = await hand.send(first, last, first, last)
    assert len(settled.acks["w1"]) == 4
    late = await hand.send(last, first)
    assert len(late.acks["w1"]) == 2
    assert (await ledger.events(run_id))[-4:] == [
        "attempt.running", "run.running", "attempt.succeeded", "run.succeeded",
    ]  # fmt: skip


async def test_a_timeout_ends_as_timed_out_even_when_the_command_says_success(ledger: Ledger, hand: Hand) -> None:
    of = revision(execution=Execution(command=["/bin/true"], timeout_ms=60_000))
    run_id, attempt_id = await running(ledger, hand, of)

    async def look() -> int:
        return (await ledger.database.transact(lambda tx: recovery.end_overdue(tx, ledger.revisions))).moved

    for _ in range(3):
        await ledger.later(15_000)
        await hand.beat(attempt_id)
    assert await look() == 0
    await ledger.later(15_000)
    assert await look() == 1
    assert await look() == 0
    assert await ledger.deliver()
    await hand.report(attempt_id, kind="ended", exit_code=0)
    run = await ledger.run(run_id)
    assert (run.status, run.error_code) == ("timed_out", "run_timeout")


async def test_an_attempt_whose_time_was_over_before_its_spawn_ends_timed_out_too(ledger: Ledger, hand: Hand) -> None:
    of = revision(execution=Execution(command=["/bin/true"], timeout_ms=1_000))
    run_id, attempt_id = await started(ledger, hand, of)
    await hand.report(attempt_id, kind="not_started", stopped_for="timeout", error_code="stopped")
    run = await ledger.run(run_id)
    assert (run.status, run.error_code) == ("timed_out", "run_timeout")
    assert "attempt.timed_out" in await ledger.events(run_id)


async def test_an_attempt_belongs_to_its_run(ledger: Ledger, hand: Hand) -> None:
    (one, two) = await ledger.submit(revision(), 2)
    sql = Statement("""
        INSERT INTO run_events (run_id, sequence, type, actor_type, attempt_id, payload, created_at_ms)
        VALUES ($1, 99, 'x', 'system', $2, '{}', 1)
    """)
    with pytest.raises(ForeignKeyViolation):
        await ledger.database.transact(lambda tx: tx.execute(sql, one.id, two.attempt_id))


async def test_a_run_has_one_active_attempt(ledger: Ledger) -> None:
    (run,) = await ledger.submit(revision())
    case = await ledger.case(run.id)
    assert case.attempt is not None
    sql = Statement("""
        INSERT INTO run_attempts (id, run_id, attempt, status, executor, created_at_ms)
        VALUES ($1, $2, 2, 'claimed', 'local_process', 1)
    """)
    with pytest.raises(UniqueViolation):
        await ledger.database.transact(lambda tx: tx.execute(sql, "0" * 36, run.id))


async def test_no_token_is_at_rest(ledger: Ledger, hand: Hand) -> None:
    run_id, attempt_id = await running(ledger, hand)
    offer = hand.offers[attempt_id]
    token = proof.token(hand.key, attempt_id, offer.offer_id, offer.lease_generation)
    for table in ("runs", "run_attempts", "run_dispatch_leases", "run_events", "outbox", "workers", "audit_events"):
        for row in await ledger.rows(f"SELECT * FROM {table}"):
            assert token.hex() not in str(dict(row))
    assert run_id
