"""Asking for an action: agents and tools, and people whom a rule of the project tells to ask."""

from __future__ import annotations

from collections.abc import Mapping

from schemas.approvals import ApprovalAnswer, ApprovalCreate, Binding, preview_digest, risk_of
from schemas.canonical import digest
from schemas.errors import Ql3Error
from schemas.identity import PolicyDecision
from services.approval import requests
from services.approval.approvals import Approvals, terms_of
from services.approval.digests import plan_digest
from services.approval.gate import Act, Gate, subject_of
from services.approval.handlers.port import Handler, Planned
from services.approval.policy import fence_of
from services.approval.requests import Request
from services.approval.store import projects
from services.approval.store import requests as rows
from services.approval.store.requests import Plan
from services.kit.database import Transaction

ASK_DOMAIN = "ql3.approval-ask.v1"


class Asking:
    """Turns a plan into a request whose action is pinned."""

    def __init__(self, gate: Gate, approvals: Approvals, handlers: Mapping[str, Handler]) -> None:
        self._gate = gate
        self._database = gate.database
        self._approvals = approvals
        self._handlers = handlers

    async def create(self, wanted: ApprovalCreate) -> ApprovalAnswer:
        """Ask for an action. The same id with the same words is a replay, whatever became of the request.

        Raises `forbidden` where policy denies or where the actor may do it alone, `mutation_conflict`, `invalid`, and
        what the plan's owner says (`not_found`, `version_conflict`).
        """
        actor, project = wanted.actor, wanted.project
        act = Act(actor, "approval.request", project, wanted.id)
        handler = self._handlers.get(wanted.action_type)
        if handler is None:
            known = ", ".join(sorted(self._handlers))
            raise Ql3Error("invalid", f"There is no such action; there are {known}.", field="action_type")
        try:
            asked = digest(ASK_DOMAIN, [wanted.action_type, wanted.plan, wanted.risk, wanted.ttl_ms])
        except ValueError as error:
            raise Ql3Error("invalid", "A plan holds no floats and no broken text.", field="plan") from error
        try:
            await self._admit(wanted, handler, {})
            if await self._replayed(wanted, asked):
                return await self._answer(wanted, replayed=True)
            planned = await handler.understand(project, _ref(wanted), wanted.plan)
            decision = await self._admit(wanted, handler, planned.labels)
            if decision.effect != "require_approval":
                raise Ql3Error("forbidden", "You may do this yourself; it needs no approval.")
        except Ql3Error as error:
            raise await self._gate.refuse(act, error) from None
        replayed = await self._gate.change(act, lambda tx: self._store(tx, wanted, handler, planned, decision, asked))
        return await self._answer(wanted, replayed=replayed)

    async def _admit(self, wanted: ApprovalCreate, handler: Handler, labels: Mapping[str, str]) -> PolicyDecision:
        decision = await self._database.read(
            lambda tx: self._gate.decide(tx, wanted.actor, wanted.project, handler.permission, labels)
        )
        if decision.effect == "deny":
            raise Ql3Error("forbidden", data={"permission": handler.permission, "reasons": decision.reasons})
        return decision

    async def _replayed(self, wanted: ApprovalCreate, asked: str) -> bool:
        async def work(tx: Transaction) -> bool:
            return await self._known(tx, wanted, asked)

        return await self._database.read(work)

    async def _known(self, tx: Transaction, wanted: ApprovalCreate, asked: str) -> bool:
        request = await rows.get(tx, wanted.id)
        if request is None:
            return False
        plan = await rows.plan(tx, request.binding.action_ref)
        same = (request.project, request.requested_by) == (wanted.project, subject_of(wanted.actor))
        if not same or plan is None or plan.ask_digest != asked:
            raise Ql3Error("mutation_conflict", field="id")
        return True

    async def _store(
        self,
        tx: Transaction,
        wanted: ApprovalCreate,
        handler: Handler,
        planned: Planned,
        decision: PolicyDecision,
        asked: str,
    ) -> bool:
        if await self._known(tx, wanted, asked):
            return True
        who = subject_of(wanted.actor)
        await projects.assert_fence(tx, wanted.project, who, fence_of(decision))
        now_ms = self._gate.now_ms()
        action_digest = plan_digest(handler.action_type, planned.plan)
        _, rules = await projects.rules(tx, wanted.project)
        humans = len(await projects.deciders(tx, wanted.project))
        # Whoever asks may call it more dangerous than its label does, and not less.
        risk = risk_of(planned.labels, wanted.risk, "low")
        terms = terms_of(rules, handler.permission, planned.labels, risk, humans)
        request = requests.validate(
            Request(
                id=wanted.id,
                project=wanted.project,
                mode=terms.mode,
                quorum=terms.quorum,
                decider_role=terms.decider_role,
                rule=terms.rule,
                binding=Binding(
                    permission=handler.permission,
                    action_type=handler.action_type,
                    action_ref=_ref(wanted),
                    action_digest=action_digest,
                    preview_digest=preview_digest(planned.preview),
                ),
                preview=planned.preview,
                risk=risk,
                requested_by=who,
                requested_at_ms=now_ms,
                expires_at_ms=now_ms + wanted.ttl_ms,
            )
        )
        plan = Plan(wanted.project, handler.action_type, action_digest, asked, planned.plan)
        await rows.insert_plan(tx, request.binding.action_ref, plan, now_ms)
        await self._approvals.insert(tx, [request])
        return False

    async def _answer(self, wanted: ApprovalCreate, *, replayed: bool) -> ApprovalAnswer:
        approval = await self._approvals.view(wanted.project, wanted.id)
        return ApprovalAnswer(approval=approval, replayed=replayed)


def _ref(wanted: ApprovalCreate) -> str:
    return f"plan:{wanted.id}"
