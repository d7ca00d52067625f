"""Tasks: what people write, its immutable revisions, and the compiled form that a run pins."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from schemas import limits
from schemas.base import Message, Value, View
from schemas.canonical import digest
from schemas.identity import Actor, Subject
from schemas.ids import Digest, EnvName, Id, Millis, ProjectId, Slug
from schemas.paging import Page

Text = Annotated[str, Meta(max_length=limits.TEXT_CHARS)]
Key = Annotated[str, Meta(min_length=1, max_length=limits.KEY_CHARS)]
Label = Annotated[str, Meta(max_length=limits.LABEL_CHARS)]
Labels = Annotated[dict[Annotated[str, Meta(min_length=1, max_length=63)], Label], Meta(max_length=limits.LABELS)]
Argument = Annotated[str, Meta(max_length=limits.KERNEL_STRING_BYTES)]
Argv = Annotated[list[Argument], Meta(min_length=1, max_length=limits.ARGV_ITEMS)]


class SecretRef(Value, frozen=True, kw_only=True):
    """A secret of the same project, by name; a fixed version, or the current one when absent."""

    secret: Slug
    version: Annotated[int, Meta(ge=1)] | None = None


class Variable(Value, frozen=True, kw_only=True):
    """One environment variable: a public `value`, or a `secret`; `as_file` delivers a path to a file that holds it."""

    name: EnvName
    value: Annotated[str, Meta(max_length=limits.ENVIRONMENT_BYTES)] | None = None
    secret: SecretRef | None = None
    as_file: bool = False


class RetryPolicy(Value, frozen=True, kw_only=True):
    """Automatic attempts of one run. Times in milliseconds; delay = min(max, base * 2^(n-1)), jittered."""

    max_attempts: Annotated[int, Meta(ge=1, le=limits.MAX_ATTEMPTS)] = 1
    retry_on: tuple[Literal["failed", "timed_out", "lost"], ...] = ("failed", "timed_out", "lost")
    safety: Literal["unknown", "idempotent", "deduplicated"] = "unknown"
    backoff_base_ms: Annotated[int, Meta(ge=0, le=limits.BACKOFF_MAX_MS)] = 1_000
    backoff_max_ms: Annotated[int, Meta(ge=0, le=limits.BACKOFF_MAX_MS)] = 300_000
    jitter_percent: Annotated[int, Meta(ge=0, le=100)] = 20


class Overlap(Value, frozen=True, kw_only=True):
    """What happens when a run of the same task is due while others are active. `limit` is for `allow` and `queue`."""

    policy: Literal["allow", "skip", "queue", "replace"] = "allow"
    limit: Annotated[int, Meta(ge=1, le=100_000)] | None = None


class Concurrency(Value, frozen=True, kw_only=True):
    """A named limit shared by whatever names the same key in the project."""

    key: Slug
    limit: Annotated[int, Meta(ge=1, le=100_000)]


class Placement(Value, frozen=True, kw_only=True):
    """Where a run may go: all of `required` must hold; `preferred` only ranks. Labels are equal text."""

    executor: Literal["local_process", "docker"] = "local_process"
    pool: Slug | None = None
    workers: list[Slug] = []
    required: dict[str, str] = {}
    preferred: dict[str, str] = {}
    runtimes: list[str] = []
    min_memory_bytes: int | None = None
    min_cpu_cores: int | None = None


class Isolation(Value, frozen=True, kw_only=True):
    """Limits of one process tree; `required` refuses before the spawn what the machine cannot enforce."""

    user: str | None = None
    umask: Annotated[int, Meta(ge=0, le=0o777)] | None = None
    nice: Annotated[int, Meta(ge=-20, le=19)] | None = None
    memory_bytes: Annotated[int, Meta(ge=1)] | None = None
    cpu_percent: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    open_files: Annotated[int, Meta(ge=8)] | None = None
    file_bytes: Annotated[int, Meta(ge=0)] | None = None
    processes: Annotated[int, Meta(ge=1)] | None = None
    cpu_seconds: Annotated[int, Meta(ge=1)] | None = None
    required: bool = True


class Runtime(Value, frozen=True, kw_only=True):
    """An isolated, cached environment in which the command runs."""

    kind: Literal["python", "node"]
    requirements: list[str] = []
    script: Annotated[str, Meta(max_length=limits.SPEC_BYTES)] | None = None
    """A script's text (PEP 723 metadata is read); the command's arguments follow it."""
    image: str | None = None


class Terms(Value, frozen=True, kw_only=True):
    """What the dispatcher needs to admit and place a run; frozen with the revision."""

    retry: RetryPolicy = RetryPolicy()
    overlap: Overlap = Overlap()
    concurrency: list[Concurrency] = []
    placement: Placement = Placement()
    priority: Annotated[int, Meta(ge=limits.PRIORITY_MIN, le=limits.PRIORITY_MAX)] = 0
    queue_timeout_ms: Annotated[int, Meta(ge=1, le=limits.TIMEOUT_MAX_MS)] | None = None
    needs_approval: bool = False
    approval_ttl_ms: Annotated[int, Meta(ge=60_000, le=86_400_000)] = 86_400_000
    labels: Labels = {}


class Execution(Value, frozen=True, kw_only=True):
    """How a run executes; frozen with the revision. Times in milliseconds, sizes in bytes."""

    command: Argv
    environment: Annotated[list[Variable], Meta(max_length=limits.ENVIRONMENT_ENTRIES)] = []
    working_directory: Annotated[str, Meta(max_length=4096)] | None = None
    timeout_ms: Annotated[int, Meta(ge=1, le=limits.TIMEOUT_MAX_MS)] | None = None
    grace_ms: Annotated[int, Meta(ge=0, le=limits.GRACE_MAX_MS)] = limits.GRACE_DEFAULT_MS
    log_quota_bytes: Annotated[int, Meta(ge=limits.LOG_QUOTA_MIN_BYTES, le=limits.LOG_QUOTA_MAX_BYTES)] = (
        limits.LOG_QUOTA_DEFAULT_BYTES
    )
    isolation: Isolation | None = None
    runtime: Runtime | None = None
    image: Annotated[str, Meta(max_length=512)] | None = None
    """The container image, for the docker executor."""


class TaskSpec(Value, frozen=True, kw_only=True):
    """What people write about a task, besides its name and triggers."""

    execution: Execution
    terms: Terms = Terms()
    title: Annotated[str, Meta(max_length=255)] | None = None
    folder: Annotated[str, Meta(max_length=255)] | None = None
    notes: Annotated[str, Meta(max_length=8192)] | None = None
    parameters: dict[str, Any] | None = None
    """A JSON Schema of the inputs that a run may be given."""


class ExecutionRevision(Value, frozen=True, kw_only=True):
    """The compiled, immutable form that a run pins and a worker executes."""

    project: ProjectId
    task_id: Id
    task_name: Slug
    task_revision: Annotated[int, Meta(ge=1)]
    execution: Execution
    terms: Terms = Terms()

    @property
    def digest(self) -> str:
        """Hex digest under `ql3.task-execution-revision.v1`."""
        return digest("ql3.task-execution-revision.v1", self)


class Task(View, frozen=True, kw_only=True):
    """A task as people read it."""

    id: str
    project: str
    name: str
    revision: int
    version: int
    enabled: bool
    deleted: bool
    spec: TaskSpec
    digest: str
    created_at_ms: int
    updated_at_ms: int
    triggers: list[Any] = []
    warnings: list[str] = []


class TaskCreate(Message, frozen=True, kw_only=True, tag="tasks.create/1"):
    """Make a task with its triggers (`schemas.triggers.TriggerSpec`), in one transaction."""

    actor: Actor
    project: ProjectId
    name: Slug
    spec: TaskSpec
    triggers: Annotated[list[Any], Meta(max_length=32)] = []
    enabled: bool = True
    mutation_id: Id | None = None


class TaskUpdate(Message, frozen=True, kw_only=True, tag="tasks.update/1"):
    """A new revision; `expected_revision` is compared. `dispatch_id` is that of the approved action behind it."""

    actor: Actor
    project: ProjectId
    task: str
    expected_revision: int
    spec: TaskSpec
    mutation_id: Id | None = None
    dispatch_id: Id | None = None


class TaskEnable(Message, frozen=True, kw_only=True, tag="tasks.enable/1"):
    """Enable or disable."""

    actor: Actor
    project: ProjectId
    task: str
    enabled: bool


class TaskDelete(Message, frozen=True, kw_only=True, tag="tasks.delete/1"):
    """Remove a task and its triggers from use; its revisions and runs stay readable."""

    actor: Actor
    project: ProjectId
    task: str


class TaskRead(Message, frozen=True, kw_only=True, tag="tasks.get/1"):
    """One task by id or name; a fixed revision when given."""

    actor: Actor
    project: ProjectId
    task: str
    revision: int | None = None


class TaskList(Message, frozen=True, kw_only=True, tag="tasks.list/1"):
    """Tasks of a project, by name."""

    actor: Actor
    project: ProjectId
    folder: str | None = None
    label: str | None = None
    page: Page = Page()


class TaskRun(Message, frozen=True, kw_only=True, tag="tasks.run/1"):
    """Run a task now. The same idempotency key with the same content gives the same run.

    `trigger` is one of its triggers of kind `manual`: its inputs are taken, with `inputs` over them.
    """

    actor: Actor
    project: ProjectId
    task: str
    idempotency_key: Key | None = None
    inputs: dict[str, Any] | None = None
    priority: Annotated[int, Meta(ge=limits.PRIORITY_MIN, le=limits.PRIORITY_MAX)] | None = None
    trigger_type: Literal["manual", "api", "webhook", "approved_action"] = "manual"
    expected_revision: int | None = None
    trigger: Id | None = None


class TaskRunItem(Value, frozen=True, kw_only=True):
    """One run of a bulk submission. Without an idempotency key a repeat of the batch makes it again."""

    task: Annotated[str, Meta(min_length=1, max_length=limits.SLUG_CHARS)]
    inputs: dict[str, Any] | None = None
    priority: Annotated[int, Meta(ge=limits.PRIORITY_MIN, le=limits.PRIORITY_MAX)] | None = None
    idempotency_key: Key | None = None


class TaskRunBatch(Message, frozen=True, kw_only=True, tag="tasks.run_batch/1"):
    """Run many tasks now: resolved, admitted and submitted together; each item is answered for itself."""

    actor: Actor
    project: ProjectId
    runs: Annotated[list[TaskRunItem], Meta(min_length=1, max_length=limits.BATCH_ITEMS)]
    trigger_type: Literal["manual", "api", "webhook"] = "api"


class TaskFile(Value, frozen=True, kw_only=True):
    """One task as it is kept in a file. `triggers` are all of its triggers, except webhooks, which stay as they are."""

    name: Slug
    spec: TaskSpec
    triggers: Annotated[list[Any], Meta(max_length=32)] = []
    enabled: bool = True


class TasksApply(Message, frozen=True, kw_only=True, tag="tasks.apply/1"):
    """Bring tasks to what files say, all or none; what is so already is not touched. `dry_run` only tells changes."""

    actor: Actor
    project: ProjectId
    tasks: Annotated[list[TaskFile], Meta(min_length=1, max_length=64)]
    dry_run: bool = False


class Change(View, frozen=True, kw_only=True):
    """One difference: where, what stood there (null: nothing), and what stands there then (null: nothing)."""

    path: str
    before: Any
    after: Any


class TaskOutcome(View, frozen=True, kw_only=True):
    """What became of one task of a file."""

    name: str
    action: Literal["created", "changed", "unchanged"]
    changes: list[Change]
    warnings: list[str]


class ApplyAnswer(Message, frozen=True, kw_only=True, tag="tasks.applied/1"):
    """What became of each task, in the order of the question."""

    items: list[TaskOutcome]
    dry_run: bool


class RevisionList(Message, frozen=True, kw_only=True, tag="tasks.revisions/1"):
    """Revisions of a task, newest first."""

    actor: Actor
    project: ProjectId
    task: str
    page: Page = Page()


class TaskRevision(View, frozen=True, kw_only=True):
    """One revision: who made it and when."""

    revision: int
    digest: str
    created_by: Subject
    created_at_ms: int


class RevisionPage(Message, frozen=True, kw_only=True, tag="tasks.revision_page/1"):
    """A page of revisions."""

    items: list[TaskRevision]
    next: str | None


class TaskDiff(Message, frozen=True, kw_only=True, tag="tasks.diff/1"):
    """What differs between two revisions."""

    actor: Actor
    project: ProjectId
    task: str
    before: Annotated[int, Meta(ge=1)]
    after: Annotated[int, Meta(ge=1)]


class DiffAnswer(Message, frozen=True, kw_only=True, tag="tasks.differences/1"):
    """The differences, by path; `more` says that there are others."""

    changes: list[Change]
    more: bool


class TaskRestore(Message, frozen=True, kw_only=True, tag="tasks.restore/1"):
    """Make a new revision with the content of an old one; `expected_revision` is compared."""

    actor: Actor
    project: ProjectId
    task: str
    revision: Annotated[int, Meta(ge=1)]
    expected_revision: int
    mutation_id: Id | None = None


class TaskAnswer(Message, frozen=True, kw_only=True, tag="tasks.answer/1"):
    """One task."""

    task: Task


class TaskPage(Message, frozen=True, kw_only=True, tag="tasks.page/1"):
    """A page of tasks."""

    items: list[Task]
    next: str | None


class TaskChanged(Message, frozen=True, kw_only=True, tag="task.changed/1"):
    """Fact: a task was made, changed, enabled, disabled or deleted."""

    project: ProjectId
    task_id: Id
    name: Slug
    revision: int
    version: int
    enabled: bool
    deleted: bool
    at_ms: Millis
    digest: Digest
