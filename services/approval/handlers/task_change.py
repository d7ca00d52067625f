"""`task.change`: a task's revision N becomes N+1.

The change compares the revision, and the scheduler keeps the dispatch id with it: closing the id tells whether the
change was made, and refuses one that would come later.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from schemas.endpoints import TASKS_GET, TASKS_UPDATE
from schemas.errors import Ql3Error
from schemas.limits import SPEC_BYTES
from schemas.tasks import Change, Task, TaskRead, TaskSpec, TaskUpdate
from services.approval.executions import Execution
from services.approval.handlers.closing import closed, succeeded
from services.approval.handlers.plans import Plans, read_plan
from services.approval.handlers.port import Ask, Inspection, Now, Outcome, Planned, service_actor
from services.approval.recovery import Finding
from services.approval.store.actions import Dispatch
from services.kit.differences import each_difference, plain

CHANGES_BYTES: Final = 6_000
"""What the changes may take of a preview, as JSON; the plan, which is shown beside it, has all of them whole."""
CHANGE_BYTES: Final = 1_500
"""A change that takes more is shown by the beginnings of what was and will be."""
GIST_CHARS: Final = 80


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
        spec = plain(wanted.spec)
        if len(msgspec.json.encode(spec)) > SPEC_BYTES:
            raise Ql3Error("too_large", f"A specification has at most {SPEC_BYTES} bytes.", field="plan.spec")
        preview = {
            "task": task.name,
            "from_revision": task.revision,
            "to_revision": task.revision + 1,
            **_shown(each_difference(plain(task.spec), spec)),
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


def _shown(changes: Iterable[Change]) -> dict[str, Any]:
    """Every change from what is to what would be, as long as there is room; `left_out` counts the others."""
    shown: list[dict[str, Any]] = []
    room, left_out = CHANGES_BYTES, 0
    for change in changes:
        whole = {"path": change.path, "before": change.before, "after": change.after}
        gist = {"path": change.path, "before": _gist(change.before), "after": _gist(change.after)}
        # One long text must not push the others out.
        fits = whole if len(msgspec.json.encode(whole)) <= CHANGE_BYTES else gist
        size = len(msgspec.json.encode(fits))
        if size > room:
            left_out += 1
            continue
        shown.append(fits)
        room -= size
    return {"changes": shown, "left_out": left_out} if left_out else {"changes": shown}


def _gist(value: Any) -> Any:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    if len(text) <= GIST_CHARS:
        return value
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"{text[:GIST_CHARS]}… ({len(text)} characters, sha256 {digest})"
