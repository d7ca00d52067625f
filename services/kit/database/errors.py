"""What a database can answer besides rows, the same on both dialects."""
# ruff: noqa: N818 - an error is named for what happened

from __future__ import annotations

from schemas.errors import Ql3Error


class DatabaseUnavailable(Ql3Error):
    """The database cannot be reached or cannot write: gone, full, read-only, or without room for us."""

    def __init__(self, detail: str | None = None) -> None:
        super().__init__("database_unavailable", detail)


class DatabaseBusy(DatabaseUnavailable):
    """Others held what we needed for too long; nothing was changed."""


class CommitUnknown(Ql3Error):
    """The answer to COMMIT was lost: the transaction may or may not stand. Never repeated by the kit."""

    def __init__(self) -> None:
        super().__init__("commit_unknown")


class UnsupportedServer(Ql3Error):
    """The PostgreSQL server is older or newer than what is supported."""

    def __init__(self, major: int) -> None:
        super().__init__("setup_invalid", f"PostgreSQL {major} is not supported; use 16, 17 or 18.", field="database")


class Retryable(Exception):
    """The transaction lost a race (busy, 40001, 40P01) and may be run again."""


class TransactionAborted(RuntimeError):
    """A statement failed outside a savepoint and its error was swallowed; nothing of the transaction stands."""


class IntegrityViolation(Exception):
    """A statement that the schema's rules refuse.

    `constraint` is the constraint's or index's name, `table` and `columns` what it is about, where the dialect tells:
    a unique violation always names its columns, a check its constraint.
    """

    def __init__(
        self, *, constraint: str | None = None, table: str | None = None, columns: tuple[str, ...] = ()
    ) -> None:
        self.constraint = constraint
        self.table = table
        self.columns = columns
        super().__init__(f"{type(self).__name__}({constraint or ''} {table or ''}({', '.join(columns)}))")


class UniqueViolation(IntegrityViolation):
    """A unique index or primary key already holds this."""


class CheckViolation(IntegrityViolation):
    """A CHECK constraint refuses the value."""


class ForeignKeyViolation(IntegrityViolation):
    """A row points to what is not there, or is still pointed to."""


class NotNullViolation(IntegrityViolation):
    """A required column has no value."""


class NotPermitted(IntegrityViolation):
    """An append-only table, a guarded purge or a missing right refuses the statement."""
