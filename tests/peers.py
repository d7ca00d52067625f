"""Peers of a service under test: they answer its questions over a real bus as the test tells them."""

from __future__ import annotations

from schemas.endpoints import POLICY_CHECK
from schemas.errors import Ql3Error
from schemas.identity import Actor, PolicyCheck, PolicyDecision
from services.kit.bus import Bus, Caller, Route

OWNER = Actor(
    type="user",
    id="ada",
    authentication_id="session-1",
    assurance="multi_factor",
    authenticated_at_ms=0,
    expires_at_ms=2**52,
)
STRANGER = Actor(
    type="user",
    id="mallory",
    authentication_id="session-2",
    assurance="single_factor",
    authenticated_at_ms=0,
    expires_at_ms=2**52,
)


class Authority:
    """Allows `OWNER` everything in the project `default`, denies everything else; notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str]] = []

    async def serve(self, bus: Bus) -> None:
        """Answer as approval."""
        await bus.serve("approval", "1.0.0", [Route(POLICY_CHECK, self._check)])
        await bus.flush()

    async def _check(self, message: PolicyCheck, _caller: Caller) -> PolicyDecision:
        self.asked.append((message.actor.id, message.project, message.permission))
        allowed = message.actor.id == OWNER.id and message.project == "default"
        return PolicyDecision(
            effect="allow" if allowed else "deny",
            reasons=["role_grant" if allowed else "subject_unbound"],
            project_version=1,
            binding_version=1,
            valid_for_ms=0,
            role="owner" if allowed else None,
        )


def code_of(error: BaseException) -> str:
    """The code of a refused call."""
    assert isinstance(error, Ql3Error)
    return error.code
