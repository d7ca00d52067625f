"""Evidence from those who keep the dispatch ids of approved actions: done once, or closed for ever."""

from __future__ import annotations

from schemas.approvals import ActionClose
from schemas.canonical import digest
from schemas.endpoints import ACTIONS_CLOSE
from services.approval.handlers.port import Ask
from services.approval.recovery import Finding
from services.approval.store.actions import Dispatch


async def closed(ask: Ask, service: str, dispatch: Dispatch, code: str, resource_type: str) -> Finding:
    """What stands at `service` for a dispatch, once no late effect can come. Raises `unavailable`."""
    answer = await ask(ACTIONS_CLOSE[service], ActionClose(dispatch_id=dispatch.id, project=dispatch.project))
    evidence = digest(
        "ql3.approved-action-closed.v1",
        {
            "dispatch_id": dispatch.id,
            "outcome": answer.outcome,
            "resource": answer.resource or "",
            "at_ms": answer.at_ms,
        },
    )
    if answer.outcome == "done":
        return Finding("verified_succeeded", f"{code}_verified", evidence, (resource_type, answer.resource or "-"))
    return Finding("verified_failed", f"{code}_never_done", evidence)


def succeeded(finding: Finding) -> Finding | None:
    """The finding if the action had its effect."""
    return finding if finding.kind == "verified_succeeded" else None
