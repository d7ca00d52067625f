"""Tasks: the transactions that make, change, enable, disable and delete them, and the reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from schemas.errors import Ql3Error
from schemas.identity import PolicyDecision
from schemas.subjects import event
from schemas.tasks import (
    DiffAnswer,
    RevisionList,
    RevisionPage,
    Task,
    TaskChanged,
    TaskCreate,
    TaskDelete,
    TaskDiff,
    TaskEnable,
    TaskList,
    TaskPage,
    TaskRead,
    TaskRestore,
    TaskSpec,
    TaskUpdate,
)
from services.kit import audit, dispatches, outbox
from services.kit.clock import Clock
from services.kit.database import Database, Row, Transaction, UniqueViolation
from services.kit.differences import differences, plain
from services.kit.ids import new_id
from services.scheduler import ahead, scheduling, triggers
from services.scheduler import tasks as rules
from services.scheduler.bells import BELL, RING_BELL
from services.scheduler.chains import refuse_cycle
from services.scheduler.store import admissions as admission_store
from services.scheduler.store import schedules
from services.scheduler.store import tasks as store
from services.scheduler.store import triggers as trigger_store
from services.scheduler.views import revision_view, task_view

_BEFORE_ALL: Final = ""
Work = Callable[[Transaction], Awaitable[Task]]
"""A part of a transaction that answers the task as it stands after it."""


class Catalogue:
    """What people do with tasks. Each mutation is one transaction with its audit row."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def create(self, ask: TaskCreate, decision: PolicyDecision) -> Task:
        """A new task at revision 1 with its triggers. Raises `name_taken`, `mutation_conflict`, or what is wrong."""
        return await self._mutate(self.creating(ask, decision))

    def creating(self, ask: TaskCreate, decision: PolicyDecision, *, later: bool = False) -> Work:
        """The same, as a part of a transaction; with `later` that looks itself what follows what, at its end."""
        warnings = rules.check(ask.spec)
        specs = triggers.read_specs(ask.triggers, self._clock.now_ms())
        for index, trigger in enumerate(specs):
            with triggers.placed(f"triggers[{index}]"):
                triggers.check_given(trigger, ask.spec.parameters)
        request = rules.request_digest(
            "tasks.create",
            {
                "project": ask.project,
                "name": ask.name,
                "spec": ask.spec,
                "triggers": specs,
                "enabled": ask.enabled,
            },
        )

        async def work(tx: Transaction) -> Task:
            if (known := await _replayed(tx, ask.mutation_id, request, ask.project)) is not None:
                return await _view(tx, known, warnings)
            now_ms = self._clock.now_ms()
            task_id = new_id()
            compiled = rules.compile_revision(ask.project, task_id, ask.name, 1, ask.spec)
            await store.insert(
                tx, task_id, ask.project, ask.name, enabled=ask.enabled, folder=ask.spec.folder, now_ms=now_ms
            )
            await store.insert_revision(
                tx,
                compiled,
                mutation_id=ask.mutation_id,
                request_digest=request,
                created_by=(ask.actor.type, ask.actor.id),
                now_ms=now_ms,
            )
            for spec in specs:
                await scheduling.add(
                    tx,
                    project=ask.project,
                    task_id=task_id,
                    task_enabled=ask.enabled,
                    spec=spec,
                    actor=ask.actor,
                    now_ms=now_ms,
                    look_now=decision.has_rules,
                )
            for index, spec in enumerate(specs):
                if spec.kind == "after_task" and not later:
                    with triggers.placed(f"triggers[{index}]"):
                        await refuse_cycle(tx, ask.project, ask.name, spec, absent=True)
            detail = {"name": ask.name, "digest": compiled.spec_digest, "triggers": len(specs)}
            await audit.append(tx, ask.actor, "task.create", ask.project, task_id, decision, detail)
            return await self._changed(tx, ask.project, task_id, warnings)

        return work

    async def update(self, ask: TaskUpdate, decision: PolicyDecision) -> Task:
        """A new revision; what runs already is not touched. Raises `version_conflict` when somebody was quicker."""
        return await self._mutate(self.updating(ask, decision))

    def updating(self, ask: TaskUpdate, decision: PolicyDecision) -> Work:
        """The same, as a part of a transaction."""
        warnings = rules.check(ask.spec)
        content = {"task": ask.task, "expected": ask.expected_revision, "spec": ask.spec}
        request = rules.request_digest("tasks.update", content)

        async def work(tx: Transaction) -> Task:
            if (known := await _replayed(tx, ask.mutation_id, request, ask.project)) is not None:
                return await _view(tx, known, warnings)
            now_ms = self._clock.now_ms()
            row = await _find(tx, ask.project, ask.task)
            # What asks for an approval ahead of its time asks about the old revision.
            await schedules.lock_of_task(tx, row["id"])
            await ahead.take_back(tx, row["id"], None, now_ms)
            if decision.has_rules:
                await schedules.look_now(tx, row["id"], now_ms)
                tx.after_commit(tx.database.bell(BELL).set)
            revision = ask.expected_revision + 1
            if row["revision"] != ask.expected_revision or not await store.advance(
                tx, row["id"], ask.expected_revision, ask.spec.folder, now_ms
            ):
                raise Ql3Error("version_conflict", field="expected_revision", data={"revision": row["revision"]})
            if not await dispatches.claim(tx, ask.dispatch_id, ask.project, f"{row['id']}@{revision}"):
                raise Ql3Error("mutation_conflict", field="dispatch_id")
            compiled = rules.compile_revision(ask.project, row["id"], row["name"], revision, ask.spec)
            await store.insert_revision(
                tx,
                compiled,
                mutation_id=ask.mutation_id,
                request_digest=request,
                created_by=(ask.actor.type, ask.actor.id),
                now_ms=now_ms,
            )
            detail = {"revision": revision, "digest": compiled.spec_digest}
            await audit.append(tx, ask.actor, "task.update", ask.project, row["id"], decision, detail)
            return await self._changed(tx, ask.project, row["id"], warnings)

        return work

    async def enable(self, ask: TaskEnable, decision: PolicyDecision) -> Task:
        """Enable or disable. A disabled task starts nothing, also what was admitted for the next second."""
        return await self._mutate(self.enabling(ask, decision))

    def enabling(self, ask: TaskEnable, decision: PolicyDecision) -> Work:
        """The same, as a part of a transaction."""

        async def work(tx: Transaction) -> Task:
            now_ms = self._clock.now_ms()
            row = await _find(tx, ask.project, ask.task)
            rows = await schedules.lock_of_task(tx, row["id"])
            if not await store.set_enabled(tx, row["id"], ask.enabled, now_ms):
                return await _view(tx, row, [])
            if ask.enabled:
                for schedule in rows:
                    if schedule["stopped_by"] == "task_disabled":
                        await scheduling.go_on(tx, schedule, None, now_ms, look_now=decision.has_rules)
            else:
                if await ahead.take_back(tx, row["id"], None, now_ms):
                    rows = await schedules.lock_of_task(tx, row["id"])
                withdrawn = await admission_store.withdraw_of_task(tx, row["id"], now_ms, await tx.now_ms())
                await scheduling.stop(tx, rows, "task_disabled", withdrawn, now_ms)
            action = "task.enable" if ask.enabled else "task.disable"
            await audit.append(tx, ask.actor, action, ask.project, row["id"], decision)
            return await self._changed(tx, ask.project, row["id"], [])

        return work

    async def delete(self, ask: TaskDelete, decision: PolicyDecision) -> Task:
        """Take a task and its triggers out of use; its name is free again, its revisions and runs stay readable."""
        return await self._mutate(self.deleting(ask, decision))

    def deleting(self, ask: TaskDelete, decision: PolicyDecision) -> Work:
        """The same, as a part of a transaction."""

        async def work(tx: Transaction) -> Task:
            now_ms = self._clock.now_ms()
            row = await _find(tx, ask.project, ask.task)
            await schedules.lock_of_task(tx, row["id"])
            if not await store.delete(tx, row["id"], now_ms):
                raise Ql3Error("not_found", field="task")
            if await admission_store.withdraw_of_task(tx, row["id"], now_ms, await tx.now_ms()):
                tx.after_commit(tx.database.bell(RING_BELL).set)
            await schedules.drop_of_task(tx, row["id"])
            await trigger_store.delete_of_task(tx, row["id"], now_ms)
            await audit.append(tx, ask.actor, "task.delete", ask.project, row["id"], decision, {"name": row["name"]})
            return await self._changed(tx, ask.project, row["id"], [])

        return work

    async def get(self, ask: TaskRead) -> Task:
        """One task by name or id, at its current or at a fixed revision; a deleted one by its id."""

        async def work(tx: Transaction) -> Task:
            row = await store.find(tx, ask.project, ask.task)
            if row is None:
                raise _not_found()
            view = await _view(tx, row, [])
            if ask.revision is None or ask.revision == row["revision"]:
                return view
            spec = await _spec_at(tx, row, ask.revision, "revision")
            old = await store.at_revision(tx, row["id"], ask.revision)
            digest = old["content_digest"] if old else ""
            return msgspec.structs.replace(view, spec=spec, revision=ask.revision, digest=digest)

        return await self._database.read(work)

    async def revisions(self, ask: RevisionList) -> RevisionPage:
        """Revisions of a task, newest first."""

        async def work(tx: Transaction) -> RevisionPage:
            row = await store.find(tx, ask.project, ask.task)
            if row is None:
                raise _not_found()
            before = _revision_cursor(ask.page.cursor)
            rows = await store.revisions(tx, row["id"], before, ask.page.limit + 1)
            shown = rows[: ask.page.limit]
            more = str(shown[-1]["revision"]) if len(rows) > ask.page.limit else None
            return RevisionPage(items=[revision_view(one) for one in shown], next=more)

        return await self._database.read(work)

    async def diff(self, ask: TaskDiff) -> DiffAnswer:
        """What differs between two revisions of a task."""

        async def work(tx: Transaction) -> DiffAnswer:
            row = await store.find(tx, ask.project, ask.task)
            if row is None:
                raise _not_found()
            before = await _spec_at(tx, row, ask.before, "before")
            after = await _spec_at(tx, row, ask.after, "after")
            changes, more = differences(plain(before), plain(after))
            return DiffAnswer(changes=changes, more=more)

        return await self._database.read(work)

    async def restore(self, ask: TaskRestore, decision: PolicyDecision) -> Task:
        """A new revision with the content of an old one."""

        async def old(tx: Transaction) -> TaskSpec:
            return await _spec_at(tx, await _find(tx, ask.project, ask.task), ask.revision, "revision")

        question = TaskUpdate(
            actor=ask.actor,
            project=ask.project,
            task=ask.task,
            expected_revision=ask.expected_revision,
            spec=await self._database.read(old),
            mutation_id=ask.mutation_id,
        )
        return await self.update(question, decision)

    async def list(self, ask: TaskList) -> TaskPage:
        """Tasks by name, all or those of a folder or with a label (`name=value`)."""
        label = _label(ask.label) if ask.label is not None else None

        async def work(tx: Transaction) -> TaskPage:
            after = ask.page.cursor or _BEFORE_ALL
            rows = await store.page(tx, ask.project, after, ask.page.limit + 1, folder=ask.folder, label=label)
            shown = rows[: ask.page.limit]
            of_task: defaultdict[str, list[Row]] = defaultdict(list)
            for trigger in await trigger_store.of_tasks(tx, [row["id"] for row in shown]):
                of_task[trigger["task_id"]].append(trigger)
            more = shown[-1]["name"] if len(rows) > ask.page.limit else None
            return TaskPage(items=[task_view(row, of_task[row["id"]]) for row in shown], next=more)

        return await self._database.read(work)

    async def labels(self, project: str, task: str) -> dict[str, str]:
        """The labels of a task, for the project's own rules. Raises `not_found`."""
        row = await self._database.read(lambda tx: _find(tx, project, task))
        return rules.read_spec(row["spec"], project, row["id"], row["revision"], row["content_digest"]).terms.labels

    async def _changed(self, tx: Transaction, project: str, task_id: str, warnings: list[str]) -> Task:
        row = await store.find(tx, project, task_id)
        assert row is not None
        fact = TaskChanged(
            project=project,
            task_id=task_id,
            name=row["name"],
            revision=row["revision"],
            version=row["version"],
            enabled=bool(row["enabled"]),
            deleted=bool(row["deleted"]),
            at_ms=row["updated_at_ms"],
            digest=row["content_digest"],
        )
        await outbox.fact(tx, event("task", project, task_id, "changed"), fact)
        return await _view(tx, row, warnings)

    async def _mutate(self, work: Work) -> Task:
        try:
            return await self._database.transact(work)
        except (UniqueViolation, Ql3Error) as error:
            if isinstance(error, Ql3Error) and error.code != "version_conflict":
                raise
            # Somebody stored the same mutation id, name or revision meanwhile: now it is found.
            try:
                return await self._database.transact(work)
            except UniqueViolation as taken:
                raise Ql3Error("name_taken", field="name") from taken


def _not_found() -> Ql3Error:
    return Ql3Error("not_found", "There is no such task in this project.", field="task")


async def _find(tx: Transaction, project: str, task: str) -> Row:
    row = await store.find(tx, project, task)
    if row is None or row["deleted"]:
        raise _not_found()
    return row


async def _spec_at(tx: Transaction, row: Row, revision: int, field: str) -> TaskSpec:
    old = await store.at_revision(tx, row["id"], revision)
    if old is None:
        raise Ql3Error("not_found", "The task has no such revision.", field=field)
    return rules.read_spec(old["spec"], row["project"], row["id"], revision, old["content_digest"])


def _revision_cursor(cursor: str | None) -> int:
    if cursor is None:
        return 2**53
    if not (cursor.isascii() and cursor.isdecimal() and len(cursor) < 17):
        raise Ql3Error("invalid", "The cursor is not one of ours.", field="page.cursor")
    return int(cursor)


async def _view(tx: Transaction, row: Row, warnings: list[str]) -> Task:
    return task_view(row, await trigger_store.of_tasks(tx, [row["id"]]), warnings)


async def _replayed(tx: Transaction, mutation_id: str | None, request: str, project: str) -> Row | None:
    known = await store.by_mutation(tx, mutation_id) if mutation_id else None
    if known is None:
        return None
    if known["request_digest"] != request or known["project"] != project:
        raise Ql3Error("mutation_conflict", field="mutation_id")
    return await store.find(tx, project, known["task_id"])


def _label(text: str) -> tuple[str, str]:
    name, found, value = text.partition("=")
    if not found or not name:
        raise Ql3Error("invalid", "Write a label as name=value.", field="label")
    return name, value
