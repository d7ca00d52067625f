"""Retention over an object store: what is whole, what is removed, and what is told to workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.kit.artifact_store import ArtifactsAwayError
from services.kit.object_store import ObjectArtifacts
from services.retention import sweep
from services.retention.policy import DAY_MS, Ages
from tests.fixtures_objects import Bucket
from tests.retention.support import WORKER, Shop, ended, uuid

AGES = Ages(logs_ms=7 * DAY_MS, runs_ms=90 * DAY_MS)


@pytest.fixture
async def shop(database_for, tmp_path: Path, bucket: Bucket) -> Shop:
    shop = Shop(await database_for("retention"), tmp_path)
    shop.store = ObjectArtifacts(bucket.url, segment_bytes=4)
    return shop


async def swept(shop: Shop) -> None:
    await sweep.Sweep(database=shop.database, clock=shop.clock, store=shop.store, defaults=AGES).logs()


async def test_a_log_is_stored_once_all_of_it_is_there(shop: Shop, bucket: Bucket) -> None:
    bucket.make()
    await shop.told(ended(1, content=b"whole log\n"), ended(2))
    shop.published(1, b"whole lo")  # the last segment is still on its way
    shop.published(2)
    await shop.look()
    assert await shop.states() == {1: "pending", 2: "stored"}
    assert len(await shop.outbox("workers.retire/1")) == 1
    shop.published(1, b"whole log\n")
    shop.clock.advance(1000)
    await shop.look()
    assert await shop.states() == {1: "stored", 2: "stored"}


async def test_a_store_that_is_away_leaves_every_artifact_as_it_is(shop: Shop, bucket: Bucket) -> None:
    await shop.told(ended(1))
    shop.clock.advance(2 * DAY_MS)
    with pytest.raises(ArtifactsAwayError):
        await shop.look()
    assert await shop.states() == {1: "pending"}
    bucket.make()
    await shop.stored(2)
    shop.clock.advance(30 * DAY_MS)
    away = ObjectArtifacts(bucket.url + "-elsewhere")
    shop.store, there = ObjectArtifacts(bucket.url.replace("logs-", "none-")), shop.store
    await swept(shop)
    assert (await shop.states())[2] == "stored"
    assert there.size(WORKER, uuid("a", 2)) == 4
    assert away.size(WORKER, uuid("a", 2)) is None


async def test_what_is_old_is_deleted_there_and_a_tombstone_counts_it(shop: Shop, bucket: Bucket) -> None:
    bucket.make()
    await shop.told(ended(1, content=b"a longer log\n"))
    shop.published(1, b"a longer log\n")
    await shop.look()
    shop.clock.advance(7 * DAY_MS)
    await swept(shop)
    assert await shop.states() == {1: "gone"}
    assert shop.store.size(WORKER, uuid("a", 1)) is None
    (stone,) = await shop.rows("SELECT disposition, bytes_reclaimed FROM artifact_retentions")
    assert stone == {"disposition": "deleted", "bytes_reclaimed": 13}


async def test_what_never_became_whole_is_deleted_at_its_worker_too(shop: Shop, bucket: Bucket) -> None:
    bucket.make()
    await shop.told(ended(1, content=b"whole log\n"))
    shop.published(1, b"whole lo")
    shop.clock.advance(7 * DAY_MS)
    await shop.look()
    assert await shop.states() == {1: "missing"}
    await swept(shop)
    assert await shop.states() == {1: "gone"}
    assert shop.store.size(WORKER, uuid("a", 1)) is None
    assert await shop.rows("SELECT worker_id FROM retire_orders") == [{"worker_id": WORKER}]
