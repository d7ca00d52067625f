"""Logs on their way into an object store that is there, away, or slow to come."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from services.kit.object_store import ObjectArtifacts
from tests.fixtures_nats import WAIT_S, WORKER
from tests.fixtures_objects import VARIABLES, Bucket
from tests.worker.ledger import Ledger
from tests.worker.life import Worker, settled

OUTPUT = b"hello\n"


def log_of(worker: Worker, attempt: str) -> Path:
    return worker.data / "worker" / "logs" / f"{attempt}.log"


async def until_stored(worker: Worker, store: ObjectArtifacts, attempt: str) -> None:
    assert worker.service is not None
    async with asyncio.timeout(WAIT_S):
        while await asyncio.to_thread(store.size, WORKER, attempt) is None:
            worker.service.holdings.logs.publishing.ring()


async def until_trouble(worker: Worker) -> None:
    assert worker.service is not None
    logs = worker.service.holdings.logs
    async with asyncio.timeout(WAIT_S):
        while not logs.health():
            logs.publishing.ring()
            await asyncio.to_thread(os.sched_yield)


async def test_a_log_is_uploaded_and_kept_until_it_is_asked_to_go(
    worker: Worker, ledger: Ledger, bucket: Bucket
) -> None:
    bucket.make()
    service = await worker.start(artifacts_url=bucket.url)
    attempt, silent = await ledger.offer_many([("echo", "hello"), ("true",)])
    body = await ledger.end(attempt)
    await ledger.end(silent)
    await settled(worker)
    store = ObjectArtifacts(bucket.url)
    await until_stored(worker, store, attempt)
    found = store.read(WORKER, attempt, 0, 100)
    assert found is not None
    assert found.data == OUTPUT
    assert body.log is not None
    assert body.log.size == found.total
    assert store.size(WORKER, silent) is None
    assert log_of(worker, attempt).read_bytes() == OUTPUT
    assert not (worker.data / "artifacts").exists()
    await service.holdings.logs.drop([attempt])
    assert not log_of(worker, attempt).exists()
    assert store.size(WORKER, attempt) == len(OUTPUT)


async def test_while_the_store_is_away_logs_stay_and_go_when_it_is_back(
    worker: Worker, ledger: Ledger, bucket: Bucket
) -> None:
    service = await worker.start(artifacts_url=bucket.url)
    attempt = await ledger.offer("echo", "hello")
    # The end is told all the same: it does not wait for the store.
    assert (await ledger.end(attempt)).exit_code == 0
    await settled(worker)
    await until_trouble(worker)
    assert service.health() == ["finished logs cannot be put into the artifact store"]
    os.utime(log_of(worker, attempt), (1, 1))
    await service.holdings.logs.sweep(set())
    assert log_of(worker, attempt).read_bytes() == OUTPUT
    bucket.make()
    await until_stored(worker, ObjectArtifacts(bucket.url), attempt)
    async with asyncio.timeout(WAIT_S):
        while service.health():
            await asyncio.to_thread(os.sched_yield)
    await service.holdings.logs.sweep(set())
    assert not log_of(worker, attempt).exists()


async def test_a_worker_that_died_before_the_upload_uploads_after_its_restart(
    worker: Worker, ledger: Ledger, bucket: Bucket
) -> None:
    await worker.start(artifacts_url=bucket.url)
    attempts = await ledger.offer_many([("echo", "hello")] * 3)
    for attempt in attempts:
        await ledger.end(attempt)
    await settled(worker)
    await worker.crash()
    bucket.make()
    await worker.start(artifacts_url=bucket.url)
    store = ObjectArtifacts(bucket.url)
    for attempt in attempts:
        await until_stored(worker, store, attempt)


async def test_one_log_that_cannot_be_published_keeps_no_other(worker: Worker, ledger: Ledger, bucket: Bucket) -> None:
    bucket.make()
    service = await worker.start(artifacts_url=bucket.url)
    stuck, other = await ledger.offer_many([("sh", "-c", "echo hello; sleep 1000"), ("echo", "hello")])
    await ledger.running(stuck)
    await ledger.end(other)
    os.unlink(log_of(worker, other))
    log_of(worker, other).mkdir()
    service.holdings.logs.finished(other)
    await ledger.cancel(stuck)
    await ledger.end(stuck)
    await until_stored(worker, ObjectArtifacts(bucket.url), stuck)
    # It is not tried for ever, and nobody is alarmed.
    assert service.holdings.logs._unpublished == {}
    assert service.health() == []


async def test_a_command_does_not_get_the_stores_credentials(worker: Worker, ledger: Ledger, bucket: Bucket) -> None:
    bucket.make()
    await worker.start(artifacts_url=bucket.url)
    attempt = await ledger.offer("env")
    await ledger.end(attempt)
    printed = log_of(worker, attempt).read_text()
    assert "AWS_" not in printed
    assert VARIABLES["AWS_SECRET_ACCESS_KEY"] not in printed
