"""Concurrency limits that people read, and those that they set apart from a task: a project's, a named key's."""

from __future__ import annotations

from schemas.errors import Ql3Error
from schemas.identity import PolicyDecision
from schemas.runs import ConcurrencyLimit, LimitList, LimitPage, LimitSet
from services.dispatcher.placement import Limit
from services.dispatcher.store import limits
from services.kit import audit
from services.kit.database import Transaction


async def page(tx: Transaction, question: LimitList) -> LimitPage:
    """Limits with how many runs are in work under each. Raises `invalid` on a foreign cursor."""
    kind, found, key = (question.page.cursor or "/").partition("/")
    if not found:
        raise Ql3Error("invalid", "This is not a cursor of this list.", field="page.cursor")
    known = await limits.page(tx, question.project, (kind, key), question.page.limit + 1)
    shown = list(known.items())[: question.page.limit]
    last = shown[-1][0] if shown and len(known) > question.page.limit else None
    return LimitPage(items=await _views(tx, dict(shown)), next=None if last is None else f"{last.kind}/{last.key}")


async def set_limit(tx: Transaction, question: LimitSet, decision: PolicyDecision | str) -> LimitPage:
    """Sets or takes away the limit of a project, or of a named key. What is in work goes on; only placement waits.

    A key has a limit of its tasks' terms too; what is set here stands before it until it is taken away.
    """
    project, key, most = question.project, question.key, question.limit
    limit = Limit(project, "project", project) if key is None else Limit(project, "key", key)
    now = await tx.now_ms()
    if key is None and most is None:
        await limits.drop(tx, limit)
    elif key is None:
        await limits.put(tx, {limit: most or 0}, now)
    elif most is None:
        await limits.unset(tx, limit, now)
    else:
        await limits.set_apart(tx, limit, most, now)
    target = project if key is None else f"{project}/{key}"
    await audit.append(tx, question.actor, "limit.set", project, target, decision, {"limit": most or 0})
    return LimitPage(items=await _views(tx, await limits.read(tx, [limit])), next=None)


async def _views(tx: Transaction, known: dict[Limit, int]) -> list[ConcurrencyLimit]:
    live = await limits.live_by_limit(tx, known)
    return [
        ConcurrencyLimit(project=limit.project, kind=limit.kind, key=limit.key, limit=most, live=live.get(limit, 0))
        for limit, most in known.items()
    ]
