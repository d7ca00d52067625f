"""Tasks. Owner: scheduler."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from schemas import endpoints, limits
from schemas.base import Value
from schemas.ids import Slug
from schemas.runs import Run
from schemas.tasks import (
    Task,
    TaskCreate,
    TaskDelete,
    TaskEnable,
    TaskList,
    TaskRead,
    TaskRun,
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
    """Which tasks: of a folder, with a label (`name` or `name=value`)."""

    folder: Annotated[str, Meta(max_length=255)] | None = None
    label: Annotated[str, Meta(max_length=320)] | None = None


class TaskAt(Value, frozen=True, kw_only=True):
    """An older revision, when given."""

    revision: Annotated[int, Meta(ge=1)] | None = None


class RunNow(Value, frozen=True, kw_only=True):
    """A run now. `expected_revision` refuses when the task was changed meanwhile."""

    inputs: dict[str, Any] | None = None
    priority: Annotated[int, Meta(ge=limits.PRIORITY_MIN, le=limits.PRIORITY_MAX)] | None = None
    expected_revision: int | None = None


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
    )
    return (await call.ask(endpoints.TASKS_RUN, question)).run
