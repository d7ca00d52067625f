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
SHARED = "#/$defs/u"
DRAFT = "https://json-schema.org/draft/2020-12/schema"
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


def many_times(keyword: dict[str, Any]) -> dict[str, Any]:
    """A schema that asks the same of one input a thousand times."""
    return {"properties": {"a": {"allOf": [{"$ref": SHARED}] * 1_000}}, "$defs": {"u": keyword}}


@pytest.mark.parametrize(
    ("parameters", "value"),
    [
        ({"properties": {"a": {"items": {"enum": [0] * 15_000 + [1]}}}}, [1] * 30_000),
        (many_times({"uniqueItems": True}), [n if n % 2 else str(n) for n in range(500)]),
        (many_times({"pattern": "^[ab]*$"}), "ab" * 1_000),
        (many_times({"items": {}}), [1] * 1_000),
        (many_times({"items": True}), [1] * 30_000),
        (many_times({"contains": {}}), [1] * 30_000),
        (many_times({"not": {"maxItems": 0}}), [1] * 30_000),
        (many_times({"if": False}), [1] * 30_000),
        ({"properties": {"a": {"items": {f"x{n}": 1 for n in range(2_000)}}}}, [1] * 30_000),
        ({"properties": {"a": {"items": {"properties": {f"x{n}": {} for n in range(2_000)}}}}}, [{}] * 15_000),
        (
            {"properties": {"a": {"items": {"anyOf": [{"required": [f"x{n}" for n in range(3_000)]}, {}]}}}},
            [{}] * 9_000,
        ),
        ({"properties": {"a": {"items": {"anyOf": [{"maxItems": 0}] * 1_000 + [{}]}}}}, [[1] * 100] * 200),
        ({"properties": {"a": {"$schema": DRAFT, "items": {"allOf": [{"minimum": 0}] * 200}}}}, [1] * 2_000),
    ],
)
def test_a_keyword_counts_by_what_it_has_to_do(parameters: dict[str, Any], value: Any) -> None:
    check_schema(parameters)
    with pytest.raises(Ql3Error) as refused:
        check_inputs(parameters, {"a": value})
    assert refused.value.detail == "Checking it takes too many steps."


def test_a_wrong_input_is_told_by_its_first_errors() -> None:
    parameters = {"properties": {"a": {"items": {"required": [f"x{n}" for n in range(3_000)]}}}}
    with pytest.raises(Ql3Error) as refused:
        check_inputs(parameters, {"a": [{}] * 20_000})
    assert (refused.value.field, refused.value.detail) == ("inputs.a.0", "'x0' is a required property.")


@pytest.mark.parametrize(
    "parameters",
    [
        {"patternProperties": {"(a+)+$": {}}},
        {"properties": {"a": {"patternProperties": {"^x": {"type": "string"}}, "additionalProperties": False}}},
        {"unevaluatedProperties": False},
        {"properties": {"a": {"unevaluatedItems": False}}},
    ],
)
def test_a_schema_saved_with_a_keyword_that_is_not_read_takes_no_inputs(parameters: dict[str, Any]) -> None:
    for _ in range(2):
        with pytest.raises(Ql3Error) as refused:
            check_inputs(parameters, {"a": {}})
        assert (refused.value.code, refused.value.field) == ("invalid", "spec.parameters")


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


@pytest.mark.parametrize(
    ("value", "unique"),
    [
        ([1, True, "1", None, [1], {"a": 1}, 1.5, 0, False], True),
        ([1, 1.0], False),
        ([[1], [1.0]], False),
        ([{"a": 1, "b": [2]}, {"b": [2.0], "a": 1}], False),
        ([[True], [1]], True),
        ([*range(5_000)], True),
    ],
)
def test_items_are_compared_as_json_values(value: list[Any], unique: bool) -> None:
    parameters = {"properties": {"a": {"uniqueItems": True}}}
    if unique:
        assert check_inputs(parameters, {"a": value}) == {"a": value}
        return
    with pytest.raises(Ql3Error) as refused:
        check_inputs(parameters, {"a": value})
    assert (refused.value.field, refused.value.detail) == ("inputs.a", f"{value} has non-unique elements.")


def test_references_by_anchor_and_by_name_are_followed() -> None:
    parameters = {
        "$schema": DRAFT,
        "$id": "https://example.org/inputs",
        "properties": {"a": {"$ref": "#whole"}, "b": {"$ref": "#/$defs/z"}, "c": {"not": False}},
        "$defs": {"z": {"$anchor": "whole", "type": "integer"}},
    }
    check_schema(parameters)
    assert check_inputs(parameters, {"a": 1, "b": 2, "c": 3}) == {"a": 1, "b": 2, "c": 3}
    for name in "ab":
        with pytest.raises(Ql3Error) as refused:
            check_inputs(parameters, {name: "x"})
        assert (refused.value.field, refused.value.detail) == (f"inputs.{name}", "'x' is not of type 'integer'.")


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
