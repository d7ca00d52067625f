"""The scheduler's rooms on a real database, with a clock that moves when told, and a dispatcher that keeps a list."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from schemas.approvals import ApprovalRule
from schemas.base import decode
from schemas.errors import Ql3Error
from schemas.identity import Actor, PolicyDecision, Subject
from schemas.runs import Run, RunOrder, SubmitAnswer, SubmitRuns, Submitted
from schemas.tasks import Execution, Task, TaskCreate, TaskDelete, TaskEnable, TaskSpec, TaskUpdate, Terms
from schemas.triggers import MissedFire, MissedList, Trigger, TriggerEnable, TriggerList, TriggerSpec
from services.kit.clock import ManualClock
from services.kit.database import Database, Row, Statement
from services.scheduler.catalogue import Catalogue
from services.scheduler.executions import Executions
from services.scheduler.loops import AdmissionLoop, PruneLoop, RingLoop
from services.scheduler.occasions import Occasions
from services.scheduler.projects import Projects
from services.scheduler.running import RunAsk, RunDesk
from services.scheduler.submitting import Submitter
from services.scheduler.timetable import Timetable

PROJECT = "default"
ALICE = Actor(
    type="user",
    id="alice",
    authentication_id="session-1",
    assurance="single_factor",
    authenticated_at_ms=0,
    expires_at_ms=2**52,
)
ALLOW = PolicyDecision(effect="allow", reasons=["role_grant"], project_version=1, binding_version=1, role="owner")
ARCHIVED = PolicyDecision(effect="deny", reasons=["project_archived"], project_version=2, binding_version=None)


def at(text: str) -> int:
    """Milliseconds of an instant written as `2026-03-01 02:30:00`, UTC."""
    return int(datetime.fromisoformat(f"{text}+00:00").astimezone(UTC).timestamp() * 1000)


def spec(*command: str, **terms: Any) -> TaskSpec:
    """A task's specification."""
    return TaskSpec(execution=Execution(command=list(command or ("/bin/true",))), terms=Terms(**terms))


def cron(expression: str, **more: Any) -> TriggerSpec:
    """A cron trigger."""
    return TriggerSpec(expression=expression, **more)


def run_of(order: RunOrder) -> Run:
    """A run as the dispatcher would answer it."""
    return Run(
        id=order.run_id,
        project=order.project,
        task_id="-",
        task_name="-",
        task_revision=1,
        status="queued",
        version=1,
        event_sequence=1,
        priority=0,
        trigger_type=order.trigger_type,
        trigger_id=order.trigger_id,
        scheduled_for_ms=order.scheduled_for_ms,
        requested_by=Subject(type=order.requested_by.type, id=order.requested_by.id),
        parent_run_id=None,
        retry_of_run_id=None,
        attempt=1,
        attempt_id=None,
        worker_id=None,
        exit_code=None,
        error_code=None,
        error_summary=None,
        waiting_reason=None,
        cancel_requested_at_ms=None,
        cancel_reason=None,
        created_at_ms=order.created_at_ms,
        queued_at_ms=None,
        started_at_ms=None,
        finished_at_ms=None,
    )


class Ledger:
    """What a dispatcher has to keep of orders: one run an idempotency key, whatever is sent again."""

    def __init__(self) -> None:
        self.runs: dict[tuple[str, str], RunOrder] = {}
        self.revisions: dict[str, Any] = {}
        self.cancelled: list[str] = []
        self.away = False
        self.refuses: str | None = None
        self.fails: str | None = None
        self.overlaps = False
        self.acknowledged: set[str] = set()

    async def submit(self, message: SubmitRuns) -> SubmitAnswer:
        """Make runs, or answer again for those that are there."""
        if self.away:
            raise Ql3Error("unavailable")
        results: list[Submitted] = []
        for order in message.runs:
            if self.refuses:
                results.append(Submitted(order_id=order.order_id, error=self.refuses))
                continue
            if self.overlaps and order.scheduled_for_ms is not None:
                results.append(Submitted(order_id=order.order_id, error="overlap_skipped"))
                continue
            key = (order.project, order.idempotency_key)
            replayed = key in self.runs
            known = self.runs.setdefault(key, order)
            run = run_of(known)
            if self.overlaps:
                run = msgspec.structs.replace(run, status="cancelled", error_code="overlap_skipped")
            results.append(Submitted(order_id=order.order_id, run=run, replayed=replayed))
        for revision in message.revisions:
            self.revisions[revision.digest] = revision
        return SubmitAnswer(results=results)

    async def cancel(self, project: str, run_id: str) -> None:
        """End a run, when it is there."""
        if self.fails or self.away:
            raise Ql3Error(self.fails or "unavailable")
        if run_id not in {order.run_id for order in self.runs.values()}:
            raise Ql3Error("not_found", field="run")
        self.cancelled.append(run_id)

    def instants(self) -> list[int]:
        """The instants of scheduled runs, in the order in which they came."""
        return [order.scheduled_for_ms for order in self.runs.values() if order.scheduled_for_ms is not None]


ORDERS = Statement("SELECT id, payload FROM outbox WHERE kind = 'order' AND published_at_ms IS NULL ORDER BY id")
PUBLISHED = Statement("UPDATE outbox SET published_at_ms = 1 WHERE id = $1")


class Room:
    """One scheduler's parts over a database, wired as the service wires them, without a bus."""

    def __init__(self, database: Database, clock: ManualClock, ledger: Ledger) -> None:
        self.database = database
        self.clock = clock
        self.ledger = ledger
        self.archived: set[str] = set()
        self.rules: list[ApprovalRule] = []
        executions = Executions()
        self.late_s = 0.0
        self.asking: Callable[[str, Mapping[str, str]], Awaitable[None]] | None = None
        """What happens meanwhile, when policy is asked."""
        self.projects = Projects(self._ask, lambda: time.monotonic() + self.late_s)
        self.catalogue = Catalogue(database, clock)
        self.timetable = Timetable(database, clock)
        self.submitter = Submitter(database, clock, executions, ledger.submit)
        self.admitting = AdmissionLoop(database, clock, executions, self.projects, self.submitter)
        self.occasions = Occasions(database, clock, executions, self.projects, self.submitter)
        self.ringing = RingLoop(database, clock, executions, ledger.cancel)
        self.pruning = PruneLoop(database, clock)
        self.desk = RunDesk(database, clock, executions, self.submitter)

    async def _ask(self, project: str, labels: Mapping[str, str]) -> PolicyDecision:
        said = self._said(project, labels)
        if self.asking is not None:
            await self.asking(project, labels)
        return said

    def _said(self, project: str, labels: Mapping[str, str]) -> PolicyDecision:
        if project in self.archived:
            return ARCHIVED
        for rule in self.rules:
            if all(labels.get(name) == value for name, value in rule.labels.items()):
                return PolicyDecision(
                    effect="require_approval",
                    reasons=["project_rule"],
                    project_version=1,
                    binding_version=1,
                    rule=rule.name,
                    ahead_ms=rule.ahead_ms,
                    has_rules=True,
                )
        return self.allow

    @property
    def allow(self) -> PolicyDecision:
        """What a person's mutation was allowed with."""
        return msgspec.structs.replace(ALLOW, has_rules=bool(self.rules))

    async def create(self, name: str, *triggers: TriggerSpec, **more: Any) -> Task:
        """A task with triggers."""
        ask = TaskCreate(
            actor=ALICE,
            project=more.pop("project", PROJECT),
            name=name,
            spec=more.pop("spec", spec()),
            triggers=list(triggers),
            **more,
        )
        return await self.catalogue.create(ask, self.allow)

    async def update(self, task: Task, new: TaskSpec, **more: Any) -> Task:
        """Another revision of a task."""
        ask = TaskUpdate(
            actor=ALICE,
            project=task.project,
            task=task.name,
            expected_revision=more.pop("expected", task.revision),
            spec=new,
            **more,
        )
        return await self.catalogue.update(ask, self.allow)

    async def enable(self, task: Task, enabled: bool) -> Task:
        """Enable or disable a task."""
        ask = TaskEnable(actor=ALICE, project=task.project, task=task.name, enabled=enabled)
        return await self.catalogue.enable(ask, self.allow)

    async def delete(self, task: Task) -> Task:
        """Delete a task."""
        return await self.catalogue.delete(TaskDelete(actor=ALICE, project=task.project, task=task.name), self.allow)

    async def enable_trigger(self, trigger: Trigger, enabled: bool) -> Trigger:
        """Enable or disable a trigger."""
        ask = TriggerEnable(actor=ALICE, project=trigger.project, trigger=trigger.id, enabled=enabled)
        return await self.timetable.enable(ask, self.allow)

    async def trigger(self) -> Trigger:
        """The one trigger of the project."""
        page = await self.timetable.list(TriggerList(actor=ALICE, project=PROJECT))
        (found,) = page.items
        return found

    async def missed(self) -> list[MissedFire]:
        """Missed fires, oldest first."""
        page = await self.timetable.missed(MissedList(actor=ALICE, project=PROJECT))
        return page.items[::-1]

    async def causes(self) -> list[tuple[str, int]]:
        """Causes and counts of missed fires, oldest first."""
        return [(row.cause, row.count) for row in await self.missed()]

    async def look(self) -> float:
        """Let the admission loop do all that is due now and hand its orders to the ledger; answers its sleep."""
        while (answer := await self.admitting.step()) is True:
            pass
        await self.submitter.stop()
        return float(answer)

    async def deliver(self) -> None:
        """Carry the queued orders to the ledger, and its acknowledgements back."""
        for row in await self.database.read(lambda tx: tx.fetch(ORDERS)):
            answer = await self.ledger.submit(decode(row["payload"].encode(), SubmitRuns))
            await self.database.transact(lambda tx, row=row: tx.execute(PUBLISHED, row["id"]))
            await self.submitter.acknowledged([result.order_id for result in answer.results])
        await self.submitter.stop()

    async def run(self, task: str, **more: Any) -> Any:
        """Run a task now."""
        ask = RunAsk(actor=ALICE, decision=ALLOW, project=PROJECT, task=task, trigger_type="manual", **more)
        return await self.desk.run(ask)

    async def rows(self, sql: str, *args: Any) -> list[Row]:
        """Rows of a query that only a test asks."""
        return await self.database.read(lambda tx: tx.fetch(Statement(sql), *args))


RoomFor = Callable[..., Awaitable[Room]]


@pytest.fixture
def clock() -> ManualClock:
    """Noon of a Monday."""
    return ManualClock(at("2026-03-02 12:00:00"))


@pytest.fixture
async def room(database_for: Callable[[str], Awaitable[Database]], clock: ManualClock) -> Room:
    """One scheduler on each kind of database."""
    return Room(await database_for("scheduler"), clock, Ledger())
