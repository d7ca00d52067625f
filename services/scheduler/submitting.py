"""Handing open orders to the dispatcher, and closing them by its answers.

An order is asked for at once after its commit. When nobody answers, it goes into the dispatcher's queue instead and is
rung from the table; its acknowledgement there only says that the run is kept, so it is asked for once more, to learn
what became of it. Only an answer closes an order.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import msgspec
import structlog

from schemas.errors import Ql3Error
from schemas.limits import BATCH_ITEMS
from schemas.runs import RunOrder, SubmitAnswer, SubmitRuns, Submitted
from schemas.subjects import command
from services.kit import metrics, outbox
from services.kit.clock import Clock
from services.kit.database import Database, Row, Transaction
from services.kit.orders import next_ring_ms
from services.scheduler.admissions import Admission, messages
from services.scheduler.bells import RING_BELL
from services.scheduler.decisions import BLOCKED_BY_OVERLAP, Missed
from services.scheduler.executions import Executions
from services.scheduler.scheduling import missed_row, record_missed
from services.scheduler.store import admissions as store
from services.scheduler.triggers import Span

ANSWER_MS: Final = 8_000
"""How long the question to the dispatcher may take before the order is rung."""
AT_ONCE: Final = 8
"""Questions about scheduled runs that are under way at the same time."""
OVERLAPPED: Final = frozenset({"overlap_skipped", "overlap_queue_full"})
"""Errors of a run that another run of its task kept from starting."""

Submit = Callable[[SubmitRuns], Awaitable[SubmitAnswer]]
Answers = dict[str, Submitted | Ql3Error]
"""By order id: what the dispatcher committed or refused, or why it was not asked."""

log: structlog.stdlib.BoundLogger = structlog.get_logger("ql3.scheduler")


class Submitter:
    """The road to the dispatcher for all orders of one scheduler."""

    def __init__(self, database: Database, clock: Clock, executions: Executions, submit: Submit) -> None:
        self._database = database
        self._clock = clock
        self._executions = executions
        self._submit = submit
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._posted: set[asyncio.Task[None]] = set()
        self._answered: dict[str, Submitted] = {}
        self._closing: asyncio.Task[None] | None = None

    async def stop(self) -> None:
        """Finish what is under way."""
        while self._posted:
            await asyncio.wait(self._posted)
        if self._closing is not None:
            await asyncio.gather(self._closing, return_exceptions=True)

    async def ask(self, admissions: Sequence[Admission]) -> Answers:
        """What became of these orders. Those without an answer are in the dispatcher's queue when this returns."""
        answers: Answers = {}
        sent = list(messages(admissions))
        replies = await asyncio.gather(*(self._submit(message) for message in sent), return_exceptions=True)
        for message, reply in zip(sent, replies, strict=True):
            if isinstance(reply, SubmitAnswer):
                answers |= {result.order_id: result for result in reply.results}
            elif isinstance(reply, Ql3Error):
                answers |= dict.fromkeys((order.order_id for order in message.runs), reply)
            else:
                raise reply
        self._note(answers)
        unanswered = [one for one in admissions if not isinstance(answers.get(one.order.order_id), Submitted)]
        if unanswered:
            await self._database.transact(lambda tx: self._queue(tx, unanswered))
        return answers

    async def post(self, admissions: Sequence[Admission]) -> None:
        """As `ask`, in the background; waits only while too many questions are under way."""
        if not admissions:
            return
        await self._slots.acquire()
        task = asyncio.create_task(self._post(list(admissions)), name="submit")
        self._posted.add(task)
        task.add_done_callback(self._done)

    async def _post(self, admissions: list[Admission]) -> None:
        await self.ask(admissions)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._slots.release()
        self._posted.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # The orders are open rows: they are rung again.
            log.warning("orders were not handed over yet", error=type(error).__name__)

    async def admitted(self, tx: Transaction, row: Row) -> Admission:
        """An order that is stored already."""
        return await admission_of(tx, self._executions, row)

    async def acknowledged(self, ids: Sequence[str]) -> None:
        """The dispatcher has these from its queue; ask what became of those that are still open here.

        Those that were withdrawn meanwhile are taken back.
        """
        for start in range(0, len(ids), BATCH_ITEMS):
            part = list(ids[start : start + BATCH_ITEMS])
            await self._database.transact(lambda tx, part=part: self._born(tx, part))
            await self.ask(await self._database.read(lambda tx, part=part: self._open(tx, part)))

    async def _born(self, tx: Transaction, ids: list[str]) -> None:
        if await store.born(tx, ids, await tx.now_ms()):
            tx.after_commit(tx.database.bell(RING_BELL).set)

    async def _open(self, tx: Transaction, ids: list[str]) -> list[Admission]:
        return [await admission_of(tx, self._executions, row) for row in await store.open_by_ids(tx, ids)]

    async def _queue(self, tx: Transaction, admissions: list[Admission]) -> None:
        ring_at = next_ring_ms(1, await tx.now_ms())
        await queue_orders(tx, admissions)
        await store.rung(tx, {one.order.order_id: ring_at for one in admissions})

    # Answers are noted beside whoever waits for them, many in one transaction.

    def _note(self, answers: Answers) -> None:
        self._answered |= {key: answer for key, answer in answers.items() if isinstance(answer, Submitted)}
        if self._answered and (self._closing is None or self._closing.done()):
            self._closing = asyncio.create_task(self._close(), name="close orders")

    async def _close(self) -> None:
        while self._answered:
            answered, self._answered = self._answered, {}
            try:
                await self._database.transact(lambda tx, answered=answered: self._write(tx, answered))
            except Exception as error:  # they stay open, are rung again and answered again
                log.warning("answers were not noted", error=type(error).__name__)

    async def _write(self, tx: Transaction, answered: dict[str, Submitted]) -> None:
        now_ms = await tx.now_ms()
        codes = {key: code for key, answer in answered.items() if (code := _refusal(answer)) is not None}
        committed = [key for key in answered if key not in codes]
        if committed:
            await store.commit(tx, committed, now_ms)
        if not codes:
            return
        refused = await store.refuse(tx, codes, now_ms)
        missed: list[dict[str, Any]] = []
        for row in refused:
            instant = row["scheduled_for_ms"]
            if row["trigger_id"] is None or instant is None:
                continue
            cause = BLOCKED_BY_OVERLAP if row["error_code"] in OVERLAPPED else row["error_code"]
            part = Missed(cause, Span(instant, instant, 1))
            missed.append(missed_row(row, row["trigger_revision"], part, self._clock.now_ms()))
        await record_missed(tx, missed)


def count_fires(admissions: Sequence[Admission]) -> None:
    """Committed orders of triggers, for who watches."""
    for kind, count in Counter(admission.order.trigger_type for admission in admissions).items():
        metrics.FIRES.labels(kind).inc(count)


async def admission_of(tx: Transaction, executions: Executions, row: Row) -> Admission:
    """An order as it was admitted."""
    pinned = await executions.load(tx, row["task_id"], row["task_revision"])
    return Admission(msgspec.json.decode(row["run_order"], type=RunOrder), pinned.revision)


async def queue_orders(tx: Transaction, admissions: Sequence[Admission]) -> None:
    """Put orders into the dispatcher's queue once this transaction has committed."""
    subject = command("dispatcher", "submit")
    await outbox.orders(tx, [(subject, message) for message in messages(admissions)])


def _refusal(answer: Submitted) -> str | None:
    if answer.run is None:
        return answer.error or "internal_error"
    # The run is kept, as ended; for its trigger it is a missed fire.
    return answer.run.error_code if answer.run.error_code in OVERLAPPED and answer.run.trigger_id else None
