"""A project's own rules, and what came of approved actions. Owner: approval."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from schemas import endpoints
from schemas.approvals import (
    ActionList,
    ActionRead,
    ActionRecover,
    ApprovalRule,
    ApprovedAction,
    DecisionMode,
    Risk,
    RulesDryRun,
    RulesRead,
    RulesSet,
)
from schemas.base import Value, View
from schemas.identity import Subject
from schemas.ids import Digest
from services.gateway.calls import Call, listing
from services.gateway.operations import Listing, Nothing, Operations, Paged

operations = Operations("authority")


class Rules(View, frozen=True, kw_only=True):
    """The rules in force, the first that matches first."""

    project: str
    version: int
    rules: list[ApprovalRule]


class NewRules(Value, frozen=True, kw_only=True):
    """The whole set; `expected_version` is 0 where none were ever set."""

    rules: Annotated[list[ApprovalRule], Meta(max_length=64)]
    expected_version: int


class Trial(Value, frozen=True, kw_only=True):
    """Who would be asked, if `requested_by` wanted `permission`? With `rules`, as if these were in force."""

    permission: Annotated[str, Meta(min_length=1, max_length=255)]
    requested_by: Subject
    labels: dict[str, str] | None = None
    risk: Risk = "medium"
    rules: Annotated[list[ApprovalRule], Meta(max_length=64)] | None = None


class Forecast(View, frozen=True, kw_only=True):
    """What policy would answer, and who could decide."""

    effect: Literal["allow", "deny", "require_approval"]
    reason: str
    rule: str | None
    mode: DecisionMode
    quorum: int
    deciders: list[Subject]
    console_may_decide: bool


class ActionQuery(Paged, frozen=True, kw_only=True):
    """All approved actions, or only those whose outcome is in doubt."""

    recovery: bool = False


class Word(Value, frozen=True, kw_only=True):
    """A person's word on an action whose outcome is in doubt; it is never done again."""

    decision: Literal["confirm_succeeded", "confirm_failed", "abandon_unknown"]
    reason_code: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,63}\Z")]
    expected_execution_version: int
    expected_recovery_version: int
    evidence_digest: Digest | None = None


@operations.get("/projects/{project}/rules", Nothing, Rules)
async def get_rules(call: Call[Nothing]) -> Rules:
    """The project's own rules about who has to approve what."""
    answer = await call.ask(endpoints.RULES_GET, RulesRead(actor=call.actor, project=call.project))
    return Rules(project=answer.project, version=answer.version, rules=answer.rules)


@operations.put("/projects/{project}/rules", NewRules, Rules)
async def set_rules(call: Call[NewRules]) -> Rules:
    """Replace the project's rules."""
    question = RulesSet(
        actor=call.actor,
        project=call.project,
        expected_version=call.input.expected_version,
        rules=call.input.rules,
        mutation_id=call.mutation_id,
    )
    answer = await call.ask(endpoints.RULES_SET, question)
    return Rules(project=answer.project, version=answer.version, rules=answer.rules)


@operations.post("/projects/{project}/rules/trial", Trial, Forecast, keep="no")
async def try_rules(call: Call[Trial]) -> Forecast:
    """Who would be asked? Nothing is stored."""
    trial = call.input
    question = RulesDryRun(
        actor=call.actor,
        project=call.project,
        permission=trial.permission,
        requested_by=trial.requested_by,
        labels=trial.labels or {},
        risk=trial.risk,
        rules=trial.rules,
    )
    seen = await call.ask(endpoints.RULES_DRY_RUN, question)
    return Forecast(
        effect=seen.effect,
        reason=seen.reason,
        rule=seen.rule,
        mode=seen.mode,
        quorum=seen.quorum,
        deciders=seen.deciders,
        console_may_decide=seen.console_may_decide,
    )


@operations.get("/projects/{project}/actions", ActionQuery, Listing[ApprovedAction])
async def list_actions(call: Call[ActionQuery]) -> Listing[ApprovedAction]:
    """What came of approved requests, newest first."""
    query = call.input
    question = ActionList(actor=call.actor, project=call.project, recovery=query.recovery, page=query.page)
    return listing(await call.ask(endpoints.ACTIONS_LIST, question))


@operations.get("/projects/{project}/actions/{action}", Nothing, ApprovedAction)
async def get_action(call: Call[Nothing]) -> ApprovedAction:
    """One approved action."""
    question = ActionRead(actor=call.actor, project=call.project, dispatch=call.id("action"))
    return (await call.ask(endpoints.ACTIONS_GET, question)).action


@operations.post("/projects/{project}/actions/{action}/recover", Word, ApprovedAction)
async def recover_action(call: Call[Word]) -> ApprovedAction:
    """Say what became of an action whose outcome is in doubt. Needs a strong sign-in of the last five minutes."""
    word = call.input
    question = ActionRecover(
        actor=call.actor,
        project=call.project,
        dispatch=call.id("action"),
        mutation_id=call.mutation_id,
        decision=word.decision,
        reason_code=word.reason_code,
        expected_execution_version=word.expected_execution_version,
        expected_recovery_version=word.expected_recovery_version,
        evidence_digest=word.evidence_digest,
    )
    return (await call.ask(endpoints.ACTIONS_RECOVER, question)).action
