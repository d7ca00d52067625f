"""Bounds of checking inputs against a schema that somebody else wrote: neither may take the scheduler's time for long.

A step is one keyword at one place, and as many more as its work is larger than that of most: what it walks through,
the values it compares with, the errors it writes. Expressions are matched in linear time (RE2), and what could only be
bounded by walking a second time, outside of these steps, is not read.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache
from typing import Any, Final, cast

from schemas.errors import Ql3Error

STEPS: Final = 100_000
PATTERN_CHARS: Final = 1_000
NOT_READ: Final = frozenset({"patternProperties", "unevaluatedProperties", "unevaluatedItems"})
"""Keywords that are refused, in what is saved and in what was."""
_LIGHT: Final = 10
"""So many small things (a name looked up, a value compared) take about the time of one keyword."""
_MESSAGE_CHARS: Final = 200
_WALKING: Final = frozenset({"additionalProperties", "contains", "items", "propertyNames"})
"""Keywords that look at each part of what is given, whatever they ask of it."""
_COMPARING: Final = frozenset({"const", "dependentRequired", "enum"})

_left: ContextVar[list[int] | None] = ContextVar("steps_left", default=None)


class TooManySteps(Exception):  # noqa: N818 - a bound is reached
    """The check was given up."""


@contextmanager
def steps() -> Generator[None]:
    """Within, a check has so many steps. Raises `TooManySteps`."""
    token = _left.set([STEPS])
    try:
        yield
    finally:
        _left.reset(token)


def check_pattern(text: str, field: str) -> None:
    """Raises `invalid` for an expression that is not matched in linear time."""
    if len(text) > PATTERN_CHARS:
        raise Ql3Error("too_large", f"A pattern has at most {PATTERN_CHARS} characters.", field=field)
    try:
        _compiled(text)
    except Exception:
        raise Ql3Error(
            "invalid", "This pattern is not read here: write it without back-references and look-around.", field=field
        ) from None


@cache
def validator() -> Any:
    """The class of JSON Schema validators whose every keyword is a step."""
    from jsonschema import Draft202012Validator, validators

    plain = cast("dict[str, Any]", cast(Any, Draft202012Validator).VALIDATORS)
    own = {**plain, "pattern": _pattern, "uniqueItems": _unique}
    found = cast(Any, validators).extend(
        Draft202012Validator, {name: _counted(name, check) for name, check in own.items()}
    )
    found.evolve = _evolve
    return found


def weight(value: Any) -> int:
    """How many values and hundreds of characters a JSON value has."""
    found, waiting = 0, [value]
    while waiting:
        one = waiting.pop()
        found += 1
        if isinstance(one, dict):
            waiting += cast("dict[str, Any]", one).values()
        elif isinstance(one, list):
            waiting += cast("list[Any]", one)
        elif isinstance(one, str):
            found += len(one) // 100
    return found


def _charge(count: int) -> None:
    left = _left.get()
    if left is not None:
        left[0] -= count
        if left[0] < 0:
            raise TooManySteps


def _counted(name: str, check: Any) -> Any:
    def counting(of: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        _charge(1 + _cost(name, value, instance))
        for error in check(of, value, instance, schema) or ():
            # It quotes what is wrong, and is written anew wherever a keyword tries others.
            _charge(1 + len(error.message) // _MESSAGE_CHARS)
            yield error

    return counting


def _cost(name: str, value: Any, instance: Any) -> int:
    if name == "pattern":
        return len(instance) if isinstance(instance, str) else 0
    if name == "uniqueItems":
        return weight(instance) // 2
    if name in _COMPARING:
        return weight(value) // _LIGHT
    size = len(cast("list[Any]", value)) if isinstance(value, list | dict | str) else 0
    if name in _WALKING and isinstance(instance, list | dict):
        size += len(cast("list[Any]", instance))
    return size // _LIGHT


def _evolve(of: Any, *, schema: Any, **more: Any) -> Any:
    """The validator of a part of a schema: of this class, whatever the part says of itself in `$schema`."""
    if isinstance(schema, dict):
        _charge(1 + len(cast("dict[str, Any]", schema)) // _LIGHT)
    elif schema is False:
        schema = {"not": {}}  # so that its error is counted as any other
    resolver = more.get("_resolver", of._resolver)
    return type(of)(schema, registry=of._registry, _resolver=resolver)


def _pattern(of: Any, text: str, instance: Any, schema: Any) -> Iterator[Any]:
    from jsonschema import ValidationError

    if of.is_type(instance, "string") and _compiled(text).search(instance) is None:
        yield ValidationError(f"{instance!r} does not match {text!r}")


def _unique(of: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[Any]:
    from jsonschema import ValidationError

    if wanted and of.is_type(instance, "array"):
        texts = {json.dumps(_plain(item), sort_keys=True) for item in instance}
        if len(texts) < len(instance):
            yield ValidationError(f"{instance!r} has non-unique elements")


def _plain(value: Any) -> Any:
    """The value with one spelling for equal numbers: 1 and 1.0 are the same, 1 and true are not."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(one) for one in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in cast("dict[str, Any]", value).items()}
    return value


@lru_cache(maxsize=256)
def _compiled(text: str) -> Any:
    import re2  # pyright: ignore[reportMissingTypeStubs]

    options = cast(Any, re2).Options()
    options.log_errors = False  # it would write to stderr
    return cast(Any, re2).compile(text, options=options)
