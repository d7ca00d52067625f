"""`explain` is right for each cause for which a run can stand still, in both languages."""

from __future__ import annotations

import ast
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from schemas.runs import Explanation, LimitSet, RunRelease
from schemas.tasks import Concurrency, Overlap, Placement, RetryPolicy, Terms
from schemas.workers import WorkerDrain
from services.cli.causes import WORDS_ZH, explained
from services.dispatcher import cancel, cancelling, holding, limiting, reading, recovery, sessions
from services.dispatcher.store import holds
from services.kit.database import Statement
from services.kit.ids import new_id
from tests.dispatcher.house import ADA, Hand, Ledger, revision, running, started

ROOT = Path(__file__).resolve().parents[2]
HELD = Terms(needs_approval=True)
SKIP, REPLACE = Terms(overlap=Overlap(policy="skip")), Terms(overlap=Overlap(policy="replace"))
ALONE = Terms(overlap=Overlap(policy="allow", limit=1))
LABELLED = Terms(placement=Placement(required={"gpu": "yes"}))

Scene = Callable[[Ledger], Awaitable[str]]
"""Brings a ledger to where a run stands still; answers the run's id."""
CASES: Final[dict[str, tuple[str, str, Scene]]] = {}


def case(cause: str, sentence: str, name: str = "") -> Callable[[Scene], Scene]:
    """Declares a scene for a cause; `name` tells several scenes of one cause apart."""

    def keep(scene: Scene) -> Scene:
        CASES[f"{cause}-{name}" if name else cause] = (cause, sentence, scene)
        return scene

    return keep


async def explain(ledger: Ledger, run_id: str, *, listening: bool = False) -> Explanation:
    return await ledger.database.read(
        lambda tx: reading.explanation(tx, ledger.revisions, "default", run_id, listening=listening)
    )


async def worker(ledger: Ledger, name: str = "w1", slots: int = 8, **capabilities: Any) -> Hand:
    hand = Hand(ledger, name, slots=slots, **capabilities)
    await hand.register()
    return hand


async def execute(ledger: Ledger, sql: str, *args: Any) -> None:
    await ledger.database.transact(lambda tx: tx.execute(Statement(sql), *args))


async def queued(ledger: Ledger, terms: Terms | None = None) -> str:
    (run,) = await ledger.submit(revision(terms=terms))
    return run.id


# -- in the queue


@case("no_worker", "No worker is online.")
async def _(ledger: Ledger) -> str:
    return await queued(ledger)


@case("worker_offline", "Worker w1 may take it, but is offline.", "session over")
async def _(ledger: Ledger) -> str:
    await worker(ledger)
    await ledger.later(3_600_000)
    return await queued(ledger)


@case("worker_offline", "Workers w1 and w2 may take it, but are offline.", "silent")
async def _(ledger: Ledger) -> str:
    for name in ("w1", "w2"):
        await running(ledger, await worker(ledger, name, labels={"only": name}), revision(terms=_only(name)))
    await ledger.later(30_000)
    await ledger.reap_all()
    await worker(ledger, "w3", pool="other")
    return await queued(ledger)


def _only(name: str) -> Terms:
    return Terms(placement=Placement(workers=[name]))


@case("worker_draining", "Worker w1 may take it, but is draining and takes nothing new.", "by itself")
async def _(ledger: Ledger) -> str:
    await (await worker(ledger)).beat(draining=True)
    await worker(ledger, "w2", pool="other")
    return await queued(ledger)


@case("worker_draining", "Worker w1 may take it, but is draining and takes nothing new.", "by a person")
async def _(ledger: Ledger) -> str:
    await worker(ledger)
    question = WorkerDrain(actor=ADA, worker="w1", drain=True)
    await ledger.database.transact(lambda tx: sessions.drain(tx, question, "allow"))
    return await queued(ledger)


@case(
    "worker_without_slots",
    "Worker w1 may take it, but offers no slot: the disk has too little room, or none is set.",
)
async def _(ledger: Ledger) -> str:
    hand = await worker(ledger)
    hand.slots = 0  # as a worker whose disk is nearly full
    await hand.beat()
    return await queued(ledger)


@case("no_matching_worker", "No worker has label gpu=yes.", "label")
async def _(ledger: Ledger) -> str:
    await worker(ledger, labels={"gpu": "no"})
    return await queued(ledger, LABELLED)


@case("no_matching_worker", "No worker has label gpu=yes.", "though all slots are taken")
async def _(ledger: Ledger) -> str:
    await running(ledger, await worker(ledger, slots=1))
    return await queued(ledger, LABELLED)


@case("no_matching_worker", "No worker has label gpu=yes and runtime python>=3.99.", "different lacks")
async def _(ledger: Ledger) -> str:
    await worker(ledger, "w1", runtimes={"python": "3.99.1"})
    await worker(ledger, "w2", labels={"gpu": "yes"}, runtimes={"python": "3.11.2"})
    return await queued(ledger, Terms(placement=Placement(required={"gpu": "yes"}, runtimes=["python>=3.99"])))


@case("no_matching_worker", "No worker has pool fast.", "pool")
async def _(ledger: Ledger) -> str:
    await worker(ledger)
    return await queued(ledger, Terms(placement=Placement(pool="fast")))


@case("no_matching_worker", "Every worker online belongs to a pool, and the task names none.", "pools only")
async def _(ledger: Ledger) -> str:
    await worker(ledger, pool="fast")
    return await queued(ledger)


@case("no_matching_worker", "No worker has executor docker.", "capability")
async def _(ledger: Ledger) -> str:
    await worker(ledger)
    return await queued(ledger, Terms(placement=Placement(executor="docker")))


@case("no_matching_worker", "No worker has name w7.", "name")
async def _(ledger: Ledger) -> str:
    await worker(ledger)
    return await queued(ledger, _only("w7"))


@case("no_matching_worker", "No worker has 2048 MiB of memory.", "memory")
async def _(ledger: Ledger) -> str:
    await worker(ledger, memory_bytes=2**30)
    return await queued(ledger, Terms(placement=Placement(min_memory_bytes=2**31)))


@case("no_matching_worker", "No worker has 9 cores.", "cores")
async def _(ledger: Ledger) -> str:
    await worker(ledger, cpu_cores=2)
    return await queued(ledger, Terms(placement=Placement(min_cpu_cores=9)))


@case("no_free_slot", "The only slot of worker w1 is taken.", "one")
async def _(ledger: Ledger) -> str:
    await running(ledger, await worker(ledger, slots=1))
    return await queued(ledger)


@case("no_free_slot", "All 2 slots of the workers it may go to are taken.", "several")
async def _(ledger: Ledger) -> str:
    for name in ("w1", "w2"):
        await running(ledger, await worker(ledger, name, slots=1))
    await worker(ledger, "w3", pool="other")
    return await queued(ledger)


@case("task_limit", "Task job has one run in work, which is its limit.")
async def _(ledger: Ledger) -> str:
    await running(ledger, await worker(ledger), revision(terms=ALONE))
    return await queued(ledger, ALONE)


@case("task_limit", "Task job has one run in work, which is its limit.", "though all slots are taken")
async def _(ledger: Ledger) -> str:
    await running(ledger, await worker(ledger, slots=1), revision(terms=ALONE))
    return await queued(ledger, ALONE)


@case("overlap", "A run of task job is in work, and its runs take turns.")
async def _(ledger: Ledger) -> str:
    turns = Terms(overlap=Overlap(policy="queue", limit=5))
    await running(ledger, await worker(ledger), revision(terms=turns))
    return await queued(ledger, turns)


async def _limit(ledger: Ledger, key: str | None, most: int) -> None:
    question = LimitSet(actor=ADA, project="default", key=key, limit=most)
    await ledger.database.transact(lambda tx: limiting.set_limit(tx, question, "allow"))


@case("project_limit", "Project default has one run in work, which is its limit.")
async def _(ledger: Ledger) -> str:
    await _limit(ledger, None, 1)
    await running(ledger, await worker(ledger))
    return await queued(ledger)


@case("key_limit", "The key db has 2 runs in work, which is its limit.")
async def _(ledger: Ledger) -> str:
    hand, terms = await worker(ledger), Terms(concurrency=[Concurrency(key="db", limit=2)])
    for _n in range(2):
        await running(ledger, hand, revision(terms=terms))
    return await queued(ledger, terms)


@case("behind_others", "There is one run before it.", "one")
async def _(ledger: Ledger) -> str:
    await worker(ledger)
    await queued(ledger)
    return await queued(ledger)


@case("behind_others", "There are 3 runs before it.", "several")
async def _(ledger: Ledger) -> str:
    await worker(ledger)
    await ledger.submit(revision(), 3)
    return await queued(ledger)


@case("next", "It is next and will be placed in a moment.")
async def _(ledger: Ledger) -> str:
    await worker(ledger)
    return await queued(ledger)


@case("revision_unavailable", "The task revision that it is to execute cannot be read.", "in the queue")
async def _(ledger: Ledger) -> str:
    await worker(ledger)
    run_id = await queued(ledger)
    await ledger.spoil_revision(run_id)
    return run_id


# -- waiting for somebody or for a time


@case("approval_not_asked", "It needs an approval; the approval service has not confirmed the request yet.")
async def _(ledger: Ledger) -> str:
    return await queued(ledger, HELD)


@case("waiting_approval", "It needs an approval and was not released yet.")
async def _(ledger: Ledger) -> str:
    run_id = await queued(ledger, HELD)
    message, _ = await ledger.database.transact(lambda tx: holding.ring(tx, ledger.revisions))
    assert message is not None
    await ledger.database.transact(lambda tx: holding.acked(tx, [r.order_id for r in message.requests]))
    return run_id


RETRIED = Terms(retry=RetryPolicy(max_attempts=2, backoff_base_ms=60_000, jitter_percent=0))


@case("retry_wait", "Attempt 1 of 2 ended (process_exit); the pause before the next is not over.")
async def _(ledger: Ledger) -> str:
    hand = await worker(ledger)
    run_id, attempt_id = await running(ledger, hand, revision(terms=RETRIED))
    await hand.report(attempt_id, kind="ended", exit_code=4)
    return run_id


@case("retry_due", "Attempt 1 of 2 ended (process_exit); the pause before the next is over.")
async def _(ledger: Ledger) -> str:
    run_id = await CASES["retry_wait"][2](ledger)
    await ledger.later(60_000)
    return run_id


# -- in work


async def _placed(ledger: Ledger, **order: Any) -> tuple[Hand, str]:
    hand = await worker(ledger)
    (run,) = await ledger.submit(revision(), **order)
    hand.take(await ledger.place())
    return hand, run.id


@case("offered", "It was offered to worker w1 and not started yet.")
async def _(ledger: Ledger) -> str:
    return (await _placed(ledger))[1]


@case("offer_not_taken", "It was offered to worker w1 2 times and not taken yet.")
async def _(ledger: Ledger) -> str:
    _, run_id = await _placed(ledger)
    await ledger.later(2_000)
    assert await ledger.reoffer()
    return run_id


@case("offer_lapsed", "Worker w1 did not take it within the time of its lease.")
async def _(ledger: Ledger) -> str:
    _, run_id = await _placed(ledger)
    await ledger.later(15_000)
    return run_id


@case("not_due", "It lies ready at worker w1; its time has not come.")
async def _(ledger: Ledger) -> str:
    return (await _placed(ledger, not_before_ms=2**52))[1]


@case("starting", "Worker w1 may start it now.")
async def _(ledger: Ledger) -> str:
    return (await started(ledger, await worker(ledger)))[0]


@case("running", "It runs on worker w1.")
async def _(ledger: Ledger) -> str:
    return (await running(ledger, await worker(ledger)))[0]


@case("silent_worker", "It is in the hands of worker w1, which has not renewed its lease for a while.", "running")
async def _(ledger: Ledger) -> str:
    run_id, _ = await running(ledger, await worker(ledger))
    await ledger.later(12_000)
    return run_id


@case("silent_worker", "It is in the hands of worker w1, which has not renewed its lease for a while.", "starting")
async def _(ledger: Ledger) -> str:
    run_id, _ = await started(ledger, await worker(ledger))
    await ledger.later(12_000)
    return run_id


@case("lease_over", "Worker w1 let its lease run out, and what became of the process is not known.")
async def _(ledger: Ledger) -> str:
    run_id, _ = await running(ledger, await worker(ledger))
    await ledger.later(30_000)
    return run_id


@case("listening", "The lease of worker w1 is over, but the dispatcher was away itself and could not hear it.")
async def _(ledger: Ledger) -> str:
    return await CASES["lease_over"][2](ledger)


@case("inconsistent", "The ledger has no attempt in work for it.")
async def _(ledger: Ledger) -> str:
    _, run_id = await _placed(ledger)
    await execute(ledger, "DELETE FROM run_dispatch_leases WHERE run_id = $1", run_id)
    return run_id


# -- on its way to its end


@case("ending", "Somebody cancelled it; nothing of it runs.")
async def _(ledger: Ledger) -> str:
    run_id = await queued(ledger)
    await execute(ledger, "UPDATE runs SET cancel_requested_at_ms = 1, cancel_reason = 'user' WHERE id = $1", run_id)
    return run_id


@case("cancel_undelivered", "Somebody cancelled it; worker w1 is being told.")
async def _(ledger: Ledger) -> str:
    run_id, _ = await running(ledger, await worker(ledger))
    await ledger.cancel(run_id)
    return run_id


@case("cancel_delivered", "Somebody cancelled it; worker w1 was told and has not proved that the process tree is gone.")
async def _(ledger: Ledger) -> str:
    run_id = await CASES["cancel_undelivered"][2](ledger)
    await ledger.deliver()
    return run_id


@case("cancel_unheard", "Somebody cancelled it; worker w1 was told, but is not heard.", "silent")
async def _(ledger: Ledger) -> str:
    run_id = await CASES["cancel_delivered"][2](ledger)
    await ledger.later(12_000)
    return run_id


@case("cancel_unheard", "Its time is over; worker w1 was told, but is not heard.", "its own time")
async def _(ledger: Ledger) -> str:
    run_id, _ = await running(ledger, await worker(ledger))
    await ledger.cancel(run_id, "timeout")
    await ledger.deliver()
    await ledger.later(40_000)
    return run_id


@case("cancel_blocked", "Somebody cancelled it; worker w1 was told 64 times and has not proved the end.")
async def _(ledger: Ledger) -> str:
    run_id = await CASES["cancel_delivered"][2](ledger)
    for _n in range(cancel.DELIVERIES_MOST):
        await ledger.later(60_000)
        await ledger.deliver()
    return run_id


# -- ended


def _reported(**body: Any) -> Scene:
    async def scene(ledger: Ledger) -> str:
        hand = await worker(ledger)
        run_id, attempt_id = await started(ledger, hand)
        await hand.report(attempt_id, **body)
        return run_id

    return scene


case("succeeded", "Its process ended with code 0.")(_reported(kind="ended", exit_code=0))
case("process_exit", "The process ended with code 9.", "code")(_reported(kind="ended", exit_code=9))
case("process_exit", "The process was ended by signal 9.", "signal")(_reported(kind="ended", signal=9))
case("executor_start_failed", "Its process could not be started. There is no /opt/x.")(
    _reported(kind="start_failed", error_summary="There is no /opt/x.")
)
case("context_unavailable", "Its secrets were not delivered in time.")(
    _reported(kind="not_started", error_code="context_unavailable")
)
case("disk_full", "There is no room.", "other end")(
    _reported(kind="not_started", error_code="disk_full", error_summary="There is no room.")
)
case("process_vanished", "Its process was gone without an exit code.")(_reported(kind="vanished"))
case("cancelled_by_shutdown", "It was ended with the platform.")(
    _reported(kind="ended", signal=15, stopped_for="shutdown")
)
case("cancelled_by_policy", "A rule ended it.")(_reported(kind="ended", signal=15, stopped_for="policy"))
case("run_timeout", "Its time was over and its process tree was ended.")(
    _reported(kind="ended", signal=15, stopped_for="timeout")
)


@case("not_started", "Its worker did not get to start it in time.")
async def _(ledger: Ledger) -> str:
    hand = await worker(ledger)
    run_id = await queued(ledger)
    for _n in range(16):
        hand.take(await ledger.place())
        attempt_id = (await ledger.run(run_id)).attempt_id or ""
        await hand.start(attempt_id)
        await hand.report(attempt_id, kind="not_started")
        await ledger.later(60_000)
        await ledger.wake_retries()
        await hand.beat()
    return run_id


@case("worker_lost", "Its worker stopped renewing the lease, and what became of the process is not known.")
async def _(ledger: Ledger) -> str:
    run_id, _ = await running(ledger, await worker(ledger))
    await ledger.later(30_000)
    await ledger.reap_all()
    return run_id


@case(
    "worker_lost",
    "Its worker stopped renewing the lease, and what became of the process is not known."
    " A receipt that came later tells how it ended.",
    "with a late receipt",
)
async def _(ledger: Ledger) -> str:
    hand = await worker(ledger)
    run_id, attempt_id = await running(ledger, hand)
    await ledger.later(30_000)
    await ledger.reap_all()
    await hand.report(attempt_id, kind="ended", exit_code=0)
    return run_id


@case("cancelled_by_user", "Somebody cancelled it.")
async def _(ledger: Ledger) -> str:
    run_id = await queued(ledger)
    await ledger.cancel(run_id)
    return run_id


@case("queue_timeout", "It was not started within its queue time.")
async def _(ledger: Ledger) -> str:
    run_id = await queued(ledger, Terms(queue_timeout_ms=5_000))
    await ledger.database.transact(recovery.end_unplaced)
    assert (await ledger.run(run_id)).status == "queued"
    await ledger.later(5_000)
    await ledger.database.transact(recovery.end_unplaced)
    (attempt,) = await ledger.attempts(run_id)
    assert attempt.status == "cancelled"
    return run_id


@case("approval_expired", "Nobody approved it in time.")
async def _(ledger: Ledger) -> str:
    run_id = await queued(ledger, Terms(needs_approval=True, approval_ttl_ms=60_000))
    await ledger.later(121_000)
    await ledger.database.transact(recovery.end_unapproved)
    assert (await ledger.run(run_id)).status == "timed_out"
    return run_id


@case("approval_rejected", "Its approval was rejected or withdrawn.")
async def _(ledger: Ledger) -> str:
    run_id = await queued(ledger, HELD)
    hold = (await ledger.database.read(lambda tx: holds.read(tx, [run_id])))[run_id]
    question = RunRelease(
        dispatch_id=new_id(), run=run_id, project="default", outcome="rejected", approval_id=run_id,
        action_digest=hold.action_digest,
    )  # fmt: skip
    await ledger.database.transact(lambda tx: holding.release(tx, ledger.revisions, question))
    return run_id


@case("overlap_skipped", "Another run of this task was not over when it came in, and the task skips then.")
async def _(ledger: Ledger) -> str:
    await queued(ledger, SKIP)
    return await queued(ledger, SKIP)


@case("overlap_queue_full", "As many runs of this task as may wait were waiting already.")
async def _(ledger: Ledger) -> str:
    terms = Terms(overlap=Overlap(policy="queue", limit=1))
    await queued(ledger, terms)
    return await queued(ledger, terms)


@case("overlap_replaced", "A newer run of this task took its place.")
async def _(ledger: Ledger) -> str:
    first, _ = await ledger.submit(revision(terms=REPLACE), 2)
    return first.id


@case("revision_unavailable", "The task revision that it was to execute could not be read.", "at its retry")
async def _(ledger: Ledger) -> str:
    run_id = await CASES["retry_wait"][2](ledger)
    await ledger.spoil_revision(run_id)
    await ledger.later(60_000)
    await ledger.wake_retries()
    return run_id


@pytest.mark.parametrize("name", CASES)
async def test_each_cause(ledger: Ledger, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cause, sentence, scene = CASES[name]
    found = await explain(ledger, await scene(ledger), listening=cause == "listening")
    assert (found.cause, found.sentence) == (cause, sentence)
    assert found.next_step.endswith((".", ")"))
    if found.run.status == "queued" and cause != "ending":
        assert found.run.waiting_reason == sentence
    answer = msgspec.json.decode(msgspec.json.encode(found))
    monkeypatch.setenv("QL3_LANG", "en")
    assert explained(answer) == (sentence, found.next_step)
    monkeypatch.setenv("QL3_LANG", "zh")
    for words in explained(answer):
        assert words.endswith("。"), words
        assert "None" not in words
        assert words.isascii() is False


def causes_of_the_code() -> tuple[set[str], set[str]]:
    """Causes that stand in the dispatcher's code: for which a run waits or is in work, and by which it ended."""
    waits: set[str] = set()
    ends: set[str] = set()
    for name in ("explain", "waiting"):
        tree = ast.parse((ROOT / "services" / "dispatcher" / f"{name}.py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("Reason", "Why"):
                first = node.args[0]
                if isinstance(first, ast.Constant):
                    waits.add(str(first.value))
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "_END_WORDS":
                assert isinstance(node.value, ast.Dict)
                ends |= {str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)}
    return waits, ends


def test_every_cause_of_the_code_has_a_case_and_chinese_words() -> None:
    waits, ends = causes_of_the_code()
    known = {cause for cause, _, _ in CASES.values()}
    assert (waits | ends) - known == set()
    assert (waits | ends) - set(WORDS_ZH) == set()
    assert set(WORDS_ZH) - known == set(), "words for what no case shows"


async def test_a_queue_timeout_ends_with_the_start(ledger: Ledger, hand: Hand) -> None:
    run_id, _ = await started(ledger, hand, revision(terms=Terms(queue_timeout_ms=5_000)))
    await ledger.later(6_000)
    await ledger.database.transact(recovery.end_unplaced)
    assert (await ledger.run(run_id)).status == "dispatching"


async def test_a_blocked_cancel_is_delivered_again_when_somebody_asks_again(ledger: Ledger) -> None:
    run_id = await CASES["cancel_blocked"][2](ledger)
    assert "run.cancel_dispatch_blocked" in await ledger.events(run_id)
    assert await ledger.deliver() == []
    assert (await ledger.cancel(run_id)).deliver
    assert await ledger.deliver()


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
