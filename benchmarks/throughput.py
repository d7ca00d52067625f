"""Durable runs of /bin/true a second, from the first submit to the last settled.

`just bench throughput [--quick] [--profile edge|standalone] [--runs N]`. Runs are submitted in batches to the
dispatcher by the request that the scheduler uses. `ratio` compares with a bare loop of `os.posix_spawn` with 8 in
flight, measured before and after in the same run; `api_ratio` compares submission of whole runs over HTTP with it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from typing import Any

import httpx
import msgspec
from uuid_utils import uuid7

from benchmarks.limits import spawn_rate
from benchmarks.standalone import Standalone, ql3_standalone
from benchmarks.system import System, ql3_up
from schemas.base import decode
from schemas.endpoints import RUNS_SUBMIT
from schemas.identity import Subject
from schemas.limits import BATCH_ITEMS
from schemas.runs import RunChanged, RunOrder, SubmitRuns
from schemas.tasks import Execution, ExecutionRevision
from services.kit.bus import Bus

SLOTS = 64
LIMIT_S = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer runs, for a first look")
    parser.add_argument("--profile", choices=("edge", "standalone"), default="edge")
    parser.add_argument("--runs", type=int, default=None)
    parser.add_argument("--slots", type=int, default=SLOTS)
    options = parser.parse_args()
    count = options.runs or (1_000 if options.quick else 5_000)
    before = spawn_rate(1_000 if options.quick else 3_000)
    start = ql3_up if options.profile == "edge" else ql3_standalone
    with start(environment={"QL3_WORKER_SLOTS": str(options.slots)}) as system:
        warm = asyncio.run(submitted_to_settled(system, 200))
        measured = asyncio.run(submitted_to_settled(system, count))
        over_http = asyncio.run(over_api(system, count))
    after = spawn_rate(1_000 if options.quick else 3_000)
    limit = (before + after) / 2
    figure: dict[str, Any] = {
        "benchmark": "throughput",
        "profile": options.profile,
        "runs": count,
        "slots": options.slots,
        "runs_per_s": round(measured, 1),
        "warm_up_runs_per_s": round(warm, 1),
        "api_runs_per_s": round(over_http, 1),
        "limit_spawns_per_s": round(limit, 1),
        "ratio": round(measured / limit, 3),
        "api_ratio": round(over_http / limit, 3),
        "cores": os.cpu_count(),
    }
    print(json.dumps(figure))


async def submitted_to_settled(system: System | Standalone, count: int) -> float:
    """Submit `count` runs in batches of 256 and wait for the fact of the last one's end; runs a second."""
    revision = ExecutionRevision(
        project="default",
        task_id=str(uuid7()),
        task_name="bench",
        task_revision=1,
        execution=Execution(command=["/bin/true"]),
    )
    digest = revision.digest
    async with Bus(system.bus_options("scheduler")) as bus, _Settled(bus, count) as settled:
        started = time.perf_counter()
        for first in range(0, count, BATCH_ITEMS):
            runs = [_order(digest) for _ in range(min(BATCH_ITEMS, count - first))]
            settled.expect(order.run_id for order in runs)
            answer = await bus.request(RUNS_SUBMIT, SubmitRuns(sender="bench", revisions=[revision], runs=runs))
            refused = [result.error for result in answer.results if result.run is None]
            if refused:
                raise RuntimeError(f"refused: {refused[0]}")
        await asyncio.wait_for(settled.wait(), LIMIT_S)
        return count / (settled.last - started)


def _order(digest: str) -> RunOrder:
    run_id = str(uuid7())
    return RunOrder(
        order_id=run_id,
        run_id=run_id,
        project="default",
        revision=digest,
        trigger_type="api",
        requested_by=Subject(type="system", id="benchmark"),
        created_at_ms=time.time_ns() // 1_000_000,
        idempotency_key=run_id,
    )


async def over_api(system: System | Standalone, count: int) -> float:
    """The same over HTTP: create a task, submit batches of 256 over eight connections, wait for the last end."""
    headers = {"Authorization": f"Bearer {system.token}"}
    name = f"api-{uuid7().hex[-12:]}"
    async with (
        httpx.AsyncClient(base_url=system.url, headers=headers, timeout=60, trust_env=False) as http,
        Bus(system.bus_options("scheduler")) as bus,
        _Settled(bus, count) as settled,
    ):
        body = {"name": name, "spec": {"execution": {"command": ["/bin/true"]}}}
        (await http.post("/api/v3/projects/default/tasks", json=body)).raise_for_status()
        started = time.perf_counter()
        waiting = list(range(0, count, BATCH_ITEMS))

        async def submit() -> None:
            while waiting:
                first = waiting.pop()
                size = min(BATCH_ITEMS, count - first)
                keys = [{"task": name, "idempotency_key": str(uuid7())} for _ in range(size)]
                answer = await http.post(
                    "/api/v3/projects/default/runs:batch",
                    content=msgspec.json.encode({"runs": keys}),
                    headers={"Content-Type": "application/json"},
                )
                answer.raise_for_status()
                settled.expect(item["run"]["id"] for item in answer.json()["items"])

        await asyncio.gather(*(submit() for _ in range(4)))
        await asyncio.wait_for(settled.wait(), LIMIT_S)
        return count / (settled.last - started)


class _Settled:
    """Hears the facts about ended runs until all expected ones have ended."""

    def __init__(self, bus: Bus, count: int) -> None:
        self._bus = bus
        self._count = count
        self._expected: set[str] = set()
        self._ended: dict[str, float] = {}
        self._done = asyncio.Event()
        self.last = 0.0

    async def __aenter__(self) -> _Settled:
        self._subscription = await self._bus.on_event("ql3.evt.run.default.*.*", self._hear)
        await self._bus.flush()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._subscription.close()

    def expect(self, run_ids: Any) -> None:
        self._expected.update(run_ids)
        self._check()

    async def wait(self) -> None:
        await self._done.wait()
        self.last = max(self._ended[run_id] for run_id in self._expected)

    async def _hear(self, delivery: Any) -> None:
        # The subject says enough; only failures are read.
        _, _, _, _, run_id, status = delivery.subject.split(".")
        if status in ("failed", "cancelled", "timed_out"):
            fact = decode(delivery.payload, RunChanged)
            raise RuntimeError(f"a run of /bin/true {status}: {fact.error_code}")
        if status == "succeeded":
            self._ended[run_id] = time.perf_counter()
            self._check()

    def _check(self) -> None:
        if (
            len(self._expected) == self._count
            and len(self._ended) >= self._count
            and self._expected <= set(self._ended)
        ):
            self._done.set()


if __name__ == "__main__":
    main()
