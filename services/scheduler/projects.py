"""Which projects are active, as far as is known now. An archived project starts nothing."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final

from schemas.identity import Actor, PolicyDecision
from schemas.limits import DECISION_VALID_MS

ACTOR_ID: Final = "scheduler"
KEPT: Final = 4_096

Ask = Callable[[str, Mapping[str, str]], Awaitable[PolicyDecision]]
"""May the scheduler start runs in this project, of a task with these labels?"""
Asked = tuple[str, tuple[tuple[str, str], ...]]
"""A project and sorted labels."""


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
        self._known: dict[Asked, tuple[PolicyDecision, float]] = {}

    def active(self, project: str) -> bool | None:
        """Whether its schedules run. None: not known, ask first."""
        decision = self.decision(asked(project))
        return None if decision is None else decision.effect != "deny"

    def decision(self, about: Asked) -> PolicyDecision | None:
        """`require_approval` for runs that have to wait for one. None: not known, ask first."""
        known = self._known.get(about)
        if known is None or self._monotonic() >= known[1]:
            return None
        return known[0]

    async def learn(self, wanted: Iterable[Asked]) -> None:
        """Ask about these. Raises `unavailable`: who cannot be asked denies."""
        for about in wanted:
            asked_at = self._monotonic()
            decision = await self._ask(about[0], dict(about[1]))
            if len(self._known) >= KEPT:
                self._known.clear()
            self._known[about] = (decision, asked_at + DECISION_VALID_MS / 1000)

    def forget(self, project: str | None) -> None:
        """Something changed about a project, or about all."""
        self._known = {} if project is None else {key: kept for key, kept in self._known.items() if key[0] != project}


def asked(project: str, labels: Mapping[str, str] | None = None) -> Asked:
    """The question about runs of a task with these labels."""
    return project, tuple(sorted((labels or {}).items()))
