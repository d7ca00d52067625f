"""kill -9 at every step of an approval's life: afterwards at most one run exists for it, and the next life goes on."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from schemas import endpoints
from schemas.approvals import ActionList, ApprovalCreate, ApprovalDecide
from schemas.endpoints import Endpoint
from schemas.errors import Ql3Error
from schemas.identity import IdentityRegister, RoleBind, Subject
from schemas.runs import RunEventList, RunList
from services.approval import executions
from services.dispatcher.service import DispatcherService
from services.kit.bus import Bus, BusOptions
from services.kit.clock import WallClock
from services.kit.config import Config
from services.kit.database import Database
from services.kit.ids import new_id
from services.kit.natsserver import NatsServer
from services.scheduler.service import SchedulerService
from tests.approval.conftest import actor, console, gateway
from tests.approval.crashing import Order
from tests.approval.house import House, now
from tests.fixtures_database import database_configs, shift_clock
from tests.fixtures_nats import WAIT_S, BusFactory

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


class Life:
    """Lives of the approval service, one after another, each its own process."""

    def __init__(self, database: Database, options: BusOptions) -> None:
        self._database = database
        self._options = options
        self._process: asyncio.subprocess.Process | None = None

    async def begin(self, point: str = "") -> None:
        """A process that answers."""
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.approval.crashing",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        order = Order(database_configs[self._database], self._options, point)
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        await process.stdin.drain()
        async with asyncio.timeout(WAIT_S):
            while True:
                line = await process.stdout.readline()
                if line == b"ready\n":
                    return
                assert line or point, "the service did not start"
                if not line:
                    return  # it died at its point, before it could say that it is ready

    async def died(self) -> bool:
        """Wait for the end by its own hand."""
        assert self._process is not None
        async with asyncio.timeout(WAIT_S):
            return await self._process.wait() == -signal.SIGKILL

    async def kill(self) -> None:
        """End it, whatever it does."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


@pytest_asyncio.fixture
async def others(database_on: Callable[..., Awaitable[Database]], bus_for: BusFactory) -> AsyncIterator[House]:
    """The real scheduler and dispatcher."""
    services: list[Any] = []
    for name, kind in (("scheduler", SchedulerService), ("dispatcher", DispatcherService)):
        made = kind(
            config=Config(), database=await database_on("sqlite", name), bus=await bus_for(name), clock=WallClock()
        )
        await made.start()
        services.append(made)
    house = House(await bus_for("gateway"))
    await house.listen()
    yield house
    for made in reversed(services):
        await made.stop()


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


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("dialect", ["sqlite", "postgresql"])
async def test_at_most_one_run(
    point: str,
    dialect: str,
    others: House,
    database_on: Callable[..., Awaitable[Database]],
    nats_server: NatsServer,
) -> None:
    database = await database_on(dialect, "approval")
    bus = others.bus
    life = Life(database, nats_server.options("approval"))
    bot = Subject(type="agent", id="bot")
    try:
        await life.begin()
        await ask_until_answered(
            bus,
            endpoints.IDENTITIES_REGISTER,
            IdentityRegister(actor=now(gateway), subject=bot, provider="api_credential", provider_subject="bot"),
        )
        await ask_until_answered(
            bus,
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
        await others.task("plain", needs_approval=False)
        await life.kill()

        # A recovery needs a doubt: the first life dies while it executes, the second while it recovers.
        recovering = point.startswith("approval.recover")
        await life.begin("execute:after" if recovering else point)
        agent = actor("bot", kind="agent", assurance="service", now_ms=WallClock().now_ms())
        asked = ApprovalCreate(
            actor=agent, project="default", id=new_id(), action_type="run.create", plan={"task": "plain"}
        )
        decided = ApprovalDecide(
            actor=now(console), project="default", approval=asked.id, decision_id=new_id(), decision="approved"
        )

        async def client() -> None:
            await ask_until_answered(bus, endpoints.APPROVALS_CREATE, asked)
            await ask_until_answered(bus, endpoints.APPROVALS_DECIDE, decided)

        working = asyncio.create_task(client())
        if recovering:
            assert await life.died()
            await shift_clock(database, executions.LEASE_MS)
            await life.begin(point)
        await second_life(life, database)
        await working

        action = await _ended(bus, asked.id)
        runs = (await bus.request(endpoints.RUNS_LIST, RunList(actor=now(console), project="default"))).items
        made = [run for run in runs if run.trigger_type == "approved_action"]
        if point == "execute:before" or point == "action.start:after":
            # It crossed the barrier and nothing came of it: closed for ever, and said so.
            assert (action.status, action.result_code, made) == ("failed", "approved_run_never_created", [])
        else:
            assert (action.status, len(made)) == ("succeeded", 1)
            events = await bus.request(
                endpoints.RUNS_EVENTS, RunEventList(actor=now(console), project="default", run=made[0].id)
            )
            assert sum(event.type == "run.queued" for event in events.items) == 1
    finally:
        await life.kill()


async def _ended(bus: Bus, approval: str) -> Any:
    async with asyncio.timeout(WAIT_S):
        while True:
            question = ActionList(actor=now(console), project="default")
            page = await ask_until_answered(bus, endpoints.ACTIONS_LIST, question)
            for item in page.items:
                if item.approval_id == approval and item.status in executions.TERMINAL:
                    return item
            await asyncio.sleep(0.05)  # the service works on its own pace; its end is read from its table
