"""The pure rules by property and by table: no database, no clock."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.tasks import Concurrency, Overlap, Placement, RetryPolicy, Terms
from services.dispatcher import cancel, overlap, retry
from services.dispatcher.gathering import Gatherer
from services.dispatcher.lease import REOFFER_MAX_MS, reoffered
from services.dispatcher.placement import Lane, Limit, Seat, lane_terms, plan
from services.dispatcher.records import (
    ATTEMPT_EDGES,
    RUN_EDGES,
    TERMINAL,
    Case,
    Event,
    LeaseRecord,
    PolicyRecord,
    Refused,
    RunRecord,
    WorkerRecord,
    move_run,
)
from services.dispatcher.recovery import PATIENCE_MS, Hearing
from services.dispatcher.run import lane_of, policy_of, request_digest
from services.kit.database import DatabaseUnavailable
from tests.dispatcher.house import order, revision

from schemas.workers import Capabilities  # isort: skip

POLICIES = st.builds(
    PolicyRecord,
    run_id=st.just("r"),
    max_attempts=st.integers(2, 16),
    retry_on=st.just("failed"),
    safety=st.sampled_from(["unknown", "idempotent", "deduplicated"]),
    backoff_base_ms=st.integers(0, 86_400_000),
    backoff_max_ms=st.integers(0, 86_400_000),
    jitter_percent=st.integers(0, 100),
)


@given(policy=POLICIES, attempt=st.integers(1, 16), chance=st.floats(0, 1))
def test_a_pause_is_never_negative_and_never_above_its_cap(policy: PolicyRecord, attempt: int, chance: float) -> None:
    assert 0 <= retry.delay_ms(policy, attempt, chance) <= policy.backoff_max_ms


def test_pauses_double_up_to_the_cap() -> None:
    policy = PolicyRecord(
        run_id="r", max_attempts=16, retry_on="failed", safety="unknown", backoff_base_ms=1_000, backoff_max_ms=10_000,
        jitter_percent=0,
    )  # fmt: skip
    assert [retry.delay_ms(policy, n, 0.5) for n in range(1, 7)] == [1_000, 2_000, 4_000, 8_000, 10_000, 10_000]


@pytest.mark.parametrize("safety", ["unknown", "idempotent", "deduplicated"])
@pytest.mark.parametrize("outcome", ["failed", "timed_out", "lost"])
@pytest.mark.parametrize("retry_on", ["failed", "timed_out", "lost", "failed,lost,timed_out", ""])
@pytest.mark.parametrize("attempt", [1, 2, 3])
def test_who_is_retried(safety: str, outcome: retry.Outcome, retry_on: str, attempt: int) -> None:
    policy = PolicyRecord(
        run_id="r", max_attempts=3, retry_on=retry_on, safety=safety, backoff_base_ms=0, backoff_max_ms=0,
        jitter_percent=0,
    )  # fmt: skip
    wanted = outcome in retry_on.split(",") and attempt < 3 and not (outcome == "lost" and safety == "unknown")
    assert retry.allows(policy, attempt, outcome) is wanted
    assert not retry.allows(None, 1, outcome)


def test_a_run_without_retries_has_no_policy_row() -> None:
    assert policy_of("r", revision()) is None
    policy = policy_of("r", revision(terms=Terms(retry=RetryPolicy(max_attempts=2, retry_on=("lost", "failed")))))
    assert policy is not None
    assert policy.retry_on == "failed,lost"


def _run(status: str) -> RunRecord:
    return RunRecord(
        id="r", project_id="p", task_id="t", task_name="t", task_revision=1, revision_digest="d", lane="l",
        trigger_type="manual", requested_by_type="user", requested_by_id="ada", idempotency_key="k",
        request_digest="d", created_at_ms=1, status=status, version=1, event_sequence=1,
    )  # fmt: skip


@pytest.mark.parametrize("before", sorted(RUN_EDGES))
@pytest.mark.parametrize("after", sorted(RUN_EDGES))
def test_only_the_tables_arrows_are_taken(before: str, after: str) -> None:
    case = Case(_run(before))
    event = Event(2, "x")
    if after in RUN_EDGES[before]:
        assert move_run(case, after, event).run.status == after
    else:
        with pytest.raises(Refused) as refused:
            move_run(case, after, event)
        assert refused.value.code == "invalid_transition"


def test_ends_are_final() -> None:
    assert {status for status, after in RUN_EDGES.items() if not after} == TERMINAL
    assert {s for s, after in ATTEMPT_EDGES.items() if not after} == {*TERMINAL, "lost"}


def test_a_request_is_told_from_another_by_its_content_not_by_its_ids() -> None:
    of = revision()
    one = order(of, inputs={"a": 1, "b": [1.5, None]})
    assert request_digest(one) == request_digest(order(of, inputs={"b": [1.5, None], "a": 1}, created_at_ms=99))
    for other in (
        order(of, inputs={"a": 2, "b": [1.5, None]}),
        order(of, inputs={"a": 1, "b": [1.5, None]}, priority=3),
        order(revision(number=2), inputs={"a": 1, "b": [1.5, None]}),
        order(of, inputs={"a": 1, "b": [1.5, None]}, trigger_type="api"),
    ):
        assert request_digest(other) != request_digest(one)


def test_a_lane_is_shared_by_what_is_placed_alike() -> None:
    other_task = "01890000-0000-7000-8000-0000000000b0"
    plain = lane_of(revision())
    assert plain == lane_of(revision(task=other_task, number=9, terms=Terms(priority=4)))
    different = {
        plain,
        lane_of(revision(project="other")),
        lane_of(revision(terms=Terms(placement=Placement(pool="gpu")))),
        lane_of(revision(terms=Terms(concurrency=[Concurrency(key="db", limit=2)]))),
        lane_of(revision(terms=Terms(overlap=Overlap(policy="allow", limit=2)))),
        lane_of(revision(task=other_task, terms=Terms(overlap=Overlap(policy="allow", limit=2)))),
    }
    assert len(different) == 6


@pytest.mark.parametrize(
    ("policy", "limit", "others", "entry"),
    [
        ("allow", 1, ["running"], overlap.Entry()),
        ("skip", None, [], overlap.Entry()),
        ("skip", None, ["queued"], overlap.Entry(refused=overlap.SKIPPED)),
        ("skip", None, ["retry_wait"], overlap.Entry(refused=overlap.SKIPPED)),
        ("queue", None, ["running"] * 9, overlap.Entry()),
        ("queue", 1, ["running"], overlap.Entry()),
        ("queue", 1, ["running", "queued"], overlap.Entry(refused=overlap.QUEUE_FULL)),
        ("queue", 1, [], overlap.Entry()),
        ("replace", None, ["running", "queued"], overlap.Entry(replaces=("0", "1"))),
    ],
)
def test_overlap(policy: str, limit: int | None, others: list[str], entry: overlap.Entry) -> None:
    found = [overlap.Open(str(n), status) for n, status in enumerate(others)]
    assert overlap.enter(Overlap(policy=policy, limit=limit), found) == entry


@given(count=st.integers(1, 30))
def test_an_offer_is_told_again_at_a_growing_pace(count: int) -> None:
    lease = LeaseRecord(
        attempt_id="a", run_id="r", project_id="p", task_id="t", status="leased", version=1, lease_generation=1,
        worker_id="w", worker_session_id="s", worker_generation=1, offer_id="o", offers=count, acquired_at_ms=0,
        renewed_at_ms=0, expires_at_ms=15_000, next_offer_at_ms=0,
    )  # fmt: skip
    again = reoffered(lease, 100)
    assert again.offers == count + 1
    assert again.next_offer_at_ms is not None
    assert 100 < again.next_offer_at_ms <= 100 + REOFFER_MAX_MS
    assert (again.lease_generation, again.offer_id) == (lease.lease_generation, lease.offer_id)


@st.composite
def queues(draw: st.DrawFn) -> tuple[dict[str, Lane], dict[str, list[RunRecord]], list[Seat], dict[Limit, int]]:
    lanes: dict[str, Lane] = {}
    waiting: dict[str, list[RunRecord]] = {}
    limits: dict[Limit, int] = {}
    for number in range(draw(st.integers(1, 5))):
        project = draw(st.sampled_from(["a", "b"]))
        keyed = draw(st.booleans())
        terms = Terms(
            concurrency=[Concurrency(key="db", limit=2)] if keyed else [],
            placement=Placement(required={"gpu": "yes"} if draw(st.booleans()) else {}),
        )
        of = revision(project=project, task=f"01890000-0000-7000-8000-{number:012x}", name=f"t{number}", terms=terms)
        name = f"{number}"
        lanes[name] = lane_terms(name, of)
        if keyed:
            limits[Limit(project, "key", "db")] = 2
        times = sorted(draw(st.lists(st.integers(0, 50), min_size=1, max_size=6)))
        runs = [_waiting(f"{number}-{n}", project, name, at, 0) for n, at in enumerate(times)]
        waiting[name] = runs
    seats = [
        _seat(f"w{n}", draw(st.integers(0, 4)), {"gpu": "yes"} if draw(st.booleans()) else {})
        for n in range(draw(st.integers(0, 3)))
    ]
    return lanes, waiting, seats, limits


def _waiting(run_id: str, project: str, lane: str, at: int, priority: int) -> RunRecord:
    fields = {name: getattr(_run("queued"), name) for name in RunRecord.__struct_fields__}
    return RunRecord(**{**fields, "id": run_id, "project_id": project, "lane": lane, "queued_at_ms": at,
                        "priority": priority})  # fmt: skip


def _seat(name: str, free: int, labels: dict[str, str]) -> Seat:
    worker = WorkerRecord(
        id=name, session_id="s", generation=1, status="online", drain_requested=0, version=0, slots=4,
        capabilities="{}", capabilities_digest="d", public_key="k", registered_at_ms=1, last_heartbeat_at_ms=1,
        lease_expires_at_ms=9,
    )  # fmt: skip
    return Seat(worker, Capabilities(labels=labels), free)


@given(queues())
def test_a_plan_keeps_slots_limits_and_requirements_and_leaves_no_slot_idle(made: tuple) -> None:
    lanes, waiting, seats, limits = made
    found = plan(lanes, waiting, seats, {}, limits, {})
    ids = [choice.run.id for choice in found.choices]
    assert len(ids) == len(set(ids))
    free = {seat.worker.id: seat.free for seat in seats}
    labels = {seat.worker.id: seat.capabilities.labels for seat in seats}
    used: dict[Limit, int] = {}
    for choice in found.choices:
        free[choice.worker.id] -= 1
        assert free[choice.worker.id] >= 0
        for name, value in choice.lane.placement.required.items():
            assert labels[choice.worker.id].get(name) == value
        for limit in choice.lane.limits:
            used[limit] = used.get(limit, 0) + 1
    for limit, most in limits.items():
        assert used.get(limit, 0) <= most
    for name, runs in waiting.items():
        placed = [run for run in runs if run.id in ids]
        assert placed == runs[: len(placed)], "somebody was overtaken in his own lane"
        if len(placed) < len(runs):
            room = any(
                free[seat.worker.id] > 0
                and all(seat.capabilities.labels.get(k) == v for k, v in lanes[name].placement.required.items())
                for seat in seats
            )
            full = any(used.get(limit, 0) >= limits[limit] for limit in lanes[name].limits if limit in limits)
            assert not room or full, "a slot was left idle"


def test_deliveries_of_a_cancel_slow_down_and_stop_at_last() -> None:
    from services.dispatcher.records import CancellationRecord

    record = CancellationRecord(
        attempt_id="a", run_id="r", dispatch_id="d", status="pending", version=0, dispatch_count=0, worker_id="w",
        lease_generation=1, reason="user", grace_ms=0, created_at_ms=0, next_attempt_at_ms=0,
    )  # fmt: skip
    pauses: list[int] = []
    while record.next_attempt_at_ms is not None:
        record = cancel.delivered(record, 0)
        pauses.append(record.next_attempt_at_ms or 0)
    assert pauses[:6] == [1_000, 2_000, 4_000, 8_000, 16_000, 30_000]
    assert len(pauses) == cancel.DELIVERIES_MOST
    assert record.status == "blocked"


async def test_what_comes_in_while_a_batch_is_at_work_makes_the_next_batch() -> None:
    batches: list[list[int]] = []
    gate = asyncio.Event()

    async def work(items: Sequence[int]) -> list[int]:
        batches.append(list(items))
        await gate.wait()
        return [item * 10 for item in items]

    gatherer: Gatherer[int, int] = Gatherer(work, most=3, size=lambda _: 1)
    first = asyncio.create_task(gatherer.put(1))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    rest = [asyncio.create_task(gatherer.put(n)) for n in (2, 3, 4, 5)]
    await asyncio.sleep(0)
    gate.set()
    assert await asyncio.gather(first, *rest) == [10, 20, 30, 40, 50]
    assert batches == [[1], [2, 3, 4], [5]]


async def test_one_bad_item_harms_nobody_and_a_database_that_is_away_is_asked_once() -> None:
    calls: list[list[int]] = []

    async def work(items: Sequence[int]) -> list[int]:
        calls.append(list(items))
        if 99 in items:
            raise DatabaseUnavailable
        if 13 in items:
            raise ValueError(13)
        return list(items)

    gatherer: Gatherer[int, int] = Gatherer(work, most=10, size=lambda _: 1)
    found = await asyncio.gather(*(gatherer.put(n) for n in (1, 13, 2)), return_exceptions=True)
    assert found[0] == 1
    assert isinstance(found[1], ValueError)
    assert found[2] == 2
    calls.clear()
    away = await asyncio.gather(*(gatherer.put(n) for n in (1, 99, 2)), return_exceptions=True)
    assert all(isinstance(item, DatabaseUnavailable) for item in away)
    assert calls == [[1, 99, 2]]


def test_silence_counts_only_after_we_could_hear_for_a_while() -> None:
    now = [0.0]
    hearing = Hearing(lambda: now[0])

    def passes(seconds: int, *, connected: bool = True) -> None:
        for _ in range(seconds):
            now[0] += 1
            hearing.look(connected=connected)

    passes(12)
    assert hearing.patience_ms() == PATIENCE_MS
    passes(1)
    assert hearing.patience_ms() == 0
    passes(1, connected=False)
    assert hearing.patience_ms() == PATIENCE_MS
    passes(13)
    assert hearing.patience_ms() == 0
    now[0] += 6  # paused
    hearing.look(connected=True)
    assert hearing.patience_ms() == PATIENCE_MS
