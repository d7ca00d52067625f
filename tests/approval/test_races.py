"""Two connections at the same thing at the same time: one of them wins, in every round, on both databases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest_asyncio

from schemas.approvals import ActionRecover, ApprovalDecide
from schemas.errors import Ql3Error
from schemas.identity import BindingRevoke, BootstrapClaim, BootstrapIssue, ProjectCreate, RoleBind, Subject
from services.approval import executions
from services.approval.handlers.port import Outcome
from services.approval.recovery import Finding
from services.approval.store import projects
from services.approval.store import requests as rows
from services.kit.database import Database, open_database
from services.kit.ids import new_id
from tests.approval.conftest import Works, actor, console, hold
from tests.fixtures_database import database_configs, shift_clock

ROUNDS = 200
LOST = {
    "already_decided",
    "version_conflict",
    "mutation_conflict",
    "invalid_transition",
    "fence_rejected",
    "bootstrap_rejected",
    "bootstrap_closed",
    "challenge_active",
    "policy_fence_conflict",
    "last_owner",
    "conflict",
}


@pytest_asyncio.fixture
async def two(database_for: Callable[[str], Awaitable[Database]]) -> AsyncIterator[tuple[Works, Works]]:
    """Authority twice, each with connections of its own to one database."""
    first = await database_for("approval")
    second = await open_database(database_configs[first], "approval")
    yield Works(first, owner="one"), Works(second, owner="two")
    await second.close()


async def race(*work: Awaitable[Any]) -> list[Any]:
    """Results of all, refusals among them; anything that is no refusal of a race fails the test."""
    outcomes = await asyncio.gather(*work, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not (isinstance(outcome, Ql3Error) and outcome.code in LOST):
            raise outcome
    return outcomes


def won(outcomes: Sequence[Any]) -> list[Any]:
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException) and outcome is not None]


async def test_decide(two: tuple[Works, Works]) -> None:
    one, other = two
    await one.person("ann", "owner")
    orders = [hold() for _ in range(ROUNDS)]
    await one.approvals.hold(orders)

    def decide(works: Works, approval: str, decision: Any, who: Any) -> Any:
        return works.approvals.decide(
            ApprovalDecide(actor=who, project="default", approval=approval, decision_id=new_id(), decision=decision)
        )

    for order in orders:
        outcomes = await race(
            decide(one, order.request_id, "approved", actor("ann")),
            decide(other, order.request_id, "rejected", console()),
        )
        (winner,) = won(outcomes)
        stored = await one.database.read(lambda tx, order=order: rows.decisions(tx, [order.request_id]))
        assert [row.id for row in stored[order.request_id]] == [winner.approval.decisions[0].id]
        assert len(winner.approval.decisions) == 1


async def test_create(two: tuple[Works, Works]) -> None:
    one, other = two
    for _ in range(ROUNDS):
        order = hold()
        outcomes = await race(one.approvals.hold([order]), other.approvals.hold([order]))
        assert outcomes == [[None], [None]]
        drifted = hold(request_id=order.request_id, risk="critical")
        (refusal,) = await one.approvals.hold([drifted])
        assert refusal is not None


async def test_consume(two: tuple[Works, Works]) -> None:
    one, other = two
    for _ in range(ROUNDS):
        request_id = await one.approved()
        outcomes = await race(one.hand_over.one(request_id), other.hand_over.one(request_id))
        assert sorted(outcomes) == [False, True]
        await one.dispatch_of(request_id)


async def test_claim(two: tuple[Works, Works]) -> None:
    one, other = two
    for _ in range(ROUNDS):
        dispatch = await one.dispatched()
        outcomes = await race(one.executor.claim(dispatch.id, "a"), other.executor.claim(dispatch.id, "b"))
        (winner,) = won(outcomes)
        execution = await one.execution(dispatch)
        assert (execution.lease_owner, execution.attempt_count) == (winner.lease_owner, 1)


async def test_resolve_by_evidence_against_a_persons_word_and_a_late_completion(two: tuple[Works, Works]) -> None:
    one, other = two
    started = [await one.started() for _ in range(ROUNDS)]
    await shift_clock(one.database, executions.LEASE_MS)
    for works in two:
        works.receiver.evidence = Finding("verified_succeeded", "seen", "e" * 64)
    ends = {"succeeded": 0, "blocked": 0}
    for dispatch, lease in started:
        wanted = ActionRecover(
            actor=console(),
            project="default",
            dispatch=dispatch.id,
            mutation_id=new_id(),
            decision="abandon_unknown",
            reason_code="gave_up",
            expected_execution_version=lease.version,
            expected_recovery_version=0,
        )
        outcomes = await race(
            one.reconciler.look(dispatch.id),
            other.reconciler.recover(wanted),
            one.executor.complete(dispatch, lease, Outcome("succeeded", "done", "run", "r")),
        )
        execution, control = await one.execution(dispatch), await one.control(dispatch)
        assert execution.version == lease.version + 1
        assert control.status == "resolved"
        assert control.resolution_mutation_id == execution.result_mutation_id
        ends[execution.status] += 1
        ended_by_person = not isinstance(outcomes[1], BaseException)
        assert ended_by_person == (execution.status == "blocked")
    assert sum(ends.values()) == ROUNDS


async def test_role_append(two: tuple[Works, Works]) -> None:
    one, other = two
    await one.person("ann")
    subject = Subject(type="user", id="ann")

    def bind(works: Works, role: Any, expected: int) -> Any:
        return works.authority.bind_role(
            RoleBind(
                actor=console(),
                project="default",
                subject=subject,
                role=role,
                expected_version=expected,
                mutation_id=new_id(),
            )
        )

    for version in range(ROUNDS):
        outcomes = await race(bind(one, "viewer", version), bind(other, "operator", version))
        (winner,) = won(outcomes)
        current = await one.database.read(lambda tx: projects.binding(tx, "default", subject))
        assert current == winner.binding


async def test_the_last_two_owners_do_not_both_go(two: tuple[Works, Works]) -> None:
    one, other = two
    people = [await one.person(name, "owner") for name in ("ann", "bob")]
    versions = {"ann": 1, "bob": 1}

    def leave(works: Works, index: int) -> Any:
        name = people[index].id
        return works.authority.bind_role(
            RoleBind(
                actor=people[index],
                project="default",
                subject=Subject(type="user", id=name),
                role=None,
                expected_version=versions[name],
                mutation_id=new_id(),
            )
        )

    for _ in range(ROUNDS):
        outcomes = await race(leave(one, 0), leave(other, 1))
        (winner,) = won(outcomes)
        name = winner.binding.subject.id
        versions[name] += 1
        await one.bind(Subject(type="user", id=name), "owner", expected=versions[name])
        versions[name] += 1


def _end(works: Works, by: Any, name: str) -> Any:
    return works.directory.revoke_binding(
        BindingRevoke(actor=by, subject=Subject(type="user", id=name), provider="password", provider_subject=name)
    )


async def test_the_last_two_owners_do_not_both_lose_their_names(two: tuple[Works, Works]) -> None:
    one, other = two
    people = [await one.person(name, "owner") for name in ("ann", "bob")]
    for _ in range(ROUNDS // 2):
        outcomes = await race(*(_end(works, who, who.id) for works, who in zip(two, people, strict=True)))
        (winner,) = won(outcomes)
        await other.person(winner.binding.provider_subject)


async def test_who_becomes_the_only_owner_is_not_shut_out_meanwhile(two: tuple[Works, Works]) -> None:
    one, other = two
    ann = await one.person("ann")
    await one.person("zoe")
    bob, nobody = Subject(type="user", id="bob"), Subject(type="user", id="nobody")
    for number in range(ROUNDS // 2):
        project = f"h{number}"
        await one.person("bob")
        await one.authority.create_project(ProjectCreate(actor=console(), id=project, name=project))
        await one.bind(Subject(type="user", id="ann"), "owner", project=project)

        async def hand_on(project: str = project) -> None:
            await one.bind(bob, "owner", project=project)
            await one.authority.bind_role(
                RoleBind(
                    actor=ann,
                    project=project,
                    subject=Subject(type="user", id="ann"),
                    role=None,
                    expected_version=1,
                    mutation_id=new_id(),
                )
            )

        await race(hand_on(), _end(other, actor("bob"), "bob"))
        left = await one.database.read(lambda tx, p=project: projects.other_active_owners(tx, p, nobody))
        assert left >= 1
        # Free of this project, so that the next round begins with a name that may end.
        current = await one.database.read(lambda tx, p=project: projects.binding(tx, p, bob))
        assert current is not None
        await one.person("bob")
        await one.bind(Subject(type="user", id="zoe"), "owner", project=project)
        await one.bind(bob, None, project=project, expected=current.version)


async def test_bootstrap_issue(two: tuple[Works, Works]) -> None:
    one, other = two
    for number in range(ROUNDS // 4):
        project = f"i{number}"
        await one.authority.create_project(ProjectCreate(actor=console(), id=project, name=project))

        def issue(works: Works, letter: str, project: str = project, number: int = number) -> Any:
            return works.directory.issue(
                BootstrapIssue(
                    actor=console(),
                    project=project,
                    challenge_id=f"{letter}{number:021d}",
                    token_digest=f"{number:064d}",
                )
            )

        outcomes = await race(issue(one, "a"), issue(other, "b"))
        assert len(won(outcomes)) == 1
        assert [o.code for o in outcomes if isinstance(o, Ql3Error)] == ["challenge_active"]


async def test_bootstrap_claim(two: tuple[Works, Works]) -> None:
    one, other = two
    ann, bob = await one.person("ann"), await one.person("bob")
    for number in range(ROUNDS):
        project = f"p{number}"
        await one.authority.create_project(ProjectCreate(actor=console(), id=project, name=project))
        challenge, token = f"{number:022d}", f"{number:064d}"
        await one.directory.issue(
            BootstrapIssue(actor=console(), project=project, challenge_id=challenge, token_digest=token)
        )

        def claim(works: Works, who: Any, project: str = project, key: tuple[str, str] = (challenge, token)) -> Any:
            return works.directory.claim(
                BootstrapClaim(actor=who, project=project, challenge_id=key[0], token_digest=key[1])
            )

        (winner,) = won(await race(claim(one, ann), claim(other, bob)))
        owners = await one.database.read(lambda tx, project=project: projects.bindings(tx, project, 10, None))
        assert [binding.subject for binding in owners[0]] == [winner.binding.subject]


async def test_withdraw_against_consume(two: tuple[Works, Works]) -> None:
    one, other = two
    for _ in range(ROUNDS):
        request_id = await one.approved()
        outcomes = await race(one.hand_over.one(request_id), other.approvals.run_ended(request_id))
        assert sorted(outcomes) == [False, True]
        request = await one.database.read(lambda tx, request_id=request_id: rows.get(tx, request_id))
        assert request is not None
        assert (request.state, request.dispatch_id is not None) in (("consumed", True), ("withdrawn", False))
