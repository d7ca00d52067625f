"""Approvals: requests, decisions, and the actions that they allow."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from schemas import limits
from schemas.base import Message, Value, View
from schemas.identity import Actor, Subject
from schemas.ids import Digest, Id, Millis, ProjectId, Slug
from schemas.paging import Page

Risk = Literal["low", "medium", "high", "critical"]
DecisionMode = Literal["human_confirmation", "separation_of_duty"]
ApprovalState = Literal["pending", "approved", "rejected", "consumed", "withdrawn", "expired"]


class Binding(Value, frozen=True, kw_only=True):
    """What exactly is approved: five fields that never change."""

    permission: Annotated[str, Meta(max_length=255)]
    action_type: Annotated[str, Meta(max_length=64)]
    action_ref: Annotated[str, Meta(max_length=255)]
    action_digest: Digest
    preview_digest: Digest


class HoldOrder(Value, frozen=True, kw_only=True):
    """One run that waits: request id = run id."""

    order_id: Id
    request_id: Id
    project: ProjectId
    binding: Binding
    preview: dict[str, Any]
    risk: Risk
    requested_by: Subject
    requested_at_ms: Millis
    expires_at_ms: Millis
    labels: dict[str, str] = {}


class RequestApprovals(Message, frozen=True, kw_only=True, tag="approvals.request/1"):
    """Order to approval (`ql3.cmd.approval.request`); answered on `ql3.ack.<sender>`."""

    sender: Slug
    requests: Annotated[list[HoldOrder], Meta(min_length=1, max_length=limits.BATCH_ITEMS)]


class Decision(View, frozen=True, kw_only=True):
    """One person's decision."""

    id: str
    decision: Literal["approved", "rejected"]
    decided_by: Subject
    reason: str | None
    decided_at_ms: int


class Approval(View, frozen=True, kw_only=True):
    """A request as people read it; `state` is computed (`expired` at its time)."""

    id: str
    project: str
    state: ApprovalState
    version: int
    mode: DecisionMode
    quorum: int
    permission: str
    action_type: str
    action_ref: str
    action_digest: str
    preview_digest: str
    preview: dict[str, Any]
    risk: Risk
    requested_by: Subject
    requested_at_ms: int
    expires_at_ms: int
    decisions: list[Decision]
    execution_status: str | None = None
    execution_result: str | None = None


class ApprovalList(Message, frozen=True, kw_only=True, tag="approvals.list/1"):
    """Requests of a project, newest first."""

    actor: Actor
    project: ProjectId
    state: ApprovalState | None = None
    page: Page = Page()


class ApprovalRead(Message, frozen=True, kw_only=True, tag="approvals.get/1"):
    """One request."""

    actor: Actor
    project: ProjectId
    approval: Id


class ApprovalCreate(Message, frozen=True, kw_only=True, tag="approvals.create/1"):
    """Ask for an action (agents and tools); the id is the idempotency key."""

    actor: Actor
    project: ProjectId
    id: Id
    action_type: Annotated[str, Meta(max_length=64)]
    plan: dict[str, Any]
    risk: Risk = "medium"
    ttl_ms: Annotated[int, Meta(ge=60_000, le=86_400_000)] = 86_400_000


class ApprovalDecide(Message, frozen=True, kw_only=True, tag="approvals.decide/1"):
    """Approve or reject; `expected_version`, when given, is compared."""

    actor: Actor
    project: ProjectId
    approval: Id
    decision_id: Id
    decision: Literal["approved", "rejected"]
    expected_version: int | None = None
    expected_digest: Digest | None = None
    reason: Annotated[str, Meta(max_length=1024)] | None = None


class ApprovalWithdraw(Message, frozen=True, kw_only=True, tag="approvals.withdraw/1"):
    """The requester takes it back."""

    actor: Actor
    project: ProjectId
    approval: Id


class ApprovalAnswer(Message, frozen=True, kw_only=True, tag="approvals.answer/1"):
    """One request."""

    approval: Approval
    replayed: bool = False


class ApprovalPage(Message, frozen=True, kw_only=True, tag="approvals.page/1"):
    """A page of requests."""

    items: list[Approval]
    next: str | None


class ApprovalChanged(Message, frozen=True, kw_only=True, tag="approval.changed/1"):
    """Fact: a request was made, decided, consumed, withdrawn, or its action ended."""

    project: ProjectId
    approval_id: Id
    state: ApprovalState
    version: int
    action_type: str
    at_ms: Millis
