"""Tasks. Owner: scheduler."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from schemas import endpoints, limits
from schemas.base import Value, View
from schemas.ids import Id, Slug
from schemas.runs import Run
from schemas.tasks import (
    Change,
    RevisionList,
    Task,
    TaskCreate,
    TaskDelete,
    TaskDiff,
    TaskEnable,
    TaskFile,
    TaskList,
    TaskOutcome,
    TaskRead,
    TaskRestore,
    TaskRevision,
    TaskRun,
    TasksApply,
    TaskSpec,
    TaskUpdate,
)
from schemas.triggers import TriggerSpec
from services.gateway.calls import Call, listing
from services.gateway.operations import Listing, Nothing, Operations, Paged

operations = Operations("tasks")
TASK_BYTES = limits.BATCH_BYTES - 4096
"""A task travels to its owner in one message."""


class NewTask(Value, frozen=True, kw_only=True):
    """A task with its triggers, made together or not at all."""

    name: Slug
    spec: TaskSpec
    triggers: Annotated[tuple[TriggerSpec, ...], Meta(max_length=32)] = ()
    enabled: bool = True


class TaskChange(Value, frozen=True, kw_only=True):
    """The task's next revision. `expected_revision` is the one that it was made from."""

    expected_revision: int
    spec: TaskSpec


class TaskQuery(Paged, frozen=True, kw_only=True):
    """Which tasks: of a folder, with a label (`name=value`)."""

    folder: Annotated[str, Meta(max_length=255)] | None = None
    label: Annotated[str, Meta(max_length=320)] | None = None


class TaskAt(Value, frozen=True, kw_only=True):
    """An older revision, when given."""

    revision: Annotated[int, Meta(ge=1)] | None = None


class RunNow(Value, frozen=True, kw_only=True):
    """A run now. `expected_revision` refuses when the task was changed meanwhile.

    `trigger` is one of the task's of kind `manual`: its inputs are taken, with `inputs` over them.
    """

    inputs: dict[str, Any] | None = None
    priority: Annotated[int, Meta(ge=limits.PRIORITY_MIN, le=limits.PRIORITY_MAX)] | None = None
    expected_revision: int | None = None
    trigger: Id | None = None


@operations.get("/projects/{project}/tasks", TaskQuery, Listing[Task])
async def list_tasks(call: Call[TaskQuery]) -> Listing[Task]:
    """Tasks of a project, by name."""
    query = call.input
    question = TaskList(actor=call.actor, project=call.project, folder=query.folder, label=query.label, page=query.page)
    return listing(await call.ask(endpoints.TASKS_LIST, question))


@operations.post("/projects/{project}/tasks", NewTask, Task, status=201, body_bytes=TASK_BYTES)
async def create_task(call: Call[NewTask]) -> Task:
    """Make a task with its triggers."""
    new = call.input
    question = TaskCreate(
        actor=call.actor,
        project=call.project,
        name=new.name,
        spec=new.spec,
        triggers=list(new.triggers),
        enabled=new.enabled,
        mutation_id=call.mutation_id,
    )
    return (await call.ask(endpoints.TASKS_CREATE, question)).task


@operations.get("/projects/{project}/tasks/{task}", TaskAt, Task)
async def get_task(call: Call[TaskAt]) -> Task:
    """One task by name or id."""
    question = TaskRead(
        actor=call.actor, project=call.project, task=call.name_or_id("task"), revision=call.input.revision
    )
    return (await call.ask(endpoints.TASKS_GET, question)).task


@operations.put("/projects/{project}/tasks/{task}", TaskChange, Task, body_bytes=TASK_BYTES)
async def update_task(call: Call[TaskChange]) -> Task:
    """Make a task's next revision; runs that are under way keep theirs."""
    question = TaskUpdate(
        actor=call.actor,
        project=call.project,
        task=call.name_or_id("task"),
        expected_revision=call.input.expected_revision,
        spec=call.input.spec,
        mutation_id=call.mutation_id,
    )
    return (await call.ask(endpoints.TASKS_UPDATE, question)).task


@operations.delete("/projects/{project}/tasks/{task}", Nothing, Task)
async def delete_task(call: Call[Nothing]) -> Task:
    """Remove a task and its triggers from use; its runs stay readable."""
    question = TaskDelete(actor=call.actor, project=call.project, task=call.name_or_id("task"))
    return (await call.ask(endpoints.TASKS_DELETE, question)).task


class Files(Value, frozen=True, kw_only=True):
    """Tasks as files say them; with `dry_run` only the changes are told."""

    tasks: Annotated[tuple[NewTask, ...], Meta(min_length=1, max_length=64)]
    dry_run: bool = False


class Applied(View, frozen=True, kw_only=True):
    """What became of each task, in the order of the request."""

    items: list[TaskOutcome]
    next: str | None
    dry_run: bool


class Between(Value, frozen=True, kw_only=True):
    """Two revisions of a task."""

    before: Annotated[int, Meta(ge=1)]
    after: Annotated[int, Meta(ge=1)]


class Differences(View, frozen=True, kw_only=True):
    """What differs, by path; `more` says that there is more than is shown."""

    changes: list[Change]
    more: bool


class Restore(Value, frozen=True, kw_only=True):
    """The revision whose content becomes the next one."""

    revision: Annotated[int, Meta(ge=1)]
    expected_revision: int


@operations.post("/projects/{project}/apply", Files, Applied, body_bytes=TASK_BYTES)
async def apply_tasks(call: Call[Files]) -> Applied:
    """Bring tasks and their triggers to what files say, all or none; what is so already is not touched."""
    tasks = [
        TaskFile(name=task.name, spec=task.spec, triggers=list(task.triggers), enabled=task.enabled)
        for task in call.input.tasks
    ]
    question = TasksApply(actor=call.actor, project=call.project, tasks=tasks, dry_run=call.input.dry_run)
    answer = await call.ask(endpoints.TASKS_APPLY, question)
    return Applied(items=answer.items, next=None, dry_run=answer.dry_run)


@operations.get("/projects/{project}/tasks/{task}/revisions", Paged, Listing[TaskRevision])
async def list_revisions(call: Call[Paged]) -> Listing[TaskRevision]:
    """Revisions of a task, newest first."""
    question = RevisionList(actor=call.actor, project=call.project, task=call.name_or_id("task"), page=call.input.page)
    return listing(await call.ask(endpoints.TASKS_REVISIONS, question))


@operations.get("/projects/{project}/tasks/{task}/diff", Between, Differences)
async def diff_revisions(call: Call[Between]) -> Differences:
    """What differs between two revisions of a task."""
    question = TaskDiff(
        actor=call.actor,
        project=call.project,
        task=call.name_or_id("task"),
        before=call.input.before,
        after=call.input.after,
    )
    answer = await call.ask(endpoints.TASKS_DIFF, question)
    return Differences(changes=answer.changes, more=answer.more)


@operations.post("/projects/{project}/tasks/{task}/restore", Restore, Task)
async def restore_task(call: Call[Restore]) -> Task:
    """Make the content of an old revision the task's next one."""
    question = TaskRestore(
        actor=call.actor,
        project=call.project,
        task=call.name_or_id("task"),
        revision=call.input.revision,
        expected_revision=call.input.expected_revision,
        mutation_id=call.mutation_id,
    )
    return (await call.ask(endpoints.TASKS_RESTORE, question)).task


@operations.post("/projects/{project}/tasks/{task}/enable", Nothing, Task)
async def enable_task(call: Call[Nothing]) -> Task:
    """Let a task's triggers fire."""
    return await _set_enabled(call, enabled=True)


@operations.post("/projects/{project}/tasks/{task}/disable", Nothing, Task)
async def disable_task(call: Call[Nothing]) -> Task:
    """Keep a task's triggers from firing."""
    return await _set_enabled(call, enabled=False)


async def _set_enabled(call: Call[Nothing], *, enabled: bool) -> Task:
    question = TaskEnable(actor=call.actor, project=call.project, task=call.name_or_id("task"), enabled=enabled)
    return (await call.ask(endpoints.TASKS_ENABLE, question)).task


@operations.post("/projects/{project}/tasks/{task}/runs", RunNow, Run, status=201, keep="owner")
async def run_task(call: Call[RunNow]) -> Run:
    """Run a task now; the answer is the committed run. The same Idempotency-Key never makes a second one."""
    question = TaskRun(
        actor=call.actor,
        project=call.project,
        task=call.name_or_id("task"),
        idempotency_key=call.idempotency_key,
        inputs=call.input.inputs,
        priority=call.input.priority,
        trigger_type="manual" if call.principal and call.principal.kind == "session" else "api",
        expected_revision=call.input.expected_revision,
        trigger=call.input.trigger,
    )
    return (await call.ask(endpoints.TASKS_RUN, question)).run
