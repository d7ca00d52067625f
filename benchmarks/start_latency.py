"""From the due instant to the first instruction of a real process.

`just bench start_latency [--quick]`. A real `ql3 up` with ten tasks that fire every second, then 1,000 triggers that
are due in one and the same second. Each process is `date +%s%N`: what it prints is the time at which it ran. The floor
is measured in the same run with the same program and none of our code: a request over a nats-server, a durable SQLite
commit before the answer, one spawn; what lies before that on our way is done ahead of the instant.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import nats

from benchmarks.system import System, ql3_up
from services.kit.natsserver import find_binary

COMMAND = ["/bin/date", "+%s%N"]
TASKS = 10
BURST_TASKS, BURST_TRIGGERS = 32, 32
LIMIT_S = 300.0
OPEN = "created,queued,dispatching,running"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer seconds, for a first look")
    options = parser.parse_args()
    seconds = 10 if options.quick else 60
    with tempfile.TemporaryDirectory(prefix="ql3-floor-") as folder:
        floor = asyncio.run(floor_latencies(Path(folder), TASKS * seconds))
        with ql3_up() as system:
            steady = asyncio.run(steady_latencies(system, seconds))
            burst = asyncio.run(burst_latencies(system))
        floor += asyncio.run(floor_latencies(Path(folder), TASKS * seconds))
    p50, p99 = quantile(steady, 0.5), quantile(steady, 0.99)
    floor_p50, floor_p99 = quantile(floor, 0.5), quantile(floor, 0.99)
    figure: dict[str, Any] = {
        "benchmark": "start_latency",
        "fires": len(steady),
        "p50_ms": round(p50, 2),
        "p95_ms": round(quantile(steady, 0.95), 2),
        "p99_ms": round(p99, 2),
        "max_ms": round(max(steady), 2),
        "burst": len(burst),
        "burst_p50_ms": round(quantile(burst, 0.5), 2),
        "burst_last_ms": round(max(burst), 2),
        "floor_p50_ms": round(floor_p50, 2),
        "floor_p99_ms": round(floor_p99, 2),
        "ratio": round(p50 / floor_p50, 2),
        "ratio_p99": round(p99 / floor_p99, 2),
        "early": sum(value < 0 for value in [*steady, *burst]),
        "cores": os.cpu_count(),
    }
    print(json.dumps(figure))


def quantile(values: list[float], part: float) -> float:
    """The value below which `part` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


# Ours


async def steady_latencies(system: System, seconds: int) -> list[float]:
    """Milliseconds from each instant to its process, of ten tasks a second for `seconds` seconds."""
    async with client(system) as http:
        names = [f"steady-{number}" for number in range(TASKS)]
        for name in names:
            await create(http, name, [{"expression": "* * * * * *"}])
        await asyncio.sleep(seconds + 1)
        for name in names:
            (await http.post(f"/tasks/{name}/disable")).raise_for_status()
        return await latencies(http, names, TASKS * (seconds - 1))


async def burst_latencies(system: System) -> list[float]:
    """Milliseconds from one instant to each of the processes that are due then."""
    async with client(system) as http:
        instant = (int(time.time()) + 20) * 1000
        names = [f"burst-{number}" for number in range(BURST_TASKS)]
        for name in names:
            await create(http, name, [{"kind": "once", "at_ms": instant}] * BURST_TRIGGERS)
        if time.time() * 1000 > instant - 2_000:
            raise RuntimeError("the machine took too long to make the triggers")
        await asyncio.sleep(max(0.0, instant / 1000 - time.time()))
        found = await latencies(http, names, BURST_TASKS * BURST_TRIGGERS)
    # A thousand, as the figure says; those above it only fill the last task.
    return sorted(found)[:1_000] if len(found) >= 1_000 else found


def client(system: System) -> httpx.AsyncClient:
    """A client of the default project."""
    return httpx.AsyncClient(
        base_url=f"{system.url}/api/v3/projects/default",
        headers={"Authorization": f"Bearer {system.token}"},
        timeout=60,
    )


async def create(http: httpx.AsyncClient, name: str, triggers: list[dict[str, Any]]) -> None:
    """A task that prints the time."""
    body = {"name": name, "spec": {"execution": {"command": COMMAND}}, "triggers": triggers}
    (await http.post("/tasks", json=body)).raise_for_status()


async def latencies(http: httpx.AsyncClient, names: list[str], wanted: int) -> list[float]:
    """Of every run of these tasks, once all have ended."""
    deadline = time.monotonic() + LIMIT_S
    # One cheap question: to list every run again and again would be a load of its own on what is measured.
    while await anything_open(http):
        if time.monotonic() > deadline:
            raise RuntimeError("there are still open runs")
        await asyncio.sleep(0.5)
    while True:
        runs = [run for name in names for run in await all_runs(http, name)]
        open_runs = [run for run in runs if run["finished_at_ms"] is None]
        if len(runs) >= wanted and not open_runs:
            break
        if time.monotonic() > deadline:
            raise RuntimeError(f"{len(runs)} of {wanted} runs, {len(open_runs)} still open")
        await asyncio.sleep(0.5)
    gate = asyncio.Semaphore(8)

    async def one(run: dict[str, Any]) -> float | None:
        if run["status"] == "cancelled":
            return None  # taken back by the disabling
        async with gate:
            log = await http.get(f"/runs/{run['id']}/log")
        log.raise_for_status()
        return int(log.content) / 1e6 - run["scheduled_for_ms"]

    found = await asyncio.gather(*(one(run) for run in runs))
    return [value for value in found if value is not None]


async def anything_open(http: httpx.AsyncClient) -> bool:
    """Whether some run waits or runs."""
    answer = await http.get("/runs", params={"status": OPEN, "limit": 1})
    answer.raise_for_status()
    return bool(answer.json()["items"])


async def all_runs(http: httpx.AsyncClient, task: str) -> list[dict[str, Any]]:
    """The runs of a task."""
    runs: list[dict[str, Any]] = []
    cursor: str | None = None
    while True:
        query = {"task": task, "limit": 200} | ({"cursor": cursor} if cursor else {})
        answer = await http.get("/runs", params=query)
        answer.raise_for_status()
        page = answer.json()
        runs += page["items"]
        cursor = page["next"]
        if cursor is None:
            return runs


# The floor


async def floor_latencies(folder: Path, fires: int) -> list[float]:
    """The same way without our code: ten at each full second, each a request, a durable commit and a spawn."""
    with nats_server(folder) as url:
        asker, answerer = await nats.connect(url), await nats.connect(url)
        database = sqlite3.connect(folder / "floor.sqlite3", check_same_thread=False, isolation_level=None)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        database.execute("CREATE TABLE IF NOT EXISTS attempts (id INTEGER PRIMARY KEY, body TEXT)")
        lock = asyncio.Lock()

        async def grant(message: Any) -> None:
            async with lock:
                await asyncio.to_thread(database.execute, "INSERT INTO attempts (body) VALUES (?)", ("x" * 400,))
            await message.respond(b"granted")

        await answerer.subscribe("floor.start", cb=grant)
        await answerer.flush()
        found: list[float] = []
        for _ in range(fires // TASKS):
            due = float(int(time.time()) + 1)
            await asyncio.sleep(due - time.time())
            found += await asyncio.gather(*(floor_once(asker, due) for _ in range(TASKS)))
        await asker.close()
        await answerer.close()
        database.close()
    return found


async def floor_once(asker: Any, due: float) -> float:
    """One fire."""
    await asker.request("floor.start", b"x" * 400, timeout=10)
    return await asyncio.to_thread(spawned_at) - due * 1000


def spawned_at() -> float:
    """When a process that is spawned now runs, as it says itself; milliseconds."""
    read, write = os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, write, 1)]
    pid = os.posix_spawn(COMMAND[0], COMMAND, {"PATH": "/usr/bin:/bin"}, file_actions=actions)
    os.close(write)
    with os.fdopen(read, "rb") as output:
        text = output.read()
    os.waitpid(pid, 0)
    return int(text) / 1e6


@contextmanager
def nats_server(folder: Path) -> Iterator[str]:
    """A bare nats-server on a free port of the loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (folder / "nats.log").open("w") as log:
        process = subprocess.Popen([str(find_binary()), "-a", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)  # nothing else tells that it listens
        yield f"nats://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
