"""Between dispatcher and worker: sessions, offers, the start barrier, beats, reports, cancels.

Whoever writes about an attempt proves that it holds it: see `schemas.proof`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from schemas import limits
from schemas.base import Message, Value, View
from schemas.identity import Actor
from schemas.ids import Digest, Id, Millis, ProjectId, WorkerId
from schemas.paging import Page
from schemas.runs import CancelReason, LogFact
from schemas.tasks import ExecutionRevision

Proof = Annotated[str, Meta(min_length=64, max_length=64)]
PublicKey = Annotated[str, Meta(min_length=43, max_length=43)]
"""X25519 public key, unpadded base64url."""


class Capabilities(Value, frozen=True, kw_only=True):
    """What a worker found by looking, and what its configuration adds."""

    architecture: str = ""
    system: str = ""
    cpu_cores: int = 1
    memory_bytes: int = 0
    executors: tuple[str, ...] = ("local_process",)
    runtimes: dict[str, str] = {}
    labels: dict[str, str] = {}
    pool: str | None = None
    features: list[str] = []
    """Limits that this machine can enforce: `cgroup`, `run_as`, …"""


class SessionFence(Value, frozen=True, kw_only=True):
    """Who writes: the worker, its session and the generation that registration gave."""

    worker: WorkerId
    session_id: Id
    generation: Annotated[int, Meta(ge=0)]


class JournalEntry(Value, frozen=True, kw_only=True):
    """What a worker knows of an attempt at registration; `proof` is over `register|state`."""

    attempt_id: Id
    offer_id: Id
    lease_generation: int
    state: Literal["accepted", "launching", "running", "ended", "gone", "unknown"]
    sequence: int
    proof: Proof


class WorkerRegister(Message, frozen=True, kw_only=True, tag="workers.register/1"):
    """A new session; replaces the old one of the same worker. The same session again is a replay."""

    worker: WorkerId
    session_id: Id
    slots: Annotated[int, Meta(ge=0, le=100_000)]
    capabilities: Capabilities
    public_key: PublicKey
    journal: Annotated[list[JournalEntry], Meta(max_length=4096)] = []
    draining: bool = False


class WorkerRegistered(Message, frozen=True, kw_only=True, tag="workers.registered/1"):
    """The generation of the session, and what became of each journal entry."""

    generation: int
    adopted: list[Id]
    released: list[Id]
    """Unstarted; do not start them, a new offer comes."""
    refused: list[Id]
    """Settled or held by somebody else: stop what runs, keep the receipt."""


class OfferItem(Value, frozen=True, kw_only=True):
    """One attempt offered to a worker. `revision` is a digest in the same message."""

    offer_id: Id
    attempt_id: Id
    run_id: Id
    project: ProjectId
    attempt: int
    lease_generation: int
    revision: Digest
    not_before_ms: Millis | None = None
    scheduled_for_ms: Millis | None = None
    trigger_type: str = "manual"
    inputs: dict[str, Any] | None = None


class OfferAttempts(Message, frozen=True, kw_only=True, tag="workers.offer/1"):
    """Order to one session: journal these and ask to start them (`ql3.worker.<worker>.offer`)."""

    fence: SessionFence
    revisions: list[ExecutionRevision]
    offers: Annotated[list[OfferItem], Meta(min_length=1, max_length=limits.BATCH_ITEMS)]


class StartItem(Value, frozen=True, kw_only=True):
    """One attempt at the barrier; `token_digest` goes out once, here."""

    attempt_id: Id
    offer_id: Id
    lease_generation: int
    token_digest: Digest


class StartAttempts(Message, frozen=True, kw_only=True, tag="attempts.start/1"):
    """Batched request for the start barrier (`ql3.rpc.dispatcher.attempts.start.<worker>`)."""

    fence: SessionFence
    attempts: Annotated[list[StartItem], Meta(min_length=1, max_length=limits.BATCH_ITEMS)]


class StartGrant(Value, frozen=True, kw_only=True):
    """May start. `start_within_ms` counts on the worker's monotonic clock from its request; times in milliseconds."""

    attempt_id: Id
    start_within_ms: int
    timeout_ms: int | None = None


class Refusal(Value, frozen=True, kw_only=True):
    """What was refused and why (an error code)."""

    attempt_id: Id
    code: str


class StartAnswer(Message, frozen=True, kw_only=True, tag="attempts.started/1"):
    """Grants and refusals; a repeat of the request gives the same answer while the lease lives."""

    grants: list[StartGrant]
    refused: list[Refusal]


class BeatItem(Value, frozen=True, kw_only=True):
    """One attempt that the worker still holds; `proof` is over `beat`."""

    attempt_id: Id
    lease_generation: int
    sequence: int
    proof: Proof


class WorkerBeat(Message, frozen=True, kw_only=True, tag="workers.beat/1"):
    """Heartbeat and renewal for all attempts of a session, every 5 s."""

    fence: SessionFence
    draining: bool = False
    slots: int
    attempts: Annotated[list[BeatItem], Meta(max_length=4096)] = []


class StopItem(Value, frozen=True, kw_only=True):
    """An attempt whose tree has to end."""

    attempt_id: Id
    dispatch_id: Id
    lease_generation: int
    reason: CancelReason
    grace_ms: int


class WorkerBeaten(Message, frozen=True, kw_only=True, tag="workers.beaten/1"):
    """What the beat found: leases refused (stop those trees, write no fact), stops, and whether to drain."""

    refused: list[Refusal] = []
    stops: list[StopItem] = []
    drain: bool = False


class CancelAttempts(Message, frozen=True, kw_only=True, tag="workers.cancel/1"):
    """Order to a worker (`ql3.worker.<worker>.cancel`): end these trees; the end is proved by the report."""

    worker: WorkerId
    stops: Annotated[list[StopItem], Meta(min_length=1, max_length=limits.BATCH_ITEMS)]


class RetireItem(Value, frozen=True, kw_only=True):
    """An artifact that is stored; the worker may drop its copy and journal row."""

    attempt_id: Id
    artifact_id: Id | None


class RetireArtifacts(Message, frozen=True, kw_only=True, tag="workers.retire/1"):
    """Order to a worker (`ql3.worker.<worker>.retire`), rung until it is answered with `ArtifactsRetired`."""

    worker: WorkerId
    items: Annotated[list[RetireItem], Meta(min_length=1, max_length=limits.BATCH_ITEMS)]


class ArtifactsRetired(Message, frozen=True, kw_only=True, tag="artifacts.retired/1"):
    """A worker keeps these logs no more: its answer to `RetireArtifacts`, on a subject that ends in its own id."""

    attempt_ids: Annotated[list[Id], Meta(min_length=1, max_length=limits.BATCH_ITEMS)]


class ReportBody(Value, frozen=True, kw_only=True):
    """What happened to an attempt. Times are the worker's wall clock, milliseconds.

    `started`: the process exists. `ended`: the process and its tree are gone; start and end of a short run travel as
    one `ended` with `started_at_ms`. `start_failed`: the spawn was refused for certain. `not_started`: never tried.
    `vanished`: process identity proves that it is gone, but no exit code was kept.
    """

    kind: Literal["started", "ended", "start_failed", "not_started", "vanished"]
    started_at_ms: Millis | None = None
    finished_at_ms: Millis | None = None
    exit_code: int | None = None
    signal: int | None = None
    stopped_for: CancelReason | None = None
    error_code: str | None = None
    error_summary: Annotated[str, Meta(max_length=limits.TEXT_CHARS)] | None = None
    pid: int | None = None
    log: LogFact | None = None


class AttemptReport(Value, frozen=True, kw_only=True):
    """One signed report: `body` is a `ReportBody` as bytes, exactly as signed; a newer writer's fields survive.

    `sequence` orders the reports of an attempt: 1 for `started`, 2 for whatever ends it (so the end of a short run,
    which has no report of its own start, is 2 as well). A repeat may carry the same sequence. Journal entries, beats
    and context requests carry sequence 0: they tell no fact, and their proof covers another body.
    """

    order_id: Id
    attempt_id: Id
    run_id: Id
    lease_generation: int
    sequence: Annotated[int, Meta(ge=1)]
    proof: Proof
    body: msgspec.Raw


class ReportAttempts(Message, frozen=True, kw_only=True, tag="attempts.report/1"):
    """Order to the dispatcher (`ql3.cmd.dispatcher.report.<worker>`); answered on `ql3.ack.<worker>`."""

    fence: SessionFence
    reports: Annotated[list[AttemptReport], Meta(min_length=1, max_length=limits.BATCH_ITEMS)]


class LeaseVerify(Message, frozen=True, kw_only=True, tag="leases.verify/1"):
    """Vault asks: does this worker hold this attempt at the start barrier? `proof` is over `context`."""

    fence: SessionFence
    attempt_id: Id
    lease_generation: int
    sequence: int
    proof: Proof


class LeaseVerified(Message, frozen=True, kw_only=True, tag="leases.verified/1"):
    """Yes: its project, the secret references of its pinned revision, and the session's public key."""

    project: ProjectId
    run_id: Id
    revision: ExecutionRevision
    public_key: PublicKey


class LogRead(Message, frozen=True, kw_only=True, tag="log.read/1"):
    """A range of an attempt's log at the worker that holds it; `length` at most 256 KiB."""

    attempt_id: Id
    offset: Annotated[int, Meta(ge=0)]
    length: Annotated[int, Meta(ge=1, le=limits.LOG_RANGE_BYTES)] = limits.LOG_RANGE_BYTES


class LogRange(Message, frozen=True, kw_only=True, tag="log.range/1"):
    """Bytes (base64 in JSON). `total` is what there is so far; `ended` says that no more will come."""

    offset: int
    data: bytes
    total: int
    ended: bool
    truncated: bool | None = None


class LogFollow(Message, frozen=True, kw_only=True, tag="log.follow/1"):
    """Follow for 30 s more: live chunks go to `ql3.log.<project>.<run>.<attempt>`."""

    attempt_id: Id
    project: ProjectId
    run_id: Id


class LogChunk(Message, frozen=True, kw_only=True, tag="log.chunk/1"):
    """A live chunk of at most 64 KiB at a byte offset; `ended` comes last, alone."""

    offset: int
    data: bytes = b""
    ended: bool = False


WorkerStatus = Literal["online", "draining", "offline"]


class WorkerChanged(Message, frozen=True, kw_only=True, tag="worker.changed/1"):
    """Fact: a worker registered, drains, fell silent or is back (`ql3.evt.worker.-.<worker>.<status>`)."""

    worker: WorkerId
    status: WorkerStatus
    generation: int
    slots: int
    at_ms: Millis


class Worker(View, frozen=True, kw_only=True):
    """A worker as people read it; `leased` counts live leases."""

    id: str
    session_id: str
    generation: int
    status: WorkerStatus
    slots: int
    leased: int
    capabilities: Capabilities
    registered_at_ms: int
    last_heartbeat_at_ms: int


class WorkerList(Message, frozen=True, kw_only=True, tag="workers.list/1"):
    """Workers."""

    actor: Actor
    page: Page = Page()


class WorkerDrain(Message, frozen=True, kw_only=True, tag="workers.drain/1"):
    """Drain a worker, or let it work again. `dispatch_id` is that of the approved action behind it."""

    actor: Actor
    worker: WorkerId
    drain: bool = True
    dispatch_id: Id | None = None


class WorkerAnswer(Message, frozen=True, kw_only=True, tag="workers.answer/1"):
    """One worker."""

    worker: Worker


class WorkerPage(Message, frozen=True, kw_only=True, tag="workers.page/1"):
    """A page of workers."""

    items: list[Worker]
    next: str | None


class Readiness(Message, frozen=True, kw_only=True, tag="dispatcher.readiness/1"):
    """Could a run be submitted, placed and started? `reasons` is empty when it could."""

    reasons: list[str]


class ReadinessRead(Message, frozen=True, kw_only=True, tag="dispatcher.readiness_read/1"):
    """Ask for readiness."""
