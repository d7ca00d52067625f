"""A dispatcher, a worker and a store that answer from memory, and tell facts as the real ones do."""

from __future__ import annotations

from typing import Any

from schemas import endpoints
from schemas.artifacts import Artifact, ArtifactRange, ArtifactRead
from schemas.errors import Ql3Error
from schemas.identity import Subject
from schemas.runs import (
    Attempt,
    AttemptList,
    AttemptPage,
    LogFact,
    Run,
    RunAnswer,
    RunChanged,
    RunRead,
)
from schemas.subjects import event, live_log
from schemas.system import Done
from schemas.workers import LogChunk, LogFollow, LogRange, LogRead
from services.kit.bus import Bus, Caller, Route

from .conftest import House

RUN = "0190a0a0-0000-7000-8000-00000000000a"
ATTEMPT = "0190a0a0-0000-7000-8000-00000000000b"
TASK = "0190a0a0-0000-7000-8000-00000000000c"
ARTIFACT = "0190a0a0-0000-7000-8000-00000000000d"


def run_row(status: str = "running", version: int = 1) -> Run:
    """A run."""
    return Run(
        id=RUN,
        project="default",
        task_id=TASK,
        task_name="hello",
        task_revision=1,
        status=status,  # type: ignore[arg-type]
        version=version,
        event_sequence=version,
        priority=0,
        trigger_type="manual",
        trigger_id=None,
        scheduled_for_ms=None,
        requested_by=Subject(type="user", id="mira"),
        parent_run_id=None,
        retry_of_run_id=None,
        attempt=1,
        attempt_id=ATTEMPT,
        worker_id="w1",
        exit_code=None,
        error_code=None,
        error_summary=None,
        waiting_reason=None,
        cancel_requested_at_ms=None,
        cancel_reason=None,
        created_at_ms=1,
        queued_at_ms=1,
        started_at_ms=1,
        finished_at_ms=None,
    )


class Ledger:
    """One run with one attempt, whose log is first at the worker and then in the store."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.run = run_row()
        self.attempt_status = "running"
        self.log = b""
        self.ended = False
        self.at_worker = True
        self.stored = False
        self.gone = False
        self.moves_after: int | None = None
        self.gone_after_move = False
        self.log_fact: LogFact | None = None
        self.reads: list[tuple[int, int]] = []
        self.stored_reads: list[int] = []
        self.read_takes_ms = 0
        self.denies_after: int | None = None
        self.follows = 0
        self.dispatcher: Bus
        self.worker: Bus

    async def start(self, bus_for: Any) -> None:
        """Answer."""
        self.dispatcher = await self.house.serve(
            "dispatcher", Route(endpoints.RUNS_GET, self._get), Route(endpoints.RUNS_ATTEMPTS, self._attempts)
        )
        self.worker = await bus_for("worker", worker="w1", streams=False)
        await self.worker.serve(
            "worker",
            "1.0.0",
            [
                Route(endpoints.LOG_READ.bound("w1"), self._read),
                Route(endpoints.LOG_FOLLOW.bound("w1"), self._follow),
            ],
        )
        await self.worker.flush()
        await self.house.serve("retention", Route(endpoints.ARTIFACTS_READ, self._stored))

    async def change(self, status: str) -> None:
        """The run's next state, with its fact."""
        self.run = run_row(status, self.run.version + 1)
        await self.tell()

    async def tell(self, project: str = "default") -> None:
        """The fact of the present state."""
        fact = RunChanged(
            project=project,
            run_id=RUN,
            task_id=TASK,
            task_name="hello",
            status=self.run.status,
            version=self.run.version,
            trigger_type="manual",
            trigger_id=None,
            attempt_id=ATTEMPT,
            worker_id="w1",
            exit_code=None,
            error_code=None,
            at_ms=1,
            events=[],
        )
        await self.dispatcher.publish(event("run", project, RUN, self.run.status), fact)

    async def write(self, data: bytes, *, live: bool = True) -> None:
        """The process writes; without `live` the chunk is lost on its way."""
        offset = len(self.log)
        self.log += data
        if live:
            chunk = LogChunk(offset=offset, data=data)
            await self.worker.publish_core(live_log("default", RUN, ATTEMPT), chunk)

    async def end(self, *, live: bool = True) -> None:
        """The process ends."""
        self.ended = True
        if live:
            chunk = LogChunk(offset=len(self.log), ended=True)
            await self.worker.publish_core(live_log("default", RUN, ATTEMPT), chunk)

    async def store(self) -> None:
        """The attempt settled and its log moved to the store."""
        self.attempt_status = "succeeded"
        self.log_fact = LogFact(artifact_id=ARTIFACT, size=len(self.log), produced=len(self.log))
        self.at_worker = False
        self.stored = True

    async def _get(self, message: RunRead, _: Caller) -> RunAnswer:
        if message.run != RUN:
            raise Ql3Error("not_found")
        return RunAnswer(run=self.run)

    async def _attempts(self, message: AttemptList, _: Caller) -> AttemptPage:
        if message.run != RUN:
            raise Ql3Error("not_found")
        attempt = Attempt(
            id=ATTEMPT,
            run_id=RUN,
            attempt=1,
            status=self.attempt_status,  # type: ignore[arg-type]
            executor="local_process",
            worker_id="w1",
            exit_code=None,
            signal=None,
            error_code=None,
            error_summary=None,
            created_at_ms=1,
            started_at_ms=1,
            finished_at_ms=None,
            deadline_at_ms=None,
            late_receipt=False,
            log=self.log_fact,
        )
        return AttemptPage(items=[attempt], next=None)

    async def _read(self, message: LogRead, _: Caller) -> LogRange:
        if not self.at_worker:
            raise Ql3Error("not_found")
        self.reads.append((message.offset, message.length))
        if self.moves_after == len(self.reads):
            await self.store()
            self.gone = self.gone_after_move
        data = self.log[message.offset : message.offset + message.length]
        return LogRange(offset=message.offset, data=data, total=len(self.log), ended=self.ended, truncated=False)

    async def _follow(self, _message: LogFollow, _: Caller) -> Done:
        self.follows += 1
        return Done()

    async def _stored(self, message: ArtifactRead, _: Caller) -> ArtifactRange:
        if message.actor.expires_at_ms <= self.house.clock.now_ms():
            raise Ql3Error("unauthenticated")
        self.stored_reads.append(message.offset)
        self.house.clock.advance(self.read_takes_ms)
        if self.denies_after == len(self.stored_reads):
            self.house.authority.denied.add("artifact.read")
        if self.gone:
            raise Ql3Error("gone")
        if not self.stored:
            raise Ql3Error("not_found")
        artifact = Artifact(
            id=ARTIFACT,
            project="default",
            run_id=RUN,
            attempt_id=ATTEMPT,
            kind="log",
            state="stored",
            size=len(self.log),
            produced=len(self.log),
            sha256=None,
            truncated=True,
            created_at_ms=1,
            retired_at_ms=None,
        )
        data = self.log[message.offset : message.offset + message.length]
        return ArtifactRange(artifact=artifact, offset=message.offset, data=data)
