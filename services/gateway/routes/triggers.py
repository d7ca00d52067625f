"""Triggers. Owner: scheduler."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from schemas import endpoints
from schemas.base import Value
from schemas.ids import Id
from schemas.triggers import (
    MissedFire,
    MissedList,
    Trigger,
    TriggerCreate,
    TriggerDelete,
    TriggerEnable,
    TriggerList,
    TriggerSpec,
    TriggerUpdate,
)
from services.gateway.calls import Call, listing
from services.gateway.operations import Listing, Nothing, Operations, Paged

operations = Operations("triggers")
TaskName = Annotated[str, Meta(min_length=1, max_length=63)]


class TriggerQuery(Paged, frozen=True, kw_only=True):
    """Of which task (name or id), or of all."""

    task: TaskName | None = None


class MissedQuery(Paged, frozen=True, kw_only=True):
    """Of which trigger, or of all."""

    trigger: Id | None = None


class NewTrigger(Value, frozen=True, kw_only=True):
    """A trigger of a task (name or id)."""

    task: TaskName
    spec: TriggerSpec


class TriggerChange(Value, frozen=True, kw_only=True):
    """The trigger's next revision."""

    expected_revision: int
    spec: TriggerSpec


@operations.get("/projects/{project}/triggers", TriggerQuery, Listing[Trigger])
async def list_triggers(call: Call[TriggerQuery]) -> Listing[Trigger]:
    """Triggers of a project or of a task, with their next instants."""
    question = TriggerList(actor=call.actor, project=call.project, task=call.input.task, page=call.input.page)
    return listing(await call.ask(endpoints.TRIGGERS_LIST, question))


@operations.get("/projects/{project}/triggers/missed", MissedQuery, Listing[MissedFire])
async def list_missed(call: Call[MissedQuery]) -> Listing[MissedFire]:
    """Instants that did not become a run, and why; newest first."""
    question = MissedList(actor=call.actor, project=call.project, trigger=call.input.trigger, page=call.input.page)
    return listing(await call.ask(endpoints.TRIGGERS_MISSED, question))


@operations.post("/projects/{project}/triggers", NewTrigger, Trigger, status=201)
async def create_trigger(call: Call[NewTrigger]) -> Trigger:
    """Add a trigger to a task."""
    question = TriggerCreate(
        actor=call.actor,
        project=call.project,
        task=call.input.task,
        spec=call.input.spec,
        mutation_id=call.mutation_id,
    )
    return (await call.ask(endpoints.TRIGGERS_CREATE, question)).trigger


@operations.put("/projects/{project}/triggers/{trigger}", TriggerChange, Trigger)
async def update_trigger(call: Call[TriggerChange]) -> Trigger:
    """Change when a task runs."""
    question = TriggerUpdate(
        actor=call.actor,
        project=call.project,
        trigger=call.id("trigger"),
        expected_revision=call.input.expected_revision,
        spec=call.input.spec,
        mutation_id=call.mutation_id,
    )
    return (await call.ask(endpoints.TRIGGERS_UPDATE, question)).trigger


@operations.delete("/projects/{project}/triggers/{trigger}", Nothing, Trigger)
async def delete_trigger(call: Call[Nothing]) -> Trigger:
    """Remove a trigger."""
    question = TriggerDelete(actor=call.actor, project=call.project, trigger=call.id("trigger"))
    return (await call.ask(endpoints.TRIGGERS_DELETE, question)).trigger


@operations.post("/projects/{project}/triggers/{trigger}/enable", Nothing, Trigger)
async def enable_trigger(call: Call[Nothing]) -> Trigger:
    """Let a trigger fire."""
    return await _set_enabled(call, enabled=True)


@operations.post("/projects/{project}/triggers/{trigger}/disable", Nothing, Trigger)
async def disable_trigger(call: Call[Nothing]) -> Trigger:
    """Keep a trigger from firing."""
    return await _set_enabled(call, enabled=False)


async def _set_enabled(call: Call[Nothing], *, enabled: bool) -> Trigger:
    question = TriggerEnable(actor=call.actor, project=call.project, trigger=call.id("trigger"), enabled=enabled)
    return (await call.ask(endpoints.TRIGGERS_ENABLE, question)).trigger
