"""Asks approval what an actor may do. An answer is kept for as long as it says, at most two seconds.

Whoever cannot be asked denies: there is no road around an authority that is away.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Final

import msgspec
import structlog

from schemas.endpoints import POLICY_CHECK
from schemas.errors import Ql3Error
from schemas.identity import Actor, PolicyChanged, PolicyCheck, PolicyDecision
from schemas.limits import DECISION_VALID_MS
from services.kit.bus import Bus, Delivery, Subscription
from services.kit.clock import Clock, WallClock

ENTRIES: Final = 4096

log: structlog.stdlib.BoundLogger = structlog.get_logger("ql3.policy")

_Key = tuple[str, bytes]


START: Final = "run.start"


def startable(decision: PolicyDecision, project: str) -> PolicyDecision:
    """A decision about starting runs, when it lets one be made, be it one that waits; raises as `may_start`."""
    if decision.effect == "allow" or (decision.effect == "require_approval" and decision.reasons == ["project_rule"]):
        return decision
    code = "approval_required" if decision.effect == "require_approval" else "forbidden"
    raise Ql3Error(code, data={"permission": START, "project": project, "reasons": decision.reasons[:8]})


class PolicyClient:
    """Decisions of approval, kept briefly and dropped on `ql3.evt.policy.>`.

    `monotonic` tells seconds; tests hand in their own.
    """

    def __init__(
        self, bus: Bus, *, clock: Clock | None = None, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._bus = bus
        self._clock = clock or WallClock()
        self._monotonic = monotonic
        self._kept: OrderedDict[_Key, tuple[PolicyDecision, float]] = OrderedDict()
        self._asking: dict[_Key, asyncio.Task[PolicyDecision]] = {}
        self._epoch = 0
        self._subscription: Subscription | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Hear of changes; `check` does so by itself when it is first called."""
        async with self._starting:
            if self._subscription is None:
                self._subscription = await self._bus.on_event("ql3.evt.policy.>", self._changed)

    async def require(
        self, actor: Actor, project: str, permission: str, *, labels: Mapping[str, str] | None = None
    ) -> PolicyDecision:
        """The decision that allows it, for the audit row. Raises `forbidden`, `approval_required` or `unavailable`."""
        decision = await self.check(actor, project, permission, labels=labels)
        if decision.effect == "allow":
            return decision
        code = "approval_required" if decision.effect == "require_approval" else "forbidden"
        raise Ql3Error(code, data={"permission": permission, "project": project, "reasons": decision.reasons[:8]})

    async def may_start(self, actor: Actor, project: str, labels: Mapping[str, str]) -> PolicyDecision:
        """About a run of a task with these labels: `allow`, or `require_approval` when a rule of the project holds it.

        Raises `forbidden`, `unavailable`, or `approval_required` for who may not even make a run that waits.
        """
        return startable(await self.check(actor, project, START, labels=labels), project)

    async def check(
        self, actor: Actor, project: str, permission: str, *, labels: Mapping[str, str] | None = None
    ) -> PolicyDecision:
        """The decision, whatever it is; for callers to whom `require_approval` is an answer. Raises `unavailable`."""
        if self._subscription is None:
            await self.start()
        question = PolicyCheck(project=project, actor=actor, permission=permission, labels=dict(labels or {}))
        key = (project, msgspec.json.encode(question, order="deterministic"))
        kept = self._kept.get(key)
        if kept is not None:
            decision, until = kept
            if self._monotonic() < until and self._clock.now_ms() < actor.expires_at_ms:
                return decision
            del self._kept[key]
        task = self._asking.get(key)
        if task is None:
            task = self._asking[key] = asyncio.create_task(self._ask(key, question))
            task.add_done_callback(lambda done: self._asked(key, done))
        # Shielded: one impatient caller must not take the answer from the others.
        return await asyncio.shield(task)

    async def _ask(self, key: _Key, question: PolicyCheck) -> PolicyDecision:
        epoch, asked_at = self._epoch, self._monotonic()
        decision = await self._bus.request(POLICY_CHECK, question)
        # Counted from the question: the answer is as old as the moment at which it was given, at the latest. What was
        # asked before a change may be older than the change and is not kept.
        valid_ms = min(decision.valid_for_ms, DECISION_VALID_MS)
        if epoch == self._epoch and valid_ms > 0:
            self._kept[key] = (decision, asked_at + valid_ms / 1000)
            while len(self._kept) > ENTRIES:
                self._kept.popitem(last=False)
        return decision

    def _asked(self, key: _Key, task: asyncio.Task[PolicyDecision]) -> None:
        if self._asking.get(key) is task:
            del self._asking[key]
        if not task.cancelled():
            task.exception()  # seen here too, in case that nobody waits any more

    async def _changed(self, delivery: Delivery) -> None:
        try:
            project = delivery.decode(PolicyChanged).project
        except Ql3Error:
            project = None  # of a newer version: drop everything
        self._epoch += 1
        # Whoever asks from now on must not join a question from before the change.
        if project is None:
            self._kept.clear()
            self._asking.clear()
            return
        for kept in [key for key in self._kept if key[0] == project]:
            del self._kept[kept]
        for asking in [key for key in self._asking if key[0] == project]:
            del self._asking[asking]
