"""Which projects are active, as far as is known now. An archived project starts nothing."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from schemas.identity import Actor, PolicyDecision
from schemas.limits import DECISION_VALID_MS

ACTOR_ID: Final = "scheduler"

Ask = Callable[[str], Awaitable[PolicyDecision]]
"""May the scheduler start runs in this project?"""


def scheduler_actor(now_ms: int) -> Actor:
    """The scheduler itself, on behalf of what people have set up."""
    return Actor(
        type="system",
        id=ACTOR_ID,
        authentication_id=ACTOR_ID,
        assurance="service",
        authenticated_at_ms=now_ms,
        expires_at_ms=now_ms + 10 * 366 * 86_400_000,
    )


class Projects:
    """Answers of policy, kept as long as they are valid, so that no question is asked inside a transaction."""

    def __init__(self, ask: Ask, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._ask = ask
        self._monotonic = monotonic
        self._known: dict[str, tuple[bool, float]] = {}

    def active(self, project: str) -> bool | None:
        """None: not known, ask first."""
        known = self._known.get(project)
        if known is None or self._monotonic() >= known[1]:
            return None
        return known[0]

    async def learn(self, projects: Iterable[str]) -> None:
        """Ask about these. Raises `unavailable`: who cannot be asked denies."""
        for project in projects:
            asked_at = self._monotonic()
            decision = await self._ask(project)
            self._known[project] = (decision.effect == "allow", asked_at + DECISION_VALID_MS / 1000)

    def forget(self, project: str | None) -> None:
        """Something changed about a project, or about all."""
        if project is None:
            self._known.clear()
        else:
            self._known.pop(project, None)
