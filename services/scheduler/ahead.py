"""Runs that ask for an approval ahead of their time, and what becomes of them when their trigger or task changes.

Such a run pins what would be run and when. After a change of either it is taken back, and the instant, which still lies
ahead, is asked about again as things stand then.
"""

from __future__ import annotations

from schemas.limits import SUBMIT_AHEAD_MS
from services.kit.database import Transaction
from services.scheduler.bells import BELL, RING_BELL
from services.scheduler.store import admissions, schedules


async def take_back(tx: Transaction, task_id: str, trigger_id: str | None, now_ms: int) -> bool:
    """Take back what asks ahead for a task, or for one of its triggers; True when something did.

    The caller holds the schedules and reads them anew afterwards. What starts within the second is left alone.
    """
    rows = await admissions.asking(tx, task_id, now_ms + SUBMIT_AHEAD_MS)
    rows = [row for row in rows if trigger_id is None or row["trigger_id"] == trigger_id]
    if not rows:
        return False
    await admissions.take_back(tx, [row["id"] for row in rows], await tx.now_ms())
    first: dict[str, int] = {}
    for row in rows:
        instant = row["scheduled_for_ms"]
        first[row["trigger_id"]] = min(instant, first.get(row["trigger_id"], instant))
    for trigger, instant in sorted(first.items()):
        # One asks at a time, the next one: between now and it there is no other.
        await schedules.taken_back(tx, trigger, min(instant - 1, now_ms), now_ms)
    for bell in (RING_BELL, BELL):
        tx.after_commit(tx.database.bell(bell).set)
    return True
