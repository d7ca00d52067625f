"""Parameters of a task: a JSON Schema of the inputs that a run may be given. No I/O, nothing is ever fetched."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import Any, Final, cast

import msgspec

from schemas.errors import Ql3Error
from services.scheduler import bounds

SCHEMA_BYTES: Final = 32 * 1024
INPUT_BYTES: Final = 64 * 1024
_SHOWN: Final = 200
_COMPARED: Final = 32
"""The first by place of so many errors is told."""


def check_schema(parameters: dict[str, Any] | None) -> None:
    """Raises `invalid` when this is not a schema of an object of inputs."""
    if parameters is None:
        return
    field = "spec.parameters"
    if _size(parameters, field) > SCHEMA_BYTES:
        raise Ql3Error("too_large", f"At most {SCHEMA_BYTES} bytes.", field=field)
    if parameters.get("type", "object") != "object":
        raise Ql3Error("invalid", "Inputs are an object: write `type: object` with `properties`.", field=field)
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError

    try:
        cast(Any, Draft202012Validator).check_schema(parameters)
    except SchemaError as error:
        place = ".".join(str(part) for part in cast(Any, error).absolute_path)
        raise Ql3Error(
            "invalid", f"It is not a JSON Schema: {_short(error)}.", field=f"{field}.{place}" if place else field
        ) from error
    except RecursionError:
        raise Ql3Error("invalid", "It is nested too deeply.", field=field) from None
    for name, value in _keywords(parameters):
        if name in ("$ref", "$dynamicRef") and isinstance(value, str) and not value.startswith("#"):
            raise Ql3Error("invalid", "References stay inside the schema: `#/$defs/…`.", field=field)
        if name == "pattern" and isinstance(value, str):
            bounds.check_pattern(value, field)
    _refuse_unread(parameters)


def _refuse_unread(parameters: dict[str, Any]) -> None:
    for name, value in _keywords(parameters):
        if name in bounds.NOT_READ and isinstance(value, dict | bool):
            raise Ql3Error("invalid", f"`{name}` is not read here.", field="spec.parameters")


def check_inputs(parameters: dict[str, Any] | None, inputs: dict[str, Any] | None) -> dict[str, Any] | None:
    """The inputs with the defaults of the schema filled in. Raises `invalid` or `too_large`, naming the input.

    A schema that was saved before a keyword of it was refused takes no inputs: `invalid`, naming `spec.parameters`.
    """
    if inputs is not None and _size(inputs, "inputs") > INPUT_BYTES:
        raise Ql3Error("too_large", f"Inputs have at most {INPUT_BYTES} bytes.", field="inputs")
    if parameters is None:
        return inputs
    filled = _defaults(parameters) | (inputs or {})
    try:
        with bounds.steps():
            found = _validator(msgspec.json.encode(parameters, order="sorted")).iter_errors(filled)
            first = islice(found, _COMPARED)
            wrong = min(first, key=lambda error: list(map(str, error.absolute_path)), default=None)
    except (bounds.TooManySteps, RecursionError):
        raise Ql3Error("invalid", "Checking it takes too many steps.", field="inputs") from None
    except Ql3Error:
        raise
    except Exception as error:
        # One schema that cannot be applied must not hold what else is due.
        raise Ql3Error(
            "invalid", f"The task's schema cannot be applied ({type(error).__name__}).", field="inputs"
        ) from error
    if wrong is not None:
        place = ".".join(str(part) for part in wrong.absolute_path)
        raise Ql3Error("invalid", f"{_short(wrong)}.", field=f"inputs.{place}" if place else "inputs")
    return filled or None


def check_preset(parameters: dict[str, Any] | None, inputs: dict[str, Any] | None, *, more_later: bool) -> None:
    """What a trigger gives to each run. With `more_later` whoever fires it may add what is still missing.

    Raises as `check_inputs`.
    """
    if more_later:
        parameters = parameters and {name: value for name, value in parameters.items() if name != "required"}
        inputs = inputs or {}
    check_inputs(parameters, inputs)


def _size(value: Any, field: str) -> int:
    try:
        return len(msgspec.json.encode(value))
    except RecursionError:
        raise Ql3Error("invalid", "It is nested too deeply.", field=field) from None


def _defaults(parameters: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, definition in cast("dict[str, Any]", parameters.get("properties", {})).items():
        if isinstance(definition, dict) and "default" in definition:
            found[name] = cast("dict[str, Any]", definition)["default"]
    return found


@lru_cache(maxsize=512)
def _validator(text: bytes) -> Any:
    from referencing import Registry
    from referencing.jsonschema import DRAFT202012

    parameters = msgspec.json.decode(text)
    _refuse_unread(parameters)
    # A registry that cannot fetch what it does not hold, and that looks for anchors once.
    resource = cast(Any, DRAFT202012).create_resource(parameters)
    name = resource.id() or ""
    registry = cast(Any, Registry)().with_resource(name, resource).crawl()
    return bounds.validator()(parameters, registry=registry, _resolver=registry.resolver(name))


def _keywords(schema: Any) -> Iterator[tuple[str, Any]]:
    """Every member of every object in a schema, whether it is a keyword there or only named like one."""
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            members = cast("dict[str, Any]", value)
            yield from members.items()
            waiting += members.values()
        elif isinstance(value, list):
            waiting += cast("list[Any]", value)


def _short(error: Any) -> str:
    text = str(error.message)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
