"""A real process host for each test that asks for one, and a plain client of its socket."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from services.worker.host import wire
from services.worker.host.identity import read_stat
from services.worker.launch import start_host
from tests.fixtures_nats import BusFactory

KEY = bytes(range(32))
DEADLINE_S = 60.0
PATH = "/usr/local/bin:/usr/bin:/bin"


class Client:
    """A blocking client of the host's socket that keeps everything it was told."""

    def __init__(self, directory: Path) -> None:
        fd = wire.open_directory(str(directory))
        self.socket = socket.socket(socket.AF_UNIX)
        try:
            self.socket.connect(wire.socket_address(fd))
        finally:
            os.close(fd)
        self._reader = wire.FrameReader()
        self.hello: dict[str, Any] = {}
        self.news: dict[str, list[dict[str, Any]]] = {k: [] for k in ("started", "refused", "exits", "grown", "gone")}
        self.send({"op": "hello", "protocol": wire.PROTOCOL})
        self.wait(lambda: bool(self.hello))

    def send(self, message: dict[str, Any]) -> None:
        self.socket.sendall(wire.encode(message))

    def read(self, timeout_s: float = 0.0) -> bool:
        """Take in what is there; False if nothing came in time. Raises EOFError when the host hung up."""
        if not _readable(self.socket.fileno(), timeout_s):
            return False
        chunk = self.socket.recv(1 << 20)
        if not chunk:
            raise EOFError
        for message in self._reader.feed(chunk):
            if message["op"] == "hello":
                self.hello = message
            for kind in self.news:
                self.news[kind] += message.get(kind, [])
        return True

    def wait(self, until: Callable[[], Any], timeout_s: float = DEADLINE_S) -> Any:
        """Take in news until the condition holds, and return what it gave."""
        end = time.monotonic() + timeout_s
        while not (found := until()):
            left = end - time.monotonic()
            assert left > 0, f"not within {timeout_s} s: {self.news}"
            self.read(min(left, 0.25))
        return found

    def find(self, kind: str, attempt: str) -> dict[str, Any] | None:
        return next((item for item in self.news[kind] if item["attempt"] == attempt), None)

    def started(self, attempt: str) -> dict[str, Any]:
        return self.wait(lambda: self.find("started", attempt))

    def refused(self, attempt: str) -> str:
        return self.wait(lambda: self.find("refused", attempt))["code"]

    def exit(self, attempt: str, timeout_s: float = DEADLINE_S) -> dict[str, Any]:
        """The body of the attempt's receipt."""
        import json

        return json.loads(self.wait(lambda: self.find("exits", attempt), timeout_s)["body"])

    def ack(self, *attempts: str) -> None:
        self.send({"op": "ack", "attempts": list(attempts)})

    def close(self) -> None:
        self.socket.close()


def _readable(fd: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    stat = read_stat(pid)
    return stat is not None and stat.state not in "ZX"


def wait_gone(pid: int) -> None:
    """Until a process runs no more. Blocking."""
    end = time.monotonic() + DEADLINE_S
    while alive(pid):
        assert time.monotonic() < end, f"process {pid} lives on"
        os.sched_yield()


def heard_from(path: Path) -> str:
    """What somebody writes into a FIFO, or a failure when nobody does in time."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        said = b""
        while not said.endswith(b"\n"):
            assert _readable(fd, DEADLINE_S), f"nothing came through {path.name}"
            said += os.read(fd, 4096)
        return said.decode().strip()
    finally:
        os.close(fd)


class Box:
    """One host directory, its host, and attempts to run in it."""

    def __init__(self, root: Path) -> None:
        self.directory = root / "host"
        self.logs = root / "logs"
        self.process: subprocess.Popen[bytes] | None = None
        self.clients: list[Client] = []
        self._number = 0
        self.pids: list[int] = []

    def start(self) -> Client:
        """Start a host and connect to it."""
        self.process = start_host(self.directory, self.logs)
        return self.connect()

    def connect(self) -> Client:
        client = Client(self.directory)
        self.clients.append(client)
        return client

    def item(self, *argv: str, **more: Any) -> dict[str, Any]:
        """A spawn item with an id of its own."""
        self._number += 1
        attempt = more.pop("attempt", None) or f"0190a000-0000-7000-8000-{os.getpid() % 10**6:06d}{self._number:06d}"
        env = {"PATH": PATH, "QL3_ATTEMPT_ID": attempt} | more.pop("env", {})
        return {
            "attempt": attempt,
            "argv": list(argv),
            "env": env,
            "key": KEY.hex(),
            "sequence": 2,
            "quota": 64 << 20,
            "grace_ms": 2000,
            "context": {"run": "r"},
        } | more

    def log(self, attempt: str) -> bytes | None:
        path = self.logs / f"{attempt}.log"
        return path.read_bytes() if path.exists() else None

    def kill_host(self) -> None:
        """SIGKILL, and reaped."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        for client in self.clients:
            client.close()
        if self.process is not None and self.process.poll() is None:
            try:
                client = Client(self.directory)
                rows = client.hello["attempts"]
                client.send(
                    {
                        "op": "kill",
                        "items": [{"attempt": r["attempt"], "reason": "shutdown", "grace_ms": 0} for r in rows],
                    }
                )
                client.send({"op": "retire"})
                self.process.wait(20)
                client.close()
            except (OSError, EOFError, subprocess.TimeoutExpired):
                self.process.kill()
                self.process.wait()
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    box = Box(tmp_path)
    yield box
    box.close()


@pytest.fixture
def host(box: Box) -> Client:
    return box.start()


@pytest_asyncio.fixture
async def ledger(bus_for: BusFactory) -> Any:
    """A dispatcher played by the test (`tests.worker.ledger.Ledger`)."""
    from tests.worker.ledger import Ledger

    ledger = Ledger(await bus_for("dispatcher"))
    await ledger.start()
    return ledger


@pytest_asyncio.fixture
async def worker(tmp_path: Path, bus_for: BusFactory) -> AsyncIterator[Any]:
    """A worker that is not started yet (`tests.worker.life.Worker`)."""
    from tests.worker.life import Worker

    worker = Worker(tmp_path / "data", bus_for)
    yield worker
    await worker.stop()


@pytest_asyncio.fixture
async def doomed(tmp_path: Path, nats_server: Any, ledger: Any) -> AsyncIterator[Any]:
    """A worker apart that is not started yet (`tests.worker.apart.Lone`)."""
    from tests.worker.apart import Lone

    lone = Lone(tmp_path / "data", nats_server)
    yield lone
    await lone.stop()


@pytest_asyncio.fixture
async def lone(doomed: Any) -> Any:
    """A worker in a process of its own."""
    await doomed.start()
    return doomed
