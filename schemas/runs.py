"""Runs: submission, the ledger as people read it, and the facts about it."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from schemas import limits
from schemas.base import Message, Value, View
from schemas.identity import Actor, Subject
from schemas.ids import Digest, Id, Millis, ProjectId, Slug
from schemas.paging import Page
from schemas.tasks import ExecutionRevision, Key

RunStatus = Literal[
    "created", "queued", "dispatching", "running", "waiting_approval", "retry_wait", "lost",
    "succeeded", "failed", "cancelled", "timed_out",
]  # fmt: skip
AttemptStatus = Literal["claimed", "starting", "running", "succeeded", "failed", "cancelled", "timed_out", "lost"]
CancelReason = Literal["user", "policy", "shutdown", "reconcile", "timeout"]
ActorType = Literal[
    "user", "api_app", "trigger", "agent", "mcp_client", "worker", "executor", "system", "scheduler", "reconciler",
]  # fmt: skip
TriggerType = Literal[
    "manual", "api", "cron", "interval", "once", "boot", "webhook", "after_task", "backfill", "retry",
    "approved_action",
]  # fmt: skip

RUN_TERMINAL: Final = frozenset({"succeeded", "failed", "cancelled", "timed_out"})
ATTEMPT_ACTIVE: Final = frozenset({"claimed", "starting", "running"})


class RunOrder(Value, frozen=True, kw_only=True):
    """One run to be made. Ids are the sender's; the same `order_id` or idempotency key never makes a second run.

    `revision` is the digest of an `ExecutionRevision` that travels in the same message. `not_before_ms` is wall time:
    the run is stored ahead and may not start earlier.
    """

    order_id: Id
    run_id: Id
    project: ProjectId
    revision: Digest
    trigger_type: TriggerType
    requested_by: Subject
    created_at_ms: Millis
    idempotency_key: Key
    trigger_id: Id | None = None
    scheduled_for_ms: Millis | None = None
    not_before_ms: Millis | None = None
    priority: Annotated[int, Meta(ge=limits.PRIORITY_MIN, le=limits.PRIORITY_MAX)] | None = None
    inputs: dict[str, Any] | None = None
    parent_run_id: Id | None = None
    request_id: Annotated[str, Meta(max_length=128)] | None = None
    hold: bool = False
    """A rule of the project wants an approval before this run, whatever its task says."""


class SubmitRuns(Message, frozen=True, kw_only=True, tag="runs.submit/1"):
    """Order: make these runs (`ql3.cmd.dispatcher.submit`, or the RPC when the caller waits for the rows).

    The answer on `ql3.ack.<sender>` is a list of `order_id`.
    """

    sender: Slug
    revisions: Annotated[list[ExecutionRevision], Meta(max_length=limits.BATCH_ITEMS)]
    runs: Annotated[list[RunOrder], Meta(min_length=1, max_length=limits.BATCH_ITEMS)]


class Submitted(Value, frozen=True, kw_only=True):
    """What became of one order: the committed run, or the code of the refusal."""

    order_id: Id
    run: Run | None = None
    replayed: bool = False
    error: str | None = None
    error_detail: str | None = None


class SubmitAnswer(Message, frozen=True, kw_only=True, tag="runs.submitted/1"):
    """The answer to `SubmitRuns`, in its order, after commit."""

    results: list[Submitted]


class Run(View, frozen=True, kw_only=True):
    """A run as people read it. `attempt`, `worker_id` and `exit_code` are those of the latest attempt."""

    id: str
    project: str
    task_id: str
    task_name: str
    task_revision: int
    status: RunStatus
    version: int
    event_sequence: int
    priority: int
    trigger_type: str
    trigger_id: str | None
    scheduled_for_ms: int | None
    requested_by: Subject
    parent_run_id: str | None
    retry_of_run_id: str | None
    attempt: int
    attempt_id: str | None
    worker_id: str | None
    exit_code: int | None
    error_code: str | None
    error_summary: str | None
    waiting_reason: str | None
    cancel_requested_at_ms: int | None
    cancel_reason: str | None
    created_at_ms: int
    queued_at_ms: int | None
    started_at_ms: int | None
    finished_at_ms: int | None


class Attempt(View, frozen=True, kw_only=True):
    """One attempt of a run; `log` tells size, digest and truncation once the process ended."""

    id: str
    run_id: str
    attempt: int
    status: AttemptStatus
    executor: str
    worker_id: str | None
    exit_code: int | None
    signal: int | None
    error_code: str | None
    error_summary: str | None
    created_at_ms: int
    started_at_ms: int | None
    finished_at_ms: int | None
    deadline_at_ms: int | None
    late_receipt: bool
    log: LogFact | None


class LogFact(Value, frozen=True, kw_only=True):
    """The log of an ended attempt: `size` bytes kept of `produced` bytes; `artifact_id` is null for an empty log."""

    artifact_id: Id | None = None
    size: int = 0
    produced: int = 0
    sha256: Digest | None = None
    truncated: bool = False


class RunEvent(View, frozen=True, kw_only=True):
    """One step of a run; `sequence` rises by one within the run."""

    id: str
    run_id: str
    sequence: int
    type: str
    actor_type: str
    actor_id: str | None
    attempt_id: str | None
    payload: dict[str, Any]
    created_at_ms: int


class RunRead(Message, frozen=True, kw_only=True, tag="runs.get/1"):
    """One run."""

    actor: Actor
    project: ProjectId
    run: Id


class RunList(Message, frozen=True, kw_only=True, tag="runs.list/1"):
    """Runs of a project, newest first."""

    actor: Actor
    project: ProjectId
    task: str | None = None
    status: list[RunStatus] = []
    page: Page = Page()


class RunEventList(Message, frozen=True, kw_only=True, tag="runs.events/1"):
    """Events of a run after a sequence, oldest first."""

    actor: Actor
    project: ProjectId
    run: Id
    after: int = 0
    limit: Annotated[int, Meta(ge=1, le=limits.LIST_ITEMS)] = limits.LIST_DEFAULT


class AttemptList(Message, frozen=True, kw_only=True, tag="runs.attempts/1"):
    """All attempts of a run."""

    actor: Actor
    project: ProjectId
    run: Id


class RunCancel(Message, frozen=True, kw_only=True, tag="runs.cancel/1"):
    """Ask for the end of a run; repeats change nothing."""

    actor: Actor
    project: ProjectId
    run: Id
    reason: CancelReason = "user"


class RunRetry(Message, frozen=True, kw_only=True, tag="runs.retry/1"):
    """Make a new run like an ended one (`retry_of_run_id`); `new_run_id` makes a repeat harmless."""

    actor: Actor
    project: ProjectId
    run: Id
    new_run_id: Id


class RunRelease(Message, frozen=True, kw_only=True, tag="runs.release/1"):
    """Approval's executor releases a held run (or ends it). Idempotent by `dispatch_id`."""

    dispatch_id: Id
    run: Id
    project: ProjectId
    outcome: Literal["approved", "rejected", "withdrawn", "expired"]
    approval_id: Id
    action_digest: Digest | None = None


class RunReleaseAnswer(Message, frozen=True, kw_only=True, tag="runs.released/1"):
    """What the dispatcher committed for a dispatch id."""

    dispatch_id: Id
    outcome: Literal["released", "ended", "closed", "not_waiting"]
    run_status: RunStatus | None = None
    evidence_digest: Digest | None = None


class DispatchClose(Message, frozen=True, kw_only=True, tag="runs.close/1"):
    """Close a dispatch id before recovery ends the action: a later release or create is refused. Idempotent."""

    dispatch_id: Id
    project: ProjectId


class RunExplain(Message, frozen=True, kw_only=True, tag="runs.explain/1"):
    """Why is a run where it is?"""

    actor: Actor
    project: ProjectId
    run: Id


class Explanation(Message, frozen=True, kw_only=True, tag="runs.explanation/1"):
    """The answer in words, with a stable code of the cause and what moves the run next."""

    run: Run
    cause: str
    sentence: str
    next_step: str
    facts: dict[str, Any] = {}


class ConcurrencyLimit(View, frozen=True, kw_only=True):
    """A limit on runs in work at once: of a project, of a task (its overlap rule), or of a named key (tasks' terms)."""

    project: str
    kind: Literal["project", "task", "key"]
    key: str
    limit: int
    live: int


class LimitList(Message, frozen=True, kw_only=True, tag="limits.list/1"):
    """The limits of a project with how much of each is used, by kind and key."""

    actor: Actor
    project: ProjectId
    page: Page = Page()


class LimitSet(Message, frozen=True, kw_only=True, tag="limits.set/1"):
    """How many runs of a project, or under a named key of it, may be in work at once; null takes the limit away."""

    actor: Actor
    project: ProjectId
    key: Slug | None = None
    limit: Annotated[int, Meta(ge=1, le=100_000)] | None


class LimitPage(Message, frozen=True, kw_only=True, tag="limits.page/1"):
    """A page of limits."""

    items: list[ConcurrencyLimit]
    next: str | None


class RunAnswer(Message, frozen=True, kw_only=True, tag="runs.answer/1"):
    """One run."""

    run: Run
    replayed: bool = False


class RunResult(Value, frozen=True, kw_only=True):
    """What became of one item of a bulk submission: the committed run, or the registered error."""

    run: Run | None = None
    replayed: bool = False
    error: str | None = None
    error_detail: str | None = None
    error_field: str | None = None


class RunBatchAnswer(Message, frozen=True, kw_only=True, tag="runs.batch/1"):
    """The answer to `tasks.run_batch`, in its order, after commit."""

    results: list[RunResult]


class RunPage(Message, frozen=True, kw_only=True, tag="runs.page/1"):
    """A page of runs."""

    items: list[Run]
    next: str | None


class RunEventPage(Message, frozen=True, kw_only=True, tag="runs.event_page/1"):
    """A page of events."""

    items: list[RunEvent]
    next: str | None


class AttemptPage(Message, frozen=True, kw_only=True, tag="runs.attempt_page/1"):
    """The attempts of a run."""

    items: list[Attempt]
    next: str | None


class EventFact(Value, frozen=True, kw_only=True):
    """One run event inside a fact."""

    sequence: int
    type: str
    attempt_id: Id | None = None
    payload: dict[str, Any] = {}


class RunChanged(Message, frozen=True, kw_only=True, tag="run.changed/1"):
    """Fact, one per committed transaction of a run: its state after it, and the events that were written.

    Subject `ql3.evt.run.<project>.<run>.<status>`. Consumers compare `version`.
    """

    project: ProjectId
    run_id: Id
    task_id: Id
    task_name: Slug
    status: RunStatus
    version: int
    trigger_type: str
    trigger_id: Id | None
    attempt_id: Id | None
    worker_id: str | None
    exit_code: int | None
    error_code: str | None
    at_ms: Millis
    events: list[EventFact]


class AttemptEnded(Message, frozen=True, kw_only=True, tag="attempt.ended/1"):
    """Fact for retention: an attempt settled, with the fact about its log.

    Subject `ql3.evt.attempt.<project>.<attempt>.ended`.
    """

    project: ProjectId
    run_id: Id
    attempt_id: Id
    task_id: Id
    worker_id: str
    status: AttemptStatus
    run_terminal: bool
    finished_at_ms: Millis
    log: LogFact


class EndedRead(Message, frozen=True, kw_only=True, tag="attempts.ended_read/1"):
    """Ended attempts after an id (null: from the first), for who missed facts that the feed keeps no longer."""

    after: Id | None = None
    limit: Annotated[int, Meta(ge=1, le=limits.BATCH_ITEMS)] = limits.BATCH_ITEMS


class EndedPage(Message, frozen=True, kw_only=True, tag="attempts.ended_page/1"):
    """Each as it was told when it ended; `next` goes into the next read, null at the end."""

    items: list[AttemptEnded]
    next: Id | None
