"""A right that is taken away between the check and the commit refuses the commit, for every mutation of this service.

The revocation is committed by another connection after policy was asked and before the mutation's fence. On PostgreSQL
that works under READ COMMITTED in the middle of the transaction; on SQLite, whose one writer keeps others out, for the
mutations that ask before they begin to write.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from schemas.approvals import (
    ActionRecover,
    ApprovalCreate,
    ApprovalDecide,
    ApprovalRule,
    ApprovalWithdraw,
    Binding,
    RulesSet,
)
from schemas.errors import Ql3Error
from schemas.identity import (
    BindingRevoke,
    IdentityRegister,
    IdentitySet,
    ProjectArchive,
    ProjectCreate,
    RoleBind,
    Subject,
)
from services.approval import executions
from services.approval.asking import Asking
from services.approval.store import projects
from services.kit.database import Database, open_database
from services.kit.ids import new_id
from tests.approval.conftest import HOUR, Works, actor, console, hold
from tests.fixtures_database import database_configs, shift_clock

ANN = Subject(type="user", id="ann")
BOT = Subject(type="agent", id="bot")


@pytest_asyncio.fixture
async def two(database_for: Callable[[str], Awaitable[Database]]) -> AsyncIterator[tuple[Works, Works]]:
    """Authority twice, each with connections of its own to one database."""
    first = await database_for("approval")
    second = await open_database(database_configs[first], "approval")
    yield Works(first), Works(second)
    await second.close()


async def bind(works: Works, _: str) -> Any:
    return await works.authority.bind_role(
        RoleBind(
            actor=actor("ann"),
            project="default",
            subject=Subject(type="user", id="eve"),
            role="viewer",
            expected_version=0,
            mutation_id=new_id(),
        )
    )


async def set_rules(works: Works, _: str) -> Any:
    rules = [ApprovalRule(name="x", permission="run.start")]
    return await works.authority.set_rules(
        RulesSet(actor=actor("ann"), project="default", expected_version=0, rules=rules, mutation_id=new_id())
    )


async def create_project(works: Works, _: str) -> Any:
    return await works.authority.create_project(ProjectCreate(actor=actor("ann"), id="two", name="Two"))


async def archive(works: Works, _: str) -> Any:
    return await works.authority.archive_project(ProjectArchive(actor=actor("ann"), project="mine", expected_version=1))


async def register(works: Works, _: str) -> Any:
    return await works.directory.register(
        IdentityRegister(
            actor=actor("ann"), subject=Subject(type="user", id="eve"), provider="password", provider_subject="eve"
        )
    )


async def disable(works: Works, _: str) -> Any:
    return await works.directory.set_status(
        IdentitySet(actor=actor("ann"), subject=BOT, expected_version=1, status="disabled")
    )


async def decide(works: Works, prepared: str) -> Any:
    return await works.approvals.decide(
        ApprovalDecide(
            actor=actor("ann"), project="default", approval=prepared, decision_id=new_id(), decision="approved"
        )
    )


async def ask(works: Works, _: str) -> Any:
    asking = Asking(works.gate, works.approvals, {"run.release": works.receiver})
    return await asking.create(
        ApprovalCreate(
            actor=actor("bot", kind="agent", assurance="service"),
            project="default",
            id=new_id(),
            action_type="run.release",
            plan={"x": 1},
        )
    )


async def withdraw(works: Works, prepared: str) -> Any:
    return await works.approvals.withdraw(ApprovalWithdraw(actor=actor("ann"), project="default", approval=prepared))


async def revoke_name(works: Works, _: str) -> Any:
    return await works.directory.revoke_binding(
        BindingRevoke(
            actor=actor("ann"),
            subject=Subject(type="user", id="boss"),
            provider="password",
            provider_subject="boss",
        )
    )


async def consume(works: Works, prepared: str) -> Any:
    request = await works.approvals.view("default", prepared)
    binding = Binding(
        permission=request.permission,
        action_type=request.action_type,
        action_ref=request.action_ref,
        action_digest=request.action_digest,
        preview_digest=request.preview_digest,
    )
    return await works.hand_over.consume(
        prepared,
        consumption_id=new_id(),
        dispatch_id=new_id(),
        expected_version=2,
        action=binding,
        requested_by=BOT,
        consumed_by=Subject(type="system", id="approval"),
    )


async def recover(works: Works, prepared: str) -> Any:
    return await works.reconciler.recover(
        ActionRecover(
            actor=actor("ann"),
            project="default",
            dispatch=prepared,
            mutation_id=new_id(),
            decision="confirm_succeeded",
            reason_code="x",
            expected_execution_version=2,
            expected_recovery_version=0,
        )
    )


async def nothing(works: Works) -> str:
    return ""


async def own_project(works: Works) -> str:
    await works.authority.create_project(ProjectCreate(actor=console(), id="mine", name="Mine"))
    await works.bind(ANN, "owner", project="mine")
    await works.bind(Subject(type="user", id="boss"), "owner", project="mine")
    return ""


async def pending(works: Works) -> str:
    order = hold()
    await works.approvals.hold([order])
    return order.request_id


async def own(works: Works) -> str:
    order = hold(requested_by=ANN)
    await works.approvals.hold([order])
    return order.request_id


async def approved(works: Works) -> str:
    await works.person("second", "owner")
    order_by_bot = await pending_by_bot(works)
    await works.approvals.decide(
        ApprovalDecide(
            actor=actor("second"),
            project="default",
            approval=order_by_bot,
            decision_id=new_id(),
            decision="approved",
        )
    )
    return order_by_bot


async def pending_by_bot(works: Works) -> str:
    order = hold(requested_by=BOT)
    await works.approvals.hold([order])
    return order.request_id


async def doubtful(works: Works) -> str:
    request_id = await approved(works)
    assert await works.hand_over.one(request_id)
    dispatch = await works.dispatch_of(request_id)
    lease = await works.leased(dispatch)
    await works.executor.start(dispatch, lease)
    await shift_clock(works.database, executions.LEASE_MS)
    return dispatch.id


MUTATIONS: list[tuple[Any, Any, Subject, str, bool]] = [
    # mutation, preparation, whose right, in which project, asks before it writes
    (bind, nothing, ANN, "default", False),
    (set_rules, nothing, ANN, "default", False),
    (create_project, nothing, ANN, "default", False),
    (archive, own_project, ANN, "mine", False),
    (register, nothing, ANN, "default", False),
    (disable, nothing, ANN, "default", False),
    (revoke_name, nothing, ANN, "default", False),
    (withdraw, own, ANN, "default", False),
    (decide, pending, ANN, "default", True),
    (ask, nothing, BOT, "default", True),
    (consume, approved, BOT, "default", True),
    (recover, doubtful, ANN, "default", True),
]


async def revoke(works: Works, who: Subject, project: str) -> None:
    """By another connection, committed."""
    current = await works.database.read(lambda tx: projects.binding(tx, project, who))
    assert current is not None
    await works.bind(who, None, project=project, expected=current.version)


async def disable_subject(works: Works, who: Subject, project: str) -> None:
    await works.directory.set_status(IdentitySet(actor=console(), subject=who, expected_version=1, status="disabled"))


async def archive_the_project(works: Works, who: Subject, project: str) -> None:
    found = await works.database.read(lambda tx: projects.get(tx, project))
    assert found is not None
    version = found.version
    await works.database.transact(lambda tx: projects.set_status(tx, project, version, "archived", 1_800_000_000_000))


@pytest.mark.parametrize("taken", [revoke, disable_subject, archive_the_project])
@pytest.mark.parametrize(
    ("mutation", "prepare", "who", "project", "asks_first"), MUTATIONS, ids=[row[0].__name__ for row in MUTATIONS]
)
async def test_a_right_taken_before_the_commit_refuses_it(
    two: tuple[Works, Works],
    monkeypatch: pytest.MonkeyPatch,
    mutation: Any,
    prepare: Any,
    who: Subject,
    project: str,
    asks_first: bool,
    taken: Any,
) -> None:
    one, other = two
    if one.database.dialect == "sqlite" and not asks_first:
        pytest.skip("SQLite has one writer: nobody gets between the check and the commit of one transaction")
    await one.person("boss", "owner")
    await one.person("ann", "owner")
    await one.person("bot", "operator", kind="agent")
    prepared = await prepare(one)

    real = projects.snapshot
    looks = 0
    wanted_looks = 2 if mutation is ask else 1  # asking looks twice: at the permission, then with the plan's labels

    async def snapshot(tx: Any, at: str, subject: Subject) -> Any:
        nonlocal looks
        seen = await real(tx, at, subject)
        if tx.database is one.database and subject == who and at == project:
            looks += 1
            if looks == wanted_looks:
                # In a task of its own: the other connection, not this one's transaction.
                await asyncio.create_task(taken(other, who, project))
        return seen

    monkeypatch.setattr(projects, "snapshot", snapshot)
    with pytest.raises(Ql3Error) as refused:
        await mutation(one, prepared)
    assert refused.value.code == "policy_fence_conflict"
    assert looks >= wanted_looks
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("before", "code"), [("decided", "already_decided"), ("expired", "approval_expired"), ("replayed", None)]
)
async def test_what_became_of_the_request_is_told_before_the_fence(
    two: tuple[Works, Works], monkeypatch: pytest.MonkeyPatch, before: str, code: str | None
) -> None:
    one, other = two
    await one.person("boss", "owner")
    await one.person("ann", "owner")
    prepared = await pending(one)
    mine = ApprovalDecide(
        actor=actor("ann"), project="default", approval=prepared, decision_id=new_id(), decision="approved"
    )
    if before == "replayed":
        await one.approvals.decide(mine)
    if before == "decided":
        await one.approvals.decide(msgspec.structs.replace(mine, actor=actor("boss"), decision_id=new_id()))
    if before == "expired":
        one.clock.advance(HOUR)
    real = projects.snapshot
    looks = 0

    async def snapshot(tx: Any, at: str, subject: Subject) -> Any:
        nonlocal looks
        seen = await real(tx, at, subject)
        if tx.database is one.database and subject == ANN:
            looks += 1
            await asyncio.create_task(revoke(other, ANN, "default"))
        return seen

    monkeypatch.setattr(projects, "snapshot", snapshot)
    if code is None:
        assert (await one.approvals.decide(mine)).replayed
    else:
        with pytest.raises(Ql3Error) as refused:
            await one.approvals.decide(mine)
        assert refused.value.code == code
    assert looks == 1


async def test_without_a_revocation_each_of_them_commits(two: tuple[Works, Works]) -> None:
    one, _ = two
    await one.person("boss", "owner")
    await one.person("ann", "owner")
    await one.person("bot", "operator", kind="agent")
    for mutation, prepare, *_ in MUTATIONS:
        if mutation in (disable, revoke_name):
            continue
        if mutation in (consume, recover):
            rules = await one.database.read(lambda tx: projects.rules(tx, "default"))
            assert rules[0] == 1
        if mutation is recover:
            prepared = await doubtful_again(one)
        else:
            prepared = await prepare(one)
        await mutation(one, prepared)


async def doubtful_again(works: Works) -> str:
    order = await pending_by_bot(works)
    await works.approvals.decide(
        ApprovalDecide(
            actor=actor("second"), project="default", approval=order, decision_id=new_id(), decision="approved"
        )
    )
    assert await works.hand_over.one(order)
    dispatch = await works.dispatch_of(order)
    await works.executor.start(dispatch, await works.leased(dispatch))
    await shift_clock(works.database, executions.LEASE_MS)
    return dispatch.id
