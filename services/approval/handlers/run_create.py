"""`run.create`: run a task once, for somebody who may not do so alone.

The dispatch id is the run's idempotency key. The dispatcher keeps it: closing it tells whether a run was made, and
refuses one that would come later.
"""

from __future__ import annotations

from typing import Any

import msgspec

from schemas.canonical import digest
from schemas.endpoints import RUNS_CLOSE, TASKS_GET, TASKS_RUN
from schemas.errors import Ql3Error
from schemas.runs import DispatchClose
from schemas.tasks import Task, TaskRead, TaskRun
from services.approval.executions import Execution
from services.approval.handlers.plans import Plans, read_plan
from services.approval.handlers.port import Ask, Inspection, Now, Outcome, Planned, service_actor
from services.approval.recovery import Finding
from services.approval.store.actions import Dispatch

INPUT_DOMAIN = "ql3.approved-run-inputs.v1"
PREVIEW_CHARS = 512


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The plan as people send it: a task by name or id, of a revision when given, its inputs and priority."""

    task: str
    revision: int | None = None
    inputs: dict[str, Any] | None = None
    priority: int | None = None


class RunCreateHandler:
    """Makes runs through the scheduler, as the task's pinned revision says."""

    action_type = "run.create"
    permission = "run.start"
    needs = "scheduler"

    def __init__(self, ask: Ask, plans: Plans, now: Now) -> None:
        self._ask = ask
        self._plans = plans
        self._now = now

    async def understand(self, project: str, action_ref: str, plan: dict[str, Any]) -> Planned:
        """Pins the task's current revision."""
        wanted = read_plan(plan, Wanted)
        task = await self._task(project, wanted.task)
        if wanted.revision is not None and wanted.revision != task.revision:
            raise Ql3Error("version_conflict", field="plan.revision", data={"revision": task.revision})
        pinned: dict[str, Any] = {
            "schemaVersion": 1,
            "actionType": self.action_type,
            "actionRef": action_ref,
            "projectId": project,
            "taskId": task.id,
            "taskRevision": str(task.revision),
            "executorType": task.spec.terms.placement.executor,
            "priority": task.spec.terms.priority if wanted.priority is None else wanted.priority,
            "taskName": task.name,
            "taskSnapshotRef": task.digest,
            "inputRef": _input_ref(wanted.inputs),
        }
        preview: dict[str, Any] = {
            "task": task.name,
            "task_revision": task.revision,
            "command": _cut(" ".join(task.spec.execution.command)),
            "priority": pinned["priority"],
        }
        if wanted.inputs is not None:
            preview["inputs"] = _cut(msgspec.json.encode(wanted.inputs).decode())
            # Beside the fixed fields of the plan, which hold its digest.
            pinned["inputs"] = wanted.inputs
        return Planned(pinned, preview, dict(task.spec.terms.labels))

    async def inspect(self, dispatch: Dispatch) -> Inspection:
        """The task must still stand at the approved revision."""
        plan = await self._plans.load(dispatch)
        if isinstance(plan, Inspection):
            return plan
        if plan.get("inputRef") != _input_ref(plan.get("inputs")):
            return Inspection(None, "blocked", "action_digest_mismatch")
        try:
            task = await self._task(dispatch.project, plan["taskId"])
        except Ql3Error as error:
            if error.code == "not_found":
                return Inspection(None, "blocked", "approved_run_task_missing")
            raise
        if (str(task.revision), task.digest) != (plan["taskRevision"], plan["taskSnapshotRef"]):
            return Inspection(None, "blocked", "approved_run_plan_changed")
        return Inspection(dispatch.binding.action_digest)

    async def execute(self, dispatch: Dispatch) -> Outcome:
        """Run the task under the dispatch id."""
        plan = await self._plans.bound(dispatch)
        if plan.get("inputRef") != _input_ref(plan.get("inputs")):
            raise Ql3Error("conflict", "The inputs are not the approved ones any more.")
        answer = await self._ask(
            TASKS_RUN,
            TaskRun(
                actor=service_actor(self._now()),
                project=dispatch.project,
                task=plan["taskId"],
                idempotency_key=dispatch.id,
                inputs=plan.get("inputs"),
                priority=plan["priority"],
                trigger_type="approved_action",
                expected_revision=int(plan["taskRevision"]),
            ),
        )
        return Outcome("succeeded", "approved_run_created", "run", answer.run.id)

    async def observe(self, dispatch: Dispatch, execution: Execution) -> Finding:
        """Close the dispatch id and see what had come of it: a run, or never one."""
        found = await self.close(dispatch)
        if found is not None:
            return found
        evidence = digest("ql3.approved-run-closed.v1", {"dispatch_id": dispatch.id})
        return Finding("verified_failed", "approved_run_never_created", evidence)

    async def close(self, dispatch: Dispatch) -> Finding | None:
        """A tombstone receipt: a late create is refused."""
        answer = await self._ask(RUNS_CLOSE, DispatchClose(dispatch_id=dispatch.id, project=dispatch.project))
        if answer.outcome != "released":
            return None
        evidence = answer.evidence_digest or digest("ql3.approved-run-created.v1", {"dispatch_id": dispatch.id})
        return Finding("verified_succeeded", "approved_run_receipt_verified", evidence, ("run_key", dispatch.id))

    async def _task(self, project: str, task: str) -> Task:
        question = TaskRead(actor=service_actor(self._now()), project=project, task=task)
        return (await self._ask(TASKS_GET, question)).task


def _input_ref(inputs: dict[str, Any] | None) -> str | None:
    return None if inputs is None else digest(INPUT_DOMAIN, inputs)


def _cut(text: str) -> str:
    return text if len(text) <= PREVIEW_CHARS else f"{text[:PREVIEW_CHARS]}…"
