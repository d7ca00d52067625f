"""Retention over a real bus: from the dispatcher's facts to bytes that people read, and the answers in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from schemas.artifacts import (
    ArtifactList,
    ArtifactRead,
    HoldList,
    HoldSet,
    RetentionRead,
    RetentionSet,
)
from schemas.endpoints import (
    ARTIFACTS_LIST,
    ARTIFACTS_READ,
    ARTIFACTS_RETIRED,
    ATTEMPTS_ENDED,
    AUDIT_READ,
    FEED_READ,
    HEALTH,
    HOLDS_LIST,
    HOLDS_SET,
    RETENTION_GET,
    RETENTION_SET,
)
from schemas.errors import Ql3Error
from schemas.paging import Page
from schemas.runs import AttemptEnded, EndedPage, EndedRead
from schemas.subjects import event
from schemas.system import AuditRead, FeedPage, FeedRead, HealthRead
from schemas.workers import ArtifactsRetired, RetireArtifacts
from services.kit.artifact_store import artifact_path, publish
from services.kit.bus import Bus, Caller, Route
from services.kit.clock import ManualClock
from services.kit.config import Config
from services.kit.database import Database, Statement
from services.retention.policy import DAY_MS, HOUR_MS
from services.retention.service import RetentionService
from tests.fixtures_nats import WAIT_S, WORKER, BusFactory, Heard
from tests.peers import OWNER, STRANGER, Authority
from tests.retention.support import START_MS, ended, page, uuid


class Dispatcher:
    """The feed of a dispatcher: what it was told to have committed, in pages."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.facts: list[AttemptEnded] = []
        self.asked: list[FeedRead] = []
        self.pruned: list[AttemptEnded] = []
        """Ended so long ago that the feed has them no more; the ledger still does."""

    async def serve(self) -> None:
        routes = [Route(FEED_READ["dispatcher"], self._read), Route(ATTEMPTS_ENDED, self._ended)]
        await self.bus.serve("dispatcher", "1.0.0", routes)
        await self.bus.flush()

    async def _read(self, message: FeedRead, _caller: Caller) -> FeedPage:
        self.asked.append(message)
        at = int(message.after or 0)
        found = self.facts[at : at + 2]
        after = at + len(found)
        told = page(*found, position=str(after) if found else message.after, more=after < len(self.facts))
        return msgspec.structs.replace(told, gap=message.after is None and bool(self.pruned))

    async def _ended(self, message: EndedRead, _caller: Caller) -> EndedPage:
        known = [*self.pruned, *self.facts]
        left = [fact for fact in known if message.after is None or fact.attempt_id > message.after]
        return EndedPage(items=left[:2], next=left[1].attempt_id if len(left) > 1 else None)

    async def commit(self, *facts: AttemptEnded, ring: bool = True) -> None:
        self.facts += facts
        if ring:
            for fact in facts:
                await self.bus.publish_core(event("attempt", fact.project, fact.attempt_id, "ended"), fact)


class Running:
    """A running retention service with its peers."""

    def __init__(self, service: RetentionService, database: Database, root: Path, bus: Bus, peer: Dispatcher) -> None:
        self.service = service
        self.database = database
        self.root = root
        self.bus = bus
        self.dispatcher = peer
        self.clock: ManualClock
        self.heard = Heard()

    def publish(self, number: int, content: bytes) -> None:
        source = self.root.parent / f"{number}.log"
        source.write_bytes(content)
        publish(source, self.root, uuid("a", number))

    async def until_state(self, number: int, state: str) -> None:
        await self.heard.until(
            lambda items: (uuid("a", number), state) in items,
        )

    async def read(self, number: int, offset: int = 0, length: int = 256 * 1024, *, actor=OWNER, project="default"):
        message = ArtifactRead(actor=actor, project=project, attempt_id=uuid("d", number), offset=offset, length=length)
        return await self.bus.request(ARTIFACTS_READ, message)


@pytest.fixture
async def running(database_for, bus_for: BusFactory, tmp_path: Path) -> AsyncIterator[Running]:
    database = await database_for("retention")
    clock = ManualClock(START_MS)
    config = Config(artifacts=tmp_path / "artifacts", project_logs_ms=7 * DAY_MS)
    service = RetentionService(config=config, database=database, bus=await bus_for("retention"), clock=clock)
    await Authority().serve(await bus_for("approval"))
    peer = Dispatcher(await bus_for("dispatcher"))
    await peer.serve()
    gateway = await bus_for("gateway")
    box = Running(service, database, config.artifact_directory, gateway, peer)
    box.clock = clock

    async def heard(delivery) -> None:
        _, _, _, _, artifact_id, what = delivery.subject.split(".")
        await box.heard.add((artifact_id, what))

    await gateway.on_event("ql3.evt.artifact.>", heard)
    await gateway.flush()
    await service.start()
    yield box
    await service.stop()


async def refusal(call) -> Ql3Error:
    with pytest.raises(Ql3Error) as caught:
        await call
    return caught.value


async def test_a_log_is_read_byte_for_byte_once_its_worker_has_published_it(running: Running) -> None:
    content = bytes(range(256)) * 2048
    running.publish(1, content)
    await running.dispatcher.commit(ended(1, content=content))
    await running.until_state(1, "stored")
    found = b""
    while len(found) < len(content):
        part = await running.read(1, offset=len(found))
        assert part.offset == len(found)
        found += part.data
    assert found == content
    assert (await running.read(1, offset=3, length=2)).data == content[3:5]
    assert (await running.read(1, offset=10**9)).data == b""
    listed = await running.bus.request(ARTIFACTS_LIST, ArtifactList(actor=OWNER, project="default", run=uuid("b", 1)))
    assert [(item.state, item.size) for item in listed.items] == [("stored", len(content))]


async def test_the_worker_is_told_and_its_answer_closes_the_order(running: Running, bus_for: BusFactory) -> None:
    worker = await bus_for("worker", worker=WORKER, streams=False)
    orders = Heard()

    async def take(messages: list[RetireArtifacts]) -> None:
        await orders.add(*messages)

    await worker.consume_worker(WORKER, {RetireArtifacts: take})
    running.publish(1, b"log\n")
    await running.dispatcher.commit(ended(1))
    (order,) = await orders.count(1)
    assert [item.attempt_id for item in order.items] == [uuid("d", 1)]
    await worker.request(ARTIFACTS_RETIRED, ArtifactsRetired(attempt_ids=[uuid("d", 1)]), token=WORKER)
    assert await running.database.read(lambda tx: tx.fetch(Statement("SELECT 1 AS x FROM retire_orders"))) == []


async def test_facts_that_rang_no_bell_are_found_at_the_start(
    database_for, bus_for: BusFactory, tmp_path: Path
) -> None:
    database = await database_for("retention")
    peer = Dispatcher(await bus_for("dispatcher"))
    await peer.serve()
    peer.pruned = [ended(number) for number in range(1, 4)]
    await peer.commit(*(ended(number, content=None, run=number) for number in range(4, 7)), ended(7), ring=False)
    heard = Heard()
    gateway = await bus_for("gateway")

    async def note(delivery) -> None:
        await heard.add(delivery.subject)

    await gateway.on_event("ql3.evt.artifact.>", note)
    await gateway.flush()
    root = tmp_path / "artifacts"
    config = Config(artifacts=root)
    service = RetentionService(
        config=config, database=database, bus=await bus_for("retention"), clock=ManualClock(START_MS)
    )
    numbers = (1, 2, 3, 7)
    from services.kit.artifact_store import prepare_root

    prepare_root(root)
    for number in numbers:
        (tmp_path / "log").write_bytes(b"log\n")
        publish(tmp_path / "log", root, uuid("a", number))
        (tmp_path / "log").unlink()
    await service.start()
    try:
        await heard.count(len(numbers))
    finally:
        await service.stop()
    assert sorted(heard.items) == [f"ql3.evt.artifact.default.{uuid('a', number)}.stored" for number in numbers]
    assert all(asked.subjects == ["ql3.evt.attempt."] for asked in peer.asked)


async def test_what_is_not_in_the_store_is_never_an_empty_answer(running: Running) -> None:
    assert (await refusal(running.read(1))).code == "not_found"
    await running.dispatcher.commit(ended(1))
    async with asyncio.timeout(WAIT_S):
        while (error := await refusal(running.read(1))).code == "not_found":
            await running.bus.flush()
    assert (error.code, error.data) == ("unavailable", {"state": "pending"})
    # Published but not noticed yet: the bytes are there, so they are given.
    running.publish(1, b"log\n")
    assert (await running.read(1)).data == b"log\n"


async def test_a_removed_log_says_when_and_how(running: Running) -> None:
    running.publish(1, b"log\n")
    await running.dispatcher.commit(ended(1))
    await running.until_state(1, "stored")
    running.clock.advance(7 * DAY_MS)
    # Any change of ages rings the sweep.
    await running.bus.request(
        RETENTION_SET,
        RetentionSet(actor=OWNER, project="default", logs_ms=DAY_MS, runs_ms=90 * DAY_MS, expected_version=0),
    )
    await running.until_state(1, "gone")
    error = await refusal(running.read(1))
    assert error.code == "gone"
    assert error.data == {
        "artifact_id": uuid("a", 1),
        "retired_at_ms": START_MS + 7 * DAY_MS,
        "disposition": "deleted",
        "bytes_reclaimed": 4,
    }
    assert not artifact_path(running.root, uuid("a", 1)).exists()


async def test_who_may_not_read_learns_nothing(running: Running) -> None:
    running.publish(1, b"log\n")
    await running.dispatcher.commit(ended(1))
    await running.until_state(1, "stored")
    assert (await refusal(running.read(1, actor=STRANGER))).code == "forbidden"
    assert (await refusal(running.read(1, project="elsewhere"))).code == "forbidden"
    for endpoint, message in (
        (ARTIFACTS_LIST, ArtifactList(actor=STRANGER, project="default", run=uuid("b", 1))),
        (RETENTION_GET, RetentionRead(actor=STRANGER, project="default")),
        (HOLDS_SET, HoldSet(actor=STRANGER, project="default")),
        (HOLDS_LIST, HoldList(actor=STRANGER, project="default")),
    ):
        assert (await refusal(running.bus.request(endpoint, message))).code == "forbidden"


async def test_ages_are_compared_and_set_and_audited(running: Running) -> None:
    before = await running.bus.request(RETENTION_GET, RetentionRead(actor=OWNER, project="default"))
    assert (before.policy.logs_ms, before.policy.version) == (7 * DAY_MS, 0)
    change = RetentionSet(actor=OWNER, project="default", logs_ms=HOUR_MS, runs_ms=DAY_MS, expected_version=0)
    after = await running.bus.request(RETENTION_SET, change)
    assert (after.policy.logs_ms, after.policy.runs_ms, after.policy.version) == (HOUR_MS, DAY_MS, 1)
    again = await refusal(running.bus.request(RETENTION_SET, change))
    assert (again.code, again.data) == ("version_conflict", {"current_version": 1})
    wrong = RetentionSet(actor=OWNER, project="default", logs_ms=DAY_MS, runs_ms=HOUR_MS, expected_version=1)
    assert (await refusal(running.bus.request(RETENTION_SET, wrong))).field == "runs_ms"
    audit = await running.bus.request(AUDIT_READ["retention"], AuditRead(actor=OWNER, project="default"))
    assert [(row.action, row.detail["version"]) for row in audit.items] == [("retention.set", 1)]


async def test_holds_are_listed_and_ended(running: Running) -> None:
    for run in (uuid("b", 2), None, uuid("b", 1)):
        await running.bus.request(HOLDS_SET, HoldSet(actor=OWNER, project="default", run=run, reason="case 4711"))
    listed: list[str | None] = []
    cursor: str | None = None
    while True:
        answer = await running.bus.request(
            HOLDS_LIST, HoldList(actor=OWNER, project="default", page=Page(limit=1, cursor=cursor))
        )
        listed += [hold.run_id for hold in answer.items]
        cursor = answer.next
        if cursor is None:
            break
    assert listed == [None, uuid("b", 1), uuid("b", 2)]
    end = HoldSet(actor=OWNER, project="default", run=None, held=False)
    await running.bus.request(HOLDS_SET, end)
    assert (await refusal(running.bus.request(HOLDS_SET, end))).code == "not_found"


async def test_it_is_ready(running: Running) -> None:
    assert (await running.bus.request(HEALTH["retention"], HealthRead())).reasons == []
