"""Lives of the approval service that end with kill -9, one after another, beside others that live on."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
from multiprocessing.context import ForkServerProcess
from typing import Any

from schemas import endpoints
from schemas.approvals import ActionList, ApprovalCreate, ApprovalDecide, ApprovedAction
from schemas.endpoints import Endpoint
from schemas.errors import Ql3Error
from schemas.identity import IdentityRegister, RoleBind, Subject
from schemas.runs import Run, RunEventList, RunList
from services.approval import executions
from services.kit.bus import Bus, BusOptions
from services.kit.clock import WallClock
from services.kit.database import Database
from services.kit.ids import new_id
from tests.approval.conftest import actor, console, gateway
from tests.approval.crashing import Order, live
from tests.approval.house import House, now
from tests.fixtures_database import database_configs, shift_clock
from tests.fixtures_nats import WAIT_S

POINTS = [
    "approval.request:inside",
    "approval.request:after",
    "approval.decide:inside",
    "approval.decide:after",
    "approval.consume:inside",
    "approval.consume:after",
    "action.start:inside",
    "action.start:after",
    "execute:before",
    "execute:after",
    "action.succeeded:inside",
    "action.succeeded:after",
    "approval.recover:inside",
    "approval.recover:after",
]


PROCESSES = multiprocessing.get_context("forkserver")
"""A life is forked from a process that has everything loaded, which is most of what its start costs."""
PROCESSES.set_forkserver_preload(["tests.approval.crashing"])


class Life:
    """Lives of the approval service, one after another, each its own process."""

    def __init__(self, database: Database, options: BusOptions) -> None:
        self._database = database
        self._options = options
        self._process: ForkServerProcess | None = None

    async def begin(self, point: str = "") -> None:
        """A process that answers."""
        order = Order(database_configs[self._database], self._options, point)
        here, there = PROCESSES.Pipe()
        self._process = process = PROCESSES.Process(target=live, args=(order, there), daemon=True)
        await asyncio.to_thread(process.start)
        there.close()
        self._pipe = here
        try:
            if await asyncio.to_thread(here.poll, WAIT_S):
                here.recv()
                return
        except EOFError:
            assert point, "the service did not start"
            return  # it died at its point, before it could say that it is ready
        raise AssertionError("the service neither started nor died")

    async def died(self) -> bool:
        """Wait for the end by its own hand."""
        assert self._process is not None
        await asyncio.to_thread(self._process.join, WAIT_S)
        return self._process.exitcode == -signal.SIGKILL

    async def kill(self) -> None:
        """End it, whatever it does."""
        if self._process is not None and self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join)


async def ask_until_answered(bus: Bus, endpoint: Endpoint[Any, Any], message: Any) -> Any:
    """What a client does: the same question again until somebody answers it."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                return await bus.request(endpoint, message, timeout=1.0)
            except Ql3Error as error:
                if error.code not in ("unavailable", "not_found"):
                    raise
            await asyncio.sleep(0.05)  # between two questions to a process that is coming up


async def second_life(life: Life, database: Database) -> None:
    """After the death: leases lapse, and another process takes over."""
    assert await life.died()
    await shift_clock(database, executions.LEASE_MS)
    await life.begin()


class Scene:
    """One approval's life in a row of processes that die; the other services, the bus and the databases live on."""

    def __init__(self, others: House, life: Life, database: Database) -> None:
        self.others = others
        self.bus = others.bus
        self.life = life
        self.database = database

    async def people(self) -> None:
        """An agent that may only ask, and a task."""
        await self.life.begin()
        bot = Subject(type="agent", id="bot")
        await ask_until_answered(
            self.bus,
            endpoints.IDENTITIES_REGISTER,
            IdentityRegister(actor=now(gateway), subject=bot, provider="api_credential", provider_subject="bot"),
        )
        await ask_until_answered(
            self.bus,
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
        self.task = await self.others.task("plain", needs_approval=False)
        await self.others.task("held")
        await self.life.kill()

    async def begin(self, point: str) -> None:
        """A process that dies at its point; to die at a recovery or a closing, there is a doubt first."""
        step = point.partition(":")[0]
        await self.life.begin({"approval.recover": "execute:after", "close": "execute:before"}.get(step, point))

    async def end(self, point: str) -> None:
        """Wait for the death, and for that at the recovery; leases lapse, and another process takes over."""
        if point.startswith(("approval.recover", "close")):
            assert await self.life.died()
            await shift_clock(self.database, executions.LEASE_MS)
            await self.life.begin(point)
        await second_life(self.life, self.database)

    async def decided(self, approval: str) -> None:
        """Approved by a person, as soon as it is there and somebody answers."""
        wanted = ApprovalDecide(
            actor=now(console), project="default", approval=approval, decision_id=new_id(), decision="approved"
        )
        await ask_until_answered(self.bus, endpoints.APPROVALS_DECIDE, wanted)

    async def asked(self, action_type: str, plan: dict[str, Any]) -> str:
        """What an agent does: ask, and let a person decide; answers the request's id."""
        agent = actor("bot", kind="agent", assurance="service", now_ms=WallClock().now_ms())
        wanted = ApprovalCreate(actor=agent, project="default", id=new_id(), action_type=action_type, plan=plan)
        self.working = asyncio.create_task(self._asked(wanted))
        return wanted.id

    async def _asked(self, wanted: ApprovalCreate) -> None:
        await ask_until_answered(self.bus, endpoints.APPROVALS_CREATE, wanted)
        await self.decided(wanted.id)

    async def queued(self, run: str) -> int:
        """How often a run was queued."""
        question = RunEventList(actor=now(console), project="default", run=run)
        events = await self.bus.request(endpoints.RUNS_EVENTS, question)
        return sum(event.type == "run.queued" for event in events.items)

    async def made(self) -> list[Run]:
        """The runs that came of approved actions."""
        listed = await self.bus.request(endpoints.RUNS_LIST, RunList(actor=now(console), project="default"))
        return [run for run in listed.items if run.trigger_type == "approved_action"]


async def ended(bus: Bus, approval: str) -> ApprovedAction:
    """The action of an approval, once it is at its end."""
    async with asyncio.timeout(WAIT_S):
        while True:
            question = ActionList(actor=now(console), project="default")
            page = await ask_until_answered(bus, endpoints.ACTIONS_LIST, question)
            for item in page.items:
                if item.approval_id == approval and item.status in executions.TERMINAL:
                    return item
            await asyncio.sleep(0.05)  # the service works on its own pace; its end is read from its table
