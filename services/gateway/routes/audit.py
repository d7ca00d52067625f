"""Who did what. Each service keeps its own ledger, written with what it records."""

from __future__ import annotations

import asyncio
from typing import Literal

from schemas import endpoints
from schemas.base import View
from schemas.errors import Ql3Error
from schemas.ids import ProjectId
from schemas.paging import Page
from schemas.system import AuditEvent, AuditPage, AuditRead, AuditVerify
from services.gateway.calls import Call
from services.gateway.operations import Listing, Nothing, Operations, Paged

operations = Operations("audit")
WALK_S = 25.0
"""How long the walk over a ledger may take; below the patience of the command, which is 30 s."""
Ledger = Literal["approval", "vault", "scheduler", "dispatcher", "retention", "gateway"]
LEDGERS = tuple(endpoints.AUDIT_READ)


class AuditQuery(Paged, frozen=True, kw_only=True):
    """Of which service (all, one after another, by default), of which project."""

    service: Ledger | None = None
    project: ProjectId | None = None


class LedgerVerdict(View, frozen=True, kw_only=True):
    """What the walk over a ledger's hash chain found; `problems` names the first positions that do not hold."""

    service: str
    sealed: int
    unsealed: int
    intact: bool
    problems: list[str]


@operations.get("/audit", AuditQuery, Listing[AuditEvent])
async def list_audit(call: Call[AuditQuery]) -> Listing[AuditEvent]:
    """Acts of people and credentials, newest first within each service."""
    query = call.input
    if query.service is not None:
        page = await _read(call, query.service, query.page)
        return Listing(items=page.items, next=page.next)
    # Without a service the ledgers follow each other; the cursor says in which of them the next page begins.
    ledger, _, cursor = (query.cursor or f"{LEDGERS[0]}:").partition(":")
    if ledger not in LEDGERS:
        raise Ql3Error("invalid", "This cursor is not of this list.", field="cursor")
    page = await _read(call, ledger, Page(limit=query.limit, cursor=cursor or None))
    following = LEDGERS.index(ledger) + 1
    if page.next is not None:
        return Listing(items=page.items, next=f"{ledger}:{page.next}")
    return Listing(items=page.items, next=f"{LEDGERS[following]}:" if following < len(LEDGERS) else None)


async def _read(call: Call[AuditQuery], ledger: str, page: Page) -> AuditPage:
    question = AuditRead(actor=call.actor, project=call.input.project, page=page)
    return await call.ask(endpoints.AUDIT_READ[ledger], question)


@operations.get("/audit/verify", Nothing, Listing[LedgerVerdict])
async def verify_audit(call: Call[Nothing]) -> Listing[LedgerVerdict]:
    """Walk every ledger's hash chain: an edited, missing or moved row shows."""
    question = AuditVerify(actor=call.actor)
    asked = (call.ask(endpoints.AUDIT_VERIFY[ledger], question, timeout=WALK_S) for ledger in LEDGERS)
    verdicts = await asyncio.gather(*asked)
    return Listing(
        items=[
            LedgerVerdict(
                service=verdict.service,
                sealed=verdict.sealed,
                unsealed=verdict.unsealed,
                intact=verdict.intact,
                problems=verdict.problems,
            )
            for verdict in verdicts
        ]
    )
