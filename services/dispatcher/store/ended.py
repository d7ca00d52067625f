"""Ended attempts in the order of their ids, for whoever missed facts that the feed keeps no longer."""

from __future__ import annotations

import msgspec

from schemas.runs import AttemptEnded, EndedPage, LogFact
from services.kit.database import Row, Statement, Transaction

# Ids rise with time, so the primary key is the order; what is still active is told by a fact when it ends.
_ENDED = Statement("""
    SELECT a.id, a.run_id, a.worker_id, a.status, a.finished_at_ms, a.log, a.token_digest, r.project_id, r.task_id,
      r.finished_at_ms AS run_finished_at_ms
    FROM run_attempts a JOIN runs r ON r.id = a.run_id
    WHERE a.id > $1 ORDER BY a.id LIMIT $2
""")


async def page(tx: Transaction, after: str | None, limit: int) -> EndedPage:
    """Ended attempts that had started, after an id. `limit` bounds how many attempts are looked at."""
    rows = await tx.fetch(_ENDED, after or "", limit)
    return EndedPage(
        items=[_fact(row) for row in rows if row["finished_at_ms"] is not None and row["token_digest"] is not None],
        next=rows[-1]["id"] if len(rows) == limit else None,
    )


def _fact(row: Row) -> AttemptEnded:
    return AttemptEnded(
        project=row["project_id"],
        run_id=row["run_id"],
        attempt_id=row["id"],
        task_id=row["task_id"],
        worker_id=row["worker_id"] or "",
        status=row["status"],
        run_terminal=row["run_finished_at_ms"] is not None,
        finished_at_ms=row["finished_at_ms"],
        log=LogFact() if row["log"] is None else msgspec.json.decode(row["log"], type=LogFact),
    )
