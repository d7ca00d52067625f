"""The shelf of stored plans, as handlers read it: bound to what was approved, or refused."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from schemas.errors import Ql3Error
from schemas.strict import read_plain
from services.approval.digests import plan_digest
from services.approval.handlers.port import Inspection
from services.approval.store import requests as rows
from services.approval.store.actions import Dispatch
from services.kit.database import Database

P = TypeVar("P", bound=msgspec.Struct)


class Plans:
    """Plans by the reference of their action."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def load(self, dispatch: Dispatch) -> dict[str, Any] | Inspection:
        """The plan behind a dispatch, its digest computed anew; or why it cannot be used."""
        stored = await self._database.read(lambda tx: rows.plan(tx, dispatch.binding.action_ref))
        if stored is None:
            return Inspection(None, "retry", "plan_missing")
        if (stored.project, stored.action_type) != (dispatch.project, dispatch.binding.action_type):
            return Inspection(None, "blocked", "plan_binding_invalid")
        if plan_digest(stored.action_type, stored.plan) != dispatch.binding.action_digest:
            return Inspection(None, "blocked", "action_digest_mismatch")
        return stored.plan

    async def bound(self, dispatch: Dispatch) -> dict[str, Any]:
        """The plan behind a dispatch. Raises `conflict` when it is not the approved one any more."""
        plan = await self.load(dispatch)
        if isinstance(plan, Inspection):
            raise Ql3Error("conflict", "The plan is not the approved one any more.", data={"code": plan.code})
        return plan


def read_plan(plan: dict[str, Any], wanted: type[P]) -> P:
    """A plan that people sent. Raises `invalid` or `unknown_field` below `plan`."""
    try:
        return read_plain(plan, wanted)
    except Ql3Error as error:
        field = f"plan.{error.field}" if error.field else "plan"
        raise Ql3Error(error.code, error.detail, field=field) from error
