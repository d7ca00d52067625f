"""Approved actions as their receiver keeps them: done once, or closed before they were.

A receiver calls `claim` in the transaction that has the effect. Approval calls `actions.close` before it may end an
action as failed: whichever of the two commits first stands, and the other one finds it.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

from schemas.approvals import ActionClose, ActionClosed
from schemas.endpoints import ACTIONS_CLOSE
from schemas.errors import Ql3Error
from services.kit.bus import Caller, Route
from services.kit.database import Database, Statement, Transaction

_INSERT: Final = Statement("""
    INSERT INTO approved_dispatches (dispatch_id, project, outcome, resource, created_at_ms)
    VALUES ($1, $2, $3, $4, $5) ON CONFLICT (dispatch_id) DO NOTHING
""")
_FIND: Final = Statement("""
    SELECT project, outcome, resource, created_at_ms FROM approved_dispatches WHERE dispatch_id = $1
""")


class Kept(NamedTuple):
    """What stands for a dispatch id. `resource` names what was made or changed, null for a closed one."""

    project: str
    outcome: Literal["done", "closed"]
    resource: str | None
    created_at_ms: int


async def claim(tx: Transaction, dispatch_id: str | None, project: str, resource: str) -> bool:
    """Take a dispatch id for the effect of this transaction; False when it had its effect before, and has no other.

    True without an id: what was not approved is not counted. Raises `conflict` when the id was closed or used in
    another project. `resource` is at most 255 characters.
    """
    if dispatch_id is None:
        return True
    taken = await tx.execute(_INSERT, dispatch_id, project, "done", resource[:255], await tx.now_ms())
    if taken == 1:
        return True
    kept = await find(tx, dispatch_id)
    if kept is None or kept.outcome == "closed":
        raise Ql3Error("conflict", "This approved action was closed.")
    if kept.project != project:
        raise Ql3Error("conflict", "This approved action belongs to another project.")
    return False


async def find(tx: Transaction, dispatch_id: str) -> Kept | None:
    """What stands for a dispatch id, None when nothing does."""
    row = await tx.fetch_one(_FIND, dispatch_id)
    return Kept(row["project"], row["outcome"], row["resource"], row["created_at_ms"]) if row else None


async def close(tx: Transaction, question: ActionClose) -> ActionClosed:
    """Refuse this dispatch id from now on, unless it had its effect; says which of the two stands."""
    await tx.execute(_INSERT, question.dispatch_id, question.project, "closed", None, await tx.now_ms())
    kept = await find(tx, question.dispatch_id)
    if kept is None:
        raise Ql3Error("unavailable", "The dispatch id is not settled yet.")
    return ActionClosed(
        dispatch_id=question.dispatch_id, outcome=kept.outcome, resource=kept.resource, at_ms=kept.created_at_ms
    )


def closing_route(service: str, database: Database) -> Route[Any, Any]:
    """`actions.close` of a service that carries out approved actions."""

    async def answer(message: ActionClose, _caller: Caller) -> ActionClosed:
        return await database.transact(lambda tx: close(tx, message))

    return Route(ACTIONS_CLOSE[service], answer)
