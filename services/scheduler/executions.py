"""What revisions execute, read once and kept: a revision never changes, and each read of it is checked."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final, NamedTuple

from schemas.errors import Ql3Error
from schemas.tasks import ExecutionRevision
from services.kit.database import Transaction
from services.scheduler import tasks as rules
from services.scheduler.store import tasks as store

KEPT: Final = 1_024


class Pinned(NamedTuple):
    """An execution revision and its digest, which is costly to make."""

    revision: ExecutionRevision
    digest: str


class Executions:
    """Execution revisions by task and revision; at most `KEPT` stay in memory."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, int], Pinned] = OrderedDict()
        self._parameters: OrderedDict[tuple[str, int], dict[str, Any] | None] = OrderedDict()

    async def load(self, tx: Transaction, task_id: str, revision: int) -> Pinned:
        """Raises `revision_unavailable` when it is not there or not what was written."""
        key = (task_id, revision)
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
            return found
        row = await store.execution(tx, task_id, revision)
        if row is None:
            raise Ql3Error("revision_unavailable", data={"task_id": task_id, "revision": revision})
        digest: str = row["content_digest"]
        whole = rules.read_execution(
            row["execution_template"], row["environment_recipe"], row["context_ref"], task_id, revision, digest
        )
        found = Pinned(whole, digest)
        self._kept[key] = found
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return found

    async def parameters(self, tx: Transaction, project: str, task_id: str, revision: int) -> dict[str, Any] | None:
        """The schema of a revision's inputs, if it has one. Raises as `load` does."""
        key = (task_id, revision)
        if key in self._parameters:
            self._parameters.move_to_end(key)
            return self._parameters[key]
        row = await store.at_revision(tx, task_id, revision)
        if row is None:
            raise Ql3Error("revision_unavailable", data={"task_id": task_id, "revision": revision})
        found = rules.read_spec(row["spec"], project, task_id, revision, row["content_digest"]).parameters
        self._parameters[key] = found
        if len(self._parameters) > KEPT:
            self._parameters.popitem(last=False)
        return found
