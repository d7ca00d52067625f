"""The rules of panel sessions: the cookie, the CSRF token, and when a session counts. No I/O.

The cookie is `<session id>.<secret>`; an HMAC of the secret is kept. The CSRF token is derived from the same secret
under another key, so that it needs no row, and dies with the session. A sign-in always makes a new session.
"""

from __future__ import annotations

import hmac
import re
import secrets
from typing import Literal, NamedTuple

from services.gateway.pepper import Pepper

LIFE_MS = 7 * 86_400_000
IDLE_MS = 24 * 3_600_000
SEEN_EVERY_MS = 5 * 60_000
"""`seen_at_ms` is written at most this often: looking at the panel must not write at each click."""
PER_USER = 10
COOKIE = "ql3_session"
SECURE_COOKIE = "__Host-ql3_session"
CSRF_HEADER = "ql3-csrf"

_FORM = re.compile(
    r"([0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12})\.([A-Za-z0-9_-]{43})", re.ASCII
)


class Session(NamedTuple):
    """One stored session. Times in milliseconds UTC."""

    id: str
    user_name: str
    digest: str
    assurance: Literal["single_factor", "multi_factor"]
    authenticated_at_ms: int
    seen_at_ms: int
    expires_at_ms: int
    revoked_at_ms: int | None

    def live(self, now_ms: int) -> bool:
        """Whether it counts now."""
        return self.revoked_at_ms is None and now_ms < min(self.expires_at_ms, self.seen_at_ms + IDLE_MS)


class Presented(NamedTuple):
    """What a browser sent."""

    session_id: str
    secret: str


def new_secret() -> str:
    """43 characters that hold 256 bits."""
    return secrets.token_urlsafe(32)


def cookie_value(session_id: str, secret: str) -> str:
    """What the browser keeps."""
    return f"{session_id}.{secret}"


def parse(value: str) -> Presented | None:
    """A well-formed cookie value, or None."""
    found = _FORM.fullmatch(value)
    return Presented(found[1], found[2]) if found else None


def digest(pepper: Pepper, session_id: str, secret: str) -> str:
    """What is kept of a secret."""
    return pepper.digest("session", session_id, secret)


def csrf_token(pepper: Pepper, presented: Presented) -> str:
    """What a page of ours sends with each change."""
    return pepper.digest("csrf", presented.session_id, presented.secret)


def accepted(pepper: Pepper, presented: Presented, session: Session | None, now_ms: int) -> bool:
    """Whether the cookie stands for this live session; an unknown id takes as long as a wrong secret."""
    expected = session.digest if session else "0" * 64
    same = hmac.compare_digest(expected, digest(pepper, presented.session_id, presented.secret))
    return same and session is not None and session.live(now_ms)


def set_cookie(value: str, *, secure: bool) -> str:
    """The Set-Cookie header. The `__Host-` prefix binds it to this host, and browsers want TLS for it."""
    name = SECURE_COOKIE if secure else COOKIE
    return f"{name}={value}; Path=/; HttpOnly; SameSite=Strict; Max-Age={LIFE_MS // 1000}" + ("; Secure" * secure)


def drop_cookie(*, secure: bool) -> str:
    """The Set-Cookie header that ends it in the browser."""
    name = SECURE_COOKIE if secure else COOKIE
    return f"{name}=; Path=/; HttpOnly; SameSite=Strict; Max-Age=0" + ("; Secure" * secure)
