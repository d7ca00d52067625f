"""With the real scheduler and dispatcher: a run that waits, and what becomes of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from schemas import endpoints
from schemas.approvals import ApprovalCreate, ApprovalDecide, ApprovalRule, ApprovalWithdraw, RulesSet
from schemas.errors import Ql3Error
from schemas.identity import IdentityRegister, RoleBind, Subject
from schemas.runs import Run, RunCancel, RunList
from schemas.system import FeedPage, FeedRead
from schemas.tasks import TaskRun
from schemas.triggers import TriggerCreate, TriggerSpec
from services.approval.watching import HeldRuns
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


async def test_a_cancelled_runs_request_is_voided_by_the_feed_when_its_fact_is_lost(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def deaf(*_: object) -> None:
        return None

    # The service neither hears the fact nor reads the feed, whose cursor it would move past it.
    monkeypatch.setattr(house.approval.held_runs, "ended", deaf)
    monkeypatch.setattr(house.approval.held_runs, "read_page", deaf)
    await house.task()
    run = await house.run()
    await house.asked(run.id, "pending")
    await house.bus.request(endpoints.RUNS_CANCEL, RunCancel(actor=now(console), project="default", run=run.id))
    await house.until(run.id, "cancelled")

    async def read(after: str | None) -> FeedPage:
        return await house.bus.request(endpoints.FEED_READ["dispatcher"], FeedRead(after=after))

    async def unasked(_: object) -> Run:
        raise Ql3Error("unavailable")

    service = house.approval
    reading = HeldRuns(service.gate, service.approvals, read=read, look=unasked)
    while await reading.read_page():
        pass
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


async def test_one_admin_releases_a_prod_run_and_two_a_critical_one(house: House) -> None:
    rules = [
        ApprovalRule(
            name="critical", permission="run.start", labels={"env": "prod"}, risks=["critical"], quorum=2,
            decider_role="admin", mode="human_confirmation",
        ),
        ApprovalRule(
            name="prod", permission="run.start", labels={"env": "prod"}, decider_role="admin", mode="human_confirmation"
        ),
    ]  # fmt: skip
    await house.bus.request(
        endpoints.RULES_SET,
        RulesSet(actor=now(console), project="default", expected_version=0, rules=rules, mutation_id=new_id()),
    )
    for name in ("ann", "bob"):
        person = Subject(type="user", id=name)
        await house.bus.request(
            endpoints.IDENTITIES_REGISTER,
            IdentityRegister(actor=now(gateway), subject=person, provider="password", provider_subject=name),
        )
        await house.bus.request(
            endpoints.ROLES_BIND,
            RoleBind(
                actor=now(console),
                project="default",
                subject=person,
                role="admin",
                expected_version=0,
                mutation_id=new_id(),
            ),
        )
    await house.task("deploy", needs_approval=False, labels={"env": "prod"})
    await house.task("wipe", needs_approval=False, labels={"env": "prod", "risk": "critical"})
    await house.task("plain", needs_approval=False)
    assert (await house.run("plain")).status == "queued"
    one, two = await house.run("deploy"), await house.run("wipe")
    at_ms = WallClock().now_ms()
    await house.asked(one.id, "pending")
    await house.asked(two.id, "pending")

    async def approve(run: str, who: str) -> tuple[str, str, int]:
        answer = await house.bus.request(
            endpoints.APPROVALS_DECIDE,
            ApprovalDecide(
                actor=actor(who, now_ms=at_ms),
                project="default",
                approval=run,
                decision_id=new_id(),
                decision="approved",
            ),
        )
        return answer.approval.state, answer.approval.risk, answer.approval.quorum

    assert await approve(one.id, "ann") == ("approved", "medium", 1)
    assert await approve(two.id, "ann") == ("pending", "critical", 2)
    assert await approve(two.id, "bob") == ("approved", "critical", 2)
    for run in (one, two):
        await house.until(run.id, "queued")


async def test_a_scheduled_run_asks_ahead_and_starts_on_time(house: House) -> None:
    rules = [ApprovalRule(name="prod", permission="run.start", labels={"env": "prod"}, ahead_ms=3_600_000)]
    await house.bus.request(
        endpoints.RULES_SET,
        RulesSet(actor=now(console), project="default", expected_version=0, rules=rules, mutation_id=new_id()),
    )
    task = await house.task("deploy", needs_approval=False, labels={"env": "prod"})
    due_ms = (WallClock().now_ms() // 1000 + 5) * 1000
    for delay_ms in (0, 1_800_000):
        once = TriggerSpec(kind="once", at_ms=due_ms + delay_ms)
        await house.bus.request(
            endpoints.TRIGGERS_CREATE,
            TriggerCreate(actor=now(console), project="default", task=task.id, spec=once),
        )
    await house.facts.until(lambda items: len(held(items)) == 2)
    waiting = {run.scheduled_for_ms: run for run in [await house.read(run_id) for run_id in held(house.facts.items)]}
    soon, later = waiting[due_ms], waiting[due_ms + 1_800_000]
    assert WallClock().now_ms() < due_ms
    await house.decide(soon.id, "approved")
    await house.decide(later.id, "rejected")
    ended = await house.until(later.id, "cancelled")
    assert (ended.error_code, ended.cancel_reason) == ("approval_rejected", "policy")
    released = await house.until(soon.id, "queued")
    assert released.queued_at_ms is not None
    # Not when it was approved, but when it was due; the worker is given the exact instant.
    assert released.queued_at_ms >= due_ms - 1_000


def held(items: Sequence[object]) -> list[str]:
    """The runs of which it was told that they wait."""
    return sorted({item.run_id for item in items if item.status == "waiting_approval"})  # type: ignore[attr-defined]
