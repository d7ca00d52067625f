"""Runs. Owner: dispatcher; new ones come through the scheduler."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

import msgspec
from litestar import Response
from msgspec import Meta

from schemas import endpoints, limits
from schemas.base import Value, View
from schemas.errors import Ql3Error
from schemas.runs import (
    Attempt,
    AttemptList,
    Run,
    RunCancel,
    RunEvent,
    RunEventList,
    RunExplain,
    RunList,
    RunRead,
    RunResult,
    RunRetry,
    RunStatus,
)
from schemas.tasks import TaskRunBatch, TaskRunItem
from services.gateway.calls import Call, listing
from services.gateway.operations import Listing, Nothing, Operations, Paged
from services.gateway.problem import Problem, problem_of
from services.gateway.streams import Facts, allowed_kinds, allowed_run, follow_run, open_answer, project_facts

operations = Operations("runs")


class RunQuery(Paged, frozen=True, kw_only=True):
    """Of which task (name or id), in which states (`status=queued,running`)."""

    task: Annotated[str, Meta(min_length=1, max_length=63)] | None = None
    status: tuple[RunStatus, ...] = ()


class EventQuery(Value, frozen=True, kw_only=True):
    """Events after a sequence."""

    after: Annotated[int, Meta(ge=0)] = 0
    limit: Annotated[int, Meta(ge=1, le=limits.LIST_ITEMS)] = limits.LIST_DEFAULT


class RunBatch(Value, frozen=True, kw_only=True):
    """Many runs at once; each may have its own idempotency key, and is answered for itself."""

    runs: Annotated[list[TaskRunItem], Meta(min_length=1, max_length=limits.BATCH_ITEMS)]


class BatchItem(View, frozen=True, kw_only=True):
    """The committed run, or why there is none."""

    run: Run | None
    error: Problem | None


class RunExplanation(View, frozen=True, kw_only=True):
    """Why a run is where it is, with a stable code of the cause and what moves it next."""

    run: Run
    cause: str
    sentence: str
    next_step: str
    facts: dict[str, Any]


@operations.get("/projects/{project}/runs", RunQuery, Listing[Run])
async def list_runs(call: Call[RunQuery]) -> Listing[Run]:
    """Runs of a project, newest first."""
    query = call.input
    question = RunList(
        actor=call.actor, project=call.project, task=query.task, status=list(query.status), page=query.page
    )
    return listing(await call.ask(endpoints.RUNS_LIST, question))


@operations.post(
    "/projects/{project}/runs:batch", RunBatch, Listing[BatchItem], body_bytes=limits.BATCH_BYTES - 4096, keep="owner"
)
async def run_batch(call: Call[RunBatch]) -> Listing[BatchItem]:
    """Run up to 256 tasks now; the answer stands in the order of the request, after commit. An Idempotency-Key counts
    for each run that has no key of its own."""
    items = call.input.runs
    if call.idempotency_key is not None:
        items = [_with_key(item, call.idempotency_key, index) for index, item in enumerate(items)]
    question = TaskRunBatch(actor=call.actor, project=call.project, runs=items)
    results = (await call.ask(endpoints.TASKS_RUN_BATCH, question)).results
    return Listing(items=[_batch_item(result) for result in results])


def _with_key(item: TaskRunItem, key: str, index: int) -> TaskRunItem:
    """The run with a key that is the same in each repeat of the request, and short enough whatever the request's is."""
    if item.idempotency_key is not None:
        return item
    digest = hashlib.sha256(f"{key}:{index}".encode()).hexdigest()
    return msgspec.structs.replace(item, idempotency_key=f"batch:{digest}")


def _batch_item(result: RunResult) -> BatchItem:
    if result.error is None:
        return BatchItem(run=result.run, error=None)
    return BatchItem(run=None, error=problem_of(Ql3Error(result.error, result.error_detail, field=result.error_field)))


@operations.get("/projects/{project}/runs/{run}", Nothing, Run)
async def get_run(call: Call[Nothing]) -> Run:
    """One run."""
    return (await call.ask(endpoints.RUNS_GET, RunRead(actor=call.actor, project=call.project, run=call.id("run")))).run


@operations.get("/projects/{project}/runs/{run}/events", EventQuery, Listing[RunEvent])
async def list_run_events(call: Call[EventQuery]) -> Listing[RunEvent]:
    """What happened to a run, oldest first."""
    question = RunEventList(
        actor=call.actor,
        project=call.project,
        run=call.id("run"),
        after=call.input.after,
        limit=call.input.limit,
    )
    return listing(await call.ask(endpoints.RUNS_EVENTS, question))


@operations.get("/projects/{project}/runs/{run}/attempts", Nothing, Listing[Attempt])
async def list_attempts(call: Call[Nothing]) -> Listing[Attempt]:
    """The attempts of a run."""
    question = AttemptList(actor=call.actor, project=call.project, run=call.id("run"))
    return listing(await call.ask(endpoints.RUNS_ATTEMPTS, question))


@operations.post("/projects/{project}/runs/{run}/cancel", Nothing, Run, keep="owner")
async def cancel_run(call: Call[Nothing]) -> Run:
    """Ask for the end of a run; its state tells when its processes are gone."""
    question = RunCancel(actor=call.actor, project=call.project, run=call.id("run"))
    return (await call.ask(endpoints.RUNS_CANCEL, question)).run


@operations.post("/projects/{project}/runs/{run}/retry", Nothing, Run, status=201)
async def retry_run(call: Call[Nothing]) -> Run:
    """Make a new run like an ended one."""
    question = RunRetry(actor=call.actor, project=call.project, run=call.id("run"), new_run_id=call.mutation_id)
    return (await call.ask(endpoints.RUNS_RETRY, question)).run


@operations.get("/projects/{project}/runs/{run}/explain", Nothing, RunExplanation)
async def explain_run(call: Call[Nothing]) -> RunExplanation:
    """Why a run is where it is."""
    question = RunExplain(actor=call.actor, project=call.project, run=call.id("run"))
    found = await call.ask(endpoints.RUNS_EXPLAIN, question)
    return RunExplanation(
        run=found.run, cause=found.cause, sentence=found.sentence, next_step=found.next_step, facts=found.facts
    )


@operations.get("/projects/{project}/runs/{run}/stream", Nothing, None, produces="events")
async def stream_run(call: Call[Nothing]) -> Response[Any]:
    """The run's states as they come: events `run` (a run), then `end`."""
    run_id = call.id("run")
    first = (await call.ask(endpoints.RUNS_GET, RunRead(actor=call.actor, project=call.project, run=run_id))).run
    return open_answer(call, follow_run(call, run_id, first), lambda: allowed_run(call))


@operations.get("/projects/{project}/events", Nothing, None, produces="events")
async def stream_project(call: Call[Nothing]) -> Response[Any]:
    """The project's facts as they come, under the name of their kind; at `reset`, read your lists again."""
    facts = Facts(await allowed_kinds(call))
    return open_answer(call, project_facts(call, facts), lambda: facts.ask_again(call))
