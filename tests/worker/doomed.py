"""Points of an attempt's life at which a worker or a process host is killed, once, right there.

The standard library alone: the process host has nothing else. A crash at a point comes right after the step of that
name, unless the name says that the step is only about to be done.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any

WORKER_POINTS = (
    "offer journaled",
    "about to ask at the barrier",
    "barrier answered",
    "inputs written",
    "handed to the host",
    "start heard",
    "stop sent",
    "end heard",
    "end reported",
    "end acknowledged",
    "journal row gone",
    "host told to forget",
)
HOST_POINTS = (
    "about to start",
    "process exists",
    "process reaped",
    "about to write the receipt",
    "receipt written",
    "receipt acknowledged",
)


class Doom:
    """Kills `victim` (worker, host or both) of the data folder `data` when its point is reached the first time."""

    def __init__(self, point: str, victim: str, data: str) -> None:
        self.point = point
        self._victim = victim
        self._data = data
        self._worker = 0

    def strike(self) -> None:
        """Here and now; what is to die with this process dies before it."""
        try:
            struck = os.open(f"{self._data}/struck", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return
        with open(f"{self._data}/worker/host/host.lock") as lock:
            host = int(lock.read())
        os.write(struck, b"%d\n" % host)
        os.close(struck)
        here = os.getpid()
        doomed = [host] if self._victim != "worker" else []
        if self._victim != "host":
            doomed.append(self._worker or here)
        for pid in sorted(doomed, key=lambda pid: pid == here):
            os.kill(pid, signal.SIGKILL)
            while _alive(pid):
                os.sched_yield()

    def after(self, owner: Any, name: str, when: Callable[..., bool] = lambda *_: True) -> None:
        """Strike after each call of a function; `when` looks at its arguments."""
        original = getattr(owner, name)

        def doomed(*args: Any, **more: Any) -> Any:
            done = original(*args, **more)
            if when(*args):
                self.strike()
            return done

        setattr(owner, name, doomed)

    def before(self, owner: Any, name: str, when: Callable[..., bool] = lambda *_: True) -> None:
        """Strike before a call."""
        original = getattr(owner, name)

        def doomed(*args: Any, **more: Any) -> Any:
            if when(*args):
                self.strike()
            return original(*args, **more)

        setattr(owner, name, doomed)

    def after_awaiting(self, owner: Any, name: str, when: Callable[..., bool] = lambda *_: True) -> None:
        """Strike after a coroutine function has come to its end."""
        original = getattr(owner, name)

        async def doomed(*args: Any, **more: Any) -> Any:
            done = await original(*args, **more)
            if when(*args):
                self.strike()
            return done

        setattr(owner, name, doomed)

    def arm_host(self) -> None:
        """In the host's process, before it begins."""
        from services.worker.host.loop import Host
        from services.worker.host.receipts import Receipts
        from services.worker.host.spawn import Spawner

        self._worker = os.getppid()
        {
            "about to start": lambda: self.before(Host, "_start"),
            "process exists": lambda: self.after(Spawner, "start"),
            "process reaped": lambda: self.before(Host, "_settle", _some_ended),
            "about to write the receipt": lambda: self.before(Receipts, "append"),
            "receipt written": lambda: self.after(Receipts, "append"),
            "receipt acknowledged": lambda: self.after(Host, "acknowledge"),
        }[self.point]()

    def arm_worker(self, service: Any) -> None:
        """In the worker's process, before it starts."""
        holdings, intake, host = service.holdings, service.intake, service.holdings.host
        ending = lambda _fence, reports: any(report.sequence == 2 for report in reports)  # noqa: E731
        forgetting = lambda message: message["op"] == "ack"  # noqa: E731
        {
            "offer journaled": lambda: self.after_awaiting(intake, "take"),
            "about to ask at the barrier": lambda: self.before(intake, "_ask"),
            "barrier answered": lambda: self.after_awaiting(intake, "_ask"),
            "inputs written": lambda: self.after_awaiting(intake, "_extras"),
            "handed to the host": lambda: self.after(holdings, "spawn"),
            "start heard": lambda: self.after(holdings.reports, "started"),
            "stop sent": lambda: self.after(holdings, "kill", bool),
            "end heard": lambda: self.after(holdings, "_ended"),
            "end reported": lambda: self.after_awaiting(holdings.reports, "_send", ending),
            "end acknowledged": lambda: self.after(holdings, "forget"),
            "journal row gone": lambda: self.before(host, "send", forgetting),
            "host told to forget": lambda: self.after(host, "send", forgetting),
        }[self.point]()


def _some_ended(host: Any) -> bool:
    return any(attempt.status is not None for attempt in host.attempts.values())


def _alive(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] not in "ZX"
    return False
