"""People: passwords, second factors, password links and sessions."""

from __future__ import annotations

from typing import NamedTuple

from services.gateway.sessions import Session
from services.kit.database import Row, Statement, Transaction

PASSWORD = Statement("SELECT hash FROM password_credentials WHERE user_name = $1")
INSERT_PASSWORD = Statement(
    "INSERT INTO password_credentials (user_name, hash, version, created_at_ms, updated_at_ms) "
    "VALUES ($1, $2, 1, $3, $3) ON CONFLICT (user_name) DO NOTHING"
)
PUT_PASSWORD = Statement(
    "INSERT INTO password_credentials (user_name, hash, version, created_at_ms, updated_at_ms) "
    "VALUES ($1, $2, 1, $3, $3) ON CONFLICT (user_name) DO UPDATE SET hash = excluded.hash, "
    "version = password_credentials.version + 1, updated_at_ms = excluded.updated_at_ms"
)
DROP_PASSWORD = Statement("DELETE FROM password_credentials WHERE user_name = $1 AND hash = $2")

TOTP = Statement("SELECT sealed, confirmed, last_step FROM totp_credentials WHERE user_name = $1")
PUT_TOTP = Statement(
    "INSERT INTO totp_credentials (user_name, sealed, confirmed, last_step, created_at_ms) VALUES ($1, $2, 0, 0, $3) "
    "ON CONFLICT (user_name) DO UPDATE SET sealed = excluded.sealed, created_at_ms = excluded.created_at_ms "
    "WHERE totp_credentials.confirmed = 0"
)
USE_TOTP = Statement(
    "UPDATE totp_credentials SET last_step = $2, confirmed = 1 WHERE user_name = $1 AND last_step < $2"
)
DROP_TOTP = Statement("DELETE FROM totp_credentials WHERE user_name = $1")

INSERT_LINK = Statement(
    "INSERT INTO password_links (id, user_name, digest, issued_by, created_at_ms, expires_at_ms) "
    "VALUES ($1, $2, $3, $4, $5, $6)"
)
LINK = Statement("SELECT user_name, digest, expires_at_ms, used_at_ms FROM password_links WHERE id = $1")
USE_LINK = Statement("UPDATE password_links SET used_at_ms = $2 WHERE id = $1 AND used_at_ms IS NULL")
CLOSE_LINKS = Statement("UPDATE password_links SET used_at_ms = $2 WHERE user_name = $1 AND used_at_ms IS NULL")
FORGET_LINKS = Statement("DELETE FROM password_links WHERE expires_at_ms < $1")

_SESSION = "id, user_name, digest, assurance, authenticated_at_ms, seen_at_ms, expires_at_ms, revoked_at_ms"
INSERT_SESSION = Statement(f"INSERT INTO sessions ({_SESSION}) VALUES ($1, $2, $3, $4, $5, $6, $7, $8)")  # noqa: S608
SESSION = Statement(f"SELECT {_SESSION} FROM sessions WHERE id = $1")  # noqa: S608
SEEN = Statement("UPDATE sessions SET seen_at_ms = $2 WHERE id = $1 AND revoked_at_ms IS NULL AND seen_at_ms < $2")
RAISE_SESSION = Statement("UPDATE sessions SET assurance = 'multi_factor', authenticated_at_ms = $2 WHERE id = $1")
REVOKE_SESSION = Statement("UPDATE sessions SET revoked_at_ms = $2 WHERE id = $1 AND revoked_at_ms IS NULL")
REVOKE_SESSIONS = Statement(
    "UPDATE sessions SET revoked_at_ms = $2 WHERE user_name = $1 AND revoked_at_ms IS NULL AND id <> $3"
)
REVOKE_OLDEST = Statement(
    "UPDATE sessions SET revoked_at_ms = $2 WHERE user_name = $1 AND revoked_at_ms IS NULL AND id NOT IN (SELECT id "
    "FROM sessions WHERE user_name = $1 AND revoked_at_ms IS NULL ORDER BY authenticated_at_ms DESC, id DESC LIMIT $3)"
)
FORGET_SESSIONS = Statement("DELETE FROM sessions WHERE expires_at_ms < $1", long=True)


class SecondFactor(NamedTuple):
    """The stored second factor of a person."""

    sealed: str
    confirmed: bool
    last_step: int


class Link(NamedTuple):
    """A one-time link with which a person sets a password."""

    user_name: str
    digest: str
    expires_at_ms: int
    used_at_ms: int | None


async def password(tx: Transaction, user_name: str) -> str | None:
    """The hash of a person's password."""
    row = await tx.fetch_one(PASSWORD, user_name)
    return row["hash"] if row else None


async def insert_password(tx: Transaction, user_name: str, hashed: str, now_ms: int) -> bool:
    """The first password of a person; False when there is one."""
    return await tx.execute(INSERT_PASSWORD, user_name, hashed, now_ms) == 1


async def put_password(tx: Transaction, user_name: str, hashed: str, now_ms: int) -> None:
    """A password in place of whatever was there."""
    await tx.execute(PUT_PASSWORD, user_name, hashed, now_ms)


async def drop_password(tx: Transaction, user_name: str, hashed: str) -> None:
    """Takes back a password, if it is still this one."""
    await tx.execute(DROP_PASSWORD, user_name, hashed)


async def second_factor(tx: Transaction, user_name: str) -> SecondFactor | None:
    """A person's second factor."""
    row = await tx.fetch_one(TOTP, user_name)
    return SecondFactor(row["sealed"], bool(row["confirmed"]), row["last_step"]) if row else None


async def put_second_factor(tx: Transaction, user_name: str, sealed: str, now_ms: int) -> bool:
    """A second factor that is still to be confirmed; False when a confirmed one is there."""
    return await tx.execute(PUT_TOTP, user_name, sealed, now_ms) == 1


async def use_code(tx: Transaction, user_name: str, step: int) -> bool:
    """Marks a code's step as used; False when it, or a later one, was used before."""
    return await tx.execute(USE_TOTP, user_name, step) == 1


async def drop_second_factor(tx: Transaction, user_name: str) -> None:
    """Removes a second factor."""
    await tx.execute(DROP_TOTP, user_name)


async def insert_link(
    tx: Transaction, link_id: str, user_name: str, digest: str, issued_by: str, now_ms: int, expires_at_ms: int
) -> None:
    """A new password link; those before it end."""
    await tx.execute(CLOSE_LINKS, user_name, now_ms)
    await tx.execute(INSERT_LINK, link_id, user_name, digest, issued_by, now_ms, expires_at_ms)


async def link(tx: Transaction, link_id: str) -> Link | None:
    """A password link, used or not."""
    row = await tx.fetch_one(LINK, link_id)
    return Link(row["user_name"], row["digest"], row["expires_at_ms"], row["used_at_ms"]) if row else None


async def use_link(tx: Transaction, link_id: str, now_ms: int) -> bool:
    """Uses a link up; False when it was used before."""
    return await tx.execute(USE_LINK, link_id, now_ms) == 1


async def insert_session(tx: Transaction, session: Session, *, keep: int) -> None:
    """A new session; the oldest beyond `keep` of the same person end."""
    await tx.execute(INSERT_SESSION, *session)
    await tx.execute(REVOKE_OLDEST, session.user_name, session.authenticated_at_ms, keep)


async def session(tx: Transaction, session_id: str) -> Session | None:
    """A session, live or not."""
    row = await tx.fetch_one(SESSION, session_id)
    return _session(row) if row else None


async def seen(tx: Transaction, session_id: str, now_ms: int) -> None:
    """Moves a session's idle end."""
    await tx.execute(SEEN, session_id, now_ms)


async def raise_session(tx: Transaction, session_id: str, now_ms: int) -> None:
    """The person of this session has proved a second factor."""
    await tx.execute(RAISE_SESSION, session_id, now_ms)


async def revoke_session(tx: Transaction, session_id: str, now_ms: int) -> None:
    """Ends a session."""
    await tx.execute(REVOKE_SESSION, session_id, now_ms)


async def revoke_sessions(tx: Transaction, user_name: str, now_ms: int, *, but: str = "") -> None:
    """Ends all sessions of a person, but one."""
    await tx.execute(REVOKE_SESSIONS, user_name, now_ms, but)


async def forget(tx: Transaction, before_ms: int) -> None:
    """Deletes sessions and links that ended before a time."""
    await tx.execute(FORGET_SESSIONS, before_ms)
    await tx.execute(FORGET_LINKS, before_ms)


def _session(row: Row) -> Session:
    return Session(*(row[name] for name in Session._fields))
