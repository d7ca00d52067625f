"""Making ends durable, beside the loop: a slow disk must stop neither pumps nor spawns.

One thread owns the receipt files. While it syncs, the next ends gather, and one sync serves them all.
"""

from __future__ import annotations

import _thread
import contextlib
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from services.worker.host.receipts import Receipt, Receipts, make

if TYPE_CHECKING:
    from services.worker.host.pump import Pump

MAX_GROUP = 256
RETRY_S = 0.5


class End(NamedTuple):
    """What is known of an ended attempt before its log is durable. `facts["log"]` is completed here."""

    attempt: str
    sequence: int
    key: bytes
    facts: dict[str, Any]
    context: dict[str, Any]
    pump: Pump


class Syncer:
    """Takes ends and acknowledgements in order, hands receipts back through `done`, and rings."""

    def __init__(self, receipts: Receipts, sync_logs: Callable[[], None], ring: Callable[[], None]) -> None:
        self.done: deque[Receipt] = deque()
        """Receipts that are durable, for the loop to take."""
        self.outstanding = 0
        """Ends given but not yet taken back. Kept by the loop's thread."""
        self._receipts = receipts
        self._sync_logs = sync_logs
        self._ring = ring
        self._jobs: deque[End | tuple[str, list[str]]] = deque()
        self._work = _thread.allocate_lock()
        self._work.acquire()
        self._ended = _thread.allocate_lock()
        self._ended.acquire()
        self._stopping = False
        self.problem: str | None = None
        _thread.start_new_thread(self._run, ())

    def give(self, job: End | tuple[str, list[str]]) -> None:
        """An end, or `("ack" | "quarantine", attempts)`."""
        self._jobs.append(job)
        if isinstance(job, End):
            self.outstanding += 1
        self._wake()

    def stop(self) -> None:
        """Finish what was given, close the files and end the thread."""
        self._stopping = True
        self._wake()
        self._ended.acquire()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # already awake
            self._work.release()

    def _run(self) -> None:
        import time

        try:
            while True:
                self._work.acquire()
                stopping = self._stopping
                while self._jobs:
                    self._step(time.sleep)
                if stopping:
                    self._receipts.close()
                    return
        finally:
            self._ended.release()

    def _step(self, pause: Callable[[float], None]) -> None:
        ends: list[End] = []
        others: list[tuple[str, list[str]]] = []
        while self._jobs and len(ends) < MAX_GROUP:
            job = self._jobs.popleft()
            if isinstance(job, End):
                ends.append(job)
            else:
                others.append(job)
        receipts = self._durable_logs(ends) if ends else []
        while receipts:
            try:
                self._receipts.append(receipts)
                self.problem = None
                break
            except OSError as error:
                # A full disk may get room again; an end that is not durable is not told.
                self.problem = f"receipts: {error.strerror}"
                self._ring()
                pause(RETRY_S)
        self.done.extend(receipts)
        if receipts:
            self._ring()
        for what, attempts in others:
            if what == "ack":
                self._receipts.acknowledge(attempts)
            else:
                for attempt in attempts:
                    self._receipts.set_aside(attempt)

    def _durable_logs(self, ends: list[End]) -> list[Receipt]:
        named = False
        if len(ends) > 1:
            for end in ends:
                # Have all of them written at once; the syncs one by one then find little left to do.
                end.pump.begin_sync()
        for end in ends:
            log = end.facts["log"]
            try:
                end.pump.sync()
                named = named or end.pump.file >= 0
            except OSError:
                log["truncated"] = True
                log["cut"] = log["cut"] or "io_error"
            end.pump.close()
        if named:
            try:
                self._sync_logs()
            except OSError as error:
                self.problem = f"logs: {error.strerror}"
        return [make(end.attempt, end.sequence, end.facts, end.context, end.key) for end in ends]
