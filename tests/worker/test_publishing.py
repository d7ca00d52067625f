"""The end of a worker whose artifact store does not answer."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from schemas.workers import LogChunk
from services.kit.artifacts import LocalArtifacts
from services.kit.ids import new_id
from services.worker.logs import Logs
from tests.fixtures_nats import WAIT_S, WORKER


class SlowArtifacts(LocalArtifacts):
    """A store that takes every log when it is allowed to."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.begun: list[str] = []
        self.first = threading.Event()
        self.answer = threading.Event()

    def publish(self, worker: str, artifact_id: str, source: Path) -> None:
        """Begun at once, done when it may be."""
        self.begun.append(artifact_id)
        self.first.set()
        self.answer.wait()
        super().publish(worker, artifact_id, source)

    async def over(self) -> None:
        """All of its threads have ended."""
        await asyncio.to_thread(self._callers.shutdown)


async def send(_subject: str, _chunk: LogChunk) -> None:
    raise AssertionError("nobody follows")


async def test_the_end_does_not_wait_for_every_log_of_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.worker.logs.STOP_S", 0.01)
    directory = tmp_path / "logs"
    directory.mkdir()
    store = SlowArtifacts(tmp_path / "artifacts")
    logs = Logs(directory=directory, worker=WORKER, store=store, held=lambda _: None, follow=lambda _: None, send=send)
    attempts = [new_id() for _ in range(3)]
    for attempt in attempts:
        (directory / f"{attempt}.log").write_bytes(b"hello\n")
        logs.finished(attempt)
    try:
        async with asyncio.timeout(WAIT_S):
            await logs.start()
            await asyncio.to_thread(store.first.wait)
            await logs.stop()
    finally:
        store.answer.set()
    await store.over()
    # What it had begun is done; the next start takes up the others.
    assert store.begun == attempts[:1]
    assert store.size(WORKER, attempts[0]) == 6
    assert store.size(WORKER, attempts[1]) is None
    assert all((directory / f"{attempt}.log").exists() for attempt in attempts)


class CountingArtifacts(LocalArtifacts):
    """A store that tells when it has so many logs."""

    def __init__(self, root: Path, wanted: int) -> None:
        super().__init__(root)
        self.full = threading.Event()
        self.stored = 0
        self._wanted = wanted

    def publish(self, worker: str, artifact_id: str, source: Path) -> None:
        """Stored, and counted."""
        super().publish(worker, artifact_id, source)
        self.stored += 1
        if self.stored == self._wanted:
            self.full.set()


async def test_a_rush_of_starts_goes_before_finished_logs_and_then_all_of_them_are_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.worker.logs.PUBLISH_BATCH", 2)
    directory = tmp_path / "logs"
    directory.mkdir()
    store = CountingArtifacts(tmp_path / "artifacts", 5)
    rush_over, asked = asyncio.Event(), asyncio.Event()
    stored_when_asked: list[int] = []

    async def aside() -> None:
        stored_when_asked.append(store.stored)
        asked.set()
        await rush_over.wait()

    logs = Logs(
        directory=directory, worker=WORKER, store=store, held=lambda _: None, follow=lambda _: None, send=send,
        aside=aside,
    )  # fmt: skip
    for attempt in [new_id() for _ in range(5)]:
        (directory / f"{attempt}.log").write_bytes(b"hello\n")
        logs.finished(attempt)
    async with asyncio.timeout(WAIT_S):
        await logs.start()
        await asked.wait()
        assert store.stored == 0
        rush_over.set()
        await asyncio.to_thread(store.full.wait)
        await logs.stop()
    assert stored_when_asked == [0]
