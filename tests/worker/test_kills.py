"""SIGKILL of the worker, of the process host, of both, at each point of an attempt's life.

Every case has to end truthfully, and nothing may be started twice.
"""

from __future__ import annotations

import asyncio
import collections
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from services.kit.natsserver import NatsServer
from tests.fixtures_nats import WORKER
from tests.worker.conftest import alive, wait_gone
from tests.worker.ledger import Ledger
from tests.worker.life import Worker

VICTIMS = ("worker", "host", "both")


class Lone:
    """A worker in a process of its own."""

    def __init__(self, data: Path, server: NatsServer) -> None:
        self.data = data
        data.mkdir()
        self._server = server
        self._process: subprocess.Popen[bytes] | None = None
        self._life = Worker(data, None)  # type: ignore[arg-type]

    async def start(self) -> None:
        argv = [sys.executable, "-m", "tests.worker.lone", str(self.data)]
        options = self._server.options("worker", worker=WORKER)
        self._process = await asyncio.to_thread(_run, argv, msgspec.json.encode(options))

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def host_pid(self) -> int:
        return self._life.host_pid()

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
    next(line for line in process.stdout if line == b"ready\n")
    return process


@pytest_asyncio.fixture
async def lone(tmp_path: Path, nats_server: NatsServer, ledger: Ledger) -> AsyncIterator[Lone]:
    lone = Lone(tmp_path / "data", nats_server)
    await lone.start()
    yield lone
    await lone.stop()


def marking(lone: Lone, rest: str) -> tuple[str, ...]:
    """A command that notes, once, that it was started."""
    return ("sh", "-c", f'echo "$QL3_ATTEMPT_ID" >> {lone.data}/starts; {rest}')


def starts(lone: Lone) -> collections.Counter[str]:
    path = lone.data / "starts"
    return collections.Counter(path.read_text().split() if path.exists() else [])


def rss_kib(pid: int) -> int:
    rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(rows["VmRSS"].split()[0])


async def test_worker_and_host_stay_small_with_200_attempts(lone: Lone, ledger: Ledger) -> None:
    attempts = await ledger.offer_many([("sh", "-c", "echo hello; exec sleep 1000")] * 200)
    for attempt in attempts:
        await ledger.running(attempt)
    assert lone.pid is not None
    assert rss_kib(lone.pid) + rss_kib(lone.host_pid()) < 120 * 1024


@pytest.mark.parametrize("victim", VICTIMS)
async def test_before_the_barrier_is_passed(lone: Lone, ledger: Ledger, victim: str) -> None:
    ledger.granting = False
    attempt = await ledger.offer(*marking(lone, "exit 3"))
    await ledger.until(lambda: attempt in ledger.starts)
    await lone.kill(victim)
    ledger.granting = True
    body = await ledger.end(attempt)
    if victim == "host":
        # The worker lives and was not granted anything: with the next host it goes on.
        assert (body.kind, body.exit_code, starts(lone)[attempt]) == ("ended", 3, 1)
    else:
        assert body.kind == ("not_started" if victim == "worker" else "vanished")
        assert starts(lone)[attempt] == 0


@pytest.mark.parametrize("victim", VICTIMS)
async def test_while_it_runs(lone: Lone, ledger: Ledger, victim: str) -> None:
    gate = lone.data / "gate"
    os.mkfifo(gate)
    attempt = await ledger.offer(*marking(lone, f"echo before; cat {gate}; echo after; exit 3"))
    pid = (await ledger.running(attempt)).pid
    assert pid is not None
    await lone.kill(victim)
    if victim == "worker":
        gate.write_bytes(b"between\n")
        body = await ledger.end(attempt)
        assert (body.kind, body.exit_code) == ("ended", 3)
        assert body.log is not None
        assert body.log.size == len("before\nbetween\nafter\n")
    else:
        body = await ledger.end(attempt)
        assert (body.kind, body.exit_code) == ("vanished", None)
        # What was written until then is kept, and said to be cut.
        assert body.log is not None
        assert (body.log.size, body.log.truncated) == (len("before\n"), True)
        assert not alive(pid)
    assert starts(lone)[attempt] == 1


@pytest.mark.parametrize("victim", VICTIMS)
async def test_after_its_end_before_anybody_heard_of_it(lone: Lone, ledger: Ledger, victim: str) -> None:
    ledger.acking = False
    ended, refused = await ledger.offer_many([marking(lone, "echo hello; exit 3"), ("no-such-program",)])
    await ledger.end(ended)
    await ledger.end(refused)
    ledger.forget()
    await lone.kill(victim)
    ledger.acking = True
    body = await ledger.end(ended)
    assert (body.kind, body.exit_code) == ("ended", 3)
    assert body.log is not None
    assert body.log.size == len("hello\n")
    assert (await ledger.end(refused)).error_code == "command_not_found"
    assert starts(lone)[ended] == 1


@pytest.mark.parametrize("victim", VICTIMS)
async def test_in_the_middle_of_many(lone: Lone, ledger: Ledger, victim: str) -> None:
    quick = [marking(lone, f"exit {n % 7}") for n in range(20)]
    slow = [marking(lone, "exec sleep 1000")] * 4
    attempts = await ledger.offer_many(quick + slow)
    await ledger.reports.count(3)
    await lone.kill(victim)
    for n, attempt in enumerate(attempts[:20]):
        body: Any = await ledger.end(attempt)
        assert body.kind in ("ended", "vanished", "not_started")
        started = starts(lone)[attempt]
        if body.kind == "ended":
            assert (body.exit_code, started) == (n % 7, 1)
        elif body.kind == "not_started":
            assert started == 0
        assert started <= 1
    for attempt in attempts[20:]:
        await ledger.reports.until(lambda _, attempt=attempt: bool(ledger.told(attempt)))
        if victim == "worker" and ledger.told(attempt, "started"):
            await ledger.cancel(attempt)
        body = await ledger.end(attempt)
        assert body.kind in ("ended", "vanished", "not_started")
        assert body.kind != "ended" or body.stopped_for == "user"
        assert starts(lone)[attempt] <= 1
