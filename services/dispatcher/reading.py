"""What people read of the ledger: pages, events, attempts, explanations, workers, readiness."""

from __future__ import annotations

import base64
import binascii
from typing import Final

from schemas.errors import Ql3Error
from schemas.ids import is_id
from schemas.runs import AttemptPage, Explanation, Run, RunEventPage, RunList, RunPage
from schemas.workers import Worker, WorkerPage
from services.dispatcher import placing
from services.dispatcher.explain import explain
from services.dispatcher.records import Case, RunRecord
from services.dispatcher.store import cancellations, cases, holds, runs, workers
from services.dispatcher.store.revisions import Revisions
from services.dispatcher.views import attempt_view, event_view, run_view, worker_view
from services.kit.database import Transaction

_NEWEST: Final = (2**53 - 1, "g")
"""Sorts behind every run."""


async def run(tx: Transaction, revisions: Revisions, project: str, run_id: str) -> Run:
    """One run, with the reason why it waits. Raises `not_found`, the same for another project's run."""
    return await view(tx, revisions, await find(tx, project, run_id))


async def view(tx: Transaction, revisions: Revisions, record: RunRecord) -> Run:
    """A run as people read it; a queued one with the reason why it is not placed."""
    if record.status != "queued" or record.cancel_requested_at_ms is not None:
        return run_view(record)
    return run_view(record, (await placing.why(tx, revisions, record)).sentence)


async def find(tx: Transaction, project: str, run_id: str) -> RunRecord:
    """One run of a project. Raises `not_found`."""
    record = (await cases.load_runs(tx, [run_id], lock=False)).get(run_id)
    if record is None or record.project_id != project:
        raise Ql3Error("not_found", "There is no such run in this project.", field="run")
    return record


async def page(tx: Transaction, revisions: Revisions, question: RunList) -> RunPage:
    """Runs of a project, newest first. Raises `invalid` on a foreign cursor."""
    limit = question.page.limit
    found = await runs.page(
        tx, question.project, _position(question.page.cursor), limit + 1, question.task, question.status
    )
    shown = found[:limit]
    reasons: dict[str, str] = {}
    items: list[Run] = []
    for record in shown:
        reason = None
        if record.status == "queued" and record.cancel_requested_at_ms is None and len(reasons) < 8:
            # Once per lane: its runs wait for the same thing.
            reason = reasons.get(record.lane)
            if reason is None:
                reason = reasons[record.lane] = (await placing.why(tx, revisions, record)).sentence
        elif record.status == "queued":
            reason = reasons.get(record.lane)
        items.append(run_view(record, reason))
    return RunPage(items=items, next=_cursor(shown[-1]) if len(found) > limit else None)


async def events(tx: Transaction, project: str, run_id: str, after: int, limit: int) -> RunEventPage:
    """Events of a run, oldest first. Raises `not_found`."""
    await find(tx, project, run_id)
    rows = await runs.events_of(tx, run_id, after, limit + 1)
    shown = rows[:limit]
    more = str(shown[-1]["sequence"]) if len(rows) > limit else None
    return RunEventPage(items=[event_view(row) for row in shown], next=more)


async def attempts(tx: Transaction, project: str, run_id: str) -> AttemptPage:
    """All attempts of a run (at most 16). Raises `not_found`."""
    await find(tx, project, run_id)
    return AttemptPage(items=[attempt_view(a) for a in await runs.attempts_of(tx, run_id)], next=None)


async def explanation(
    tx: Transaction, revisions: Revisions, project: str, run_id: str, *, listening: bool = False
) -> Explanation:
    """Why a run is where it is. Raises `not_found`. `listening`: we were away and do not judge started attempts yet."""
    record = await find(tx, project, run_id)
    case: Case = (await cases.complete(tx, [record], lock=False))[run_id]
    now = await tx.now_ms()
    waiting = None
    if record.status == "queued" and record.cancel_requested_at_ms is None:
        waiting = await placing.why(tx, revisions, record)
    cancellation = None
    if record.attempt_id is not None and record.cancel_requested_at_ms is not None:
        cancellation = (await cancellations.read(tx, [record.attempt_id])).get(record.attempt_id)
    hold = (await holds.read(tx, [run_id])).get(run_id) if record.status == "waiting_approval" else None
    reason = explain(case, now, waiting=waiting, cancellation=cancellation, hold=hold, listening=listening)
    return Explanation(
        run=run_view(record, waiting.sentence if waiting else None),
        cause=reason.cause,
        sentence=reason.sentence,
        next_step=reason.next_step,
        facts=reason.facts,
    )


async def worker_page(tx: Transaction, after: str | None, limit: int) -> WorkerPage:
    """Workers by id."""
    now = await tx.now_ms()
    found = await workers.page(tx, after or "", limit + 1)
    shown = found[:limit]
    live = await workers.live_leases(tx, [worker.id for worker in shown])
    items: list[Worker] = [worker_view(worker, live.get(worker.id, 0), now) for worker in shown]
    return WorkerPage(items=items, next=shown[-1].id if len(found) > limit else None)


async def could_run(tx: Transaction) -> list[str]:
    """Why a run that is submitted now would not be started; empty when it would."""
    now = await tx.now_ms()
    online = await workers.seats(tx, now, lock=False)
    if not online:
        return ["no worker is online"]
    if all(worker.slots == 0 for worker in online):
        return ["no worker has slots"]
    return []


def _cursor(record: RunRecord) -> str:
    return base64.urlsafe_b64encode(f"{record.created_at_ms}.{record.id}".encode()).decode().rstrip("=")


def _position(cursor: str | None) -> tuple[int, str]:
    if cursor is None:
        return _NEWEST
    try:
        text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode("ascii")
    except (ValueError, binascii.Error):
        text = ""
    at, _, run_id = text.partition(".")
    if not at.isdecimal() or len(at) > 16 or not is_id(run_id):
        raise Ql3Error("invalid", "This is not a cursor of this list.", field="page.cursor")
    return int(at), run_id
