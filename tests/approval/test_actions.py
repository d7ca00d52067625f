"""Approved actions through the real scheduler, dispatcher and vault: asked by an agent, decided by a person, done once.

The order of an action may come again, and it may come too late: after its effect it changes nothing, and after its
execution was ended as failed it is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from schemas import endpoints
from schemas.approvals import (
    ActionClose,
    ActionList,
    ApprovalCreate,
    ApprovalDecide,
    ApprovalList,
    ApprovalRead,
    ApprovedAction,
    preview_digest,
)
from schemas.endpoints import Endpoint
from schemas.errors import Ql3Error
from schemas.identity import Actor, IdentityRegister, RoleBind, RoleList, Subject
from schemas.secrets import SecretList, SecretSet, VaultKeyRead
from schemas.tasks import Execution, SecretRef, TaskRead, TaskSpec, TaskUpdate, Terms, Variable
from schemas.workers import Capabilities, WorkerDrain, WorkerList, WorkerRegister
from services.approval import executions
from services.approval.handlers import task_change
from services.approval.service import ApprovalService
from services.dispatcher.service import DispatcherService
from services.kit.bus import Bus
from services.kit.clock import WallClock
from services.kit.config import Config
from services.kit.database import Database
from services.kit.ids import new_id
from services.kit.sealing import seal, secret_context
from services.scheduler.service import SchedulerService
from services.vault.keyring import provision
from services.vault.service import VaultService
from tests.approval.conftest import actor, console, gateway
from tests.approval.house import House, now
from tests.fixtures_database import shift_clock
from tests.fixtures_nats import WAIT_S, WORKER, BusFactory, Heard

BOT = Subject(type="agent", id="bot")
EVE = Subject(type="user", id="eve")


class Whole(House):
    """All who carry out approved actions, and an agent who may only ask."""

    def __init__(self, bus: Bus, approval: ApprovalService, database: Database) -> None:
        super().__init__(bus)
        self.approval = approval
        self.database = database

    @property
    def agent(self) -> Actor:
        return actor("bot", kind="agent", assurance="service", now_ms=WallClock().now_ms())

    async def ask(self, action_type: str, plan: dict[str, Any]) -> str:
        """The agent asks; answers the request's id."""
        wanted = ApprovalCreate(
            actor=self.agent, project="default", id=new_id(), action_type=action_type, plan=plan, risk="high"
        )
        made = (await self.bus.request(endpoints.APPROVALS_CREATE, wanted)).approval
        assert (made.state, made.requested_by, made.preview_digest) == ("pending", BOT, preview_digest(made.preview))
        return made.id

    async def approve(self, request_id: str) -> None:
        await self.bus.request(
            endpoints.APPROVALS_DECIDE,
            ApprovalDecide(
                actor=now(console), project="default", approval=request_id, decision_id=new_id(), decision="approved"
            ),
        )

    async def ended(self, request_id: str, *statuses: str) -> ApprovedAction:
        """The action once it is in one of these, or at its end."""
        async with asyncio.timeout(WAIT_S):
            while True:
                page = await self.bus.request(endpoints.ACTIONS_LIST, ActionList(actor=now(console), project="default"))
                for item in page.items:
                    if item.approval_id == request_id and item.status in (statuses or executions.TERMINAL):
                        return item
                await asyncio.sleep(0.02)  # the service works at its own pace; its end is read from its table

    async def sealed(self, name: str, mutation_id: str, value: str = "s3cret") -> str:
        key = await self.bus.request(endpoints.VAULT_KEY, VaultKeyRead())
        return seal(key.public_key, value.encode(), secret_context("default", name, mutation_id))


@pytest_asyncio.fixture(params=["sqlite", "postgresql"])
async def whole(
    request: pytest.FixtureRequest,
    database_on: Callable[..., Awaitable[Database]],
    bus_for: BusFactory,
    tmp_path: Path,
) -> AsyncIterator[Whole]:
    keyring = tmp_path / "keyring.json"
    provision(keyring)
    services: dict[str, Any] = {}
    for name, kind in (
        ("approval", ApprovalService),
        ("scheduler", SchedulerService),
        ("dispatcher", DispatcherService),
        ("vault", VaultService),
    ):
        database = await database_on(request.param, name)
        services[name] = kind(
            config=Config(keyring=keyring), database=database, bus=await bus_for(name), clock=WallClock()
        )
        await services[name].start()
    approval = services["approval"]
    found = Whole(await bus_for("gateway"), approval, approval.gate.database)
    await found.listen()
    for subject in (BOT, EVE):
        await found.bus.request(
            endpoints.IDENTITIES_REGISTER,
            IdentityRegister(actor=now(gateway), subject=subject, provider="test", provider_subject=subject.id),
        )
    await found.bus.request(
        endpoints.ROLES_BIND,
        RoleBind(
            actor=now(console), project="default", subject=BOT, role="admin", expected_version=0, mutation_id=new_id()
        ),
    )
    worker = await bus_for("worker", worker=WORKER)
    await worker.request(
        endpoints.WORKERS_REGISTER,
        WorkerRegister(worker=WORKER, session_id=new_id(), slots=1, capabilities=Capabilities(), public_key="A" * 43),
        token=WORKER,
    )
    await found.task("plain", needs_approval=False)
    yield found
    for made in reversed(list(services.values())):
        await made.stop()


class Case:
    """One kind of action: how it is asked for, what it does, and what a person does about the same thing."""

    name: str

    async def plan(self, whole: Whole) -> dict[str, Any]:
        """What the agent asks for."""
        raise NotImplementedError

    async def look(self, whole: Whole) -> Any:
        """The thing as it stands."""
        raise NotImplementedError

    async def touch(self, whole: Whole) -> None:
        """A person changes the same thing afterwards."""

    async def alone(self, whole: Whole) -> Any:
        """The agent tries it without asking."""
        raise NotImplementedError


SPEC = TaskSpec(
    execution=Execution(command=["false"], environment=[Variable(name="TOKEN", secret=SecretRef(secret="known"))])
)


class TaskChange(Case):
    name = "task.change"
    before, after, then = (1, ["true"]), (2, ["false"]), (3, ["false"])

    async def plan(self, whole: Whole) -> dict[str, Any]:
        return {"task": "plain", "expected_revision": 1, "spec": msgspec.to_builtins(SPEC)}

    async def look(self, whole: Whole) -> Any:
        question = TaskRead(actor=now(console), project="default", task="plain")
        task = (await whole.bus.request(endpoints.TASKS_GET, question)).task
        return task.revision, task.spec.execution.command

    async def _update(self, whole: Whole, by: Actor, revision: int) -> None:
        await whole.bus.request(
            endpoints.TASKS_UPDATE,
            TaskUpdate(actor=by, project="default", task="plain", expected_revision=revision, spec=SPEC),
        )

    async def touch(self, whole: Whole) -> None:
        await self._update(whole, now(console), 2)

    async def alone(self, whole: Whole) -> None:
        await self._update(whole, whole.agent, 1)


async def test_who_decides_about_a_change_of_a_task_sees_all_of_it(whole: Whole) -> None:
    kept = TaskSpec(execution=Execution(command=["true"]), terms=Terms(needs_approval=True, labels={"env": "prod"}))
    await whole.bus.request(
        endpoints.TASKS_UPDATE,
        TaskUpdate(actor=now(console), project="default", task="plain", expected_revision=1, spec=kept),
    )
    script = "\n".join(f"echo {number}" for number in range(2_000)) + "\nrm -rf /"
    spec = TaskSpec(
        execution=Execution(
            command=["python", "-c", script],
            environment=[
                Variable(name="PAGER", value="evil"),
                Variable(name="TOKEN", secret=SecretRef(secret="known")),
            ],
        )
    )
    request_id = await whole.ask(
        "task.change", {"task": "plain", "expected_revision": 2, "spec": msgspec.to_builtins(spec)}
    )
    question = ApprovalRead(actor=now(console), project="default", approval=request_id)
    found = (await whole.bus.request(endpoints.APPROVALS_GET, question)).approval
    changes = {one["path"]: (one["before"], one["after"]) for one in found.preview["changes"]}
    assert changes["execution.environment"] == (
        None,
        [{"name": "PAGER", "value": "evil"}, {"name": "TOKEN", "secret": {"secret": "known"}}],
    )
    assert changes["terms"] == ({"labels": {"env": "prod"}, "needs_approval": True}, None)
    assert found.preview["cut"]
    (cut,) = (after for _, after in changes.values() if isinstance(after, str) and "sha256" in after)
    assert str(len(script)) in cut
    assert found.plan is not None
    assert found.plan["spec"]["execution"]["command"] == ["python", "-c", script]
    listed = await whole.bus.request(endpoints.APPROVALS_LIST, ApprovalList(actor=now(console), project="default"))
    assert [item.plan for item in listed.items] == [None]


async def test_a_sealed_value_is_shown_to_nobody(whole: Whole) -> None:
    request_id = await whole.ask("secret.set", await SecretChange().plan(whole))
    question = ApprovalRead(actor=now(console), project="default", approval=request_id)
    assert (await whole.bus.request(endpoints.APPROVALS_GET, question)).approval.plan is None


def test_every_change_is_in_the_preview_whatever_their_number_and_size() -> None:
    spec: dict[str, Any] = {"execution": {"command": ["sh", "-c", "a" * 50_000]}, "notes": "x"}
    other = {"execution": {"command": ["sh", "-c", "b" * 50_000]}, "notes": "y"}
    shown = task_change._shown(spec, other)
    assert shown["cut"]
    assert shown["changes"][1] == {"path": "notes", "before": "x", "after": "y"}
    assert shown["changes"][0]["after"].startswith("b" * 80 + "… (50000 characters, sha256 ")
    assert task_change._shown({"notes": "x"}, {"notes": "y"}) == {"changes": [shown["changes"][1]]}
    # Harmless ones do not hide the one that matters.
    for count in (20, 60, 1_000):
        many = [{"name": f"V{number}", "value": "z" * 200} for number in range(count)]
        shown = task_change._shown(
            {"execution": {"command": ["true"]}, "terms": {"needs_approval": True}},
            {"execution": {"command": ["true"], "environment": many, "umask": 1}, "terms": {"labels": {"a": "b"}}},
        )
        assert len(msgspec.json.encode(shown)) < 7_500
        assert {row["path"].partition(".")[0] for row in shown["changes"]} == {"execution", "terms"}
        assert any("needs_approval" in row["path"] for row in shown["changes"])


class SecretChange(Case):
    name = "secret.set"
    before, after, then = 0, 1, 2

    async def plan(self, whole: Whole) -> dict[str, Any]:
        mutation = new_id()
        return {
            "name": "token",
            "sealed": await whole.sealed("token", mutation),
            "expected_version": 0,
            "mutation_id": mutation,
        }

    async def look(self, whole: Whole) -> Any:
        page = await whole.bus.request(endpoints.SECRETS_LIST, SecretList(actor=now(console), project="default"))
        return next((item.version for item in page.items if item.name == "token"), 0)

    async def _set(self, whole: Whole, by: Actor) -> None:
        mutation = new_id()
        await whole.bus.request(
            endpoints.SECRETS_SET,
            SecretSet(
                actor=by,
                project="default",
                name="token",
                sealed=await whole.sealed("token", mutation, "other"),
                mutation_id=mutation,
            ),
        )

    async def touch(self, whole: Whole) -> None:
        await self._set(whole, now(console))

    async def alone(self, whole: Whole) -> None:
        await self._set(whole, whole.agent)


class Drain(Case):
    name = "worker.drain"
    before, after, then = "online", "draining", "online"

    async def plan(self, whole: Whole) -> dict[str, Any]:
        return {"worker": WORKER, "drain": True}

    async def look(self, whole: Whole) -> Any:
        page = await whole.bus.request(endpoints.WORKERS_LIST, WorkerList(actor=now(console)))
        return next(item.status for item in page.items if item.id == WORKER)

    async def touch(self, whole: Whole) -> None:
        await whole.bus.request(endpoints.WORKERS_DRAIN, WorkerDrain(actor=now(console), worker=WORKER, drain=False))

    async def alone(self, whole: Whole) -> None:
        await whole.bus.request(endpoints.WORKERS_DRAIN, WorkerDrain(actor=whole.agent, worker=WORKER))


class Bind(Case):
    name = "role.bind"
    before, after, then = None, ("viewer", 1), ("operator", 2)

    async def plan(self, whole: Whole) -> dict[str, Any]:
        return {"subject": msgspec.to_builtins(EVE), "role": "viewer", "expected_version": 0}

    async def look(self, whole: Whole) -> Any:
        page = await whole.bus.request(endpoints.ROLES_LIST, RoleList(actor=now(console), project="default"))
        return next(((item.role, item.version) for item in page.items if item.subject == EVE), None)

    async def _bind(self, whole: Whole, by: Actor, role: Any, expected: int) -> None:
        await whole.bus.request(
            endpoints.ROLES_BIND,
            RoleBind(
                actor=by,
                project="default",
                subject=EVE,
                role=role,
                expected_version=expected,
                mutation_id=new_id(),
            ),
        )

    async def touch(self, whole: Whole) -> None:
        await self._bind(whole, now(console), "operator", 1)

    async def alone(self, whole: Whole) -> None:
        await self._bind(whole, whole.agent, "viewer", 0)


CASES: list[Any] = [TaskChange(), SecretChange(), Drain(), Bind()]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
async def test_asked_by_an_agent_decided_by_a_person_done_once(whole: Whole, case: Any) -> None:
    with pytest.raises(Ql3Error) as refused:
        await case.alone(whole)
    assert refused.value.code == "approval_required"
    assert await case.look(whole) == case.before

    handler = whole.approval.handlers[case.name]
    orders: list[tuple[Endpoint[Any, Any], Any]] = []
    asked = getattr(handler, "_ask", None)

    async def listening(endpoint: Endpoint[Any, Any], message: Any, /) -> Any:
        if getattr(message, "dispatch_id", None) is not None:
            orders.append((endpoint, message))
        assert asked is not None
        return await asked(endpoint, message)

    if asked is not None:
        handler._ask = listening  # pyright: ignore[reportAttributeAccessIssue]
    request_id = await whole.ask(case.name, await case.plan(whole))
    await whole.approve(request_id)
    action = await whole.ended(request_id)
    assert (action.status, action.attempt_count) == ("succeeded", 1)
    assert action.evidence_digest is not None
    assert action.resource_id
    assert await case.look(whole) == case.after

    # Somebody goes on with the same thing; the same order again is an acknowledgement and no second effect.
    await case.touch(whole)
    assert await case.look(whole) == case.then
    for endpoint, message in orders:
        await whole.bus.request(endpoint, message)
    assert len(orders) == (0 if asked is None else 1)
    assert await case.look(whole) == case.then


ORDERED: list[tuple[Any, str]] = [
    (TaskChange(), "task_change"),
    (SecretChange(), "secret_set"),
    (Drain(), "worker_drain"),
]


async def lost(whole: Whole, case: Any, *, deliver: bool) -> tuple[ApprovedAction, Endpoint[Any, Any], Any]:
    """An approved action whose order got no answer: it was never delivered, or only its answer was lost."""
    handler: Any = whole.approval.handlers[case.name]
    real = handler._ask
    orders = Heard()

    async def losing(endpoint: Endpoint[Any, Any], message: Any, /) -> Any:
        if getattr(message, "dispatch_id", None) is None or isinstance(message, ActionClose):
            return await real(endpoint, message)
        if deliver:
            await real(endpoint, message)
        await orders.add((endpoint, message))
        raise Ql3Error("unavailable")

    handler._ask = losing
    whole.approval.executor.stop()  # ask once: the doubt is recovery's
    request_id = await whole.ask(case.name, await case.plan(whole))
    await whole.approve(request_id)
    sent: Any = (await orders.count(1))[0]
    await whole.ended(request_id, "executing")
    await shift_clock(whole.database, executions.LEASE_MS)
    return await whole.ended(request_id), *sent


@pytest.mark.parametrize(("case", "code"), ORDERED, ids=[case.name for case, _ in ORDERED])
async def test_an_order_that_comes_after_its_execution_failed_has_no_effect(whole: Whole, case: Any, code: str) -> None:
    action, endpoint, late = await lost(whole, case, deliver=False)
    assert (action.status, action.result_code) == ("failed", f"{code}_never_done")
    with pytest.raises(Ql3Error) as refused:
        await whole.bus.request(endpoint, late)
    assert refused.value.code == "conflict"
    assert await case.look(whole) == case.before


@pytest.mark.parametrize(("case", "code"), ORDERED, ids=[case.name for case, _ in ORDERED])
async def test_an_effect_whose_answer_was_lost_is_found_and_not_repeated(whole: Whole, case: Any, code: str) -> None:
    action, endpoint, again = await lost(whole, case, deliver=True)
    assert (action.status, action.result_code) == ("succeeded", f"{code}_verified")
    assert action.evidence_digest is not None
    await case.touch(whole)
    await whole.bus.request(endpoint, again)
    assert await case.look(whole) == case.then
