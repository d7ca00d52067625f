"""Who may run which task now: what policy answers about its labels. A rule of the project holds the run."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, NamedTuple

from schemas.identity import Actor, PolicyDecision
from schemas.limits import DECISION_VALID_MS
from services.kit.database import Database
from services.kit.policy import startable
from services.scheduler.store import tasks as store

KEPT: Final = 4_096

Check = Callable[[Actor, str, Mapping[str, str]], Awaitable[PolicyDecision]]
"""May this actor start runs in this project, of a task with these labels?"""


class Labelled(NamedTuple):
    """A task's labels, and the revision that has them; 0 of a task that is not there."""

    revision: int
    labels: Mapping[str, str]


class Permit(NamedTuple):
    """What policy said of a task's runs, and of which revision; the run is to be of that one."""

    decision: PolicyDecision
    revision: int


class Permits:
    """Asks policy about running tasks; labels are kept as long as a decision is valid."""

    def __init__(self, database: Database, check: Check, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._check = check
        self._monotonic = monotonic
        self._labels: OrderedDict[tuple[str, str], tuple[Labelled, float]] = OrderedDict()

    async def may_run(self, actor: Actor, project: str, tasks: Sequence[str]) -> dict[str, Permit]:
        """By task (name or id, as asked): `allow`, or `require_approval` for a run that has to wait for one.

        Raises `forbidden`, or `approval_required` for who may not even make a run that waits.
        """
        known = await self.labels(project, tasks)
        return {
            task: Permit(await self._decided(actor, project, found.labels), found.revision)
            for task, found in known.items()
        }

    def forget(self, project: str, tasks: Sequence[str]) -> None:
        """These tasks have changed: their labels are read anew."""
        for task in tasks:
            self._labels.pop((project, task), None)

    async def _decided(self, actor: Actor, project: str, labels: Mapping[str, str]) -> PolicyDecision:
        return startable(await self._check(actor, project, labels), project)

    async def labels(self, project: str, tasks: Sequence[str]) -> dict[str, Labelled]:
        """The labels of each of these tasks, none for one that is not there."""
        now = self._monotonic()
        found: dict[str, Labelled] = {}
        missing: list[str] = []
        for task in dict.fromkeys(tasks):
            kept = self._labels.get((project, task))
            if kept is not None and now < kept[1]:
                found[task] = kept[0]
            else:
                missing.append(task)
        if missing:
            read = await self._database.read(lambda tx: store.labels_of(tx, project, missing))
            for task in missing:
                # A task that is not there has no labels; that it is not there is said to whoever may run tasks.
                found[task] = Labelled(*read.get(task, (0, {})))
                self._labels[project, task] = (found[task], now + DECISION_VALID_MS / 1000)
                self._labels.move_to_end((project, task))
            while len(self._labels) > KEPT:
                self._labels.popitem(last=False)
        return found
