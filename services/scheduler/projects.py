"""What policy says of starting runs, as far as is known now. An archived project starts nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final

from schemas.identity import Actor, PolicyDecision
from schemas.limits import DECISION_VALID_MS

ACTOR_ID: Final = "scheduler"
KEPT: Final = 4_096
TOGETHER: Final = 16
"""Questions at a time: hundreds of projects are known before the first of their answers is too old."""

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
        self._changed: dict[str, int] = {}
        self._all_changed = 0

    def decision(self, about: Asked) -> PolicyDecision | None:
        """`require_approval` for runs that have to wait for one. None: not known, ask first."""
        known = self._known.get(about)
        if known is None or self._monotonic() >= known[1]:
            return None
        return known[0]

    async def learn(self, wanted: Iterable[Asked]) -> dict[Asked, PolicyDecision]:
        """Ask about these, and answer what was said: what is kept of it may be gone at the next look.

        Raises `unavailable`: who cannot be asked denies.
        """
        questions = list(wanted)
        said: dict[Asked, PolicyDecision] = {}
        for start in range(0, len(questions), TOGETHER):
            part = questions[start : start + TOGETHER]
            answers = await asyncio.gather(*(self._learn(about) for about in part), return_exceptions=True)
            for about, answer in zip(part, answers, strict=True):
                if isinstance(answer, BaseException):
                    raise answer
                said[about] = answer
        return said

    async def _learn(self, about: Asked) -> PolicyDecision:
        asked_at, changes = self._monotonic(), self.changes(about[0])
        decision = await self._ask(about[0], dict(about[1]))
        # What was asked before a change may be older than the change.
        if self.changes(about[0]) == changes:
            if len(self._known) >= KEPT:
                self._known.clear()
            self._known[about] = (decision, asked_at + DECISION_VALID_MS / 1000)
        return decision

    def changes(self, project: str) -> tuple[int, int]:
        """Differs from what it was as soon as something changed about the project."""
        return self._all_changed, self._changed.get(project, 0)

    def forget(self, project: str | None) -> None:
        """Something changed about a project, or about all."""
        if project is None:
            self._known, self._changed = {}, {}
            self._all_changed += 1
            return
        self._known = {key: kept for key, kept in self._known.items() if key[0] != project}
        if len(self._changed) >= KEPT:
            self._changed = {}
            self._all_changed += 1
        self._changed[project] = self._changed.get(project, 0) + 1


def asked(project: str, labels: Mapping[str, str] | None = None) -> Asked:
    """The question about runs of a task with these labels."""
    return project, tuple(sorted((labels or {}).items()))
