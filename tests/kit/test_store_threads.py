"""A store that does not answer keeps its own callers waiting, and nobody else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.kit.artifact_store import ArtifactsAwayError
from services.kit.artifacts import LocalArtifacts
from services.kit.store_threads import CALLERS
from tests.fixtures_nats import WAIT_S


@pytest.fixture
def store(tmp_path: Path) -> LocalArtifacts:
    return LocalArtifacts(tmp_path / "artifacts")


@pytest.fixture
def answer() -> Iterator[threading.Event]:
    """What the store's calls wait for; a test that fails leaves none of them waiting."""
    answer = threading.Event()
    yield answer
    answer.set()


async def test_calls_that_hang_leave_the_threads_of_everybody_else_free(
    store: LocalArtifacts, answer: threading.Event
) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    asked = [asyncio.create_task(store.run(answer.wait)) for _ in range(2 * CALLERS)]
    async with asyncio.timeout(WAIT_S):
        assert await asyncio.to_thread(int, "7") == 7
        assert not any(task.done() for task in asked)
        answer.set()
        assert await asyncio.gather(*asked) == [True] * len(asked)


async def test_a_closed_store_begins_nothing(store: LocalArtifacts, answer: threading.Event) -> None:
    begun = [threading.Event() for _ in range(CALLERS + 1)]

    def ask(number: int) -> bool:
        begun[number].set()
        return answer.wait()

    asked = [asyncio.create_task(store.run(ask, number)) for number in range(CALLERS + 1)]
    async with asyncio.timeout(WAIT_S):
        for event in begun[:CALLERS]:
            await asyncio.to_thread(event.wait)
        store.close()
        with pytest.raises(ArtifactsAwayError):
            await store.run(ask, CALLERS)
        answer.set()
        found = await asyncio.gather(*asked, return_exceptions=True)
    assert found[:CALLERS] == [True] * CALLERS
    assert isinstance(found[CALLERS], ArtifactsAwayError)
    assert not begun[CALLERS].is_set()
