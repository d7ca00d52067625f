"""What policy says of the runs that triggers are about to make, and whether that still holds where they are made."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

from schemas.errors import Ql3Error
from schemas.identity import PolicyDecision
from services.kit.database import Database, Row, Transaction
from services.scheduler.executions import Executions
from services.scheduler.projects import Asked, Projects, asked
from services.scheduler.store import tasks

TRIES: Final = 5
"""So often it is asked what holds, when it changes meanwhile each time."""


class Outdated(Exception):  # noqa: N818 - not a failure: it is asked again
    """Something changed since policy was asked: ask again."""


class Ruling(NamedTuple):
    """What policy said of one trigger's runs."""

    project: str
    decision: PolicyDecision
    changes: tuple[int, int]
    """The changes of the project that were known before policy was asked."""
    revision: int | None = None
    """The task's revision whose labels were asked about; None where labels do not matter."""

    @property
    def starts(self) -> bool:
        """Whether the project starts anything at all."""
        return self.decision.effect != "deny"

    @property
    def hold(self) -> bool:
        """Whether the run has to wait for an approval."""
        return self.decision.effect != "allow"


class Rulings:
    """Asks policy before a transaction, for no question is asked inside one."""

    def __init__(self, database: Database, executions: Executions, projects: Projects) -> None:
        self._database = database
        self._executions = executions
        self._projects = projects

    async def about(self, rows: Sequence[Row], others: Collection[str] = ()) -> dict[str, Ruling]:
        """By trigger what was said of it; `others` are projects to ask about as well. Raises `unavailable`."""
        projects = sorted({row["project"] for row in rows} | set(others))
        changes = {project: self._projects.changes(project) for project in projects}
        said = await self._projects.learn(asked(project) for project in projects)
        # Without rules labels decide nothing.
        ruled = [row for row in rows if said[asked(row["project"])].has_rules]
        labelled = await self._labelled(ruled) if ruled else {}
        wanted = {about for about, _ in labelled.values()} - said.keys()
        if wanted:
            said |= await self._projects.learn(sorted(wanted))
        rulings: dict[str, Ruling] = {}
        for row in rows:
            about, revision = labelled.get(row["id"], (asked(row["project"]), None))
            rulings[row["id"]] = Ruling(row["project"], said[about], changes[row["project"]], revision)
        return rulings

    async def _labelled(self, rows: Sequence[Row]) -> dict[str, tuple[Asked, int]]:
        async def read(tx: Transaction) -> dict[str, tuple[Asked, int]]:
            heads = await tasks.current_executions(tx, sorted({row["task_id"] for row in rows}))
            found: dict[str, tuple[Asked, int]] = {}
            for row in rows:
                head = heads.get(row["task_id"])
                labels: Mapping[str, str] = {}
                if head is not None:
                    try:
                        labels = (await self._executions.load(tx, head["id"], head["revision"])).revision.terms.labels
                    except Ql3Error as error:
                        # It makes no run either, and says so there.
                        if error.code != "revision_unavailable":
                            raise
                found[row["id"]] = (asked(row["project"], labels), 0 if head is None else head["revision"])
            return found

        return await self._database.read(read)

    def still(self, ruling: Ruling | None, revision: int) -> Ruling:
        """The ruling, when it holds for this revision of the task. Raises `Outdated`."""
        if ruling is None or self._projects.changes(ruling.project) != ruling.changes:
            raise Outdated
        if ruling.revision not in (None, revision):
            raise Outdated
        return ruling
