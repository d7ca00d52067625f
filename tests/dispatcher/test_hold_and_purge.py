"""Held runs, approved actions and purges: each decision once, nothing after a tombstone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from schemas.artifacts import PurgeRuns
from schemas.errors import Ql3Error
from schemas.identity import Subject
from schemas.runs import DispatchClose, RunRelease, RunReleaseAnswer
from schemas.tasks import Execution, Overlap, RetryPolicy, SecretRef, Terms, Variable
from services.dispatcher import holding, purging
from services.dispatcher.store import holds
from services.kit.ids import new_id
from tests.dispatcher.house import Hand, Ledger, order, revision, running

TRIGGER = "0198c0de-0000-7000-8000-000000000001"
HELD = revision(terms=Terms(needs_approval=True))


async def release(ledger: Ledger, run_id: str, outcome: Any, **fields: Any) -> RunReleaseAnswer:
    hold = (await ledger.database.read(lambda tx: holds.read(tx, [run_id])))[run_id]
    question = RunRelease(
        **{
            "dispatch_id": new_id(),
            "run": run_id,
            "project": "default",
            "outcome": outcome,
            "approval_id": run_id,
            "action_digest": hold.action_digest,
            **fields,
        }
    )
    answer, _ = await ledger.database.transact(lambda tx: holding.release(tx, ledger.revisions, question))
    return answer


async def test_an_approved_run_is_queued_once(ledger: Ledger) -> None:
    (run,) = await ledger.submit(HELD)
    assert (run.status, run.attempt) == ("waiting_approval", 0)
    dispatch = new_id()
    first = await release(ledger, run.id, "approved", dispatch_id=dispatch)
    again = await release(ledger, run.id, "approved", dispatch_id=dispatch)
    assert (first.outcome, first.run_status) == ("released", "queued")
    assert again == first
    assert (await release(ledger, run.id, "approved")).outcome == "not_waiting"
    assert (await ledger.events(run.id)) == ["run.created", "run.waiting_approval", "run.queued", "attempt.claimed"]


async def test_a_rule_of_the_project_holds_what_the_task_itself_does_not(ledger: Ledger) -> None:
    (run,) = await ledger.submit(revision(), hold=True)
    assert (run.status, run.attempt) == ("waiting_approval", 0)
    assert (await release(ledger, run.id, "approved")).run_status == "queued"


@pytest.mark.parametrize(
    ("trigger_type", "requester", "asker"),
    [
        ("cron", Subject(type="system", id=f"trigger:{TRIGGER}"), Subject(type="system", id=f"trigger/{TRIGGER}")),
        ("backfill", Subject(type="user", id="ada"), Subject(type="user", id="ada")),
        ("manual", Subject(type="user", id="ada"), Subject(type="user", id="ada")),
    ],
)
async def test_a_person_asks_for_himself_also_through_a_trigger(
    ledger: Ledger, trigger_type: Any, requester: Subject, asker: Subject
) -> None:
    """Otherwise he could decide about his own run in the trigger's name."""
    (run,) = await ledger.submit(HELD, trigger_id=TRIGGER, trigger_type=trigger_type, requested_by=requester)
    message, _ = await ledger.database.transact(lambda tx: holding.ring(tx, ledger.revisions))
    assert message is not None
    (told,) = message.requests
    assert told.request_id == run.id
    assert told.requested_by == asker


@pytest.mark.parametrize(
    ("outcome", "status", "code"),
    [
        ("rejected", "cancelled", "approval_rejected"),
        ("withdrawn", "cancelled", "approval_rejected"),
        ("expired", "timed_out", "approval_expired"),
    ],
)
async def test_what_is_not_approved_ends(ledger: Ledger, outcome: str, status: str, code: str) -> None:
    (run,) = await ledger.submit(HELD)
    assert (await release(ledger, run.id, outcome)).outcome == "ended"
    ended = await ledger.run(run.id)
    assert (ended.status, ended.error_code) == (status, code)
    if status == "cancelled":
        assert ended.cancel_reason == "policy"


async def test_another_action_than_the_approved_one_is_not_released(ledger: Ledger) -> None:
    (run,) = await ledger.submit(HELD)
    for digest in ("0" * 64, None):
        with pytest.raises(Ql3Error) as refused:
            await release(ledger, run.id, "approved", action_digest=digest)
        assert refused.value.code == "conflict"
    assert (await ledger.run(run.id)).status == "waiting_approval"


async def test_inputs_are_part_of_what_is_approved(ledger: Ledger) -> None:
    (one,) = await ledger.submit(HELD, inputs={"target": "staging"})
    (two,) = await ledger.submit(HELD, inputs={"target": "production"})
    found = await ledger.database.read(lambda tx: holds.read(tx, [one.id, two.id]))
    message, _ = await ledger.database.transact(lambda tx: holding.ring(tx, ledger.revisions))
    assert message is not None
    assert {r.request_id: r.binding.action_digest for r in message.requests} == {
        run_id: hold.action_digest for run_id, hold in found.items()
    }
    assert found[one.id].action_digest != found[two.id].action_digest


async def test_an_unanswered_request_is_rung_again_and_an_answered_one_is_not(ledger: Ledger) -> None:
    await ledger.submit(HELD)

    async def ring() -> Any:
        return (await ledger.database.transact(lambda tx: holding.ring(tx, ledger.revisions)))[0]

    first = await ring()
    assert await ring() is None
    await ledger.later(3_000)
    again = await ring()
    assert [r.order_id for r in again.requests] == [r.order_id for r in first.requests]
    await ledger.database.transact(lambda tx: holding.acked(tx, [r.order_id for r in first.requests]))
    await ledger.later(600_000)
    assert await ring() is None


async def test_a_closed_dispatch_id_releases_and_creates_nothing(ledger: Ledger) -> None:
    (run,) = await ledger.submit(HELD)
    dispatch = new_id()
    close = DispatchClose(dispatch_id=dispatch, project="default")
    closed = await ledger.database.transact(lambda tx: holding.close(tx, close))
    assert closed.outcome == "closed"
    assert await ledger.database.transact(lambda tx: holding.close(tx, close)) == closed
    assert (await release(ledger, run.id, "approved", dispatch_id=dispatch)).outcome == "closed"
    assert (await ledger.run(run.id)).status == "waiting_approval"
    of = revision()
    late = order(of, idempotency_key=dispatch, trigger_type="approved_action")
    (outcome,) = await ledger.submit_orders([of], [late])
    assert (outcome.run, outcome.error) == (None, "conflict")


async def test_closing_after_a_release_tells_what_was_committed(ledger: Ledger) -> None:
    (run,) = await ledger.submit(HELD)
    dispatch = new_id()
    await release(ledger, run.id, "approved", dispatch_id=dispatch)
    close = DispatchClose(dispatch_id=dispatch, project="default")
    answer = await ledger.database.transact(lambda tx: holding.close(tx, close))
    assert (answer.outcome, answer.run_status) == ("released", "queued")


async def test_a_cancelled_hold_rings_no_more(ledger: Ledger) -> None:
    (run,) = await ledger.submit(HELD)
    await ledger.cancel(run.id)
    assert (await ledger.run(run.id)).status == "cancelled"
    message, _ = await ledger.database.transact(lambda tx: holding.ring(tx, ledger.revisions))
    assert message is None
    assert (await release(ledger, run.id, "approved")).outcome == "not_waiting"


async def ahead(ledger: Ledger, of: Any, by_ms: int) -> Any:
    """A held run that may not start for so long."""
    now = await ledger.database.read(lambda tx: tx.now_ms())
    (run,) = await ledger.submit(of, hold=True, not_before_ms=now + by_ms)
    return run


HOUR = 3_600_000


async def test_a_request_that_asks_ahead_lives_from_its_start_and_never_longer_than_a_day(ledger: Ledger) -> None:
    soon = await ahead(ledger, revision(terms=Terms(approval_ttl_ms=HOUR)), HOUR)
    late = await ahead(ledger, revision(terms=Terms()), 20 * HOUR)
    too_late = await ahead(ledger, revision(terms=Terms()), 48 * HOUR)
    message, _ = await ledger.database.transact(lambda tx: holding.ring(tx, ledger.revisions))
    assert message is not None
    orders = {order.request_id: order for order in message.requests}
    assert orders[soon.id].expires_at_ms == soon.not_before_ms + HOUR
    assert orders[soon.id].not_before_ms == soon.not_before_ms
    assert orders[late.id].expires_at_ms == late.created_at_ms + 24 * HOUR
    assert orders[late.id].not_before_ms == late.not_before_ms
    # What is due after the end of its request is released when it is approved.
    assert (orders[too_late.id].expires_at_ms, orders[too_late.id].not_before_ms) == (
        too_late.created_at_ms + 24 * HOUR,
        None,
    )


async def test_what_asks_ahead_is_in_nobodys_way_until_it_is_released(ledger: Ledger) -> None:
    of = revision(terms=Terms(overlap=Overlap(policy="skip")))
    early = await ahead(ledger, of, HOUR)
    (other,) = await ledger.submit(of)
    assert other.status == "queued"
    # Its own time comes while the other one is not over.
    answer = await release(ledger, early.id, "approved")
    assert (answer.outcome, answer.run_status) == ("ended", "cancelled")
    assert (await ledger.run(early.id)).error_code == "overlap_skipped"
    await ledger.cancel(other.id)
    again = await ahead(ledger, of, HOUR)
    answer = await release(ledger, again.id, "approved")
    assert (answer.outcome, answer.run_status) == ("released", "queued")


async def test_what_asked_ahead_replaces_others_when_it_is_released(ledger: Ledger) -> None:
    of = revision(terms=Terms(overlap=Overlap(policy="replace")))
    early = await ahead(ledger, of, HOUR)
    (other,) = await ledger.submit(of)
    assert (await ledger.run(early.id)).status == "waiting_approval"
    assert (await release(ledger, early.id, "approved")).run_status == "queued"
    assert (await ledger.run(other.id)).status == "cancelled"


async def test_a_purge_takes_whole_ended_runs_and_nothing_else(ledger: Ledger, hand: Hand) -> None:
    policy = Terms(retry=RetryPolicy(max_attempts=2, backoff_base_ms=0, jitter_percent=0))
    done, attempt_id = await running(ledger, hand, revision(terms=policy))
    await hand.report(attempt_id, kind="ended", exit_code=0)
    going, _ = await running(ledger, hand)
    elsewhere, other = await running(ledger, hand, revision(project="other"))
    await hand.report(other, kind="ended", exit_code=0)
    await ledger.cancel(going)
    await ledger.later(10_000)
    (now,) = await ledger.rows("SELECT max(finished_at_ms) AS at FROM runs")
    purge = PurgeRuns(order_id=new_id(), project="default", finished_before_ms=now["at"] + 1)
    assert await ledger.database.transact(lambda tx: purging.purge_runs(tx, purge)) == 1
    assert await ledger.database.transact(lambda tx: purging.purge_runs(tx, purge)) == 0
    left = {row["id"] for row in await ledger.rows("SELECT id FROM runs")}
    assert left == {going, elsewhere}
    assert await ledger.rows("SELECT 1 AS x FROM run_events WHERE run_id = $1", done) == []
    for table in ("run_attempts", "run_dispatch_leases", "run_retry_policies"):
        assert await ledger.rows(f"SELECT 1 AS x FROM {table} WHERE run_id = $1", done) == []
    assert await ledger.events(going)


async def test_a_run_of_another_project_is_not_there(ledger: Ledger) -> None:
    (run,) = await ledger.submit(HELD)
    question = RunRelease(dispatch_id=new_id(), run=run.id, project="other", outcome="approved", approval_id=run.id)
    with pytest.raises(Ql3Error) as absent:
        await ledger.database.transact(lambda tx: holding.release(tx, ledger.revisions, question))
    assert absent.value.code == "not_found"
    assert (await ledger.run(run.id)).status == "waiting_approval"


async def test_ended_attempts_are_told_again_in_the_order_of_their_ids(ledger: Ledger, hand: Hand) -> None:
    from services.dispatcher.store import ended

    told: list[str] = []
    for code in (0, 1):
        _, attempt_id = await running(ledger, hand)
        await hand.report(attempt_id, kind="ended", exit_code=code)
        told.append(attempt_id)
    await running(ledger, hand)
    found: list[str] = []
    after: str | None = None
    while True:
        page = await ledger.database.read(lambda tx, after=after: ended.page(tx, after, 1))
        found += [fact.attempt_id for fact in page.items if fact.run_terminal]
        after = page.next
        if after is None:
            break
    assert found == sorted(told)


async def test_a_preview_stays_within_its_bound_whatever_is_in_it(ledger: Ledger) -> None:
    execution = Execution(
        command=["/bin/echo", "\x01" * 5000, '"' * 5000],
        environment=[Variable(name=f"V{n}", secret=SecretRef(secret=f"{n:02}" + "s" * 61)) for n in range(64)],
    )
    of = revision(terms=Terms(needs_approval=True), execution=execution)
    await ledger.submit(of, inputs={"a": "\x02" * 9000})
    message, _ = await ledger.database.transact(lambda tx: holding.ring(tx, ledger.revisions))
    assert message is not None
    assert len(msgspec.json.encode(message.requests[0].preview)) <= 8 * 1024


async def test_inputs_that_no_offer_could_carry_are_refused(ledger: Ledger) -> None:
    of = revision()
    (outcome,) = await ledger.submit_orders([of], [order(of, inputs={"a": "x" * 70_000})])
    assert (outcome.run, outcome.error) == (None, "too_large")
