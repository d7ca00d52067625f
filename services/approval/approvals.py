"""Approval requests: asked for, decided, taken back and handed over for execution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from schemas import subjects
from schemas.approvals import (
    Approval,
    ApprovalAnswer,
    ApprovalChanged,
    ApprovalDecide,
    ApprovalList,
    ApprovalPage,
    ApprovalRead,
    ApprovalRule,
    ApprovalState,
    ApprovalWithdraw,
    Decision,
    DecisionMode,
    HoldOrder,
    Risk,
)
from schemas.errors import Ql3Error
from schemas.identity import Subject
from schemas.limits import SUBMIT_AHEAD_MS
from services.approval import policy, requests
from services.approval.gate import SERVICE, Act, Gate, subject_of
from services.approval.policy import RANK, Fence, fence_of
from services.approval.requests import DecisionRow, Request
from services.approval.store import projects
from services.approval.store import requests as rows
from services.kit import audit, outbox
from services.kit.database import Transaction
from services.kit.ids import new_id

RELEASE: Final = "run.release"
UNSHOWN: Final = frozenset({"secret.set"})
"""Actions whose plan nobody reads: its value is sealed to the vault, and all else stands in the preview."""
HAND_OVER_AHEAD_MS: Final = SUBMIT_AHEAD_MS
WORK: Final = "actions"
"""The bell of the loop that hands approved actions over and carries them out."""
ENDINGS: Final = "endings"
"""The bell of the loop that tells held runs that they will not be released."""


class Terms(NamedTuple):
    """Who has to decide about a request, fixed when it is made."""

    mode: DecisionMode
    quorum: int
    decider_role: Literal["owner", "admin"] | None
    rule: str | None


class Approvals:
    """The life of a request, up to its hand-over."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._database = gate.database

    # -- asked for

    async def hold(self, orders: Sequence[HoldOrder]) -> list[Ql3Error | None]:
        """Requests of runs that wait, in one transaction; an order that is known is answered again.

        The answer has one outcome per order: None for what stands, else why it cannot.
        """
        outcomes: list[Ql3Error | None] = [None] * len(orders)

        async def work(tx: Transaction) -> None:
            outcomes[:] = [None] * len(orders)
            known = await rows.many(tx, [order.request_id for order in orders])
            fresh: dict[str, Request] = {}
            people: dict[str, int | None] = {}
            rules: dict[str, tuple[ApprovalRule, ...]] = {}
            for index, order in enumerate(orders):
                if order.project not in people:
                    found = await projects.get(tx, order.project)
                    people[order.project] = len(await projects.deciders(tx, order.project)) if found else None
                    rules[order.project] = (await projects.rules(tx, order.project))[1]
                humans = people[order.project]
                if humans is None:
                    outcomes[index] = Ql3Error("not_found", "There is no such project.", field="project")
                    continue
                try:
                    terms = terms_of(rules[order.project], order.binding.permission, order.labels, order.risk, humans)
                    wanted = requests.validate(_held(order, terms))
                except Ql3Error as error:
                    outcomes[index] = error
                    continue
                before = known.get(wanted.id) or fresh.get(wanted.id)
                if before is None:
                    fresh[wanted.id] = wanted
                elif not requests.same_request(before, wanted):
                    outcomes[index] = Ql3Error("mutation_conflict", field="request_id")
            await self.insert(tx, list(fresh.values()))

        await self._gate.change(Act(SERVICE, "approval.request", None, None), work)
        return outcomes

    async def insert(self, tx: Transaction, made: Sequence[Request]) -> None:
        """New requests with their facts and audit rows."""
        if not made:
            return
        await rows.insert_many(tx, made)
        await outbox.facts(tx, [fact_of(request, request.requested_at_ms) for request in made])
        for request in made:
            await audit.append(
                tx,
                request.requested_by,
                "approval.request",
                request.project,
                request.id,
                "require_approval",
                {"action": request.binding.action_type, "risk": request.risk, "mode": request.mode},
            )

    # -- decided

    async def decide(self, wanted: ApprovalDecide) -> ApprovalAnswer:
        """One person's decision; the last one that the quorum needs moves the request.

        Checks come in this order: a person, policy, existence, self-decision, assurance; then, in the transaction,
        replay, expiry, version, state, fence.
        """
        actor, project = wanted.actor, wanted.project
        act = Act(actor, "approval.decide", project, wanted.approval)
        who = subject_of(actor)

        async def look(tx: Transaction) -> tuple[Fence, policy.Role | None]:
            if actor.type != "user":
                raise Ql3Error("human_required")
            decision = await self._gate.require(tx, actor, project, "approval.decide")
            request = await rows.get(tx, wanted.approval)
            if request is None or request.project != project:
                raise Ql3Error("not_found")
            requests.admit_decider(request, actor, self._gate.now_ms())
            least = request.decider_role
            if least is not None and RANK[decision.role or "viewer"] < RANK[least]:
                raise Ql3Error("forbidden", f"This needs the role {least}.")
            return fence_of(decision), decision.role

        try:
            fence, role = await self._database.read(look)
        except Ql3Error as error:
            raise await self._gate.refuse(act, error) from None

        async def work(tx: Transaction) -> bool:
            now_ms = self._gate.now_ms()
            request = await rows.get(tx, wanted.approval, lock=True)
            known = await rows.decision(tx, wanted.decision_id)
            if known is not None:
                same = (known.request_id, known.decision, known.reason, known.decided_by)
                if same != (wanted.approval, wanted.decision, wanted.reason, who):
                    raise Ql3Error("mutation_conflict", field="decision_id")
                return True
            if request is None:
                raise Ql3Error("not_found")
            if await rows.ended(tx, request.id) and request.state in ("pending", "approved"):
                # Its run has been told already; a clock that went back does not bring it back.
                raise Ql3Error("approval_expired")
            made = DecisionRow(
                id=wanted.decision_id,
                request_id=request.id,
                decision=wanted.decision,
                reason=wanted.reason,
                decided_by=who,
                authentication_id=actor.authentication_id,
                assurance=actor.assurance,
                authenticated_at_ms=min(actor.authenticated_at_ms, now_ms),
                project_version=fence.project_version,
                binding_version=fence.binding_version,
                decided_at_ms=max(now_ms, request.requested_at_ms),
            )
            earlier = (await rows.decisions(tx, [request.id])).get(request.id, [])
            after = requests.decide(
                request,
                earlier,
                made,
                expected_version=wanted.expected_version,
                expected_digest=wanted.expected_digest,
                now_ms=now_ms,
            )
            await projects.assert_fence(tx, project, who, fence)
            await rows.insert_decision(tx, request, made)
            if after is not request:
                await rows.update(tx, request, after, wait_ms=_until_due(after, now_ms))
                if after.state == "rejected":
                    await self._end(tx, after, "rejected", now_ms)
            await audit.append(
                tx,
                actor,
                "approval.decide",
                project,
                request.id,
                wanted.decision,
                {
                    "action_digest": request.binding.action_digest,
                    "assurance": actor.assurance,
                    "binding_version": fence.binding_version or 0,
                    "project_version": fence.project_version,
                    "role": role or "none",
                    "state": after.state,
                },
            )
            await outbox.fact(tx, *fact_of(after, now_ms))
            tx.after_commit(tx.database.bell(WORK).set)
            return False

        replayed = await self._gate.change(act, work)
        return ApprovalAnswer(approval=await self.view(project, wanted.approval), replayed=replayed)

    async def withdraw(self, wanted: ApprovalWithdraw) -> ApprovalAnswer:
        """Taken back by whoever asked. Raises `not_found`, `forbidden`, `approval_expired`, `invalid_transition`."""
        actor, project = wanted.actor, wanted.project
        who = subject_of(actor)

        async def work(tx: Transaction) -> bool:
            request = await rows.get(tx, wanted.approval, lock=True)
            seen = await self._gate.decide(tx, actor, project, "approval.read")
            if request is None or request.project != project:
                raise Ql3Error("not_found" if seen.effect == "allow" else "forbidden")
            if seen.reasons in (["authentication_expired"], ["subject_disabled"], ["not_the_console"]):
                raise Ql3Error("forbidden", data={"reasons": seen.reasons})
            if request.requested_by != who:
                raise Ql3Error("forbidden", "Only whoever asked takes a request back.")
            if request.state == "withdrawn" and request.withdrawn_by == who:
                return True
            await projects.assert_fence(tx, project, who, fence_of(seen))
            await self._withdraw(tx, request, who)
            await audit.append(tx, actor, "approval.withdraw", project, request.id, seen)
            return False

        replayed = await self._gate.change(Act(actor, "approval.withdraw", project, wanted.approval), work)
        return ApprovalAnswer(approval=await self.view(project, wanted.approval), replayed=replayed)

    async def run_ended(self, run: str) -> bool:
        """A held run ended without us (somebody cancelled it): what was asked for it is void. True when it was open."""

        async def work(tx: Transaction) -> bool:
            request = await rows.get(tx, run, lock=True)
            if request is None or request.binding.action_type != RELEASE:
                return False
            if requests.effective_state(request, self._gate.now_ms()) not in ("pending", "approved"):
                return False
            await self._withdraw(tx, request, SERVICE)
            await audit.append(tx, SERVICE, "approval.withdraw", request.project, request.id, "run_ended")
            return True

        return await self._gate.change(Act(SERVICE, "approval.withdraw", None, run), work)

    async def _withdraw(self, tx: Transaction, request: Request, by: Subject) -> None:
        now_ms = self._gate.now_ms()
        after = requests.withdraw(request, withdrawal_id=new_id(), by=by, now_ms=now_ms)
        await rows.update(tx, request, after)
        await self._end(tx, after, "withdrawn", now_ms)
        await outbox.fact(tx, *fact_of(after, now_ms))

    async def _end(
        self, tx: Transaction, request: Request, outcome: Literal["rejected", "withdrawn"], now_ms: int
    ) -> None:
        if request.binding.action_type == RELEASE:
            await rows.end(tx, request.id, request.project, outcome, new_id(), now_ms)
            tx.after_commit(tx.database.bell(ENDINGS).set)

    # -- read

    async def page(self, wanted: ApprovalList) -> ApprovalPage:
        """Requests of a project, newest first."""

        async def work(tx: Transaction) -> ApprovalPage:
            await self._gate.require(tx, wanted.actor, wanted.project, "approval.read")
            now_ms = self._gate.now_ms()
            page = wanted.page
            listed, more = await rows.page(tx, wanted.project, wanted.state, now_ms, page.limit, page.cursor)
            decisions = await rows.decisions(tx, [item.request.id for item in listed])
            lease_now_ms = await tx.now_ms()
            items = [_view(item, decisions.get(item.request.id, []), now_ms, lease_now_ms) for item in listed]
            return ApprovalPage(items=items, next=more)

        return await self._database.read(work)

    async def get(self, wanted: ApprovalRead) -> ApprovalAnswer:
        """One request. Another project's is `not_found`."""

        async def work(tx: Transaction) -> Approval:
            await self._gate.require(tx, wanted.actor, wanted.project, "approval.read")
            shown = await self._shown(tx, wanted.project, wanted.approval)
            stored = None if shown.action_type in UNSHOWN else await rows.plan(tx, shown.action_ref)
            return shown if stored is None else msgspec.structs.replace(shown, plan=stored.plan)

        return ApprovalAnswer(approval=await self._database.read(work))

    async def view(self, project: str, request_id: str) -> Approval:
        """A request of this project as people read it, without its plan. Raises `not_found`."""
        return await self._database.read(lambda tx: self._shown(tx, project, request_id))

    async def _shown(self, tx: Transaction, project: str, request_id: str) -> Approval:
        listed = await rows.view(tx, project, request_id)
        if listed is None:
            raise Ql3Error("not_found")
        decisions = await rows.decisions(tx, [request_id])
        return _view(listed, decisions.get(request_id, []), self._gate.now_ms(), await tx.now_ms())

    # -- expiry of held runs

    async def expire(self, since_ms: int, limit: int) -> int:
        """Open the endings of holds that have expired after `since_ms`; answers how many."""
        now_ms = self._gate.now_ms()

        async def work(tx: Transaction) -> int:
            expired = await rows.expired_holds(tx, now_ms, since_ms, limit, lock=True)
            for hold in expired:
                await rows.end(tx, hold.id, hold.project, "expired", new_id(), now_ms)
                fact = ApprovalChanged(
                    project=hold.project,
                    approval_id=hold.id,
                    state="expired",
                    version=hold.version,
                    action_type=RELEASE,
                    at_ms=now_ms,
                )
                await outbox.fact(tx, subjects.event("approval", hold.project, hold.id, "expired"), fact)
            return len(expired)

        if not await self._database.read(lambda tx: rows.expired_holds(tx, now_ms, since_ms, 1)):
            return 0
        return await self._database.transact(work)


def terms_of(
    rules: tuple[ApprovalRule, ...], permission: str, labels: Mapping[str, str], risk: Risk, humans: int
) -> Terms:
    """Who has to decide, by the project's first rule that matches, else by how many people could."""
    rule = policy.rule_for(rules, permission, labels, risk)
    if rule is None:
        return Terms(requests.default_mode(humans), 1, None, None)
    return Terms(rule.mode or requests.default_mode(humans), rule.quorum, rule.decider_role, rule.name)


def _held(order: HoldOrder, terms: Terms) -> Request:
    return Request(
        id=order.request_id,
        project=order.project,
        mode=terms.mode,
        quorum=terms.quorum,
        decider_role=terms.decider_role,
        rule=terms.rule,
        binding=order.binding,
        preview=order.preview,
        risk=order.risk,
        requested_by=order.requested_by,
        requested_at_ms=order.requested_at_ms,
        expires_at_ms=order.expires_at_ms,
        not_before_ms=order.not_before_ms,
    )


def _until_due(request: Request, now_ms: int) -> int:
    # Handed over a moment early: the receiver is told when it may start, and starts to the instant.
    return 0 if request.not_before_ms is None else max(0, request.not_before_ms - HAND_OVER_AHEAD_MS - now_ms)


def fact_of(request: Request, now_ms: int) -> tuple[str, ApprovalChanged]:
    """The fact about a request's state, with its subject."""
    state: ApprovalState = request.state
    return subjects.event("approval", request.project, request.id, state), ApprovalChanged(
        project=request.project,
        approval_id=request.id,
        state=state,
        version=request.version,
        action_type=request.binding.action_type,
        at_ms=now_ms,
    )


def _view(listed: rows.Listed, decisions: Sequence[DecisionRow], now_ms: int, lease_now_ms: int) -> Approval:
    request = listed.request
    status = listed.execution_status
    if status == "executing" and lease_now_ms >= (listed.lease_expires_at_ms or 0):
        status = "recovery_required"
    return Approval(
        id=request.id,
        project=request.project,
        state=requests.effective_state(request, now_ms),
        version=request.version,
        mode=request.mode,
        quorum=request.quorum,
        permission=request.binding.permission,
        action_type=request.binding.action_type,
        action_ref=request.binding.action_ref,
        action_digest=request.binding.action_digest,
        preview_digest=request.binding.preview_digest,
        preview=request.preview,
        risk=request.risk,
        requested_by=request.requested_by,
        requested_at_ms=request.requested_at_ms,
        expires_at_ms=request.expires_at_ms,
        decisions=[
            Decision(
                id=row.id,
                decision=row.decision,
                decided_by=row.decided_by,
                reason=row.reason,
                decided_at_ms=row.decided_at_ms,
            )
            for row in decisions
        ],
        execution_status=status,
        execution_result=listed.execution_result,
        not_before_ms=request.not_before_ms,
    )
