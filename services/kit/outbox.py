"""The outbox: what goes out over the bus, written in the transaction of what it tells.

A relay publishes the rows after the commit and marks them; a repeat of its own carries the same `Nats-Msg-Id`. For 24 h
the facts stay readable as the service's feed, for whoever missed the bell.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final, Protocol, TypeVar

import msgspec
import structlog

from schemas import limits
from schemas.base import Message, decode, encode, schema_of
from schemas.errors import Ql3Error
from schemas.system import FeedItem, FeedPage
from services.kit.bus.envelope import MSG_ID, SCHEMA, TRACEPARENT, current_traceparent
from services.kit.clock import monotonic_ms
from services.kit.database import Database, Row, Statement, Transaction
from services.kit.ids import id_floor, new_id

BELL: Final = "outbox"
"""The name of the database's bell that wakes the relay."""
FALLBACK_S: Final = 1.0
"""How often the relay looks without a bell: for rows of another process, or of an earlier life of this one."""
PRUNE_EVERY_S: Final = 60.0
BACKLOG_MAX: Final = 100_000
_BACKOFF_MIN_MS = 50
_BACKOFF_MAX_MS = 2_000
_PRUNE_ROWS = 500
_FEED_ITEM_BYTES = 256
"""What an item of a feed page takes besides its payload, reckoned generously."""

M = TypeVar("M", bound=Message)

log: structlog.stdlib.BoundLogger = structlog.get_logger("ql3.outbox")

Outgoing = tuple[str, bytes, dict[str, str]]
"""Subject, payload, headers."""


class Publisher(Protocol):
    """The part of the bus that the relay needs: one outcome per item, None for what its stream has stored."""

    async def publish_many(
        self, items: Sequence[Outgoing], *, facts: Collection[int] = ()
    ) -> list[Exception | None]: ...


_INSERT = Statement("""
    INSERT INTO outbox (id, kind, subject, message_schema, payload, traceparent, created_at_ms)
    VALUES ($1, $2, $3, $4, $5, $6, $7)
""")


async def fact(tx: Transaction, subject: str, message: msgspec.Struct) -> str:
    """Tells what happened: `message` goes out on `subject` once `tx` has committed. Answers the row's id."""
    return (await _write(tx, "fact", [(subject, message)]))[0]


async def facts(tx: Transaction, items: Sequence[tuple[str, msgspec.Struct]]) -> list[str]:
    """Many facts in one round trip, in order."""
    return await _write(tx, "fact", items)


async def order(tx: Transaction, subject: str, message: msgspec.Struct) -> str:
    """Asks another service to act. The caller's own row stays open until the answer; a re-ring is a new order."""
    return (await _write(tx, "order", [(subject, message)]))[0]


async def orders(tx: Transaction, items: Sequence[tuple[str, msgspec.Struct]]) -> list[str]:
    """Many orders in one round trip, in order."""
    return await _write(tx, "order", items)


async def _write(tx: Transaction, kind: str, items: Sequence[tuple[str, msgspec.Struct]]) -> list[str]:
    if not items:
        return []
    now_ms = await tx.now_ms()
    traceparent = current_traceparent()
    rows: list[tuple[str, str, str, str, str, str | None, int]] = []
    for subject, message in items:
        payload = encode(message)
        if len(payload) > limits.BATCH_BYTES:
            raise Ql3Error("too_large", f"A message is larger than {limits.BATCH_BYTES} bytes.")
        rows.append((new_id(), kind, subject, schema_of(type(message)), payload.decode(), traceparent, now_ms))
    await tx.execute_many(_INSERT, rows)
    tx.after_commit(tx.database.bell(BELL).set)
    return [row[0] for row in rows]


# Relay.

_CLAIM = Statement(
    """
    SELECT position AS key, id, kind, subject, message_schema, payload, traceparent FROM outbox
    WHERE published_at_ms IS NULL ORDER BY position LIMIT $1
    """,
    postgresql="""
    SELECT id AS key, id, kind, subject, message_schema, payload, traceparent FROM outbox
    WHERE published_at_ms IS NULL ORDER BY id LIMIT $1 {for_update_skip_locked}
    """,
)
_MARK = Statement(
    "UPDATE outbox SET published_at_ms = $1 WHERE position {in:$2}",
    postgresql="UPDATE outbox SET published_at_ms = $1 WHERE id {in:$2}",
)


class Relay:
    """Publishes what the outbox holds. `step` is run by a loop that shares `bell` and looks every `FALLBACK_S`."""

    def __init__(
        self,
        database: Database,
        publisher: Publisher,
        *,
        batch: int = limits.BATCH_ITEMS,
        monotonic: Callable[[], int] = monotonic_ms,
    ) -> None:
        if not 1 <= batch <= limits.BATCH_ITEMS:
            raise ValueError(f"a batch is 1 to {limits.BATCH_ITEMS} rows")
        self.bell = database.bell(BELL)
        self._database = database
        self._publisher = publisher
        self._batch = batch
        self._monotonic = monotonic
        self._failures = 0
        self._retry_at_ms: int | None = None

    async def step(self) -> bool | float | None:
        """Publishes one batch. True: more waits; a number: the bus refused, look again in so many seconds; None: done.

        What the bus did not take stays and is tried again; what it took is never published by a later step, except
        when the mark itself is lost, and then under the same id.
        """
        now_ms = self._monotonic()
        if self._retry_at_ms is not None and now_ms < self._retry_at_ms:
            return (self._retry_at_ms - now_ms) / 1000  # commits ring all the time; a bus that is down is left alone
        if self._database.dialect == "postgresql":
            taken, refused = await self._database.transact(self._claimed)
        else:
            taken, refused = await self._beside_the_writer()
        if refused:
            pause_ms = min(_BACKOFF_MAX_MS, _BACKOFF_MIN_MS * 2 ** min(self._failures, 10))
            self._failures += 1
            self._retry_at_ms = self._monotonic() + pause_ms
            return pause_ms / 1000
        self._failures, self._retry_at_ms = 0, None
        return True if taken == self._batch else None

    async def _claimed(self, tx: Transaction) -> tuple[int, int]:
        # The rows stay locked while they are published, so that no other replica takes them; a relay that dies frees
        # them. Running again after a lost race repeats ids, which the stream drops.
        rows = await tx.fetch(_CLAIM, self._batch)
        taken = await self._publish(rows)
        await self._mark(tx, taken)
        return len(rows), len(rows) - len(taken)

    async def _beside_the_writer(self) -> tuple[int, int]:
        # One process writes an SQLite file, so nobody else takes the rows; its one writer must not wait for the bus.
        rows = await self._database.read(lambda tx: tx.fetch(_CLAIM, self._batch))
        taken = await self._publish(rows)
        if taken:
            await self._database.transact(lambda tx: self._mark(tx, taken))
        return len(rows), len(rows) - len(taken)

    async def _publish(self, rows: list[Row]) -> list[str | int]:
        if not rows:
            return []
        items: list[Outgoing] = []
        for row in rows:
            headers = {MSG_ID: row["id"], SCHEMA: row["message_schema"]}
            if row["traceparent"]:
                headers[TRACEPARENT] = row["traceparent"]
            items.append((row["subject"], row["payload"].encode(), headers))
        facts = [index for index, row in enumerate(rows) if row["kind"] == "fact"]
        outcomes = await self._publisher.publish_many(items, facts=facts)
        return [row["key"] for row, outcome in zip(rows, outcomes, strict=True) if outcome is None]

    async def _mark(self, tx: Transaction, keys: list[str | int]) -> None:
        if keys:
            await tx.execute(_MARK, await tx.now_ms(), msgspec.json.encode(keys).decode())


_BACKLOG = Statement(f"""
    SELECT count(*) AS count FROM (SELECT 1 FROM outbox WHERE published_at_ms IS NULL LIMIT {BACKLOG_MAX}) AS waiting
""")  # noqa: S608


async def backlog(tx: Transaction) -> int:
    """How many rows wait for the bus, counted up to `BACKLOG_MAX`."""
    row = await tx.fetch_one(_BACKLOG)
    return int(row["count"]) if row else 0


# Feed.

_FEED = Statement(
    """
    SELECT position AS at, id, kind, subject, message_schema, payload FROM outbox
    WHERE position > $1 ORDER BY position LIMIT $2
    """,
    # Only rows below the oldest open transaction: nothing that sorts before them can still appear.
    postgresql="""
    SELECT xid::text AS at, id, kind, subject, message_schema, payload FROM outbox
    WHERE (xid, id) > ($1::text::xid8, $3) AND xid < pg_snapshot_xmin(pg_current_snapshot())
    ORDER BY xid, id LIMIT $2
    """,
)
_PRUNED = Statement("SELECT through FROM outbox_pruned")
_LIFE = Statement(
    "SELECT coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'outbox'), 0) + 1 AS next",
    postgresql="SELECT pg_snapshot_xmax(pg_current_snapshot())::text AS next",
)


async def read_feed(tx: Transaction, after: str | None, limit: int, subjects: Sequence[str] = ()) -> FeedPage:
    """Facts after an opaque position, in commit order, for the prefixes in `subjects` (all when empty).

    Never shows a row before an earlier one may still appear. `limit` bounds how many rows are looked at. A position
    that this database never handed out (it was restored) starts from the oldest that is kept, with `gap` set.
    """
    limit = max(1, min(limit, limits.BATCH_ITEMS))
    at, row_id = _parse(after)
    life = await tx.fetch_one(_LIFE)
    lost = life is not None and at >= int(life["next"])
    if lost:
        at, row_id = 0, ""
    pruned = await tx.fetch_one(_PRUNED)
    through = _parse(pruned["through"] or None) if pruned else (0, "")
    arguments = (at, limit) if tx.dialect == "sqlite" else (str(at), limit, row_id)
    rows = await tx.fetch(_FEED, *arguments)
    shown, items = _within_a_message(rows, tuple(subjects))
    position = _format(tx, rows[shown - 1]) if rows else (None if lost else after)
    more = shown < len(rows) or len(rows) == limit
    return FeedPage(items=items, position=position, more=more, gap=lost or through > (at, row_id))


def fact_of(item: FeedItem, message_type: type[M]) -> M | None:
    """The fact of an item if it is of this type. One that cannot be read is logged, and stops none behind it."""
    if item.schema != schema_of(message_type):
        return None
    try:
        return decode(bytes(item.payload), message_type)
    except Ql3Error as error:
        log.error("a fact could not be read", schema=item.schema, error=error.code, field=error.field)
        return None


def _within_a_message(rows: Sequence[Row], subjects: tuple[str, ...]) -> tuple[int, list[FeedItem]]:
    """How many of the rows were looked at before the page was full of bytes, and the facts among them."""
    items: list[FeedItem] = []
    room = limits.BATCH_BYTES
    for index, row in enumerate(rows):
        if row["kind"] != "fact" or (subjects and not row["subject"].startswith(subjects)):
            continue
        payload: bytes = row["payload"].encode()
        room -= len(payload) + _FEED_ITEM_BYTES
        if room < 0 and items:
            return index, items
        items.append(FeedItem(subject=row["subject"], schema=row["message_schema"], payload=msgspec.Raw(payload)))
    return len(rows), items


def _format(tx: Transaction, row: Row) -> str:
    return str(row["at"]) if tx.dialect == "sqlite" else f"{row['at']}.{row['id']}"


def _parse(position: str | None) -> tuple[int, str]:
    if position is None:
        return 0, ""
    at, _, row_id = position.partition(".")
    if not at.isascii() or not at.isdecimal() or len(at) > 19 or len(row_id) > 36:
        raise Ql3Error("invalid", "This is not a position of the feed.", field="after")
    return int(at), row_id


# Pruning.

_PRUNE = Statement(
    # A page from the oldest on, so that nothing is scanned when nothing is old.
    """
    DELETE FROM outbox WHERE position < (SELECT min(position) FROM outbox) + $2
      AND created_at_ms < $1 AND published_at_ms IS NOT NULL
    RETURNING position AS at, id
    """,
    postgresql="""
    DELETE FROM outbox WHERE id IN (
      SELECT id FROM outbox WHERE id < $3 AND created_at_ms < $1 AND published_at_ms IS NOT NULL
      ORDER BY id LIMIT $2 {for_update_skip_locked}
    ) RETURNING xid::text AS at, id
    """,
)
_SET_PRUNED = Statement("UPDATE outbox_pruned SET through = $1")


class Pruner:
    """Deletes published rows older than 24 h, a page at a time. `step` is run every `PRUNE_EVERY_S`."""

    def __init__(self, database: Database, *, kept_ms: int = limits.OUTBOX_KEPT_MS) -> None:
        self._database = database
        self._kept_ms = kept_ms

    async def step(self) -> bool | None:
        """Deletes one page; True while there may be more."""
        return True if await self._database.transact(self._prune) >= _PRUNE_ROWS else None

    async def _prune(self, tx: Transaction) -> int:
        before_ms = await tx.now_ms() - self._kept_ms
        arguments = (before_ms, _PRUNE_ROWS)
        if tx.dialect == "postgresql":
            arguments = (*arguments, id_floor(before_ms))
        rows = await tx.fetch(_PRUNE, *arguments)
        if rows:
            last = max(rows, key=lambda row: (int(row["at"]), row["id"]))
            pruned = await tx.fetch_one(_PRUNED)
            if pruned is None or _parse(_format(tx, last)) > _parse(pruned["through"] or None):
                await tx.execute(_SET_PRUNED, _format(tx, last))
        return len(rows)
