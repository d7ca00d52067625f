"""Approvals: requests, decisions, and the actions that they allow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from schemas import limits
from schemas.base import Message, Value, View
from schemas.canonical import digest
from schemas.identity import Actor, Subject
from schemas.ids import Digest, Id, Millis, ProjectId, Slug
from schemas.paging import Page

Risk = Literal["low", "medium", "high", "critical"]
DecisionMode = Literal["human_confirmation", "separation_of_duty"]
ApprovalState = Literal["pending", "approved", "rejected", "consumed", "withdrawn", "expired"]


PREVIEW_DOMAIN: Final = "ql3.approval-preview.v1"


def preview_digest(preview: dict[str, Any]) -> str:
    """The digest of a safe preview, as a request's binding holds it. Raises ValueError on floats."""
    return digest(PREVIEW_DOMAIN, preview)


RISKS: Final[tuple[Risk, ...]] = ("low", "medium", "high", "critical")


def risk_of(labels: Mapping[str, str], asked: Risk = "low", default: Risk = "medium") -> Risk:
    """How dangerous a task is, by its label `risk` (`default` without one); never less than what was `asked`."""
    labelled = default
    for risk in RISKS:
        if labels.get("risk") == risk:
            labelled = risk
    return labelled if RISKS.index(labelled) > RISKS.index(asked) else asked


class Binding(Value, frozen=True, kw_only=True):
    """What exactly is approved: five fields that never change."""

    permission: Annotated[str, Meta(max_length=255)]
    action_type: Annotated[str, Meta(max_length=64)]
    action_ref: Annotated[str, Meta(max_length=255)]
    action_digest: Digest
    preview_digest: Digest


class HoldOrder(Value, frozen=True, kw_only=True):
    """One run that waits: request id = run id, permission `run.start`, action `run.release`.

    `binding.preview_digest` is `preview_digest(preview)`; a preview is at most 8 KiB of JSON without floats.
    """

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
    not_before_ms: Millis | None = None
    """When the run is due, if it asks ahead of its time; approved earlier, it is released then."""


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
    not_before_ms: int | None = None
    """When what waits is due; approved earlier, it is carried out then."""
    plan: dict[str, Any] | None = None
    """The whole of what would be done, when one request is read; a held run and a sealed secret have none."""


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


class ApprovalRule(Value, frozen=True, kw_only=True):
    """A project's own rule; the first that matches permission, labels and risk is in force.

    An empty `risks` matches every risk. `decider_role` is the least role that may decide (admins and owners can).
    """

    name: Slug
    permission: Annotated[str, Meta(min_length=1, max_length=255)]
    labels: Annotated[dict[str, Annotated[str, Meta(max_length=limits.LABEL_CHARS)]], Meta(max_length=8)] = {}
    risks: Annotated[list[Risk], Meta(max_length=4)] = []
    quorum: Annotated[int, Meta(ge=1, le=16)] = 1
    decider_role: Literal["owner", "admin"] | None = None
    mode: DecisionMode | None = None
    ahead_ms: Annotated[int, Meta(ge=0, le=86_400_000)] = 0
    """How long before their time scheduled runs ask."""


class RulesRead(Message, frozen=True, kw_only=True, tag="rules.get/1"):
    """A project's own rules."""

    actor: Actor
    project: ProjectId


class RulesSet(Message, frozen=True, kw_only=True, tag="rules.set/1"):
    """Replace a project's rules as a whole; `expected_version` is 0 where none were ever set."""

    actor: Actor
    project: ProjectId
    expected_version: int
    rules: Annotated[list[ApprovalRule], Meta(max_length=64)]
    mutation_id: Id


class RulesAnswer(Message, frozen=True, kw_only=True, tag="rules.answer/1"):
    """The rules in force and their version."""

    project: ProjectId
    version: int
    rules: list[ApprovalRule]
    replayed: bool = False


class RulesDryRun(Message, frozen=True, kw_only=True, tag="rules.dry_run/1"):
    """Who would be asked? With `rules` given, as if these were in force; nothing is stored."""

    actor: Actor
    project: ProjectId
    permission: Annotated[str, Meta(min_length=1, max_length=255)]
    requested_by: Subject
    labels: dict[str, str] = {}
    risk: Risk = "medium"
    rules: Annotated[list[ApprovalRule], Meta(max_length=64)] | None = None


class RulesForecast(Message, frozen=True, kw_only=True, tag="rules.forecast/1"):
    """What policy would answer, and who could decide. `deciders` are at most 200 people."""

    effect: Literal["allow", "deny", "require_approval"]
    reason: str
    rule: str | None
    mode: DecisionMode
    quorum: int
    deciders: list[Subject]
    console_may_decide: bool


class ApprovedAction(View, frozen=True, kw_only=True):
    """What came of an approved request. `status` is effective: `recovery_required` once an outcome is in doubt."""

    dispatch_id: str
    approval_id: str
    project: str
    action_type: str
    action_ref: str
    status: str
    version: int
    attempt_count: int
    max_attempts: int
    result_code: str | None
    started_at_ms: int | None
    completed_at_ms: int | None
    created_at_ms: int
    resource_type: str | None = None
    resource_id: str | None = None
    evidence_digest: str | None = None
    recovery_status: str | None = None
    recovery_version: int | None = None
    finding: str | None = None
    finding_code: str | None = None
    finding_count: int = 0


class ActionList(Message, frozen=True, kw_only=True, tag="actions.list/1"):
    """Approved actions of a project, newest first; `recovery` lists only those whose outcome is in doubt."""

    actor: Actor
    project: ProjectId
    recovery: bool = False
    page: Page = Page()


class ActionRead(Message, frozen=True, kw_only=True, tag="actions.get/1"):
    """One approved action."""

    actor: Actor
    project: ProjectId
    dispatch: Id


class ActionRecover(Message, frozen=True, kw_only=True, tag="actions.recover/1"):
    """A person's word on an action whose outcome is in doubt, after a strong, recent sign-in. Nothing is repeated."""

    actor: Actor
    project: ProjectId
    dispatch: Id
    mutation_id: Id
    decision: Literal["confirm_succeeded", "confirm_failed", "abandon_unknown"]
    reason_code: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,63}\Z")]
    expected_execution_version: int
    expected_recovery_version: int
    evidence_digest: Digest | None = None


class ActionClose(Message, frozen=True, kw_only=True, tag="actions.close/1"):
    """To whoever carries out an approved action, before a recovery ends it: a late effect is refused. Idempotent."""

    dispatch_id: Id
    project: ProjectId


class ActionClosed(Message, frozen=True, kw_only=True, tag="actions.closed/1"):
    """What stands for the dispatch id, for ever: it had its effect before (`done`, on `resource`), or never will."""

    dispatch_id: Id
    outcome: Literal["done", "closed"]
    resource: str | None
    at_ms: Millis


class ActionAnswer(Message, frozen=True, kw_only=True, tag="actions.answer/1"):
    """One approved action."""

    action: ApprovedAction
    replayed: bool = False


class ActionPage(Message, frozen=True, kw_only=True, tag="actions.page/1"):
    """A page of approved actions."""

    items: list[ApprovedAction]
    next: str | None
