"""Leases by what is due about them. The renewal of a whole heartbeat is one statement."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from schemas import limits
from schemas.workers import SessionFence
from services.dispatcher.records import LeaseRecord
from services.dispatcher.store.cases import columns, records, statement
from services.kit.database import Statement, Transaction, json_set

_READ = statement("SELECT <c> FROM run_dispatch_leases WHERE attempt_id {in:$1}", c=columns(LeaseRecord))
_RENEW = Statement(
    """
    UPDATE run_dispatch_leases SET version = version + 1, renewed_at_ms = $1, expires_at_ms = $2
    WHERE attempt_id {in:$6} AND status = 'leased' AND token_digest IS NOT NULL AND expires_at_ms > $1
      AND worker_id = $3 AND worker_session_id = $4 AND worker_generation = $5
    """,
    # What a settling transaction holds is left out: it ends there, and its next beat, if any, is 5 s away.
    postgresql="""
    WITH held AS (
      SELECT attempt_id FROM run_dispatch_leases
      WHERE attempt_id {in:$6} AND status = 'leased' AND token_digest IS NOT NULL AND expires_at_ms > $1
        AND worker_id = $3 AND worker_session_id = $4 AND worker_generation = $5
      ORDER BY attempt_id {for_update_skip_locked}
    )
    UPDATE run_dispatch_leases AS l SET version = l.version + 1, renewed_at_ms = $1, expires_at_ms = $2
    FROM held WHERE l.attempt_id = held.attempt_id
    """,
)
_EXPIRED = Statement("""
    SELECT attempt_id, run_id, worker_id FROM run_dispatch_leases
    WHERE status = 'leased' AND expires_at_ms <= $1 AND (token_digest IS NULL OR expires_at_ms <= $3)
    ORDER BY expires_at_ms, attempt_id LIMIT $2
""")
_OFFER_DUE = Statement("""
    SELECT attempt_id, run_id FROM run_dispatch_leases
    WHERE next_offer_at_ms IS NOT NULL AND next_offer_at_ms <= $1 AND expires_at_ms > $1
    ORDER BY next_offer_at_ms, attempt_id LIMIT $2
""")
_OF_WORKER = Statement("""
    SELECT attempt_id, run_id FROM run_dispatch_leases WHERE worker_id = $1 AND status = 'leased'
    ORDER BY attempt_id LIMIT $2
""")
_EXTEND_STARTED = Statement("""
    UPDATE run_dispatch_leases SET version = version + 1, renewed_at_ms = $1, expires_at_ms = $2
    WHERE status = 'leased' AND token_digest IS NOT NULL AND expires_at_ms < $2
""")
_EXTEND_UNSTARTED = Statement("""
    UPDATE run_dispatch_leases
    SET version = version + 1, renewed_at_ms = $1, expires_at_ms = $2, next_offer_at_ms = $1
    WHERE status = 'leased' AND token_digest IS NULL AND expires_at_ms < $2
""")


class Held(NamedTuple):
    """Whose lease, on what."""

    attempt_id: str
    run_id: str
    worker_id: str


async def read(tx: Transaction, attempt_ids: Iterable[str]) -> dict[str, LeaseRecord]:
    """Leases by attempt."""
    rows = records(await tx.fetch(_READ, json_set(attempt_ids)), LeaseRecord)
    return {lease.attempt_id: lease for lease in rows}


async def renew(tx: Transaction, fence: SessionFence, attempt_ids: Iterable[str], now: int) -> int:
    """Renews a session's started, live leases in one statement; answers how many."""
    return await tx.execute(
        _RENEW, now, now + limits.LEASE_STARTED_MS, fence.worker, fence.session_id, fence.generation,
        json_set(attempt_ids),
    )  # fmt: skip


async def expired(tx: Transaction, now: int, limit: int, *, started_by: int) -> list[Held]:
    """Leases that ran out, those longest over first; those of started attempts only when over by `started_by`."""
    rows = await tx.fetch(_EXPIRED, now, limit, started_by)
    return [Held(row["attempt_id"], row["run_id"], row["worker_id"]) for row in rows]


async def offer_due(tx: Transaction, now: int, limit: int) -> list[str]:
    """Runs whose live, unstarted lease is to be offered again."""
    return [row["run_id"] for row in await tx.fetch(_OFFER_DUE, now, limit)]


async def of_worker(tx: Transaction, worker: str, limit: int) -> list[str]:
    """Runs that a worker holds."""
    return [row["run_id"] for row in await tx.fetch(_OF_WORKER, worker, limit)]


async def extend_all(tx: Transaction, now: int) -> int:
    """Gives every lease that was not judged yet its time anew; answers how many were extended."""
    started = await tx.execute(_EXTEND_STARTED, now, now + limits.LEASE_STARTED_MS)
    return started + await tx.execute(_EXTEND_UNSTARTED, now, now + limits.LEASE_UNSTARTED_MS)
