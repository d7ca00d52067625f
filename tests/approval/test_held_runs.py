"""With the real scheduler and dispatcher: a run that waits, and what becomes of it."""

from __future__ import annotations

import pytest

from schemas import endpoints
from schemas.approvals import ApprovalCreate, ApprovalWithdraw
from schemas.errors import Ql3Error
from schemas.identity import IdentityRegister, RoleBind, Subject
from schemas.runs import RunCancel, RunList
from schemas.tasks import TaskRun
from services.kit.clock import WallClock
from services.kit.ids import new_id
from tests.approval.conftest import actor, console, gateway
from tests.approval.house import House, now


@pytest.mark.parametrize(
    ("decision", "status", "error"),
    [("approved", "queued", None), ("rejected", "cancelled", "approval_rejected")],
)
async def test_a_decision_moves_the_run(house: House, decision: str, status: str, error: str | None) -> None:
    await house.task()
    run = await house.run()
    assert (run.status, run.attempt) == ("waiting_approval", 0)
    await house.decide(run.id, decision)
    ended = await house.until(run.id, status)
    assert (ended.status, ended.error_code) == (status, error)


async def test_taking_the_request_back_ends_the_run(house: House) -> None:
    await house.task()
    run = await house.run()
    await house.asked(run.id, "pending")
    await house.bus.request(
        endpoints.APPROVALS_WITHDRAW,
        ApprovalWithdraw(actor=now(console), project="default", approval=run.id),
    )
    ended = await house.until(run.id, "cancelled")
    assert (ended.cancel_reason, ended.error_code) == ("policy", "approval_rejected")


async def test_cancelling_the_run_voids_the_request(house: House) -> None:
    await house.task()
    run = await house.run()
    await house.asked(run.id, "pending")
    await house.bus.request(endpoints.RUNS_CANCEL, RunCancel(actor=now(console), project="default", run=run.id))
    await house.until(run.id, "cancelled")
    await house.asked(run.id, "withdrawn")


async def test_an_agent_asks_and_its_run_is_made_once(house: House) -> None:
    await house.task("plain", needs_approval=False)
    bot = Subject(type="agent", id="bot")
    await house.bus.request(
        endpoints.IDENTITIES_REGISTER,
        IdentityRegister(actor=now(gateway), subject=bot, provider="api_credential", provider_subject="bot"),
    )
    await house.bus.request(
        endpoints.ROLES_BIND,
        RoleBind(
            actor=now(console),
            project="default",
            subject=bot,
            role="operator",
            expected_version=0,
            mutation_id=new_id(),
        ),
    )
    agent = actor("bot", kind="agent", assurance="service", now_ms=WallClock().now_ms())
    with pytest.raises(Ql3Error) as refused:
        await house.bus.request(endpoints.TASKS_RUN, TaskRun(actor=agent, project="default", task="plain"))
    assert refused.value.code == "approval_required"
    wanted = ApprovalCreate(
        actor=agent,
        project="default",
        id=new_id(),
        action_type="run.create",
        plan={"task": "plain", "inputs": {"n": 1}},
    )
    made = await house.bus.request(endpoints.APPROVALS_CREATE, wanted)
    assert (made.approval.state, made.approval.preview["task"]) == ("pending", "plain")
    assert (await house.bus.request(endpoints.APPROVALS_CREATE, wanted)).replayed
    await house.decide(wanted.id, "approved")
    await house.facts.until(lambda items: any(item.trigger_type == "approved_action" for item in items))  # type: ignore[attr-defined]
    listed = await house.bus.request(endpoints.RUNS_LIST, RunList(actor=now(console), project="default"))
    assert [run.trigger_type for run in listed.items] == ["approved_action"]
