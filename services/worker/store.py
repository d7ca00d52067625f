"""The worker's local journal: the offer inbox, and completion receipts that the process host does not keep.

Always SQLite, always local. The two writes of an ordinary attempt are one row in a batch when it is taken on and one
deletion in a batch when its end is acknowledged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from services.kit.database import Statement, Transaction

MAX_JOURNAL: Final = 4096


class OfferRow(NamedTuple):
    """One row of the inbox."""

    attempt_id: str
    offer_id: str
    run_id: str
    project: str
    lease_generation: int
    host: str
    accepted_at_ms: int
    engine: str | None
    """The container engine; empty where none has it, null in rows of a version that did not say."""


class ReceiptRow(NamedTuple):
    """An end that is durable here."""

    attempt_id: str
    sequence: int
    body: str
    proof: str


# A newer offer of the same attempt takes the place of one that never reached the barrier; the dispatcher offers an
# attempt that did to nobody else.
_ACCEPT: Final = Statement(
    """
    INSERT INTO execution_offers
      (attempt_id, offer_id, run_id, project, lease_generation, host, accepted_at_ms, engine)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
    ON CONFLICT (attempt_id) DO UPDATE SET offer_id = excluded.offer_id, lease_generation = excluded.lease_generation,
      host = excluded.host, accepted_at_ms = excluded.accepted_at_ms, engine = excluded.engine
    WHERE execution_offers.lease_generation < excluded.lease_generation
    """
)
_OFFERS: Final = Statement(
    """
    SELECT attempt_id, offer_id, run_id, project, lease_generation, host, accepted_at_ms, engine
    FROM execution_offers ORDER BY attempt_id
    """
)
_RECEIPTS: Final = Statement("SELECT attempt_id, sequence, body, proof FROM completion_receipts ORDER BY attempt_id")
_KEEP: Final = Statement(
    """
    INSERT INTO completion_receipts (attempt_id, sequence, body, proof, registered_at_ms)
    SELECT attempt_id, $2, $3, $4, $5 FROM execution_offers WHERE attempt_id = $1
    ON CONFLICT (attempt_id) DO NOTHING
    """
)
# The generation, because a newer offer of the same attempt may have taken the row's place.
_SETTLE: Final = Statement("DELETE FROM execution_offers WHERE attempt_id = $1 AND lease_generation = $2")


async def accept(tx: Transaction, rows: Sequence[OfferRow]) -> None:
    """Take offers on."""
    await tx.execute_many(_ACCEPT, rows)


async def offers(tx: Transaction) -> list[OfferRow]:
    """Everything taken on and not settled."""
    return [OfferRow(**row) for row in await tx.fetch(_OFFERS)]


async def receipts(tx: Transaction) -> list[ReceiptRow]:
    """Ends that are kept here."""
    return [ReceiptRow(**row) for row in await tx.fetch(_RECEIPTS)]


async def keep(tx: Transaction, rows: Sequence[ReceiptRow], now_ms: int) -> None:
    """Make ends durable; an attempt has one, the first."""
    await tx.execute_many(_KEEP, [(*row, now_ms) for row in rows])


async def settle(tx: Transaction, offers: Sequence[tuple[str, int]]) -> None:
    """The dispatcher knows the ends of these (attempt and lease generation); their rows go."""
    await tx.execute_many(_SETTLE, offers)
