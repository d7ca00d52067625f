"""What a process counts about itself, over HTTP as Prometheus reads it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from schemas.subjects import event
from schemas.system import OrdersAck
from services.kit import metrics, outbox
from services.kit.database import Database
from services.kit.health import Health, ProbeServer
from services.kit.loops import Loop
from services.kit.upkeep import upkeep
from services.kit.version import VERSION
from tests.fixtures_nats import WAIT_S
from tests.metrics import Numbers, grown, now, read

Read = Callable[[], Awaitable[Numbers]]


@pytest_asyncio.fixture
async def numbers() -> AsyncIterator[Read]:
    """`await numbers()`: what the port for machines answers."""
    server = ProbeServer(Health(), "127.0.0.1", 0)
    await server.start()

    async def ask() -> Numbers:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=WAIT_S) as client:
            answer = await client.get("/metrics")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain")
        return read(answer.text)

    yield ask
    await server.stop()


async def test_the_port_for_machines_answers_with_numbers(numbers: Read) -> None:
    found = await numbers()
    assert found["ql3_build", VERSION] == 1
    assert found[("process_resident_memory_bytes",)] > 1_000_000


async def test_failed_steps_of_a_loop_are_counted(numbers: Read) -> None:
    before = await numbers()
    failed = asyncio.Event()

    async def step() -> None:
        if loop.failures:
            failed.set()
            return
        raise RuntimeError

    loop = Loop("test-loop", step, every_s=60)
    await loop.start()
    await asyncio.wait_for(failed.wait(), WAIT_S)
    await loop.stop()
    assert grown(before, await numbers(), "ql3_loop_errors_total", "test-loop") == 1


async def test_what_waits_for_the_bus_is_counted_when_somebody_asks(database: Database, numbers: Read) -> None:
    upkeep(database, publisher=None)  # type: ignore[arg-type]
    assert (await numbers())["ql3_outbox_backlog", database.service] == 0
    subject = event("run", "default", "0198c0de-0000-7000-8000-000000000001", "queued")
    facts = [(subject, OrdersAck(ids=[]))] * 3
    await database.transact(lambda tx: outbox.facts(tx, facts))
    assert (await numbers())["ql3_outbox_backlog", database.service] == 3


@pytest.mark.parametrize("fault", [RuntimeError, TimeoutError])
async def test_a_number_that_cannot_be_read_does_not_keep_the_others(fault: type[Exception], numbers: Read) -> None:
    async def broken() -> None:
        raise fault

    metrics.look_at("broken", broken)
    try:
        assert ("ql3_build", VERSION) in await numbers()
    finally:
        metrics.look_no_more("broken")


async def test_labels_are_of_closed_sets() -> None:
    """No series is named after something that a person chose."""
    allowed = {"cause", "kind", "outcome", "service", "loop", "le", "version"}
    text = (await metrics.exposition()).decode()
    assert {label for line in text.splitlines() if line.startswith("ql3_") for label in _labels(line)} <= allowed
    assert await now()


def test_every_number_is_described() -> None:
    text = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()
    families = {family.name for family in metrics.REGISTRY.collect() if family.name.startswith("ql3_")}
    assert len(families) > 9
    described = set(re.findall(r"`(ql3_[a-z_]+?)(?:_total)?[`{]", text))
    assert described == families


def _labels(line: str) -> list[str]:
    inside = line.partition("{")[2].partition("}")[0]
    return [part.partition("=")[0] for part in inside.split(",") if part]
