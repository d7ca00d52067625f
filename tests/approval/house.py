"""The real scheduler and dispatcher beside approval, and somebody who asks them over the bus."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from schemas import endpoints
from schemas.approvals import ApprovalChanged, ApprovalDecide
from schemas.runs import Run, RunChanged, RunRead
from schemas.tasks import Execution, Task, TaskCreate, TaskRun, TaskSpec, Terms
from services.approval.service import ApprovalService
from services.kit.bus import Bus, Delivery
from services.kit.clock import WallClock
from services.kit.ids import new_id
from tests.approval.conftest import console
from tests.fixtures_nats import Heard


def now(who: Callable[[int], Any]) -> Any:
    """An actor authenticated just now."""
    return who(WallClock().now_ms())


class House:
    """The three services on one bus, and the gateway's place on it."""

    approval: ApprovalService

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
        return await self.read(run)

    async def read(self, run: str) -> Run:
        """The run as it stands."""
        question = RunRead(actor=now(console), project="default", run=run)
        return (await self.bus.request(endpoints.RUNS_GET, question)).run
