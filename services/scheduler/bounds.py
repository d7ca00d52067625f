"""Bounds of checking inputs against a schema that somebody else wrote: neither may take the scheduler's time for long.

A step is one keyword at one place. Expressions are matched in linear time (RE2), and what could only be bounded by
walking a second time, outside of these steps, is not read.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache
from typing import Any, Final, cast

from schemas.errors import Ql3Error

STEPS: Final = 50_000
UNIQUE_ITEMS: Final = 500
"""Items that cannot be ordered are compared each with each."""
PATTERN_CHARS: Final = 1_000
NOT_READ: Final = frozenset({"patternProperties", "unevaluatedProperties", "unevaluatedItems"})

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
    own = {**plain, "pattern": _pattern, "uniqueItems": _unique(plain["uniqueItems"])}
    counted = {name: _counted(check) for name, check in own.items() if name not in NOT_READ}
    return cast(Any, validators).extend(Draft202012Validator, counted)


def _counted(check: Any) -> Any:
    def counting(of: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        left = _left.get()
        if left is not None:
            left[0] -= 1
            if left[0] < 0:
                raise TooManySteps
        yield from check(of, value, instance, schema) or ()

    return counting


def _pattern(of: Any, text: str, instance: Any, schema: Any) -> Iterator[Any]:
    from jsonschema import ValidationError

    if of.is_type(instance, "string") and _compiled(text).search(instance) is None:
        yield ValidationError(f"{instance!r} does not match {text!r}")


def _unique(plain: Any) -> Any:
    def unique(of: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[Any]:
        from jsonschema import ValidationError

        if wanted and of.is_type(instance, "array") and len(instance) > UNIQUE_ITEMS:
            yield ValidationError(f"more than {UNIQUE_ITEMS} items are not compared with each other")
            return
        yield from plain(of, wanted, instance, schema) or ()

    return unique


@lru_cache(maxsize=256)
def _compiled(text: str) -> Any:
    import re2  # pyright: ignore[reportMissingTypeStubs]

    options = cast(Any, re2).Options()
    options.log_errors = False  # it would write to stderr
    return cast(Any, re2).compile(text, options=options)
