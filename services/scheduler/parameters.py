"""Parameters of a task: a JSON Schema of the inputs that a run may be given. No I/O, nothing is ever fetched."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, cast

import msgspec

from schemas.errors import Ql3Error

SCHEMA_BYTES: Final = 32 * 1024
INPUT_BYTES: Final = 64 * 1024
_SHOWN: Final = 200


def check_schema(parameters: dict[str, Any] | None) -> None:
    """Raises `invalid` when this is not a schema of an object of inputs."""
    if parameters is None:
        return
    field = "spec.parameters"
    if len(msgspec.json.encode(parameters)) > SCHEMA_BYTES:
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
    if any(isinstance(reference, str) and not reference.startswith("#") for reference in _references(parameters)):
        raise Ql3Error("invalid", "References stay inside the schema: `#/$defs/…`.", field=field)


def check_inputs(parameters: dict[str, Any] | None, inputs: dict[str, Any] | None) -> dict[str, Any] | None:
    """The inputs with the defaults of the schema filled in. Raises `invalid` or `too_large`, naming the input."""
    if inputs is not None and len(msgspec.json.encode(inputs)) > INPUT_BYTES:
        raise Ql3Error("too_large", f"Inputs have at most {INPUT_BYTES} bytes.", field="inputs")
    if parameters is None:
        return inputs
    filled = _defaults(parameters) | (inputs or {})
    validator = _validator(msgspec.json.encode(parameters, order="sorted"))
    wrong = min(validator.iter_errors(filled), key=lambda error: list(map(str, error.absolute_path)), default=None)
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


def _defaults(parameters: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, definition in cast("dict[str, Any]", parameters.get("properties", {})).items():
        if isinstance(definition, dict) and "default" in definition:
            found[name] = cast("dict[str, Any]", definition)["default"]
    return found


@lru_cache(maxsize=512)
def _validator(text: bytes) -> Any:
    from jsonschema import Draft202012Validator
    from referencing import Registry

    # An empty registry cannot fetch what it does not hold.
    return cast(Any, Draft202012Validator)(msgspec.json.decode(text), registry=cast(Any, Registry)())


def _references(value: Any) -> list[Any]:
    found: list[Any] = []
    if isinstance(value, dict):
        for name, item in cast("dict[str, Any]", value).items():
            if name in ("$ref", "$dynamicRef"):
                found.append(item)
            found += _references(item)
    elif isinstance(value, list):
        for item in cast("list[Any]", value):
            found += _references(item)
    return found


def _short(error: Any) -> str:
    text = str(error.message)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
