"""Clocks: the steady one never goes back and does not count a jump as time that passed."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from services.kit.clock import JUMP_MS, ManualClock, SteadyClock, WallClock, monotonic_ms
from services.kit.ids import id_floor, new_id


class Machine:
    def __init__(self) -> None:
        self.wall = ManualClock(1_000_000_000)
        self.monotonic = ManualClock(5_000)
        self.clock = SteadyClock(self.wall.now_ms, self.monotonic.now_ms)

    def pass_ms(self, ms: int) -> None:
        self.wall.advance(ms)
        self.monotonic.advance(ms)


def test_it_tells_wall_time():
    machine = Machine()
    machine.pass_ms(12_345)
    assert machine.clock.now_ms() == machine.wall.now_ms()


def test_it_stands_when_the_wall_is_set_back_and_goes_on():
    machine = Machine()
    before = machine.clock.now_ms()
    machine.wall.advance(-3_600_000)
    assert machine.clock.now_ms() == before
    machine.pass_ms(1_000)
    assert machine.clock.now_ms() == before + 1_000


def test_a_jump_is_not_time_that_passed():
    machine = Machine()
    before = machine.clock.now_ms()
    machine.wall.advance(JUMP_MS + 1)
    assert machine.clock.now_ms() == before
    machine.pass_ms(10_000)
    assert machine.clock.now_ms() == before + 10_000


def test_a_small_step_is_followed():
    machine = Machine()
    machine.wall.advance(JUMP_MS)
    assert machine.clock.now_ms() == machine.wall.now_ms()


def test_a_long_silence_is_time_that_passed():
    machine = Machine()
    machine.pass_ms(86_400_000)
    assert machine.clock.now_ms() == machine.wall.now_ms()


def test_it_never_starts_below_the_stored_mark_and_comes_back_to_the_wall():
    machine = Machine()
    machine.clock.not_before(machine.wall.now_ms() + 1_000)
    assert machine.clock.now_ms() == machine.wall.now_ms() + 1_000
    leads = []
    for _ in range(110):
        machine.pass_ms(100)
        leads.append(machine.clock.now_ms() - machine.wall.now_ms())
    assert leads == sorted(leads, reverse=True)
    assert leads[0] == 990
    assert leads[-1] == 0


def test_it_comes_back_to_the_wall_however_often_it_is_asked():
    machine = Machine()
    machine.clock.not_before(machine.wall.now_ms() + 100)
    for _ in range(2_000):
        machine.pass_ms(1)
        machine.clock.now_ms()
    assert machine.clock.now_ms() == machine.wall.now_ms()


@given(st.lists(st.tuples(st.integers(-10_000_000, 10_000_000), st.integers(0, 100_000))))
def test_it_never_goes_back_whatever_the_wall_does(steps: list[tuple[int, int]]):
    machine = Machine()
    last = machine.clock.now_ms()
    for jump, passed in steps:
        machine.wall.advance(jump)
        machine.pass_ms(passed)
        now = machine.clock.now_ms()
        assert now >= last
        assert now - last <= passed + JUMP_MS
        last = now


def test_the_clocks_of_the_machine():
    assert abs(WallClock().now_ms() - time.time() * 1000) < 60_000
    assert monotonic_ms() <= monotonic_ms()


def test_ids_sort_by_when_they_were_made():
    ids = [new_id() for _ in range(5_000)]
    assert ids == sorted(ids)
    assert len(set(ids)) == len(ids)


def test_no_later_id_lies_below_a_floor():
    before = WallClock().now_ms()
    made = new_id()
    after = WallClock().now_ms()
    assert id_floor(before) <= made < id_floor(after + 1)
