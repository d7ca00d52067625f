"""Requests of runs that wait, as the watch over them asks for them; and how far the dispatcher's facts were read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from services.kit.database import Statement, Transaction, id_set, json_set

_OPEN = Statement("""
    SELECT id, project_id FROM approval_requests
    WHERE state IN ('pending', 'approved') AND expires_at_ms > $1 AND action_type = 'run.release' AND id > $2
    ORDER BY id LIMIT $3
""")
_OPEN_OF = id_set("""
    SELECT id, project_id FROM approval_requests
    WHERE id {in:$1} AND state IN ('pending', 'approved') AND action_type = 'run.release' ORDER BY id
""")
_POSITION = Statement("SELECT position FROM feed_positions WHERE owner = $1")
_MOVE = Statement("""
    INSERT INTO feed_positions (owner, position, updated_at_ms) VALUES ($1, $2, $3)
    ON CONFLICT (owner) DO UPDATE SET position = excluded.position, updated_at_ms = excluded.updated_at_ms
""")


class Held(NamedTuple):
    """An open request of a run that waits; its id is the run's."""

    run: str
    project: str


async def page(tx: Transaction, now_ms: int, after: str, limit: int) -> list[Held]:
    """Open requests by id after `after`, those expired at `now_ms` left out."""
    return [Held(row["id"], row["project_id"]) for row in await tx.fetch(_OPEN, now_ms, after, limit)]


async def among(tx: Transaction, runs: Sequence[str]) -> list[Held]:
    """Those of these runs that have an open request."""
    return [Held(row["id"], row["project_id"]) for row in await tx.fetch(_OPEN_OF, json_set(runs))]


async def position(tx: Transaction, owner: str) -> str | None:
    """How far the facts of a service were read; None for not at all."""
    row = await tx.fetch_one(_POSITION, owner)
    return row["position"] if row else None


async def move(tx: Transaction, owner: str, position: str, now_ms: int) -> None:
    """All facts up to this position are dealt with."""
    await tx.execute(_MOVE, owner, position, now_ms)
