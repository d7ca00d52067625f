"""Schemas that somebody wrote to keep the scheduler busy, or to bring it down."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.errors import Ql3Error
from schemas.tasks import TaskSpec
from services.kit.clock import ManualClock
from services.scheduler import bounds
from services.scheduler.parameters import check_inputs, check_schema
from tests.scheduler.conftest import Room, at, cron, spec

HOUR = 3_600_000
ENDLESS = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
DOUBLING = {
    "$ref": "#/$defs/d0",
    "$defs": {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)} | {"d40": {}},
}
WIDE = {"properties": {"a": {"items": {"allOf": [{"minimum": 0}] * 500}}}}


def typed(parameters: dict[str, Any]) -> TaskSpec:
    """A task with these parameters."""
    return TaskSpec(execution=spec().execution, parameters=parameters)


@pytest.mark.parametrize(
    ("parameters", "inputs"),
    [
        (ENDLESS, {}),
        (DOUBLING, {}),
        (WIDE, {"a": [1] * 20_000}),
        ({"properties": {"a": {"uniqueItems": True}}}, {"a": [{}] * 20_000}),
        ({"properties": {"a": {"pattern": "(a+)+$"}}}, {"a": "a" * 60 + "!"}),
    ],
    ids=["endless", "doubling", "wide", "unique", "pattern"],
)
def test_a_check_that_would_not_end_is_refused(parameters: dict[str, Any], inputs: dict[str, Any]) -> None:
    check_schema(parameters)
    with pytest.raises(Ql3Error) as refused:
        check_inputs(parameters, inputs)
    assert refused.value.code == "invalid"
    assert (refused.value.field or "").startswith("inputs")


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"pattern": "(?=a)b"}}},
        {"properties": {"a": {"pattern": r"(a)\1"}}},
        {"properties": {"a": {"pattern": "a" * 2_000}}},
        {"patternProperties": {"(a+)+$": {}}},
        {"unevaluatedProperties": False},
        {"properties": {"a": {"unevaluatedItems": {"type": "string"}}}},
    ],
)
def test_what_cannot_be_bounded_is_refused_when_it_is_saved(parameters: dict[str, Any]) -> None:
    with pytest.raises(Ql3Error) as refused:
        check_schema(parameters)
    assert refused.value.field == "spec.parameters"


def test_a_schema_is_never_nested_too_deeply_to_be_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(1_500):
        deep = {"not": deep}
    with pytest.raises(Ql3Error):
        check_schema(deep)


def test_patterns_and_unique_items_are_checked() -> None:
    parameters = {"properties": {"a": {"pattern": "^[a-z]+$"}, "b": {"uniqueItems": True}}}
    check_schema(parameters)
    assert check_inputs(parameters, {"a": "abc", "b": [{}, 1]}) == {"a": "abc", "b": [{}, 1]}
    for wrong, field in (({"a": "ABC"}, "inputs.a"), ({"b": [{}, {}]}, "inputs.b")):
        with pytest.raises(Ql3Error) as refused:
            check_inputs(parameters, wrong)
        assert refused.value.field == field


def test_a_large_ordinary_input_is_within_the_steps() -> None:
    parameters = {"properties": {"a": {"type": "array", "items": {"type": "integer", "minimum": 0}}}}
    assert check_inputs(parameters, {"a": [1] * 20_000}) is not None
    assert bounds._left.get() is None


async def test_one_endless_schema_does_not_hold_what_else_is_due(room: Room, clock: ManualClock) -> None:
    task = await room.create("endless", cron("0 * * * *"), spec=typed({"properties": {}}))
    await room.create("other", cron("0 * * * *"))
    await room.update(task, typed(ENDLESS))
    clock.advance(HOUR)
    await room.look()
    assert room.ledger.instants() == [at("2026-03-02 13:00:00")]
    assert await room.causes() == [("inputs_refused", 1)]
