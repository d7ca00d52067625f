"""`role.bind`: give or revoke a role. Our own tables: the mutation id of the binding is the evidence."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from schemas.canonical import digest
from schemas.errors import Ql3Error
from schemas.identity import Role, RoleBind, RoleBinding, Subject
from services.approval.authority import Authority
from services.approval.executions import Execution
from services.approval.gate import SERVICE, Act, Gate
from services.approval.handlers.plans import Plans, read_plan
from services.approval.handlers.port import Inspection, Outcome, Planned, service_actor
from services.approval.recovery import Finding
from services.approval.store import actions, projects
from services.approval.store.actions import Dispatch
from services.kit.database import Database, Transaction


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The plan as people send it; `role` null revokes."""

    subject: Subject
    role: Role | None
    expected_version: Annotated[int, Meta(ge=0)]


class RoleBindHandler:
    """Binds roles here, under the authority of whoever approved it."""

    action_type = "role.bind"
    permission = "policy.manage"
    needs = None

    def __init__(self, gate: Gate, authority: Authority, plans: Plans) -> None:
        self._gate = gate
        self._database: Database = gate.database
        self._authority = authority
        self._plans = plans

    async def understand(self, project: str, action_ref: str, plan: dict[str, Any]) -> Planned:
        """Who would have which role instead of which."""
        wanted = read_plan(plan, Wanted)
        current = await self._database.read(lambda tx: projects.binding(tx, project, wanted.subject))
        version = current.version if current else 0
        if version != wanted.expected_version:
            raise Ql3Error("version_conflict", field="plan.expected_version", data={"version": version})
        preview = {
            "subject": f"{wanted.subject.type}/{wanted.subject.id}",
            "role_now": (current.role if current else None) or "none",
            "role_then": wanted.role or "none",
        }
        return Planned(msgspec.to_builtins(wanted), preview)

    async def inspect(self, dispatch: Dispatch) -> Inspection:
        """Somebody may have changed the binding meanwhile."""
        plan = await self._plans.load(dispatch)
        if isinstance(plan, Inspection):
            return plan
        wanted = msgspec.convert(plan, Wanted)
        current = await self._database.read(lambda tx: projects.binding(tx, dispatch.project, wanted.subject))
        if (current.version if current else 0) != wanted.expected_version:
            return Inspection(None, "blocked", "binding_changed_meanwhile")
        return Inspection(dispatch.binding.action_digest)

    async def execute(self, dispatch: Dispatch) -> Outcome:
        """Append the binding, with the dispatch id as the mutation's."""
        wanted = msgspec.convert(await self._plans.bound(dispatch), Wanted)
        order = RoleBind(
            actor=service_actor(self._gate.now_ms()),
            project=dispatch.project,
            subject=wanted.subject,
            role=wanted.role,
            expected_version=wanted.expected_version,
            mutation_id=dispatch.id,
        )

        async def work(tx: Transaction) -> RoleBinding:
            # Under the lock that a recovery takes too, and only while the lease lives: once somebody looks for
            # evidence, nothing new appears.
            execution = await actions.execution(tx, dispatch.id, lock=True)
            alive = execution is not None and execution.status == "executing"
            if not alive or execution is None or await tx.now_ms() >= (execution.lease_expires_at_ms or 0):
                raise Ql3Error("fence_rejected")
            return (await self._authority.bind_approved(tx, order, dispatch.approved_by)).binding

        target = f"{wanted.subject.type}/{wanted.subject.id}"
        binding = await self._gate.change(Act(SERVICE, "role.bind", dispatch.project, target), work)
        return Outcome("succeeded", "role_bound", "role_binding", f"{target}@{binding.version}"[:255])

    async def observe(self, dispatch: Dispatch, execution: Execution) -> Finding:
        """The binding that the dispatch made; without one it never will, for the lease has lapsed."""
        made = await self._made(dispatch)
        if made is not None:
            return made
        evidence = digest("ql3.approved-role-bind-absent.v1", {"dispatch_id": dispatch.id})
        return Finding("verified_failed", "role_never_bound", evidence)

    async def close(self, dispatch: Dispatch) -> Finding | None:
        """What the dispatch made, if it did."""
        return await self._made(dispatch)

    async def _made(self, dispatch: Dispatch) -> Finding | None:
        binding = await self._database.read(lambda tx: projects.binding_by_mutation(tx, dispatch.project, dispatch.id))
        if binding is None:
            return None
        evidence = digest("ql3.approved-role-bind.v1", binding)
        resource = f"{binding.subject.type}/{binding.subject.id}@{binding.version}"[:255]
        return Finding("verified_succeeded", "role_bind_verified", evidence, ("role_binding", resource))
