"""What is old goes, with evidence; what is young, held, active or not in the store stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from schemas.artifacts import PurgeRuns
from schemas.base import decode
from services.kit.artifact_store import artifact_path, retire
from services.kit.database import NotPermitted, Statement
from services.retention import sweep
from services.retention.policy import DAY_MS, HOUR_MS, UNENDED_GRACE_MS, Ages
from services.retention.store import artifacts, policies
from tests.retention.support import START_MS, RefusingArtifacts, Shop, ended, uuid

AGES = Ages(logs_ms=7 * DAY_MS, runs_ms=30 * DAY_MS, free_bytes=0)


@pytest.fixture
async def shop(database_for, tmp_path: Path) -> Shop:
    return Shop(await database_for("retention"), tmp_path)


def sweeper(shop: Shop, *, page: int = 64, ages: Ages = AGES) -> sweep.Sweep:
    return sweep.Sweep(database=shop.database, clock=shop.clock, store=shop.store, defaults=ages, page=page)


async def tombstones(shop: Shop) -> list[dict[str, object]]:
    return await shop.rows("SELECT * FROM artifact_retentions ORDER BY artifact_id")


async def test_a_log_goes_exactly_when_it_is_old_and_leaves_a_tombstone(shop: Shop) -> None:
    await shop.stored(1)
    shop.clock.advance(AGES.logs_ms - 1)
    await sweeper(shop).logs()
    assert await shop.states() == {1: "stored"}
    shop.clock.advance(1)
    await sweeper(shop).logs()
    assert await shop.states() == {1: "gone"}
    assert not artifact_path(shop.root, uuid("a", 1)).exists()
    (stone,) = await tombstones(shop)
    assert (stone["disposition"], stone["bytes_reclaimed"]) == ("deleted", 4)
    assert (stone["finished_at_ms"], stone["eligible_at_ms"], stone["recorded_at_ms"]) == (
        START_MS,
        START_MS + AGES.logs_ms,
        START_MS + AGES.logs_ms,
    )
    assert (await shop.outbox("artifact.changed/1"))[-1].endswith(".gone")


async def test_a_project_s_own_age_counts(shop: Shop) -> None:
    await shop.stored(1)
    await shop.stored(2, project="other")
    await shop.database.transact(
        lambda tx: policies.set_policy(
            tx, "other", logs_ms=HOUR_MS, runs_ms=DAY_MS, expected_version=0, now_ms=START_MS
        )
    )
    shop.clock.advance(HOUR_MS)
    await sweeper(shop).logs()
    assert await shop.states() == {1: "stored", 2: "gone"}


async def test_too_little_space_shortens_the_age_and_nothing_else(shop: Shop) -> None:
    await shop.stored(1, at_ms=START_MS - DAY_MS)
    await shop.stored(2)
    await sweeper(shop).logs()
    assert await shop.states() == {1: "stored", 2: "stored"}
    await sweeper(shop, ages=Ages(logs_ms=7 * DAY_MS, runs_ms=30 * DAY_MS, free_bytes=2**62)).logs()
    assert await shop.states() == {1: "gone", 2: "stored"}


async def test_logs_of_lost_attempts_go_too(shop: Shop) -> None:
    await shop.stored(1, status="lost", terminal=True)
    shop.clock.advance(AGES.logs_ms)
    await sweeper(shop).logs()
    assert await shop.states() == {1: "gone"}


async def test_an_earlier_attempt_waits_for_the_end_of_its_run(shop: Shop) -> None:
    await shop.stored(1, run=1, status="failed", terminal=False)
    shop.clock.advance(AGES.logs_ms)
    await sweeper(shop).logs()
    assert await shop.states() == {1: "stored"}
    await shop.told(ended(2, run=1, content=None, at_ms=shop.clock.now_ms()))
    await sweeper(shop).logs()
    assert await shop.states() == {1: "gone"}


async def test_an_end_that_nobody_told_of_delays_and_does_not_keep_for_ever(shop: Shop) -> None:
    await shop.stored(1, terminal=False)
    shop.clock.advance(AGES.logs_ms + UNENDED_GRACE_MS - 1)
    await sweeper(shop).logs()
    assert await shop.states() == {1: "stored"}
    shop.clock.advance(1)
    await sweeper(shop).logs()
    assert await shop.states() == {1: "gone"}


async def test_pending_files_are_never_touched_and_missing_ones_are_recorded_as_absent(shop: Shop) -> None:
    await shop.told(ended(1), ended(2))
    shop.clock.advance(AGES.logs_ms)
    await sweeper(shop).logs()
    assert await shop.states() == {1: "pending", 2: "pending"}
    await shop.look()
    assert await shop.states() == {1: "missing", 2: "missing"}
    await sweeper(shop).logs()
    assert [stone["disposition"] for stone in await tombstones(shop)] == ["already_absent", "already_absent"]
    # The worker that kept it is told to drop it.
    assert len(await shop.rows("SELECT * FROM retire_orders")) == 2


@pytest.mark.parametrize("run", [uuid("b", 1), None])
async def test_a_hold_keeps_a_run_or_a_whole_project(shop: Shop, run: str | None) -> None:
    await shop.stored(1, 2)
    await shop.stored(3, project="other")
    await shop.database.transact(lambda tx: policies.hold(tx, "default", run, "case 4711", "user/ada", START_MS))
    shop.clock.advance(AGES.logs_ms)
    await sweeper(shop).logs()
    assert await shop.states() == {1: "stored", 2: "stored" if run is None else "gone", 3: "gone"}
    ended_hold = await shop.database.transact(lambda tx: policies.release(tx, "default", run))
    assert ended_hold is not None
    assert (ended_hold.run_id, ended_hold.reason, ended_hold.held_by) == (run, "case 4711", "user/ada")
    await sweeper(shop).logs()
    assert set((await shop.states()).values()) == {"gone"}


async def test_a_crash_between_file_and_tombstone_is_finished_truthfully(shop: Shop) -> None:
    await shop.stored(1)
    shop.clock.advance(AGES.logs_ms)
    retire(shop.root, uuid("a", 1))
    await sweeper(shop).logs()
    (stone,) = await tombstones(shop)
    assert (stone["disposition"], stone["bytes_reclaimed"]) == ("already_absent", 0)


async def test_the_first_evidence_stands(shop: Shop) -> None:
    from services.kit.artifact_store import Retired
    from services.retention.artifact import Candidate

    candidate = Candidate(START_MS, uuid("a", 1), uuid("d", 1), uuid("b", 1), "w1", "stored")
    for outcome in (Retired("deleted", 4), Retired("already_absent", 0)):
        await shop.database.transact(
            lambda tx, outcome=outcome: artifacts.bury(
                tx, "default", [(candidate, outcome)], age_ms=1, now_ms=START_MS + 1
            )
        )
    (stone,) = await tombstones(shop)
    assert (stone["disposition"], stone["bytes_reclaimed"]) == ("deleted", 4)


async def test_pages_go_on_where_they_stopped_and_pass_over_what_cannot_be_removed(shop: Shop) -> None:
    await shop.stored(1, 2, 3, 4, 5)
    stuck = artifact_path(shop.root, uuid("a", 2))
    stuck.unlink()
    stuck.mkdir()
    shop.clock.advance(AGES.logs_ms)
    one = sweeper(shop, page=2)
    assert await one.logs()
    assert await shop.states() == {1: "gone", 2: "stored", 3: "stored", 4: "stored", 5: "stored"}
    assert await sweeper(shop, page=2).logs()
    assert await shop.states() == {1: "gone", 2: "stored", 3: "gone", 4: "gone", 5: "stored"}
    assert not await one.logs()
    assert await shop.states() == {1: "gone", 2: "stored", 3: "gone", 4: "gone", 5: "gone"}
    stuck.rmdir()
    await one.logs()
    assert (await shop.states())[2] == "gone"


async def test_a_store_that_goes_away_is_not_asked_for_the_rest_of_the_page(shop: Shop) -> None:
    await shop.stored(1, 2, 3)
    shop.clock.advance(AGES.logs_ms)
    shop.store = away = RefusingArtifacts(shop.root, 2)
    assert not await sweeper(shop).logs()
    assert away.asked == [uuid("a", 1), uuid("a", 2)]
    assert await shop.states() == {1: "gone", 2: "stored", 3: "stored"}
    # What it refuses is passed over, and met again by the next full pass.
    await sweeper(shop).logs()
    assert away.asked[2:] == [uuid("a", 3)]
    shop.store = RefusingArtifacts(shop.root)
    await sweeper(shop).logs()
    assert await shop.states() == {1: "gone", 2: "gone", 3: "gone"}


async def test_an_unmounted_store_is_no_deletion(shop: Shop) -> None:
    await shop.stored(1)
    shop.clock.advance(AGES.logs_ms)
    elsewhere = shop.root.with_name("away")
    shop.root.rename(elsewhere)
    with pytest.raises(OSError):
        await sweeper(shop).logs()
    shop.root.symlink_to(elsewhere)
    await sweeper(shop).logs()
    assert await tombstones(shop) == []
    assert await shop.states() == {1: "stored"}


async def test_two_sweepers_do_not_share_a_cursor(shop: Shop) -> None:
    async def move(expected: int) -> bool:
        return await shop.database.transact(lambda tx: artifacts.move_cursor(tx, "default", expected, None, START_MS))

    assert [await move(0), await move(0), await move(1), await move(1)] == [True, False, True, False]


async def test_an_idle_sweep_writes_nothing(shop: Shop) -> None:
    await shop.stored(1)
    await sweeper(shop).logs()
    assert await shop.rows("SELECT * FROM artifact_maintenance_cursors") == []


async def test_tombstones_are_not_changed(shop: Shop) -> None:
    await shop.stored(1)
    shop.clock.advance(AGES.logs_ms)
    await sweeper(shop).logs()
    for sql in ("DELETE FROM artifact_retentions", "UPDATE artifact_retentions SET bytes_reclaimed = 0"):
        with pytest.raises(NotPermitted):
            await shop.database.transact(lambda tx, sql=sql: tx.execute(Statement(sql)))


async def purge_orders(shop: Shop) -> list[PurgeRuns]:
    rows = await shop.rows("SELECT payload FROM outbox WHERE subject = 'ql3.cmd.dispatcher.purge' ORDER BY id")
    return [decode(str(row["payload"]).encode(), PurgeRuns) for row in rows]


async def close(shop: Shop, order: PurgeRuns) -> None:
    await shop.database.transact(lambda tx: sweep.close_purges(tx, [order.order_id]))


async def test_old_runs_are_purged_by_the_hour_until_the_hour_is_done(shop: Shop) -> None:
    hour = START_MS - START_MS % HOUR_MS
    await shop.told(ended(1, content=None, at_ms=hour), ended(2, content=None, at_ms=hour + HOUR_MS - 1))
    shop.clock.advance(hour + HOUR_MS + AGES.runs_ms - 1 - shop.clock.now_ms())
    await sweeper(shop).runs()
    assert await purge_orders(shop) == []
    shop.clock.advance(1)
    await sweeper(shop).runs()
    (first,) = await purge_orders(shop)
    assert (first.project, first.finished_before_ms, first.limit) == ("default", hour + HOUR_MS, 256)
    await sweeper(shop).runs()
    assert len(await purge_orders(shop)) == 1
    shop.clock.advance(2_000)
    await sweeper(shop).runs()
    assert [order.order_id for order in await purge_orders(shop)] == [first.order_id] * 2
    await close(shop, first)
    await sweeper(shop).runs()
    second = (await purge_orders(shop))[-1]
    assert second.order_id != first.order_id
    await close(shop, second)
    await close(shop, second)
    await sweeper(shop).runs()
    assert len(await purge_orders(shop)) == 3
    assert await shop.rows("SELECT * FROM ended_hours") == []


async def test_a_hold_stops_the_purge_of_its_project(shop: Shop) -> None:
    await shop.told(ended(1, content=None), ended(2, content=None, project="other"))
    await shop.database.transact(lambda tx: policies.hold(tx, "default", uuid("b", 1), "", "user/ada", START_MS))
    shop.clock.advance(AGES.runs_ms + HOUR_MS)
    await sweeper(shop).runs()
    assert [order.project for order in await purge_orders(shop)] == ["other"]


async def test_evidence_is_forgotten_when_its_run_is_purged_and_a_month_has_passed(shop: Shop) -> None:
    await shop.stored(1, 2)
    shop.clock.advance(AGES.logs_ms)
    await sweeper(shop).logs()
    shop.clock.advance(30 * DAY_MS)
    await sweeper(shop).forget()
    assert len(await tombstones(shop)) == 2
    shop.clock.advance(1)
    assert not await sweeper(shop).forget()
    assert await tombstones(shop) == []
    assert await shop.states() == {}
