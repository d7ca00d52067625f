"""Subjects and the names by which providers know them."""

from __future__ import annotations

from typing import NamedTuple

from schemas.identity import AuthenticationBinding, Identity, Subject
from services.approval.store.cursors import decode_texts, encode
from services.kit.database import Row, Statement, Transaction

_COLUMNS = "s.type, s.id, s.display_name, s.status, s.version, s.created_at_ms, s.updated_at_ms"
_GET = Statement(f"SELECT {_COLUMNS} FROM identity_subjects AS s WHERE s.type = $1 AND s.id = $2 {{for_update}}")  # noqa: S608
_FIND = Statement(f"SELECT {_COLUMNS} FROM identity_subjects AS s WHERE s.type = $1 AND s.id = $2")  # noqa: S608
_LIST = Statement(
    f"SELECT {_COLUMNS} FROM identity_subjects AS s WHERE (s.type, s.id) > ($1, $2) ORDER BY s.type, s.id LIMIT $3"  # noqa: S608
)
_INSERT = Statement("""
    INSERT INTO identity_subjects (type, id, display_name, status, version, created_at_ms, updated_at_ms)
    VALUES ($1, $2, $3, 'active', 1, $4, $4)
""")
_SET_STATUS = Statement("""
    UPDATE identity_subjects SET status = $4, version = version + 1, updated_at_ms = $5
    WHERE type = $1 AND id = $2 AND version = $3
""")
_BOUND = Statement("""
    SELECT version, state, subject_type, subject_id, created_at_ms FROM identity_authentication_bindings
    WHERE provider = $1 AND provider_subject = $2 ORDER BY version DESC LIMIT 1
""")
_BIND = Statement("""
    INSERT INTO identity_authentication_bindings
      (provider, provider_subject, version, state, subject_type, subject_id, created_at_ms)
    VALUES ($1, $2, $3, $4, $5, $6, $7)
""")

_BINDINGS = Statement("""
    SELECT b.provider, b.provider_subject, b.version, b.state, b.created_at_ms
    FROM identity_authentication_bindings AS b
    WHERE b.subject_type = $1 AND b.subject_id = $2 AND (b.provider, b.provider_subject) > ($3, $4)
      AND b.version = (
        SELECT max(l.version) FROM identity_authentication_bindings AS l
        WHERE l.provider = b.provider AND l.provider_subject = b.provider_subject
      )
    ORDER BY b.provider, b.provider_subject LIMIT $5
""")
_OTHER_NAMES = Statement("""
    SELECT COUNT(*) AS names FROM identity_authentication_bindings AS b
    WHERE b.subject_type = $1 AND b.subject_id = $2 AND b.state = 'active'
      AND NOT (b.provider = $3 AND b.provider_subject = $4)
      AND b.version = (
        SELECT max(l.version) FROM identity_authentication_bindings AS l
        WHERE l.provider = b.provider AND l.provider_subject = b.provider_subject
      )
""")


class Bound(NamedTuple):
    """The current binding of a provider's name."""

    version: int
    active: bool
    subject: Subject
    created_at_ms: int


async def get(tx: Transaction, subject: Subject) -> Identity | None:
    """A subject, locked where the dialect locks."""
    row = await tx.fetch_one(_GET, subject.type, subject.id)
    return _identity(row) if row else None


async def find(tx: Transaction, subject: Subject) -> Identity | None:
    """A subject, as a reader sees it."""
    row = await tx.fetch_one(_FIND, subject.type, subject.id)
    return _identity(row) if row else None


async def insert(tx: Transaction, subject: Subject, display_name: str | None, now_ms: int) -> None:
    """A new active subject."""
    await tx.execute(_INSERT, subject.type, subject.id, display_name, now_ms)


async def set_status(tx: Transaction, subject: Subject, version: int, status: str, now_ms: int) -> bool:
    """Change a subject's status; False when it is no longer at `version`."""
    return await tx.execute(_SET_STATUS, subject.type, subject.id, version, status, now_ms) == 1


async def bound(tx: Transaction, provider: str, provider_subject: str) -> Bound | None:
    """For whom a provider's name stands, or last stood."""
    row = await tx.fetch_one(_BOUND, provider, provider_subject)
    if row is None:
        return None
    subject = Subject(type=row["subject_type"], id=row["subject_id"])
    return Bound(row["version"], row["state"] == "active", subject, row["created_at_ms"])


async def bind(
    tx: Transaction, provider: str, provider_subject: str, version: int, state: str, subject: Subject, now_ms: int
) -> None:
    """Append a version of a provider's name."""
    await tx.execute(_BIND, provider, provider_subject, version, state, subject.type, subject.id, now_ms)


async def bindings(
    tx: Transaction, subject: Subject, limit: int, cursor: str | None
) -> tuple[list[AuthenticationBinding], str | None]:
    """The names that stand for a subject, or last stood for it, by provider and name."""
    provider, name = decode_texts(cursor)
    rows = await tx.fetch(_BINDINGS, subject.type, subject.id, provider, name, limit + 1)
    items = [
        AuthenticationBinding(
            provider=row["provider"],
            provider_subject=row["provider_subject"],
            version=row["version"],
            state=row["state"],
            created_at_ms=row["created_at_ms"],
        )
        for row in rows[:limit]
    ]
    return items, encode(items[-1].provider, items[-1].provider_subject) if len(rows) > limit else None


async def other_names(tx: Transaction, subject: Subject, provider: str, provider_subject: str) -> int:
    """How many active names a subject has besides one."""
    row = await tx.fetch_one(_OTHER_NAMES, subject.type, subject.id, provider, provider_subject)
    return row["names"] if row else 0


async def page(tx: Transaction, limit: int, cursor: str | None) -> tuple[list[Identity], str | None]:
    """Subjects by type and id."""
    kind, subject_id = decode_texts(cursor)
    rows = await tx.fetch(_LIST, kind, subject_id, limit + 1)
    items = [_identity(row) for row in rows[:limit]]
    return items, encode(items[-1].type, items[-1].id) if len(rows) > limit else None


def _identity(row: Row) -> Identity:
    return Identity(
        type=row["type"],
        id=row["id"],
        display_name=row["display_name"],
        status=row["status"],
        version=row["version"],
        created_at_ms=row["created_at_ms"],
        updated_at_ms=row["updated_at_ms"],
    )
