"""Ending doubts: what crossed the start barrier and never came back is looked for, and answered for by a person."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import structlog

from schemas.approvals import (
    ActionAnswer,
    ActionList,
    ActionPage,
    ActionRead,
    ActionRecover,
    ApprovedAction,
)
from schemas.errors import Ql3Error
from schemas.identity import Actor
from services.approval import executions, recovery
from services.approval.executions import Execution
from services.approval.executor import end_hold, make_receipt
from services.approval.gate import SERVICE, Act, Gate, subject_of
from services.approval.handlers.port import Handler, Outcome
from services.approval.policy import Fence, fence_of, is_local_console
from services.approval.recovery import Control, Finding, Resolution
from services.approval.requests import SKEW_MS, require_strong
from services.approval.store import actions, projects
from services.approval.store import recovery as controls
from services.approval.store.actions import Dispatch
from services.approval.store.recovery import Authorization
from services.kit import audit
from services.kit.database import Transaction
from services.kit.ids import new_id

PAGE: Final = 16
AWAY: Final = frozenset({"unavailable", "database_unavailable", "commit_unknown", "capacity"})

log: structlog.stdlib.BoundLogger = structlog.get_logger("ql3.approval")


class Reconciler:
    """Looks for evidence under leases of its own, and takes a person's word. Nothing here does an action again."""

    def __init__(self, gate: Gate, handlers: Mapping[str, Handler], *, owner: str) -> None:
        self._gate = gate
        self._database = gate.database
        self._handlers = handlers
        self._owner = owner

    async def step(self) -> bool:
        """Look at one page of doubts; True when there may be more."""

        async def due(tx: Transaction) -> list[str]:
            return await controls.due(tx, await tx.now_ms(), PAGE)

        found = await self._database.read(due)
        await asyncio.gather(*(self._guarded(dispatch_id) for dispatch_id in found))
        return len(found) == PAGE

    async def _guarded(self, dispatch_id: str) -> None:
        try:
            await self.look(dispatch_id)
        except Ql3Error as error:
            if error.code in ("database_unavailable", "internal_error"):
                raise
            log.info("a recovery was left to others", dispatch=dispatch_id, error=error.code)

    # -- automatic

    async def look(self, dispatch_id: str) -> None:
        """Claim one doubt, ask for evidence, and either resolve it or note what was seen."""
        token = new_id()
        claimed = await self.claim(dispatch_id, token)
        if claimed is None:
            return
        dispatch, execution, control = claimed
        finding = await self._observe(dispatch, execution)
        if finding.kind == "verified_failed":
            finding = await self._closed(dispatch, finding)
        if finding.kind in ("verified_succeeded", "verified_failed"):
            await self.resolve_automatically(dispatch, execution, control, token, finding)
        else:
            await self.note(dispatch, token, finding)

    async def claim(self, dispatch_id: str, token: str) -> tuple[Dispatch, Execution, Control] | None:
        """Take the recovery lease; None when there is nothing to take."""

        async def work(tx: Transaction) -> tuple[Dispatch, Execution, Control] | None:
            dispatch, execution, control = await self._locked(tx, dispatch_id)
            if execution.status != "executing":
                return None
            outcome, after = recovery.claim(
                control, execution, owner=self._owner, token=token, now_ms=await tx.now_ms()
            )
            if outcome != "claimed":
                return None
            await controls.update_control(tx, control, after)
            return dispatch, execution, after

        return await self._database.transact(work)

    async def _observe(self, dispatch: Dispatch, execution: Execution) -> Finding:
        handler = self._handlers.get(dispatch.binding.action_type)
        if handler is None:
            return Finding("unsupported", "automatic_recovery_unsupported")
        try:
            found = await handler.observe(dispatch, execution)
        except Ql3Error as error:
            if error.code in AWAY:
                return Finding("unavailable", "recovery_evidence_unavailable")
            return Finding("conflict", error.code)
        except Exception:
            log.exception("evidence could not be looked for", dispatch=dispatch.id)
            return Finding("unavailable", "recovery_evidence_unavailable")
        if found.kind.startswith("verified") and found.evidence_digest is None:
            return Finding("conflict", "recovery_evidence_invalid")
        return found

    async def _closed(self, dispatch: Dispatch, finding: Finding) -> Finding:
        """A failure, once a late effect is refused; or the success that closing has found."""
        handler = self._handlers[dispatch.binding.action_type]
        try:
            return await handler.close(dispatch) or finding
        except Ql3Error:
            return Finding("unavailable", "recovery_close_unavailable")

    async def note(self, dispatch: Dispatch, token: str, finding: Finding) -> Control:
        """Record a finding that settles nothing. Raises `fence_rejected`."""
        mutation_id = new_id()

        async def work(tx: Transaction) -> Control:
            _, _, control = await self._locked(tx, dispatch.id)
            after = recovery.record(
                control, finding, mutation_id=mutation_id, owner=self._owner, token=token, now_ms=await tx.now_ms()
            )
            await controls.update_control(tx, control, after)
            if after.status == "manual_required":
                await audit.append(tx, SERVICE, "action.manual_required", dispatch.project, dispatch.id, finding.code)
            return after

        return await self._database.transact(work)

    async def resolve_automatically(
        self, dispatch: Dispatch, execution: Execution, control: Control, token: str, finding: Finding
    ) -> Execution:
        """End a doubt by evidence. Raises `already_decided` or `fence_rejected`."""
        resolution = Resolution(
            dispatch_id=dispatch.id,
            project=dispatch.project,
            execution_version=execution.version,
            mutation_id=new_id(),
            source="automatic_evidence",
            decision="confirm_succeeded" if finding.kind == "verified_succeeded" else "confirm_failed",
            evidence_digest=finding.evidence_digest,
            reason_code=finding.code,
            resolved_by=None,
            resolved_at_ms=self._gate.now_ms(),
        )

        async def work(tx: Transaction) -> Execution:
            _, before, current = await self._locked(tx, dispatch.id)
            now_ms = await tx.now_ms()
            recovery.admit_resolution(
                current,
                before,
                expected_execution_version=execution.version,
                expected_recovery_version=control.version,
                now_ms=now_ms,
            )
            recovery.require_lease(current, self._owner, token)
            return await self._settle(tx, dispatch, before, current, resolution, finding, None)

        return await self._database.transact(work)

    # -- by a person

    async def recover(self, wanted: ActionRecover) -> ActionAnswer:
        """Take a person's word on a doubt. The checks are made on a replay too.

        Raises `human_required`, `assurance_required`, `forbidden`, `not_found`, `conflict` (it had taken effect),
        `already_decided`, `fence_rejected`, `policy_fence_conflict`, or `unavailable` when a late effect cannot be
        refused yet.
        """
        actor, project = wanted.actor, wanted.project
        act = Act(actor, "approval.recover", project, wanted.dispatch)
        now_ms = self._gate.now_ms()

        async def look(tx: Transaction) -> tuple[Dispatch, Fence]:
            if actor.expires_at_ms + SKEW_MS <= now_ms:
                raise Ql3Error("unauthenticated")
            if actor.type != "user":
                raise Ql3Error("human_required")
            require_strong(actor, now_ms, recent=True)
            decision = await self._gate.require(tx, actor, project, "approval.recover")
            dispatch = await actions.dispatch(tx, wanted.dispatch)
            if dispatch is None or dispatch.project != project:
                raise Ql3Error("not_found")
            if decision.binding_version is None and not is_local_console(subject_of(actor)):
                raise Ql3Error("forbidden")
            return dispatch, fence_of(decision)

        try:
            dispatch, fence = await self._database.read(look)
        except Ql3Error as error:
            raise await self._gate.refuse(act, error) from None
        if wanted.decision != "confirm_succeeded":
            await self._close_first(dispatch, wanted)
        replayed = await self._gate.change(act, lambda tx: self._recover(tx, wanted, dispatch, fence, now_ms))
        return ActionAnswer(action=await self._action(project, wanted.dispatch), replayed=replayed)

    async def _close_first(self, dispatch: Dispatch, wanted: ActionRecover) -> None:
        handler = self._handlers.get(dispatch.binding.action_type)
        execution = await self._database.read(lambda tx: actions.execution(tx, dispatch.id))
        if handler is None or execution is None or execution.status != "executing":
            return
        if execution.version != wanted.expected_execution_version:
            raise Ql3Error("fence_rejected")
        found = await handler.close(dispatch)
        if found is not None:
            raise Ql3Error("conflict", "The action has taken effect; confirm that it succeeded.")

    async def _recover(
        self, tx: Transaction, wanted: ActionRecover, dispatch: Dispatch, fence: Fence, now_ms: int
    ) -> bool:
        _, before, control = await self._locked(tx, dispatch.id)
        actor = wanted.actor
        resolution = Resolution(
            dispatch_id=dispatch.id,
            project=dispatch.project,
            execution_version=wanted.expected_execution_version,
            mutation_id=wanted.mutation_id,
            source="human",
            decision=wanted.decision,
            evidence_digest=wanted.evidence_digest,
            reason_code=wanted.reason_code,
            resolved_by=actor.id,
            resolved_at_ms=now_ms,
        )
        known = await controls.resolution(tx, dispatch.id)
        if known is not None:
            if not _same_resolution(known, resolution):
                raise Ql3Error("already_decided")
            fact = await controls.authorization(tx, dispatch.id)
            if fact is None or fact.authentication_id != actor.authentication_id:
                raise Ql3Error("already_decided")
            return True
        recovery.admit_resolution(
            control,
            before,
            expected_execution_version=wanted.expected_execution_version,
            expected_recovery_version=wanted.expected_recovery_version,
            now_ms=await tx.now_ms(),
        )
        await projects.assert_fence(tx, dispatch.project, subject_of(actor), fence)
        fact = _authorization(dispatch, wanted, fence, now_ms)
        await self._settle(tx, dispatch, before, control, resolution, None, actor)
        await controls.insert_authorization(tx, fact)
        return False

    async def _settle(
        self,
        tx: Transaction,
        dispatch: Dispatch,
        before: Execution,
        control: Control,
        resolution: Resolution,
        finding: Finding | None,
        actor: Actor | None,
    ) -> Execution:
        now_ms = await tx.now_ms()
        after = executions.resolved(
            before,
            resolution.decision,
            mutation_id=resolution.mutation_id,
            code=resolution.reason_code,
            now_ms=now_ms,
        )
        await actions.update_execution(tx, before, after)
        await controls.update_control(tx, control, recovery.settled(control, after, resolution, finding, now_ms))
        await controls.insert_resolution(tx, resolution)
        if after.status == "succeeded":
            if finding is not None:
                # Evidence was seen: the receipt that the executor could not write is written now.
                proof = Outcome("succeeded", finding.code, *finding.resource)
                await actions.insert_receipt(tx, make_receipt(dispatch, before, after, proof))
        elif resolution.reason_code != "run_not_waiting":
            await end_hold(tx, dispatch, self._gate.now_ms())
        await audit.append(
            tx,
            actor or SERVICE,
            "approval.recover",
            dispatch.project,
            dispatch.id,
            resolution.decision,
            {"reason": resolution.reason_code, "source": resolution.source, "approval": dispatch.approval_id},
        )
        return after

    async def _locked(self, tx: Transaction, dispatch_id: str) -> tuple[Dispatch, Execution, Control]:
        # The execution first, as everywhere: two who end the same doubt meet there.
        execution = await actions.execution(tx, dispatch_id, lock=True)
        dispatch = await actions.dispatch(tx, dispatch_id)
        if execution is None or dispatch is None:
            raise Ql3Error("not_found")
        control = await controls.control(tx, dispatch_id, lock=True)
        if control is None:
            raise Ql3Error("fence_rejected", "This action has not begun.")
        return dispatch, execution, control

    # -- read

    async def page(self, wanted: ActionList) -> ActionPage:
        """Approved actions of a project, newest first."""
        permission = "approval.recover" if wanted.recovery else "approval.read"

        async def work(tx: Transaction) -> ActionPage:
            await self._gate.require(tx, wanted.actor, wanted.project, permission)
            items, more = await controls.actions(
                tx, wanted.project, wanted.recovery, wanted.page.limit, wanted.page.cursor
            )
            return ActionPage(items=items, next=more)

        return await self._database.read(work)

    async def get(self, wanted: ActionRead) -> ActionAnswer:
        """One approved action. Another project's is `not_found`."""
        await self._database.read(lambda tx: self._gate.require(tx, wanted.actor, wanted.project, "approval.read"))
        return ActionAnswer(action=await self._action(wanted.project, wanted.dispatch))

    async def _action(self, project: str, dispatch_id: str) -> ApprovedAction:
        action = await self._database.read(lambda tx: controls.action(tx, project, dispatch_id))
        if action is None:
            raise Ql3Error("not_found")
        return action


def _same_resolution(known: Resolution, wanted: Resolution) -> bool:
    # Everything that was asked for; the time is ours.
    return (
        known.mutation_id,
        known.execution_version,
        known.source,
        known.decision,
        known.evidence_digest,
        known.reason_code,
        known.resolved_by,
    ) == (
        wanted.mutation_id,
        wanted.execution_version,
        wanted.source,
        wanted.decision,
        wanted.evidence_digest,
        wanted.reason_code,
        wanted.resolved_by,
    )


def _authorization(dispatch: Dispatch, wanted: ActionRecover, fence: Fence, now_ms: int) -> Authorization:
    actor = wanted.actor
    return Authorization(
        dispatch_id=dispatch.id,
        project=dispatch.project,
        mutation_id=wanted.mutation_id,
        resolved_by=actor.id,
        authentication_id=actor.authentication_id,
        assurance=actor.assurance,
        authenticated_at_ms=min(actor.authenticated_at_ms, now_ms),
        authorized_at_ms=now_ms,
        project_version=fence.project_version,
        binding_version=fence.binding_version,
    )
