"""Runs with what belongs to their present step: read under the run's row lock, written back in one batch per table.

The row of `runs` is the lock of the whole aggregate: whoever writes about a run, its attempts, events or policy holds
it. Rows are locked in the order of their ids. Leases are also written by beats, which lock nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from schemas import subjects
from schemas.runs import RUN_TERMINAL, AttemptEnded, EventFact, LogFact, RunChanged
from services.dispatcher.records import (
    ATTEMPT_EDGES,
    AttemptRecord,
    Case,
    Event,
    LeaseRecord,
    PolicyRecord,
    RunRecord,
)
from services.kit import metrics, outbox
from services.kit.database import Row, Statement, Transaction, json_set

T = TypeVar("T", bound=msgspec.Struct)

QUIET: Final = frozenset({"run.dispatching", "attempt.starting"})
"""The hand-over to a worker, over in milliseconds: a fact about it alone would double the traffic for nobody. Its
events are in the ledger, and the next fact's version tells that there are some."""


def statement(sql: str, *, postgresql: str | None = None, **parts: str) -> Statement:
    """A statement in which `<name>` stands for a constant part."""
    for name, part in parts.items():
        sql = sql.replace(f"<{name}>", part)
        postgresql = postgresql and postgresql.replace(f"<{name}>", part)
    return Statement(sql, postgresql=postgresql)


def columns(record: type[msgspec.Struct], prefix: str = "") -> str:
    """The columns of a record's table, in its order."""
    return ", ".join(prefix + name for name in record.__struct_fields__)


def records(rows: Sequence[Row], record: type[T]) -> list[T]:
    """Rows as records; a row that the schema's types refuse is an error, never passed on."""
    return msgspec.convert(rows, list[record])  # type: ignore[valid-type]


_RUNS = statement("SELECT <c> FROM runs WHERE id {in:$1} ORDER BY id", c=columns(RunRecord))
_RUNS_LOCKED = statement("SELECT <c> FROM runs WHERE id {in:$1} ORDER BY id {for_update}", c=columns(RunRecord))
_RUNS_OF_PROJECT_LOCKED = statement(
    "SELECT <c> FROM runs WHERE id = $1 AND project_id = $2 {for_update}", c=columns(RunRecord)
)
_ATTEMPTS = statement("SELECT <c> FROM run_attempts WHERE id {in:$1}", c=columns(AttemptRecord))
_LEASES = statement("SELECT <c> FROM run_dispatch_leases WHERE attempt_id {in:$1}", c=columns(LeaseRecord))
_LEASES_LOCKED = statement(
    "SELECT <c> FROM run_dispatch_leases WHERE attempt_id {in:$1} ORDER BY attempt_id {for_update}",
    c=columns(LeaseRecord),
)
_POLICIES = statement("SELECT <c> FROM run_retry_policies WHERE run_id {in:$1}", c=columns(PolicyRecord))
_RUN_OF_ATTEMPT = Statement("SELECT id, run_id FROM run_attempts WHERE id {in:$1}")
_DEDUPE = Statement("SELECT run_id, dedupe_key FROM run_events WHERE run_id {in:$1} AND dedupe_key IS NOT NULL")


async def load_runs(tx: Transaction, run_ids: Iterable[str], *, lock: bool = True) -> dict[str, RunRecord]:
    """Runs by id, locked."""
    rows = await tx.fetch(_RUNS_LOCKED if lock else _RUNS, json_set(run_ids))
    return {run.id: run for run in records(rows, RunRecord)}


async def load(tx: Transaction, run_ids: Iterable[str], *, lock: bool = True, policies: bool = True) -> dict[str, Case]:
    """Cases by run id, each with its latest attempt."""
    runs = await load_runs(tx, run_ids, lock=lock)
    return await complete(tx, runs.values(), lock=lock, policies=policies)


async def load_one(tx: Transaction, project: str, run_id: str) -> Case | None:
    """One run of a project, locked; None when the project has no such run."""
    rows = await tx.fetch(_RUNS_OF_PROJECT_LOCKED, run_id, project)
    return (await complete(tx, records(rows, RunRecord))).get(run_id)


async def complete(
    tx: Transaction, runs: Iterable[RunRecord], *, lock: bool = True, policies: bool = True
) -> dict[str, Case]:
    """Runs that are held already, with their latest attempt, its lease and the retry policy."""
    held = list(runs)
    attempt_ids = [run.attempt_id for run in held if run.attempt_id is not None]
    attempts: dict[str, AttemptRecord] = {}
    leases: dict[str, LeaseRecord] = {}
    if attempt_ids:
        wanted = json_set(attempt_ids)
        attempts = {a.id: a for a in records(await tx.fetch(_ATTEMPTS, wanted), AttemptRecord)}
        found = await tx.fetch(_LEASES_LOCKED if lock else _LEASES, wanted)
        leases = {lease.attempt_id: lease for lease in records(found, LeaseRecord)}
    known: dict[str, PolicyRecord] = {}
    if policies and held:
        rows = await tx.fetch(_POLICIES, json_set(run.id for run in held))
        known = {policy.run_id: policy for policy in records(rows, PolicyRecord)}
    return {
        run.id: Case(run, attempts.get(run.attempt_id or ""), leases.get(run.attempt_id or ""), known.get(run.id))
        for run in held
    }


async def load_attempts(
    tx: Transaction, attempt_ids: Iterable[str]
) -> dict[str, tuple[AttemptRecord, LeaseRecord | None]]:
    """Attempts by id with their leases, whichever attempt of their run they are. The runs must be held already."""
    wanted = json_set(attempt_ids)
    attempts = records(await tx.fetch(_ATTEMPTS, wanted), AttemptRecord)
    leases = {lease.attempt_id: lease for lease in records(await tx.fetch(_LEASES_LOCKED, wanted), LeaseRecord)}
    return {attempt.id: (attempt, leases.get(attempt.id)) for attempt in attempts}


async def runs_of_attempts(tx: Transaction, attempt_ids: Iterable[str]) -> dict[str, str]:
    """Attempt id -> run id, for those that exist."""
    return {row["id"]: row["run_id"] for row in await tx.fetch(_RUN_OF_ATTEMPT, json_set(attempt_ids))}


async def dedupe_keys(tx: Transaction, run_ids: Iterable[str]) -> set[tuple[str, str]]:
    """The (run, dedupe key) pairs that exist; a second event with one of them would be refused by the table."""
    return {(row["run_id"], row["dedupe_key"]) for row in await tx.fetch(_DEDUPE, json_set(run_ids))}


# Writing.


class Change(NamedTuple):
    """A case before (None: new) and after; only what differs is written."""

    before: Case | None
    after: Case


_RUN_INSERT: Final = (*RunRecord.__struct_fields__, "inputs")


def _insert(table: str, names: Sequence[str]) -> Statement:
    marks = ", ".join(f"${n}" for n in range(1, len(names) + 1))
    return statement("INSERT INTO <t> (<c>) VALUES (<m>)", t=table, c=", ".join(names), m=marks)


@functools.cache
def _update(table: str, key: str, names: tuple[str, ...]) -> Statement:
    # There are as many of them as there are kinds of steps.
    sets = ", ".join(f"{name} = ${n}" for n, name in enumerate(names, 1))
    return statement("UPDATE <t> SET <s> WHERE <k> = $<n>", t=table, s=sets, k=key, n=str(len(names) + 1))


_INSERT_RUN = _insert("runs", _RUN_INSERT)
_INSERT_ATTEMPT = _insert("run_attempts", AttemptRecord.__struct_fields__)
_INSERT_LEASE = _insert("run_dispatch_leases", LeaseRecord.__struct_fields__)
_INSERT_POLICY = _insert("run_retry_policies", PolicyRecord.__struct_fields__)
_INSERT_EVENT = Statement("""
    INSERT INTO run_events
      (run_id, sequence, type, dedupe_key, actor_type, actor_id, attempt_id, payload, created_at_ms)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)
""")
_SETTLE_CANCELLATIONS = Statement("""
    UPDATE run_cancellation_dispatches
    SET status = 'settled', version = version + 1, next_attempt_at_ms = NULL, settled_at_ms = $1
    WHERE attempt_id {in:$2} AND settled_at_ms IS NULL
""")
_json = msgspec.json.Encoder()


async def write(tx: Transaction, changes: Sequence[Change], inputs: dict[str, str] | None = None) -> list[Case]:
    """Writes what changed, each run's version once, with its events and one fact; answers the cases as they stand now.

    `inputs` holds the inputs of new runs by run id, as JSON.
    """
    now = await tx.now_ms()
    batch = _Batch(now, inputs or {})
    after = [batch.add(change) for change in changes]
    await tx.execute_many(_INSERT_RUN, batch.new_runs)
    await batch.runs.write(tx)
    await tx.execute_many(_INSERT_ATTEMPT, batch.new_attempts)
    await batch.attempts.write(tx)
    await tx.execute_many(_INSERT_LEASE, batch.new_leases)
    await batch.leases.write(tx)
    await tx.execute_many(_INSERT_POLICY, batch.new_policies)
    await batch.policies.write(tx)
    await tx.execute_many(_INSERT_EVENT, batch.events)
    if batch.settled:
        await tx.execute(_SETTLE_CANCELLATIONS, now, json_set(batch.settled))
    await outbox.facts(tx, batch.facts)
    tx.after_commit(lambda: _count(changes))
    return after


def _count(changes: Sequence[Change]) -> None:
    for before, after in changes:
        if after.run.status in RUN_TERMINAL and (before is None or before.run.status != after.run.status):
            metrics.SETTLED.labels(after.run.status).inc()
        if _lost(after) and not (before is not None and _lost(before)):
            metrics.LOST.inc()


def _lost(case: Case) -> bool:
    return case.attempt is not None and case.attempt.status == "lost"


class _Updates:
    """Changed rows of a table, gathered by what has changed of them: an index whose columns are not written costs
    nothing."""

    def __init__(self, table: str, key: str) -> None:
        self._table = table
        self._key = key
        self._rows: dict[tuple[str, ...], list[tuple[Any, ...]]] = {}

    def add(self, key: str, old: msgspec.Struct, new: msgspec.Struct) -> None:
        """One row; nothing when it has not changed."""
        before, after = msgspec.structs.astuple(old), msgspec.structs.astuple(new)
        places = [at for at, value in enumerate(after) if value is not before[at] and value != before[at]]
        if places:
            fields = new.__struct_fields__
            names = tuple([fields[at] for at in places])
            self._rows.setdefault(names, []).append((*[after[at] for at in places], key))

    async def write(self, tx: Transaction) -> None:
        """One statement per kind of change."""
        for names, rows in self._rows.items():
            await tx.execute_many(_update(self._table, self._key, names), rows)


class _Batch:
    """Rows by table, gathered from changes."""

    def __init__(self, now: int, inputs: dict[str, str]) -> None:
        self.now = now
        self.inputs = inputs
        self.new_runs: list[tuple[Any, ...]] = []
        self.runs = _Updates("runs", "id")
        self.new_attempts: list[tuple[Any, ...]] = []
        self.attempts = _Updates("run_attempts", "id")
        self.new_leases: list[tuple[Any, ...]] = []
        self.leases = _Updates("run_dispatch_leases", "attempt_id")
        self.new_policies: list[tuple[Any, ...]] = []
        self.policies = _Updates("run_retry_policies", "run_id")
        self.events: list[tuple[Any, ...]] = []
        self.facts: list[tuple[str, msgspec.Struct]] = []
        self.settled: list[str] = []

    def add(self, change: Change) -> Case:
        before, after = change
        old = before or _NOTHING
        run = after.run
        if run is not old.run:
            run = msgspec.structs.replace(run, version=run.version + 1)
            if old.run is None:
                self.new_runs.append((*msgspec.structs.astuple(run), self.inputs.get(run.id)))
            else:
                self.runs.add(run.id, old.run, run)
        attempt, lease, policy = after.attempt, after.lease, after.policy
        ended = False
        if attempt is not None and attempt is not old.attempt:
            if old.attempt is None or old.attempt.id != attempt.id:
                self.new_attempts.append(msgspec.structs.astuple(attempt))
            else:
                self.attempts.add(attempt.id, old.attempt, attempt)
                ended = not ATTEMPT_EDGES[attempt.status]
        if lease is not None and lease is not old.lease:
            if old.lease is None or old.lease.attempt_id != lease.attempt_id:
                self.new_leases.append(msgspec.structs.astuple(lease))
            else:
                self.leases.add(lease.attempt_id, old.lease, lease)
        if policy is not None and policy is not old.policy:
            if old.policy is None:
                self.new_policies.append(msgspec.structs.astuple(policy))
            else:
                self.policies.add(policy.run_id, old.policy, policy)
        self._tell(run, attempt, after.events, ended)
        if ended and attempt is not None and old.run is not None and old.run.cancel_requested_at_ms is not None:
            self.settled.append(attempt.id)
        return Case(run, attempt, lease, policy)

    def _tell(self, run: RunRecord, attempt: AttemptRecord | None, events: Sequence[Event], ended: bool) -> None:
        now, run_id = self.now, run.id
        loud = False
        for event in events:
            loud = loud or event.type not in QUIET
            payload = _json.encode(event.payload).decode() if event.payload else "{}"
            self.events.append(
                (
                    run_id, event.sequence, event.type, event.dedupe_key, event.actor_type, event.actor_id,
                    event.attempt_id, payload, now,
                )
            )  # fmt: skip
        if loud:
            self.facts.append((f"ql3.evt.run.{run.project_id}.{run_id}.{run.status}", changed(run, events, now)))
        if ended and attempt is not None and attempt.token_digest is not None:
            self.facts.append((subjects.event("attempt", run.project_id, attempt.id, "ended"), _ended(run, attempt)))


def changed(run: RunRecord, events: Sequence[Event], now: int) -> RunChanged:
    """The fact about a run after one transaction."""
    return RunChanged(
        project=run.project_id,
        run_id=run.id,
        task_id=run.task_id,
        task_name=run.task_name,
        status=run.status,
        version=run.version,
        trigger_type=run.trigger_type,
        trigger_id=run.trigger_id,
        attempt_id=run.attempt_id,
        worker_id=run.worker_id,
        exit_code=run.exit_code,
        error_code=run.error_code,
        at_ms=now,
        events=[
            EventFact(sequence=e.sequence, type=e.type, attempt_id=e.attempt_id, payload=e.payload) for e in events
        ],
    )


def _ended(run: RunRecord, attempt: AttemptRecord) -> AttemptEnded:
    return AttemptEnded(
        project=run.project_id,
        run_id=run.id,
        attempt_id=attempt.id,
        task_id=run.task_id,
        worker_id=attempt.worker_id or "",
        status=attempt.status,
        run_terminal=run.finished_at_ms is not None,
        finished_at_ms=attempt.finished_at_ms or 0,
        log=LogFact() if attempt.log is None else msgspec.json.decode(attempt.log, type=LogFact),
    )


class _Nothing(NamedTuple):
    run: RunRecord | None = None
    attempt: AttemptRecord | None = None
    lease: LeaseRecord | None = None
    policy: PolicyRecord | None = None


_NOTHING: Final = _Nothing()
