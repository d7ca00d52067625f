"""The command against a real gateway over real HTTP; the rooms behind it answer from memory over a real bus."""

from __future__ import annotations

import asyncio
import io
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import pytest
import structlog

from schemas import endpoints
from schemas.artifacts import (
    Hold,
    HoldAnswer,
    HoldList,
    HoldPage,
    HoldSet,
    RetentionAnswer,
    RetentionPolicy,
    RetentionRead,
    RetentionSet,
)
from schemas.errors import Ql3Error
from schemas.identity import (
    AuthenticationBinding,
    BindingAnswer,
    BindingRevoke,
    Identity,
    IdentityAnswer,
    IdentityRegister,
    IdentityResolve,
    PolicyCheck,
    PolicyDecision,
    Project,
    ProjectList,
    ProjectPage,
    Subject,
)
from schemas.runs import (
    Attempt,
    AttemptList,
    AttemptPage,
    ConcurrencyLimit,
    Explanation,
    LimitList,
    LimitPage,
    LimitSet,
    LogFact,
    Run,
    RunAnswer,
    RunCancel,
    RunChanged,
    RunEvent,
    RunEventList,
    RunEventPage,
    RunExplain,
    RunList,
    RunPage,
    RunRead,
    RunRetry,
)
from schemas.secrets import Secret, SecretAnswer, SecretList, SecretPage, SecretSet, VaultKey, VaultKeyRead
from schemas.subjects import event
from schemas.system import Done, HealthAnswer, HealthRead
from schemas.tasks import (
    Task,
    TaskAnswer,
    TaskCreate,
    TaskDelete,
    TaskEnable,
    TaskList,
    TaskPage,
    TaskRead,
    TaskRun,
    TaskUpdate,
)
from schemas.triggers import (
    MissedFire,
    MissedList,
    MissedPage,
    Trigger,
    TriggerAnswer,
    TriggerCreate,
    TriggerDelete,
    TriggerEnable,
    TriggerList,
    TriggerPage,
    TriggerSpec,
)
from schemas.workers import (
    Capabilities,
    LogFollow,
    LogRange,
    LogRead,
    Readiness,
    ReadinessRead,
    Worker,
    WorkerAnswer,
    WorkerDrain,
    WorkerList,
    WorkerPage,
)
from services.gateway.service import GatewayService
from services.gateway.settings import GatewaySettings
from services.kit.bus import Bus, Caller, Route
from services.kit.clock import WallClock
from services.kit.config import Config
from services.kit.database import Database
from services.kit.sealing import SealingKey, secret_context
from tests.fixtures_nats import WORKER, BusFactory

NOW_MS = 1_700_000_000_000
ADA = Subject(type="user", id="ada")


def uuid(kind: str, number: int) -> str:
    """A UUIDv7: `a`ttempt, `b` run, `c` task, `e`vent."""
    return f"01990000-0000-7000-8000-{kind}{number:011d}"


class Scene:
    """Tasks, runs, logs and secrets that the rooms know, and what they were asked."""

    def __init__(self) -> None:
        self.tasks: dict[str, Task] = {}
        self.triggers: dict[str, Trigger] = {}
        self.runs: dict[str, Run] = {}
        self.logs: dict[str, bytes] = {}
        self.workers: dict[str, Worker] = {WORKER: worker(WORKER)}
        self.secrets: dict[str, tuple[int, str]] = {}
        self.asked: list[Any] = []
        self.denied: set[str] = set()
        self.subjects: dict[tuple[str, str], Subject] = {}
        self.key = SealingKey.generate()
        self.bus: Bus | None = None
        self.at_run = ["succeeded"]
        """The states that a new run goes through after it was committed as queued, once somebody looks at it."""
        self.exit_codes = {"succeeded": 0, "failed": 7}
        self.ran = asyncio.Event()
        self.sick: dict[str, list[str]] = {}
        self.readiness: list[str] = []
        self.holds: dict[str | None, Hold] = {}
        self.limits: dict[tuple[str, str], int] = {}
        self.ages = RetentionPolicy(
            project="default", logs_ms=30 * 86_400_000, runs_ms=90 * 86_400_000, version=0, updated_at_ms=0
        )
        self._tasks: set[asyncio.Task[None]] = set()

    # -- approval

    async def check(self, message: PolicyCheck, _: Caller) -> PolicyDecision:
        denied = message.permission in self.denied
        return PolicyDecision(
            effect="deny" if denied else "allow",
            reasons=["permission_missing"] if denied else ["role_grant"],
            project_version=1,
            binding_version=1,
            valid_for_ms=0,
        )

    async def register(self, message: IdentityRegister, _: Caller) -> IdentityAnswer:
        self.subjects[message.provider, message.provider_subject] = message.subject
        return IdentityAnswer(identity=_identity(message.subject))

    async def revoke_binding(self, message: BindingRevoke, _: Caller) -> BindingAnswer:
        del self.subjects[message.provider, message.provider_subject]
        binding = AuthenticationBinding(
            provider=message.provider,
            provider_subject=message.provider_subject,
            version=2,
            state="revoked",
            created_at_ms=NOW_MS,
        )
        return BindingAnswer(binding=binding)

    async def resolve(self, message: IdentityResolve, _: Caller) -> IdentityAnswer:
        found = self.subjects.get((message.provider, message.provider_subject))
        return IdentityAnswer(identity=_identity(found) if found else None)

    async def list_projects(self, _message: ProjectList, _: Caller) -> ProjectPage:
        project = Project(
            id="default", name="Default", status="active", version=1, created_at_ms=NOW_MS, updated_at_ms=NOW_MS
        )
        return ProjectPage(items=[project], next=None)

    # -- scheduler

    async def create_task(self, message: TaskCreate, _: Caller) -> TaskAnswer:
        self.asked.append(message)
        if message.name in self.tasks:
            raise Ql3Error("name_taken", field="name")
        task = Task(
            id=uuid("c", len(self.tasks) + 1),
            project=message.project,
            name=message.name,
            revision=1,
            version=1,
            enabled=message.enabled,
            deleted=False,
            spec=message.spec,
            digest="0" * 64,
            created_at_ms=NOW_MS,
            updated_at_ms=NOW_MS,
            triggers=[
                {"spec": msgspec.to_builtins(spec), "next_fire_at_ms": NOW_MS + 60_000} for spec in message.triggers
            ],
            warnings=["LOOKS_SECRET: consider a secret."] if _looks_secret(message) else [],
        )
        self.tasks[message.name] = task
        return TaskAnswer(task=task)

    async def get_task(self, message: TaskRead, _: Caller) -> TaskAnswer:
        return TaskAnswer(task=self._task(message.task))

    async def list_tasks(self, message: TaskList, _: Caller) -> TaskPage:
        names = sorted(self.tasks)
        start = int(message.page.cursor or 0)
        shown = names[start : start + message.page.limit]
        more = start + len(shown) < len(names)
        return TaskPage(items=[self.tasks[name] for name in shown], next=str(start + len(shown)) if more else None)

    async def update_task(self, message: TaskUpdate, _: Caller) -> TaskAnswer:
        task = self._task(message.task)
        if message.expected_revision != task.revision:
            raise Ql3Error("version_conflict", field="expected_revision")
        task = msgspec.structs.replace(task, spec=message.spec, revision=task.revision + 1)
        self.tasks[task.name] = task
        return TaskAnswer(task=task)

    async def enable_task(self, message: TaskEnable, _: Caller) -> TaskAnswer:
        task = msgspec.structs.replace(self._task(message.task), enabled=message.enabled)
        self.tasks[task.name] = task
        return TaskAnswer(task=task)

    async def delete_task(self, message: TaskDelete, _: Caller) -> TaskAnswer:
        return TaskAnswer(task=self.tasks.pop(self._task(message.task).name))

    def _trigger(self, task: Task, number: int, spec: TriggerSpec) -> Trigger:
        return Trigger(
            id=uuid("f", number),
            project="default",
            task_id=task.id,
            task_name=task.name,
            revision=1,
            version=1,
            enabled=True,
            spec=spec,
            next_fire_at_ms=NOW_MS + 60_000,
            last_scheduled_at_ms=None,
            missed_count=2,
            created_at_ms=NOW_MS,
            updated_at_ms=NOW_MS,
        )

    async def create_trigger(self, message: TriggerCreate, _: Caller) -> TriggerAnswer:
        made = self._trigger(self._task(message.task), len(self.triggers) + 1, message.spec)
        self.triggers[made.id] = made
        return TriggerAnswer(trigger=made)

    async def enable_trigger(self, message: TriggerEnable, _: Caller) -> TriggerAnswer:
        if message.trigger not in self.triggers:
            raise Ql3Error("not_found", field="trigger")
        found = msgspec.structs.replace(self.triggers[message.trigger], enabled=message.enabled)
        self.triggers[found.id] = found
        return TriggerAnswer(trigger=found)

    async def delete_trigger(self, message: TriggerDelete, _: Caller) -> TriggerAnswer:
        return TriggerAnswer(trigger=self.triggers.pop(message.trigger))

    async def list_triggers(self, _message: TriggerList, _: Caller) -> TriggerPage:
        return TriggerPage(items=list(self.triggers.values()), next=None)

    async def missed(self, message: MissedList, _: Caller) -> MissedPage:
        row = MissedFire(
            id=uuid("e", 2),
            trigger_id=message.trigger or uuid("f", 1),
            task_id=uuid("c", 1),
            scheduled_for_ms=NOW_MS,
            cause="scheduler_down",
            last_ms=NOW_MS,
            count=2,
            at_least=False,
            recorded_at_ms=NOW_MS,
        )
        return MissedPage(items=[row], next=None)

    async def run_task(self, message: TaskRun, _: Caller) -> RunAnswer:
        self.asked.append(message)
        run = run_of(self._task(message.task), len(self.runs) + 1)
        self.runs[run.id] = run
        self.ran.set()
        return RunAnswer(run=run)

    def _task(self, name: str) -> Task:
        for task in self.tasks.values():
            if name in (task.name, task.id):
                return task
        raise Ql3Error("not_found", field="task")

    # -- dispatcher

    async def get_run(self, message: RunRead, _: Caller) -> RunAnswer:
        run = self._run(message.run)
        if run.status == "queued" and self.at_run:
            # Somebody looks: the run goes on its way.
            self._tasks.add(asyncio.get_running_loop().create_task(self._advance(run)))
        return RunAnswer(run=run)

    async def _advance(self, run: Run) -> None:
        for number, status in enumerate(self.at_run, start=1):
            if self.runs[run.id].version >= run.version + number:
                return
            await self.change(run.id, status)

    async def change(self, run_id: str, status: str, *, attempt: int = 1) -> None:
        """Commit a new state of a run and tell it."""
        run = self.runs[run_id]
        terminal = status in ("succeeded", "failed", "cancelled", "timed_out")
        started = status not in ("queued", "waiting_approval", "cancelled") or run.attempt > 0
        number = int(run_id[-11:]) * 10 + attempt
        self.runs[run_id] = run = msgspec.structs.replace(
            run,
            status=status,
            version=run.version + 1,
            attempt=attempt if started else 0,
            attempt_id=uuid("a", number) if started else None,
            worker_id=WORKER if started else None,
            started_at_ms=NOW_MS + 1_000 if started else None,
            finished_at_ms=NOW_MS + 2_500 if terminal else None,
            exit_code=self.exit_codes.get(status),
            error_code="exit_status" if status == "failed" else None,
        )
        assert self.bus is not None
        fact = RunChanged(
            project=run.project,
            run_id=run.id,
            task_id=run.task_id,
            task_name=run.task_name,
            status=run.status,
            version=run.version,
            trigger_type=run.trigger_type,
            trigger_id=None,
            attempt_id=run.attempt_id,
            worker_id=run.worker_id,
            exit_code=run.exit_code,
            error_code=run.error_code,
            at_ms=NOW_MS,
            events=[],
        )
        await self.bus.publish_core(event("run", run.project, run.id, status), fact)

    async def list_runs(self, message: RunList, _: Caller) -> RunPage:
        self.asked.append(message)
        runs = [run for run in self.runs.values() if not message.status or run.status in message.status]
        return RunPage(items=runs[: message.page.limit], next=None)

    async def attempts(self, message: AttemptList, _: Caller) -> AttemptPage:
        run = self._run(message.run)
        items: list[Attempt] = []
        for number in range(1, run.attempt + 1):
            latest = number == run.attempt
            status = run.status if latest else "failed"
            attempt_id = uuid("a", int(run.id[-11:]) * 10 + number)
            ended = status in ("succeeded", "failed", "cancelled", "timed_out")
            content = self.logs.get(attempt_id, b"")
            items.append(
                Attempt(
                    id=attempt_id,
                    run_id=run.id,
                    attempt=number,
                    status=status if status in ("running", "succeeded", "failed", "cancelled") else "claimed",
                    executor="local_process",
                    worker_id=WORKER,
                    exit_code=self.exit_codes.get(status),
                    signal=None,
                    error_code=None,
                    error_summary=None,
                    created_at_ms=NOW_MS,
                    started_at_ms=NOW_MS + 1_000,
                    finished_at_ms=NOW_MS + 2_500 if ended else None,
                    deadline_at_ms=None,
                    late_receipt=False,
                    log=LogFact(artifact_id=attempt_id, size=len(content), produced=len(content)) if ended else None,
                )
            )
        return AttemptPage(items=items, next=None)

    async def events(self, message: RunEventList, _: Caller) -> RunEventPage:
        row = RunEvent(
            id=uuid("e", 1),
            run_id=message.run,
            sequence=1,
            type="run.queued",
            actor_type="user",
            actor_id="ada",
            attempt_id=None,
            payload={},
            created_at_ms=NOW_MS,
        )
        return RunEventPage(items=[row], next=None)

    async def cancel_run(self, message: RunCancel, _: Caller) -> RunAnswer:
        await self.change(self._run(message.run).id, "cancelled")
        return RunAnswer(run=self.runs[message.run])

    async def retry_run(self, message: RunRetry, _: Caller) -> RunAnswer:
        old = self._run(message.run)
        if old.status not in ("succeeded", "failed", "cancelled", "timed_out"):
            raise Ql3Error("invalid_transition")
        run = msgspec.structs.replace(run_of(self.tasks[old.task_name], len(self.runs) + 1), retry_of_run_id=old.id)
        self.runs[run.id] = run
        return RunAnswer(run=run)

    async def explain_run(self, message: RunExplain, _: Caller) -> Explanation:
        return Explanation(
            run=self._run(message.run),
            cause="no_slot",
            sentence="All slots are taken.",
            next_step="It starts when one is free.",
        )

    def _run(self, run_id: str) -> Run:
        if run_id not in self.runs:
            raise Ql3Error("not_found", field="run")
        return self.runs[run_id]

    async def list_workers(self, _message: WorkerList, _: Caller) -> WorkerPage:
        return WorkerPage(items=list(self.workers.values()), next=None)

    async def drain_worker(self, message: WorkerDrain, _: Caller) -> WorkerAnswer:
        if message.worker not in self.workers:
            raise Ql3Error("not_found", field="worker")
        found = msgspec.structs.replace(self.workers[message.worker], status="draining" if message.drain else "online")
        self.workers[message.worker] = found
        return WorkerAnswer(worker=found)

    async def ready(self, _message: ReadinessRead, _: Caller) -> Readiness:
        return Readiness(reasons=self.readiness)

    # -- worker: it keeps every log here

    async def read_log(self, message: LogRead, _: Caller) -> LogRange:
        content = self.logs.get(message.attempt_id, b"")
        part = content[message.offset : message.offset + message.length]
        ended = any(
            run.attempt_id == message.attempt_id and run.finished_at_ms is not None for run in self.runs.values()
        ) or not any(run.attempt_id == message.attempt_id for run in self.runs.values())
        return LogRange(offset=message.offset, data=part, total=len(content), ended=ended, truncated=False)

    async def follow_log(self, _message: LogFollow, _: Caller) -> Done:
        return Done()

    # -- vault

    async def vault_key(self, _message: VaultKeyRead, _: Caller) -> VaultKey:
        return VaultKey(public_key=self.key.public)

    async def set_secret(self, message: SecretSet, _: Caller) -> SecretAnswer:
        value = self.key.open(message.sealed, secret_context(message.project, message.name, message.mutation_id))
        version = self.secrets.get(message.name, (0, ""))[0]
        if message.expected_version not in (None, version):
            raise Ql3Error("version_conflict", field="expected_version")
        self.secrets[message.name] = (version + 1, value.decode())
        return SecretAnswer(secret=self._secret(message.name))

    async def list_secrets(self, _message: SecretList, _: Caller) -> SecretPage:
        return SecretPage(items=[self._secret(name) for name in sorted(self.secrets)], next=None)

    def _secret(self, name: str) -> Secret:
        return Secret(project="default", name=name, version=self.secrets[name][0], key_id="k-1", created_at_ms=NOW_MS)

    # -- retention

    async def get_ages(self, _message: RetentionRead, _: Caller) -> RetentionAnswer:
        return RetentionAnswer(policy=self.ages)

    async def set_ages(self, message: RetentionSet, _: Caller) -> RetentionAnswer:
        if message.expected_version != self.ages.version:
            raise Ql3Error("version_conflict", field="expected_version")
        self.ages = RetentionPolicy(
            project=message.project,
            logs_ms=message.logs_ms,
            runs_ms=message.runs_ms,
            version=self.ages.version + 1,
            updated_at_ms=NOW_MS,
        )
        return RetentionAnswer(policy=self.ages)

    async def list_limits(self, _message: LimitList, _: Caller) -> LimitPage:
        return LimitPage(items=[self._limit(*limit) for limit in sorted(self.limits)], next=None)

    async def set_limit(self, message: LimitSet, _: Caller) -> LimitPage:
        limit = ("project", message.project) if message.key is None else ("key", message.key)
        self.limits.pop(limit, None)
        if message.limit is not None:
            self.limits[limit] = message.limit
        return LimitPage(items=[self._limit(*limit)] if message.limit else [], next=None)

    def _limit(self, kind: Any, key: str) -> ConcurrencyLimit:
        return ConcurrencyLimit(project="default", kind=kind, key=key, limit=self.limits[kind, key], live=1)

    async def set_hold(self, message: HoldSet, _: Caller) -> HoldAnswer:
        if message.held:
            self.holds[message.run] = Hold(
                project=message.project,
                run_id=message.run,
                reason=message.reason,
                held_by="user/ada",
                held_at_ms=NOW_MS,
            )
            return HoldAnswer(hold=self.holds[message.run])
        if message.run not in self.holds:
            raise Ql3Error("not_found", "There is no such hold.")
        return HoldAnswer(hold=self.holds.pop(message.run))

    async def list_holds(self, _message: HoldList, _: Caller) -> HoldPage:
        return HoldPage(items=list(self.holds.values()), next=None)

    # -- all

    def _health(self, name: str) -> Any:
        async def answer(_message: HealthRead, _caller: Caller) -> HealthAnswer:
            return HealthAnswer(service=name, version="1.0.0", reasons=self.sick.get(name, []))

        return answer

    async def serve(self, bus_for: BusFactory) -> None:
        """Answer for every room."""
        log_read, log_follow = endpoints.LOG_READ.bound(WORKER), endpoints.LOG_FOLLOW.bound(WORKER)
        rooms: dict[str, list[Route[Any, Any]]] = {
            "approval": [
                Route(endpoints.POLICY_CHECK, self.check),
                Route(endpoints.IDENTITIES_RESOLVE, self.resolve),
                Route(endpoints.IDENTITIES_REGISTER, self.register),
                Route(endpoints.IDENTITIES_REVOKE_BINDING, self.revoke_binding),
                Route(endpoints.PROJECTS_LIST, self.list_projects),
            ],
            "scheduler": [
                Route(endpoints.TASKS_CREATE, self.create_task),
                Route(endpoints.TASKS_GET, self.get_task),
                Route(endpoints.TASKS_LIST, self.list_tasks),
                Route(endpoints.TASKS_UPDATE, self.update_task),
                Route(endpoints.TASKS_ENABLE, self.enable_task),
                Route(endpoints.TASKS_DELETE, self.delete_task),
                Route(endpoints.TASKS_RUN, self.run_task),
                Route(endpoints.TRIGGERS_CREATE, self.create_trigger),
                Route(endpoints.TRIGGERS_ENABLE, self.enable_trigger),
                Route(endpoints.TRIGGERS_DELETE, self.delete_trigger),
                Route(endpoints.TRIGGERS_LIST, self.list_triggers),
                Route(endpoints.TRIGGERS_MISSED, self.missed),
            ],
            "dispatcher": [
                Route(endpoints.RUNS_GET, self.get_run),
                Route(endpoints.RUNS_LIST, self.list_runs),
                Route(endpoints.RUNS_ATTEMPTS, self.attempts),
                Route(endpoints.RUNS_EVENTS, self.events),
                Route(endpoints.RUNS_CANCEL, self.cancel_run),
                Route(endpoints.RUNS_RETRY, self.retry_run),
                Route(endpoints.RUNS_EXPLAIN, self.explain_run),
                Route(endpoints.LIMITS_LIST, self.list_limits),
                Route(endpoints.LIMITS_SET, self.set_limit),
                Route(endpoints.WORKERS_LIST, self.list_workers),
                Route(endpoints.WORKERS_DRAIN, self.drain_worker),
                Route(endpoints.READINESS, self.ready),
            ],
            "retention": [
                Route(endpoints.RETENTION_GET, self.get_ages),
                Route(endpoints.RETENTION_SET, self.set_ages),
                Route(endpoints.HOLDS_SET, self.set_hold),
                Route(endpoints.HOLDS_LIST, self.list_holds),
            ],
            "vault": [
                Route(endpoints.VAULT_KEY, self.vault_key),
                Route(endpoints.SECRETS_SET, self.set_secret),
                Route(endpoints.SECRETS_LIST, self.list_secrets),
            ],
        }
        for name, routes in rooms.items():
            bus = await bus_for(name, streams=False)
            await bus.serve(name, "1.0.0", [*routes, Route(endpoints.HEALTH[name], self._health(name))])
            await bus.flush()
            if name == "dispatcher":
                self.bus = bus
        bus = await bus_for("worker", worker=WORKER, streams=False)
        await bus.serve("worker", "1.0.0", [Route(log_read, self.read_log), Route(log_follow, self.follow_log)])
        await bus.flush()


def _identity(subject: Subject) -> Identity:
    return Identity(
        type=subject.type,
        id=subject.id,
        display_name=None,
        status="active",
        version=1,
        created_at_ms=NOW_MS,
        updated_at_ms=NOW_MS,
    )


def _looks_secret(message: TaskCreate) -> bool:
    return any(variable.name == "LOOKS_SECRET" for variable in message.spec.execution.environment)


def worker(name: str) -> Worker:
    """A worker that is online."""
    return Worker(
        id=name,
        session_id=uuid("d", 1),
        generation=1,
        status="online",
        slots=8,
        leased=2,
        capabilities=Capabilities(architecture="x86_64", cpu_cores=2, memory_bytes=2**32),
        registered_at_ms=NOW_MS,
        last_heartbeat_at_ms=NOW_MS,
    )


def run_of(task: Task, number: int) -> Run:
    """A run of a task as committed."""
    return Run(
        id=uuid("b", number),
        project=task.project,
        task_id=task.id,
        task_name=task.name,
        task_revision=task.revision,
        status="queued",
        version=1,
        event_sequence=1,
        priority=0,
        trigger_type="api",
        trigger_id=None,
        scheduled_for_ms=None,
        requested_by=ADA,
        parent_run_id=None,
        retry_of_run_id=None,
        attempt=0,
        attempt_id=None,
        worker_id=None,
        exit_code=None,
        error_code=None,
        error_summary=None,
        waiting_reason=None,
        cancel_requested_at_ms=None,
        cancel_reason=None,
        created_at_ms=NOW_MS,
        queued_at_ms=NOW_MS,
        started_at_ms=None,
        finished_at_ms=None,
    )


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    raw: bytes
    err: str

    @property
    def out(self) -> str:
        """Standard output as text."""
        return self.raw.decode()

    @property
    def json(self) -> Any:
        """Standard output as one JSON document."""
        return msgspec.json.decode(self.raw)


class Door:
    """The gateway, and what `ql3 up` writes for the command; it can be closed and opened again elsewhere."""

    def __init__(self, data: Path, database: Database, bus_for: BusFactory) -> None:
        self._console = data / "console.json"
        self._key_file = str(data / "keys" / "gateway.key")
        self._database = database
        self._bus_for = bus_for
        self._gateway: GatewayService | None = None

    async def open(self) -> None:
        """Listen on a free port, with a new credential for the console."""
        gateway = GatewayService(
            config=Config(),
            database=self._database,
            bus=await self._bus_for("gateway"),
            clock=WallClock(),
            settings=GatewaySettings(listen="127.0.0.1:0", key_file=self._key_file),
        )
        await gateway.start()
        self._gateway = gateway
        console = await gateway.issue_console_credential()
        found = {"url": gateway.url, "nats_url": "nats://127.0.0.1:1", **dict(console)}
        self._console.write_bytes(msgspec.json.encode(found))
        self._console.chmod(0o600)

    async def close(self) -> None:
        """Listen no more."""
        self._console.unlink()
        gateway, self._gateway = self._gateway, None
        assert gateway is not None
        await gateway.stop()


class Command:
    """Runs `ql3` against the gateway: inside of this process, or with `as_process` as its own."""

    def __init__(self, environment: dict[str, str], scene: Scene, door: Door) -> None:
        self.environment = environment
        self.scene = scene
        self.door = door

    async def __call__(self, *arguments: str, stdin: bytes = b"", **environment: str) -> Ended:
        """In a thread, with streams and environment of its own: the same code as the process, without its start."""
        return await asyncio.to_thread(self._run, list(arguments), stdin, {**self.environment, **environment})

    def _run(self, arguments: list[str], stdin: bytes, environment: dict[str, str]) -> Ended:
        from services.cli.main import run

        out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8")
        read = io.TextIOWrapper(io.BytesIO(stdin), "utf-8")
        with (
            mock.patch.dict(os.environ, environment, clear=True),
            mock.patch.multiple(sys, stdin=read, stdout=out, stderr=err),
        ):
            code = run(arguments)
            out.flush()
            err.flush()
        return Ended(code, out.buffer.getvalue(), err.buffer.getvalue().decode())  # type: ignore[attr-defined]

    async def as_process(self, *arguments: str, stdin: bytes | None = None, **environment: str) -> Ended:
        """As a process of its own."""
        process = await self.begin(*arguments, stdin=stdin, **environment)
        async with asyncio.timeout(90):
            out, err = await process.communicate(stdin)
        assert process.returncode is not None
        return Ended(process.returncode, out, err.decode())

    async def begin(
        self, *arguments: str, stdin: bytes | None = None, **environment: str
    ) -> asyncio.subprocess.Process:
        """A process that a test ends by itself."""
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "services.cli.main",
            *arguments,
            stdin=asyncio.subprocess.PIPE if stdin is not None else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**self.environment, **environment},
        )


def clean_environment() -> dict[str, str]:
    """The environment without settings of whoever runs the tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("QL3_", "LC_", "LANG", "NATS_"))}
    return {**kept, "TZ": "UTC", "COLUMNS": "200"}


@pytest.fixture
async def ql3(database_on: Any, bus_for: BusFactory, tmp_path: Path) -> AsyncIterator[Command]:
    """`await ql3("task", "list")`: the command as its own process, signed in as the local console."""
    # The services of this process log beside the command's streams, not into them.
    structlog.configure(
        logger_factory=structlog.PrintLoggerFactory(file=sys.__stderr__), cache_logger_on_first_use=False
    )
    scene = Scene()
    await scene.serve(bus_for)
    data = tmp_path / "ql3-data"
    data.mkdir(mode=0o700)
    door = Door(data, await database_on("sqlite", "gateway"), bus_for)
    await door.open()
    yield Command({**clean_environment(), "QL3_DATA": str(data)}, scene, door)
    await door.close()
    structlog.reset_defaults()
