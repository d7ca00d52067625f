"""Each refusal that stands in the dispatcher's code, provoked: by module and code."""

from __future__ import annotations

import ast
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from schemas import proof
from schemas.errors import REGISTRY, Ql3Error
from schemas.paging import Page
from schemas.runs import DispatchClose, LimitList, RunCancel, RunList, RunRelease, RunRetry
from schemas.tasks import Terms
from schemas.workers import AttemptReport, LeaseVerify, ReportBody, StartAttempts, StartItem
from services.dispatcher import attempt as attempts
from services.dispatcher import barrier, cancelling, holding, limiting, reading, retrying
from services.dispatcher import lease as leasing
from services.dispatcher.records import Case, Event, Refused, move_run
from services.dispatcher.run import end_unstarted
from services.dispatcher.store import holds
from services.kit.ids import new_id
from tests.dispatcher.house import ADA, Hand, Ledger, order, revision, running, started

ROOT = Path(__file__).resolve().parents[2]
HELD = Terms(needs_approval=True)

Scene = Callable[[Ledger], Awaitable[str]]
"""Provokes a refusal and answers its code, as the one who asked gets it or as the run's events keep it."""
SCENES: Final[dict[tuple[str, str], list[Scene]]] = {}
ON_THE_BUS: Final = {("service", "forbidden"), ("service", "unavailable")}
"""These are in test_service.py, for they need the bus."""


def refusal(module: str, code: str) -> Callable[[Scene], Scene]:
    def keep(scene: Scene) -> Scene:
        SCENES.setdefault((module, code), []).append(scene)
        return scene

    return keep


def code_of(raised: pytest.ExceptionInfo[Any]) -> str:
    return raised.value.code


async def recorded(ledger: Ledger, run_id: str) -> str:
    """The code of the refused write that the run's last event tells of."""
    rows = await ledger.rows("SELECT type, payload FROM run_events WHERE run_id = $1 ORDER BY sequence", run_id)
    assert rows[-1]["type"] == "attempt.fence_refused"
    acts = await ledger.rows("SELECT action FROM audit_events WHERE action = $1", _said(rows[-1]["payload"])["what"])
    assert acts, "a refused fence is in the audit"
    return _said(rows[-1]["payload"])["code"]


def _said(payload: Any) -> dict[str, Any]:
    return msgspec.json.decode(payload) if isinstance(payload, str) else payload


async def hand_of(ledger: Ledger, name: str = "w1") -> Hand:
    hand = Hand(ledger, name)
    await hand.register()
    return hand


# -- the start barrier


@refusal("attempt", "invalid_transition")
async def _(ledger: Ledger) -> str:
    hand = await hand_of(ledger)
    _, attempt_id = await started(ledger, hand)
    hand.key = b"another"
    return (await hand.start(attempt_id)).refused[0].code


@refusal("barrier", "not_found")
async def _(ledger: Ledger) -> str:
    hand = await hand_of(ledger)
    unknown = StartItem(attempt_id=new_id(), offer_id=new_id(), lease_generation=1, token_digest="0" * 64)
    question = StartAttempts(fence=hand.fence, attempts=[unknown])
    (answer,) = await ledger.database.transact(lambda tx: barrier.start(tx, ledger.revisions, [question]))
    return answer.refused[0].code


@refusal("lease", "fence_rejected")
async def _(ledger: Ledger) -> str:
    hand = await hand_of(ledger)
    (run,) = await ledger.submit(revision())
    hand.take(await ledger.place())
    await ledger.later(15_000)
    refused = (await hand.start(run.attempt_id or "")).refused[0].code
    assert await recorded(ledger, run.id) == refused
    return refused


@refusal("lease", "session_replaced")
async def _(ledger: Ledger) -> str:
    hand = await hand_of(ledger)
    (run,) = await ledger.submit(revision())
    stale = hand.fence
    await hand.register()
    hand.take(await ledger.place())
    return (await hand.start(run.attempt_id or "", fence=stale)).refused[0].code


@refusal("lease", "invalid_transition")
async def _(ledger: Ledger) -> str:
    run_id, _attempt = await started(ledger, await hand_of(ledger))
    with pytest.raises(Refused) as refused:
        leasing.release_unstarted(await ledger.case(run_id), "expired", 1)
    return code_of(refused)


# -- secrets at the start


async def _verify(ledger: Ledger, hand: Hand, attempt_id: str) -> str:
    question = LeaseVerify(
        fence=hand.fence,
        attempt_id=attempt_id,
        lease_generation=1,
        sequence=0,
        proof=proof.proof(hand.digest(attempt_id), attempt_id, 0, proof.CONTEXT_BODY),
    )
    with pytest.raises(Ql3Error) as refused:
        await ledger.database.read(lambda tx: barrier.verify(tx, ledger.revisions, question))
    return code_of(refused)


@refusal("barrier", "fence_rejected")
async def _(ledger: Ledger) -> str:
    hand = await hand_of(ledger)
    _, attempt_id = await running(ledger, hand)  # behind the barrier: secrets are not handed out any more
    return await _verify(ledger, hand, attempt_id)


@refusal("barrier", "fence_rejected")
async def _(ledger: Ledger) -> str:
    hand = await hand_of(ledger)
    run_id, attempt_id = await started(ledger, hand)
    await ledger.cancel(run_id)
    return await _verify(ledger, hand, attempt_id)


@refusal("barrier", "revision_unavailable")
async def _(ledger: Ledger) -> str:
    hand = await hand_of(ledger)
    run_id, attempt_id = await started(ledger, hand)
    await ledger.spoil_revision(run_id)
    return await _verify(ledger, hand, attempt_id)


# -- beats


@refusal("sessions", "not_found")
async def _(ledger: Ledger) -> str:
    with pytest.raises(Ql3Error) as refused:
        await Hand(ledger).beat()
    return code_of(refused)


@refusal("sessions", "session_replaced")
async def _(ledger: Ledger) -> str:
    hand = await hand_of(ledger)
    stale = hand.fence
    await hand.register()
    with pytest.raises(Ql3Error) as refused:
        await hand.beat(fence=stale)
    return code_of(refused)


@refusal("sessions", "fence_rejected")
async def _(ledger: Ledger) -> str:
    hand = await hand_of(ledger)
    run_id, attempt_id = await running(ledger, hand)
    hand.key = b"another"
    refused = (await hand.beat(attempt_id)).refused[0].code
    assert await recorded(ledger, run_id) == refused
    return refused


@refusal("lease", "not_found")
async def _(ledger: Ledger) -> str:
    hand = await hand_of(ledger)
    _, attempt_id = await running(ledger, hand)
    hand.offers[new_id()] = hand.offers[attempt_id]
    return (await hand.beat(list(hand.offers)[-1])).refused[0].code


# -- reports


@refusal("reporting", "forbidden")
async def _(ledger: Ledger) -> str:
    hand = await hand_of(ledger)
    run_id, attempt_id = await running(ledger, hand)
    hand.key = b"another"
    await hand.report(attempt_id, kind="ended", exit_code=0)
    return await recorded(ledger, run_id)


@refusal("reporting", "forbidden")
async def _(ledger: Ledger) -> str:
    """Signed well under the fence of another worker, but on one's own subject."""
    hand = await hand_of(ledger)
    run_id, attempt_id = await running(ledger, hand)
    thief = await hand_of(ledger, "thief")
    report = hand.signed(attempt_id, kind="ended", exit_code=0)
    assert (await thief.send(report, fence=hand.fence)).acks == {"thief": [report.order_id]}
    assert (await ledger.run(run_id)).status == "running"
    assert await ledger.rows("SELECT 1 FROM run_events WHERE run_id = $1 AND actor_id = 'thief'", run_id)
    return await recorded(ledger, run_id)


@refusal("attempt", "message_invalid")
async def _(ledger: Ledger) -> str:
    hand = await hand_of(ledger)
    run_id, attempt_id = await running(ledger, hand)
    body = b'{"kind":"unheard of"}'
    report = AttemptReport(
        order_id=new_id(),
        attempt_id=attempt_id,
        run_id=run_id,
        lease_generation=1,
        sequence=9,
        proof=proof.proof(hand.digest(attempt_id), attempt_id, 9, body),
        body=msgspec.Raw(body),
    )
    assert (await hand.send(report)).acks["w1"] == [report.order_id]
    return await recorded(ledger, run_id)


@refusal("attempt", "session_replaced")
async def _(ledger: Ledger) -> str:
    hand = await hand_of(ledger)
    run_id, attempt_id = await running(ledger, hand)
    stale = hand.fence
    await hand.register(journal=[hand.journal(attempt_id, "running")])
    assert (await hand.send(hand.signed(attempt_id, kind="ended", exit_code=0), fence=stale)).acks == {}
    return await recorded(ledger, run_id)


@refusal("attempt", "fence_rejected")
async def _(ledger: Ledger) -> str:
    """Another worker that came to know the token's digest still does not hold the lease."""
    hand = await hand_of(ledger)
    run_id, attempt_id = await running(ledger, hand)
    thief = await hand_of(ledger, "thief")
    report = hand.signed(attempt_id, kind="ended", exit_code=0)
    assert (await thief.send(report)).acks["thief"] == [report.order_id]
    return await recorded(ledger, run_id)


@refusal("attempt", "not_found")
async def _(ledger: Ledger) -> str:
    hand = await hand_of(ledger)
    run_id, attempt_id = await started(ledger, hand)
    case = await ledger.case(run_id)
    report = hand.signed(attempt_id, kind="ended", exit_code=0)
    with pytest.raises(Refused) as refused:
        attempts.settle(Case(case.run, case.attempt), hand.fence, report, ReportBody(kind="ended"), 1, 0.5)
    return code_of(refused)


@refusal("records", "invalid_transition")
async def _(ledger: Ledger) -> str:
    (run,) = await ledger.submit(revision())
    case = await ledger.case(run.id)
    with pytest.raises(Refused) as refused:
        move_run(case, "succeeded", Event(9, "x"))
    return code_of(refused)


@refusal("run", "invalid_transition")
async def _(ledger: Ledger) -> str:
    """A run whose process may exist is never ended from outside."""
    run_id, _attempt = await started(ledger, await hand_of(ledger))
    case = await ledger.case(run_id)
    with pytest.raises(Refused) as refused:
        end_unstarted(case, "cancelled", 1, error_code=None)
    return code_of(refused)


# -- orders


async def _submitted(ledger: Ledger, *, project: str | None = None, pinned: bool = True, **fields: Any) -> str:
    of = revision()
    one = order(of, **fields) if project is None else order(of, project=project, **fields)
    (outcome,) = await ledger.submit_orders([of] if pinned else [], [one])
    assert outcome.run is None
    return outcome.error or ""


@refusal("submission", "idempotency_conflict")
async def _(ledger: Ledger) -> str:
    await ledger.submit(revision(), idempotency_key="k", inputs={"a": 1})
    return await _submitted(ledger, idempotency_key="k", inputs={"a": 2})


@refusal("submission", "invalid")
async def _(ledger: Ledger) -> str:
    return await _submitted(ledger, project="other")


@refusal("submission", "revision_unavailable")
async def _(ledger: Ledger) -> str:
    return await _submitted(ledger, pinned=False)


@refusal("submission", "conflict")
async def _(ledger: Ledger) -> str:
    dispatch = new_id()
    close = DispatchClose(dispatch_id=dispatch, project="default")
    await ledger.database.transact(lambda tx: holding.close(tx, close))
    return await _submitted(ledger, idempotency_key=dispatch, trigger_type="approved_action")


@refusal("submission", "too_large")
async def _(ledger: Ledger) -> str:
    return await _submitted(ledger, inputs={"text": "x" * 70_000})


# -- decisions about held runs


async def _released(ledger: Ledger, run_id: str, **fields: Any) -> str:
    hold = (await ledger.database.read(lambda tx: holds.read(tx, [run_id]))).get(run_id)
    known = {
        "dispatch_id": new_id(),
        "run": run_id,
        "project": "default",
        "outcome": "approved",
        "approval_id": run_id,
        "action_digest": None if hold is None else hold.action_digest,
    }
    question = RunRelease(**{**known, **fields})
    with pytest.raises(Ql3Error) as refused:
        await ledger.database.transact(lambda tx: holding.release(tx, ledger.revisions, question))
    return code_of(refused)


@refusal("holding", "not_found")
async def _(ledger: Ledger) -> str:
    return await _released(ledger, new_id())


@refusal("holding", "conflict")
async def _(ledger: Ledger) -> str:
    (run,) = await ledger.submit(revision(terms=HELD))
    return await _released(ledger, run.id, action_digest="0" * 64)


@refusal("holding", "conflict")
async def _(ledger: Ledger) -> str:
    one, two = await ledger.submit(revision(terms=HELD), 2)
    hold = (await ledger.database.read(lambda tx: holds.read(tx, [one.id])))[one.id]
    dispatch = new_id()
    question = RunRelease(
        dispatch_id=dispatch, run=one.id, project="default", outcome="approved", approval_id=one.id,
        action_digest=hold.action_digest,
    )  # fmt: skip
    await ledger.database.transact(lambda tx: holding.release(tx, ledger.revisions, question))
    return await _released(ledger, two.id, dispatch_id=dispatch)


@refusal("holding", "revision_unavailable")
async def _(ledger: Ledger) -> str:
    (run,) = await ledger.submit(revision(terms=HELD))
    await ledger.spoil_revision(run.id)
    return await _released(ledger, run.id)


# -- what people ask


async def _cancelled(ledger: Ledger, run_id: str, **fields: Any) -> str:
    question = RunCancel(actor=ADA, project="default", run=run_id, **fields)
    with pytest.raises(Ql3Error) as refused:
        await ledger.database.transact(lambda tx: cancelling.cancel_run(tx, ledger.revisions, question, "allow"))
    return code_of(refused)


@refusal("cancelling", "not_found")
async def _(ledger: Ledger) -> str:
    return await _cancelled(ledger, new_id())


@refusal("cancelling", "invalid")
async def _(ledger: Ledger) -> str:
    (run,) = await ledger.submit(revision())
    return await _cancelled(ledger, run.id, reason="timeout")


async def _retried(ledger: Ledger, run_id: str, new_run_id: str) -> str:
    question = RunRetry(actor=ADA, project="default", run=run_id, new_run_id=new_run_id)
    with pytest.raises(Ql3Error) as refused:
        await ledger.database.transact(lambda tx: retrying.retry(tx, ledger.revisions, question, "allow"))
    return code_of(refused)


@refusal("retrying", "invalid_transition")
async def _(ledger: Ledger) -> str:
    (run,) = await ledger.submit(revision())
    return await _retried(ledger, run.id, new_id())


@refusal("retrying", "conflict")
async def _(ledger: Ledger) -> str:
    ended, other = await ledger.submit(revision(), 2)
    await ledger.cancel(ended.id)
    return await _retried(ledger, ended.id, other.id)


@refusal("reading", "not_found")
async def _(ledger: Ledger) -> str:
    (run,) = await ledger.submit(revision())
    with pytest.raises(Ql3Error) as refused:
        await ledger.database.read(lambda tx: reading.run(tx, ledger.revisions, "other", run.id))
    return code_of(refused)


@refusal("reading", "invalid")
async def _(ledger: Ledger) -> str:
    question = RunList(actor=ADA, project="default", page=Page(cursor="foreign"))
    with pytest.raises(Ql3Error) as refused:
        await ledger.database.read(lambda tx: reading.page(tx, ledger.revisions, question))
    return code_of(refused)


@refusal("limiting", "invalid")
async def _(ledger: Ledger) -> str:
    question = LimitList(actor=ADA, project="default", page=Page(cursor="foreign"))
    with pytest.raises(Ql3Error) as refused:
        await ledger.database.read(lambda tx: limiting.page(tx, question))
    return code_of(refused)


PROVOKED = [(*key, number) for key, scenes in SCENES.items() for number in range(len(scenes))]


@pytest.mark.parametrize(("module", "code", "number"), PROVOKED)
async def test_each_refusal(ledger: Ledger, module: str, code: str, number: int) -> None:
    assert await SCENES[module, code][number](ledger) == code


def refusals_of_the_code() -> set[tuple[str, str]]:
    """Module and code of every refusal that is written out in the dispatcher."""
    found: set[tuple[str, str]] = set()
    for path in (ROOT / "services" / "dispatcher").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                given = node.args[:1] if node.func.id in ("Refused", "Ql3Error") else []
                if node.func.id in ("Outcome", "Refusal"):
                    given = [part.value for part in node.keywords if part.arg in ("error", "code")]
                found |= {(path.stem, str(one.value)) for one in given if isinstance(one, ast.Constant)}
    return found


def test_every_refusal_of_the_code_is_provoked() -> None:
    assert refusals_of_the_code() == set(SCENES) | ON_THE_BUS
    assert {code for _, code in SCENES} <= set(REGISTRY)
