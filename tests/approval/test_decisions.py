"""Decisions and withdrawals: the documented errors in the documented order, replays, drift, quorum, and the CHECKs."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.approvals import (
    ApprovalDecide,
    ApprovalList,
    ApprovalRead,
    ApprovalRule,
    ApprovalWithdraw,
    RulesSet,
)
from schemas.errors import Ql3Error
from schemas.identity import LOCAL_CONSOLE, Actor, ProjectCreate, Subject
from schemas.paging import Page
from services.kit.audit import read_page
from services.kit.database import CheckViolation, IntegrityViolation, NotPermitted, Statement
from services.kit.ids import new_id
from tests.approval.conftest import HOUR, World, actor, console, hold

ANN = Subject(type="user", id="ann")


async def refused(work: Any) -> Ql3Error:
    """The error that `work` ends with."""
    with pytest.raises(Ql3Error) as error:
        await work
    return error.value


def decide(by: Actor, approval: str, decision: Any = "approved", **more: Any) -> ApprovalDecide:
    return ApprovalDecide(
        **{
            "actor": by,
            "project": "default",
            "approval": approval,
            "decision_id": new_id(),
            "decision": decision,
            **more,
        }
    )


async def asked(world: World, **more: Any) -> str:
    """A held run's request."""
    order = hold(now_ms=world.clock.now_ms(), **more)
    assert await world.approvals.hold([order]) == [None]
    return order.request_id


async def state(world: World, approval: str, by: Actor | None = None) -> str:
    found = await world.approvals.get(
        ApprovalRead(actor=by or console(world.clock.now_ms()), project="default", approval=approval)
    )
    return found.approval.state


# -- asked for


async def test_an_order_that_comes_again_changes_nothing_and_drift_is_refused(world: World) -> None:
    order = hold()
    assert await world.approvals.hold([order, order]) == [None, None]
    assert await world.approvals.hold([hold(request_id=order.request_id)]) == [None]
    for drift in (
        hold(request_id=order.request_id, risk="critical"),
        hold(request_id=order.request_id, requested_by=ANN),
        hold(request_id=order.request_id, ttl_ms=2 * HOUR),
    ):
        (outcome,) = await world.approvals.hold([drift])
        assert outcome is not None
        assert outcome.code == "mutation_conflict"
    absent, fine = hold(project="nowhere"), hold()
    outcomes = await world.approvals.hold([absent, fine])
    assert (outcomes[0].code if outcomes[0] else None, outcomes[1]) == ("not_found", None)
    listed = await world.approvals.page(ApprovalList(actor=console(), project="default"))
    assert len(listed.items) == 2


# -- who may


async def test_checks_of_a_decision_come_in_their_order(world: World) -> None:
    ann = await world.person("ann", "owner")
    await world.person("bob", "admin")
    approval = await asked(world, requested_by=ANN)
    agent = await world.person("bot", "admin", kind="agent")
    operator = await world.person("op", "operator")
    weak = actor("ann", assurance="single_factor")

    # A person, policy, existence, self-decision, assurance.
    assert (await refused(world.approvals.decide(decide(agent, new_id())))).code == "human_required"
    assert (await refused(world.approvals.decide(decide(operator, new_id())))).code == "forbidden"
    assert (await refused(world.approvals.decide(decide(ann, new_id())))).code == "not_found"
    assert (await refused(world.approvals.decide(decide(weak, approval)))).code == "self_decision"
    assert (await refused(world.approvals.decide(decide(console(), approval)))).code == "self_decision"
    tired = actor("bob", assurance="single_factor")
    assert (await refused(world.approvals.decide(decide(tired, approval)))).code == "assurance_required"
    # Refusals are on record.
    rows = await world.database.read(lambda tx: read_page(tx, "default", Page(limit=5)))
    assert [row.outcome for row in rows.items] == [
        "assurance_required",
        "self_decision",
        "self_decision",
        "forbidden",
        "human_required",
    ]
    assert await state(world, approval) == "pending"


@pytest.mark.parametrize(
    ("risk", "own", "age_ms", "code"),
    [
        ("low", True, 300_000, None),
        ("low", True, 300_001, "assurance_required"),
        ("low", False, 10 * HOUR, None),
        ("critical", False, 300_000, None),
        ("critical", False, 300_001, "assurance_required"),
        ("low", False, -6_000, "assurance_required"),
    ],
)
async def test_how_recent_a_sign_in_must_be(world: World, risk: str, own: bool, age_ms: int, code: Any) -> None:
    await world.person("ann", "owner")
    approval = await asked(world, risk=risk, requested_by=ANN if own else None)
    work = world.approvals.decide(decide(actor("ann", age_ms=age_ms), approval))
    if code is None:
        assert (await work).approval.state == "approved"
    else:
        assert (await refused(work)).code == code


async def test_the_mode_follows_the_people_and_is_frozen(world: World) -> None:
    first = await asked(world)
    ann = await world.person("ann", "owner")
    second = await asked(world, requested_by=ANN)
    await world.person("bob", "admin")
    third = await asked(world, requested_by=ANN)
    listed = await world.approvals.page(ApprovalList(actor=ann, project="default"))
    modes = {item.id: item.mode for item in listed.items}
    assert [modes[one] for one in (first, second, third)] == [
        "human_confirmation",
        "human_confirmation",
        "separation_of_duty",
    ]
    assert (await world.approvals.decide(decide(ann, second))).approval.state == "approved"
    assert (await refused(world.approvals.decide(decide(ann, third)))).code == "self_decision"


# -- in the transaction: replay, expiry, version, state


async def test_order_of_the_checks_in_the_transaction(world: World) -> None:
    await world.person("ann", "owner")
    bob = await world.person("bob", "admin")
    approval = await asked(world, requested_by=ANN)
    first = decide(bob, approval, expected_version=1, reason="fine")
    answer = await world.approvals.decide(first)
    assert (answer.approval.state, answer.approval.version, answer.replayed) == ("approved", 2, False)
    # A replay answers, whatever came after; any drift is a conflict.
    again = await world.approvals.decide(first)
    assert (again.approval, again.replayed) == (answer.approval, True)
    drifts: list[dict[str, Any]] = [{"decision": "rejected"}, {"reason": "other"}]
    for drift in drifts:
        other = decide(bob, approval, **{"reason": "fine", **drift, "decision_id": first.decision_id})
        assert (await refused(world.approvals.decide(other))).code == "mutation_conflict"
    carol = await world.person("carol", "admin")
    stolen = decide(carol, approval, reason="fine", decision_id=first.decision_id)
    assert (await refused(world.approvals.decide(stolen))).code == "mutation_conflict"
    another = await asked(world, requested_by=ANN)
    moved = decide(bob, another, reason="fine", decision_id=first.decision_id)
    assert (await refused(world.approvals.decide(moved))).code == "mutation_conflict"
    # Version before state.
    assert (await refused(world.approvals.decide(decide(carol, approval, expected_version=1)))).code == (
        "version_conflict"
    )
    assert (await refused(world.approvals.decide(decide(carol, approval, expected_version=2)))).code == (
        "already_decided"
    )
    # What is approved is what was shown.
    wrong = decide(bob, another, expected_digest="b" * 64)
    assert (await refused(world.approvals.decide(wrong))).code == "conflict"
    # Expired before version; the replay still answers.
    world.clock.advance(HOUR)
    assert (await refused(world.approvals.decide(decide(bob, another, expected_version=9)))).code == "approval_expired"
    assert (await world.approvals.decide(first)).replayed


async def test_a_run_that_was_told_stays_told(world: World) -> None:
    approval = await asked(world)
    world.clock.advance(HOUR)
    assert await world.approvals.expire(0, 10) == 1
    assert await world.approvals.expire(0, 10) == 0
    world.clock.advance(-HOUR // 2)
    me = console(world.clock.now_ms())
    assert (await refused(world.approvals.decide(decide(me, approval)))).code == "approval_expired"


# -- quorum


async def two_of(world: World, **rule: Any) -> None:
    rules = [ApprovalRule(**{"name": "two", "permission": "run.start", "quorum": 2, **rule})]
    await world.authority.set_rules(
        RulesSet(actor=console(), project="default", expected_version=0, rules=rules, mutation_id=new_id())
    )


async def test_a_quorum_takes_different_people(world: World) -> None:
    ann, bob = await world.person("ann", "owner"), await world.person("bob", "admin")
    await two_of(world, mode="human_confirmation")
    approval = await asked(world, requested_by=ANN)
    # The console may be any of them, also the one who has decided.
    assert (await refused(world.approvals.decide(decide(console(), approval)))).code == "self_decision"
    first = await world.approvals.decide(decide(ann, approval, expected_version=1))
    assert (first.approval.state, first.approval.version, len(first.approval.decisions)) == ("pending", 1, 1)
    assert (await refused(world.approvals.decide(decide(ann, approval)))).code == "already_decided"
    second = await world.approvals.decide(decide(bob, approval, expected_version=1))
    assert (second.approval.state, [row.decided_by.id for row in second.approval.decisions]) == (
        "approved",
        ["ann", "bob"],
    )


async def test_one_rejection_is_enough(world: World) -> None:
    ann, bob = await world.person("ann", "owner"), await world.person("bob", "admin")
    await two_of(world)
    approval = await asked(world)
    await world.approvals.decide(decide(ann, approval))
    assert (await world.approvals.decide(decide(bob, approval, "rejected"))).approval.state == "rejected"
    assert (await refused(world.approvals.decide(decide(console(), approval)))).code == "self_decision"


async def test_a_rule_may_ask_for_an_owner_and_only_for_some_risks(world: World) -> None:
    ann, bob = await world.person("ann", "owner"), await world.person("bob", "admin")
    await two_of(world, quorum=1, decider_role="owner", risks=["critical"])
    critical, low = await asked(world, risk="critical"), await asked(world, risk="low")
    assert (await refused(world.approvals.decide(decide(bob, critical)))).code == "forbidden"
    assert (await world.approvals.decide(decide(ann, critical))).approval.state == "approved"
    assert (await world.approvals.decide(decide(bob, low))).approval.state == "approved"


# -- taken back


async def test_only_whoever_asked_takes_it_back(world: World) -> None:
    ann, bob = await world.person("ann", "operator"), await world.person("bob", "owner")
    approval = await asked(world, requested_by=ANN)

    def withdraw(by: Actor, which: str = approval, project: str = "default") -> ApprovalWithdraw:
        return ApprovalWithdraw(actor=by, project=project, approval=which)

    assert (await refused(world.approvals.withdraw(withdraw(bob)))).code == "forbidden"
    assert (await refused(world.approvals.withdraw(withdraw(ann, new_id())))).code == "not_found"
    assert (await world.approvals.withdraw(withdraw(ann))).approval.state == "withdrawn"
    assert (await world.approvals.withdraw(withdraw(ann))).replayed
    assert (await refused(world.approvals.decide(decide(bob, approval)))).code == "invalid_transition"
    # An approved one too, while nobody has used it.
    second = await asked(world, requested_by=ANN)
    await world.approvals.decide(decide(bob, second))
    taken = await world.approvals.withdraw(withdraw(ann, second))
    assert (taken.approval.state, taken.approval.version) == ("withdrawn", 3)
    third = await asked(world, requested_by=ANN)
    world.clock.advance(HOUR)
    assert (await refused(world.approvals.withdraw(withdraw(ann, third)))).code == "approval_expired"


async def test_a_run_that_ended_otherwise_voids_its_request(world: World) -> None:
    approval = await asked(world)
    assert await world.approvals.run_ended(approval)
    assert not await world.approvals.run_ended(approval)
    assert not await world.approvals.run_ended(new_id())
    assert await state(world, approval) == "withdrawn"


# -- read


async def test_lists_page_by_state_and_hide_other_projects(world: World) -> None:
    first, second, third = [await asked(world, ttl_ms=HOUR + one) for one in range(3)]
    await world.approvals.decide(decide(console(), first, "rejected"))
    world.clock.advance(HOUR)
    me = console(world.clock.now_ms())

    async def listed(what: Any, limit: int = 50, cursor: str | None = None) -> tuple[list[str], str | None]:
        page = await world.approvals.page(
            ApprovalList(actor=me, project="default", state=what, page=Page(limit=limit, cursor=cursor))
        )
        return [item.id for item in page.items], page.next

    assert (await listed("rejected"))[0] == [first]
    assert (await listed("expired"))[0] == []
    world.clock.advance(1)
    assert (await listed("expired"))[0] == [second]
    assert (await listed("pending"))[0] == [third]
    head, more = await listed(None, 2)
    tail, end = await listed(None, 2, more)
    assert (sorted(head + tail), len(head), end) == (sorted([first, second, third]), 2, None)
    assert (await refused(listed(None, 2, "bm9uc2Vuc2U"))).field == "cursor"
    await world.authority.create_project(ProjectCreate(actor=me, id="two", name="Two"))
    foreign = ApprovalRead(actor=me, project="two", approval=first)
    assert (await refused(world.approvals.get(foreign))).code == "not_found"
    elsewhere = decide(me, first, project="two")
    assert (await refused(world.approvals.decide(elsewhere))).code == "not_found"


async def test_a_stored_row_that_does_not_hold_is_not_shown(world: World) -> None:
    approval = await asked(world)
    spoil = Statement('UPDATE approval_requests SET preview = \'{"task":"harmless"}\' WHERE id = $1')
    await world.database.transact(lambda tx: tx.execute(spoil, approval))
    assert (await refused(state(world, approval))).code == "unavailable"
    assert (await refused(world.approvals.decide(decide(console(), approval)))).code == "unavailable"


# -- what the database itself refuses

_COPY = (
    "INSERT INTO approval_decisions (id, request_id, project_id, mode, requested_by_type, requested_by_id, decision, "
    "decided_by_type, decided_by_id, authentication_id, assurance, authenticated_at_ms, project_version, "
    "binding_version, decided_at_ms) VALUES ($1, $2, 'default', $3, 'user', 'ann', 'approved', 'user', $4, 'a', "
    "'multi_factor', 1, 1, 1, 2)"
)


async def test_self_decision_is_a_check_of_the_database(world: World) -> None:
    await world.person("ann", "owner")
    await world.person("bob", "owner")
    approval = await asked(world, requested_by=ANN)
    insert = Statement(_COPY)

    async def store(mode: str, who: str) -> None:
        await world.database.transact(lambda tx: tx.execute(insert, new_id(), approval, mode, who))

    for who in ("ann", LOCAL_CONSOLE):
        with pytest.raises(CheckViolation):
            await store("separation_of_duty", who)
    # The repeated mode is tied to the request's own.
    with pytest.raises(IntegrityViolation):
        await store("human_confirmation", "ann")
    await store("separation_of_duty", "bob")
    with pytest.raises(IntegrityViolation):
        await store("separation_of_duty", "bob")


@pytest.mark.parametrize(
    "change",
    [
        "state = 'approved'",
        "state = 'consumed', version = 3",
        "version = 2",
        "decision_id = 'd'",
        "state = 'expired'",
        "expires_at_ms = requested_at_ms + 86400001",
        "expires_at_ms = requested_at_ms",
        "action_digest = 'A'",
        "mode = 'nobody'",
        "quorum = 0",
    ],
)
async def test_rows_that_cannot_be(world: World, change: str) -> None:
    approval = await asked(world)
    statement = Statement(f"UPDATE approval_requests SET {change} WHERE id = $1")
    with pytest.raises(CheckViolation):
        await world.database.transact(lambda tx: tx.execute(statement, approval))


@pytest.mark.parametrize(
    "table",
    [
        "project_role_bindings",
        "project_rules",
        "identity_authentication_bindings",
        "approval_decisions",
        "approved_action_plans",
        "approved_action_dispatches",
        "approved_action_receipts",
        "approved_action_recovery_resolutions",
        "approved_action_recovery_authorizations",
    ],
)
async def test_history_only_grows(world: World, table: str) -> None:
    await world.person("ann", "owner")
    approval = await asked(world)
    await world.approvals.decide(decide(console(), approval))
    column = "mutation_id" if "resol" in table or "author" in table else "project_id"
    column = "provider" if table == "identity_authentication_bindings" else column
    filled = table in ("project_role_bindings", "identity_authentication_bindings", "approval_decisions")
    for sql in (f"UPDATE {table} SET {column} = 'x'", f"DELETE FROM {table}"):
        # Where there is no row, SQLite has none to refuse about; PostgreSQL refuses the right itself.
        if not filled and world.database.dialect == "sqlite":
            continue
        with pytest.raises(NotPermitted):
            await world.database.transact(lambda tx, sql=sql: tx.execute(Statement(sql)))
