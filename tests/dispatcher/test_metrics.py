"""What a dispatcher counts: runs by how they ended, and attempts of which nobody knows that."""

from __future__ import annotations

from tests.dispatcher.house import Hand, Ledger, revision, running, started
from tests.metrics import grown, now

SETTLED = "ql3_runs_settled_total"


async def test_ends_are_counted_once(ledger: Ledger, hand: Hand) -> None:
    before = await now()
    for code in (0, 0, 3):
        _, attempt_id = await started(ledger, hand)
        await hand.report(attempt_id, kind="ended", exit_code=code)
        await hand.report(attempt_id, kind="ended", exit_code=code)
    (waiting,) = await ledger.submit(revision())
    await ledger.cancel(waiting.id)
    after = await now()
    ends = {"succeeded": 2, "failed": 1, "cancelled": 1, "timed_out": 0}
    assert {end: grown(before, after, SETTLED, end) for end in ends} == ends
    assert grown(before, after, "ql3_attempts_lost_total") == 0


async def test_a_lost_attempt_is_counted_once(ledger: Ledger, hand: Hand) -> None:
    before = await now()
    run_id, attempt_id = await running(ledger, hand)
    await ledger.later(31_000)
    await ledger.reap_all()
    assert (await ledger.run(run_id)).error_code == "worker_lost"
    await hand.report(attempt_id, kind="ended", exit_code=0)
    after = await now()
    assert grown(before, after, "ql3_attempts_lost_total") == 1
    assert grown(before, after, SETTLED, "failed") == 1
