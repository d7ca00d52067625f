"""The database port and its two adapters. Stores import from here and nothing deeper."""

from __future__ import annotations

from services.kit.database.config import DatabaseConfig, schema_name
from services.kit.database.errors import (
    CheckViolation,
    CommitUnknown,
    DatabaseBusy,
    DatabaseUnavailable,
    ForeignKeyViolation,
    IntegrityViolation,
    NotNullViolation,
    NotPermitted,
    TransactionAborted,
    UniqueViolation,
    UnsupportedServer,
)
from services.kit.database.port import Database, Row, Transaction
from services.kit.database.postgresql import open_postgresql
from services.kit.database.sqlite import open_sqlite
from services.kit.database.statement import Dialect, Statement, id_set, json_rows, json_set

__all__ = [
    "CheckViolation",
    "CommitUnknown",
    "Database",
    "DatabaseBusy",
    "DatabaseConfig",
    "DatabaseUnavailable",
    "Dialect",
    "ForeignKeyViolation",
    "IntegrityViolation",
    "NotNullViolation",
    "NotPermitted",
    "Row",
    "Statement",
    "Transaction",
    "TransactionAborted",
    "UniqueViolation",
    "UnsupportedServer",
    "id_set",
    "json_rows",
    "json_set",
    "open_database",
    "schema_name",
]


async def open_database(config: DatabaseConfig, service: str) -> Database:
    """Opens the service's database. Raises `DatabaseUnavailable` or `UnsupportedServer`; migrates nothing."""
    if config.dialect == "sqlite":
        return await open_sqlite(config, service)
    return await open_postgresql(config, service)
