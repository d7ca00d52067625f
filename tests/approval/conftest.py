"""What the tests of authority share: a gate on a real database with a manual clock, and people."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Literal

import pytest
import pytest_asyncio

from schemas.approvals import ApprovalDecide, Binding, HoldOrder, preview_digest
from schemas.errors import Ql3Error
from schemas.identity import (
    GATEWAY,
    LOCAL_CONSOLE,
    Actor,
    Assurance,
    IdentityRegister,
    RoleBind,
    Subject,
    SubjectType,
)
from services.approval.approvals import Approvals
from services.approval.authority import Authority
from services.approval.directory import Directory
from services.approval.executions import Execution, Lease
from services.approval.executor import Executor
from services.approval.gate import Gate
from services.approval.handlers.port import Inspection, Outcome, Planned
from services.approval.handover import HandOver
from services.approval.reconciler import Reconciler
from services.approval.recovery import Control, Finding
from services.approval.service import ApprovalService
from services.approval.store import actions
from services.approval.store import recovery as controls
from services.approval.store import requests as request_rows
from services.approval.store.actions import Dispatch
from services.dispatcher.service import DispatcherService
from services.kit.clock import ManualClock, WallClock
from services.kit.config import Config
from services.kit.database import Database
from services.kit.ids import new_id
from services.kit.natsserver import NatsServer
from services.scheduler.service import SchedulerService
from tests.fixtures_nats import BusFactory

NOW = 1_700_000_000_000
HOUR = 3_600_000


def actor(
    subject_id: str,
    *,
    kind: SubjectType = "user",
    assurance: Assurance = "multi_factor",
    now_ms: int = NOW,
    age_ms: int = 0,
) -> Actor:
    """Somebody who proved who they are `age_ms` ago."""
    return Actor(
        type=kind,
        id=subject_id,
        authentication_id=f"auth-{subject_id}",
        assurance=assurance,
        authenticated_at_ms=now_ms - age_ms,
        expires_at_ms=now_ms + 365 * 24 * HOUR,
    )


def console(now_ms: int = NOW, *, age_ms: int = 0) -> Actor:
    """The machine's own console."""
    return actor(LOCAL_CONSOLE, assurance="local_console", now_ms=now_ms, age_ms=age_ms)


def gateway(now_ms: int = NOW) -> Actor:
    """The gateway itself."""
    return actor(GATEWAY, kind="system", assurance="service", now_ms=now_ms)


def hold(
    *,
    request_id: str | None = None,
    project: str = "default",
    requested_by: Subject | None = None,
    now_ms: int = NOW,
    ttl_ms: int = HOUR,
    risk: Any = "medium",
    labels: dict[str, str] | None = None,
    order_id: str | None = None,
    not_before_ms: int | None = None,
) -> HoldOrder:
    """An order as the dispatcher sends it for a run that waits."""
    run = request_id or new_id()
    preview = {"task": "backup", "run": run}
    return HoldOrder(
        order_id=order_id or new_id(),
        request_id=run,
        project=project,
        binding=Binding(
            permission="run.start",
            action_type="run.release",
            action_ref=run,
            action_digest="a" * 64,
            preview_digest=preview_digest(preview),
        ),
        preview=preview,
        risk=risk,
        requested_by=requested_by or Subject(type="user", id=LOCAL_CONSOLE),
        requested_at_ms=now_ms,
        expires_at_ms=now_ms + ttl_ms,
        labels=labels or {},
        not_before_ms=not_before_ms,
    )


class World:
    """Authority on one database."""

    def __init__(self, database: Database) -> None:
        self.clock = ManualClock(NOW)
        self.database = database
        self.gate = Gate(database, self.clock)
        self.authority = Authority(self.gate)
        self.directory = Directory(self.gate)
        self.approvals = Approvals(self.gate)

    async def person(
        self, subject_id: str, role: Any = None, *, project: str = "default", kind: SubjectType = "user"
    ) -> Actor:
        """A registered subject, with a role when given."""
        subject = Subject(type=kind, id=subject_id)
        await self.directory.register(
            IdentityRegister(
                actor=gateway(self.clock.now_ms()), subject=subject, provider="password", provider_subject=subject_id
            )
        )
        if role is not None:
            await self.bind(subject, role, project=project)
        return actor(subject_id, kind=kind, now_ms=self.clock.now_ms())

    async def bind(self, subject: Subject, role: Any, *, project: str = "default", expected: int = 0) -> None:
        """Give or take a role, by the console."""
        await self.authority.bind_role(
            RoleBind(
                actor=console(self.clock.now_ms()),
                project=project,
                subject=subject,
                role=role,
                expected_version=expected,
                mutation_id=new_id(),
            )
        )


WorldFactory = Callable[..., Awaitable[World]]


@pytest_asyncio.fixture
async def world(database_for: Callable[[str], Awaitable[Database]]) -> World:
    """Authority on SQLite and on PostgreSQL."""
    return World(await database_for("approval"))


class Receiver:
    """Whoever carries an action out, as handlers see it: keeps a receipt for each dispatch id, can be away."""

    def __init__(self) -> None:
        self.effects: list[str] = []
        self.closed: set[str] = set()
        self.away = False
        self.lose_answers = False
        self.digest: str | None = None
        self.verdict = "ready"
        self.evidence: Finding | None = None
        self.broken = False
        self.blind = False
        self.refuses: list[str] = []
        """Codes with which it refuses, one each time it is asked to act."""

    action_type = "run.release"
    permission = "run.start"
    needs: str | None = None

    async def understand(self, project: str, action_ref: str, plan: dict[str, Any]) -> Planned:
        return Planned(plan, {"plan": "fake"})

    async def inspect(self, dispatch: Dispatch) -> Inspection:
        if self.away:
            raise Ql3Error("unavailable")
        if self.blind:
            raise RuntimeError("blind")
        if self.verdict != "ready":
            return Inspection(None, self.verdict, "told_so")  # type: ignore[arg-type]
        return Inspection(self.digest or dispatch.binding.action_digest)

    async def execute(self, dispatch: Dispatch) -> Outcome:
        if self.broken:
            raise RuntimeError("broken")
        if self.refuses:
            raise Ql3Error(self.refuses.pop(0))
        if dispatch.id in self.closed:
            return Outcome("failed", "closed")
        if dispatch.id not in self.effects:
            self.effects.append(dispatch.id)
        if self.lose_answers:
            raise Ql3Error("unavailable")
        return Outcome("succeeded", "done", "run", dispatch.binding.action_ref)

    async def observe(self, dispatch: Dispatch, execution: Execution) -> Finding:
        if self.away:
            raise Ql3Error("unavailable")
        if self.evidence is not None:
            return self.evidence
        if dispatch.id in self.effects:
            return Finding("verified_succeeded", "seen", "e" * 64, ("run", dispatch.binding.action_ref))
        return Finding("missing", "nothing_seen")

    async def close(self, dispatch: Dispatch) -> Finding | None:
        if self.away:
            raise Ql3Error("unavailable")
        if dispatch.id in self.effects:
            return Finding("verified_succeeded", "seen", "e" * 64)
        self.closed.add(dispatch.id)
        return None


class Works(World):
    """Authority with an executor and a reconciler, whose receiver is `receiver`."""

    def __init__(self, database: Database, *, owner: str = "one") -> None:
        super().__init__(database)
        self.receiver = Receiver()
        handlers = {"run.release": self.receiver}
        self.hand_over = HandOver(self.gate)
        self.executor = Executor(self.gate, handlers, reach=self._reach, owner=owner)
        self.executor.stop()  # a lost answer is left to recovery at once
        self.reconciler = Reconciler(self.gate, handlers, owner=owner)

    async def _reach(self, service: str) -> bool:
        return True

    async def approved(self, **more: Any) -> str:
        """An approved request of a held run."""
        order = hold(now_ms=self.clock.now_ms(), **more)
        await self.approvals.hold([order])
        await self.decided(order.request_id, "approved")
        return order.request_id

    async def decided(self, request_id: str, decision: Literal["approved", "rejected"]) -> None:
        """The console's decision."""
        await self.approvals.decide(
            ApprovalDecide(
                actor=console(self.clock.now_ms()),
                project="default",
                approval=request_id,
                decision_id=new_id(),
                decision=decision,
            )
        )

    async def dispatched(self, **more: Any) -> Dispatch:
        """An approved and consumed request's dispatch."""
        request_id = await self.approved(**more)
        assert await self.hand_over.one(request_id)
        return await self.dispatch_of(request_id)

    async def dispatch_of(self, request_id: str) -> Dispatch:
        request = await self.database.read(lambda tx: request_rows.get(tx, request_id))
        assert request is not None
        found = await self.database.read(lambda tx: actions.dispatch(tx, request.dispatch_id or ""))
        assert found is not None
        return found

    async def leased(self, dispatch: Dispatch, token: str = "t") -> Lease:
        """Claimed by this executor."""
        claimed = await self.executor.claim(dispatch.id, token)
        assert claimed is not None
        return Lease(claimed.lease_owner or "", token, claimed.version)

    async def started(self, **more: Any) -> tuple[Dispatch, Lease]:
        """Past the barrier, with the lease at its version."""
        dispatch = await self.dispatched(**more)
        lease = await self.leased(dispatch)
        started = await self.executor.start(dispatch, lease)
        return dispatch, lease._replace(version=started.version)

    async def execution(self, dispatch: Dispatch) -> Execution:
        found = await self.database.read(lambda tx: actions.execution(tx, dispatch.id))
        assert found is not None
        return found

    async def control(self, dispatch: Dispatch) -> Control:
        found = await self.database.read(lambda tx: controls.control(tx, dispatch.id))
        assert found is not None
        return found


@pytest_asyncio.fixture
async def works(database_for: Callable[[str], Awaitable[Database]]) -> Works:
    """Authority that carries out, on SQLite and on PostgreSQL."""
    return Works(await database_for("approval"))


@pytest_asyncio.fixture
async def house(
    request: pytest.FixtureRequest, database_on: Callable[..., Awaitable[Database]], bus_for: BusFactory
) -> AsyncIterator[Any]:
    """The real scheduler and dispatcher beside approval; on SQLite, or on the dialect that a test names indirectly."""
    from tests.approval.house import House

    dialect = getattr(request, "param", "sqlite")
    services: list[Any] = []
    for name, kind in (
        ("approval", ApprovalService),
        ("scheduler", SchedulerService),
        ("dispatcher", DispatcherService),
    ):
        database = await database_on(dialect, name)
        made = kind(config=Config(), database=database, bus=await bus_for(name), clock=WallClock())
        await made.start()
        services.append(made)
    found = House(await bus_for("gateway"))
    found.approval = services[0]
    await found.listen()
    yield found
    for made in reversed(services):
        await made.stop()


@pytest_asyncio.fixture
async def others(database_on: Callable[..., Awaitable[Database]], bus_for: BusFactory) -> AsyncIterator[Any]:
    """The real scheduler and dispatcher, for an approval service that lives in a process of its own."""
    from tests.approval.house import House

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


@pytest_asyncio.fixture(params=["sqlite", "postgresql"])
async def scene(
    request: pytest.FixtureRequest,
    others: Any,
    database_on: Callable[..., Awaitable[Database]],
    nats_server: NatsServer,
) -> AsyncIterator[Any]:
    """Lives of the approval service on both dialects, with an agent and two tasks."""
    from tests.approval.lives import Life, Scene

    database = await database_on(request.param, "approval")
    life = Life(database, nats_server.options("approval"))
    made = Scene(others, life, database)
    try:
        await made.people()
        yield made
    finally:
        await life.kill()
