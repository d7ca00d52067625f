"""Approval requests, the decisions about them, the plans they point to, and the endings of held runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from schemas.approvals import ApprovalState, Binding
from schemas.errors import Ql3Error
from schemas.identity import Subject
from services.approval.requests import DecisionRow, Request, validate
from services.approval.store.cursors import decode_time_id, encode
from services.kit.database import Row, Statement, Transaction, id_set, json_set

_COLUMNS = (
    "r.id, r.project_id, r.version, r.state, r.mode, r.quorum, r.decider_role, r.rule, r.permission, r.action_type, "
    "r.action_ref, r.action_digest, r.preview_digest, r.preview, r.risk, r.requested_by_type, r.requested_by_id, "
    "r.requested_at_ms, r.expires_at_ms, r.decision_id, r.decision, r.decision_reason, r.decided_by_type, "
    "r.decided_by_id, r.decided_at_ms, r.consumption_id, r.dispatch_id, r.consumed_by_type, r.consumed_by_id, "
    "r.consumed_at_ms, r.withdrawal_id, r.withdrawn_by_type, r.withdrawn_by_id, r.withdrawn_at_ms, r.not_before_ms"
)
_GET = Statement(f"SELECT {_COLUMNS} FROM approval_requests AS r WHERE r.id = $1")  # noqa: S608
_LOCK = Statement(f"SELECT {_COLUMNS} FROM approval_requests AS r WHERE r.id = $1 {{for_update}}")  # noqa: S608
_MANY = id_set(f"SELECT {_COLUMNS} FROM approval_requests AS r WHERE r.id {{in:$1}}")  # noqa: S608
_INSERT = Statement("""
    INSERT INTO approval_requests (id, project_id, version, state, mode, quorum, decider_role, rule, permission,
      action_type, action_ref, action_digest, preview_digest, preview, risk, requested_by_type, requested_by_id,
      requested_at_ms, expires_at_ms, not_before_ms)
    VALUES ($1, $2, 1, 'pending', $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18)
    ON CONFLICT (id) DO NOTHING
""")
_UPDATE = Statement("""
    UPDATE approval_requests SET version = $3, state = $4, decision_id = $5, decision = $6, decision_reason = $7,
      decided_by_type = $8, decided_by_id = $9, decided_at_ms = $10, consumption_id = $11, dispatch_id = $12,
      consumed_by_type = $13, consumed_by_id = $14, consumed_at_ms = $15, withdrawal_id = $16, withdrawn_by_type = $17,
      withdrawn_by_id = $18, withdrawn_at_ms = $19, consume_after_ms = $20, consume_refusal = NULL
    WHERE id = $1 AND version = $2
""")
_CONSUME_LATER = Statement("""
    UPDATE approval_requests SET consume_after_ms = $2, consume_refusal = $3 WHERE id = $1 AND state = 'approved'
""")
_BY_CONSUMPTION = Statement(
    f"SELECT {_COLUMNS} FROM approval_requests AS r WHERE r.consumption_id = $1"  # noqa: S608
)
_TO_CONSUME = Statement("""
    SELECT id FROM approval_requests
    WHERE state = 'approved' AND consume_after_ms <= $1 AND expires_at_ms > $2
    ORDER BY consume_after_ms, id LIMIT $3
""")
_NEXT_TO_CONSUME = Statement("""
    SELECT min(consume_after_ms) AS at_ms FROM approval_requests WHERE state = 'approved' AND expires_at_ms > $1
""")

_DECISION = (
    "d.id, d.request_id, d.decision, d.reason, d.decided_by_type, d.decided_by_id, d.authentication_id, d.assurance, "
    "d.authenticated_at_ms, d.project_version, d.binding_version, d.decided_at_ms"
)
_DECISION_GET = Statement(f"SELECT {_DECISION} FROM approval_decisions AS d WHERE d.id = $1")  # noqa: S608
_DECISIONS = id_set(
    f"SELECT {_DECISION} FROM approval_decisions AS d WHERE d.request_id {{in:$1}} ORDER BY d.decided_at_ms, d.id"  # noqa: S608
)
_INSERT_DECISION = Statement("""
    INSERT INTO approval_decisions (id, request_id, project_id, mode, requested_by_type, requested_by_id, decision,
      reason, decided_by_type, decided_by_id, authentication_id, assurance, authenticated_at_ms, project_version,
      binding_version, decided_at_ms)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16)
""")

_PLAN_INSERT = Statement("""
    INSERT INTO approved_action_plans
      (action_ref, project_id, action_type, action_digest, ask_digest, plan, created_at_ms)
    VALUES ($1, $2, $3, $4, $5, $6, $7)
""")
_PLAN_GET = Statement("""
    SELECT project_id, action_type, action_digest, ask_digest, plan FROM approved_action_plans WHERE action_ref = $1
""")

_LISTED = f"{_COLUMNS}, e.status AS execution_status, e.last_result_code, e.lease_expires_at_ms, r.consume_refusal"
_FROM = "approval_requests AS r LEFT JOIN approved_action_dispatch_executions AS e ON e.dispatch_id = r.dispatch_id"
_AFTER = "r.project_id = $1 AND (r.requested_at_ms, r.id) < ($2, $3)"
_ORDER = "ORDER BY r.requested_at_ms DESC, r.id DESC LIMIT $4"
_LIST = Statement(f"SELECT {_LISTED} FROM {_FROM} WHERE {_AFTER} {_ORDER}")  # noqa: S608
_LIST_STATE = Statement(f"SELECT {_LISTED} FROM {_FROM} WHERE {_AFTER} AND r.state = $5 {_ORDER}")  # noqa: S608
_LIST_LIVE = Statement(
    f"SELECT {_LISTED} FROM {_FROM} WHERE {_AFTER} AND r.state = $5 AND r.expires_at_ms > $6 {_ORDER}"  # noqa: S608
)
_LIST_EXPIRED = Statement(
    f"SELECT {_LISTED} FROM {_FROM} WHERE {_AFTER} AND r.state IN ('pending', 'approved') "  # noqa: S608
    f"AND r.expires_at_ms <= $5 {_ORDER}"
)
_VIEW = Statement(f"SELECT {_LISTED} FROM {_FROM} WHERE r.id = $1 AND r.project_id = $2")  # noqa: S608

_END = Statement("""
    INSERT INTO approval_endings (request_id, dispatch_id, project_id, outcome, created_at_ms, due_at_ms, tries)
    VALUES ($1, $2, $3, $4, $5, $6, 0) ON CONFLICT (request_id) DO NOTHING
""")
_ENDED = Statement("SELECT outcome FROM approval_endings WHERE request_id = $1")
_EXPIRED = """
    SELECT r.id, r.project_id, r.version, r.state, r.action_type FROM approval_requests AS r
    LEFT JOIN approval_endings AS n ON n.request_id = r.id
    WHERE r.state IN ('pending', 'approved') AND r.expires_at_ms <= $1 AND r.expires_at_ms > $2
      AND r.action_type = 'run.release' AND n.request_id IS NULL
    ORDER BY r.expires_at_ms, r.id LIMIT $3
"""
_EXPIRED_HOLDS = Statement(_EXPIRED)
# A request that is being decided at this instant is left for the next look.
_LOCK_EXPIRED_HOLDS = Statement(_EXPIRED, postgresql=_EXPIRED + " FOR UPDATE OF r SKIP LOCKED")
_DUE_ENDINGS = Statement("""
    SELECT n.request_id, n.dispatch_id, n.project_id, n.outcome, n.tries, r.action_ref
    FROM approval_endings AS n JOIN approval_requests AS r ON r.id = n.request_id
    WHERE n.answered_at_ms IS NULL AND n.due_at_ms <= $1 ORDER BY n.due_at_ms, n.request_id LIMIT $2
""")
_ENDING_ANSWERED = Statement("""
    UPDATE approval_endings SET answer = $2, answered_at_ms = $3, due_at_ms = NULL, tries = tries + 1
    WHERE request_id = $1 AND answered_at_ms IS NULL
""")
_ENDING_LATER = Statement("""
    UPDATE approval_endings SET due_at_ms = $2, tries = tries + 1 WHERE request_id = $1 AND answered_at_ms IS NULL
""")


class Listed(NamedTuple):
    """A request with what came of it."""

    request: Request
    execution_status: str | None
    execution_result: str | None
    lease_expires_at_ms: int | None


class Plan(NamedTuple):
    """The stored plan of an action."""

    project: str
    action_type: str
    action_digest: str
    ask_digest: str
    plan: dict[str, Any]


class Ending(NamedTuple):
    """A held run that is still to be told that it will not be released."""

    request_id: str
    dispatch_id: str
    project: str
    outcome: Literal["rejected", "withdrawn", "expired"]
    tries: int
    run: str


class Expired(NamedTuple):
    """A hold that expired and whose run does not know."""

    id: str
    project: str
    version: int


async def get(tx: Transaction, request_id: str, *, lock: bool = False) -> Request | None:
    """A request; with `lock`, nobody else changes it until the transaction ends."""
    row = await tx.fetch_one(_LOCK if lock else _GET, request_id)
    return _request(row) if row else None


async def many(tx: Transaction, ids: Sequence[str]) -> dict[str, Request]:
    """Requests by id, as far as they exist."""
    return {row["id"]: _request(row) for row in await tx.fetch(_MANY, json_set(ids))}


async def by_consumption(tx: Transaction, consumption_id: str) -> Request | None:
    """The request that a consumption used."""
    row = await tx.fetch_one(_BY_CONSUMPTION, consumption_id)
    return _request(row) if row else None


async def insert_many(tx: Transaction, made: Sequence[Request]) -> None:
    """New pending requests; an id that is there already is left alone."""
    await tx.execute_many(
        _INSERT,
        [
            (
                r.id,
                r.project,
                r.mode,
                r.quorum,
                r.decider_role,
                r.rule,
                r.binding.permission,
                r.binding.action_type,
                r.binding.action_ref,
                r.binding.action_digest,
                r.binding.preview_digest,
                msgspec.json.encode(r.preview).decode(),
                r.risk,
                r.requested_by.type,
                r.requested_by.id,
                r.requested_at_ms,
                r.expires_at_ms,
                r.not_before_ms,
            )
            for r in made
        ],
    )


async def update(tx: Transaction, before: Request, after: Request, *, wait_ms: int = 0) -> None:
    """Store a step of the machine; what is approved is handed over after `wait_ms`.

    Raises `version_conflict` when the row has moved.

    When to try something again is judged by the database's clock: a wall clock that is set back must not stop work.
    """
    changed = await tx.execute(
        _UPDATE,
        before.id,
        before.version,
        after.version,
        after.state,
        after.decision_id,
        after.decision,
        after.decision_reason,
        after.decided_by.type if after.decided_by else None,
        after.decided_by.id if after.decided_by else None,
        after.decided_at_ms,
        after.consumption_id,
        after.dispatch_id,
        after.consumed_by.type if after.consumed_by else None,
        after.consumed_by.id if after.consumed_by else None,
        after.consumed_at_ms,
        after.withdrawal_id,
        after.withdrawn_by.type if after.withdrawn_by else None,
        after.withdrawn_by.id if after.withdrawn_by else None,
        after.withdrawn_at_ms,
        await tx.now_ms() + wait_ms if after.state == "approved" else None,
    )
    if changed != 1:
        raise Ql3Error("version_conflict")


async def to_consume(tx: Transaction, now_ms: int, limit: int) -> list[str]:
    """Approved requests, not expired at `now_ms` of the wall, whose action is to be handed over now."""
    return [row["id"] for row in await tx.fetch(_TO_CONSUME, await tx.now_ms(), now_ms, limit)]


async def next_to_consume(tx: Transaction, now_ms: int) -> int | None:
    """In how many milliseconds the next approved request is to be handed over; None when none waits."""
    row = await tx.fetch_one(_NEXT_TO_CONSUME, now_ms)
    return None if row is None or row["at_ms"] is None else max(0, row["at_ms"] - await tx.now_ms())


async def consume_later(tx: Transaction, request_id: str, wait_ms: int, refusal: str) -> None:
    """Try the consumption again after `wait_ms`; `refusal` is shown until then."""
    await tx.execute(_CONSUME_LATER, request_id, await tx.now_ms() + wait_ms, refusal[:64])


async def decision(tx: Transaction, decision_id: str) -> DecisionRow | None:
    """A decision by its id."""
    row = await tx.fetch_one(_DECISION_GET, decision_id)
    return _decision(row) if row else None


async def decisions(tx: Transaction, request_ids: Sequence[str]) -> dict[str, list[DecisionRow]]:
    """The decisions about some requests, oldest first."""
    found: dict[str, list[DecisionRow]] = {}
    for row in await tx.fetch(_DECISIONS, json_set(request_ids)):
        found.setdefault(row["request_id"], []).append(_decision(row))
    return found


async def insert_decision(tx: Transaction, request: Request, made: DecisionRow) -> None:
    """One person's decision."""
    await tx.execute(
        _INSERT_DECISION,
        made.id,
        request.id,
        request.project,
        request.mode,
        request.requested_by.type,
        request.requested_by.id,
        made.decision,
        made.reason,
        made.decided_by.type,
        made.decided_by.id,
        made.authentication_id,
        made.assurance,
        made.authenticated_at_ms,
        made.project_version,
        made.binding_version,
        made.decided_at_ms,
    )


async def insert_plan(tx: Transaction, action_ref: str, plan: Plan, now_ms: int) -> None:
    """The plan of an action."""
    text = msgspec.json.encode(plan.plan).decode()
    await tx.execute(
        _PLAN_INSERT,
        action_ref,
        plan.project,
        plan.action_type,
        plan.action_digest,
        plan.ask_digest,
        text,
        now_ms,
    )


async def plan(tx: Transaction, action_ref: str) -> Plan | None:
    """The plan behind an action's reference."""
    row = await tx.fetch_one(_PLAN_GET, action_ref)
    if row is None:
        return None
    return Plan(
        row["project_id"],
        row["action_type"],
        row["action_digest"],
        row["ask_digest"],
        msgspec.json.decode(row["plan"]),
    )


async def page(
    tx: Transaction, project: str, state: ApprovalState | None, now_ms: int, limit: int, cursor: str | None
) -> tuple[list[Listed], str | None]:
    """Requests of a project, newest first; `state` is the one that people see."""
    at_ms, last = decode_time_id(cursor)
    keys = (project, at_ms, last, limit + 1)
    if state is None:
        rows = await tx.fetch(_LIST, *keys)
    elif state == "expired":
        rows = await tx.fetch(_LIST_EXPIRED, *keys, now_ms)
    elif state in ("pending", "approved"):
        rows = await tx.fetch(_LIST_LIVE, *keys, state, now_ms)
    else:
        rows = await tx.fetch(_LIST_STATE, *keys, state)
    items = [_listed(row) for row in rows[:limit]]
    last_row = items[-1].request if items else None
    more = encode(last_row.requested_at_ms, last_row.id) if last_row and len(rows) > limit else None
    return items, more


async def view(tx: Transaction, project: str, request_id: str) -> Listed | None:
    """A request of this project with what came of it."""
    row = await tx.fetch_one(_VIEW, request_id, project)
    return _listed(row) if row else None


async def end(
    tx: Transaction,
    request_id: str,
    project: str,
    outcome: Literal["rejected", "withdrawn", "expired"],
    dispatch_id: str,
    now_ms: int,
) -> None:
    """Open the ending of a held run: it is told until it answers."""
    await tx.execute(_END, request_id, dispatch_id, project, outcome, now_ms, await tx.now_ms())


async def ended(tx: Transaction, request_id: str) -> bool:
    """Whether the held run is told, or being told, that it will not be released."""
    return await tx.fetch_one(_ENDED, request_id) is not None


async def expired_holds(
    tx: Transaction, now_ms: int, since_ms: int, limit: int, *, lock: bool = False
) -> list[Expired]:
    """Holds that expired after `since_ms` and whose run does not know."""
    rows = await tx.fetch(_LOCK_EXPIRED_HOLDS if lock else _EXPIRED_HOLDS, now_ms, since_ms, limit)
    return [Expired(row["id"], row["project_id"], row["version"]) for row in rows]


async def due_endings(tx: Transaction, limit: int) -> list[Ending]:
    """Endings to be told now."""
    return [
        Ending(
            row["request_id"], row["dispatch_id"], row["project_id"], row["outcome"], row["tries"], row["action_ref"]
        )
        for row in await tx.fetch(_DUE_ENDINGS, await tx.now_ms(), limit)
    ]


async def ending_answered(tx: Transaction, request_id: str, answer: str, now_ms: int) -> None:
    """The run's owner has answered; the ending is closed."""
    await tx.execute(_ENDING_ANSWERED, request_id, answer, now_ms)


async def ending_later(tx: Transaction, request_id: str, wait_ms: int) -> None:
    """Nobody answered; tell it again after `wait_ms`."""
    await tx.execute(_ENDING_LATER, request_id, await tx.now_ms() + wait_ms)


def _subject(row: Row, prefix: str) -> Subject | None:
    kind = row[f"{prefix}_type"]
    return Subject(type=kind, id=row[f"{prefix}_id"]) if kind is not None else None


def _request(row: Row) -> Request:
    try:
        return validate(_plain_request(row))
    except (Ql3Error, msgspec.DecodeError) as error:
        # Fail closed: what does not hold is neither shown nor decided, and never repaired.
        raise Ql3Error("unavailable", "A stored request does not hold.", data={"id": row["id"]}) from error


def _plain_request(row: Row) -> Request:
    return Request(
        id=row["id"],
        project=row["project_id"],
        version=row["version"],
        state=row["state"],
        mode=row["mode"],
        quorum=row["quorum"],
        decider_role=row["decider_role"],
        rule=row["rule"],
        binding=Binding(
            permission=row["permission"],
            action_type=row["action_type"],
            action_ref=row["action_ref"],
            action_digest=row["action_digest"],
            preview_digest=row["preview_digest"],
        ),
        preview=msgspec.json.decode(row["preview"]),
        risk=row["risk"],
        requested_by=Subject(type=row["requested_by_type"], id=row["requested_by_id"]),
        requested_at_ms=row["requested_at_ms"],
        expires_at_ms=row["expires_at_ms"],
        not_before_ms=row["not_before_ms"],
        decision_id=row["decision_id"],
        decision=row["decision"],
        decision_reason=row["decision_reason"],
        decided_by=_subject(row, "decided_by"),
        decided_at_ms=row["decided_at_ms"],
        consumption_id=row["consumption_id"],
        dispatch_id=row["dispatch_id"],
        consumed_by=_subject(row, "consumed_by"),
        consumed_at_ms=row["consumed_at_ms"],
        withdrawal_id=row["withdrawal_id"],
        withdrawn_by=_subject(row, "withdrawn_by"),
        withdrawn_at_ms=row["withdrawn_at_ms"],
    )


def _listed(row: Row) -> Listed:
    result = row["last_result_code"] or row["consume_refusal"]
    return Listed(_request(row), row["execution_status"], result, row["lease_expires_at_ms"])


def _decision(row: Row) -> DecisionRow:
    return DecisionRow(
        id=row["id"],
        request_id=row["request_id"],
        decision=row["decision"],
        reason=row["reason"],
        decided_by=Subject(type=row["decided_by_type"], id=row["decided_by_id"]),
        authentication_id=row["authentication_id"],
        assurance=row["assurance"],
        authenticated_at_ms=row["authenticated_at_ms"],
        project_version=row["project_version"],
        binding_version=row["binding_version"],
        decided_at_ms=row["decided_at_ms"],
    )
