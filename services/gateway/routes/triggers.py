"""Triggers. Owner: scheduler."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from schemas import endpoints
from schemas.base import Value, View
from schemas.ids import Id, Millis
from schemas.triggers import (
    MissedFire,
    MissedList,
    Trigger,
    TriggerBackfill,
    TriggerCreate,
    TriggerDelete,
    TriggerEnable,
    TriggerList,
    TriggerPreview,
    TriggerSpec,
    TriggerUpdate,
    WebhookRotate,
)
from services.gateway import hooks
from services.gateway.calls import Call, listing
from services.gateway.operations import Listing, Nothing, Operations, Paged

operations = Operations("triggers")
TRIGGER_BYTES = 320 * 1024
"""A trigger may bring a calendar file."""
TaskName = Annotated[str, Meta(min_length=1, max_length=63)]


class TriggerQuery(Paged, frozen=True, kw_only=True):
    """Of which task (name or id), or of all; or one, by its id."""

    task: TaskName | None = None
    trigger: Id | None = None


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


class WebhookSecret(View, frozen=True, kw_only=True):
    """A webhook's secret, shown once, and the path that holds it."""

    trigger: str
    secret: str
    path: str


class Backfill(Value, frozen=True, kw_only=True):
    """A window of milliseconds UTC, both ends included; its runs start `every_ms` apart."""

    from_ms: Millis
    until_ms: Millis
    every_ms: Annotated[int, Meta(ge=0, le=86_400_000)] = 1_000
    again: bool = False
    """Also instants that are known to have been admitted before."""
    dry_run: bool = False


class Backfilled(View, frozen=True, kw_only=True):
    """The instants that run (or would), and how many had been admitted before and are left out."""

    instants: list[int]
    left_out: int
    dry_run: bool


@operations.get("/projects/{project}/triggers", TriggerQuery, Listing[Trigger])
async def list_triggers(call: Call[TriggerQuery]) -> Listing[Trigger]:
    """Triggers of a project or of a task, with their next instants."""
    query = call.input
    question = TriggerList(
        actor=call.actor, project=call.project, task=query.task, trigger=query.trigger, page=query.page
    )
    return listing(await call.ask(endpoints.TRIGGERS_LIST, question))


@operations.get("/projects/{project}/triggers/missed", MissedQuery, Listing[MissedFire])
async def list_missed(call: Call[MissedQuery]) -> Listing[MissedFire]:
    """Instants that did not become a run, and why; newest first."""
    question = MissedList(actor=call.actor, project=call.project, trigger=call.input.trigger, page=call.input.page)
    return listing(await call.ask(endpoints.TRIGGERS_MISSED, question))


@operations.post("/projects/{project}/triggers", NewTrigger, Trigger, status=201, body_bytes=TRIGGER_BYTES)
async def create_trigger(call: Call[NewTrigger]) -> Trigger:
    """Add a trigger to a task."""
    question = TriggerCreate(
        actor=call.actor,
        project=call.project,
        task=call.input.task,
        spec=call.input.spec,
        mutation_id=call.mutation_id,
        # Nobody knows this secret: a webhook's own is given out once, by an answer that is kept nowhere.
        token_digest=hooks.digest_of(hooks.new_secret()) if call.input.spec.kind == "webhook" else None,
    )
    return (await call.ask(endpoints.TRIGGERS_CREATE, question)).trigger


@operations.post("/projects/{project}/triggers/{trigger}/secret", Nothing, WebhookSecret, keep="no")
async def give_webhook_secret(call: Call[Nothing]) -> WebhookSecret:
    """Give a webhook a new secret and show it once; the one before is void."""
    secret = hooks.new_secret()
    trigger = call.id("trigger")
    question = WebhookRotate(
        actor=call.actor, project=call.project, trigger=trigger, token_digest=hooks.digest_of(secret)
    )
    await call.ask(endpoints.TRIGGERS_ROTATE, question)
    return WebhookSecret(trigger=trigger, secret=secret, path=hooks.path_of(call.project, trigger, secret))


@operations.post("/projects/{project}/triggers/{trigger}/backfill", Backfill, Backfilled)
async def backfill_trigger(call: Call[Backfill]) -> Backfilled:
    """Run a trigger's instants of a window that has passed, or say which they would be."""
    given = call.input
    question = TriggerBackfill(
        actor=call.actor,
        project=call.project,
        trigger=call.id("trigger"),
        from_ms=given.from_ms,
        until_ms=given.until_ms,
        every_ms=given.every_ms,
        again=given.again,
        dry_run=given.dry_run,
        mutation_id=call.mutation_id,
    )
    answer = await call.ask(endpoints.TRIGGERS_BACKFILL, question)
    return Backfilled(instants=answer.instants, left_out=answer.left_out, dry_run=answer.dry_run)


class Preview(Value, frozen=True, kw_only=True):
    """A trigger that is not saved, and how many of its next instants are wanted."""

    spec: TriggerSpec
    count: Annotated[int, Meta(ge=1, le=50)] = 5


class Previewed(View, frozen=True, kw_only=True):
    """The trigger as it would be stored, its schedule in words, and its next instants."""

    spec: TriggerSpec
    english: str | None
    chinese: str | None
    instants: list[int]


@operations.post("/projects/{project}/triggers/preview", Preview, Previewed, body_bytes=TRIGGER_BYTES, keep="no")
async def preview_trigger(call: Call[Preview]) -> Previewed:
    """Say what a trigger would do, before it is saved."""
    question = TriggerPreview(actor=call.actor, project=call.project, spec=call.input.spec, count=call.input.count)
    found = await call.ask(endpoints.TRIGGERS_PREVIEW, question)
    return Previewed(spec=found.spec, english=found.english, chinese=found.chinese, instants=found.instants)


@operations.put("/projects/{project}/triggers/{trigger}", TriggerChange, Trigger, body_bytes=TRIGGER_BYTES)
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
