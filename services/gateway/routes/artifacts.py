"""What runs left behind, and for how long it is kept. Owner: retention."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from schemas import endpoints
from schemas.artifacts import Artifact, ArtifactList, RetentionPolicy, RetentionRead, RetentionSet
from schemas.base import Value
from services.gateway.calls import Call, listing
from services.gateway.operations import Listing, Nothing, Operations, Paged

operations = Operations("artifacts")
HOUR_MS = 3_600_000


class RetentionChange(Value, frozen=True, kw_only=True):
    """How long logs and ended runs are kept, in milliseconds, an hour at least."""

    logs_ms: Annotated[int, Meta(ge=HOUR_MS)]
    runs_ms: Annotated[int, Meta(ge=HOUR_MS)]
    expected_version: int


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
