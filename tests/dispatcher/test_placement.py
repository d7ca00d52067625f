"""Where runs go, in which order, under which limits, and the words for why not."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from schemas.paging import Page
from schemas.runs import LimitList, LimitPage, LimitSet
from schemas.tasks import Concurrency, Overlap, Placement, Terms
from schemas.workers import Capabilities
from services.dispatcher import limiting, placing
from services.dispatcher.placement import Lack, mismatch
from services.kit.database import Statement
from tests.dispatcher.house import ADA, Hand, Ledger, order, revision, running

LONG_AGO = Statement("UPDATE refused_instants SET refused_at_ms = 0")
A, B, C = (f"01890000-0000-7000-8000-0000000000{n}0" for n in "abc")


async def offered(ledger: Ledger) -> list[tuple[str, str]]:
    """(run, worker) of one pass, as offered."""
    return [(item.run_id, worker) for worker, message in await ledger.place() for item in message.offers]


@pytest.mark.parametrize(
    ("placement", "lacks"),
    [
        (Placement(), None),
        (Placement(executor="docker"), "executor docker"),
        (Placement(pool="gpu"), "pool gpu"),
        (Placement(workers=["other"]), "name other"),
        (Placement(workers=["w1", "other"]), None),
        (Placement(required={"gpu": "yes"}), "label gpu=yes"),
        (Placement(required={"zone": "a"}), None),
        (Placement(runtimes=["python"]), None),
        (Placement(runtimes=["python>=3.11,<3.12"]), None),
        (Placement(runtimes=["python>=3.12"]), "runtime python>=3.12"),
        (Placement(runtimes=["node"]), "runtime node"),
        (Placement(runtimes=["python==3.11"]), None),
        (Placement(runtimes=["python; rm"]), "runtime python; rm"),
        (Placement(min_cpu_cores=5), "5 cores"),
        (Placement(min_memory_bytes=2**40), "1048576 MiB of memory"),
    ],
)
def test_a_worker_takes_what_it_can_run_and_says_what_it_lacks(placement: Placement, lacks: str | None) -> None:
    has = Capabilities(cpu_cores=4, memory_bytes=2**30, runtimes={"python": "3.11.7"}, labels={"zone": "a"})
    found = mismatch(placement, "w1", has)
    assert (found and found.words()) == lacks


def test_a_worker_of_a_pool_takes_only_what_names_the_pool() -> None:
    pooled = Capabilities(pool="gpu")
    assert mismatch(Placement(), "w1", pooled) == Lack("no_pool", "gpu")
    assert mismatch(Placement(pool="gpu"), "w1", pooled) is None


async def test_priority_goes_before_age(ledger: Ledger) -> None:
    hand = Hand(ledger, slots=2)
    await hand.register()
    (old,) = await ledger.submit(revision())
    (older_low,) = await ledger.submit(revision(), priority=-1)
    (urgent,) = await ledger.submit(revision(), priority=5)
    assert [run for run, _ in await offered(ledger)] == [urgent.id, old.id]
    assert (await ledger.run(older_low.id)).status == "queued"


async def test_projects_share_slots_fairly_whatever_their_backlog(ledger: Ledger) -> None:
    hand = Hand(ledger, slots=4)
    await hand.register()
    await ledger.submit(revision(project="big"), 20)
    await ledger.submit(revision(project="small"), 2)
    placed = [(await ledger.run(run)).project_id for run, _ in await offered(ledger)]
    assert sorted(placed) == ["big", "big", "small", "small"]


async def test_a_project_that_holds_slots_waits_for_one_that_holds_none(ledger: Ledger) -> None:
    hand = Hand(ledger, slots=3)
    await hand.register()
    await ledger.submit(revision(project="big"), 2)
    await ledger.place()
    await ledger.submit(revision(project="big"), 5)
    (late,) = await ledger.submit(revision(project="small"))
    assert [run for run, _ in await offered(ledger)] == [late.id]


async def test_slots_are_counted_from_live_leases(ledger: Ledger) -> None:
    hand = Hand(ledger, slots=3)
    await hand.register()
    await ledger.submit(revision(), 10)
    assert len(await offered(ledger)) == 3
    assert await offered(ledger) == []


async def test_who_cannot_be_placed_hides_nobody(ledger: Ledger) -> None:
    hand = Hand(ledger, slots=4)
    await hand.register()
    picky = revision(terms=Terms(placement=Placement(required={"gpu": "yes"})), task=A, name="picky")
    stuck = await ledger.submit(picky, 300, priority=100)
    (plain,) = await ledger.submit(revision())
    assert [run for run, _ in await offered(ledger)] == [plain.id]
    why = await ledger.database.read(lambda tx: placing.why(tx, ledger.revisions, stuck[0]))
    assert (why.cause, why.sentence) == ("no_matching_worker", "No worker has label gpu=yes.")


async def test_preferred_labels_rank_and_then_the_emptier_worker(ledger: Ledger) -> None:
    plain, liked = Hand(ledger, "plain", slots=8), Hand(ledger, "liked", slots=2, labels={"disk": "fast"})
    await plain.register()
    await liked.register()
    wants = revision(terms=Terms(placement=Placement(preferred={"disk": "fast"})))
    await ledger.submit(wants, 3)
    assert len(await offered(ledger)) == 3
    counts = await ledger.rows("SELECT worker_id, count(*) AS n FROM run_dispatch_leases GROUP BY worker_id")
    assert {row["worker_id"]: row["n"] for row in counts} == {"liked": 2, "plain": 1}


async def test_a_tasks_own_limit_holds_and_says_so(ledger: Ledger, hand: Hand) -> None:
    of = revision(terms=Terms(overlap=Overlap(policy="allow", limit=2)))
    made = await ledger.submit(of, 5)
    assert len(await offered(ledger)) == 2
    assert await offered(ledger) == []
    why = await ledger.database.read(lambda tx: placing.why(tx, ledger.revisions, made[-1]))
    assert why.cause == "task_limit"
    assert "2 runs in work" in why.sentence


async def test_a_named_key_is_shared_by_tasks_of_a_project_only(ledger: Ledger, hand: Hand) -> None:
    terms = Terms(concurrency=[Concurrency(key="db", limit=1)])
    await ledger.submit(revision(task=A, name="a", terms=terms), 2)
    await ledger.submit(revision(task=B, name="b", terms=terms), 2)
    await ledger.submit(revision(task=C, name="c", terms=terms, project="other"), 2)
    placed = await offered(ledger)
    assert len(placed) == 2
    assert {(await ledger.run(run)).project_id for run, _ in placed} == {"default", "other"}


async def set_limit(ledger: Ledger, limit: int | None, key: str | None = None) -> LimitPage:
    question = LimitSet(actor=ADA, project="default", key=key, limit=limit)
    return await ledger.database.transact(lambda tx: limiting.set_limit(tx, question, "allow"))


async def test_what_somebody_set_for_a_key_stands_before_what_its_tasks_say(ledger: Ledger, hand: Hand) -> None:
    of = revision(terms=Terms(concurrency=[Concurrency(key="db", limit=1)]))
    assert [(item.limit, item.live) for item in (await set_limit(ledger, 3, key="db")).items] == [(3, 0)]
    made = await ledger.submit(of, 5)
    assert len(await offered(ledger)) == 3
    await ledger.submit(of)
    assert await offered(ledger) == []
    why = await ledger.database.read(lambda tx: placing.why(tx, ledger.revisions, made[-1]))
    assert (why.cause, "3 runs" in why.sentence) == ("key_limit", True)
    assert [(item.limit, item.live) for item in (await set_limit(ledger, None, key="db")).items] == [(1, 3)]
    assert await offered(ledger) == []


async def test_limits_are_listed_with_their_use(ledger: Ledger, hand: Hand) -> None:
    await set_limit(ledger, 7)
    terms = Terms(overlap=Overlap(policy="allow", limit=2), concurrency=[Concurrency(key="db", limit=4)])
    await ledger.submit(revision(terms=terms, task=A, name="a"), 3)
    await offered(ledger)
    seen: list[tuple[str, str, int, int]] = []
    cursor = None
    while True:
        question = LimitList(actor=ADA, project="default", page=Page(limit=2, cursor=cursor))
        page = await ledger.database.read(lambda tx, asked=question: limiting.page(tx, asked))
        seen += [(item.kind, item.key, item.limit, item.live) for item in page.items]
        cursor = page.next
        if cursor is None:
            break
    assert seen == [("key", "db", 4, 2), ("project", "default", 7, 2), ("task", A, 2, 2)]


async def test_a_project_limit_that_is_taken_away_limits_no_more(ledger: Ledger, hand: Hand) -> None:
    await set_limit(ledger, 1)
    await ledger.submit(revision(), 3)
    assert len(await offered(ledger)) == 1
    assert (await set_limit(ledger, None)).items == []
    assert len(await offered(ledger)) == 2


async def test_a_project_limit_holds(ledger: Ledger, hand: Hand) -> None:
    await set_limit(ledger, 3)
    made = await ledger.submit(revision(), 6)
    assert len(await offered(ledger)) == 3
    why = await ledger.database.read(lambda tx: placing.why(tx, ledger.revisions, made[-1]))
    assert why.cause == "project_limit"


async def test_a_limit_frees_with_the_end_of_a_run(ledger: Ledger, hand: Hand) -> None:
    of = revision(terms=Terms(overlap=Overlap(policy="allow", limit=1)))
    run_id, attempt_id = await running(ledger, hand, of)
    (waiting,) = await ledger.submit(of)
    assert await offered(ledger) == []
    await hand.report(attempt_id, kind="ended", exit_code=0)
    assert [run for run, _ in await offered(ledger)] == [waiting.id]
    assert run_id != waiting.id


async def test_skip_refuses_a_run_while_another_is_open(ledger: Ledger, hand: Hand) -> None:
    of = revision(terms=Terms(overlap=Overlap(policy="skip")))
    first, second = await ledger.submit(of, 2)
    assert (first.status, second.status, second.error_code) == ("queued", "cancelled", "overlap_skipped")
    hand.take(await ledger.place())
    await hand.start(first.attempt_id or "")
    (third,) = await ledger.submit(of)
    assert third.error_code == "overlap_skipped"
    await hand.report(first.attempt_id or "", kind="ended", exit_code=0)
    (fourth,) = await ledger.submit(of)
    assert fourth.status == "queued"


async def test_an_instant_that_is_skipped_makes_no_run(ledger: Ledger, hand: Hand) -> None:
    of = revision(terms=Terms(overlap=Overlap(policy="skip")))
    run_id, attempt_id = await running(ledger, hand, of)
    instant = order(of, trigger_id=A, trigger_type="cron", scheduled_for_ms=5)
    for _ in range(2):
        (outcome,) = await ledger.submit_orders([of], [instant])
        assert (outcome.run, outcome.error) == (None, "overlap_skipped")
    assert [row["id"] for row in await ledger.rows("SELECT id FROM runs")] == [run_id]
    # What somebody asked for by hand is kept, as ended, for whoever looks for it.
    (asked,) = await ledger.submit(of)
    assert (asked.status, asked.error_code) == ("cancelled", "overlap_skipped")
    await hand.report(attempt_id, kind="ended", exit_code=0)
    # A late copy of the same order gets the same answer; the instant was told as missed.
    (outcome,) = await ledger.submit_orders([of], [instant])
    assert (outcome.run, outcome.error, outcome.replayed) == (None, "overlap_skipped", True)
    other = replace(instant, scheduled_for_ms=6)
    (outcome,) = await ledger.submit_orders([of], [other])
    assert (outcome.run, outcome.error) == (None, "idempotency_conflict")
    (outcome,) = await ledger.submit_orders([of], [replace(other, idempotency_key="another")])
    assert outcome.run is not None
    assert outcome.run.status == "queued"


async def test_refusals_of_instants_are_let_go_when_nobody_can_ask_again(ledger: Ledger, hand: Hand) -> None:
    of = revision(terms=Terms(overlap=Overlap(policy="skip")))
    await running(ledger, hand, of)
    for number in range(2):
        (outcome,) = await ledger.submit_orders(
            [of], [order(of, trigger_id=A, trigger_type="cron", scheduled_for_ms=number)]
        )
        assert outcome.error == "overlap_skipped"
        if number == 0:
            await ledger.database.transact(lambda tx: tx.execute(LONG_AGO))
    assert len(await ledger.rows("SELECT idempotency_key FROM refused_instants")) == 1


async def test_queue_bounds_how_many_wait(ledger: Ledger, hand: Hand) -> None:
    of = revision(terms=Terms(overlap=Overlap(policy="queue", limit=2)))
    (first,) = await ledger.submit(of)
    await ledger.place()
    more = await ledger.submit(of, 3)
    assert [run.error_code for run in more] == [None, None, "overlap_queue_full"]
    assert await offered(ledger) == []
    assert (await ledger.run(first.id)).status == "dispatching"


async def test_replace_ends_the_older_and_waits_for_its_end(ledger: Ledger, hand: Hand) -> None:
    of = revision(terms=Terms(overlap=Overlap(policy="replace")))
    run_id, attempt_id = await running(ledger, hand, of)
    second, third = await ledger.submit(of, 2)
    assert (second.status, second.error_code) == ("cancelled", "overlap_replaced")
    assert (await ledger.run(run_id)).cancel_reason == "policy"
    assert await offered(ledger) == []
    assert await ledger.deliver()
    await hand.report(attempt_id, kind="ended", signal=15)
    assert (await ledger.run(run_id)).status == "cancelled"
    assert [run for run, _ in await offered(ledger)] == [third.id]


async def test_a_draining_worker_keeps_what_it_has_and_gets_nothing_new(ledger: Ledger, hand: Hand) -> None:
    run_id, attempt_id = await running(ledger, hand)
    await hand.beat(attempt_id, draining=True)
    await ledger.submit(revision())
    assert await offered(ledger) == []
    assert (await hand.beat(attempt_id, draining=True)).refused == []
    await hand.beat(attempt_id)
    assert len(await offered(ledger)) == 1
    assert run_id


async def test_a_large_backlog_of_many_lanes_is_served_in_one_pass(ledger: Ledger) -> None:
    hand = Hand(ledger, slots=40)
    await hand.register()
    for number in range(20):
        terms = Terms(overlap=Overlap(policy="allow", limit=2))
        await ledger.submit(revision(task=f"01890000-0000-7000-8000-{number:012x}", name=f"t{number}", terms=terms), 5)
    placed = await offered(ledger)
    assert len(placed) == 40
    by_task: dict[str, int] = {}
    for run, _ in placed:
        task = (await ledger.run(run)).task_id
        by_task[task] = by_task.get(task, 0) + 1
    assert set(by_task.values()) == {2}


async def test_more_lanes_than_a_page_are_gone_through_page_by_page(
    ledger: Ledger, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "LANES", 4)
    stuck = Placement(required={"gpu": "yes"})
    for number in range(11):
        terms = Terms(placement=stuck, concurrency=[Concurrency(key=f"k{number}", limit=1)])
        await ledger.submit(revision(terms=terms))
    (plain,) = await ledger.submit(revision())
    placed: list[str] = []
    lane, passes = "", 0
    while True:
        found = await ledger.database.transact(lambda tx, at=lane: placing.place(tx, ledger.revisions, at))
        placed += [item.run_id for _, message in found.offers for item in message.offers]
        lane, passes = found.last_lane, passes + 1
        if not found.more:
            break
        assert passes < 10
    assert placed == [plain.id]
