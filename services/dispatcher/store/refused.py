"""Refused instants: what a repeat of their order is answered, as long as one can come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from services.kit.database import Statement, Transaction, json_set

KEPT_MS: Final = 7 * 86_400_000
"""An order is rung at most five minutes apart until it is answered, and its stream keeps it for less than this."""
_PAGE: Final = 512

_FIND: Final = Statement("""
    SELECT project_id, idempotency_key, request_digest, error, detail FROM refused_instants
    WHERE project_id {in:$1} AND idempotency_key {in:$2}
""")
_KEEP: Final = Statement("""
    INSERT INTO refused_instants (project_id, idempotency_key, request_digest, error, detail, refused_at_ms)
    VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (project_id, idempotency_key) DO NOTHING
""")
_OLD: Final = Statement("""
    SELECT project_id, idempotency_key FROM refused_instants WHERE refused_at_ms < $1 ORDER BY refused_at_ms LIMIT $2
""")
_DROP: Final = Statement("DELETE FROM refused_instants WHERE project_id = $1 AND idempotency_key = $2")


class Refusal(NamedTuple):
    """The answer that an instant got."""

    project_id: str
    idempotency_key: str
    request_digest: str
    error: str
    detail: str


async def find(tx: Transaction, keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Refusal]:
    """Refusals by project and idempotency key."""
    if not keys:
        return {}
    rows = await tx.fetch(_FIND, json_set({project for project, _ in keys}), json_set({key for _, key in keys}))
    found = [Refusal(**row) for row in rows]
    return {(one.project_id, one.idempotency_key): one for one in found}


async def keep(tx: Transaction, refusals: Sequence[Refusal], now_ms: int) -> None:
    """Write these, and let go of a page of those that nobody can ask about any more."""
    if refusals:
        await tx.execute_many(_KEEP, [(*one, now_ms) for one in refusals])
        old = await tx.fetch(_OLD, now_ms - KEPT_MS, _PAGE)
        if old:
            await tx.execute_many(_DROP, [(row["project_id"], row["idempotency_key"]) for row in old])
