"""The worker's session with the dispatcher: registration, heartbeats, and what their answers ask for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import structlog

from schemas.errors import Ql3Error
from schemas.limits import BEAT_MS
from schemas.workers import (
    Capabilities,
    SessionFence,
    StopItem,
    WorkerBeat,
    WorkerBeaten,
    WorkerRegister,
    WorkerRegistered,
)
from services.kit.ids import new_id
from services.kit.loops import Loop
from services.kit.sealing import SealingKey
from services.worker.holdings import Holdings, Kill

log: structlog.stdlib.BoundLogger = structlog.get_logger("ql3.worker")

NOT_KNOWN: Final = frozenset({"not_found"})


class Session:
    """One session. `slots` says how many attempts may be held now, `ready` runs after each registration.

    `key` is what secrets of this session are sealed to.
    """

    def __init__(
        self,
        *,
        worker: str,
        slots: Callable[[], int],
        holdings: Callable[[], Holdings],
        register: Callable[[WorkerRegister], Awaitable[WorkerRegistered]],
        beat: Callable[[WorkerBeat], Awaitable[WorkerBeaten]],
        ready: Callable[[], Awaitable[None]],
    ) -> None:
        self.worker = worker
        self.fence: SessionFence | None = None
        self.key = SealingKey.generate()
        self.capabilities = Capabilities()
        self.draining = False
        self.replaced = False
        self._id = new_id()
        self._slots = slots
        self._holdings = holdings
        self._ask_register = register
        self._ask_beat = beat
        self._ready = ready
        self.loop = Loop("worker.session", self.step, every_s=BEAT_MS / 1000)

    def health(self) -> list[str]:
        """Why nothing can be offered to this session."""
        if self.replaced:
            return ["a newer session of this worker exists"]
        return [] if self.fence is not None else ["not registered with the dispatcher"]

    async def step(self) -> bool | float | None:
        """Register, or beat."""
        if self.replaced:
            return None
        if self.fence is None:
            await self._register()
            return None
        message = WorkerBeat(
            fence=self.fence, draining=self.draining, slots=self._slots(), attempts=self._holdings().beats()
        )
        try:
            answer = await self._ask_beat(message)
        except Ql3Error as error:
            if error.code == "session_replaced":
                self._lose()
                return None
            if error.code in NOT_KNOWN:
                self.fence = None
                return True
            raise
        wanted: list[Kill] = [(refusal.attempt_id, "reconcile", None) for refusal in answer.refused]
        self._holdings().kill(wanted)
        self.stop_runs(answer.stops)
        return None

    def stop_runs(self, stops: Sequence[StopItem]) -> None:
        """End what the dispatcher wants ended; an order about an older lease is about somebody else."""
        held = self._holdings().held
        wanted: list[Kill] = [
            (stop.attempt_id, stop.reason, stop.grace_ms)
            for stop in stops
            if stop.attempt_id in held and held[stop.attempt_id].lease_generation == stop.lease_generation
        ]
        self._holdings().kill(wanted)

    async def _register(self) -> None:
        holdings = self._holdings()
        message = WorkerRegister(
            worker=self.worker,
            session_id=self._id,
            slots=self._slots(),
            capabilities=self.capabilities,
            public_key=self.key.public,
            journal=holdings.journal(),
            draining=self.draining,
        )
        answer = await self._ask_register(message)
        self.fence = SessionFence(worker=self.worker, session_id=self._id, generation=answer.generation)
        log.info("registered", worker=self.worker, generation=answer.generation, adopted=len(answer.adopted))
        holdings.registered(answer.released, answer.refused)
        await self._ready()

    def _lose(self) -> None:
        # Somebody with our id registered elsewhere. Our leases are theirs to judge; our processes must not run on.
        log.error("a newer session of this worker exists; this one ends its runs and takes no more")
        self.replaced = True
        self.fence = None
        self._holdings().kill_all("reconcile")
