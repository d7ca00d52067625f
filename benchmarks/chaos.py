"""A randomised fault run with a checker.

`just chaos --seed N [--quick] [--db sqlite|postgresql] [--runs N] [--keep FOLDER]`

Submits a mixed workload over HTTP while the seed's plan kills, pauses and restarts dispatchers, worker, process host,
nats-server (its folder is wiped as well), single scripts and PostgreSQL. Afterwards everything that the scripts
recorded is compared with the ledger. The last line is one JSON object with the seed and the figures; the exit code is 0
only when nothing was lost, doubled, left open or contradicted.

The plan follows from the seed; what it hits does not, because processes are as fast as the machine is.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import httpx

from benchmarks.chaos_ground import RECORDER, Ground
from benchmarks.chaos_plan import KINDS, QUICK_RUNS, RUNS, Fault, Kind, Plan, Submission, plan
from benchmarks.chaos_verdict import UNTRIED, Done, Ledger, Violation, count, judge, read_records
from schemas.runs import RUN_TERMINAL
from tests.fixtures_database import postgres_server

PROJECT: Final = "/api/v3/projects/default"
ASK_LIMIT_S: Final = 240.0
"""How long one request is repeated; longer than any outage of a plan."""
END_LIMIT_S: Final = 120.0
"""How long after the last blow every run must have ended; a lease that nobody renews takes 30 s."""
AT_ONCE: Final = 24
FAULTS_AT_ONCE: Final = 3
REQUESTS_WAITING: Final = 100
SHOWN: Final = 10
OPEN: Final = "created,queued,dispatching,running,waiting_approval,retry_wait,lost"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_RUNS} runs, within 50 s")
    parser.add_argument("--db", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--runs", type=int, default=None)
    parser.add_argument("--keep", type=Path, default=None, help="keep data and logs in this folder")
    options = parser.parse_args()
    runs = options.runs or (QUICK_RUNS if options.quick else RUNS)
    made = plan(options.seed, options.db, runs, quick=options.quick)
    with _folder(options.keep) as folder:
        figures, violations = check(made, folder)
    for violation in violations[:SHOWN]:
        print(f"{violation.rule}: run {violation.run} attempt {violation.attempt}: {violation.detail}", file=sys.stderr)
    print(json.dumps(figures), flush=True)
    sys.exit(0 if figures["clean"] else 1)


@contextmanager
def _folder(keep: Path | None) -> Generator[Path]:
    if keep is not None:
        keep.mkdir(parents=True)
        yield keep.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="ql3-chaos-") as name:
        yield Path(name)


def check(made: Plan, folder: Path) -> tuple[dict[str, Any], list[Violation]]:
    """Carry a plan out in an empty folder: figures and what must not be. Ends everything that it started."""
    began = time.monotonic()
    with ExitStack() as stack:
        server = stack.enter_context(postgres_server()) if made.database == "postgresql" else None
        done = Done(runs={})
        ground = Ground(made, folder, server, done)
        stack.callback(ground.bring_down)
        work = Check(made, ground, done)
        ledger = asyncio.run(work.run())
    starts, ends = read_records(ground.records.read_text().splitlines())
    violations = judge(starts, ends, ledger, done)
    statuses = Counter(run["status"] for run in ledger.runs.values())
    attempts = Counter(attempt["status"] for rows in ledger.attempts.values() for attempt in rows)
    figures: dict[str, Any] = {
        "benchmark": "chaos",
        "seed": made.seed,
        "db": made.database,
        "runs": len(made.submissions),
        "clean": not violations and not ground.crashes,
        **count(violations),
        "crashes": len(ground.crashes),
        "runs_in_ledger": len(ledger.runs),
        "run_statuses": dict(sorted(statuses.items())),
        "attempts": dict(sorted(attempts.items())),
        "starts_recorded": len(starts),
        "ends_recorded": len(ends),
        "not_started": sum(
            attempt["status"] == "failed" and attempt["error_code"] in UNTRIED
            for rows in ledger.attempts.values()
            for attempt in rows
        ),
        "scripts_killed": len(done.killed),
        "late_receipts": sum(attempt["late_receipt"] for rows in ledger.attempts.values() for attempt in rows),
        "faults": sum(ground.blows.values()),
        "faults_by_kind": dict(sorted(ground.blows.items())),
        "phases_s": work.phases,
        "seconds": round(time.monotonic() - began, 1),
    }
    for crash in ground.crashes[:SHOWN]:
        print(f"crash: {crash}", file=sys.stderr)
    return figures, violations


class Check:
    """One check: the workload and the blows side by side, then the wait for the last end, then the ledger."""

    def __init__(self, made: Plan, ground: Ground, done: Done) -> None:
        self._plan = made
        self._ground = ground
        self._done = done
        self._token = ""
        self._pace = Pace()
        self._turn = asyncio.Semaphore(AT_ONCE)
        self.phases: dict[str, float] = {}
        """How long each part took, in seconds."""

    async def run(self) -> Ledger:
        """The ledger after everything has ended, or could have."""
        with self._phase("start"):
            await self._ground.raise_up()
        async with httpx.AsyncClient(base_url=self._ground.url, timeout=15, trust_env=False) as http:
            self._http = http
            self._token = self._ground.token
            for kind in KINDS:
                await self._ask("POST", "/tasks", {"name": kind.name, "spec": self._spec(kind)}, key=kind.name)
            watch = asyncio.create_task(self._ground.watch())
            try:
                with self._phase("faults"):
                    await asyncio.gather(self._submit_all(), self._strike_all())
                with self._phase("settle"):
                    await self._wait_for_ends()
            finally:
                watch.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watch
            with self._phase("read"):
                ledger = await self._read_ledger()
                await self._explain(ledger)
            return ledger

    @contextmanager
    def _phase(self, name: str) -> Generator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.phases[name] = round(time.monotonic() - began, 1)

    def _spec(self, kind: Kind) -> dict[str, Any]:
        codes = " ".join(str(code) for code in kind.codes)
        command = ["/bin/sh", str(RECORDER), str(self._ground.records), codes, str(kind.seconds), kind.mode]
        execution: dict[str, Any] = {"command": command, "grace_ms": 500}
        if kind.timeout_ms is not None:
            execution["timeout_ms"] = kind.timeout_ms
        retry = {
            "max_attempts": kind.max_attempts,
            "safety": "idempotent" if kind.safe else "unknown",
            "backoff_base_ms": 200,
        }
        return {"execution": execution, "terms": {"retry": retry}}

    # -- the workload

    async def _submit_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for (at, _), items in groupby(self._plan.submissions, lambda item: (item.at_s, item.batch)):
                await self._pace.reach(at)
                group.create_task(self._submit(list(items)))

    async def _submit(self, items: Sequence[Submission]) -> None:
        if items[0].batch < 0:
            answer = await self._ask("POST", f"/tasks/{items[0].kind}/runs", {}, key=items[0].key)
            rows = [answer]
        else:
            rows = await self._submit_batch(items)
        for item, run in zip(items, rows, strict=True):
            self._done.runs[run["id"]] = item.kind
        async with asyncio.TaskGroup() as group:
            for item, run in zip(items, rows, strict=True):
                if item.cancel_after_s is not None:
                    group.create_task(self._cancel(run["id"], item.cancel_after_s))

    async def _submit_batch(self, items: Sequence[Submission]) -> list[dict[str, Any]]:
        body = {"runs": [{"task": item.kind, "idempotency_key": item.key} for item in items]}

        async def once() -> list[dict[str, Any]]:
            answer = await self._send("POST", "/runs:batch", body)
            refused = [row["error"] for row in answer["items"] if row["run"] is None]
            if refused:  # each item answers for itself; a repeat changes nothing about those that were made
                raise _Again(json.dumps(refused[0]))
            return [row["run"] for row in answer["items"]]

        with self._pace.under_way("requests"):
            return await _insist(once)

    async def _cancel(self, run_id: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        self._done.cancels.add(run_id)
        await self._ask("POST", f"/runs/{run_id}/cancel", {}, key=f"cancel-{run_id}", fine=(409,))

    # -- the blows

    async def _strike_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number, fault in enumerate(self._plan.faults):
                await self._pace.reach(fault.at_s)
                group.create_task(self._strike(fault, random.Random(f"{self._plan.seed}:{number}")))

    async def _strike(self, fault: Fault, chance: random.Random) -> None:
        with self._pace.under_way("faults"):
            await self._ground.strike(fault, chance)

    # -- the end

    async def _wait_for_ends(self) -> None:
        until = time.monotonic() + END_LIMIT_S
        while time.monotonic() < until:
            page = await self._ask("GET", f"/runs?limit=1&status={OPEN}")
            if not page["items"]:
                return
            await asyncio.sleep(0.25)

    async def _read_ledger(self) -> Ledger:
        runs: dict[str, dict[str, Any]] = {}
        cursor: str | None = None
        while True:
            page = await self._ask("GET", "/runs?limit=200" + (f"&cursor={cursor}" if cursor else ""))
            runs |= {run["id"]: run for run in page["items"]}
            cursor = page["next"]
            if cursor is None:
                break
        attempts: dict[str, list[dict[str, Any]]] = {}
        waiting = list(runs)

        async def read() -> None:
            while waiting:
                run_id = waiting.pop()
                rows = (await self._ask("GET", f"/runs/{run_id}/attempts"))["items"]
                attempts[run_id] = sorted(rows, key=lambda row: row["attempt"])

        await asyncio.gather(*(read() for _ in range(8)))
        late: dict[str, Any] = {}
        for run_id in [name for name, rows in attempts.items() if any(row["late_receipt"] for row in rows)]:
            events = (await self._ask("GET", f"/runs/{run_id}/events?limit=200"))["items"]
            late |= {row["attempt_id"]: row["payload"] for row in events if row["type"] == "attempt.late_receipt"}
        return Ledger(runs, attempts, late)

    async def _explain(self, ledger: Ledger) -> None:
        stuck = [run_id for run_id, run in ledger.runs.items() if run["status"] not in RUN_TERMINAL]
        for run_id in stuck[:SHOWN]:
            found = await self._ask("GET", f"/runs/{run_id}/explain")
            print(f"stuck: {run_id}: {found['cause']}: {found['sentence']}", file=sys.stderr)

    # -- HTTP

    async def _ask(
        self, method: str, path: str, body: Any = None, *, key: str | None = None, fine: tuple[int, ...] = ()
    ) -> Any:
        """The answer, asked for again while a part of the system is down. Statuses in `fine` answer None."""
        with self._pace.under_way("requests"):
            return await _insist(lambda: self._send(method, path, body, key=key, fine=fine))

    async def _send(
        self, method: str, path: str, body: Any = None, *, key: str | None = None, fine: tuple[int, ...] = ()
    ) -> Any:
        headers = {"Authorization": f"Bearer {self._token}"}
        if key is not None:
            headers["Idempotency-Key"] = key
        try:
            async with self._turn:  # in the order of asking; the client's own pool lets a request starve
                answer = await self._http.request(method, PROJECT + path, json=body, headers=headers)
        except httpx.HTTPError as error:
            raise _Again(type(error).__name__) from error
        if answer.status_code in fine:
            return None
        if answer.status_code == 401:
            self._token = self._ground.token  # the gateway started again
        if answer.status_code in (401, 429) or answer.status_code >= 500:
            raise _Again(answer.text[:500])
        if answer.is_error:
            raise RuntimeError(f"{method} {path}: {answer.status_code} {answer.text[:1000]}")
        return answer.json()


class Pace:
    """The plan's clock. It stands still while the system has more to bear than the plan means: a slow machine gets the
    same blows against the same work, later."""

    def __init__(self) -> None:
        self._under_way: Counter[str] = Counter()
        self._reached_s = 0.0
        self._looked_s: float | None = None

    async def reach(self, at_s: float) -> None:
        """Wait until the plan is `at_s` seconds old."""
        while True:
            now = time.monotonic()
            if self._looked_s is not None and not self._burdened():
                self._reached_s += now - self._looked_s
            self._looked_s = now
            if self._reached_s >= at_s:
                return
            await asyncio.sleep(0.02)

    @contextmanager
    def under_way(self, what: str) -> Generator[None]:
        """Count something as not yet done."""
        self._under_way[what] += 1
        try:
            yield
        finally:
            self._under_way[what] -= 1

    def _burdened(self) -> bool:
        return self._under_way["faults"] >= FAULTS_AT_ONCE or self._under_way["requests"] >= REQUESTS_WAITING


class _Again(Exception):  # noqa: N818 - a reason to ask again, not a fault
    """Something is down."""


async def _insist(once: Callable[[], Awaitable[Any]]) -> Any:
    until = time.monotonic() + ASK_LIMIT_S
    pause = 0.1
    while True:
        try:
            return await once()
        except _Again as reason:
            if time.monotonic() > until:
                raise RuntimeError(f"no answer for {ASK_LIMIT_S:.0f} s: {reason}") from reason
        await asyncio.sleep(pause)
        pause = min(1.0, pause * 1.5)


if __name__ == "__main__":
    main()
