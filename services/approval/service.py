"""The approval service on the bus: endpoints, orders, facts and loops. The only file of the room that knows NATS."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec
import structlog

from schemas import endpoints
from schemas.approvals import RequestApprovals
from schemas.endpoints import Endpoint
from schemas.errors import Ql3Error
from schemas.runs import RUN_TERMINAL, Run, RunChanged, RunRead, RunRelease, RunReleaseAnswer
from schemas.system import FeedPage, FeedRead, HealthRead
from services.approval.approvals import ENDINGS, WORK, Approvals
from services.approval.asking import Asking
from services.approval.authority import Authority
from services.approval.directory import Directory
from services.approval.executor import Endings, Executor
from services.approval.gate import Gate
from services.approval.handlers.plans import Plans
from services.approval.handlers.port import Handler, service_actor
from services.approval.handlers.role_bind import RoleBindHandler
from services.approval.handlers.run_create import RunCreateHandler
from services.approval.handlers.run_release import RunReleaseHandler
from services.approval.handlers.secret_set import SecretSetHandler
from services.approval.handlers.task_change import TaskChangeHandler
from services.approval.handlers.worker_drain import WorkerDrainHandler
from services.approval.purging import Purging
from services.approval.reconciler import Reconciler
from services.approval.store import requests as rows
from services.approval.store.holds import Held
from services.approval.watching import HELD, HeldRuns, ended_unqueued
from services.kit.bus import Bus, Caller, Delivery, Route
from services.kit.clock import Clock
from services.kit.config import Config
from services.kit.database import Database
from services.kit.health import Health
from services.kit.ids import new_id
from services.kit.loops import Loop
from services.kit.orders import AckBatcher
from services.kit.policy import PolicyClient
from services.kit.standing import standing_routes
from services.kit.upkeep import upkeep
from services.kit.version import VERSION

NAME: Final = "approval"
ENDED_RUNS: Final = "ql3.evt.run.*.*."
FACTS_EVERY_S: Final = 60.0
PURGE_EVERY_S: Final = 3_600.0

Q = TypeVar("Q", bound=msgspec.Struct)
A = TypeVar("A", bound=msgspec.Struct)

log: structlog.stdlib.BoundLogger = structlog.get_logger("ql3.approval")


class ApprovalService:
    """Identities, projects, roles, policy, approvals and approved actions."""

    def __init__(self, *, config: Config, database: Database, bus: Bus, clock: Clock) -> None:
        self._database = database
        self._bus = bus
        self._acks = AckBatcher(bus)
        self.gate = Gate(database, clock)
        self.authority = Authority(self.gate)
        self.directory = Directory(self.gate)
        self.approvals = Approvals(self.gate)
        plans = Plans(database)
        handlers: list[Handler] = [
            RunReleaseHandler(self._ask),
            RunCreateHandler(self._ask, plans, clock.now_ms),
            TaskChangeHandler(self._ask, plans, clock.now_ms),
            SecretSetHandler(self._ask, plans, clock.now_ms),
            RoleBindHandler(self.gate, self.authority, plans),
            WorkerDrainHandler(self._ask, plans, clock.now_ms),
        ]
        self.handlers = {handler.action_type: handler for handler in handlers}
        self.asking = Asking(self.gate, self.approvals, self.handlers)
        owner = f"approval:{new_id()}"
        self.executor = Executor(self.gate, self.handlers, reach=self._reach, owner=owner)
        self.reconciler = Reconciler(self.gate, self.handlers, owner=owner)
        self.endings = Endings(self.gate, self.approvals, self._end_run)
        self.held_runs = HeldRuns(self.gate, self.approvals, read=self._read_facts, look=self._look_at_run)
        self._now = clock.now_ms
        pace_s = 5.0 if config.profile == "edge" else 2.0
        self.loops = [
            Loop("approval.actions", self._act, every_s=pace_s, bell=database.bell(WORK)),
            Loop("approval.endings", self.endings.step, every_s=pace_s, bell=database.bell(ENDINGS)),
            Loop("approval.held", self.held_runs.step, every_s=FACTS_EVERY_S, bell=database.bell(HELD)),
            Loop("approval.purge", Purging(self.gate).step, every_s=PURGE_EVERY_S),
            *upkeep(database, bus),
        ]
        self._health = Health()
        self._health.add("bus", bus.health)

    async def start(self) -> None:
        """Answer, then work."""
        await self._acks.start()
        await self._bus.serve(NAME, VERSION, self._routes())
        await self._bus.consume(NAME, {RequestApprovals: self._requested})
        for status in sorted(RUN_TERMINAL):
            await self._bus.on_event(f"{ENDED_RUNS}{status}", self._run_ended)
        for loop in self.loops:
            await loop.start()

    async def stop(self) -> None:
        """End after what runs now; what is open is found again by the next life."""
        self.executor.stop()
        for loop in self.loops:
            await loop.stop()
        await self._acks.stop()

    def health(self) -> list[str]:
        """Reasons why it is not ready; empty when it is."""
        return self._health.ready()

    # -- endpoints

    def _routes(self) -> list[Route[Any, Any]]:
        authority, directory, approvals = self.authority, self.directory, self.approvals
        return [
            _route(endpoints.POLICY_CHECK, self.gate.answer, concurrency=64),
            _route(endpoints.PROJECTS_CREATE, authority.create_project),
            _route(endpoints.PROJECTS_GET, authority.get_project),
            _route(endpoints.PROJECTS_LIST, authority.list_projects),
            _route(endpoints.PROJECTS_ARCHIVE, authority.archive_project),
            _route(endpoints.ROLES_BIND, authority.bind_role),
            _route(endpoints.ROLES_LIST, authority.list_roles),
            _route(endpoints.RULES_GET, authority.get_rules),
            _route(endpoints.RULES_SET, authority.set_rules),
            _route(endpoints.RULES_DRY_RUN, authority.dry_run),
            _route(endpoints.IDENTITIES_REGISTER, directory.register),
            _route(endpoints.IDENTITIES_RESOLVE, directory.resolve),
            _route(endpoints.IDENTITIES_SET, directory.set_status),
            _route(endpoints.IDENTITIES_LIST, directory.page),
            _route(endpoints.IDENTITIES_GET, directory.get),
            _route(endpoints.IDENTITIES_REVOKE_BINDING, directory.revoke_binding),
            _route(endpoints.BOOTSTRAP_ISSUE, directory.issue),
            _route(endpoints.BOOTSTRAP_CLAIM, directory.claim),
            _route(endpoints.BOOTSTRAP_READ, directory.state),
            _route(endpoints.APPROVALS_LIST, approvals.page),
            _route(endpoints.APPROVALS_GET, approvals.get),
            _route(endpoints.APPROVALS_CREATE, self.asking.create),
            _route(endpoints.APPROVALS_DECIDE, approvals.decide),
            _route(endpoints.APPROVALS_WITHDRAW, approvals.withdraw),
            _route(endpoints.ACTIONS_LIST, self.reconciler.page),
            _route(endpoints.ACTIONS_GET, self.reconciler.get),
            _route(endpoints.ACTIONS_RECOVER, self.reconciler.recover),
            *standing_routes(
                NAME, VERSION, database=self._database, policy=PolicyClient(self._bus), health=self._health
            ),
        ]

    # -- work

    async def _act(self) -> bool | float | None:
        # Doubts first: while they cannot even be read, nothing new is begun.
        more = await self.reconciler.step()
        wait = await self.executor.step()
        return True if more else wait

    # -- orders and facts

    async def _requested(self, batch: Sequence[RequestApprovals]) -> list[BaseException | None]:
        orders = [order for message in batch for order in message.requests]
        settled = await self.approvals.hold(orders)
        self.held_runs.asked(order.request_id for order, error in zip(orders, settled, strict=True) if error is None)
        outcomes = iter(settled)
        answers: list[BaseException | None] = []
        for message in batch:
            bad: Ql3Error | None = None
            done: list[str] = []
            for order in message.requests:
                error = next(outcomes)
                if error is None:
                    done.append(order.order_id)
                else:
                    log.warning("a held run cannot be asked for", run=order.request_id, error=error.code)
                    bad = bad or error
            self._acks.add(message.sender, done)
            answers.append(bad)
        return answers

    async def _run_ended(self, delivery: Delivery) -> None:
        fact = delivery.decode(RunChanged)
        if ended_unqueued(fact):
            await self.held_runs.ended([fact.run_id])

    # -- others

    async def _ask(self, endpoint: Endpoint[Q, A], message: Q, /) -> A:
        return await self._bus.request(endpoint, message)

    async def _reach(self, service: str) -> bool:
        try:
            await self._bus.request(endpoints.HEALTH[service], HealthRead(), timeout=2.0)
        except Ql3Error:
            return False
        return True

    async def _read_facts(self, after: str | None) -> FeedPage:
        return await self._bus.request(
            endpoints.FEED_READ["dispatcher"], FeedRead(after=after, subjects=["ql3.evt.run."])
        )

    async def _look_at_run(self, held: Held) -> Run:
        question = RunRead(actor=service_actor(self._now()), project=held.project, run=held.run)
        return (await self._bus.request(endpoints.RUNS_GET, question)).run

    async def _end_run(self, ending: rows.Ending) -> RunReleaseAnswer:
        return await self._bus.request(
            endpoints.RUNS_RELEASE,
            RunRelease(
                dispatch_id=ending.dispatch_id,
                run=ending.run,
                project=ending.project,
                outcome=ending.outcome,
                approval_id=ending.request_id,
            ),
        )


def _route(endpoint: Endpoint[Q, A], answer: Any, *, concurrency: int = 16) -> Route[Q, A]:
    async def handle(question: Q, caller: Caller) -> A:
        return await answer(question)

    return Route(endpoint, handle, concurrency=concurrency)
