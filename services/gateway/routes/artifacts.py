"""What runs left behind, and for how long it is kept. Owner: retention."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from schemas import endpoints
from schemas.artifacts import (
    Artifact,
    ArtifactList,
    Hold,
    HoldList,
    HoldSet,
    RetentionPolicy,
    RetentionRead,
    RetentionSet,
)
from schemas.base import Value
from schemas.limits import TEXT_CHARS
from services.gateway.calls import Call, listing
from services.gateway.operations import Listing, Nothing, Operations, Paged

operations = Operations("artifacts")
HOUR_MS = 3_600_000


class RetentionChange(Value, frozen=True, kw_only=True):
    """How long logs and ended runs are kept, in milliseconds, an hour at least."""

    logs_ms: Annotated[int, Meta(ge=HOUR_MS)]
    runs_ms: Annotated[int, Meta(ge=HOUR_MS)]
    expected_version: int


class HoldReason(Value, frozen=True, kw_only=True):
    """Why something is kept."""

    reason: Annotated[str, Meta(max_length=TEXT_CHARS)] = ""


@operations.get("/projects/{project}/runs/{run}/artifacts", Paged, Listing[Artifact])
async def list_artifacts(call: Call[Paged]) -> Listing[Artifact]:
    """What a run left behind."""
    question = ArtifactList(actor=call.actor, project=call.project, run=call.id("run"), page=call.input.page)
    return listing(await call.ask(endpoints.ARTIFACTS_LIST, question))


@operations.get("/projects/{project}/retention", Nothing, RetentionPolicy)
async def get_retention(call: Call[Nothing]) -> RetentionPolicy:
    """How long a project keeps logs and ended runs."""
    question = RetentionRead(actor=call.actor, project=call.project)
    return (await call.ask(endpoints.RETENTION_GET, question)).policy


@operations.put("/projects/{project}/retention", RetentionChange, RetentionPolicy)
async def set_retention(call: Call[RetentionChange]) -> RetentionPolicy:
    """Change how long a project keeps logs and ended runs."""
    change = call.input
    question = RetentionSet(
        actor=call.actor,
        project=call.project,
        logs_ms=change.logs_ms,
        runs_ms=change.runs_ms,
        expected_version=change.expected_version,
    )
    return (await call.ask(endpoints.RETENTION_SET, question)).policy


@operations.get("/projects/{project}/holds", Paged, Listing[Hold])
async def list_holds(call: Call[Paged]) -> Listing[Hold]:
    """What is kept whatever its age: runs, and the whole project (`run_id` null)."""
    question = HoldList(actor=call.actor, project=call.project, page=call.input.page)
    return listing(await call.ask(endpoints.HOLDS_LIST, question))


@operations.put("/projects/{project}/hold", HoldReason, Hold)
async def hold_project(call: Call[HoldReason]) -> Hold:
    """Keep everything of a project, whatever its age."""
    return await _set_hold(call, None, held=True, reason=call.input.reason)


@operations.delete("/projects/{project}/hold", Nothing, Hold)
async def release_project(call: Call[Nothing]) -> Hold:
    """End the hold on a project; what is old may go from now on."""
    return await _set_hold(call, None, held=False)


@operations.put("/projects/{project}/runs/{run}/hold", HoldReason, Hold)
async def hold_run(call: Call[HoldReason]) -> Hold:
    """Keep a run with its logs, whatever its age."""
    return await _set_hold(call, call.id("run"), held=True, reason=call.input.reason)


@operations.delete("/projects/{project}/runs/{run}/hold", Nothing, Hold)
async def release_run(call: Call[Nothing]) -> Hold:
    """End the hold on a run."""
    return await _set_hold(call, call.id("run"), held=False)


async def _set_hold(call: Call[HoldReason] | Call[Nothing], run: str | None, *, held: bool, reason: str = "") -> Hold:
    question = HoldSet(actor=call.actor, project=call.project, run=run, held=held, reason=reason)
    return (await call.ask(endpoints.HOLDS_SET, question)).hold
