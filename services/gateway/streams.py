"""Answers that stay open (server-sent events): a run's changes, and a project's facts.

A fact is a bell: what is shown of a run is its row, read again, because facts may be lost. While an answer is open its
caller is authenticated again and again, so that it ends when the session or the role does: `while_admitted`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Final, TypeVar

import msgspec
from litestar.response import Stream

from schemas import endpoints
from schemas.errors import Ql3Error
from schemas.runs import RUN_TERMINAL, Run, RunRead
from services.gateway.calls import Call
from services.gateway.front import OPEN, PLACE
from services.gateway.problem import problem_of
from services.kit.bus import Delivery
from services.kit.clock import monotonic_ms

QUIET_S: Final = 10.0
"""After this long without news: a comment (so that a dead connection shows), and the row again."""
RECHECK_S: Final = 2.0
"""How long whoever was let in may look on without being asked for again."""
OWN_STREAMS: Final = 8
"""So many open answers everybody may have, and a quarter of all where that is more."""
AWAY_S: Final = 1.0
"""How soon to ask again an authority that does not answer."""
WAITING: Final = 512
FACTS: Final = {
    "run": "run.read",
    "task": "task.read",
    "trigger": "trigger.read",
    "approval": "approval.read",
    "artifact": "artifact.read",
}
"""Kinds of facts that a project's stream carries, and what one must be allowed to read for each."""
QUIET: Final = b": quiet\n\n"
T = TypeVar("T")
_PASSING: Final = ("unavailable", "database_unavailable", "capacity")


def frame(event: str, data: Any, *, mark: str | int | None = None) -> bytes:
    """One event; `mark` is what a browser sends back as `Last-Event-ID` when it connects again."""
    body = data if isinstance(data, bytes) else msgspec.json.encode(data)
    told = b"" if mark is None else f"id: {mark}\n".encode()
    return b"event: " + event.encode() + b"\n" + told + b"data: " + body + b"\n\n"


def open_answer(call: Call[Any], events: AsyncGenerator[bytes], check: Callable[[], Awaitable[object]]) -> Stream:
    """The response of an open answer, for as long as `check` lets its caller look. Raises `capacity` when there are too
    many already, of everybody or of this caller."""
    desk, places = call.desk, call.desk.settings.streams
    who = f"{call.actor.type}/{call.actor.id}"
    if desk.open_streams.total() >= places:
        raise Ql3Error("capacity", "Too many people are following.")
    if desk.open_streams[who] >= max(OWN_STREAMS, places // 4):
        raise Ql3Error("capacity", "You are following too much at once; close some of it.")
    state = call.request.scope["state"]
    state[PLACE].give_back()

    async def counted() -> AsyncGenerator[bytes]:
        desk.open_streams[who] += 1
        try:
            async with contextlib.aclosing(while_admitted(call, check, events)) as admitted:
                yield b"retry: 2000\n\n"
                async for event in admitted:
                    yield event
        except Ql3Error as error:
            yield frame("error", problem_of(error))
        finally:
            desk.open_streams -= Counter((who,))

    answer = counted()
    state[OPEN] = answer
    return Stream(answer, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


async def woken(call: Call[Any], *bells: asyncio.Event, quiet_s: float | None = None) -> bool:
    """Waits for one of the bells; False after `quiet_s` seconds (10 by default) without, or when the gateway stops."""
    waits = [asyncio.ensure_future(bell.wait()) for bell in (*bells, call.desk.stopping)]
    try:
        done, _ = await asyncio.wait(
            waits, timeout=QUIET_S if quiet_s is None else quiet_s, return_when=asyncio.FIRST_COMPLETED
        )
        return bool(done) and not call.desk.stopping.is_set()
    finally:
        for wait in waits:
            wait.cancel()


async def while_admitted(
    call: Call[Any], check: Callable[[], Awaitable[object]], events: AsyncGenerator[bytes]
) -> AsyncGenerator[bytes]:
    """`events`, while the caller may look: it is authenticated and `check` asked again every 2 s, and at once when
    somebody was shut out. While nobody can be asked, nothing is shown. Raises what ends the answer."""
    due_ms = monotonic_ms() + RECHECK_S * 1000
    shut_out = asyncio.ensure_future(call.desk.authenticator.changed.wait())
    step = asyncio.ensure_future(anext(events, None))
    try:
        while True:
            left_s = max(0.0, (due_ms - monotonic_ms()) / 1000)
            await asyncio.wait((step, shut_out), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if shut_out.done() or monotonic_ms() >= due_ms:
                shut_out.cancel()
                shut_out = asyncio.ensure_future(call.desk.authenticator.changed.wait())
                await patiently(call, lambda: _readmit(call, check))
                due_ms = monotonic_ms() + RECHECK_S * 1000
            if step.done():
                event = step.result()
                if event is None:
                    return
                yield event
                step = asyncio.ensure_future(anext(events, None))
    finally:
        shut_out.cancel()
        if not step.done():
            # It lets go of what it has by itself, also when this wait is cancelled.
            step.cancel()
            await asyncio.wait((step,))
        await events.aclose()


async def _readmit(call: Call[Any], check: Callable[[], Awaitable[object]]) -> None:
    await call.renew()
    await check()


async def patiently(call: Call[Any], ask: Callable[[], Awaitable[T]]) -> T:
    """Asks until somebody answers. Raises what is no passing failure, and each once the gateway stops."""
    while True:
        try:
            return await ask()
        except Ql3Error as error:
            if error.code not in _PASSING or call.desk.stopping.is_set():
                raise
        await woken(call, quiet_s=AWAY_S)


async def allowed_run(call: Call[Any]) -> None:
    """Raises `forbidden` for who may not read runs any more."""
    await call.desk.policy.require(call.actor, call.project, FACTS["run"])


async def follow_run(call: Call[Any], run_id: str, first: Run) -> AsyncGenerator[bytes]:
    """`run` with each new state of the run, and `end` after the last one."""
    bell = asyncio.Event()

    async def heard(_: Delivery) -> None:
        bell.set()

    async def read() -> Run:
        return (await call.ask(endpoints.RUNS_GET, RunRead(actor=call.actor, project=call.project, run=run_id))).run

    subscription = await call.desk.bus.on_event(f"ql3.evt.run.{call.project}.{run_id}.*", heard)
    try:
        await call.desk.bus.flush()
        # The row is read again behind the subscription: what changed in between was not heard.
        run, shown = first, first.version
        yield frame("run", run, mark=shown)
        while run.status not in RUN_TERMINAL and not call.desk.stopping.is_set():
            bell.clear()
            run = await patiently(call, read)
            if run.version > shown:
                shown = run.version
                yield frame("run", run, mark=shown)
            elif not await woken(call, bell):
                yield QUIET
        if run.status in RUN_TERMINAL:
            yield frame("end", {"status": run.status})
    finally:
        await call.desk.let_go(subscription)


class Facts:
    """What was heard and is not sent yet; when it is too much, the listener is told to read everything again."""

    def __init__(self, allowed: frozenset[str]) -> None:
        self.allowed = allowed
        self.bell = asyncio.Event()
        self._waiting: list[tuple[str, bytes]] = []
        self.lost = False

    async def heard(self, delivery: Delivery) -> None:
        """A fact of the project."""
        kind = delivery.subject.split(".")[2]
        if kind in FACTS and b"\n" not in delivery.payload:
            if len(self._waiting) >= WAITING:
                self._waiting.clear()
                self.lost = True
            self._waiting.append((kind, delivery.payload))
            self.bell.set()

    def take(self) -> tuple[list[tuple[str, bytes]], bool]:
        """What waits, and whether something was lost."""
        self.bell.clear()
        waiting, self._waiting = self._waiting, []
        lost, self.lost = self.lost, False
        return waiting, lost

    async def ask_again(self, call: Call[Any]) -> None:
        """What the caller may see from now on. Raises `forbidden` when that is nothing."""
        self.allowed = await allowed_kinds(call)


async def allowed_kinds(call: Call[Any]) -> frozenset[str]:
    """Which facts the caller may see now. Raises `forbidden` when there are none."""
    kinds: set[str] = set()
    refusal: Ql3Error | None = None
    for kind, permission in FACTS.items():
        try:
            await call.desk.policy.require(call.actor, call.project, permission)
            kinds.add(kind)
        except Ql3Error as error:
            if error.code in _PASSING:
                raise
            refusal = error
    if not kinds and refusal is not None:
        raise refusal
    return frozenset(kinds)


async def project_facts(call: Call[Any], facts: Facts) -> AsyncGenerator[bytes]:
    """Each fact under the name of its kind; `reset` when some may have been missed and lists should be read again."""
    subscription = await call.desk.bus.on_event(f"ql3.evt.*.{call.project}.>", facts.heard)
    client, dropped = subscription.client, subscription.dropped
    try:
        # "ready" is a promise: what happens from here on is heard.
        await call.desk.bus.flush()
        yield frame("ready", {"kinds": sorted(facts.allowed)})
        while not call.desk.stopping.is_set():
            await woken(call, facts.bell)
            waiting, lost = facts.take()
            if lost or subscription.client is not client or subscription.dropped != dropped:
                client, dropped = subscription.client, subscription.dropped
                yield frame("reset", {})
                continue
            if not waiting:
                yield QUIET
            for kind, payload in waiting:
                if kind in facts.allowed:
                    yield frame(kind, payload)
    finally:
        await call.desk.let_go(subscription)
