"""The scheduler: tasks, triggers, and the orders for runs that come of them. The only file here that knows NATS."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec
import structlog

from schemas import limits
from schemas.endpoints import (
    FEED_READ,
    HEALTH,
    RUNS_CANCEL,
    RUNS_SUBMIT,
    SECRETS_LIST,
    TASKS_APPLY,
    TASKS_CREATE,
    TASKS_DELETE,
    TASKS_DIFF,
    TASKS_ENABLE,
    TASKS_GET,
    TASKS_LIST,
    TASKS_RESTORE,
    TASKS_REVISIONS,
    TASKS_RUN,
    TASKS_RUN_BATCH,
    TASKS_UPDATE,
    TRIGGERS_BACKFILL,
    TRIGGERS_CALL,
    TRIGGERS_CREATE,
    TRIGGERS_DELETE,
    TRIGGERS_ENABLE,
    TRIGGERS_LIST,
    TRIGGERS_MISSED,
    TRIGGERS_PREVIEW,
    TRIGGERS_ROTATE,
    TRIGGERS_UPDATE,
)
from schemas.errors import Ql3Error
from schemas.identity import Actor, PolicyChanged, PolicyDecision
from schemas.runs import RUN_TERMINAL, RunAnswer, RunBatchAnswer, RunCancel, RunResult, SubmitAnswer, SubmitRuns
from schemas.secrets import SecretList, SecretPage
from schemas.system import FeedPage, FeedRead, HealthRead
from schemas.tasks import (
    ApplyAnswer,
    DiffAnswer,
    RevisionList,
    RevisionPage,
    Task,
    TaskAnswer,
    TaskCreate,
    TaskDelete,
    TaskDiff,
    TaskEnable,
    TaskList,
    TaskPage,
    TaskRead,
    TaskRestore,
    TaskRun,
    TaskRunBatch,
    TasksApply,
    TaskSpec,
    TaskUpdate,
)
from schemas.triggers import (
    BackfillAnswer,
    MissedList,
    MissedPage,
    PreviewAnswer,
    TriggerAnswer,
    TriggerBackfill,
    TriggerCreate,
    TriggerDelete,
    TriggerEnable,
    TriggerList,
    TriggerPage,
    TriggerPreview,
    TriggerUpdate,
    WebhookCall,
    WebhookRotate,
)
from services.kit.bus import Bus, Caller, Delivery, Route, Subscription
from services.kit.clock import Clock
from services.kit.config import Config
from services.kit.database import Database
from services.kit.dispatches import closing_route
from services.kit.health import Health
from services.kit.loops import Loop
from services.kit.policy import PolicyClient
from services.kit.standing import standing_routes
from services.kit.upkeep import upkeep
from services.kit.version import VERSION
from services.scheduler import running, triggers
from services.scheduler.admissions import SENDER
from services.scheduler.bells import BELL, CHAIN_BELL, RING_BELL
from services.scheduler.catalogue import Catalogue
from services.scheduler.executions import Executions
from services.scheduler.files import Files
from services.scheduler.loops import SLEEP_S, AdmissionLoop, PruneLoop, RingLoop
from services.scheduler.occasions import BootLoop, ChainLoop, Occasions
from services.scheduler.permits import Permit, Permits
from services.scheduler.projects import Projects, scheduler_actor
from services.scheduler.rulings import TRIES, Outdated
from services.scheduler.running import RunAsk, RunDesk
from services.scheduler.secrets_named import SecretsNamed, named
from services.scheduler.store import schedules
from services.scheduler.submitting import Submitter
from services.scheduler.timetable import Timetable

NAME = SENDER
RING_EVERY_S = 1.0
PRUNE_EVERY_S = 300.0
FACTS_EVERY_S = 5.0
BOOT_EVERY_S = 3_600.0
SECRETS_TIMEOUT_S = 1.0
"""A warning is not worth a longer wait for the vault."""
STALE_S = 5
"""A loop that failed this often in a row makes the service not ready."""

log: structlog.stdlib.BoundLogger = structlog.get_logger("ql3.scheduler")


class SchedulerService:
    """Answers about tasks and triggers, and admits what is due. Several may run beside each other on PostgreSQL."""

    def __init__(self, *, config: Config, database: Database, bus: Bus, clock: Clock) -> None:
        self._database = database
        self._bus = bus
        self._clock = clock
        self._policy = PolicyClient(bus, clock=clock)
        self._actor = scheduler_actor(clock.now_ms())
        executions = Executions()
        self._projects = Projects(self._may_start)
        self._permits = Permits(database, self._check_start)
        self._secrets_named = SecretsNamed(self._list_secrets)
        self._catalogue = Catalogue(database, clock)
        self._timetable = Timetable(database, clock)
        self._files = Files(database, clock, self._catalogue, self._timetable)
        self._submitter = Submitter(database, clock, executions, self._submit)
        self._desk = RunDesk(database, clock, executions, self._submitter)
        self._occasions = Occasions(database, clock, executions, self._projects, self._submitter)
        admitting = AdmissionLoop(database, clock, executions, self._projects, self._submitter)
        ringing = RingLoop(database, clock, executions, self._cancel)
        self._admitting = Loop("scheduler.admissions", admitting.step, every_s=SLEEP_S, bell=database.bell(BELL))
        self._ringing = Loop("scheduler.orders", ringing.step, every_s=RING_EVERY_S, bell=database.bell(RING_BELL))
        chaining = ChainLoop(self._occasions, self._read_facts, self._listen)
        self._chaining = Loop("scheduler.chains", chaining.step, every_s=FACTS_EVERY_S, bell=database.bell(CHAIN_BELL))
        self._loops = [
            *upkeep(database, bus),
            self._admitting,
            self._ringing,
            Loop("scheduler.prune", PruneLoop(database, clock).step, every_s=PRUNE_EVERY_S),
            self._chaining,
        ]
        self._heard: list[Subscription] = []

    async def start(self) -> None:
        """Answer, hear, and begin to admit."""
        await self._policy.start()
        booting = BootLoop(self._occasions, starting=await self._first())
        self._loops.append(Loop("scheduler.boot", booting.step, every_s=BOOT_EVERY_S))
        self._heard = [
            await self._bus.on_ack(NAME, self._submitter.acknowledged),
            await self._bus.on_event("ql3.evt.policy.>", self._policy_changed),
        ]
        health = Health()
        health.add(NAME, self.health)
        await self._bus.serve(
            NAME,
            VERSION,
            [
                Route(TASKS_CREATE, self._create_task),
                Route(TASKS_UPDATE, self._update_task),
                Route(TASKS_ENABLE, self._enable_task),
                Route(TASKS_DELETE, self._delete_task),
                Route(TASKS_GET, self._get_task),
                Route(TASKS_LIST, self._list_tasks),
                Route(TASKS_RUN, self._run_task, concurrency=limits.BATCH_ITEMS),
                Route(TASKS_RUN_BATCH, self._run_tasks),
                Route(TASKS_APPLY, self._apply),
                Route(TASKS_REVISIONS, self._list_revisions),
                Route(TASKS_DIFF, self._diff),
                Route(TASKS_RESTORE, self._restore_task),
                Route(TRIGGERS_CREATE, self._create_trigger),
                Route(TRIGGERS_UPDATE, self._update_trigger),
                Route(TRIGGERS_ENABLE, self._enable_trigger),
                Route(TRIGGERS_DELETE, self._delete_trigger),
                Route(TRIGGERS_ROTATE, self._rotate_webhook),
                Route(TRIGGERS_CALL, self._call_webhook),
                Route(TRIGGERS_BACKFILL, self._backfill),
                Route(TRIGGERS_PREVIEW, self._preview),
                Route(TRIGGERS_LIST, self._list_triggers),
                Route(TRIGGERS_MISSED, self._list_missed),
                closing_route(NAME, self._database),
                *standing_routes(NAME, VERSION, database=self._database, policy=self._policy, health=health),
            ],
        )
        await self._bus.flush()
        for loop in self._loops:
            await loop.start()

    async def stop(self) -> None:
        """Admit no more, finish what is at work."""
        for subscription in self._heard:
            await subscription.close()
        await self._admitting.stop()
        await self._desk.stop()
        await self._submitter.stop()
        for loop in reversed(self._loops):
            await loop.stop()

    def health(self) -> list[str]:
        """Reasons why schedules are not kept; empty when they are."""
        late = [f"{loop.name} fails" for loop in (self._admitting, self._ringing) if loop.failures >= STALE_S]
        return [*late, *self._bus.health()]

    # What others tell.

    async def _policy_changed(self, delivery: Delivery) -> None:
        changed = delivery.decode(PolicyChanged)
        project = changed.project
        self._projects.forget(project)
        if project is not None:
            now_ms = self._clock.now_ms()
            await self._database.transact(
                lambda tx: schedules.wake_project(tx, project, now_ms, all_of_it=changed.rules)
            )
            self._admitting.ring()

    async def _first(self) -> bool:
        """Whether no scheduler runs yet, so that the system starts now."""
        try:
            await self._bus.request(HEALTH[NAME], HealthRead(), timeout=1.0)
        except Ql3Error:
            return True
        return False

    async def _read_facts(self, after: str | None) -> FeedPage:
        return await self._bus.request(FEED_READ["dispatcher"], FeedRead(after=after, subjects=["ql3.evt.run."]))

    async def _listen(self) -> None:
        async def ring(_: Delivery) -> None:
            self._chaining.ring()

        for status in sorted(RUN_TERMINAL):
            self._heard.append(await self._bus.on_event(f"ql3.evt.run.*.*.{status}", ring))

    async def _may_start(self, project: str, labels: Mapping[str, str]) -> PolicyDecision:
        return await self._policy.check(self._actor, project, "run.start", labels=labels)

    async def _submit(self, message: SubmitRuns) -> SubmitAnswer:
        return await self._bus.request(RUNS_SUBMIT, message)

    async def _list_secrets(self, message: SecretList) -> SecretPage:
        return await self._bus.request(SECRETS_LIST, message, timeout=SECRETS_TIMEOUT_S)

    async def _cancel(self, project: str, run_id: str) -> None:
        # A run that has ended is answered as it is.
        await self._bus.request(RUNS_CANCEL, RunCancel(actor=self._actor, project=project, run=run_id, reason="policy"))

    # Tasks.

    async def _create_task(self, ask: TaskCreate, _caller: Caller) -> TaskAnswer:
        labels = ask.spec.terms.labels
        decision = await self._policy.require(ask.actor, ask.project, "task.create", labels=labels)
        (warnings,) = await self._about_secrets(ask.actor, ask.project, [ask.spec])
        return _warned(await self._catalogue.create(ask, decision), warnings)

    async def _update_task(self, ask: TaskUpdate, _caller: Caller) -> TaskAnswer:
        decision = await self._about_task(ask.actor, ask.project, ask.task, "task.update")
        (warnings,) = await self._about_secrets(ask.actor, ask.project, [ask.spec])
        return _warned(await self._catalogue.update(ask, decision), warnings)

    async def _about_secrets(self, actor: Actor, project: str, specs: Sequence[TaskSpec]) -> list[list[str]]:
        # Whoever may name a secret in a task can read it, in the process that the task starts.
        for spec in specs:
            if named(spec):
                await self._policy.require(actor, project, "secret.use", labels=spec.terms.labels)
        return await self._secrets_named.warnings(actor, project, specs)

    async def _enable_task(self, ask: TaskEnable, _caller: Caller) -> TaskAnswer:
        decision = await self._about_task(ask.actor, ask.project, ask.task, "task.update")
        return TaskAnswer(task=await self._catalogue.enable(ask, decision))

    async def _delete_task(self, ask: TaskDelete, _caller: Caller) -> TaskAnswer:
        decision = await self._about_task(ask.actor, ask.project, ask.task, "task.delete")
        return TaskAnswer(task=await self._catalogue.delete(ask, decision))

    async def _get_task(self, ask: TaskRead, _caller: Caller) -> TaskAnswer:
        await self._policy.require(ask.actor, ask.project, "task.read")
        return TaskAnswer(task=await self._catalogue.get(ask))

    async def _list_tasks(self, ask: TaskList, _caller: Caller) -> TaskPage:
        await self._policy.require(ask.actor, ask.project, "task.read")
        return await self._catalogue.list(ask)

    async def _apply(self, ask: TasksApply, _caller: Caller) -> ApplyAnswer:
        decision = await self._policy.require(ask.actor, ask.project, "task.update")
        names = [task.name for task in ask.tasks]
        self._permits.forget(ask.project, names)
        stored = await self._permits.labels(ask.project, names)
        for task in ask.tasks:
            for labels in (task.spec.terms.labels, stored[task.name].labels):
                await self._policy.require(ask.actor, ask.project, "task.create", labels=labels)
                await self._policy.require(ask.actor, ask.project, "task.update", labels=labels)
        warnings = await self._about_secrets(ask.actor, ask.project, [task.spec for task in ask.tasks])
        answer = await self._files.apply(ask, decision)
        items = [
            msgspec.structs.replace(item, warnings=[*item.warnings, *more])
            for item, more in zip(answer.items, warnings, strict=True)
        ]
        return msgspec.structs.replace(answer, items=items)

    async def _list_revisions(self, ask: RevisionList, _caller: Caller) -> RevisionPage:
        await self._policy.require(ask.actor, ask.project, "task.read")
        return await self._catalogue.revisions(ask)

    async def _diff(self, ask: TaskDiff, _caller: Caller) -> DiffAnswer:
        await self._policy.require(ask.actor, ask.project, "task.read")
        return await self._catalogue.diff(ask)

    async def _restore_task(self, ask: TaskRestore, _caller: Caller) -> TaskAnswer:
        decision = await self._about_task(ask.actor, ask.project, ask.task, "task.update")
        old = await self._catalogue.get(
            TaskRead(actor=ask.actor, project=ask.project, task=ask.task, revision=ask.revision)
        )
        (warnings,) = await self._about_secrets(ask.actor, ask.project, [old.spec])
        return _warned(await self._catalogue.restore(ask, decision), warnings)

    async def _about_task(self, actor: Actor, project: str, task: str, permission: str) -> PolicyDecision:
        # Whoever may not read must not learn from the error whether the task is there.
        await self._policy.require(actor, project, "task.read")
        labels = await self._catalogue.labels(project, task)
        return await self._policy.require(actor, project, permission, labels=labels)

    async def _check_start(self, actor: Actor, project: str, labels: Mapping[str, str]) -> PolicyDecision:
        return await self._policy.check(actor, project, "run.start", labels=labels)

    async def _run_task(self, ask: TaskRun, _caller: Caller) -> RunAnswer:
        running.check(ask.inputs, ask.idempotency_key)
        (result,) = await self._run_judged(
            ask.actor,
            ask.project,
            [ask.task],
            lambda _, permit: RunAsk(
                actor=ask.actor,
                decision=permit.decision,
                project=ask.project,
                task=ask.task,
                trigger_type=ask.trigger_type,
                inputs=ask.inputs,
                priority=ask.priority,
                idempotency_key=ask.idempotency_key,
                expected_revision=ask.expected_revision,
                trigger=ask.trigger,
                judged=permit.revision,
            ),
            self._run_alone,
        )
        assert result.run is not None
        return RunAnswer(run=result.run, replayed=result.replayed)

    async def _run_tasks(self, ask: TaskRunBatch, _caller: Caller) -> RunBatchAnswer:
        for index, item in enumerate(ask.runs):
            try:
                running.check(item.inputs, item.idempotency_key)
            except Ql3Error as error:
                raise Ql3Error(error.code, error.detail, field=f"runs[{index}].{error.field}") from error
        results = await self._run_judged(
            ask.actor,
            ask.project,
            [item.task for item in ask.runs],
            lambda index, permit: RunAsk(
                actor=ask.actor,
                decision=permit.decision,
                project=ask.project,
                task=ask.runs[index].task,
                trigger_type=ask.trigger_type,
                inputs=ask.runs[index].inputs,
                priority=ask.runs[index].priority,
                idempotency_key=ask.runs[index].idempotency_key,
                judged=permit.revision,
            ),
            self._desk.run_many,
        )
        return RunBatchAnswer(results=results)

    async def _run_alone(self, asks: Sequence[RunAsk]) -> list[RunResult | Outdated]:
        try:
            return [await self._desk.run(asks[0])]
        except Outdated as outdated:
            return [outdated]

    async def _run_judged(
        self,
        actor: Actor,
        project: str,
        tasks: Sequence[str],
        ask: Callable[[int, Permit], RunAsk],
        run: Callable[[Sequence[RunAsk]], Awaitable[list[RunResult | Outdated]]],
    ) -> list[RunResult]:
        """Runs of these tasks; policy is asked again about one that was changed before its run was made."""
        results: dict[int, RunResult] = {}
        for _ in range(TRIES):
            left = [index for index in range(len(tasks)) if index not in results]
            permits = await self._permits.may_run(actor, project, [tasks[index] for index in left])
            outcomes = await run([ask(index, permits[tasks[index]]) for index in left])
            for index, outcome in zip(left, outcomes, strict=True):
                if isinstance(outcome, RunResult):
                    results[index] = outcome
                else:
                    self._permits.forget(project, [tasks[index]])
            if len(results) == len(tasks):
                return [results[index] for index in range(len(tasks))]
        raise Ql3Error("unavailable", "The task that is to run is changed all the time.")

    # Triggers.

    async def _create_trigger(self, ask: TriggerCreate, _caller: Caller) -> TriggerAnswer:
        decision = await self._about_task(ask.actor, ask.project, ask.task, "task.update")
        return TriggerAnswer(trigger=await self._timetable.create(ask, decision))

    async def _update_trigger(self, ask: TriggerUpdate, _caller: Caller) -> TriggerAnswer:
        decision = await self._policy.require(ask.actor, ask.project, "task.update")
        return TriggerAnswer(trigger=await self._timetable.update(ask, decision))

    async def _enable_trigger(self, ask: TriggerEnable, _caller: Caller) -> TriggerAnswer:
        decision = await self._policy.require(ask.actor, ask.project, "task.update")
        return TriggerAnswer(trigger=await self._timetable.enable(ask, decision))

    async def _delete_trigger(self, ask: TriggerDelete, _caller: Caller) -> TriggerAnswer:
        decision = await self._policy.require(ask.actor, ask.project, "task.update")
        return TriggerAnswer(trigger=await self._timetable.delete(ask, decision))

    async def _rotate_webhook(self, ask: WebhookRotate, _caller: Caller) -> TriggerAnswer:
        decision = await self._policy.require(ask.actor, ask.project, "task.update")
        return TriggerAnswer(trigger=await self._timetable.rotate(ask, decision))

    async def _call_webhook(self, ask: WebhookCall, _caller: Caller) -> RunAnswer:
        return await self._occasions.call(ask)

    async def _backfill(self, ask: TriggerBackfill, _caller: Caller) -> BackfillAnswer:
        await self._policy.require(ask.actor, ask.project, "trigger.read")
        task = await self._timetable.task_of(ask.project, ask.trigger)
        for _ in range(TRIES):
            permit = (await self._permits.may_run(ask.actor, ask.project, [task]))[task]
            try:
                return await self._occasions.backfill(ask, permit.decision, permit.revision)
            except Outdated:
                self._permits.forget(ask.project, [task])
        raise Ql3Error("unavailable", "The task that is to run is changed all the time.")

    async def _preview(self, ask: TriggerPreview, _caller: Caller) -> PreviewAnswer:
        await self._policy.require(ask.actor, ask.project, "trigger.read")
        return triggers.preview(ask.spec, self._clock.now_ms(), ask.count)

    async def _list_triggers(self, ask: TriggerList, _caller: Caller) -> TriggerPage:
        await self._policy.require(ask.actor, ask.project, "trigger.read")
        return await self._timetable.list(ask)

    async def _list_missed(self, ask: MissedList, _caller: Caller) -> MissedPage:
        await self._policy.require(ask.actor, ask.project, "trigger.read")
        return await self._timetable.missed(ask)


def _warned(task: Task, warnings: list[str]) -> TaskAnswer:
    return TaskAnswer(task=msgspec.structs.replace(task, warnings=[*task.warnings, *warnings]))
