"""Artifacts and what retention does with them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from schemas import limits
from schemas.base import Message, View
from schemas.identity import Actor
from schemas.ids import Id, Millis, ProjectId
from schemas.paging import Page


class Artifact(View, frozen=True, kw_only=True):
    """One stored log or file. `state` is `pending` until it is in the store, `gone` once a tombstone stands for it."""

    id: str
    project: str
    run_id: str
    attempt_id: str
    kind: Literal["log", "file", "report"]
    state: Literal["pending", "stored", "missing", "gone"]
    size: int
    produced: int
    sha256: str | None
    truncated: bool
    created_at_ms: int
    retired_at_ms: int | None


class ArtifactList(Message, frozen=True, kw_only=True, tag="artifacts.list/1"):
    """Artifacts of a run."""

    actor: Actor
    project: ProjectId
    run: Id
    page: Page = Page()


class ArtifactRead(Message, frozen=True, kw_only=True, tag="artifacts.read/1"):
    """A range of a stored artifact, by the attempt that wrote it; `length` at most 256 KiB."""

    actor: Actor
    project: ProjectId
    attempt_id: Id
    offset: Annotated[int, Meta(ge=0)]
    length: Annotated[int, Meta(ge=1, le=limits.LOG_RANGE_BYTES)] = limits.LOG_RANGE_BYTES


class ArtifactRange(Message, frozen=True, kw_only=True, tag="artifacts.range/1"):
    """Bytes of a stored artifact (base64 in JSON)."""

    artifact: Artifact
    offset: int
    data: bytes


class ArtifactPage(Message, frozen=True, kw_only=True, tag="artifacts.page/1"):
    """A page of artifacts."""

    items: list[Artifact]
    next: str | None


class RetentionPolicy(View, frozen=True, kw_only=True):
    """How long a project keeps logs and ended runs; milliseconds."""

    project: str
    logs_ms: int
    runs_ms: int
    version: int
    updated_at_ms: int


class RetentionRead(Message, frozen=True, kw_only=True, tag="retention.get/1"):
    """A project's policy."""

    actor: Actor
    project: ProjectId


class RetentionSet(Message, frozen=True, kw_only=True, tag="retention.set/1"):
    """Change a project's policy."""

    actor: Actor
    project: ProjectId
    logs_ms: Annotated[int, Meta(ge=3_600_000)]
    runs_ms: Annotated[int, Meta(ge=3_600_000)]
    expected_version: int


class RetentionAnswer(Message, frozen=True, kw_only=True, tag="retention.answer/1"):
    """A policy."""

    policy: RetentionPolicy


class Hold(View, frozen=True, kw_only=True):
    """What is kept whatever its age: a run, or the whole project when `run_id` is null."""

    project: str
    run_id: str | None
    reason: str
    held_by: str
    held_at_ms: int


class HoldSet(Message, frozen=True, kw_only=True, tag="holds.set/1"):
    """Hold a run (or the whole project, with null), or end that hold."""

    actor: Actor
    project: ProjectId
    run: Id | None = None
    held: bool = True
    reason: Annotated[str, Meta(max_length=limits.TEXT_CHARS)] = ""


class HoldAnswer(Message, frozen=True, kw_only=True, tag="holds.answer/1"):
    """The hold that was set, or the one that has ended."""

    hold: Hold


class HoldList(Message, frozen=True, kw_only=True, tag="holds.list/1"):
    """A project's holds."""

    actor: Actor
    project: ProjectId
    page: Page = Page()


class HoldPage(Message, frozen=True, kw_only=True, tag="holds.page/1"):
    """A page of holds."""

    items: list[Hold]
    next: str | None


class PurgeRuns(Message, frozen=True, kw_only=True, tag="runs.purge/1"):
    """Order to the dispatcher (`ql3.cmd.dispatcher.purge`): delete whole terminal runs that ended before a time."""

    order_id: Id
    project: ProjectId
    finished_before_ms: Millis
    limit: Annotated[int, Meta(ge=1, le=limits.BATCH_ITEMS)] = limits.BATCH_ITEMS


class ArtifactChanged(Message, frozen=True, kw_only=True, tag="artifact.changed/1"):
    """Fact: an artifact was stored or retired."""

    project: ProjectId
    artifact_id: Id
    run_id: Id
    attempt_id: Id
    state: Literal["pending", "stored", "missing", "gone"]
    at_ms: Millis
