"""Approval requests: asked for, decided, taken back and handed over for execution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from schemas import subjects
from schemas.approvals import (
    Approval,
    ApprovalAnswer,
    ApprovalChanged,
    ApprovalDecide,
    ApprovalList,
    ApprovalPage,
    ApprovalRead,
    ApprovalState,
    ApprovalWithdraw,
    Decision,
    DecisionMode,
    HoldOrder,
    Risk,
)
from schemas.errors import Ql3Error
from schemas.identity import Subject
from services.approval import executions, policy, requests
from services.approval.gate import Act, Gate, subject_of
from services.approval.policy import RANK, Fence, fence_of
from services.approval.requests import DecisionRow, Request
from services.approval.store import actions, projects
from services.approval.store import requests as rows
from services.kit import audit, outbox
from services.kit.database import Transaction
from services.kit.ids import new_id

RELEASE: Final = "run.release"
CONSUMER: Final = Subject(type="system", id="approval")
CONSUME_RETRY_MS: Final = 15_000
WORK: Final = "actions"
"""The bell of the loop that hands approved actions over and carries them out."""
ENDINGS: Final = "endings"
"""The bell of the loop that tells held runs that they will not be released."""


class Terms(NamedTuple):
    """Who has to decide about a request, fixed when it is made."""

    mode: DecisionMode
    quorum: int
    decider_role: Any
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
            rules: dict[str, Any] = {}
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
                    terms = _terms(rules[order.project], order.binding.permission, order.labels, order.risk, humans)
                    wanted = requests.validate(_held(order, terms))
                except Ql3Error as error:
                    outcomes[index] = error
                    continue
                before = known.get(wanted.id) or fresh.get(wanted.id)
                if before is None:
                    fresh[wanted.id] = wanted
                elif not requests.same_request(before, wanted):
                    outcomes[index] = Ql3Error("mutation_conflict", field="request_id")
            await self._insert(tx, list(fresh.values()))

        await self._gate.change(Act(CONSUMER, "approval.request", None, None), work)
        return outcomes

    async def _insert(self, tx: Transaction, made: Sequence[Request]) -> None:
        if not made:
            return
        await rows.insert_many(tx, made)
        await outbox.facts(tx, [_fact(request, request.requested_at_ms) for request in made])
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
                await rows.update(tx, request, after, consume_after_ms=now_ms if after.state == "approved" else None)
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
            await outbox.fact(tx, *_fact(after, now_ms))
            tx.after_commit(tx.database.bell(WORK).set)
            return False

        replayed = await self._gate.change(act, work)
        return ApprovalAnswer(approval=await self._view(project, wanted.approval), replayed=replayed)

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
            await self._withdraw(tx, request, who)
            await audit.append(tx, actor, "approval.withdraw", project, request.id, seen)
            return False

        replayed = await self._gate.change(Act(actor, "approval.withdraw", project, wanted.approval), work)
        return ApprovalAnswer(approval=await self._view(project, wanted.approval), replayed=replayed)

    async def run_ended(self, run: str) -> bool:
        """A held run ended without us (somebody cancelled it): what was asked for it is void. True when it was open."""

        async def work(tx: Transaction) -> bool:
            request = await rows.get(tx, run, lock=True)
            if request is None or request.binding.action_type != RELEASE:
                return False
            if requests.effective_state(request, self._gate.now_ms()) not in ("pending", "approved"):
                return False
            await self._withdraw(tx, request, CONSUMER)
            await audit.append(tx, CONSUMER, "approval.withdraw", request.project, request.id, "run_ended")
            return True

        return await self._gate.change(Act(CONSUMER, "approval.withdraw", None, run), work)

    async def _withdraw(self, tx: Transaction, request: Request, by: Subject) -> None:
        now_ms = self._gate.now_ms()
        after = requests.withdraw(request, withdrawal_id=new_id(), by=by, now_ms=now_ms)
        await rows.update(tx, request, after)
        await self._end(tx, after, "withdrawn", now_ms)
        await outbox.fact(tx, *_fact(after, now_ms))

    async def _end(self, tx: Transaction, request: Request, outcome: Any, now_ms: int) -> None:
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

        async def work(tx: Transaction) -> None:
            await self._gate.require(tx, wanted.actor, wanted.project, "approval.read")

        await self._database.read(work)
        return ApprovalAnswer(approval=await self._view(wanted.project, wanted.approval))

    async def _view(self, project: str, request_id: str) -> Approval:
        async def work(tx: Transaction) -> Approval:
            listed = await rows.view(tx, project, request_id)
            if listed is None:
                raise Ql3Error("not_found")
            decisions = await rows.decisions(tx, [request_id])
            return _view(listed, decisions.get(request_id, []), self._gate.now_ms(), await tx.now_ms())

        return await self._database.read(work)

    # -- handed over

    async def to_consume(self, limit: int) -> list[str]:
        """Approved requests whose action is to be handed over now."""
        now_ms = self._gate.now_ms()
        return await self._database.read(lambda tx: rows.to_consume(tx, now_ms, limit))

    async def hand_over(self, request_id: str) -> bool:
        """Consume an approved request with the action that it holds; False when it has to wait or is gone.

        A requester who may not ask for this any more gets nothing: the request stays approved, is tried again, and
        expires in the end.
        """
        request = await self._database.read(lambda tx: rows.get(tx, request_id))
        if request is None or request.state != "approved":
            return False
        try:
            await self.consume(
                request_id,
                consumption_id=new_id(),
                dispatch_id=new_id(),
                expected_version=2,
                action=request.binding,
                requested_by=request.requested_by,
                consumed_by=CONSUMER,
            )
        except Ql3Error as error:
            if error.code in ("approval_expired", "version_conflict", "invalid_transition"):
                return False
            refusal, later_ms = error.code, self._gate.now_ms() + CONSUME_RETRY_MS
            await self._database.transact(lambda tx: rows.consume_later(tx, request_id, later_ms, refusal))
            return False
        return True

    async def consume(
        self,
        request_id: str,
        *,
        consumption_id: str,
        dispatch_id: str,
        expected_version: int,
        action: requests.Binding,
        requested_by: Subject,
        consumed_by: Subject,
    ) -> bool:
        """Use an approved request for its one dispatch; True for a replay.

        The requester's authority is judged again, and fenced. Raises `forbidden`, `mutation_conflict`, `not_found`,
        `approval_expired`, `version_conflict`, `invalid_transition` or `policy_fence_conflict`.
        """
        act = Act(consumed_by, "approval.consume", None, request_id)
        if consumed_by.type not in ("system", "worker"):
            raise await self._gate.refuse(act, Ql3Error("forbidden", "Only a service carries out approved actions."))

        async def look(tx: Transaction) -> tuple[str, Fence]:
            request = await rows.get(tx, request_id)
            if request is None:
                raise Ql3Error("not_found")
            snapshot = await projects.snapshot(tx, request.project, requested_by)
            decision = policy.evaluate(requested_by, action.permission, snapshot)
            if decision.effect == "deny":
                raise Ql3Error("forbidden", data={"reasons": decision.reasons})
            return request.project, fence_of(decision)

        try:
            project, fence = await self._database.read(look)
        except Ql3Error as error:
            raise await self._gate.refuse(act, error) from None

        async def work(tx: Transaction) -> bool:
            request = await rows.get(tx, request_id, lock=True)
            known = await rows.by_consumption(tx, consumption_id)
            if known is not None:
                await self._same_consumption(
                    tx, known, request_id, dispatch_id, expected_version, action, requested_by, consumed_by
                )
                return True
            if request is None:
                raise Ql3Error("not_found")
            now_ms = self._gate.now_ms()
            if await rows.ended(tx, request.id):
                raise Ql3Error("approval_expired")
            after = requests.consume(
                request,
                consumption_id=consumption_id,
                dispatch_id=dispatch_id,
                expected_version=expected_version,
                action=action,
                requested_by=requested_by,
                consumed_by=consumed_by,
                now_ms=now_ms,
            )
            await projects.assert_fence(tx, project, requested_by, fence)
            if await actions.dispatch(tx, dispatch_id) is not None:
                raise Ql3Error("mutation_conflict", field="dispatch_id")
            await rows.update(tx, request, after)
            await actions.insert_dispatch(tx, await self._dispatch(tx, after))
            lease_now_ms = await tx.now_ms()
            await actions.insert_execution(tx, executions.created(dispatch_id, project, lease_now_ms))
            await audit.append(
                tx,
                consumed_by,
                "approval.consume",
                project,
                request.id,
                "allow",
                {"dispatch": dispatch_id, "action_digest": action.action_digest},
            )
            await outbox.fact(tx, *_fact(after, now_ms))
            tx.after_commit(tx.database.bell(WORK).set)
            return False

        return await self._gate.change(act._replace(project=project), work)

    async def _dispatch(self, tx: Transaction, request: Request) -> actions.Dispatch:
        deciding = await rows.decision(tx, request.decision_id or "")
        if (
            deciding is None
            or request.decided_by is None
            or request.consumed_by is None
            or request.decided_at_ms is None
            or request.consumed_at_ms is None
        ):
            raise Ql3Error("unavailable", "An approved request has no decision.")
        return actions.Dispatch(
            id=request.dispatch_id or "",
            approval_id=request.id,
            project=request.project,
            binding=request.binding,
            requested_by=request.requested_by,
            approved_by=request.decided_by,
            approved_assurance=deciding.assurance,
            approved_at_ms=request.decided_at_ms,
            expires_at_ms=request.expires_at_ms,
            consumed_by=request.consumed_by,
            created_at_ms=request.consumed_at_ms,
        )

    async def _same_consumption(
        self,
        tx: Transaction,
        known: Request,
        request_id: str,
        dispatch_id: str,
        expected_version: int,
        action: requests.Binding,
        requested_by: Subject,
        consumed_by: Subject,
    ) -> None:
        stored = (known.id, known.dispatch_id, known.binding, known.requested_by, known.consumed_by)
        if stored != (request_id, dispatch_id, action, requested_by, consumed_by) or expected_version != 2:
            raise Ql3Error("mutation_conflict", field="consumption_id")
        dispatch = await actions.dispatch(tx, dispatch_id)
        execution = await actions.execution(tx, dispatch_id)
        if dispatch is None or execution is None or dispatch != await self._dispatch(tx, known):
            raise Ql3Error("unavailable", "A consumed request has no matching dispatch.")

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


def _terms(rules: Any, permission: str, labels: dict[str, str], risk: Risk, humans: int) -> Terms:
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
    )


def _fact(request: Request, now_ms: int) -> tuple[str, ApprovalChanged]:
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
    )
