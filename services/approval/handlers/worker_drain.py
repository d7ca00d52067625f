"""`worker.drain`: take a worker out of work, or let it work again.

The dispatcher keeps the dispatch id: the same order again changes nothing, whatever people did meanwhile.
"""

from __future__ import annotations

from typing import Any

import msgspec

from schemas.endpoints import WORKERS_DRAIN, WORKERS_LIST
from schemas.errors import Ql3Error
from schemas.identity import DEFAULT_PROJECT
from schemas.ids import WorkerId
from schemas.limits import LIST_ITEMS
from schemas.paging import Page
from schemas.workers import Worker, WorkerDrain, WorkerList
from services.approval.executions import Execution
from services.approval.handlers.closing import closed, succeeded
from services.approval.handlers.plans import Plans, read_plan
from services.approval.handlers.port import Ask, Inspection, Now, Outcome, Planned, service_actor
from services.approval.recovery import Finding
from services.approval.store.actions import Dispatch


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The plan as people send it."""

    worker: WorkerId
    drain: bool = True


class WorkerDrainHandler:
    """Drains workers through the dispatcher. Workers belong to the whole installation, so to project `default`."""

    action_type = "worker.drain"
    permission = "worker.manage"
    needs = "dispatcher"

    def __init__(self, ask: Ask, plans: Plans, now: Now) -> None:
        self._ask = ask
        self._plans = plans
        self._now = now

    async def understand(self, project: str, action_ref: str, plan: dict[str, Any]) -> Planned:
        """The worker must be there."""
        wanted = read_plan(plan, Wanted)
        if project != DEFAULT_PROJECT:
            raise Ql3Error("invalid", "Workers belong to project default.", field="project")
        worker = await self._worker(wanted.worker)
        if worker is None:
            raise Ql3Error("not_found", "There is no such worker.", field="plan.worker")
        preview = {"worker": worker.id, "then": "draining" if wanted.drain else "online", "now": worker.status}
        return Planned(msgspec.to_builtins(wanted), preview)

    async def inspect(self, dispatch: Dispatch) -> Inspection:
        """The plan must be the approved one, the worker still there."""
        plan = await self._plans.load(dispatch)
        if isinstance(plan, Inspection):
            return plan
        if await self._worker(plan["worker"]) is None:
            return Inspection(None, "blocked", "worker_missing")
        return Inspection(dispatch.binding.action_digest)

    async def execute(self, dispatch: Dispatch) -> Outcome:
        """Drain it, or let it work again."""
        plan = msgspec.convert(await self._plans.bound(dispatch), Wanted)
        question = WorkerDrain(
            actor=service_actor(self._now()), worker=plan.worker, drain=plan.drain, dispatch_id=dispatch.id
        )
        answer = await self._ask(WORKERS_DRAIN, question)
        return Outcome("succeeded", "worker_drained" if plan.drain else "worker_resumed", "worker", answer.worker.id)

    async def observe(self, dispatch: Dispatch, execution: Execution) -> Finding:
        """Close the dispatch id and see what had come of it: the wanted state, or never by this."""
        return await closed(self._ask, self.needs, dispatch, "worker_drain", "worker")

    async def close(self, dispatch: Dispatch) -> Finding | None:
        """A tombstone: a late order is refused."""
        return succeeded(await closed(self._ask, self.needs, dispatch, "worker_drain", "worker"))

    async def _worker(self, worker_id: str) -> Worker | None:
        cursor: str | None = None
        while True:
            page = Page(limit=LIST_ITEMS, cursor=cursor)
            answer = await self._ask(WORKERS_LIST, WorkerList(actor=service_actor(self._now()), page=page))
            for worker in answer.items:
                if worker.id == worker_id:
                    return worker
            if answer.next is None:
                return None
            cursor = answer.next
