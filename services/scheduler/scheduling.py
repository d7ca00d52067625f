"""Parts of a transaction that put a trigger on the calendar, stop it, begin it again, and count what it missed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from schemas.errors import Ql3Error
from schemas.identity import Actor
from schemas.subjects import event
from schemas.triggers import TriggerMissed, TriggerSpec
from services.kit import metrics, outbox
from services.kit.database import Row, Transaction
from services.kit.ids import new_id
from services.scheduler import triggers as rules
from services.scheduler.bells import BELL, CHAIN_BELL, RING_BELL
from services.scheduler.decisions import CAUSES, TRIGGER_DISABLED, Decision, Missed, begin, settle_stop
from services.scheduler.store import schedules
from services.scheduler.store import triggers as store
from services.scheduler.triggers import Plan, Span


def moved(
    trigger_id: str, decision: Decision, now_ms: int, *, stopped: tuple[int | None, str | None] = (None, None)
) -> dict[str, Any]:
    """A schedule row as it stands after a decision."""
    fired = [fire.instant_ms for fire in decision.fires]
    running = stopped[1] is None
    return {
        "trigger_id": trigger_id,
        "decided_through_ms": decision.decided_through_ms,
        "next_fire_at_ms": decision.next_fire_at_ms if running else None,
        "wake_at_ms": decision.wake_at_ms if running else None,
        "last_ms": fired[-1] if fired else None,
        "stopped_at_ms": stopped[0],
        "stopped_by": stopped[1],
        "updated_at_ms": now_ms,
    }


def missed_row(row: Mapping[str, Any], trigger_revision: int, missed: Missed, now_ms: int) -> dict[str, str | int]:
    """A row of missed fires; `row` names the trigger, its task and project."""
    return {
        "id": new_id(),
        "trigger_id": row["trigger_id"],
        "task_id": row["task_id"],
        "project": row["project"],
        "trigger_revision": trigger_revision,
        "cause": missed.cause,
        "first_ms": missed.span.first_ms,
        "last_ms": missed.span.last_ms,
        "count": missed.span.count,
        "at_least": int(missed.span.at_least),
        "recorded_at_ms": now_ms,
    }


async def record_missed(tx: Transaction, rows: list[dict[str, Any]]) -> None:
    """Count missed instants and tell it, those of one trigger and cause together."""
    rows = _together(rows)
    await store.record_missed(tx, rows)
    tx.after_commit(lambda: _count_missed(rows))
    await outbox.facts(
        tx,
        [
            (
                event("trigger", row["project"], row["trigger_id"], "missed"),
                TriggerMissed(
                    project=row["project"],
                    trigger_id=row["trigger_id"],
                    task_id=row["task_id"],
                    cause=row["cause"],
                    first_ms=row["first_ms"],
                    last_ms=row["last_ms"],
                    count=row["count"],
                    at_least=bool(row["at_least"]),
                    at_ms=row["recorded_at_ms"],
                ),
            )
            for row in rows
        ],
    )


def _together(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = (row["trigger_id"], row["trigger_revision"], row["cause"])
        known = found.get(key)
        found[key] = (
            row
            if known is None
            else {
                **known,
                "first_ms": min(known["first_ms"], row["first_ms"]),
                "last_ms": max(known["last_ms"], row["last_ms"]),
                "count": known["count"] + row["count"],
                "at_least": max(known["at_least"], row["at_least"]),
            }
        )
    return list(found.values())


def _count_missed(rows: list[dict[str, Any]]) -> None:
    # Orders refused by the dispatcher are missed for its error code; those are many, so they share a label.
    for row in rows:
        cause = row["cause"] if row["cause"] in CAUSES else "refused"
        metrics.MISSED.labels(cause).inc(row["count"])


async def plan_of(tx: Transaction, trigger_id: str, anchor_ms: int) -> Plan:
    """The plan of a trigger's current revision."""
    spec = (await schedules.specs(tx, [trigger_id])).get(trigger_id)
    if spec is None:
        raise Ql3Error("revision_unavailable", data={"trigger_id": trigger_id})
    return rules.stored_plan(trigger_id, spec["spec"], spec["content_digest"], anchor_ms)


async def add(
    tx: Transaction,
    *,
    project: str,
    task_id: str,
    task_enabled: bool,
    spec: TriggerSpec,
    actor: Actor,
    now_ms: int,
    mutation_id: str | None = None,
    request: str = "",
    token_digest: str | None = None,
    look_now: bool = False,
) -> str:
    """A new trigger with its schedule, in the transaction of whoever makes it; answers its id.

    `look_now`: the project has rules, by which its first run may have to ask ahead of its time.
    """
    if (token_digest is not None) != (spec.kind == "webhook"):
        raise Ql3Error("invalid", "A webhook is made alone, with the digest of its secret.", field="spec.kind")
    trigger_id = new_id()
    text = rules.spec_text(spec)
    await store.insert(tx, trigger_id, project, task_id, spec.kind, enabled=spec.enabled, now_ms=now_ms)
    await store.insert_revision(
        tx,
        trigger_id,
        1,
        text,
        rules.content_digest(text),
        mutation_id=mutation_id,
        request_digest=request or rules.content_digest(text),
        created_by=(actor.type, actor.id),
        now_ms=now_ms,
    )
    if token_digest is not None:
        await store.set_webhook(tx, trigger_id, token_digest, now_ms)
    await place(
        tx,
        trigger_id,
        project,
        task_id,
        1,
        spec,
        task_enabled=task_enabled,
        after_ms=now_ms,
        now_ms=now_ms,
        look_now=look_now,
    )
    return trigger_id


async def place(
    tx: Transaction,
    trigger_id: str,
    project: str,
    task_id: str,
    revision: int,
    spec: TriggerSpec,
    *,
    task_enabled: bool,
    after_ms: int,
    now_ms: int,
    look_now: bool,
) -> None:
    anchor_ms = now_ms // 1000 * 1000
    plan = rules.plan(trigger_id, spec, anchor_ms)
    if plan is None:
        tx.after_commit(tx.database.bell(CHAIN_BELL).set)
        return
    stopped_by = "trigger_disabled" if not spec.enabled else None if task_enabled else "task_disabled"
    decision = begin(plan, after_ms, now_ms)
    running = stopped_by is None
    await schedules.insert(
        tx,
        trigger_id,
        project,
        task_id,
        revision,
        anchor_ms,
        decision.decided_through_ms,
        decision.next_fire_at_ms if running else None,
        _wake(decision, now_ms, look_now=look_now) if running else None,
        (None if running else now_ms, stopped_by),
        now_ms,
    )
    tx.after_commit(tx.database.bell(BELL).set)


async def stop(tx: Transaction, rows: Sequence[Row], cause: str, withdrawn: list[Row], now_ms: int) -> None:
    """Stop running schedules; what was admitted ahead and taken back again is missed for the same cause."""
    await schedules.move(
        tx,
        [
            {
                "trigger_id": row["trigger_id"],
                "decided_through_ms": row["decided_through_ms"],
                "next_fire_at_ms": None,
                "wake_at_ms": None,
                "last_ms": None,
                "stopped_at_ms": now_ms,
                "stopped_by": cause,
                "updated_at_ms": now_ms,
            }
            for row in rows
            # A trigger that is disabled stays so when its task is enabled.
            if row["stopped_by"] in (None, "project_archived") or cause == TRIGGER_DISABLED
        ],
    )
    missed = [
        missed_row(row, row["trigger_revision"], Missed(cause, Span(instant, instant, 1)), now_ms)
        for row in withdrawn
        if (instant := row["scheduled_for_ms"]) is not None
    ]
    if withdrawn:
        tx.after_commit(tx.database.bell(RING_BELL).set)
    await record_missed(tx, missed)


def _wake(decision: Decision, now_ms: int, *, look_now: bool) -> int | None:
    return now_ms if look_now and decision.wake_at_ms is not None else decision.wake_at_ms


async def go_on(tx: Transaction, row: Row, stopped_by: str | None, now_ms: int, *, look_now: bool) -> None:
    """A stopped schedule begins again, or stays stopped for another cause; what passed meanwhile is missed."""
    plan = await plan_of(tx, row["trigger_id"], row["anchor_ms"])
    decision = settle_stop(plan, row["decided_through_ms"], now_ms, row["stopped_by"])
    missed = [missed_row(row, row["trigger_revision"], part, now_ms) for part in decision.missed]
    stopped = (now_ms, stopped_by) if stopped_by else (None, None)
    after = moved(row["trigger_id"], decision, now_ms, stopped=stopped)
    if stopped_by is None:
        after["wake_at_ms"] = _wake(decision, now_ms, look_now=look_now)
    await schedules.move(tx, [after])
    await record_missed(tx, missed)
    tx.after_commit(tx.database.bell(BELL).set)
