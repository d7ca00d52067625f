"""What revisions execute, read once and kept: a revision never changes, and each read of it is checked."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final, Generic, NamedTuple, TypeVar

from schemas.errors import Ql3Error
from schemas.tasks import ExecutionRevision
from services.kit.database import Transaction
from services.scheduler import tasks as rules
from services.scheduler.store import tasks as store

KEPT: Final = 1_024
KEPT_CHARS: Final = 4 << 20
"""A revision with a long script and a large environment has a hundred thousand; in memory each takes a few bytes."""

T = TypeVar("T")
_Key = tuple[str, int]


class Pinned(NamedTuple):
    """An execution revision and its digest, which is costly to make."""

    revision: ExecutionRevision
    digest: str


class Kept(Generic[T]):
    """What was used last, at most `KEPT` of it, made of at most `KEPT_CHARS` characters."""

    def __init__(self) -> None:
        self._found: OrderedDict[_Key, tuple[T, int]] = OrderedDict()
        self._chars = 0

    def get(self, key: _Key) -> tuple[T] | None:
        """It, in a tuple of one; None when it is not kept."""
        found = self._found.get(key)
        if found is None:
            return None
        self._found.move_to_end(key)
        return (found[0],)

    def put(self, key: _Key, value: T, chars: int) -> None:
        """Keep it, in the place of what was not used for the longest time."""
        self._chars += chars - self._found.pop(key, (None, 0))[1]
        self._found[key] = (value, chars)
        while len(self._found) > KEPT or (self._chars > KEPT_CHARS and len(self._found) > 1):
            _, (_, gone) = self._found.popitem(last=False)
            self._chars -= gone


class Executions:
    """Execution revisions by task and revision."""

    def __init__(self) -> None:
        self._kept: Kept[Pinned] = Kept()
        self._parameters: Kept[dict[str, Any] | None] = Kept()

    async def load(self, tx: Transaction, task_id: str, revision: int) -> Pinned:
        """Raises `revision_unavailable` when it is not there or not what was written."""
        key = (task_id, revision)
        kept = self._kept.get(key)
        if kept is not None:
            return kept[0]
        row = await store.execution(tx, task_id, revision)
        if row is None:
            raise Ql3Error("revision_unavailable", data={"task_id": task_id, "revision": revision})
        digest: str = row["content_digest"]
        whole = rules.read_execution(
            row["execution_template"], row["environment_recipe"], row["context_ref"], task_id, revision, digest
        )
        found = Pinned(whole, digest)
        self._kept.put(key, found, len(row["execution_template"]) + len(row["environment_recipe"]))
        return found

    async def parameters(self, tx: Transaction, project: str, task_id: str, revision: int) -> dict[str, Any] | None:
        """The schema of a revision's inputs, if it has one. Raises as `load` does."""
        key = (task_id, revision)
        kept = self._parameters.get(key)
        if kept is not None:
            return kept[0]
        row = await store.at_revision(tx, task_id, revision)
        if row is None:
            raise Ql3Error("revision_unavailable", data={"task_id": task_id, "revision": revision})
        found = rules.read_spec(row["spec"], project, task_id, revision, row["content_digest"]).parameters
        self._parameters.put(key, found, len(row["spec"]))
        return found
