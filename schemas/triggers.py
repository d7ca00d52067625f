"""Triggers: when a task runs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from schemas import limits
from schemas.base import Message, Value, View
from schemas.identity import Actor
from schemas.ids import Digest, Id, Millis, ProjectId, Slug
from schemas.paging import Page


class TriggerSpec(Value, frozen=True, kw_only=True):
    """One trigger. `kind` says which of the other fields count; times in milliseconds UTC.

    `expression` is a cron expression, a macro or `@every`; `timezone` is an IANA zone. `missed` says what happens with
    instants that passed while nobody looked: `skip`, `fire_once` (the latest) or `catch_up` (at most that many).
    """

    kind: Literal["cron", "interval", "once", "boot", "manual", "webhook", "after_task"] = "cron"
    expression: Annotated[str, Meta(max_length=255)] | None = None
    timezone: Annotated[str, Meta(max_length=64)] = "UTC"
    missed: Literal["skip", "fire_once", "catch_up"] = "fire_once"
    catch_up: Annotated[int, Meta(ge=1, le=1000)] | None = None
    grace_ms: Annotated[int, Meta(ge=0, le=86_400_000)] = limits.MISFIRE_GRACE_MS
    at_ms: Millis | None = None
    jitter_ms: Annotated[int, Meta(ge=0, le=86_400_000)] = 0
    start_at_ms: Millis | None = None
    end_at_ms: Millis | None = None
    pause_until_ms: Millis | None = None
    exclude: Annotated[list[Annotated[str, Meta(max_length=64)]], Meta(max_length=1000)] = []
    """Days (`2026-12-25`, `2026-12-24/2027-01-02`, `12-25`), spans between two instants, `holidays:DE-BY`."""
    exclude_calendar: Annotated[str, Meta(max_length=262_144)] | None = None
    """The text of an iCalendar file; what it says is stored in `exclude`."""
    after_task: Slug | None = None
    after_on: Literal["success", "failure", "any"] = "success"
    inputs: dict[str, Any] | None = None
    signed: bool = True
    """A webhook takes only what is signed with its secret; without, whoever knows its path may call it."""
    enabled: bool = True


class Trigger(View, frozen=True, kw_only=True):
    """A trigger as people read it."""

    id: str
    project: str
    task_id: str
    task_name: str
    revision: int
    version: int
    enabled: bool
    spec: TriggerSpec
    next_fire_at_ms: int | None
    last_scheduled_at_ms: int | None
    missed_count: int
    created_at_ms: int
    updated_at_ms: int


class TriggerCreate(Message, frozen=True, kw_only=True, tag="triggers.create/1"):
    """Add a trigger to a task. `token_digest` is for a webhook: the SHA-256 of its secret, which the asker keeps."""

    actor: Actor
    project: ProjectId
    task: str
    spec: TriggerSpec
    mutation_id: Id | None = None
    token_digest: Digest | None = None


class TriggerUpdate(Message, frozen=True, kw_only=True, tag="triggers.update/1"):
    """A new revision of a trigger."""

    actor: Actor
    project: ProjectId
    trigger: Id
    expected_revision: int
    spec: TriggerSpec
    mutation_id: Id | None = None


class TriggerEnable(Message, frozen=True, kw_only=True, tag="triggers.enable/1"):
    """Enable or disable a trigger."""

    actor: Actor
    project: ProjectId
    trigger: Id
    enabled: bool


class TriggerDelete(Message, frozen=True, kw_only=True, tag="triggers.delete/1"):
    """Remove a trigger."""

    actor: Actor
    project: ProjectId
    trigger: Id


class WebhookRotate(Message, frozen=True, kw_only=True, tag="triggers.rotate/1"):
    """Give a webhook another secret; the one before is void at once."""

    actor: Actor
    project: ProjectId
    trigger: Id
    token_digest: Digest


class WebhookCall(Message, frozen=True, kw_only=True, tag="triggers.call/1"):
    """Somebody called a webhook. The gateway has checked the signature, when `signed`; the secret stays there.

    The same `delivery` gives the same run. `payload` becomes the input of this name.
    """

    project: ProjectId
    trigger: Id
    token_digest: Digest
    signed: bool
    delivery: Annotated[str, Meta(min_length=1, max_length=128)]
    payload: Any = None


class TriggerBackfill(Message, frozen=True, kw_only=True, tag="triggers.backfill/1"):
    """Run a trigger's instants of a window that has passed, both ends included, `every_ms` apart from each other.

    Instants that are known to have been admitted are left out, unless `again`. With `dry_run` nothing is stored.
    """

    actor: Actor
    project: ProjectId
    trigger: Id
    from_ms: Millis
    until_ms: Millis
    every_ms: Annotated[int, Meta(ge=0, le=86_400_000)] = 1_000
    again: bool = False
    dry_run: bool = False
    mutation_id: Id | None = None


class BackfillAnswer(Message, frozen=True, kw_only=True, tag="triggers.backfilled/1"):
    """The instants that run (or would), and how many of the window had been admitted before."""

    instants: list[int]
    left_out: int
    dry_run: bool


class TriggerPreview(Message, frozen=True, kw_only=True, tag="triggers.preview/1"):
    """What would this trigger do? Nothing is stored."""

    actor: Actor
    project: ProjectId
    spec: TriggerSpec
    count: Annotated[int, Meta(ge=1, le=50)] = 5


class PreviewAnswer(Message, frozen=True, kw_only=True, tag="triggers.previewed/1"):
    """The trigger as it would be stored, its schedule in words, and its next instants (without `H`'s own spread)."""

    spec: TriggerSpec
    english: str | None
    chinese: str | None
    instants: list[int]


class TriggerList(Message, frozen=True, kw_only=True, tag="triggers.list/1"):
    """Triggers of a project or of a task, or one by its id."""

    actor: Actor
    project: ProjectId
    task: str | None = None
    trigger: Id | None = None
    page: Page = Page()


class TriggerAnswer(Message, frozen=True, kw_only=True, tag="triggers.answer/1"):
    """One trigger."""

    trigger: Trigger


class TriggerPage(Message, frozen=True, kw_only=True, tag="triggers.page/1"):
    """A page of triggers."""

    items: list[Trigger]
    next: str | None


class MissedFire(View, frozen=True, kw_only=True):
    """Instants that did not become runs, and why: the first, the last, and how many (`at_least`: or more)."""

    id: str
    trigger_id: str
    task_id: str
    scheduled_for_ms: int
    last_ms: int
    cause: str
    count: int
    at_least: bool
    recorded_at_ms: int


class MissedList(Message, frozen=True, kw_only=True, tag="triggers.missed/1"):
    """Missed fires of a project, newest first."""

    actor: Actor
    project: ProjectId
    trigger: Id | None = None
    page: Page = Page()


class MissedPage(Message, frozen=True, kw_only=True, tag="triggers.missed_page/1"):
    """A page of missed fires."""

    items: list[MissedFire]
    next: str | None


class TriggerMissed(Message, frozen=True, kw_only=True, tag="trigger.missed/1"):
    """Fact: instants of a trigger did not become runs. Subject `ql3.evt.trigger.<project>.<trigger>.missed`."""

    project: ProjectId
    trigger_id: Id
    task_id: Id
    cause: str
    first_ms: Millis
    last_ms: Millis
    count: int
    at_least: bool
    at_ms: Millis
