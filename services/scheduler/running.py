"""Running tasks now: each request becomes an open order in one transaction, then the dispatcher is asked."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from schemas import limits
from schemas.errors import Ql3Error
from schemas.identity import Actor, PolicyDecision, Subject
from schemas.runs import RunResult, Submitted, TriggerType
from services.kit import audit
from services.kit.clock import Clock
from services.kit.database import Database, Row, Transaction
from services.scheduler.admissions import KEY_PREFIX, Admission, for_person, request_digest
from services.scheduler.executions import Executions
from services.scheduler.parameters import INPUT_BYTES, check_inputs
from services.scheduler.rulings import Outdated
from services.scheduler.store import admissions as store
from services.scheduler.store import tasks as task_store
from services.scheduler.store import triggers as trigger_store
from services.scheduler.submitting import ANSWER_MS, Submitter, admission_of
from services.scheduler.triggers import stored_spec

Refusal = Ql3Error | Outdated


@dataclass(frozen=True, slots=True)
class RunAsk:
    """One run that somebody asks for."""

    actor: Actor
    decision: PolicyDecision
    project: str
    task: str
    trigger_type: TriggerType
    inputs: dict[str, Any] | None = None
    priority: int | None = None
    idempotency_key: str | None = None
    expected_revision: int | None = None
    trigger: str | None = None
    judged: int | None = None
    """The task's revision that the decision is about; None where it is about any."""


def check(inputs: dict[str, Any] | None, idempotency_key: str | None) -> None:
    """Raises `too_large` or `invalid`, naming the field."""
    if inputs is not None and len(msgspec.json.encode(inputs)) > INPUT_BYTES:
        raise Ql3Error("too_large", f"Inputs have at most {INPUT_BYTES} bytes.", field="inputs")
    if idempotency_key is not None and idempotency_key.startswith(KEY_PREFIX):
        raise Ql3Error("invalid", f"Keys that begin with {KEY_PREFIX} are ours.", field="idempotency_key")


class RunDesk:
    """Admits runs that people ask for. Questions that arrive while one transaction is at work share the next."""

    def __init__(self, database: Database, clock: Clock, executions: Executions, submitter: Submitter) -> None:
        self._database = database
        self._clock = clock
        self._executions = executions
        self._submitter = submitter
        self._waiting: list[tuple[RunAsk, asyncio.Future[RunResult]]] = []
        self._worker: asyncio.Task[None] | None = None

    async def stop(self) -> None:
        """Finish what is at work."""
        if self._worker is not None:
            await asyncio.gather(self._worker, return_exceptions=True)

    async def run(self, ask: RunAsk) -> RunResult:
        """One run; raises its `Ql3Error`, or `Outdated`. After `unavailable` the order stays open and is rung until it
        is answered."""
        future: asyncio.Future[RunResult] = asyncio.get_running_loop().create_future()
        self._waiting.append((ask, future))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work(), name="run desk")
        return await future

    async def run_many(self, asks: Sequence[RunAsk]) -> list[RunResult | Outdated]:
        """Many runs together; each is answered for itself."""
        outcomes = await self._together(list(asks))
        return [_result_of(outcome) if isinstance(outcome, Ql3Error) else outcome for outcome in outcomes]

    async def _work(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[: limits.BATCH_ITEMS], self._waiting[limits.BATCH_ITEMS :]
            outcomes: Sequence[RunResult | Exception]
            try:
                outcomes = await self._together([ask for ask, _ in batch])
            except Exception as error:  # each of those who wait has to hear of it
                outcomes = [error] * len(batch)
            for (_, future), outcome in zip(batch, outcomes, strict=True):
                if future.done():
                    continue
                if isinstance(outcome, Exception):
                    future.set_exception(outcome)
                else:
                    future.set_result(outcome)

    async def _together(self, asks: list[RunAsk]) -> list[RunResult | Refusal]:
        admitted = await self._database.transact(lambda tx: self._admit(tx, asks))
        wanted = {item.order.order_id: item for item in admitted if isinstance(item, Admission)}
        answers = await self._submitter.ask(list(wanted.values()))
        return [
            _outcome(answers.get(item.order.order_id)) if isinstance(item, Admission) else item for item in admitted
        ]

    async def _admit(self, tx: Transaction, asks: list[RunAsk]) -> list[Admission | Refusal]:
        now_ms = self._clock.now_ms()
        tasks = await self._find(tx, asks)
        outcomes: list[Admission | Refusal] = []
        fresh: dict[tuple[str, str], Admission] = {}
        for ask in asks:
            try:
                outcomes.append(await self._admission(tx, ask, tasks.get((ask.project, ask.task)), now_ms))
            except (Ql3Error, Outdated) as refused:
                outcomes.append(refused)
        made = [item for item in outcomes if isinstance(item, Admission)]
        known = await self._known(tx, made)
        for index, item in enumerate(outcomes):
            if not isinstance(item, Admission):
                continue
            key = (item.order.project, item.order.idempotency_key)
            if key in known:
                outcomes[index] = await self._replay(tx, item, known[key])
            elif key in fresh:
                same = request_digest_of(item) == request_digest_of(fresh[key])
                outcomes[index] = fresh[key] if same else Ql3Error("idempotency_conflict", field="idempotency_key")
            else:
                fresh[key] = item
        if fresh:
            rows = [item.row() for item in fresh.values()]
            new = await store.insert(tx, rows, await tx.now_ms() + ANSWER_MS, now_ms)
            if len(new) < len(fresh):
                await self._resolve_race(tx, outcomes, new)
            await self._audit(tx, asks, outcomes, new)
        return outcomes

    async def _find(self, tx: Transaction, asks: list[RunAsk]) -> dict[tuple[str, str], Row]:
        wanted: defaultdict[str, set[str]] = defaultdict(set)
        for ask in asks:
            wanted[ask.project].add(ask.task)
        found: dict[tuple[str, str], Row] = {}
        for project, names in wanted.items():
            for row in await task_store.find_many(tx, project, sorted(names)):
                found[project, row["id"]] = row
                found[project, row["name"]] = row
        return found

    async def _admission(self, tx: Transaction, ask: RunAsk, row: Row | None, now_ms: int) -> Admission:
        if row is None:
            raise Ql3Error("not_found", "There is no such task in this project.", field="task")
        if not row["enabled"]:
            raise Ql3Error("conflict", "The task is disabled; enable it first.", field="task")
        if ask.expected_revision is not None and ask.expected_revision != row["revision"]:
            raise Ql3Error("version_conflict", field="expected_revision", data={"revision": row["revision"]})
        if ask.judged not in (None, row["revision"]):
            raise Outdated
        parameters = await self._executions.parameters(tx, row["project"], row["id"], row["revision"])
        inputs, trigger = ask.inputs, None
        if ask.trigger is not None:
            found = await self._manual(tx, row, ask.trigger)
            inputs = {**(stored_spec(found).inputs or {}), **(ask.inputs or {})} or None
            trigger = (found["id"], found["revision"])
        return for_person(
            await self._executions.load(tx, row["id"], row["revision"]),
            trigger_type=ask.trigger_type,
            requested_by=Subject(type=ask.actor.type, id=ask.actor.id),
            idempotency_key=ask.idempotency_key,
            priority=ask.priority,
            inputs=check_inputs(parameters, inputs),
            trigger=trigger,
            hold=ask.decision.effect == "require_approval",
            now_ms=now_ms,
        )

    async def _manual(self, tx: Transaction, task: Row, trigger: str) -> Row:
        found = await trigger_store.find(tx, task["project"], trigger)
        if found is None or found["task_id"] != task["id"]:
            raise Ql3Error("not_found", "The task has no such trigger.", field="trigger")
        if found["kind"] != "manual":
            raise Ql3Error("invalid", "Only a trigger of kind `manual` is run by people.", field="trigger")
        if not found["enabled"]:
            raise Ql3Error("conflict", "The trigger is disabled; enable it first.", field="trigger")
        return found

    async def _known(self, tx: Transaction, made: list[Admission]) -> dict[tuple[str, str], Row]:
        keys: defaultdict[str, list[str]] = defaultdict(list)
        for item in made:
            if not item.order.idempotency_key.startswith(KEY_PREFIX):
                keys[item.order.project].append(item.order.idempotency_key)
        found: dict[tuple[str, str], Row] = {}
        for project, wanted in keys.items():
            for key, row in (await store.by_keys(tx, project, wanted)).items():
                found[project, key] = row
        return found

    async def _replay(self, tx: Transaction, asked: Admission, row: Row) -> Admission | Ql3Error:
        if row["request_digest"] != request_digest_of(asked):
            return Ql3Error("idempotency_conflict", field="idempotency_key")
        return await admission_of(tx, self._executions, row)

    async def _resolve_race(self, tx: Transaction, outcomes: list[Admission | Refusal], new: set[str]) -> None:
        """Another process stored the same key between our look and our insert: its order counts."""
        lost = [item for item in outcomes if isinstance(item, Admission) and item.order.order_id not in new]
        known = await self._known(tx, lost)
        for index, item in enumerate(outcomes):
            if isinstance(item, Admission) and item in lost:
                row = known.get((item.order.project, item.order.idempotency_key))
                if row is not None:
                    outcomes[index] = await self._replay(tx, item, row)

    async def _audit(
        self, tx: Transaction, asks: list[RunAsk], outcomes: list[Admission | Refusal], new: set[str]
    ) -> None:
        """One row for each actor and task in the batch, with the first run's id and how many there are."""
        groups: dict[tuple[str, str, str, str], tuple[RunAsk, list[Admission]]] = {}
        for ask, item in zip(asks, outcomes, strict=True):
            if isinstance(item, Admission) and item.order.order_id in new:
                key = (ask.actor.type, ask.actor.id, ask.project, item.revision.task_id)
                groups.setdefault(key, (ask, []))[1].append(item)
        for (_, _, project, task_id), (ask, items) in groups.items():
            detail = {"run_id": items[0].order.run_id, "runs": len(items), "revision": items[0].revision.task_revision}
            await audit.append(tx, ask.actor, "run.start", project, task_id, ask.decision, detail)


def request_digest_of(item: Admission) -> str:
    """What the key of this order stands for."""
    order = item.order
    return request_digest(item.revision.task_id, order.inputs, order.priority, order.trigger_type)


def _outcome(answer: Submitted | Ql3Error | None) -> RunResult | Ql3Error:
    if answer is None:
        return Ql3Error("unavailable", "The dispatcher did not answer for this run.")
    if isinstance(answer, Ql3Error):
        return answer
    if answer.run is None:
        return Ql3Error(answer.error or "internal_error", answer.error_detail)
    return RunResult(run=answer.run, replayed=answer.replayed)


def _result_of(error: Ql3Error) -> RunResult:
    return RunResult(error=error.code, error_detail=error.detail, error_field=error.field)
