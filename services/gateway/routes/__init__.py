"""The operations of the API, one file per concern. `ALL` is the whole table."""

from __future__ import annotations

from services.gateway.operations import Operation
from services.gateway.routes import (
    approvals,
    artifacts,
    audit,
    authority,
    credentials,
    dead,
    identities,
    limits,
    logs,
    projects,
    runs,
    secrets,
    sessions,
    tasks,
    triggers,
    workers,
)

ALL: tuple[Operation, ...] = tuple(
    operation
    for concern in (
        projects,
        tasks,
        triggers,
        runs,
        logs,
        limits,
        approvals,
        authority,
        secrets,
        artifacts,
        workers,
        sessions,
        identities,
        credentials,
        audit,
        dead,
    )
    for operation in concern.operations.table
)
