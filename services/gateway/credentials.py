"""The rules of API credentials: their text, what is kept of them, and when one counts. No I/O.

A credential is `ql3c_<credential id>_<base64url of 32 bytes>`. It is shown once; what is kept is an HMAC under the
gateway's pepper, for each version its own. It holds no role: it only says who asks.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Sequence
from typing import Literal, NamedTuple

from schemas.identity import Assurance, SubjectType
from services.gateway.pepper import Pepper

TTL_DEFAULT_MS = 90 * 86_400_000
TTL_MAX_MS = 366 * 86_400_000
VERSIONS_LIVE = 2
"""A rotation may leave the version before it alive for a while; no older one counts."""

_FORM = re.compile(
    r"ql3c_([0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12})_([A-Za-z0-9_-]{43})", re.ASCII
)


class Presented(NamedTuple):
    """What somebody sent."""

    credential_id: str
    secret: str


class Version(NamedTuple):
    """One stored version. Times in milliseconds UTC."""

    id: str
    version: int
    digest: str
    name: str
    subject_type: SubjectType
    subject_id: str
    assurance: Assurance
    created_by: str
    created_at_ms: int
    expires_at_ms: int
    revoked_at_ms: int | None

    def state(self, now_ms: int) -> Literal["active", "expired", "revoked"]:
        """Whether it counts now."""
        if self.revoked_at_ms is not None:
            return "revoked"
        return "active" if now_ms < self.expires_at_ms else "expired"


def new_secret() -> str:
    """43 characters that hold 256 bits."""
    return secrets.token_urlsafe(32)


def token(credential_id: str, secret: str) -> str:
    """What its holder sends."""
    return f"ql3c_{credential_id}_{secret}"


def parse(text: str) -> Presented | None:
    """A well-formed credential, or None."""
    found = _FORM.fullmatch(text)
    return Presented(found[1], found[2]) if found else None


def digest(pepper: Pepper, credential_id: str, version: int, secret: str) -> str:
    """What is kept of a secret."""
    return pepper.digest("api-credential", credential_id, str(version), secret)


def accepted(pepper: Pepper, presented: Presented, versions: Sequence[Version], now_ms: int) -> Version | None:
    """The live version whose secret was presented, or None; an unknown id takes as long as a wrong secret."""
    found: Version | None = None
    for known in versions[:VERSIONS_LIVE] or (None,):
        expected = known.digest if known else "0" * 64
        number = known.version if known else 0
        same = hmac.compare_digest(expected, digest(pepper, presented.credential_id, number, presented.secret))
        if same and known is not None and known.state(now_ms) == "active":
            found = known
    return found
