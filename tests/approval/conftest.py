"""What the tests of authority share: a gate on a real database with a manual clock, and people."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest_asyncio

from schemas.approvals import Binding, HoldOrder, preview_digest
from schemas.identity import (
    GATEWAY,
    LOCAL_CONSOLE,
    Actor,
    Assurance,
    IdentityRegister,
    RoleBind,
    Subject,
    SubjectType,
)
from services.approval.approvals import Approvals
from services.approval.authority import Authority
from services.approval.directory import Directory
from services.approval.gate import Gate
from services.kit.clock import ManualClock
from services.kit.database import Database
from services.kit.ids import new_id

NOW = 1_700_000_000_000
HOUR = 3_600_000


def actor(
    subject_id: str,
    *,
    kind: SubjectType = "user",
    assurance: Assurance = "multi_factor",
    now_ms: int = NOW,
    age_ms: int = 0,
) -> Actor:
    """Somebody who proved who they are `age_ms` ago."""
    return Actor(
        type=kind,
        id=subject_id,
        authentication_id=f"auth-{subject_id}",
        assurance=assurance,
        authenticated_at_ms=now_ms - age_ms,
        expires_at_ms=now_ms + 365 * 24 * HOUR,
    )


def console(now_ms: int = NOW, *, age_ms: int = 0) -> Actor:
    """The machine's own console."""
    return actor(LOCAL_CONSOLE, assurance="local_console", now_ms=now_ms, age_ms=age_ms)


def gateway() -> Actor:
    """The gateway itself."""
    return actor(GATEWAY, kind="system", assurance="service")


def hold(
    *,
    request_id: str | None = None,
    project: str = "default",
    requested_by: Subject | None = None,
    now_ms: int = NOW,
    ttl_ms: int = HOUR,
    risk: Any = "medium",
    labels: dict[str, str] | None = None,
    order_id: str | None = None,
) -> HoldOrder:
    """An order as the dispatcher sends it for a run that waits."""
    run = request_id or new_id()
    preview = {"task": "backup", "run": run}
    return HoldOrder(
        order_id=order_id or new_id(),
        request_id=run,
        project=project,
        binding=Binding(
            permission="run.start",
            action_type="run.release",
            action_ref=run,
            action_digest="a" * 64,
            preview_digest=preview_digest(preview),
        ),
        preview=preview,
        risk=risk,
        requested_by=requested_by or Subject(type="user", id=LOCAL_CONSOLE),
        requested_at_ms=now_ms,
        expires_at_ms=now_ms + ttl_ms,
        labels=labels or {},
    )


class World:
    """Authority on one database."""

    def __init__(self, database: Database) -> None:
        self.clock = ManualClock(NOW)
        self.database = database
        self.gate = Gate(database, self.clock)
        self.authority = Authority(self.gate)
        self.directory = Directory(self.gate)
        self.approvals = Approvals(self.gate)

    async def person(
        self, subject_id: str, role: Any = None, *, project: str = "default", kind: SubjectType = "user"
    ) -> Actor:
        """A registered subject, with a role when given."""
        subject = Subject(type=kind, id=subject_id)
        await self.directory.register(
            IdentityRegister(actor=gateway(), subject=subject, provider="password", provider_subject=subject_id)
        )
        if role is not None:
            await self.bind(subject, role, project=project)
        return actor(subject_id, kind=kind, now_ms=self.clock.now_ms())

    async def bind(self, subject: Subject, role: Any, *, project: str = "default", expected: int = 0) -> None:
        """Give or take a role, by the console."""
        await self.authority.bind_role(
            RoleBind(
                actor=console(self.clock.now_ms()),
                project=project,
                subject=subject,
                role=role,
                expected_version=expected,
                mutation_id=new_id(),
            )
        )


WorldFactory = Callable[..., Awaitable[World]]


@pytest_asyncio.fixture
async def world(database_for: Callable[[str], Awaitable[Database]]) -> World:
    """Authority on SQLite and on PostgreSQL."""
    return World(await database_for("approval"))
