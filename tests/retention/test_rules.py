"""The rules of ages and looks, by table."""

from __future__ import annotations

import pytest

from schemas.errors import Ql3Error
from services.retention import artifact, policy
from services.retention.policy import DAY_MS, HOUR_MS


@pytest.mark.parametrize(
    ("logs_ms", "runs_ms", "field"),
    [
        (HOUR_MS - 1, DAY_MS, "logs_ms"),
        (policy.MAX_AGE_MS + 1, policy.MAX_AGE_MS + 1, "logs_ms"),
        (HOUR_MS, policy.MAX_AGE_MS + 1, "runs_ms"),
        (DAY_MS, DAY_MS - 1, "runs_ms"),
    ],
)
def test_ages_that_make_no_sense_name_their_field(logs_ms: int, runs_ms: int, field: str) -> None:
    with pytest.raises(Ql3Error) as caught:
        policy.check(logs_ms, runs_ms)
    assert (caught.value.code, caught.value.field) == ("invalid", field)


def test_ages_at_their_bounds_are_taken() -> None:
    policy.check(HOUR_MS, HOUR_MS)
    policy.check(policy.MAX_AGE_MS, policy.MAX_AGE_MS)


def test_pressure_only_shortens() -> None:
    defaults = policy.defaults(30 * DAY_MS, edge=True)
    assert policy.logs_age(None, defaults, pressure=False) == 30 * DAY_MS
    assert policy.logs_age(None, defaults, pressure=True) == DAY_MS
    assert policy.logs_age(HOUR_MS, defaults, pressure=True) == HOUR_MS
    assert policy.logs_age(7 * DAY_MS, defaults, pressure=False) == 7 * DAY_MS


def test_runs_are_kept_at_least_as_long_as_logs_by_default() -> None:
    assert policy.defaults(400 * DAY_MS, edge=False).runs_ms == 400 * DAY_MS
    assert policy.defaults(DAY_MS, edge=False).runs_ms == 90 * DAY_MS


@pytest.mark.parametrize(
    ("found", "size", "looks", "age_ms", "state", "wait_ms"),
    [
        (7, 7, 0, 0, "stored", None),
        (7, 7, 50, 40 * DAY_MS, "stored", None),
        (6, 7, 0, 0, "pending", 200),
        (None, 7, 0, 0, "pending", 200),
        (None, 7, 3, 0, "pending", 1_600),
        (None, 7, 1000, DAY_MS - 1, "pending", 60_000),
        (None, 7, 0, DAY_MS, "missing", HOUR_MS),
    ],
)
def test_looks(found: int | None, size: int, looks: int, age_ms: int, state: str, wait_ms: int | None) -> None:
    now = 100 * DAY_MS
    decided = artifact.look(found=found, size=size, looks=looks, finished_at_ms=now - age_ms, now_ms=now)
    assert decided == (state, None if wait_ms is None else now + wait_ms)


def test_an_hour_asks_for_one_purge_order_more_than_its_count() -> None:
    left: int | None = 600
    orders = 0
    while left is not None:
        left = artifact.purge_left(left)
        orders += 1
    assert orders == 4
