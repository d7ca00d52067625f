"""The endpoints that every service with tables answers alike: its facts, its audit ledger, its health."""

from __future__ import annotations

from typing import Any

from schemas.endpoints import AUDIT_READ, AUDIT_VERIFY, FEED_READ
from schemas.identity import DEFAULT_PROJECT
from schemas.system import AuditPage, AuditRead, AuditVerdict, AuditVerify, FeedPage, FeedRead
from services.kit import audit, outbox
from services.kit.bus import Caller, Route
from services.kit.database import Database
from services.kit.health import Health
from services.kit.policy import PolicyClient

AUDIT_PERMISSION = "policy.manage"
"""Audit is for admins and owners; of all projects at once, for those of the default project."""


def standing_routes(
    service: str, version: str, *, database: Database, policy: PolicyClient, health: Health
) -> list[Route[Any, Any]]:
    """`feed.read`, `audit.read`, `audit.verify` and `health` of a service; add them to its own routes."""

    async def read_feed(message: FeedRead, _caller: Caller) -> FeedPage:
        return await database.read(lambda tx: outbox.read_feed(tx, message.after, message.limit, message.subjects))

    async def read_audit(message: AuditRead, _caller: Caller) -> AuditPage:
        await policy.require(message.actor, message.project or DEFAULT_PROJECT, AUDIT_PERMISSION)
        return await database.read(lambda tx: audit.read_page(tx, message.project, message.page))

    async def verify_audit(message: AuditVerify, _caller: Caller) -> AuditVerdict:
        await policy.require(message.actor, DEFAULT_PROJECT, AUDIT_PERMISSION)
        return await audit.verify(database)

    return [
        Route(FEED_READ[service], read_feed),
        Route(AUDIT_READ[service], read_audit),
        Route(AUDIT_VERIFY[service], verify_audit, concurrency=1),
        health.route(service, version),
    ]
