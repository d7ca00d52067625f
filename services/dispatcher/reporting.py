"""Reports in the ledger: a batch of signed reports settles attempts in one transaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from schemas.workers import AttemptReport, SessionFence
from services.dispatcher import attempt as attempts
from services.dispatcher import fences
from services.dispatcher.lease import Held
from services.dispatcher.records import Case, Refused
from services.dispatcher.store import cases
from services.dispatcher.store.cases import Change
from services.kit.database import Transaction


class Sent(NamedTuple):
    """One report, the session that it names, and the worker on whose subject it came."""

    speaker: str
    fence: SessionFence
    report: AttemptReport


class Settled(NamedTuple):
    """What a batch did: orders to acknowledge by worker, how many attempts ended, and whether a retry waits."""

    acks: dict[str, list[str]]
    ended: int
    retrying: bool


async def settle(tx: Transaction, sent: Sequence[Sent], chance: Callable[[], float]) -> Settled:
    """Applies a batch of at most 256 reports.

    A report is acknowledged when it is committed, was committed before, or can never be: about a run that is not there,
    or of somebody who does not hold the attempt. One from a replaced session is left open: the same worker's new
    session sends it again under its own fence.
    """
    now = await tx.now_ms()
    before = await cases.load(tx, {item.report.run_id for item in sent})
    work = _Batch(before, now, chance)
    late: list[Sent] = []
    for item in sent:
        case = work.held.get(item.report.run_id)
        if case is None:
            work.ack(item)
        elif case.attempt is not None and case.attempt.id == item.report.attempt_id:
            work.apply(item, case)
        else:
            late.append(item)
    changes = [Change(before[run_id], work.held[run_id]) for run_id in sorted(work.touched)]
    work.held |= {case.run.id: case for case in await cases.write(tx, changes)}
    if late:
        await _settle_late(tx, work, late)
    await fences.record(tx, work.rejected, work.held)
    retrying = any(work.held[run_id].run.status == "retry_wait" for run_id in work.touched)
    return Settled(work.acks, work.ended, retrying)


async def _settle_late(tx: Transaction, work: _Batch, late: Sequence[Sent]) -> None:
    # About attempts that are not their run's latest any more: all they can add is a receipt.
    found = await cases.load_attempts(tx, {item.report.attempt_id for item in late})
    for item in late:
        held = found.get(item.report.attempt_id)
        now_run = work.held[item.report.run_id]
        if held is None or held[0].run_id != item.report.run_id:
            work.ack(item)
            continue
        case = Case(now_run.run, held[0], held[1])
        after = work.judged(item, case)
        if after is None:
            continue
        (written,) = await cases.write(tx, [Change(case, after)])
        assert written.attempt is not None
        found[item.report.attempt_id] = (written.attempt, written.lease)
        work.held[item.report.run_id] = replace(now_run, run=written.run)


class _Batch:
    """Reports of one transaction."""

    def __init__(self, held: dict[str, Case], now: int, chance: Callable[[], float]) -> None:
        self.held = dict(held)
        self.touched: set[str] = set()
        self.acks: dict[str, list[str]] = {}
        self.rejected: list[fences.Rejection] = []
        self.ended = 0
        self._now = now
        self._chance = chance

    def ack(self, item: Sent) -> None:
        """The sender need not send it again."""
        self.acks.setdefault(item.speaker, []).append(item.report.order_id)

    def apply(self, item: Sent, case: Case) -> None:
        """One report about its run's latest attempt."""
        after = self.judged(item, case)
        if after is None:
            return
        self.held[case.run.id] = after
        self.touched.add(case.run.id)
        self.ended += after.attempt is not None and after.attempt.finished_at_ms is not None

    def judged(self, item: Sent, case: Case) -> Case | None:
        """The case after one report; None when it changes nothing or is refused, which is noted."""
        speaker, fence, report = item
        assert case.attempt is not None
        try:
            if speaker != fence.worker or not attempts.is_authentic(case.attempt, report):
                raise Refused("forbidden", "attempts.report")
            after = attempts.settle(case, fence, report, attempts.read_body(report), self._now, self._chance())
        except Refused as refusal:
            held = Held(report.attempt_id, report.lease_generation)
            self.rejected.append(fences.Rejection(report.run_id, refusal.code, refusal.what, held, speaker))
            if refusal.code != "session_replaced":
                self.ack(item)
            return None
        self.ack(item)
        return after
