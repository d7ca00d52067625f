"""With the real scheduler and dispatcher: a run that waits, and what becomes of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio

from schemas import endpoints
from schemas.approvals import ApprovalChanged, ApprovalCreate, ApprovalDecide, ApprovalWithdraw
from schemas.errors import Ql3Error
from schemas.identity import IdentityRegister, RoleBind, Subject
from schemas.runs import Run, RunCancel, RunChanged, RunList, RunRead
from schemas.tasks import Execution, Task, TaskCreate, TaskRun, TaskSpec, Terms
from services.approval.service import ApprovalService
from services.dispatcher.service import DispatcherService
from services.kit.bus import Bus, Delivery
from services.kit.clock import WallClock
from services.kit.config import Config
from services.kit.database import Database
from services.kit.ids import new_id
from services.scheduler.service import SchedulerService
from tests.approval.conftest import actor, console, gateway
from tests.fixtures_nats import BusFactory, Heard


class House:
    """The three services on one bus, and the gateway's place on it."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.facts = Heard()
        self.requests = Heard()

    async def listen(self) -> None:
        async def heard(delivery: Delivery) -> None:
            await self.facts.add(delivery.decode(RunChanged))

        async def heard_request(delivery: Delivery) -> None:
            await self.requests.add(delivery.decode(ApprovalChanged))

        await self.bus.on_event("ql3.evt.run.>", heard)
        await self.bus.on_event("ql3.evt.approval.>", heard_request)
        await self.bus.flush()

    async def task(
        self, name: str = "held", *, needs_approval: bool = True, labels: dict[str, str] | None = None
    ) -> Task:
        spec = TaskSpec(
            execution=Execution(command=["true"]), terms=Terms(needs_approval=needs_approval, labels=labels or {})
        )
        answer = await self.bus.request(
            endpoints.TASKS_CREATE, TaskCreate(actor=now(console), project="default", name=name, spec=spec)
        )
        return answer.task

    async def run(self, task: str = "held") -> Run:
        answer = await self.bus.request(endpoints.TASKS_RUN, TaskRun(actor=now(console), project="default", task=task))
        return answer.run

    async def decide(self, approval: str, decision: Any) -> None:
        """Decide once the order has arrived."""
        await self.asked(approval, "pending")
        await self.bus.request(
            endpoints.APPROVALS_DECIDE,
            ApprovalDecide(
                actor=now(console),
                project="default",
                approval=approval,
                decision_id=new_id(),
                decision=decision,
            ),
        )

    async def asked(self, approval: str, state: str) -> None:
        """Return when the request has been in this state."""
        await self.requests.until(
            lambda items: any((item.approval_id, item.state) == (approval, state) for item in items)  # type: ignore[attr-defined]
        )

    async def until(self, run: str, *statuses: str) -> Run:
        """The run once it is in one of these."""
        await self.facts.until(
            lambda items: any(item.run_id == run and item.status in statuses for item in items)  # type: ignore[attr-defined]
        )
        question = RunRead(actor=now(console), project="default", run=run)
        return (await self.bus.request(endpoints.RUNS_GET, question)).run


def now(who: Callable[[int], Any]) -> Any:
    """An actor authenticated just now."""
    return who(WallClock().now_ms())


@pytest_asyncio.fixture
async def house(database_on: Callable[..., Awaitable[Database]], bus_for: BusFactory):
    services: list[Any] = []
    for name, kind in (
        ("approval", ApprovalService),
        ("scheduler", SchedulerService),
        ("dispatcher", DispatcherService),
    ):
        database = await database_on("sqlite", name)
        made = kind(config=Config(), database=database, bus=await bus_for(name), clock=WallClock())
        await made.start()
        services.append(made)
    found = House(await bus_for("gateway"))
    await found.listen()
    yield found
    for made in reversed(services):
        await made.stop()


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
