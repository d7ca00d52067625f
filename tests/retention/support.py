"""Facts, files and rows for retention's tests."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from schemas.base import encode
from schemas.runs import AttemptEnded, LogFact
from schemas.subjects import event
from schemas.system import FeedItem, FeedPage
from services.kit.artifact_store import ArtifactsAwayError, Retired
from services.kit.artifacts import Artifacts, LocalArtifacts
from services.kit.clock import ManualClock
from services.kit.database import Database, Statement
from services.retention import intake

START_MS = 1_700_000_000_000
WORKER = "w1"


def uuid(kind: str, number: int) -> str:
    """A UUIDv7 that tells what it is of: `a`rtifact, `b` run, `c` task, `d` attempt."""
    return f"01990000-0000-7000-8000-{kind}{number:011d}"


def ended(
    number: int,
    *,
    content: bytes | None = b"log\n",
    project: str = "default",
    run: int | None = None,
    status: str = "succeeded",
    terminal: bool = True,
    at_ms: int = START_MS,
) -> AttemptEnded:
    """The fact of an attempt that ended with this log (None: with an empty one)."""
    log = LogFact()
    if content is not None:
        log = LogFact(
            artifact_id=uuid("a", number),
            size=len(content),
            produced=len(content),
            sha256=hashlib.sha256(content).hexdigest(),
        )
    return AttemptEnded(
        project=project,
        run_id=uuid("b", number if run is None else run),
        attempt_id=uuid("d", number),
        task_id=uuid("c", 1),
        worker_id=WORKER,
        status=status,  # type: ignore[arg-type]
        run_terminal=terminal,
        finished_at_ms=at_ms,
        log=log,
    )


def page(*facts: AttemptEnded, position: str | None = None, more: bool = False) -> FeedPage:
    """A page of the dispatcher's feed."""
    items = [
        FeedItem(
            subject=event("attempt", fact.project, fact.attempt_id, "ended"),
            schema="attempt.ended/1",
            payload=msgspec.Raw(encode(fact)),
        )
        for fact in facts
    ]
    return FeedPage(items=items, position=position, more=more)


class Shop:
    """A database, an artifact store and a clock, with what the worker does to them."""

    def __init__(self, database: Database, folder: Path) -> None:
        self.database = database
        self.clock = ManualClock(START_MS)
        self.root = folder / "artifacts"
        self._sources = folder / "worker"
        self._sources.mkdir()
        self.store: Artifacts = LocalArtifacts(self.root)
        self.store.prepare()

    async def told(self, *facts: AttemptEnded) -> None:
        """The dispatcher's facts have been read."""
        await intake.apply_feed(self.database, self.clock, page(*facts, position="1"))

    def published(self, number: int, content: bytes = b"log\n") -> None:
        """The worker has put a log into the store."""
        source = self._sources / f"{number}.log"
        source.write_bytes(content)
        self.store.publish(WORKER, uuid("a", number), source)

    async def look(self) -> bool | float | None:
        """One step of looking for files."""
        return await intake.look_for_files(self.database, self.clock, self.store)

    async def stored(self, *numbers: int, at_ms: int = START_MS, **change: object) -> None:
        """Attempts ended, their logs are in the store and known to be."""
        await self.told(*(ended(number, at_ms=at_ms, **change) for number in numbers))  # type: ignore[arg-type]
        for number in numbers:
            self.published(number)
        await self.look()

    async def rows(self, sql: str, *args: object) -> list[dict[str, object]]:
        """Rows of a query, as plain dictionaries."""
        return [dict(row) for row in await self.database.read(lambda tx: tx.fetch(Statement(sql), *args))]

    async def states(self) -> dict[int, str]:
        """State of every artifact by its number."""
        rows = await self.rows("SELECT id, state FROM artifacts ORDER BY id")
        return {int(str(row["id"])[-11:]): str(row["state"]) for row in rows}

    async def outbox(self, schema: str) -> list[str]:
        """Subjects of what went out of one kind, in order."""
        rows = await self.rows("SELECT subject FROM outbox WHERE message_schema = $1 ORDER BY id", schema)
        return [str(row["subject"]) for row in rows]


class RefusingArtifacts(LocalArtifacts):
    """A store that refuses to answer about some artifacts, as one with rights by prefix does; counts the questions."""

    def __init__(self, root: Path, *refused: int) -> None:
        super().__init__(root)
        self.refused = {uuid("a", number) for number in refused}
        self.asked: list[str] = []

    def size(self, worker: str, artifact_id: str) -> int | None:
        """Its size, unless refused."""
        self._ask(artifact_id)
        return super().size(worker, artifact_id)

    def retire(self, worker: str, artifact_id: str) -> Retired:
        """Removed, unless refused."""
        self._ask(artifact_id)
        return super().retire(worker, artifact_id)

    def _ask(self, artifact_id: str) -> None:
        self.asked.append(artifact_id)
        if artifact_id in self.refused:
            raise ArtifactsAwayError
