"""`secret.set`: a new version of a secret, whose value comes sealed to the vault and is readable nowhere else.

The vault compares the version and keeps the mutation id, under which the value is sealed, and the dispatch id: closing
that one tells whether the version was made, and refuses one that would come later.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from schemas import limits
from schemas.endpoints import SECRETS_SET
from schemas.ids import Id, Slug
from schemas.secrets import SecretSet
from services.approval.executions import Execution
from services.approval.handlers.closing import closed, succeeded
from services.approval.handlers.plans import Plans, read_plan
from services.approval.handlers.port import Ask, Inspection, Now, Outcome, Planned, service_actor
from services.approval.recovery import Finding
from services.approval.store.actions import Dispatch


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The plan as people send it; `sealed` as in `secrets.set`, sealed under `mutation_id`."""

    name: Slug
    sealed: Annotated[str, Meta(min_length=1, max_length=2 * limits.SECRET_BYTES)]
    expected_version: Annotated[int, Meta(ge=0)]
    mutation_id: Id


class SecretSetHandler:
    """Sets secrets through the vault."""

    action_type = "secret.set"
    permission = "secret.manage"
    needs = "vault"

    def __init__(self, ask: Ask, plans: Plans, now: Now) -> None:
        self._ask = ask
        self._plans = plans
        self._now = now

    async def understand(self, project: str, action_ref: str, plan: dict[str, Any]) -> Planned:
        """The value stays sealed; a person sees the name and the versions."""
        wanted = read_plan(plan, Wanted)
        preview = {
            "secret": wanted.name,
            "from_version": wanted.expected_version,
            "to_version": wanted.expected_version + 1,
            "value": "sealed",
        }
        return Planned(msgspec.to_builtins(wanted), preview)

    async def inspect(self, dispatch: Dispatch) -> Inspection:
        """The plan must be the approved one; the version is compared by the vault."""
        plan = await self._plans.load(dispatch)
        return plan if isinstance(plan, Inspection) else Inspection(dispatch.binding.action_digest)

    async def execute(self, dispatch: Dispatch) -> Outcome:
        """Append the version."""
        plan = msgspec.convert(await self._plans.bound(dispatch), Wanted)
        answer = await self._ask(
            SECRETS_SET,
            SecretSet(
                actor=service_actor(self._now()),
                project=dispatch.project,
                name=plan.name,
                sealed=plan.sealed,
                expected_version=plan.expected_version,
                mutation_id=plan.mutation_id,
                dispatch_id=dispatch.id,
            ),
        )
        return Outcome("succeeded", "secret_set", "secret", f"{answer.secret.name}@{answer.secret.version}")

    async def observe(self, dispatch: Dispatch, execution: Execution) -> Finding:
        """Close the dispatch id and see what had come of it: a version, or never one."""
        return await closed(self._ask, self.needs, dispatch, "secret_set", "secret")

    async def close(self, dispatch: Dispatch) -> Finding | None:
        """A tombstone: a late version is refused."""
        return succeeded(await closed(self._ask, self.needs, dispatch, "secret_set", "secret"))
