"""What people do with triggers: making, changing, stopping and listing them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from schemas.errors import Ql3Error
from schemas.identity import PolicyDecision
from schemas.triggers import (
    MissedList,
    MissedPage,
    Trigger,
    TriggerCreate,
    TriggerDelete,
    TriggerEnable,
    TriggerList,
    TriggerPage,
    TriggerSpec,
    TriggerUpdate,
    WebhookRotate,
)
from services.kit import audit
from services.kit.clock import Clock
from services.kit.database import Database, Row, Transaction, UniqueViolation
from services.scheduler import ahead, scheduling
from services.scheduler import triggers as rules
from services.scheduler.bells import RING_BELL
from services.scheduler.chains import refuse_cycle
from services.scheduler.decisions import settle_stop
from services.scheduler.store import admissions as admission_store
from services.scheduler.store import schedules
from services.scheduler.store import tasks as task_store
from services.scheduler.store import triggers as store
from services.scheduler.tasks import read_spec, request_digest
from services.scheduler.views import missed_view, trigger_view

TRIGGERS_PER_TASK: Final = 32
_BEFORE_ALL: Final = ""
Work = Callable[[Transaction], Awaitable[Trigger]]
"""A part of a transaction that answers the trigger as it stands after it."""
_AFTER_ALL: Final = "g"


class Timetable:
    """What people do with triggers. Each mutation is one transaction with its audit row."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def create(self, ask: TriggerCreate, decision: PolicyDecision) -> Trigger:
        """Add a trigger to a task."""
        return await self._mutate(self.creating(ask, decision))

    def creating(self, ask: TriggerCreate, decision: PolicyDecision, *, later: bool = False) -> Work:
        """The same, as a part of a transaction; with `later` that looks itself what follows what, at its end."""
        with rules.placed("spec"):
            spec = rules.check(ask.spec, self._clock.now_ms())
            rules.spec_text(spec)
        request = request_digest("triggers.create", {"project": ask.project, "task": ask.task, "spec": spec})
        # The digest of the secret is not part of it: a repeat comes with another secret, and the first one stays.

        async def work(tx: Transaction) -> Trigger:
            if (known := await _replayed(tx, ask.mutation_id, request, ask.project)) is not None:
                return trigger_view(known)
            task = await _task(tx, ask.project, ask.task)
            now_ms = self._clock.now_ms()
            # The task's row is held, so that no two triggers pass the bound and nobody disables it meanwhile.
            held = await task_store.lock(tx, task["id"])
            _check_inputs(task, spec)
            if await store.count_of_task(tx, task["id"]) >= TRIGGERS_PER_TASK:
                raise Ql3Error("too_large", f"A task has at most {TRIGGERS_PER_TASK} triggers.", field="task")
            trigger_id = await scheduling.add(
                tx,
                project=ask.project,
                task_id=task["id"],
                task_enabled=bool(held and held["enabled"]),
                spec=spec,
                actor=ask.actor,
                now_ms=now_ms,
                mutation_id=ask.mutation_id,
                request=request,
                token_digest=ask.token_digest,
                look_now=decision.has_rules,
            )
            if spec.kind == "after_task" and not later:
                with rules.placed("spec"):
                    await refuse_cycle(tx, ask.project, task["name"], spec)
            await audit.append(
                tx, ask.actor, "trigger.create", ask.project, trigger_id, decision, {"task_id": task["id"]}
            )
            return await _view(tx, ask.project, trigger_id)

        return work

    async def update(self, ask: TriggerUpdate, decision: PolicyDecision) -> Trigger:
        """A new revision. Its next instant is strictly after the edit and after what was admitted."""
        return await self._mutate(self.updating(ask, decision))

    def updating(self, ask: TriggerUpdate, decision: PolicyDecision, *, later: bool = False) -> Work:
        """The same, as a part of a transaction; with `later` that looks itself what follows what, at its end."""
        with rules.placed("spec"):
            spec = rules.check(ask.spec, self._clock.now_ms())
            text = rules.spec_text(spec)
        content = {"trigger": ask.trigger, "expected": ask.expected_revision, "spec": spec}
        request = request_digest("triggers.update", content)

        async def work(tx: Transaction) -> Trigger:
            if (known := await _replayed(tx, ask.mutation_id, request, ask.project)) is not None:
                return trigger_view(known)
            now_ms = self._clock.now_ms()
            schedule = await schedules.lock(tx, ask.trigger)
            trigger = await _trigger(tx, ask.project, ask.trigger)
            if "webhook" in (trigger["kind"], spec.kind) and trigger["kind"] != spec.kind:
                raise Ql3Error("invalid", "A webhook stays one, and nothing else becomes one.", field="spec.kind")
            if trigger["revision"] != ask.expected_revision:
                raise Ql3Error("version_conflict", data={"revision": trigger["revision"]})
            if schedule is not None:
                if await ahead.take_back(tx, trigger["task_id"], ask.trigger, now_ms):
                    schedule = await schedules.lock(tx, ask.trigger) or schedule
                await self._close(tx, schedule, now_ms)
            revision = ask.expected_revision + 1
            if not await store.advance(
                tx, ask.trigger, ask.expected_revision, spec.kind, enabled=spec.enabled, now_ms=now_ms
            ):
                raise Ql3Error("version_conflict")
            await store.insert_revision(
                tx,
                ask.trigger,
                revision,
                text,
                rules.content_digest(text),
                mutation_id=ask.mutation_id,
                request_digest=request,
                created_by=(ask.actor.type, ask.actor.id),
                now_ms=now_ms,
            )
            task = await task_store.lock(tx, trigger["task_id"])
            whole = await _task(tx, ask.project, trigger["task_id"])
            _check_inputs(whole, spec)
            if spec.kind == "after_task" and not later:
                with rules.placed("spec"):
                    await refuse_cycle(tx, ask.project, whole["name"], spec)
            await scheduling.place(
                tx,
                ask.trigger,
                ask.project,
                trigger["task_id"],
                revision,
                spec,
                task_enabled=bool(task and task["enabled"]),
                after_ms=max(now_ms, schedule["last_scheduled_at_ms"] or 0) if schedule else now_ms,
                now_ms=now_ms,
                look_now=decision.has_rules,
            )
            await audit.append(
                tx, ask.actor, "trigger.update", ask.project, ask.trigger, decision, {"revision": revision}
            )
            return await _view(tx, ask.project, ask.trigger)

        return work

    async def _close(self, tx: Transaction, schedule: Row, now_ms: int) -> None:
        """The old revision's calendar ends: what it missed while it was stopped is counted."""
        if schedule["stopped_by"] is not None:
            plan = await scheduling.plan_of(tx, schedule["trigger_id"], schedule["anchor_ms"])
            closed = settle_stop(plan, schedule["decided_through_ms"], now_ms, schedule["stopped_by"])
            revision = schedule["trigger_revision"]
            await scheduling.record_missed(
                tx, [scheduling.missed_row(schedule, revision, part, now_ms) for part in closed.missed]
            )
        await schedules.drop(tx, schedule["trigger_id"])

    async def enable(self, ask: TriggerEnable, decision: PolicyDecision) -> Trigger:
        """Enable or disable; what is disabled within the second before its start does not start."""
        return await self._mutate(self.enabling(ask, decision))

    def enabling(self, ask: TriggerEnable, decision: PolicyDecision) -> Work:
        """The same, as a part of a transaction."""

        async def work(tx: Transaction) -> Trigger:
            now_ms = self._clock.now_ms()
            schedule = await schedules.lock(tx, ask.trigger)
            trigger = await _trigger(tx, ask.project, ask.trigger)
            if await store.set_enabled(tx, ask.trigger, ask.enabled, now_ms):
                if not ask.enabled:
                    if await ahead.take_back(tx, trigger["task_id"], ask.trigger, now_ms):
                        schedule = await schedules.lock(tx, ask.trigger)
                    withdrawn = await admission_store.withdraw_of_trigger(tx, ask.trigger, now_ms, await tx.now_ms())
                    await scheduling.stop(tx, [schedule] if schedule else [], "trigger_disabled", withdrawn, now_ms)
                elif schedule is not None:
                    task = await task_store.lock(tx, trigger["task_id"])
                    stopped_by = None if task and task["enabled"] else "task_disabled"
                    await scheduling.go_on(tx, schedule, stopped_by, now_ms, look_now=decision.has_rules)
                action = "trigger.enable" if ask.enabled else "trigger.disable"
                await audit.append(tx, ask.actor, action, ask.project, ask.trigger, decision)
            return await _view(tx, ask.project, ask.trigger)

        return work

    async def delete(self, ask: TriggerDelete, decision: PolicyDecision) -> Trigger:
        """Take a trigger out of use. Its revisions, admissions and missed fires stay."""
        return await self._mutate(self.deleting(ask, decision))

    def deleting(self, ask: TriggerDelete, decision: PolicyDecision) -> Work:
        """The same, as a part of a transaction."""

        async def work(tx: Transaction) -> Trigger:
            now_ms = self._clock.now_ms()
            await schedules.lock(tx, ask.trigger)
            before = await _view(tx, ask.project, ask.trigger)
            if await admission_store.withdraw_of_trigger(tx, ask.trigger, now_ms, await tx.now_ms()):
                tx.after_commit(tx.database.bell(RING_BELL).set)
            await schedules.drop(tx, ask.trigger)
            await store.delete(tx, ask.trigger, now_ms)
            await audit.append(tx, ask.actor, "trigger.delete", ask.project, ask.trigger, decision)
            return msgspec.structs.replace(before, enabled=False, next_fire_at_ms=None, version=before.version + 1)

        return work

    async def rotate(self, ask: WebhookRotate, decision: PolicyDecision) -> Trigger:
        """Give a webhook another secret."""

        async def work(tx: Transaction) -> Trigger:
            trigger = await _trigger(tx, ask.project, ask.trigger)
            if trigger["kind"] != "webhook":
                raise Ql3Error("invalid", "Only a webhook has a secret.", field="trigger")
            await store.set_webhook(tx, ask.trigger, ask.token_digest, self._clock.now_ms())
            await audit.append(tx, ask.actor, "trigger.rotate", ask.project, ask.trigger, decision)
            return trigger_view(trigger)

        return await self._mutate(work)

    async def task_of(self, project: str, trigger: str) -> str:
        """The id of a trigger's task. Raises `not_found`."""
        row = await self._database.read(lambda tx: _trigger(tx, project, trigger))
        return str(row["task_id"])

    async def list(self, ask: TriggerList) -> TriggerPage:
        """Triggers of a project, or of one task; or one alone, when it is there."""

        async def work(tx: Transaction) -> TriggerPage:
            if ask.trigger is not None:
                row = await store.find(tx, ask.project, ask.trigger)
                return TriggerPage(items=[] if row is None else [trigger_view(row)], next=None)
            task_id = (await _task(tx, ask.project, ask.task))["id"] if ask.task else None
            after = ask.page.cursor or _BEFORE_ALL
            rows = await store.page(tx, ask.project, task_id, after, ask.page.limit + 1)
            shown = rows[: ask.page.limit]
            more = shown[-1]["id"] if len(rows) > ask.page.limit else None
            return TriggerPage(items=[trigger_view(row) for row in shown], next=more)

        return await self._database.read(work)

    async def missed(self, ask: MissedList) -> MissedPage:
        """Missed fires of a project, newest first."""

        async def work(tx: Transaction) -> MissedPage:
            before = ask.page.cursor or _AFTER_ALL
            rows = await store.missed_page(tx, ask.project, ask.trigger, before, ask.page.limit + 1)
            shown = rows[: ask.page.limit]
            more = shown[-1]["id"] if len(rows) > ask.page.limit else None
            return MissedPage(items=[missed_view(row) for row in shown], next=more)

        return await self._database.read(work)

    async def _mutate(self, work: Work) -> Trigger:
        try:
            return await self._database.transact(work)
        except (UniqueViolation, Ql3Error) as error:
            if isinstance(error, Ql3Error) and error.code != "version_conflict":
                raise
            # Somebody stored the same mutation id meanwhile: now it is found.
            return await self._database.transact(work)


async def _task(tx: Transaction, project: str, task: str) -> Row:
    row = await task_store.find(tx, project, task)
    if row is None or row["deleted"]:
        raise Ql3Error("not_found", "There is no such task in this project.", field="task")
    return row


def _check_inputs(task: Row, spec: TriggerSpec) -> None:
    known = read_spec(task["spec"], task["project"], task["id"], task["revision"], task["content_digest"])
    with rules.placed("spec"):
        rules.check_given(spec, known.parameters)


async def _trigger(tx: Transaction, project: str, trigger_id: str) -> Row:
    row = await store.find(tx, project, trigger_id)
    if row is None:
        raise Ql3Error("not_found", "There is no such trigger in this project.", field="trigger")
    return row


async def _view(tx: Transaction, project: str, trigger_id: str) -> Trigger:
    return trigger_view(await _trigger(tx, project, trigger_id))


async def _replayed(tx: Transaction, mutation_id: str | None, request: str, project: str) -> Row | None:
    known = await store.by_mutation(tx, mutation_id) if mutation_id else None
    if known is None:
        return None
    if known["request_digest"] != request or known["project"] != project:
        raise Ql3Error("mutation_conflict", field="mutation_id")
    return await _trigger(tx, project, known["trigger_id"])
