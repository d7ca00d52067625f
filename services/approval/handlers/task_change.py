"""`task.change`: a task's revision N becomes N+1.

The change compares the revision, and the scheduler keeps the dispatch id with it: closing the id tells whether the
change was made, and refuses one that would come later.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from schemas.endpoints import TASKS_GET, TASKS_UPDATE
from schemas.errors import Ql3Error
from schemas.limits import SPEC_BYTES
from schemas.tasks import Task, TaskRead, TaskSpec, TaskUpdate
from services.approval.executions import Execution
from services.approval.handlers.closing import closed, succeeded
from services.approval.handlers.plans import Plans, read_plan
from services.approval.handlers.port import Ask, Inspection, Now, Outcome, Planned, service_actor
from services.approval.recovery import Finding
from services.approval.store.actions import Dispatch

PREVIEW_CHARS: Final = 512


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The plan as people send it: a task by name or id, its revision now, and the whole new specification."""

    task: str
    expected_revision: int
    spec: TaskSpec


class TaskChangeHandler:
    """Changes tasks through the scheduler."""

    action_type = "task.change"
    permission = "task.update"
    needs = "scheduler"

    def __init__(self, ask: Ask, plans: Plans, now: Now) -> None:
        self._ask = ask
        self._plans = plans
        self._now = now

    async def understand(self, project: str, action_ref: str, plan: dict[str, Any]) -> Planned:
        """The task must stand at the revision that is to be changed."""
        wanted = read_plan(plan, Wanted)
        task = await self._task(project, wanted.task)
        if task.revision != wanted.expected_revision:
            raise Ql3Error("version_conflict", field="plan.expected_revision", data={"revision": task.revision})
        spec = msgspec.to_builtins(wanted.spec)
        if len(msgspec.json.encode(spec)) > SPEC_BYTES:
            raise Ql3Error("too_large", f"A specification has at most {SPEC_BYTES} bytes.", field="plan.spec")
        before = " ".join(task.spec.execution.command)
        after = " ".join(wanted.spec.execution.command)
        preview = {
            "task": task.name,
            "from_revision": task.revision,
            "to_revision": task.revision + 1,
            "command_now": before[:PREVIEW_CHARS],
            "command_then": after[:PREVIEW_CHARS],
            "changed": sorted(
                name
                for name in ("execution", "terms", "title", "folder", "notes", "parameters")
                if getattr(task.spec, name) != getattr(wanted.spec, name)
            ),
        }
        pinned = {"task_id": task.id, "expected_revision": task.revision, "spec": spec}
        return Planned(pinned, preview, dict(task.spec.terms.labels))

    async def inspect(self, dispatch: Dispatch) -> Inspection:
        """Somebody may have changed the task meanwhile."""
        plan = await self._plans.load(dispatch)
        if isinstance(plan, Inspection):
            return plan
        try:
            task = await self._task(dispatch.project, plan["task_id"])
        except Ql3Error as error:
            if error.code == "not_found":
                return Inspection(None, "blocked", "task_missing")
            raise
        if task.revision != plan["expected_revision"]:
            return Inspection(None, "blocked", "task_changed_meanwhile")
        return Inspection(dispatch.binding.action_digest)

    async def execute(self, dispatch: Dispatch) -> Outcome:
        """Store revision N+1, with the dispatch id as the mutation's."""
        plan = await self._plans.bound(dispatch)
        answer = await self._ask(
            TASKS_UPDATE,
            TaskUpdate(
                actor=service_actor(self._now()),
                project=dispatch.project,
                task=plan["task_id"],
                expected_revision=plan["expected_revision"],
                spec=msgspec.convert(plan["spec"], TaskSpec),
                mutation_id=dispatch.id,
                dispatch_id=dispatch.id,
            ),
        )
        return Outcome("succeeded", "task_changed", "task", f"{answer.task.id}@{answer.task.revision}")

    async def observe(self, dispatch: Dispatch, execution: Execution) -> Finding:
        """Close the dispatch id and see what had come of it: the revision, or never one."""
        return await closed(self._ask, self.needs, dispatch, "task_change", "task")

    async def close(self, dispatch: Dispatch) -> Finding | None:
        """A tombstone: a late change is refused."""
        return succeeded(await closed(self._ask, self.needs, dispatch, "task_change", "task"))

    async def _task(self, project: str, task: str, revision: int | None = None) -> Task:
        question = TaskRead(actor=service_actor(self._now()), project=project, task=task, revision=revision)
        return (await self._ask(TASKS_GET, question)).task
