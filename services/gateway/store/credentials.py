"""API credentials."""

from __future__ import annotations

from services.gateway.credentials import VERSIONS_LIVE, Version
from services.kit.database import Row, Statement, Transaction

_COLUMNS = (
    "id, version, digest, name, subject_type, subject_id, assurance, created_by, created_at_ms, expires_at_ms, "
    "revoked_at_ms"
)

INSERT = Statement(
    f"INSERT INTO api_credentials ({_COLUMNS}) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)"  # noqa: S608
)
VERSIONS = Statement(f"SELECT {_COLUMNS} FROM api_credentials WHERE id = $1 ORDER BY version DESC LIMIT $2")  # noqa: S608
LIST = Statement(
    f"SELECT {_COLUMNS} FROM api_credentials AS c WHERE c.id > $1 AND ($2 = '' OR (subject_type = $2 AND "  # noqa: S608
    "subject_id = $3)) AND assurance <> 'local_console' AND version = (SELECT MAX(version) FROM api_credentials "
    "AS newer WHERE newer.id = c.id) ORDER BY c.id LIMIT $4"
)
REVOKE = Statement("UPDATE api_credentials SET revoked_at_ms = $2 WHERE id = $1 AND revoked_at_ms IS NULL")
SHORTEN = Statement(
    "UPDATE api_credentials SET expires_at_ms = $3 WHERE id = $1 AND version < $2 AND expires_at_ms > $3"
)
REVOKE_CONSOLE = Statement(
    "UPDATE api_credentials SET revoked_at_ms = $1 WHERE assurance = 'local_console' AND revoked_at_ms IS NULL"
)
FORGET = Statement(
    "DELETE FROM api_credentials WHERE assurance = 'local_console' AND (revoked_at_ms < $1 OR expires_at_ms < $1)"
)


async def insert(tx: Transaction, version: Version) -> None:
    """A new version."""
    await tx.execute(INSERT, *version)


async def versions(tx: Transaction, credential_id: str) -> list[Version]:
    """The versions that may count, newest first."""
    return [_version(row) for row in await tx.fetch(VERSIONS, credential_id, VERSIONS_LIVE)]


async def page(
    tx: Transaction, after: str, subject: tuple[str, str] | None, limit: int
) -> tuple[list[Version], str | None]:
    """The newest version of each credential, of one subject or of all, by id; console credentials are not listed."""
    kind, name = subject or ("", "")
    rows = [_version(row) for row in await tx.fetch(LIST, after, kind, name, limit + 1)]
    return rows[:limit], rows[limit - 1].id if len(rows) > limit else None


async def revoke(tx: Transaction, credential_id: str, now_ms: int) -> None:
    """Ends every version, now."""
    await tx.execute(REVOKE, credential_id, now_ms)


async def shorten_before(tx: Transaction, credential_id: str, version: int, until_ms: int) -> None:
    """Lets the versions before `version` live until `until_ms` at most."""
    await tx.execute(SHORTEN, credential_id, version, until_ms)


async def revoke_console(tx: Transaction, now_ms: int) -> None:
    """Ends every credential of the local console."""
    await tx.execute(REVOKE_CONSOLE, now_ms)


async def forget_console(tx: Transaction, before_ms: int) -> None:
    """Deletes console credentials that ended before a time: one is made at every start."""
    await tx.execute(FORGET, before_ms)


def _version(row: Row) -> Version:
    return Version(*(row[name] for name in Version._fields))
