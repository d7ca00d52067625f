"""The statements of `secret_envelopes`. A row is written once and never changed or removed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from schemas.secrets import Secret
from services.kit.database import Row, Statement, Transaction, json_rows
from services.vault.envelope import Envelope

BY_MUTATION = Statement(
    """SELECT project, name, version, mutation_id, key_id, algorithm, nonce, ciphertext, auth_tag, created_at_ms
    FROM secret_envelopes WHERE project = $1 AND name = $2 AND mutation_id = $3"""
)
CURRENT_VERSION = Statement(
    "SELECT COALESCE(MAX(version), 0) AS version FROM secret_envelopes WHERE project = $1 AND name = $2"
)
# On PostgreSQL two writers may both have read the same current version: the loser inserts nothing and looks again.
INSERT = Statement(
    """INSERT INTO secret_envelopes
        (project, name, version, mutation_id, key_id, algorithm, nonce, ciphertext, auth_tag, created_at_ms)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10) ON CONFLICT DO NOTHING"""
)
RESOLVE = Statement(
    """SELECT w.position, e.project, e.name, e.version, e.mutation_id, e.key_id, e.algorithm, e.nonce, e.ciphertext,
        e.auth_tag, e.created_at_ms
    FROM {rows:$2 position bigint, name text, version bigint} AS w
    JOIN secret_envelopes e ON e.project = $1 AND e.name = w.name
        AND e.version = COALESCE(
            w.version, (SELECT MAX(c.version) FROM secret_envelopes c WHERE c.project = $1 AND c.name = w.name))"""
)
LIST = Statement(
    """SELECT e.project, e.name, e.version, e.key_id, e.created_at_ms FROM secret_envelopes e
    WHERE e.project = $1 AND e.name > $2
        AND e.version = (SELECT MAX(c.version) FROM secret_envelopes c WHERE c.project = $1 AND c.name = e.name)
    ORDER BY e.name LIMIT $3"""
)
KEY_IDS = Statement("SELECT DISTINCT key_id FROM secret_envelopes")


def _envelope(row: Row) -> Envelope:
    return Envelope(
        project=row["project"],
        name=row["name"],
        version=row["version"],
        mutation_id=row["mutation_id"],
        key_id=row["key_id"],
        algorithm=row["algorithm"],
        nonce=row["nonce"],
        ciphertext=row["ciphertext"],
        auth_tag=row["auth_tag"],
        created_at_ms=row["created_at_ms"],
    )


async def find_by_mutation(tx: Transaction, project: str, name: str, mutation_id: str) -> Envelope | None:
    """The envelope that a mutation wrote, if it did."""
    row = await tx.fetch_one(BY_MUTATION, project, name, mutation_id)
    return _envelope(row) if row else None


async def current_version(tx: Transaction, project: str, name: str) -> int:
    """The highest version; 0 when there is none."""
    row = await tx.fetch_one(CURRENT_VERSION, project, name)
    return int(row["version"]) if row else 0


async def insert(tx: Transaction, envelope: Envelope) -> bool:
    """Append an envelope; False when its version or mutation was written meanwhile."""
    changed = await tx.execute(
        INSERT,
        envelope.project,
        envelope.name,
        envelope.version,
        envelope.mutation_id,
        envelope.key_id,
        envelope.algorithm,
        envelope.nonce,
        envelope.ciphertext,
        envelope.auth_tag,
        envelope.created_at_ms,
    )
    return changed == 1


async def resolve(tx: Transaction, project: str, wanted: Sequence[tuple[str, int | None]]) -> list[Envelope | None]:
    """The envelopes of (name, version or None for the current) in one query, in order; None where there is none."""
    if not wanted:
        return []
    rows: list[dict[str, Any]] = [
        {"position": position, "name": name, "version": version} for position, (name, version) in enumerate(wanted)
    ]
    found: list[Envelope | None] = [None] * len(wanted)
    for row in await tx.fetch(RESOLVE, project, json_rows(rows)):
        found[int(row["position"])] = _envelope(row)
    return found


async def page(tx: Transaction, project: str, after: str, limit: int) -> list[Secret]:
    """Current versions by name, after a name."""
    rows = await tx.fetch(LIST, project, after, limit)
    return [
        Secret(
            project=row["project"],
            name=row["name"],
            version=row["version"],
            key_id=row["key_id"],
            created_at_ms=row["created_at_ms"],
        )
        for row in rows
    ]


async def key_ids(tx: Transaction) -> frozenset[str]:
    """The ids of every key under which something is encrypted."""
    return frozenset(str(row["key_id"]) for row in await tx.fetch(KEY_IDS))
