"""Owner bootstrap: the first owner of a project, by a one-time link from the machine's own console. Pure.

Closed for ever once the project has had any role binding or a claimed challenge. Every wrong claim is refused alike.
"""

from __future__ import annotations

import hmac
from typing import Final, Literal, NamedTuple

from schemas.errors import Ql3Error
from schemas.identity import Subject

LIFETIME_MS: Final = 600_000


class Challenge(NamedTuple):
    """The latest challenge of a project. Times in wall milliseconds."""

    version: int
    challenge_id: str
    token_digest: str
    issued_at_ms: int
    expires_at_ms: int
    consumed_at_ms: int | None
    claimed_by: Subject | None


def issue(*, project_active: bool, ever_bound: bool, latest: Challenge | None, now_ms: int) -> int:
    """The version of the next challenge. Raises `project_archived`, `bootstrap_closed` or `challenge_active`."""
    if not project_active:
        raise Ql3Error("project_archived")
    if ever_bound or (latest is not None and latest.consumed_at_ms is not None):
        raise Ql3Error("bootstrap_closed")
    if latest is not None and latest.expires_at_ms > now_ms:
        raise Ql3Error("challenge_active", data={"expires_at_ms": latest.expires_at_ms})
    return (latest.version if latest else 0) + 1


def claim(
    *,
    project_active: bool,
    latest: Challenge | None,
    challenge_id: str,
    token_digest: str,
    subject: Subject,
    identity_active: bool,
    ever_bound: bool,
    now_ms: int,
) -> Literal["claim", "replay"]:
    """Whether this claim makes the owner, or repeats the one that did. Raises `bootstrap_rejected`.

    Only the holder of the right token learns that somebody else was first (`bootstrap_closed`).
    """
    # Compared before anything that could return early, in constant time: the answer's timing must not tell which part
    # of a claim was wrong.
    stored_id, stored_digest = (latest.challenge_id, latest.token_digest) if latest else ("-" * 22, "-" * 64)
    right_id = hmac.compare_digest(stored_id.encode(), challenge_id.encode())
    right_token = hmac.compare_digest(stored_digest.encode(), token_digest.encode())
    if not (right_id and right_token) or latest is None or not project_active:
        raise Ql3Error("bootstrap_rejected")
    if subject.type != "user" or not identity_active:
        raise Ql3Error("bootstrap_rejected")
    if latest.consumed_at_ms is not None:
        if latest.claimed_by != subject:
            raise Ql3Error("bootstrap_rejected")
        return "replay"
    if not latest.issued_at_ms <= now_ms < latest.expires_at_ms:
        raise Ql3Error("bootstrap_rejected")
    if ever_bound:
        raise Ql3Error("bootstrap_closed")
    return "claim"


def mutation_id(challenge_id: str) -> str:
    """The mutation id of the binding that a claim inserts."""
    return f"owner-bootstrap:{challenge_id}"
