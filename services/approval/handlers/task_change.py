"""`task.change`: a task's revision N becomes N+1.

The change compares the revision, and the scheduler keeps the dispatch id with it: closing the id tells whether the
change was made, and refuses one that would come later.
"""

from __future__ import annotations

import hashlib
from itertools import islice
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
from services.kit.differences import each_difference, plain

CHANGES: Final = 200
CHANGES_BYTES: Final = 7_000
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
            **_shown(plain(task.spec), spec),
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


def _shown(before: Any, after: Any) -> dict[str, Any]:
    """Every difference, as whole as there is room for: none is left out. `cut` says that the plan shows more."""
    found = list(islice(each_difference(before, after), CHANGES))
    whole = [_row(one.path, one.before, one.after) for one in found]
    gists = [_row(one.path, _gist(one.before), _gist(one.after)) for one in found]
    # One long text must not push the others out.
    short = [
        row if len(msgspec.json.encode(row)) <= CHANGE_BYTES else gist for row, gist in zip(whole, gists, strict=True)
    ]
    for rows in (short, gists):
        if len(found) < CHANGES and len(msgspec.json.encode(rows)) <= CHANGES_BYTES:
            return {"changes": rows} if rows == whole else {"changes": rows, "cut": True}
    old, new = _parts(before), _parts(after)
    changed = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    return {"changes": [_row(name, _digest(old.get(name)), _digest(new.get(name))) for name in changed], "cut": True}


def _row(path: str, before: Any, after: Any) -> dict[str, Any]:
    return {"path": path, "before": before, "after": after}


def _parts(spec: dict[str, Any]) -> dict[str, Any]:
    """The fields of a specification, those of its parts apart; few, whatever they hold."""
    found: dict[str, Any] = {}
    for name, value in spec.items():
        if name in ("execution", "terms"):
            found |= {f"{name}.{inner}": part for inner, part in value.items()}
        else:
            found[name] = value
    return found


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _gist(value: Any) -> Any:
    text = _text(value)
    return value if len(text) <= GIST_CHARS else f"{text[:GIST_CHARS]}… {_digest(value)}"


def _digest(value: Any) -> Any:
    if value is None:
        return None
    text = _text(value)
    return f"({len(text)} characters, sha256 {hashlib.sha256(text.encode()).hexdigest()})"
