"""The plan of a chaos check follows from its seed and strikes everybody."""

from __future__ import annotations

import pytest

from benchmarks.chaos_plan import BY_NAME, Database, parts_of, plan


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
@pytest.mark.parametrize("quick", [True, False])
def test_the_same_seed_gives_the_same_plan_and_another_seed_another(database: Database, quick: bool) -> None:
    assert plan(7, database, 500, quick=quick) == plan(7, database, 500, quick=quick)
    assert plan(7, database, 500, quick=quick).faults != plan(8, database, 500, quick=quick).faults
    assert plan(7, database, 500, quick=quick).submissions != plan(8, database, 500, quick=quick).submissions


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
@pytest.mark.parametrize("seed", range(5))
def test_every_part_is_killed_and_paused_and_the_message_server_is_wiped(database: Database, seed: int) -> None:
    made = plan(seed, database, 500, quick=True)
    everybody = [part for part in parts_of(database, quick=True) if part != "postgres"]
    for victim in everybody:
        if victim != "front":
            assert any(fault.blow == "kill" and fault.victims == (victim,) for fault in made.faults)
            assert any(fault.blow == "pause" and fault.victims == (victim,) for fault in made.faults)
    assert sum(fault.blow == "wipe" for fault in made.faults) == 1
    assert sum(set(fault.victims) == set(everybody) for fault in made.faults) == 1
    assert sum(fault.blow == "restart" for fault in made.faults) == (database == "postgresql")
    assert all(0 < fault.at_s < made.length_s for fault in made.faults)
    assert [fault.at_s for fault in made.faults] == sorted(fault.at_s for fault in made.faults)


def test_a_full_plan_wipes_twice_and_only_the_second_worker_stays_away_longer_than_a_started_lease_lives() -> None:
    made = plan(1, "postgresql", 5_000, quick=False)
    assert sum(fault.blow == "wipe" for fault in made.faults) == 2
    assert {name for fault in made.faults if fault.down_s > 20 for name in fault.victims} == {"worker-2", "host-2"}
    assert len(made.faults) >= 50


@pytest.mark.parametrize("runs", [1, 37, 500])
def test_exactly_as_many_runs_as_asked_for_with_keys_of_their_own(runs: int) -> None:
    made = plan(3, "sqlite", runs, quick=True).submissions
    assert len({item.key for item in made}) == len(made) == runs
    for item in made:
        assert (item.cancel_after_s is not None) == (BY_NAME[item.kind].cancel_within_s is not None)
