"""Asking for an action: who may, what a repetition is, and the documented errors in their order."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from schemas.approvals import ApprovalCreate, ApprovalDecide, ApprovalRule, RulesSet
from schemas.errors import Ql3Error
from schemas.identity import Actor, IdentitySet, ProjectArchive, ProjectCreate, Subject
from services.approval.asking import Asking
from services.approval.handlers.port import Planned
from services.approval.store import requests as rows
from services.kit.ids import new_id
from tests.approval.conftest import HOUR, Receiver, Works, actor, console

BOT = Subject(type="agent", id="bot")


class Handler(Receiver):
    """An action whose plan names the labels and what is wrong with it."""

    def __init__(self) -> None:
        super().__init__()
        self.labels: dict[str, str] = {}
        self.wrong: str | None = None
        self.understood = 0

    async def understand(self, project: str, action_ref: str, plan: dict[str, Any]) -> Planned:
        self.understood += 1
        if self.wrong is not None:
            raise Ql3Error(self.wrong, field="plan")
        return Planned(plan, {"plan": "shown"}, self.labels)


class Desk:
    """Where an agent asks."""

    def __init__(self, works: Works) -> None:
        self.works = works
        self.handler = Handler()
        self.asking = Asking(works.gate, works.approvals, {"run.release": self.handler})

    async def ask(self, by: Actor, **changes: Any) -> Any:
        wanted: dict[str, Any] = {
            "id": new_id(),
            "project": "default",
            "action_type": "run.release",
            "plan": {"x": 1},
            **changes,
        }
        return await self.asking.create(ApprovalCreate(actor=by, **wanted))

    async def code(self, by: Actor, **changes: Any) -> str:
        with pytest.raises(Ql3Error) as refused:
            await self.ask(by, **changes)
        return refused.value.code


@pytest.fixture
def desk(works: Works) -> Desk:
    """On SQLite and on PostgreSQL."""
    return Desk(works)


async def test_who_may_ask(desk: Desk) -> None:
    works = desk.works
    bot = await works.person("bot", "operator", kind="agent")
    viewer = await works.person("reader", "viewer", kind="agent")
    ann = await works.person("ann", "operator")
    made = (await desk.ask(bot)).approval
    assert (made.state, made.version, made.requested_by) == ("pending", 1, BOT)
    # Who may not, and who may do it alone, has nothing to ask for.
    assert await desk.code(viewer) == "forbidden"
    assert await desk.code(ann) == "forbidden"
    assert await desk.code(actor("nobody", kind="agent")) == "forbidden"
    desk.handler.labels = {"env": "prod"}
    rules = [ApprovalRule(name="prod", permission="run.start", labels={"env": "prod"}, quorum=2)]
    await works.authority.set_rules(
        RulesSet(actor=console(), project="default", expected_version=0, rules=rules, mutation_id=new_id())
    )
    asked = (await desk.ask(ann)).approval
    assert (asked.requested_by.id, asked.quorum) == ("ann", 2)


async def test_who_lost_the_right_cannot_ask(desk: Desk) -> None:
    works = desk.works
    bot = await works.person("bot", "operator", kind="agent")
    await works.bind(BOT, None, expected=1)
    assert await desk.code(bot) == "forbidden"
    await works.bind(BOT, "operator", expected=2)
    await works.directory.set_status(IdentitySet(actor=console(), subject=BOT, expected_version=1, status="disabled"))
    assert await desk.code(bot) == "forbidden"
    await works.authority.create_project(ProjectCreate(actor=console(), id="old", name="Old"))
    await works.directory.set_status(IdentitySet(actor=console(), subject=BOT, expected_version=2, status="active"))
    await works.bind(BOT, "operator", project="old")
    await works.authority.archive_project(ProjectArchive(actor=console(), project="old", expected_version=1))
    assert await desk.code(bot, project="old") == "forbidden"


async def test_the_checks_come_in_their_order(desk: Desk) -> None:
    bot = await desk.works.person("bot", "operator", kind="agent")
    stranger = actor("nobody", kind="agent")
    # The action, the plan's form, policy, a repetition, what the plan says, policy about that.
    assert await desk.code(stranger, action_type="nothing") == "invalid"
    assert await desk.code(stranger, plan={"x": 1.5}) == "invalid"
    known = new_id()
    await desk.ask(bot, id=known)
    desk.handler.wrong = "version_conflict"
    assert await desk.code(stranger, id=known) == "forbidden"
    assert (await desk.ask(bot, id=known)).replayed
    assert await desk.code(bot, id=known, plan={"x": 2}) == "mutation_conflict"
    assert await desk.code(bot) == "version_conflict"
    assert desk.handler.understood == 2


async def test_a_repetition_answers_whatever_became_of_it_and_drift_is_a_conflict(desk: Desk) -> None:
    works = desk.works
    bot = await works.person("bot", "operator", kind="agent")
    other = await works.person("other", "operator", kind="agent")
    await works.authority.create_project(ProjectCreate(actor=console(), id="two", name="Two"))
    await works.bind(BOT, "operator", project="two")
    asked: dict[str, Any] = {"id": new_id(), "plan": {"x": 1}, "risk": "high", "ttl_ms": HOUR}
    made = await desk.ask(bot, **asked)
    assert (made.replayed, made.approval.risk, made.approval.expires_at_ms) == (
        False,
        "high",
        made.approval.requested_at_ms + HOUR,
    )
    drifts: list[dict[str, Any]] = [
        {"plan": {"x": 2}},
        {"plan": {"x": 1, "y": 1}},
        {"risk": "low"},
        {"ttl_ms": HOUR + 1},
        {"project": "two"},
    ]
    for drift in drifts:
        assert await desk.code(bot, **{**asked, **drift}) == "mutation_conflict", drift
    assert await desk.code(other, **asked) == "mutation_conflict"
    await works.approvals.decide(
        ApprovalDecide(
            actor=console(), project="default", approval=made.approval.id, decision_id=new_id(), decision="approved"
        )
    )
    again = await desk.ask(bot, **asked)
    assert (again.replayed, again.approval.state) == (True, "approved")
    assert await works.hand_over.one(made.approval.id)
    works.clock.advance(2 * HOUR)
    again = await desk.ask(msgspec.structs.replace(bot), **asked)
    assert (again.replayed, again.approval.state) == (True, "consumed")


async def test_a_plan_is_stored_with_its_request_or_not_at_all(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    bot = await desk.works.person("bot", "operator", kind="agent")
    asked = new_id()

    async def broken(*_: Any) -> None:
        raise Ql3Error("database_unavailable")

    monkeypatch.setattr(rows, "insert_many", broken)
    assert await desk.code(bot, id=asked) == "database_unavailable"
    monkeypatch.undo()
    assert await desk.works.database.read(lambda tx: rows.plan(tx, f"plan:{asked}")) is None
    assert not (await desk.ask(bot, id=asked)).replayed


@pytest.mark.parametrize(
    "changes", [{"ttl_ms": 59_999}, {"ttl_ms": 86_400_001}, {"risk": "enormous"}, {"id": "not an id"}]
)
def test_what_cannot_be_asked_for(changes: dict[str, Any]) -> None:
    wanted: dict[str, Any] = {
        "actor": actor("bot", kind="agent"),
        "project": "default",
        "id": new_id(),
        "action_type": "run.release",
        "plan": {},
        **changes,
    }
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(msgspec.to_builtins(wanted), ApprovalCreate)
