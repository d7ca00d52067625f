"""Tasks that are kept in files: bringing what is stored to what the files say, and no further."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from schemas.errors import Ql3Error
from schemas.identity import PolicyDecision
from schemas.tasks import ApplyAnswer, Change, TaskCreate, TaskEnable, TaskFile, TaskOutcome, TasksApply, TaskUpdate
from schemas.triggers import TriggerCreate, TriggerDelete, TriggerSpec, TriggerUpdate
from services.kit.clock import Clock
from services.kit.database import Database, Row, Transaction, UniqueViolation
from services.kit.differences import differences, plain
from services.scheduler import tasks as rules
from services.scheduler import triggers as trigger_rules
from services.scheduler.catalogue import Catalogue
from services.scheduler.chains import refuse_cycle
from services.scheduler.store import tasks as store
from services.scheduler.store import triggers as trigger_store
from services.scheduler.timetable import Timetable

KEPT: Final = frozenset({"webhook"})
"""Kinds that no file can make: their secret is known to who made them."""


class _DryRun(Exception):  # noqa: N818 - it ends a transaction that is to leave nothing
    def __init__(self, answer: ApplyAnswer) -> None:
        self.answer = answer


class Files:
    """Applies files. Everything happens in one transaction; a dry run does the same and takes it back."""

    def __init__(self, database: Database, clock: Clock, catalogue: Catalogue, timetable: Timetable) -> None:
        self._database = database
        self._clock = clock
        self._catalogue = catalogue
        self._timetable = timetable

    async def apply(self, ask: TasksApply, decision: PolicyDecision) -> ApplyAnswer:
        """What became of each task. Raises what is wrong with the first wrong one, under its name."""
        names = [task.name for task in ask.tasks]
        for name in names:
            if names.count(name) > 1:
                raise Ql3Error("invalid", "The task stands there twice.", field=name)

        async def work(tx: Transaction) -> ApplyAnswer:
            items: list[TaskOutcome] = []
            for task in ask.tasks:
                try:
                    items.append(await self._one(tx, ask, task, decision))
                except Ql3Error as error:
                    field = f"{task.name}.{error.field}" if error.field else task.name
                    raise Ql3Error(error.code, error.detail, field=field, data=error.data) from error
            answer = ApplyAnswer(items=await self._followed(tx, ask.project, items), dry_run=ask.dry_run)
            if ask.dry_run:
                raise _DryRun(answer)
            return answer

        try:
            return await self._database.transact(work)
        except _DryRun as done:
            return done.answer
        except UniqueViolation as error:
            raise Ql3Error("version_conflict", "Somebody made the same task meanwhile.") from error

    async def _one(self, tx: Transaction, ask: TasksApply, task: TaskFile, decision: PolicyDecision) -> TaskOutcome:
        wanted = trigger_rules.read_specs(task.triggers, self._clock.now_ms())
        row = await store.find(tx, ask.project, task.name)
        if row is None:
            made = await self._catalogue.creating(
                TaskCreate(
                    actor=ask.actor,
                    project=ask.project,
                    name=task.name,
                    spec=task.spec,
                    triggers=[plain(spec) for spec in wanted],
                    enabled=task.enabled,
                ),
                decision,
                later=True,
            )(tx)
            after = {"spec": plain(task.spec), "triggers": [plain(spec) for spec in wanted], "enabled": task.enabled}
            return TaskOutcome(
                name=task.name, action="created", changes=differences({}, after)[0], warnings=made.warnings
            )
        changes = await self._spec(tx, ask, task, row, decision)
        changes += await self._triggers(tx, ask, task, row["id"], wanted, decision)
        if bool(row["enabled"]) != task.enabled:
            question = TaskEnable(actor=ask.actor, project=ask.project, task=row["id"], enabled=task.enabled)
            await self._catalogue.enabling(question, decision)(tx)
            changes.append(Change(path="enabled", before=bool(row["enabled"]), after=task.enabled))
        action = "changed" if changes else "unchanged"
        return TaskOutcome(name=task.name, action=action, changes=changes, warnings=rules.check(task.spec))

    async def _followed(self, tx: Transaction, project: str, items: list[TaskOutcome]) -> list[TaskOutcome]:
        """What follows what is looked at when all is so: neither the order of files nor that of changes counts."""
        absent: dict[str, list[str]] = {}
        ids = [row["id"] for row in await store.find_many(tx, project, [item.name for item in items])]
        for row in await trigger_store.of_tasks(tx, ids):
            if row["kind"] == "after_task":
                name, spec = row["task_name"], _as_is(row)
                with trigger_rules.placed(f"{name}.triggers"):
                    if not await refuse_cycle(tx, project, name, spec, absent=True):
                        absent.setdefault(name, []).append(f"There is no task `{spec.after_task}` to follow yet.")
        return [msgspec.structs.replace(item, warnings=[*item.warnings, *absent.get(item.name, [])]) for item in items]

    async def _spec(
        self, tx: Transaction, ask: TasksApply, task: TaskFile, row: Row, decision: PolicyDecision
    ) -> list[Change]:
        stored = rules.read_spec(row["spec"], ask.project, row["id"], row["revision"], row["content_digest"])
        changes, _ = differences({"spec": plain(stored)}, {"spec": plain(task.spec)})
        if changes:
            question = TaskUpdate(
                actor=ask.actor,
                project=ask.project,
                task=row["id"],
                expected_revision=row["revision"],
                spec=task.spec,
            )
            await self._catalogue.updating(question, decision)(tx)
        return changes

    async def _triggers(
        self,
        tx: Transaction,
        ask: TasksApply,
        task: TaskFile,
        task_id: str,
        wanted: list[TriggerSpec],
        decision: PolicyDecision,
    ) -> list[Change]:
        """What is so already stays; of the others one of the same kind is changed, so that its history goes on."""
        stored = [(row, _as_is(row)) for row in await trigger_store.of_tasks(tx, [task_id]) if row["kind"] not in KEPT]
        missing: list[TriggerSpec] = []
        for spec in wanted:
            same = next((pair for pair in stored if pair[1] == spec), None)
            if same is None:
                missing.append(spec)
            else:
                stored.remove(same)
        changes: list[Change] = []
        for spec in missing:
            old = next((pair for pair in stored if pair[0]["kind"] == spec.kind), None)
            if old is None:
                changes.append(Change(path="triggers", before=None, after=plain(spec)))
                made = TriggerCreate(actor=ask.actor, project=ask.project, task=task_id, spec=spec)
                await self._timetable.creating(made, decision, later=True)(tx)
                continue
            stored.remove(old)
            row, before = old
            changes.append(Change(path="triggers", before=plain(before), after=plain(spec)))
            changed = TriggerUpdate(
                actor=ask.actor,
                project=ask.project,
                trigger=row["id"],
                expected_revision=row["revision"],
                spec=spec,
            )
            await self._timetable.updating(changed, decision, later=True)(tx)
        for row, spec in stored:
            changes.append(Change(path="triggers", before=plain(spec), after=None))
            gone = TriggerDelete(actor=ask.actor, project=ask.project, trigger=row["id"])
            await self._timetable.deleting(gone, decision)(tx)
        return changes


def _as_is(row: Row) -> TriggerSpec:
    """A stored trigger as a file would say it: enabled as it is now."""
    spec: Any = msgspec.json.decode(row["spec"], type=TriggerSpec)
    return msgspec.structs.replace(spec, enabled=bool(row["enabled"]))
