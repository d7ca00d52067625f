"""Challenges of the owner bootstrap."""

from __future__ import annotations

from schemas.identity import Subject
from services.approval.bootstrap import Challenge
from services.kit.database import Statement, Transaction

_LATEST = Statement("""
    SELECT version, challenge_id, token_digest, issued_at_ms, expires_at_ms, consumed_at_ms, claimed_subject_type,
      claimed_subject_id
    FROM project_owner_bootstrap_challenges WHERE project_id = $1 ORDER BY version DESC LIMIT 1
""")
_INSERT = Statement("""
    INSERT INTO project_owner_bootstrap_challenges
      (project_id, version, challenge_id, token_digest, issued_at_ms, expires_at_ms)
    VALUES ($1, $2, $3, $4, $5, $6)
""")
_CONSUME = Statement("""
    UPDATE project_owner_bootstrap_challenges
    SET consumed_at_ms = $4, claimed_subject_type = $5, claimed_subject_id = $6
    WHERE project_id = $1 AND version = $2 AND challenge_id = $3 AND consumed_at_ms IS NULL
""")


async def latest(tx: Transaction, project: str) -> Challenge | None:
    """The newest challenge; older ones are dead."""
    row = await tx.fetch_one(_LATEST, project)
    if row is None:
        return None
    claimed = row["claimed_subject_id"]
    return Challenge(
        version=row["version"],
        challenge_id=row["challenge_id"],
        token_digest=row["token_digest"],
        issued_at_ms=row["issued_at_ms"],
        expires_at_ms=row["expires_at_ms"],
        consumed_at_ms=row["consumed_at_ms"],
        claimed_by=Subject(type=row["claimed_subject_type"], id=claimed) if claimed else None,
    )


async def insert(
    tx: Transaction, project: str, version: int, challenge_id: str, token_digest: str, now_ms: int, expires_at_ms: int
) -> None:
    """A new challenge; only the digest of its token is kept."""
    await tx.execute(_INSERT, project, version, challenge_id, token_digest, now_ms, expires_at_ms)


async def consume(tx: Transaction, project: str, challenge: Challenge, subject: Subject, now_ms: int) -> bool:
    """Use the challenge; False when it is used already."""
    return (
        await tx.execute(_CONSUME, project, challenge.version, challenge.challenge_id, now_ms, subject.type, subject.id)
        == 1
    )
