"""Retention of approvals: what was closed long ago is removed, a page at a time. The audit ledger is not touched."""

from __future__ import annotations

from typing import Final

from services.approval.gate import SERVICE, Gate
from services.approval.store import purge
from services.kit import audit
from services.kit.database import Transaction

DAY_MS: Final = 86_400_000
KEPT_MS: Final = 400 * DAY_MS
"""More than a year: whoever looks at last year's decisions finds them, with what was approved and what came of it."""
PAGE: Final = 64


class Purging:
    """Removes requests that were closed more than `KEPT_MS` ago, with their decisions, actions and receipts."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._database = gate.database

    async def step(self) -> bool | None:
        """Remove one page; True when there may be more."""
        now_ms = self._gate.now_ms()
        before_ms = now_ms - KEPT_MS
        if before_ms <= 0 or not await self._database.read(lambda tx: purge.closed(tx, before_ms, 1)):
            return None

        async def work(tx: Transaction) -> int:
            found = await purge.closed(tx, before_ms, PAGE)
            if found:
                # A day of slack: some times are the wall's, others the database's.
                await purge.delete(tx, found, before_ms + DAY_MS)
                detail = {"requests": len(found), "closed_before_ms": before_ms}
                await audit.append(tx, SERVICE, "approvals.purge", None, None, "allow", detail)
            return len(found)

        return True if await self._database.transact(work) == PAGE else None
