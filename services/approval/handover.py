"""The hand-over of an approved request: used once, for the one dispatch that carries its action out."""

from __future__ import annotations

from typing import Final

from schemas.approvals import Binding
from schemas.errors import Ql3Error
from schemas.identity import Subject
from services.approval import executions, policy, requests
from services.approval.approvals import WORK, fact_of
from services.approval.gate import SERVICE, Act, Gate
from services.approval.policy import Fence, fence_of
from services.approval.requests import Request
from services.approval.store import actions, projects
from services.approval.store import requests as rows
from services.kit import audit, outbox
from services.kit.database import Transaction
from services.kit.ids import new_id

CONSUME_RETRY_MS: Final = 15_000


class HandOver:
    """Consumes approved requests."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._database = gate.database

    async def due(self, limit: int) -> list[str]:
        """Approved requests whose action is to be handed over now."""
        now_ms = self._gate.now_ms()
        return await self._database.read(lambda tx: rows.to_consume(tx, now_ms, limit))

    async def next_s(self) -> float | None:
        """In how many seconds something that is approved is to be handed over; None when nothing waits."""
        now_ms = self._gate.now_ms()
        wait_ms = await self._database.read(lambda tx: rows.next_to_consume(tx, now_ms))
        return None if wait_ms is None else wait_ms / 1000

    async def one(self, request_id: str) -> bool:
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
                consumed_by=SERVICE,
            )
        except Ql3Error as error:
            if error.code in ("approval_expired", "version_conflict", "invalid_transition"):
                return False
            refusal = error.code
            await self._database.transact(lambda tx: rows.consume_later(tx, request_id, CONSUME_RETRY_MS, refusal))
            return False
        return True

    async def consume(
        self,
        request_id: str,
        *,
        consumption_id: str,
        dispatch_id: str,
        expected_version: int,
        action: Binding,
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
            await outbox.fact(tx, *fact_of(after, now_ms))
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
        action: Binding,
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
