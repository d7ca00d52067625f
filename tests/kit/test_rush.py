"""What nobody waits for stands aside while many starts are under way, and never for longer than it may."""

from __future__ import annotations

import pytest

from services.kit.rush import ASIDE_MS, LASTS_MS, MANY, Rush


class Time:
    """A clock that only sleeping moves; `meanwhile` happens at the end of each sleep."""

    def __init__(self) -> None:
        self.now_ms = 1_000_000
        self.sleeps = 0
        self.meanwhile = lambda: None

    async def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_ms += round(seconds * 1000)
        self.sleeps += 1
        self.meanwhile()


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def rush(time: Time) -> Rush:
    return Rush(lambda: time.now_ms, time.sleep)


async def test_a_few_starts_hold_up_nothing(rush: Rush, time: Time):
    rush.starts(MANY - 1)
    await rush.over()
    assert time.sleeps == 0


async def test_a_rush_is_over_soon_after_its_last_starts(rush: Rush, time: Time):
    begun = time.now_ms
    rush.starts(MANY)
    more = iter([MANY, 1, 0])
    time.meanwhile = lambda: rush.starts(next(more, 0))
    await rush.over()
    assert time.now_ms - begun == 2 * LASTS_MS
    await rush.over()
    assert time.now_ms - begun == 2 * LASTS_MS


async def test_a_rush_without_end_holds_nothing_up_for_longer_than_allowed(rush: Rush, time: Time):
    begun = time.now_ms
    rush.starts(MANY)
    time.meanwhile = lambda: rush.starts(MANY)
    await rush.over()
    assert time.now_ms - begun == ASIDE_MS
