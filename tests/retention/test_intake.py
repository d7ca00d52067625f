"""Facts become rows once, files are found when they are there, and a worker is told until it answers."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from schemas.base import decode
from schemas.runs import EndedPage
from schemas.system import FeedItem, FeedPage
from schemas.workers import RetireArtifacts
from services.kit.artifact_store import ArtifactsAwayError, UnsafeArtifactError
from services.retention import intake
from services.retention.policy import DAY_MS, HOUR_MS
from services.retention.store import artifacts, orders, policies
from tests.retention.support import START_MS, WORKER, RefusingArtifacts, Shop, ended, page, uuid


@pytest.fixture
async def shop(database_for, tmp_path: Path) -> Shop:
    return Shop(await database_for("retention"), tmp_path)


async def test_a_fact_makes_one_row_however_often_it_comes(shop: Shop) -> None:
    await shop.told(ended(1), ended(2, content=None))
    await shop.told(ended(1))
    assert await shop.states() == {1: "pending"}
    (row,) = await shop.rows("SELECT * FROM artifacts")
    assert (row["project"], row["run_id"], row["size"]) == ("default", uuid("b", 1), 4)
    assert await shop.rows("SELECT project, version FROM retention_policies") == [{"project": "default", "version": 0}]


async def test_the_position_moves_with_the_rows(shop: Shop) -> None:
    await intake.apply_feed(shop.database, shop.clock, page(ended(1), position="41"))
    await intake.apply_feed(shop.database, shop.clock, page(position="57"))
    await intake.apply_feed(shop.database, shop.clock, page())
    assert await shop.database.read(lambda tx: policies.position(tx, "dispatcher")) == "57"


async def test_a_page_that_tells_nothing_and_moves_nowhere_writes_nothing(shop: Shop) -> None:
    await intake.apply_feed(shop.database, shop.clock, page(position="41"))
    shop.clock.advance(60_000)
    await intake.apply_feed(shop.database, shop.clock, page(position="41"), "41")
    assert await shop.rows("SELECT position, updated_at_ms FROM feed_positions") == [
        {"position": "41", "updated_at_ms": START_MS}
    ]


async def test_after_a_gap_the_ledger_is_read_anew_to_its_end_also_by_a_later_process(shop: Shop) -> None:
    async def position() -> str | None:
        return await shop.database.read(lambda tx: policies.position(tx, intake.LEDGER))

    await shop.told(ended(3))
    assert await position() is None
    gap = msgspec.structs.replace(page(ended(4), position="99"), gap=True)
    await intake.apply_feed(shop.database, shop.clock, gap)
    assert await position() == ""
    first = EndedPage(items=[ended(1), ended(2)], next=uuid("d", 2))
    await intake.apply_ended(shop.database, shop.clock, first)
    assert await position() == uuid("d", 2)
    await intake.apply_ended(shop.database, shop.clock, EndedPage(items=[ended(3), ended(4)], next=None))
    assert await position() is None
    assert await shop.states() == {1: "pending", 2: "pending", 3: "pending", 4: "pending"}


async def test_facts_of_others_and_unreadable_ones_stop_nothing(shop: Shop) -> None:
    good = page(ended(1)).items
    foreign = FeedItem(subject="ql3.evt.run.default.x.queued", schema="run.changed/1", payload=msgspec.Raw(b"{}"))
    broken = FeedItem(subject=good[0].subject, schema="attempt.ended/1", payload=msgspec.Raw(b'{"schema":"x"}'))
    feed = FeedPage(items=[foreign, broken, *good], position="9", more=False)
    assert await intake.apply_feed(shop.database, shop.clock, feed) == 1
    assert await shop.states() == {1: "pending"}


async def test_a_late_receipt_brings_the_log_of_an_attempt_that_was_told_as_lost(shop: Shop) -> None:
    await shop.told(ended(1, content=None, status="lost", terminal=False))
    assert await shop.states() == {}
    await shop.told(ended(1, status="lost", terminal=False))
    assert await shop.states() == {1: "pending"}


async def test_a_file_is_stored_once_it_is_there_and_its_worker_is_told(shop: Shop) -> None:
    await shop.told(ended(1), ended(2))
    shop.published(1)
    assert await shop.look() == pytest.approx(0.2)
    assert await shop.states() == {1: "stored", 2: "pending"}
    assert await shop.outbox("artifact.changed/1") == [f"ql3.evt.artifact.default.{uuid('a', 1)}.stored"]
    (order,) = await shop.rows("SELECT subject, payload FROM outbox WHERE kind = 'order'")
    assert order["subject"] == f"ql3.worker.{WORKER}.retire"
    items = decode(str(order["payload"]).encode(), RetireArtifacts).items
    assert [(item.attempt_id, item.artifact_id) for item in items] == [(uuid("d", 1), uuid("a", 1))]
    shop.published(2)
    shop.clock.advance(200)
    assert await shop.look() is None
    assert await shop.states() == {1: "stored", 2: "stored"}


async def test_a_file_of_another_size_is_not_the_artifact(shop: Shop) -> None:
    await shop.told(ended(1, content=b"four"))
    shop.published(1, b"five!")
    await shop.look()
    assert await shop.states() == {1: "pending"}


async def test_after_a_day_it_is_missing_and_still_found_later(shop: Shop) -> None:
    await shop.told(ended(1))
    shop.clock.advance(DAY_MS)
    await shop.look()
    assert await shop.states() == {1: "missing"}
    shop.clock.advance(HOUR_MS - 1)
    await shop.look()
    shop.published(1)
    assert await shop.states() == {1: "missing"}
    shop.clock.advance(1)
    await shop.look()
    assert await shop.states() == {1: "stored"}
    assert [subject.rpartition(".")[2] for subject in await shop.outbox("artifact.changed/1")] == ["missing", "stored"]


async def test_an_unmounted_store_says_nothing_about_any_file(shop: Shop) -> None:
    await shop.told(ended(1))
    shop.clock.advance(2 * DAY_MS)
    shop.root.rename(shop.root.with_name("away"))
    with pytest.raises(UnsafeArtifactError):
        await shop.look()
    assert await shop.states() == {1: "pending"}


async def test_one_file_that_the_store_refuses_keeps_no_other(shop: Shop) -> None:
    shop.store = RefusingArtifacts(shop.root, 2)
    await shop.told(ended(1), ended(2), ended(3))
    shop.clock.advance(2 * DAY_MS)
    for number in (1, 2, 3):
        shop.published(number)
    # Nothing is known of it: it is no missing file, and it is asked about again.
    assert await shop.look() == pytest.approx(0.2)
    assert await shop.states() == {1: "stored", 2: "pending", 3: "stored"}
    shop.clock.advance(200)
    with pytest.raises(ArtifactsAwayError):
        await shop.look()
    shop.store = RefusingArtifacts(shop.root)
    await shop.look()
    assert await shop.states() == {1: "stored", 2: "stored", 3: "stored"}


async def test_many_files_that_the_store_refuses_keep_no_other(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schemas.limits.BATCH_ITEMS", 2)
    shop.store = RefusingArtifacts(shop.root, 1, 2)
    await shop.told(ended(1), ended(2), ended(3))
    shop.published(3)
    with pytest.raises(ArtifactsAwayError):
        await shop.look()
    await shop.look()
    assert await shop.states() == {1: "pending", 2: "pending", 3: "stored"}


async def test_an_order_to_a_worker_is_rung_until_it_is_answered(shop: Shop) -> None:
    await shop.stored(1, 2)
    assert len(await shop.outbox("workers.retire/1")) == 1
    assert not await intake.ring_retire(shop.database, shop.clock)
    assert len(await shop.outbox("workers.retire/1")) == 1
    shop.clock.advance(2_000)
    await intake.ring_retire(shop.database, shop.clock)
    assert len(await shop.outbox("workers.retire/1")) == 2
    await shop.database.transact(lambda tx: orders.close_retire(tx, WORKER, [uuid("d", 1), "never-heard-of"]))
    shop.clock.advance(HOUR_MS)
    await intake.ring_retire(shop.database, shop.clock)
    rows = await shop.rows("SELECT payload FROM outbox WHERE kind = 'order' ORDER BY id")
    last = decode(str(rows[-1]["payload"]).encode(), RetireArtifacts)
    assert [item.attempt_id for item in last.items] == [uuid("d", 2)]
    await shop.database.transact(lambda tx: orders.close_retire(tx, "another", [uuid("d", 2)]))
    assert len(await shop.rows("SELECT * FROM retire_orders")) == 1
    await shop.database.transact(lambda tx: orders.close_retire(tx, WORKER, [uuid("d", 2)]))
    shop.clock.advance(HOUR_MS)
    await intake.ring_retire(shop.database, shop.clock)
    assert len(await shop.outbox("workers.retire/1")) == 3


async def test_the_order_to_a_worker_that_is_gone_for_good_is_dropped(shop: Shop) -> None:
    await shop.stored(1)
    shop.clock.advance(31 * DAY_MS)
    await intake.ring_retire(shop.database, shop.clock)
    assert await shop.rows("SELECT * FROM retire_orders") == []
    assert len(await shop.outbox("workers.retire/1")) == 1


async def test_reading_finds_the_log_of_an_attempt_in_its_own_project_alone(shop: Shop) -> None:
    await shop.stored(1)
    found = await shop.database.read(lambda tx: artifacts.of_attempt(tx, "default", uuid("d", 1)))
    assert found is not None
    assert (found.artifact.state, found.artifact.size, found.artifact.created_at_ms) == ("stored", 4, START_MS)
    assert await shop.database.read(lambda tx: artifacts.of_attempt(tx, "other", uuid("d", 1))) is None


async def test_the_list_of_a_run_is_paged(shop: Shop) -> None:
    await shop.told(*(ended(number, run=1) for number in (1, 2, 3)), ended(4, run=2))
    first = await shop.database.read(lambda tx: artifacts.of_run(tx, "default", uuid("b", 1), "", 2))
    rest = await shop.database.read(lambda tx: artifacts.of_run(tx, "default", uuid("b", 1), first[-1].id, 2))
    assert [item.id for item in (*first, *rest)] == [uuid("a", number) for number in (1, 2, 3)]
