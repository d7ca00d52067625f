"""Approvals. Owner: approval."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from schemas import endpoints
from schemas.approvals import (
    Approval,
    ApprovalCreate,
    ApprovalDecide,
    ApprovalList,
    ApprovalRead,
    ApprovalState,
    ApprovalWithdraw,
    Risk,
)
from schemas.base import Value
from schemas.ids import Digest
from services.gateway.calls import Call, listing
from services.gateway.operations import Listing, Nothing, Operations, Paged

operations = Operations("approvals")


class ApprovalQuery(Paged, frozen=True, kw_only=True):
    """In which state, or in any."""

    state: ApprovalState | None = None


class NewApproval(Value, frozen=True, kw_only=True):
    """A request for an action."""

    action_type: Annotated[str, Meta(max_length=64)]
    plan: dict[str, Any]
    risk: Risk = "medium"
    ttl_ms: Annotated[int, Meta(ge=60_000, le=86_400_000)] = 86_400_000


class Verdict(Value, frozen=True, kw_only=True):
    """A decision. `expected_version` and `expected_digest` refuse when it is not what you looked at."""

    decision: Literal["approved", "rejected"]
    reason: Annotated[str, Meta(max_length=1024)] | None = None
    expected_version: int | None = None
    expected_digest: Digest | None = None


@operations.get("/projects/{project}/approvals", ApprovalQuery, Listing[Approval])
async def list_approvals(call: Call[ApprovalQuery]) -> Listing[Approval]:
    """Requests of a project, newest first."""
    question = ApprovalList(actor=call.actor, project=call.project, state=call.input.state, page=call.input.page)
    return listing(await call.ask(endpoints.APPROVALS_LIST, question))


@operations.post("/projects/{project}/approvals", NewApproval, Approval, status=201)
async def request_approval(call: Call[NewApproval]) -> Approval:
    """Ask for an action that needs a person's yes."""
    new = call.input
    question = ApprovalCreate(
        actor=call.actor,
        project=call.project,
        id=call.mutation_id,
        action_type=new.action_type,
        plan=new.plan,
        risk=new.risk,
        ttl_ms=new.ttl_ms,
    )
    return (await call.ask(endpoints.APPROVALS_CREATE, question)).approval


@operations.get("/projects/{project}/approvals/{approval}", Nothing, Approval)
async def get_approval(call: Call[Nothing]) -> Approval:
    """One request."""
    question = ApprovalRead(actor=call.actor, project=call.project, approval=call.id("approval"))
    return (await call.ask(endpoints.APPROVALS_GET, question)).approval


@operations.post("/projects/{project}/approvals/{approval}/decision", Verdict, Approval)
async def decide_approval(call: Call[Verdict]) -> Approval:
    """Approve or reject."""
    verdict = call.input
    question = ApprovalDecide(
        actor=call.actor,
        project=call.project,
        approval=call.id("approval"),
        decision_id=call.mutation_id,
        decision=verdict.decision,
        expected_version=verdict.expected_version,
        expected_digest=verdict.expected_digest,
        reason=verdict.reason,
    )
    return (await call.ask(endpoints.APPROVALS_DECIDE, question)).approval


@operations.post("/projects/{project}/approvals/{approval}/withdraw", Nothing, Approval)
async def withdraw_approval(call: Call[Nothing]) -> Approval:
    """Take your own request back."""
    question = ApprovalWithdraw(actor=call.actor, project=call.project, approval=call.id("approval"))
    return (await call.ask(endpoints.APPROVALS_WITHDRAW, question)).approval
