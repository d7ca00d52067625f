"""The audit ledger of a service: who did what, written in the transaction that did it, chained by hash afterwards.

`append` writes the row; no row, no mutation. A sealer gives each committed row its position and a hash over the row
and the hash before it, so that an edited, missing or moved row shows in `verify`. A purge leaves a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from schemas import limits
from schemas.canonical import canonical, digest
from schemas.errors import Ql3Error
from schemas.identity import Actor, PolicyDecision, Subject
from schemas.ids import is_id
from schemas.paging import Page
from schemas.system import AuditEvent, AuditPage, AuditVerdict
from services.kit import purge as guarded
from services.kit.database import Database, Row, Statement, Transaction, json_set
from services.kit.ids import new_id

BELL: Final = "audit"
"""The name of the database's bell that wakes the sealer."""
FALLBACK_S: Final = 1.0
"""How often the sealer looks without a bell: a row is sealed within a second of its commit."""
DETAIL_BYTES: Final = 4096
_PROBLEMS = 20
_ROW_BYTES = 1024
"""What a row of a page takes besides its detail, reckoned generously."""
_WIDEST_CHARACTER = 4

_INSERT = Statement("""
    INSERT INTO audit_events
      (id, occurred_at_ms, actor_type, actor_id, authentication_id, action, project, target, decision, detail)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)
""")
_ENQUEUE = Statement("INSERT INTO audit_unsealed (event_id) VALUES ($1)")


async def append(
    tx: Transaction,
    actor: Actor | Subject | None,
    action: str,
    project: str | None,
    target: str | None,
    decision: PolicyDecision | str,
    detail: Mapping[str, Any] | None = None,
) -> str:
    """Records an act of `actor` (None: nobody known) in the mutation's transaction; answers the row's id.

    `decision` is policy's answer, whose fence is recorded with it, or a word such as `allow` or `fence_rejected`.
    `detail` is plain data without floats, at most 4 KiB as canonical JSON, and never holds a secret value.
    """
    facts = dict(detail or {})
    outcome = decision
    if isinstance(decision, PolicyDecision):
        outcome = decision.effect
        facts["policy"] = msgspec.to_builtins(
            {
                "project_version": decision.project_version,
                "binding_version": decision.binding_version,
                "role": decision.role,
                "reasons": decision.reasons,
            }
        )
    text = canonical(facts)
    if len(text) > DETAIL_BYTES:
        raise Ql3Error("too_large", f"The detail of an audit row is larger than {DETAIL_BYTES} bytes.")
    event_id = new_id()
    await tx.execute(
        _INSERT,
        event_id,
        await tx.now_ms(),
        actor.type if actor else None,
        actor.id if actor else None,
        actor.authentication_id if isinstance(actor, Actor) else None,
        action,
        project,
        target,
        outcome,
        text.decode(),
    )
    await tx.execute(_ENQUEUE, event_id)
    tx.after_commit(tx.database.bell(BELL).set)
    return event_id


# Reading.

_COLUMNS = (
    "e.id, e.occurred_at_ms, e.actor_type, e.actor_id, e.authentication_id, e.action, e.project, e.target, "
    "e.decision, e.detail"
)
_LIST = Statement(f"""
    SELECT {_COLUMNS}, s.position FROM audit_events e LEFT JOIN audit_seals s ON s.event_id = e.id
    WHERE e.id < $1 ORDER BY e.id DESC LIMIT $2
""")  # noqa: S608
_LIST_OF_PROJECT = Statement(f"""
    SELECT {_COLUMNS}, s.position FROM audit_events e LEFT JOIN audit_seals s ON s.event_id = e.id
    WHERE e.id < $1 AND e.project = $3 ORDER BY e.id DESC LIMIT $2
""")  # noqa: S608
_LAST = "g"
"""Sorts after every id."""


async def read_page(tx: Transaction, project: str | None, page: Page) -> AuditPage:
    """A page of rows, newest first; of one project when `project` is given. Raises `invalid` on a foreign cursor."""
    if page.cursor is not None and not is_id(page.cursor):
        raise Ql3Error("invalid", "This is not a cursor of this list.", field="page.cursor")
    arguments: tuple[Any, ...] = (page.cursor or _LAST, page.limit + 1)
    if project is None:
        rows = await tx.fetch(_LIST, *arguments)
    else:
        rows = await tx.fetch(_LIST_OF_PROJECT, *arguments, project)
    shown: list[Row] = []
    room = limits.BATCH_BYTES  # a page is one message
    for row in rows[: page.limit]:
        room -= len(row["detail"]) * _WIDEST_CHARACTER + _ROW_BYTES
        if room < 0 and shown:
            break
        shown.append(row)
    return AuditPage(
        items=[_event(tx.database.service, row) for row in shown],
        next=shown[-1]["id"] if len(rows) > len(shown) else None,
    )


def _event(service: str, row: Row) -> AuditEvent:
    actor = Subject(type=row["actor_type"], id=row["actor_id"]) if row["actor_type"] else None
    return AuditEvent(
        id=row["id"],
        service=service,
        position=row["position"],
        at_ms=row["occurred_at_ms"],
        project=row["project"],
        actor=actor,
        authentication_id=row["authentication_id"],
        action=row["action"],
        target=row["target"],
        outcome=row["decision"],
        detail=msgspec.json.decode(row["detail"]),
    )


# The chain.

_DIGESTED = tuple(name.strip().removeprefix("e.") for name in _COLUMNS.split(","))


def _digest_of(row: Row) -> str:
    return digest("ql3.audit-event.v1", {name: row[name] for name in _DIGESTED if row[name] is not None})


def _link(position: int, previous: str, event_id: str, event_digest: str) -> str:
    link = {"position": position, "previous": previous, "event": event_id, "digest": event_digest}
    return digest("ql3.audit-seal.v1", link)


_WAITING = Statement("SELECT 1 AS waiting FROM audit_unsealed LIMIT 1")
_HEAD = Statement("SELECT position, hash FROM audit_head WHERE id = 1 {for_update}")
_READ_HEAD = Statement("SELECT position, hash FROM audit_head WHERE id = 1")
_UNSEALED = Statement(f"""
    SELECT {_COLUMNS} FROM audit_unsealed u JOIN audit_events e ON e.id = u.event_id ORDER BY u.event_id LIMIT $1
""")  # noqa: S608
_SEAL = Statement("""
    INSERT INTO audit_seals (position, event_id, event_digest, hash, sealed_at_ms) VALUES ($1, $2, $3, $4, $5)
""")
_DEQUEUE = Statement("DELETE FROM audit_unsealed WHERE event_id {in:$1}")
_SET_HEAD = Statement("UPDATE audit_head SET position = $1, hash = $2 WHERE id = 1")


class Sealer:
    """Chains what was committed. `step` is run by a loop that shares `bell` and looks every `FALLBACK_S`.

    Rows come from a queue, so a row whose transaction commits late gets a later position and is never passed over.
    Replicas take turns at the head.
    """

    def __init__(self, database: Database) -> None:
        self.bell = database.bell(BELL)
        self._database = database

    async def step(self) -> bool | None:
        """Seals up to 256 rows; True while more wait."""
        if await self._database.read(lambda tx: tx.fetch_one(_WAITING)) is None:
            return None
        return True if await self._database.transact(self._seal) == limits.BATCH_ITEMS else None

    async def _seal(self, tx: Transaction) -> int:
        head = await tx.fetch_one(_HEAD)
        if head is None:
            raise Ql3Error("internal_error", "The audit chain has lost its head.")
        position, previous = head["position"], head["hash"]
        rows = await tx.fetch(_UNSEALED, limits.BATCH_ITEMS)
        if not rows:
            return 0
        now_ms = await tx.now_ms()
        seals: list[tuple[int, str, str, str, int]] = []
        for row in rows:
            position += 1
            event_digest = _digest_of(row)
            previous = _link(position, previous, row["id"], event_digest)
            seals.append((position, row["id"], event_digest, previous, now_ms))
        await tx.execute_many(_SEAL, seals)
        await tx.execute(_DEQUEUE, json_set(row["id"] for row in rows))
        await tx.execute(_SET_HEAD, position, previous)
        return len(rows)


_CHECKPOINT = Statement("SELECT position, hash FROM audit_checkpoints ORDER BY position DESC LIMIT 1")
_CHAIN = Statement(f"""
    SELECT s.position, s.event_id, s.event_digest, s.hash, {_COLUMNS}
    FROM audit_seals s LEFT JOIN audit_events e ON e.id = s.event_id
    WHERE s.position > $1 ORDER BY s.position LIMIT $2
""")  # noqa: S608
_COUNT_UNSEALED = Statement("SELECT count(*) AS unsealed FROM audit_unsealed")
_LEFT_OUT = Statement("""
    SELECT e.id FROM audit_events e
    WHERE NOT EXISTS (SELECT 1 FROM audit_seals s WHERE s.event_id = e.id)
      AND NOT EXISTS (SELECT 1 FROM audit_unsealed u WHERE u.event_id = e.id)
    ORDER BY e.id LIMIT $1
""")


async def verify(database: Database) -> AuditVerdict:
    """Walks the chain from the last checkpoint to its head, on one snapshot. Rows not sealed yet are counted apart."""
    return await database.read(_verify)


async def _verify(tx: Transaction) -> AuditVerdict:
    problems: list[str] = []
    position, previous = await _position_and_hash(tx, _CHECKPOINT)
    head_position, head_hash = await _position_and_hash(tx, _READ_HEAD)
    sealed = 0
    while rows := await tx.fetch(_CHAIN, position, limits.BATCH_ITEMS):
        for row in rows:
            if row["position"] != position + 1:
                problems.append(f"positions {position + 1} to {row['position'] - 1}: missing")
                previous = None
            problems += _problems_of(row, previous)
            position, previous = row["position"], row["hash"]
            sealed += 1
    if position < head_position:
        problems.append(f"positions {position + 1} to {head_position}: missing")
    elif (position, previous) != (head_position, head_hash):
        problems.append(f"position {position}: the end of the chain is not the recorded one")
    problems += [f"event {row['id']}: left out of the chain" for row in await tx.fetch(_LEFT_OUT, _PROBLEMS)]
    counted = await tx.fetch_one(_COUNT_UNSEALED)
    return AuditVerdict(
        service=tx.database.service,
        sealed=sealed,
        unsealed=counted["unsealed"] if counted else 0,
        intact=not problems,
        problems=problems[:_PROBLEMS],
    )


async def _position_and_hash(tx: Transaction, statement: Statement) -> tuple[int, str | None]:
    row = await tx.fetch_one(statement)
    return (row["position"], row["hash"]) if row else (0, "")


def _problems_of(row: Row, previous: str | None) -> Sequence[str]:
    position: int = row["position"]
    found: list[str] = []
    if previous is not None and row["hash"] != _link(position, previous, row["event_id"], row["event_digest"]):
        found.append(f"position {position}: its place or its seal was changed")
    if row["id"] is None:
        found.append(f"position {position}: its event is missing")
    elif _digest_of(row) != row["event_digest"]:
        found.append(f"position {position}: its event was edited")
    return found


# Purging.

_OLDEST = Statement("""
    SELECT s.position, s.event_id, s.hash, s.sealed_at_ms, e.occurred_at_ms
    FROM audit_seals s LEFT JOIN audit_events e ON e.id = s.event_id ORDER BY s.position LIMIT $1
""")
_ADD_CHECKPOINT = Statement("INSERT INTO audit_checkpoints (position, hash, created_at_ms) VALUES ($1, $2, $3)")


async def purge(tx: Transaction, before_ms: int, limit: int = limits.BATCH_ITEMS) -> int:
    """Removes up to `limit` of the oldest sealed rows before `before_ms`, leaving a checkpoint; answers how many."""
    await tx.fetch_one(_HEAD)
    gone: list[Row] = []
    for row in await tx.fetch(_OLDEST, max(1, min(limit, limits.BATCH_ITEMS))):
        if max(row["sealed_at_ms"], row["occurred_at_ms"] or 0) >= before_ms:
            break
        gone.append(row)
    if not gone:
        return 0
    ids = [row["event_id"] for row in gone]
    for table in ("audit_events", "audit_seals"):
        await guarded.raise_watermark(tx, table, before_ms)
        await guarded.purge(tx, table, ids)
    await tx.execute(_ADD_CHECKPOINT, gone[-1]["position"], gone[-1]["hash"], await tx.now_ms())
    return len(gone)
