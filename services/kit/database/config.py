"""Where a service's database is."""

from __future__ import annotations

from typing import Literal
from urllib.parse import quote, urlsplit, urlunsplit

import msgspec

from schemas.errors import Ql3Error


class DatabaseConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`url` is `sqlite:<directory>` (a file per service in it) or `postgresql://[user[:password]@]host[:port]/name`.

    On PostgreSQL the user defaults to the service's own role, `ql3_<service>`; `password` wins over the one in `url`.
    """

    url: str
    password: str | None = None
    pool_size: int = 8

    def __post_init__(self) -> None:
        if self.url.startswith("sqlite:"):
            if not self.directory:
                raise Ql3Error("setup_invalid", "An SQLite database needs a directory.", field="database.url")
        elif not self.url.startswith(("postgresql://", "postgres://")):
            raise Ql3Error("setup_invalid", "Use sqlite:<directory> or postgresql://….", field="database.url")
        if not 1 <= self.pool_size <= 200:
            raise Ql3Error("setup_invalid", "Use 1 to 200 connections.", field="database.pool_size")

    def __repr__(self) -> str:  # an url may hold a password
        return f"DatabaseConfig({self.dialect})"

    @property
    def dialect(self) -> Literal["sqlite", "postgresql"]:
        """Which of the two databases this is."""
        return "sqlite" if self.url.startswith("sqlite:") else "postgresql"

    @property
    def directory(self) -> str:
        """The folder of the SQLite files."""
        return self.url.removeprefix("sqlite:").removeprefix("//")

    def dsn(self, user: str) -> str:
        """The PostgreSQL address with a user in it."""
        parts = urlsplit(self.url)
        if parts.username:
            return self.url
        return urlunsplit(parts._replace(netloc=f"{quote(user)}@{parts.netloc.rpartition('@')[2]}"))


def schema_name(service: str) -> str:
    """The PostgreSQL schema of a service, which is its login role's name too."""
    return f"ql3_{service}"
