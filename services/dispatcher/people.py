"""What people ask of runs, limits and workers, each question behind its permission."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from schemas.identity import DEFAULT_PROJECT
from schemas.runs import (
    AttemptList,
    AttemptPage,
    Explanation,
    LimitList,
    LimitPage,
    LimitSet,
    RunAnswer,
    RunCancel,
    RunEventList,
    RunEventPage,
    RunExplain,
    RunList,
    RunPage,
    RunRead,
    RunRetry,
)
from schemas.workers import WorkerAnswer, WorkerDrain, WorkerList, WorkerPage
from services.dispatcher import cancelling, limiting, reading, retrying, sessions
from services.dispatcher.store.revisions import Revisions
from services.kit.database import Database
from services.kit.policy import PolicyClient


class Bells(NamedTuple):
    """Rings the loop that places runs, that delivers cancels, that asks for approvals, that looks at times."""

    place: Callable[[], None]
    deliver: Callable[[], None]
    ask: Callable[[], None]
    time: Callable[[], None]


class People:
    """The ledger as people see and steer it. `listening` tells that silences are not judged yet, for we were away."""

    def __init__(
        self,
        *,
        database: Database,
        revisions: Revisions,
        policy: PolicyClient,
        bells: Bells,
        listening: Callable[[], bool],
    ) -> None:
        self._database = database
        self._revisions = revisions
        self._policy = policy
        self._bells = bells
        self._listening = listening

    async def get_run(self, message: RunRead, _caller: object) -> RunAnswer:
        """One run."""
        await self._policy.require(message.actor, message.project, "run.read")
        run = await self._database.read(lambda tx: reading.run(tx, self._revisions, message.project, message.run))
        return RunAnswer(run=run)

    async def list_runs(self, message: RunList, _caller: object) -> RunPage:
        """A page of runs."""
        await self._policy.require(message.actor, message.project, "run.read")
        return await self._database.read(lambda tx: reading.page(tx, self._revisions, message))

    async def list_events(self, message: RunEventList, _caller: object) -> RunEventPage:
        """Events of a run."""
        await self._policy.require(message.actor, message.project, "run.read")
        return await self._database.read(
            lambda tx: reading.events(tx, message.project, message.run, message.after, message.limit)
        )

    async def list_attempts(self, message: AttemptList, _caller: object) -> AttemptPage:
        """Attempts of a run."""
        await self._policy.require(message.actor, message.project, "run.read")
        return await self._database.read(lambda tx: reading.attempts(tx, message.project, message.run))

    async def explain(self, message: RunExplain, _caller: object) -> Explanation:
        """Why a run is where it is."""
        await self._policy.require(message.actor, message.project, "run.read")
        listening = self._listening()
        return await self._database.read(
            lambda tx: reading.explanation(tx, self._revisions, message.project, message.run, listening=listening)
        )

    async def cancel(self, message: RunCancel, _caller: object) -> RunAnswer:
        """Ask for the end of a run."""
        decision = await self._policy.require(message.actor, message.project, "run.stop")
        record, deliver = await self._database.transact(
            lambda tx: cancelling.cancel_run(tx, self._revisions, message, decision)
        )
        if deliver:
            self._bells.deliver()
        self._bells.place()
        run = await self._database.read(lambda tx: reading.view(tx, self._revisions, record))
        return RunAnswer(run=run)

    async def retry(self, message: RunRetry, _caller: object) -> RunAnswer:
        """A new run like an ended one."""
        decision = await self._policy.require(message.actor, message.project, "run.retry")
        # It is a run like any other: what holds or forbids a start of this task does so here, too.
        labels = await self._database.read(lambda tx: retrying.labels(tx, self._revisions, message))
        start = await self._policy.may_start(message.actor, message.project, labels)
        hold = start.effect == "require_approval"
        retried = await self._database.transact(
            lambda tx: retrying.retry(tx, self._revisions, message, decision, hold=hold)
        )
        self._bells.place()
        self._bells.ask()
        run = await self._database.read(lambda tx: reading.view(tx, self._revisions, retried.run))
        return RunAnswer(run=run, replayed=retried.replayed)

    async def list_limits(self, message: LimitList, _caller: object) -> LimitPage:
        """Concurrency limits of a project."""
        await self._policy.require(message.actor, message.project, "project.read")
        return await self._database.read(lambda tx: limiting.page(tx, message))

    async def set_limit(self, message: LimitSet, _caller: object) -> LimitPage:
        """A limit of a project or of a named key."""
        decision = await self._policy.require(message.actor, message.project, "policy.manage")
        answer = await self._database.transact(lambda tx: limiting.set_limit(tx, message, decision))
        self._bells.place()
        return answer

    async def list_workers(self, message: WorkerList, _caller: object) -> WorkerPage:
        """Workers, for whoever may read the default project."""
        await self._policy.require(message.actor, DEFAULT_PROJECT, "project.read")
        page = message.page
        return await self._database.read(lambda tx: reading.worker_page(tx, page.cursor, page.limit))

    async def drain(self, message: WorkerDrain, _caller: object) -> WorkerAnswer:
        """Give a worker no new work, or work again."""
        decision = await self._policy.require(message.actor, DEFAULT_PROJECT, "worker.manage")
        worker = await self._database.transact(lambda tx: sessions.drain(tx, message, decision))
        self._bells.place()
        self._bells.time()
        return WorkerAnswer(worker=worker)
