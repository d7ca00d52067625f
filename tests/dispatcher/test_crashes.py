"""The dispatcher is killed, really, at every point where it could die between a commit and what follows it.

A worker, a scheduler and an approval go on beside it and keep their side of the protocol. Another dispatcher takes over
the ledger: every run ends, truthfully, and no attempt is started twice.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from schemas.approvals import RequestApprovals
from schemas.endpoints import POLICY_CHECK, RUNS_CANCEL, RUNS_RELEASE
from schemas.errors import Ql3Error
from schemas.runs import RunCancel, RunOrder, RunRelease, SubmitRuns
from schemas.subjects import command
from schemas.tasks import Terms
from services.dispatcher.store import runs
from services.kit.bus import Route
from services.kit.database import Database, Statement
from services.kit.natsserver import NatsServer
from tests.dispatcher.busworker import BusWorker
from tests.dispatcher.crashing import POINTS, Child
from tests.dispatcher.house import order, revision
from tests.dispatcher.test_service import ADA, _policy
from tests.fixtures_database import DatabaseFor, database_configs
from tests.fixtures_nats import WORKER, BusFactory

PLAIN = revision()
HELD = revision(number=2, terms=Terms(needs_approval=True))
LONG = revision(number=3)
LIMIT_S = 60.0
ROOT = Path(__file__).resolve().parents[2]
CASES = [("sqlite", point) for point in POINTS]
CASES += [("postgresql", point) for point in POINTS if point.startswith("commit:") and point.endswith(":after")]
"""A death between a commit and its message is the same on both databases; PostgreSQL is shown where it commits."""


class Scene:
    """Everybody but the dispatcher, each doing again what was not answered."""

    def __init__(self, database: Database, nats: NatsServer, folder: Path) -> None:
        self.database = database
        self.nats = nats
        self.folder = folder
        self.children: list[asyncio.subprocess.Process] = []
        self.open: dict[str, RunOrder] = {}
        self.cancels: set[str] = set()
        self.releases: dict[str, RunRelease] = {}

    async def begin(self, bus_for: BusFactory) -> None:
        self.approval = await bus_for("approval")
        self.gateway = await bus_for("gateway")
        self.scheduler = await bus_for("scheduler")
        await self.approval.serve("approval", "1.0.0", [Route(POLICY_CHECK, _policy)])
        await self.approval.consume("approval", {RequestApprovals: self._asked})
        await self.scheduler.on_ack("scheduler", self._acked)
        self.worker = BusWorker(
            await bus_for("worker", worker=WORKER, streams=False),
            WORKER,
            decide=lambda item: None if item.revision == LONG.digest else {"exit_code": 0},
        )
        for bus in (self.approval, self.gateway, self.scheduler):
            await bus.flush()

    async def dispatcher(self, point: str | None = None) -> asyncio.subprocess.Process:
        path = self.folder / f"child-{len(self.children)}.json"
        child = Child(database=database_configs[self.database], bus=self.nats.options("dispatcher"), point=point)
        path.write_bytes(msgspec.json.encode(child))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.dispatcher.crashing", str(path), stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL, cwd=ROOT,
        )  # fmt: skip
        self.children.append(process)
        return process

    async def _asked(self, messages: list[RequestApprovals]) -> None:
        for message in messages:
            await self.approval.acknowledge("dispatcher", [request.order_id for request in message.requests])
            for request in message.requests:
                self.releases.setdefault(
                    request.request_id,
                    RunRelease(
                        dispatch_id=request.request_id, run=request.request_id, project="default", outcome="approved",
                        approval_id=request.request_id, action_digest=request.binding.action_digest,
                    ),
                )  # fmt: skip

    async def _acked(self, ids: list[str]) -> None:
        for order_id in ids:
            self.open.pop(order_id, None)

    async def nag(self) -> None:
        """One turn of everybody's loops over what is open."""
        try:
            if self.worker.generation == 0:
                await asyncio.wait_for(self.worker.begin(), 2)
            if self.open:
                message = SubmitRuns(sender="scheduler", revisions=[PLAIN, HELD, LONG], runs=list(self.open.values()))
                await self.scheduler.publish(command("dispatcher", "submit"), message)
            await self.worker.report(*list(self.worker.open.values()))
            await asyncio.wait_for(self.worker.beat(), 2)
            going = {item.run_id for item in self.worker.running.values()}
            for run_id in self.cancels & going:
                question = RunCancel(actor=ADA, project="default", run=run_id)
                await self.gateway.request(RUNS_CANCEL, question, timeout=2)
                self.cancels.discard(run_id)
            for run_id, release in list(self.releases.items()):
                await self.approval.request(RUNS_RELEASE, release, timeout=2)
                del self.releases[run_id]
        except (Ql3Error, TimeoutError):
            pass  # nobody answers; the next turn asks again

    async def until(self, done: Any) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not await done():
                await self.nag()
                await asyncio.sleep(0.1)

    async def statuses(self) -> dict[str, str]:
        rows = await self.database.read(lambda tx: tx.fetch(Statement("SELECT id, status FROM runs")))
        return {row["id"]: row["status"] for row in rows}

    def stop(self) -> None:
        for process in self.children:
            if process.returncode is None:
                process.send_signal(signal.SIGKILL)


@pytest_asyncio.fixture
async def scene(
    database_for: DatabaseFor, nats_server: NatsServer, bus_for: BusFactory, tmp_path: Path
) -> AsyncIterator[Scene]:
    scene = Scene(await database_for("dispatcher"), nats_server, tmp_path)
    await scene.begin(bus_for)
    yield scene
    scene.stop()
    await asyncio.gather(*(process.wait() for process in scene.children))


@pytest.mark.parametrize(("dialect", "point"), CASES)
async def test_a_dispatcher_that_dies_loses_doubles_and_blocks_nothing(scene: Scene, dialect: str, point: str) -> None:
    assert scene.database.dialect == dialect
    plain = [order(PLAIN) for _ in range(4)]
    held, long = order(HELD), order(LONG)
    scene.open = {one.order_id: one for one in (*plain, held, long)}
    scene.cancels = {long.run_id}
    first = await scene.dispatcher(point)

    async def dead() -> bool:
        return first.returncode is not None

    await scene.until(dead)
    assert first.returncode == -signal.SIGKILL, point
    await scene.dispatcher()
    wanted = {one.run_id: "succeeded" for one in (*plain, held)} | {long.run_id: "cancelled"}

    async def ended() -> bool:
        return await scene.statuses() == wanted

    try:
        await scene.until(ended)
    except TimeoutError:
        assert await scene.statuses() == wanted, point
    assert len(scene.worker.started) == len(set(scene.worker.started))
    for run_id in wanted:
        rows = await scene.database.read(lambda tx, run_id=run_id: runs.events_of(tx, run_id, 0, 1000))
        assert [row["sequence"] for row in rows] == list(range(1, len(rows) + 1))
        assert [row["type"] for row in rows].count("attempt.starting") <= 1


async def test_nats_killed_twice_under_load_loses_and_doubles_nothing(scene: Scene) -> None:
    plain = [order(PLAIN) for _ in range(60)]
    scene.open = {one.order_id: one for one in plain}
    await scene.dispatcher()

    async def some() -> bool:
        return len(scene.worker.started) >= 5

    await scene.until(some)
    for _ in range(2):
        await scene.nats.kill()
        await scene.nag()

    async def ended() -> bool:
        return set((await scene.statuses()).values()) == {"succeeded"} and len(await scene.statuses()) == 60

    await scene.until(ended)
    assert len(scene.worker.started) == len(set(scene.worker.started)) == 60
