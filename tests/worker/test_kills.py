"""SIGKILL of the worker, of the process host, of both, at each point of an attempt's life.

Every case has to end truthfully, and nothing may be started twice.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.worker.apart import VICTIMS, Lone, marking, starts
from tests.worker.conftest import alive
from tests.worker.ledger import Ledger


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
        whole = "before\nbetween\nafter\n"
        assert body.log is not None
        assert (body.log.size, body.log.truncated) == (len(whole), False)
        assert (lone.data / "worker" / "logs" / f"{attempt}.log").read_text() == whole
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
