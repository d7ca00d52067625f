"""A worker apart, in a process of its own, for tests that kill it or its host."""

from __future__ import annotations

import asyncio
import collections
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from services.kit.natsserver import NatsServer
from tests.fixtures_nats import WAIT_S, WORKER
from tests.worker.conftest import wait_gone
from tests.worker.life import Worker

VICTIMS = ("worker", "host", "both")


class Lone:
    """A worker in a process of its own."""

    def __init__(self, data: Path, server: NatsServer) -> None:
        self.data = data
        self.doom: tuple[str, str] | None = None
        """Point and victim, when it is to be killed from within."""
        data.mkdir()
        self._server = server
        self._process: subprocess.Popen[bytes] | None = None
        self._life = Worker(data, None)  # type: ignore[arg-type]

    async def start(self) -> None:
        argv = [sys.executable, "-m", "tests.worker.lone", str(self.data), *(self.doom or ())]
        options = self._server.options("worker", worker=WORKER)
        self._process = await asyncio.to_thread(_run, argv, msgspec.json.encode(options))

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def host_pid(self) -> int:
        return self._life.host_pid()

    async def struck(self) -> None:
        """Until its doom has come, and what died with it is there again."""
        assert self.doom is not None
        assert self._process is not None
        if self.doom[1] == "host":
            await asyncio.to_thread(_until_struck, self.data / "struck")
        else:
            await self._reap()
            assert self._process.returncode == -signal.SIGKILL
            await self.start()

    async def settled(self) -> None:
        """Until its journal is empty."""
        await asyncio.to_thread(_until, lambda: self._life.journal() == [])

    async def kill(self, victim: str) -> None:
        """SIGKILL, and gone. What dies with it is started again, but for a host, which the worker sees to."""
        host = self._life.host_pid()
        if victim in ("worker", "both"):
            assert self._process is not None
            self._process.kill()
        if victim in ("host", "both"):
            os.kill(host, signal.SIGKILL)
        if victim in ("worker", "both"):
            await self._reap()
        if victim in ("host", "both"):
            await asyncio.to_thread(wait_gone, host)
        if victim != "host":
            await self.start()

    async def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                await asyncio.to_thread(self._process.wait, 40)
            except subprocess.TimeoutExpired:
                self._process.kill()
                await self._reap()
        self._life.end_host()

    async def _reap(self) -> None:
        assert self._process is not None
        await asyncio.to_thread(self._process.wait)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def _run(argv: list[str], first_line: bytes) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(first_line + b"\n")
    process.stdin.flush()
    # The other lines are its log.
    next((line for line in process.stdout if line == b"ready\n"), b"")
    # Nobody reads them from here on, and it must not wait for a reader.
    threading.Thread(target=process.stdout.read, daemon=True).start()
    return process


def _until(so: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not so():
        assert time.monotonic() < end, "it did not come to be in time"
        os.sched_yield()


def _until_struck(path: Path) -> None:
    _until(lambda: path.exists() and path.read_text().endswith("\n"))
    wait_gone(int(path.read_text()))


def marking(lone: Lone, rest: str) -> tuple[str, ...]:
    """A command that notes, once, that it was started."""
    return ("sh", "-c", f'echo "$QL3_ATTEMPT_ID" >> {lone.data}/starts; {rest}')


def starts(lone: Lone) -> collections.Counter[str]:
    path = lone.data / "starts"
    return collections.Counter(path.read_text().split() if path.exists() else [])
