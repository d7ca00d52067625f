"""What is due next, in one look, so that an idle ledger costs one small read a second."""

from __future__ import annotations

from typing import NamedTuple

from schemas import limits
from services.kit.database import Statement, Transaction

_DUE = Statement("""
    SELECT
      (SELECT min(expires_at_ms) FROM run_dispatch_leases WHERE status = 'leased') AS expiry,
      (SELECT min(next_offer_at_ms) FROM run_dispatch_leases WHERE next_offer_at_ms IS NOT NULL) AS offer,
      (SELECT min(next_attempt_at_ms) FROM run_retry_policies WHERE next_attempt_at_ms IS NOT NULL) AS retry,
      (SELECT min(deadline_at_ms) FROM run_attempts
        WHERE deadline_at_ms IS NOT NULL AND status IN ('starting', 'running')) AS deadline,
      (SELECT min(queue_deadline_ms) FROM runs WHERE queue_deadline_ms IS NOT NULL) AS queue_end,
      (SELECT min(next_attempt_at_ms) FROM run_cancellation_dispatches WHERE next_attempt_at_ms IS NOT NULL) AS stop,
      (SELECT min(cancel_requested_at_ms) FROM runs
        WHERE cancel_requested_at_ms IS NOT NULL AND finished_at_ms IS NULL) AS intent,
      (SELECT min(next_ring_at_ms) FROM run_holds WHERE next_ring_at_ms IS NOT NULL) AS ring,
      (SELECT min(expires_at_ms) FROM run_holds WHERE closed_at_ms IS NULL) AS hold_end,
      (SELECT alive_at_ms FROM dispatcher_stamp WHERE id = 1) AS stamp
""")


class Due(NamedTuple):
    """When the first of each kind is due, in ms of the database's clock; None: nothing of the kind exists.

    `now` is when this was read.
    """

    now: int
    expiry: int | None
    offer: int | None
    retry: int | None
    deadline: int | None
    queue_end: int | None
    stop: int | None
    intent: int | None
    ring: int | None
    hold_end: int | None
    stamp: int

    def needs_stamp(self) -> bool:
        """Whether leases live and nobody has said for a third of the outage limit that they are looked after."""
        return self.expiry is not None and self.now - self.stamp >= limits.OUTAGE_MS // 3

    def is_over(self, at: int | None, slack: int = 0) -> bool:
        """Whether that time has come."""
        return at is not None and at + slack <= self.now


async def look(tx: Transaction) -> Due:
    """The present state of what is due."""
    row = await tx.fetch_one(_DUE)
    assert row is not None
    return Due(await tx.now_ms(), *(row[name] for name in Due._fields[1:]))
