"""Executions and recoveries on real databases: leases, fences, the barrier, evidence, and a person's word."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from schemas.approvals import ActionList, ActionRead, ActionRecover, ApprovalCreate, ApprovalDecide
from schemas.errors import Ql3Error
from schemas.identity import Actor, Subject
from services.approval import executions
from services.approval.asking import Asking
from services.approval.executor import make_receipt
from services.approval.handlers.plans import Plans
from services.approval.handlers.port import Outcome
from services.approval.handlers.role_bind import RoleBindHandler
from services.approval.reconciler import Reconciler
from services.approval.recovery import Finding
from services.approval.store import actions, projects
from services.approval.store import recovery as controls
from services.approval.store import requests as rows
from services.kit.database import CheckViolation, Statement
from services.kit.ids import new_id
from tests.approval.conftest import Works, actor, console
from tests.fixtures_database import shift_clock

DONE = Outcome("succeeded", "done", "run", "r")


async def refused(work: Any) -> Ql3Error:
    """The error that `work` ends with."""
    with pytest.raises(Ql3Error) as error:
        await work
    return error.value


async def lapse(works: Works) -> None:
    """Every lease of now is over."""
    await shift_clock(works.database, executions.LEASE_MS)


# -- before the barrier


async def test_one_step_carries_an_approval_to_its_receipt(works: Works) -> None:
    request_id = await works.approved()
    await works.executor.step()
    dispatch = await works.dispatch_of(request_id)
    execution = await works.execution(dispatch)
    assert (execution.status, execution.last_result_code) == ("succeeded", "done")
    assert works.receiver.effects == [dispatch.id]
    assert (await works.control(dispatch)).status == "resolved"
    receipt = await works.database.read(lambda tx: actions.receipt(tx, dispatch.id))
    assert receipt is not None
    # The digest is computed anew from the row.
    before = execution
    before = msgspec.structs.replace(
        execution, attempt_count=receipt.execution_attempt, version=receipt.execution_version,
        started_at_ms=receipt.started_at_ms,
    )  # fmt: skip
    after = msgspec.structs.replace(execution, updated_at_ms=receipt.finished_at_ms)
    again = make_receipt(dispatch, before, after, Outcome("succeeded", "done", "run", dispatch.binding.action_ref))
    assert again == receipt


async def test_a_claim_is_one_holders(works: Works) -> None:
    dispatch = await works.dispatched()
    other = Works(works.database, owner="two")
    lease = await works.leased(dispatch, "t")
    assert await other.executor.claim(dispatch.id, "u") is None
    # The same owner and token again is the same lease.
    again = await works.executor.claim(dispatch.id, "t")
    assert again is not None
    assert again.version == lease.version
    await lapse(works)
    taken = await other.executor.claim(dispatch.id, "u")
    assert taken is not None
    assert taken.attempt_count == 2
    # Whoever held it before changes nothing any more.
    assert (await refused(works.executor.start(dispatch, lease))).code == "fence_rejected"
    assert (await refused(works.executor.renew(dispatch.id, lease))).code == "fence_rejected"
    assert (await refused(works.executor.release(dispatch.id, lease, "c", retry=True))).code == "fence_rejected"


async def test_a_lapsed_lease_starts_nothing(works: Works) -> None:
    dispatch = await works.dispatched()
    lease = await works.leased(dispatch)
    await lapse(works)
    assert (await refused(works.executor.start(dispatch, lease))).code == "fence_rejected"
    renewed = await works.executor.renew(dispatch.id, lease)
    await works.executor.start(dispatch, lease._replace(version=renewed.version))


async def test_a_started_action_answers_the_same_start_again(works: Works) -> None:
    dispatch = await works.dispatched()
    lease = await works.leased(dispatch)
    first = await works.executor.start(dispatch, lease)
    assert await works.executor.start(dispatch, lease) == first
    control = await works.control(dispatch)
    assert (control.status, control.version, control.next_scan_at_ms) == ("armed", 0, first.lease_expires_at_ms)
    forged = dispatch._replace(binding=msgspec.structs.replace(dispatch.binding, action_digest="b" * 64))
    assert (await refused(works.executor.start(forged, lease))).code == "conflict"


@pytest.mark.parametrize(
    ("set_up", "status", "code"),
    [
        ({"blind": True}, "retry_wait", "handler_inspection_failed"),
        ({"verdict": "retry"}, "retry_wait", "told_so"),
        ({"verdict": "blocked"}, "blocked", "told_so"),
        ({"digest": "b" * 64}, "blocked", "action_digest_mismatch"),
        ({"broken": True}, "blocked", "handler_failed_after_start"),
    ],
)
async def test_what_an_inspection_leads_to(works: Works, set_up: Any, status: str, code: str) -> None:
    for name, value in set_up.items():
        setattr(works.receiver, name, value)
    dispatch = await works.dispatched()
    await works.executor.run(dispatch.id, {})
    execution = await works.execution(dispatch)
    assert (execution.status, execution.last_result_code) == (status, code)
    assert works.receiver.effects == []
    # A run whose release will never come is told so; one that is tried again is not.
    ended = await works.database.read(lambda tx: rows.ended(tx, dispatch.approval_id))
    assert ended == (status == "blocked")


async def test_an_unknown_action_waits_for_a_version_that_knows_it(works: Works) -> None:
    dispatch = await works.dispatched()
    works.executor._handlers = {}  # type: ignore[reportPrivateUsage]
    await works.executor.run(dispatch.id, {})
    execution = await works.execution(dispatch)
    assert (execution.status, execution.last_result_code) == ("retry_wait", "handler_unavailable")


async def test_attempts_before_the_barrier_are_bounded(works: Works) -> None:
    works.receiver.blind = True
    dispatch = await works.dispatched()
    for _ in range(executions.MAX_ATTEMPTS):
        await works.executor.run(dispatch.id, {})
        await shift_clock(works.database, executions.RETRY_MAX_MS)
    execution = await works.execution(dispatch)
    assert (execution.status, execution.attempt_count) == ("blocked", executions.MAX_ATTEMPTS)
    works.receiver.blind = False
    await works.executor.run(dispatch.id, {})
    assert works.receiver.effects == []


async def test_an_outage_uses_no_attempt_up(works: Works) -> None:
    works.receiver.away = True
    dispatch = await works.dispatched()
    for _ in range(executions.MAX_ATTEMPTS + 1):
        assert await works.executor.run(dispatch.id, {}) is False
    assert (await works.execution(dispatch)).attempt_count == 0
    works.receiver.away = False
    assert await works.executor.run(dispatch.id, {})
    assert works.receiver.effects == [dispatch.id]


@pytest.mark.parametrize("refusal", ["internal_error", "secret_unavailable", "policy_fence_conflict", "capacity"])
async def test_a_passing_failure_behind_the_barrier_is_not_the_end(
    works: Works, monkeypatch: pytest.MonkeyPatch, refusal: str
) -> None:
    monkeypatch.setattr("services.approval.executor.ASK_AGAIN_S", (0.0, 0.0))
    works.executor._stopping.clear()  # type: ignore[reportPrivateUsage]
    works.receiver.refuses = [refusal, refusal]
    dispatch = await works.dispatched()
    await works.executor.run(dispatch.id, {})
    assert (await works.execution(dispatch)).status == "succeeded"
    assert works.receiver.effects == [dispatch.id]


async def test_a_refusal_is_the_end(works: Works) -> None:
    works.receiver.refuses = ["version_conflict"]
    dispatch = await works.dispatched()
    await works.executor.run(dispatch.id, {})
    execution = await works.execution(dispatch)
    assert (execution.status, execution.last_result_code) == ("failed", "version_conflict")


async def test_nobody_is_claimed_for_while_the_receiver_is_away(works: Works) -> None:
    works.receiver.needs = "dispatcher"
    dispatch = await works.dispatched()
    assert await works.executor.run(dispatch.id, {"dispatcher": False}) is False
    assert (await works.execution(dispatch)).attempt_count == 0
    assert await works.executor.run(dispatch.id, {"dispatcher": True})
    assert works.receiver.effects == [dispatch.id]


# -- behind the barrier


async def test_what_began_is_never_claimed_again(works: Works) -> None:
    dispatch, _ = await works.started()
    await lapse(works)
    assert await works.executor.claim(dispatch.id, "u") is None
    await works.executor.step()
    assert works.receiver.effects == []
    seen = await works.reconciler.get(ActionRead(actor=console(), project="default", dispatch=dispatch.id))
    assert seen.action.status == "recovery_required"


async def test_a_renewal_behind_the_barrier_arms_the_recovery_anew(works: Works) -> None:
    dispatch, lease = await works.started()
    await lapse(works)
    claimed = await works.reconciler.claim(dispatch.id, "r")
    assert claimed is not None
    renewed = await works.executor.renew(dispatch.id, lease)
    control = await works.control(dispatch)
    assert (control.status, control.lease_owner, control.execution_version) == ("armed", None, renewed.version)
    late = works.reconciler.note(dispatch, "r", Finding("missing", "c"))
    assert (await refused(late)).code == "fence_rejected"
    await works.executor.complete(dispatch, lease._replace(version=renewed.version), DONE)


async def test_a_late_owner_whom_nobody_superseded_completes(works: Works) -> None:
    dispatch, lease = await works.started()
    await lapse(works)
    done = await works.executor.complete(dispatch, lease, DONE)
    assert done.status == "succeeded"
    assert (await refused(works.executor.complete(dispatch, lease, Outcome("failed", "x")))).code == "fence_rejected"


async def test_a_lost_answer_is_recovered_by_evidence_and_not_done_again(works: Works) -> None:
    works.receiver.lose_answers = True
    dispatch = await works.dispatched()
    await works.executor.run(dispatch.id, {})
    assert (await works.execution(dispatch)).status == "executing"
    await works.reconciler.step()
    assert (await works.execution(dispatch)).status == "executing"
    await lapse(works)
    await works.reconciler.step()
    execution, control = await works.execution(dispatch), await works.control(dispatch)
    assert (execution.status, execution.last_result_code) == ("succeeded", "seen")
    assert (control.status, control.last_finding, control.finding_count) == ("resolved", "verified_succeeded", 1)
    resolution = await works.database.read(lambda tx: controls.resolution(tx, dispatch.id))
    assert resolution is not None
    assert (resolution.source, resolution.evidence_digest, resolution.resolved_by) == (
        "automatic_evidence",
        "e" * 64,
        None,
    )
    assert works.receiver.effects == [dispatch.id]


@pytest.mark.parametrize(
    ("evidence", "status", "code"),
    [
        (Finding("still_running", "busy"), "armed", "busy"),
        (Finding("missing", "nothing"), "armed", "nothing"),
        (Finding("conflict", "two_of_them"), "manual_required", "two_of_them"),
        (Finding("unsupported", "cannot"), "manual_required", "cannot"),
        (Finding("verified_succeeded", "no_digest"), "manual_required", "recovery_evidence_invalid"),
    ],
)
async def test_findings_that_settle_nothing(works: Works, evidence: Finding, status: str, code: str) -> None:
    works.receiver.evidence = evidence
    dispatch, _ = await works.started()
    await lapse(works)
    await works.reconciler.step()
    control = await works.control(dispatch)
    assert (control.status, control.last_result_code, control.finding_count) == (status, code, 1)
    assert (await works.execution(dispatch)).status == "executing"
    # Not looked at again before its time, and then with a longer pause.
    await works.reconciler.step()
    assert (await works.control(dispatch)).finding_count == 1
    if status == "armed":
        await shift_clock(works.database, 5_000)
        await works.reconciler.step()
        control = await works.control(dispatch)
        assert control.finding_count == 2
        assert (control.next_scan_at_ms or 0) - control.updated_at_ms == 10_000


async def test_a_receiver_that_is_away_is_asked_again(works: Works) -> None:
    works.receiver.away = True
    dispatch, _ = await works.started()
    await lapse(works)
    await works.reconciler.step()
    control = await works.control(dispatch)
    assert (control.status, control.last_finding) == ("armed", "unavailable")


async def test_a_failure_is_closed_before_it_is_believed(works: Works) -> None:
    works.receiver.evidence = Finding("verified_failed", "never_came", "f" * 64)
    dispatch, lease = await works.started()
    await lapse(works)
    await works.reconciler.step()
    assert works.receiver.closed == {dispatch.id}
    assert (await works.execution(dispatch)).status == "failed"
    assert (await refused(works.executor.complete(dispatch, lease, DONE))).code == "fence_rejected"
    assert await works.database.read(lambda tx: rows.ended(tx, dispatch.approval_id))


async def test_closing_may_find_that_it_had_happened(works: Works) -> None:
    dispatch, _ = await works.started()
    works.receiver.effects.append(dispatch.id)
    works.receiver.evidence = Finding("verified_failed", "never_came", "f" * 64)
    await lapse(works)
    await works.reconciler.step()
    assert (await works.execution(dispatch)).status == "succeeded"


# -- by a person


def word(works: Works, dispatch_id: str, by: Actor, **changes: Any) -> ActionRecover:
    return ActionRecover(
        **{
            "actor": by,
            "project": "default",
            "dispatch": dispatch_id,
            "mutation_id": new_id(),
            "decision": "confirm_failed",
            "reason_code": "looked_myself",
            "expected_execution_version": 2,
            "expected_recovery_version": 0,
            **changes,
        }
    )


@pytest.mark.parametrize(
    ("decision", "status"),
    [("confirm_succeeded", "succeeded"), ("confirm_failed", "failed"), ("abandon_unknown", "blocked")],
)
async def test_a_persons_word_ends_a_doubt_once(works: Works, decision: Any, status: str) -> None:
    await works.person("ann", "admin")
    ann = actor("ann")
    dispatch, lease = await works.started()
    await lapse(works)
    wanted = word(works, dispatch.id, ann, decision=decision)
    answer = await works.reconciler.recover(wanted)
    assert (answer.action.status, answer.action.result_code, answer.replayed) == (status, "looked_myself", False)
    assert (await works.reconciler.recover(wanted)).replayed
    other = word(works, dispatch.id, ann, decision=decision)
    assert (await refused(works.reconciler.recover(other))).code == "already_decided"
    session = actor("ann")
    session = msgspec.structs.replace(session, authentication_id="another")
    assert (await refused(works.reconciler.recover(msgspec.structs.replace(wanted, actor=session)))).code == (
        "already_decided"
    )
    fact = await works.database.read(lambda tx: controls.authorization(tx, dispatch.id))
    assert fact is not None
    assert (fact.resolved_by, fact.binding_version, fact.mutation_id) == ("ann", 1, wanted.mutation_id)
    # Anything but a success is closed at the receiver first.
    assert (dispatch.id in works.receiver.closed) == (decision != "confirm_succeeded")
    assert (await refused(works.executor.complete(dispatch, lease, DONE))).code == "fence_rejected"


async def test_order_of_the_checks_of_a_persons_word(works: Works) -> None:
    await works.person("ann", "admin")
    bot = await works.person("bot", "admin", kind="agent")
    operator = await works.person("op", "operator")
    dispatch, _ = await works.started()

    async def code(by: Actor, **changes: Any) -> str:
        target = changes.pop("target", dispatch.id)
        return (await refused(works.reconciler.recover(word(works, target, by, **changes)))).code

    assert await code(bot) == "human_required"
    assert await code(actor("ann", assurance="single_factor")) == "assurance_required"
    assert await code(actor("ann", age_ms=300_001)) == "assurance_required"
    assert await code(operator) == "forbidden"
    assert await code(actor("ann"), target=new_id()) == "not_found"
    # A living lease is nobody's doubt.
    assert await code(actor("ann"), decision="confirm_succeeded") == "fence_rejected"
    await lapse(works)
    assert await code(actor("ann"), expected_execution_version=1) == "fence_rejected"
    assert await code(actor("ann"), expected_recovery_version=1) == "fence_rejected"
    works.receiver.away = True
    assert await code(actor("ann")) == "unavailable"
    works.receiver.away = False
    works.receiver.effects.append(dispatch.id)
    assert await code(actor("ann")) == "conflict"
    assert (await works.execution(dispatch)).status == "executing"


async def test_the_console_may_answer_for_a_doubt(works: Works) -> None:
    dispatch, _ = await works.started()
    await lapse(works)
    await works.reconciler.recover(word(works, dispatch.id, console(), decision="abandon_unknown"))
    fact = await works.database.read(lambda tx: controls.authorization(tx, dispatch.id))
    assert fact is not None
    assert (fact.assurance, fact.binding_version) == ("local_console", None)


async def test_doubts_are_listed_for_those_who_may_end_them(works: Works) -> None:
    await works.person("ann", "admin")
    operator = await works.person("op", "operator")
    doubtful, _ = await works.started()
    await lapse(works)
    fine = await works.dispatched()
    listed = await works.reconciler.page(ActionList(actor=actor("ann"), project="default", recovery=True))
    assert [item.dispatch_id for item in listed.items] == [doubtful.id]
    everything = await works.reconciler.page(ActionList(actor=operator, project="default"))
    assert {item.dispatch_id for item in everything.items} == {doubtful.id, fine.id}
    denied = works.reconciler.page(ActionList(actor=operator, project="default", recovery=True))
    assert (await refused(denied)).code == "forbidden"
    absent = works.reconciler.get(ActionRead(actor=operator, project="default", dispatch=new_id()))
    assert (await refused(absent)).code == "not_found"


# -- what the database itself refuses


@pytest.mark.parametrize(
    "change",
    [
        "status = 'pending'",
        "status = 'succeeded'",
        "lease_owner = NULL",
        "eligible_at_ms = 1",
        "started_at_ms = NULL",
        "attempt_count = 17",
        "max_attempts = 0",
        "lease_expires_at_ms = updated_at_ms",
        "lease_expires_at_ms = updated_at_ms + 600001",
    ],
)
async def test_executions_that_cannot_be(works: Works, change: str) -> None:
    dispatch, _ = await works.started()
    statement = Statement(f"UPDATE approved_action_dispatch_executions SET {change} WHERE dispatch_id = $1")
    with pytest.raises(CheckViolation):
        await works.database.transact(lambda tx: tx.execute(statement, dispatch.id))


@pytest.mark.parametrize(
    "change",
    [
        "status = 'resolved', next_scan_at_ms = NULL",
        "status = 'leased'",
        "status = 'manual_required', next_scan_at_ms = NULL",
        "next_scan_at_ms = NULL",
        "finding_count = 1",
        "resolution_mutation_id = 'm'",
    ],
)
async def test_controls_that_cannot_be(works: Works, change: str) -> None:
    dispatch, _ = await works.started()
    statement = Statement(f"UPDATE approved_action_recovery_controls SET {change} WHERE dispatch_id = $1")
    with pytest.raises(CheckViolation):
        await works.database.transact(lambda tx: tx.execute(statement, dispatch.id))


async def test_an_authorization_that_was_edited_is_not_believed(works: Works, monkeypatch) -> None:
    await works.person("ann", "admin")
    dispatch, _ = await works.started()
    await lapse(works)
    real = controls.Authorization.digest
    monkeypatch.setattr(controls.Authorization, "digest", property(lambda self: "0" * 64))
    await works.reconciler.recover(word(works, dispatch.id, actor("ann"), decision="confirm_succeeded"))
    monkeypatch.setattr(controls.Authorization, "digest", real)
    error = await refused(works.database.read(lambda tx: controls.authorization(tx, dispatch.id)))
    assert error.code == "unavailable"


async def test_a_role_is_not_bound_once_its_execution_was_ended(works: Works) -> None:
    bot = await works.person("bot", "admin", kind="agent")
    await works.person("eve")
    handler = RoleBindHandler(works.gate, works.authority, Plans(works.database))
    handlers = {"role.bind": handler}
    plan = {"subject": {"type": "user", "id": "eve"}, "role": "viewer", "expected_version": 0}
    wanted = ApprovalCreate(actor=bot, project="default", id=new_id(), action_type="role.bind", plan=plan)
    await Asking(works.gate, works.approvals, handlers).create(wanted)
    await works.approvals.decide(
        ApprovalDecide(
            actor=console(), project="default", approval=wanted.id, decision_id=new_id(), decision="approved"
        )
    )
    assert await works.hand_over.one(wanted.id)
    dispatch = await works.dispatch_of(wanted.id)
    await works.executor.start(dispatch, await works.leased(dispatch))
    await lapse(works)
    # Late, before anybody looked for evidence: nothing appears behind their back.
    assert (await refused(handler.execute(dispatch))).code == "fence_rejected"
    await Reconciler(works.gate, handlers, owner="two").look(dispatch.id)
    execution = await works.execution(dispatch)
    assert (execution.status, execution.last_result_code) == ("failed", "role_never_bound")
    assert (await refused(handler.execute(dispatch))).code == "fence_rejected"
    eve = Subject(type="user", id="eve")
    assert await works.database.read(lambda tx: projects.binding(tx, "default", eve)) is None
