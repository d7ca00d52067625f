"""What fires triggers besides the calendar: the system's start, another task's end, a webhook's call, a backfill."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec
import structlog

from schemas.errors import Ql3Error
from schemas.identity import PolicyDecision, Subject
from schemas.limits import BATCH_ITEMS
from schemas.runs import RUN_TERMINAL, RunAnswer, RunChanged, Submitted, TriggerType
from schemas.system import FeedItem, FeedPage
from schemas.triggers import BackfillAnswer, TriggerBackfill, TriggerSpec, WebhookCall
from services.kit import audit
from services.kit.clock import Clock
from services.kit.database import Database, Row, Transaction
from services.kit.ids import new_id
from services.kit.outbox import fact_of
from services.scheduler import scheduling
from services.scheduler import triggers as rules
from services.scheduler.admissions import Admission, for_fire
from services.scheduler.decisions import INPUTS_REFUSED, PROJECT_ARCHIVED, TASK_DISABLED, TRIGGER_DISABLED, Missed
from services.scheduler.executions import Executions
from services.scheduler.parameters import check_inputs
from services.scheduler.projects import Projects
from services.scheduler.rulings import TRIES, Outdated, Ruling, Rulings
from services.scheduler.store import admissions as admission_store
from services.scheduler.store import schedules, tasks
from services.scheduler.store import triggers as store
from services.scheduler.submitting import ANSWER_MS, OVERLAPPED, Submitter, count_fires
from services.scheduler.triggers import Span

SOURCE: Final = "dispatcher"
TOGETHER_MS: Final = 30_000
_CAUSES: Final[dict[tuple[str, str | None], str]] = {
    ("conflict", "trigger"): TRIGGER_DISABLED,
    ("conflict", "task"): TASK_DISABLED,
    ("project_archived", None): PROJECT_ARCHIVED,
}
"""Why something does not fire, by what is said to whoever asks."""
BACKFILL_RUNS: Final = 1_000
BACKFILL_WINDOW_MS: Final = 3_660 * 86_400_000
_PAYLOAD_BYTES: Final = 60 * 1024

log: structlog.stdlib.BoundLogger = structlog.get_logger("ql3.scheduler")


T = TypeVar("T")
_Followed = tuple[str, str]
"""A project and the name of a task whose ends another one follows."""


@dataclass
class _Boot:
    """One start of the system, and how far its triggers have fired."""

    at_ms: int
    first: bool
    """Whether this scheduler is the first that knows of it."""
    after: str = ""


class Occasions:
    """Makes the orders of triggers that fire for another reason than an instant on the calendar."""

    def __init__(
        self, database: Database, clock: Clock, executions: Executions, projects: Projects, submitter: Submitter
    ) -> None:
        self._database = database
        self._clock = clock
        self._executions = executions
        self._rulings = Rulings(database, executions, projects)
        self._submitter = submitter
        self._booting: _Boot | None = None

    # The start of the system

    async def boot(self) -> int:
        """Fire all boot triggers once for this start; answers how many fired.

        After an error the next call goes on where this one ended, for the same start.
        """
        boot = self._booting = self._booting or await self._begin_boot()
        fired = 0
        while True:
            rows, admissions = await self._ruled(lambda: self._boot_page(boot))
            boot.after = rows[-1]["id"] if rows else boot.after
            await self._submitter.post(admissions)
            fired += len(admissions)
            if len(rows) < BATCH_ITEMS:
                self._booting = None
                return fired

    async def _begin_boot(self) -> _Boot:
        # Schedulers that start together, and one that died while it did this, mean the same start.
        together_ms = TOGETHER_MS if self._database.dialect == "postgresql" else 0
        now_ms = self._clock.now_ms()
        return _Boot(*await self._database.transact(lambda tx: schedules.note_start(tx, now_ms, together_ms)))

    async def _boot_page(self, boot: _Boot) -> tuple[list[Row], list[Admission]]:
        rows = await self._database.read(lambda tx: store.of_kind(tx, "boot", boot.after, BATCH_ITEMS))
        rulings = await self._rulings.about(rows)

        async def work(tx: Transaction) -> list[Admission]:
            made: list[Admission] = []
            missed: list[dict[str, Any]] = []
            for row in rows:
                try:
                    made.append(
                        await self._admission(tx, row, "boot", str(boot.at_ms), rulings, scheduled_for_ms=boot.at_ms)
                    )
                except Ql3Error as error:
                    missed.append(self._missed(row, error, boot.at_ms))
            if boot.first:
                await scheduling.record_missed(tx, missed)
            return await self._store(tx, made)

        return rows, await self._database.transact(work)

    # The end of another task's run

    async def follow(self, page: FeedPage) -> None:
        """Fire what follows the runs of which a page of facts tells; its position is stored with the orders."""
        await self._submitter.post(await self._ruled(lambda: self._follow(page)))

    async def _follow(self, page: FeedPage) -> list[Admission]:
        ended = [fact for item in page.items if (fact := _ended(item)) is not None]
        wanted = {(fact.project, fact.task_name) for fact in ended}
        chains = await self._database.read(lambda tx: self._chains(tx, wanted)) if wanted else {}
        rulings = await self._rulings.about([row for rows in chains.values() for row, _ in rows])

        async def work(tx: Transaction) -> list[Admission]:
            made: list[Admission] = []
            missed: list[dict[str, Any]] = []
            for fact in ended:
                for row, spec in chains.get((fact.project, fact.task_name), []):
                    if not _follows(row, spec, fact):
                        continue
                    try:
                        made.append(
                            await self._admission(
                                tx, row, "after_task", fact.run_id, rulings, parent_run_id=fact.run_id
                            )
                        )
                    except Ql3Error as error:
                        missed.append(self._missed(row, error, fact.at_ms))
            await scheduling.record_missed(tx, missed)
            stored = await self._store(tx, made)
            if page.position is not None:
                await store.move_position(tx, SOURCE, page.position, self._clock.now_ms())
            return stored

        return await self._database.transact(work)

    async def _chains(self, tx: Transaction, wanted: set[_Followed]) -> dict[_Followed, list[tuple[Row, TriggerSpec]]]:
        chains: dict[_Followed, list[tuple[Row, TriggerSpec]]] = {}
        after = ""
        while True:
            rows = await store.of_kind(tx, "after_task", after, BATCH_ITEMS)
            for row in rows:
                spec = msgspec.json.decode(row["spec"], type=TriggerSpec)
                followed = (row["project"], spec.after_task or "")
                if followed in wanted:
                    chains.setdefault(followed, []).append((row, spec))
            if len(rows) < BATCH_ITEMS:
                return chains
            after = rows[-1]["id"]

    async def any_chain(self) -> bool:
        """Whether some task follows another at all."""
        return bool(await self._database.read(lambda tx: store.of_kind(tx, "after_task", "", 1)))

    async def position(self) -> str | None:
        """How far the dispatcher's facts were read."""
        return await self._database.read(lambda tx: store.position(tx, SOURCE))

    # A call from outside

    async def call(self, ask: WebhookCall) -> RunAnswer:
        """One delivery to a webhook makes one run. Whatever is wrong with the secret looks like an absent trigger."""
        if len(msgspec.json.encode(ask.payload)) > _PAYLOAD_BYTES:
            raise Ql3Error("too_large", f"A payload has at most {_PAYLOAD_BYTES} bytes.", field="payload")
        admission = await self._ruled(lambda: self._called(ask))
        answer = (await self._submitter.ask([admission])).get(admission.order.order_id)
        if isinstance(answer, Ql3Error):
            raise answer
        if not isinstance(answer, Submitted) or answer.run is None:
            raise Ql3Error(answer.error or "internal_error" if answer else "unavailable")
        return RunAnswer(run=answer.run, replayed=answer.replayed)

    async def _called(self, ask: WebhookCall) -> Admission:
        called = await self._database.read(lambda tx: store.find(tx, ask.project, ask.trigger))
        # Policy is asked for an absent trigger too: the time of the answer must not tell the two apart.
        rulings = await self._rulings.about([called] if called is not None else [], [ask.project])

        async def work(tx: Transaction) -> Admission:
            row = await store.find(tx, ask.project, ask.trigger)
            digest = await store.webhook(tx, ask.trigger)
            same = hmac.compare_digest(digest or "-" * 64, ask.token_digest)
            if row is None or not same or row["kind"] != "webhook":
                raise Ql3Error("not_found", field="trigger")
            spec = msgspec.json.decode(row["spec"], type=TriggerSpec)
            if spec.signed and not ask.signed:
                raise Ql3Error("unauthenticated", "This webhook takes signed calls only.", field="signature")
            made = await self._admission(tx, row, "webhook", ask.delivery, rulings, more={"payload": ask.payload})
            if await self._store(tx, [made]):
                return made
            known = await admission_store.by_keys(tx, ask.project, [made.order.idempotency_key])
            return await self._submitter.admitted(tx, known[made.order.idempotency_key])

        return await self._database.transact(work)

    # Instants that have passed

    async def backfill(
        self, ask: TriggerBackfill, decision: PolicyDecision, judged: int | None = None
    ) -> BackfillAnswer:
        """Run the instants of a window that has passed, spread over time, or say which they would be.

        `judged` is the task's revision that the decision is about. Raises `Outdated` when it is another one by now.
        """
        now_ms = self._clock.now_ms()
        hold = decision.effect == "require_approval"
        once = ask.mutation_id or new_id()
        if ask.until_ms < ask.from_ms:
            raise Ql3Error("invalid", "The window ends before it begins.", field="until_ms")
        if ask.until_ms > now_ms:
            raise Ql3Error(
                "invalid", "A backfill is for what has passed; later instants come by themselves.", field="until_ms"
            )
        if ask.until_ms - ask.from_ms > BACKFILL_WINDOW_MS:
            raise Ql3Error("invalid", "The window is at most ten years wide.", field="from_ms")

        async def work(tx: Transaction) -> tuple[BackfillAnswer, list[Admission]]:
            row = await store.find(tx, ask.project, ask.trigger)
            if row is None:
                raise Ql3Error("not_found", "There is no such trigger in this project.", field="trigger")
            if row["kind"] not in rules.CALENDAR:
                raise Ql3Error("invalid", f"A trigger of kind `{row['kind']}` has no instants.", field="trigger")
            plan = rules.stored_plan(row["id"], row["spec"], row["content_digest"], row["anchor_ms"])
            known = await admission_store.admitted(tx, row["id"], ask.from_ms, ask.until_ms)
            wanted: list[int] = []
            left_out = 0
            for instant in plan.between(ask.from_ms - 1, ask.until_ms):
                if instant in known and not ask.again:
                    left_out += 1
                    continue
                wanted.append(instant)
                if len(wanted) > BACKFILL_RUNS:
                    raise Ql3Error(
                        "too_large", f"More than {BACKFILL_RUNS} runs; choose a smaller window.", field="until_ms"
                    )
            answer = BackfillAnswer(instants=wanted, left_out=left_out, dry_run=ask.dry_run)
            if ask.dry_run or not wanted:
                return answer, []
            made = [
                await self._backfill_one(
                    tx, row, ask, instant, now_ms + number * ask.every_ms, known, once=once, hold=hold, judged=judged
                )
                for number, instant in enumerate(wanted)
            ]
            stored: list[Admission] = []
            for start in range(0, len(made), BATCH_ITEMS):
                stored += await self._store(tx, made[start : start + BATCH_ITEMS])
            detail = {"from_ms": ask.from_ms, "until_ms": ask.until_ms, "runs": len(stored)}
            await audit.append(tx, ask.actor, "trigger.backfill", ask.project, row["id"], decision, detail)
            return answer, stored

        if ask.dry_run:
            return (await self._database.read(work))[0]
        answer, stored = await self._database.transact(work)
        for start in range(0, len(stored), BATCH_ITEMS):
            await self._submitter.post(stored[start : start + BATCH_ITEMS])
        return answer

    async def _backfill_one(
        self,
        tx: Transaction,
        row: Row,
        ask: TriggerBackfill,
        instant: int,
        starts_ms: int,
        known: set[int],
        *,
        once: str,
        hold: bool,
        judged: int | None,
    ) -> Admission:
        # What is asked for once more has a key of its own, the same when the question itself comes once more.
        occasion = f"{instant}:{once}" if ask.again else str(instant)
        later = starts_ms if starts_ms > self._clock.now_ms() else None
        made = await self._admission(
            tx,
            row,
            "backfill",
            occasion,
            scheduled_for_ms=instant,
            not_before_ms=later,
            hold=hold,
            judged=judged,
            requested_by=Subject(type=ask.actor.type, id=ask.actor.id),
        )
        if instant not in known:
            return made
        return Admission(made.order, made.revision, made.trigger_revision, again=True)

    # All of them

    async def _ruled(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Ask policy and act; again when something changed between the two. Raises `unavailable` after some of it."""
        for _ in range(TRIES):
            try:
                return await attempt()
            except Outdated:
                continue
        raise Ql3Error("unavailable", "What this trigger starts, or who may, changes all the time.")

    async def _admission(
        self,
        tx: Transaction,
        row: Row,
        trigger_type: TriggerType,
        occasion: str,
        rulings: Mapping[str, Ruling] | None = None,
        *,
        more: dict[str, Any] | None = None,
        scheduled_for_ms: int | None = None,
        not_before_ms: int | None = None,
        parent_run_id: str | None = None,
        hold: bool = False,
        judged: int | None = None,
        requested_by: Subject | None = None,
    ) -> Admission:
        """The order of one occasion; `rulings` are what policy said of triggers that fire by themselves, `hold` what it
        said of the task's revision `judged`.

        Raises `conflict` for what is disabled, `project_archived` where nothing starts, `Outdated` to ask again.
        """
        task = (await tasks.current_executions(tx, [row["task_id"]])).get(row["task_id"])
        if rulings is not None:
            ruling = self._rulings.still(rulings.get(row["id"]), 0 if task is None else task["revision"])
            if not row["enabled"]:
                raise Ql3Error("conflict", "The trigger is disabled.", field="trigger")
            if not ruling.starts:
                raise Ql3Error("project_archived")
            hold = ruling.hold
        if task is None or task["deleted"] or not task["enabled"]:
            raise Ql3Error("conflict", "The task is disabled.", field="task")
        if judged not in (None, task["revision"]):
            raise Outdated
        spec = msgspec.json.decode(row["spec"], type=TriggerSpec)
        parameters = await self._executions.parameters(tx, row["project"], row["task_id"], task["revision"])
        inputs = {**(spec.inputs or {}), **more} if more else spec.inputs
        return for_fire(
            await self._executions.load(tx, row["task_id"], task["revision"]),
            trigger_id=row["id"],
            trigger_revision=row["revision"],
            trigger_type=trigger_type,
            occasion=occasion,
            inputs=check_inputs(parameters, inputs),
            now_ms=self._clock.now_ms(),
            scheduled_for_ms=scheduled_for_ms,
            not_before_ms=not_before_ms,
            parent_run_id=parent_run_id,
            hold=hold,
            requested_by=requested_by,
        )

    def _missed(self, row: Row, error: Ql3Error, at_ms: int) -> dict[str, Any]:
        """What did not become a run, and why, as a row that is counted and listed."""
        cause = _CAUSES.get((error.code, error.field)) or (
            INPUTS_REFUSED if (error.field or "").startswith("inputs") else error.code
        )
        named = {"trigger_id": row["id"], "task_id": row["task_id"], "project": row["project"]}
        missed = Missed(cause, Span(at_ms, at_ms, 1))
        return scheduling.missed_row(named, row["revision"], missed, self._clock.now_ms())

    async def _store(self, tx: Transaction, made: Sequence[Admission]) -> list[Admission]:
        if not made:
            return []
        rows = [admission.row() for admission in made]
        new = await admission_store.insert(tx, rows, await tx.now_ms() + ANSWER_MS, self._clock.now_ms())
        stored = [admission for admission in made if admission.order.order_id in new]
        tx.after_commit(lambda: count_fires(stored))
        return stored


class ChainLoop:
    """Reads the dispatcher's facts while some task follows another; hears of new ones by `listen`."""

    def __init__(
        self,
        occasions: Occasions,
        read: Callable[[str | None], Awaitable[FeedPage]],
        listen: Callable[[], Awaitable[None]],
    ) -> None:
        self._occasions = occasions
        self._read = read
        self._listen = listen
        self._listening = False

    async def step(self) -> bool | None:
        """Read one page; True when there is more."""
        if not await self._occasions.any_chain():
            return None
        if not self._listening:
            await self._listen()
            self._listening = True
        page = await self._read(await self._occasions.position())
        if page.gap:
            log.warning("facts of ended runs were missed; tasks that follow them do not run")
        await self._occasions.follow(page)
        return page.more or None


class BootLoop:
    """Fires boot triggers once for this start, as soon as that is possible."""

    def __init__(self, occasions: Occasions, *, starting: bool) -> None:
        self._occasions = occasions
        self._starting = starting

    async def step(self) -> None:
        """Does nothing after it went well, or when another scheduler was running already."""
        if self._starting:
            fired = await self._occasions.boot()
            self._starting = False
            if fired:
                log.info("boot triggers fired", count=fired)


def _follows(row: Row, spec: TriggerSpec, fact: RunChanged) -> bool:
    if spec.after_task != fact.task_name or fact.at_ms < row["updated_at_ms"]:
        return False
    wanted = {"success": ("succeeded",), "failure": ("failed", "timed_out"), "any": tuple(RUN_TERMINAL)}
    # A run that another one kept from starting has not ended anything.
    return fact.status in wanted[spec.after_on] and fact.error_code not in OVERLAPPED


def _ended(item: FeedItem) -> RunChanged | None:
    fact = fact_of(item, RunChanged)
    return fact if fact is not None and fact.status in RUN_TERMINAL else None
