"""What a scheduler counts: fires by kind, how late they were admitted, missed instants by cause."""

from __future__ import annotations

import pytest

from schemas.errors import Ql3Error
from services.kit.clock import ManualClock
from services.scheduler.decisions import CAUSES
from services.scheduler.store import admissions
from tests.metrics import grown, now
from tests.scheduler.conftest import Room, at, cron

HOUR = 3_600_000
LATENESS = "ql3_admission_lateness_seconds"


async def test_fires_are_counted_by_kind_with_their_lateness(room: Room, clock: ManualClock) -> None:
    await room.create("hourly", cron("0 * * * *"))
    await room.create("often", cron("@every 1h"))
    await room.create("start", cron("@boot"))
    before = await now()
    clock.advance(HOUR - 500)  # half a second ahead
    await room.look()
    clock.advance(HOUR + 2_500)  # two seconds late
    await room.look()
    await room.occasions.boot()
    await room.occasions.boot()
    after = await now()
    for kind, count in {"cron": 2, "interval": 2, "boot": 1}.items():
        assert grown(before, after, "ql3_fires_admitted_total", kind) == count
    assert grown(before, after, f"{LATENESS}_count") == 4
    assert grown(before, after, f"{LATENESS}_bucket", "0.005") == 2
    assert grown(before, after, f"{LATENESS}_bucket", "1.0") == 2
    assert grown(before, after, f"{LATENESS}_bucket", "5.0") == 4
    assert grown(before, after, f"{LATENESS}_sum") == pytest.approx(4.0)


async def test_missed_instants_are_counted_by_cause(room: Room, clock: ManualClock) -> None:
    await room.create("skips", cron("0 * * * *", missed="skip"))
    await room.create("paused", cron("0 * * * *", pause_until_ms=at("2026-03-02 14:30:00"), missed="skip"))
    before = await now()
    clock.advance(3 * HOUR + 31_000)
    await room.look()
    after = await now()
    assert grown(before, after, "ql3_fires_missed_total", "scheduler_down") == 4
    assert grown(before, after, "ql3_fires_missed_total", "paused") == 2
    assert {key[1] for key in after if key[0] == "ql3_fires_missed_total"} <= CAUSES | {"refused"}


async def test_what_the_dispatcher_refuses_shares_one_label(room: Room, clock: ManualClock) -> None:
    await room.create("hourly", cron("0 * * * *"))
    room.ledger.refuses = "placement_impossible"
    before = await now()
    clock.advance(HOUR)
    await room.look()
    assert [cause for cause, _ in await room.causes()] == ["placement_impossible"]
    assert grown(before, await now(), "ql3_fires_missed_total", "refused") == 1


async def test_nothing_is_counted_that_was_not_committed(
    room: Room, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await room.create("hourly", cron("0 * * * *", missed="skip"))
    before = await now()
    clock.advance(2 * HOUR + 5_000)

    async def fail(*_: object) -> set[str]:
        raise Ql3Error("internal_error")

    with monkeypatch.context() as patch:
        patch.setattr(admissions, "insert", fail)
        with pytest.raises(Ql3Error):
            await room.look()
    after = await now()
    assert grown(before, after, "ql3_fires_missed_total", "scheduler_down") == 0
    assert grown(before, after, "ql3_fires_admitted_total", "cron") == 0
    await room.look()
    assert grown(before, await now(), "ql3_fires_missed_total", "scheduler_down") == 1
