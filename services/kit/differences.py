"""What differs between two specifications, by path. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Final, cast

import msgspec

from schemas.tasks import Change

SHOWN: Final = 200
_TEXT: Final = 2_000


def differences(before: Any, after: Any) -> tuple[list[Change], bool]:
    """At most `SHOWN` changes from plain data to plain data, and whether there are more."""
    found = list(islice(each_difference(before, after), SHOWN + 1))
    short = [Change(path=one.path, before=_short(one.before), after=_short(one.after)) for one in found[:SHOWN]]
    return short, len(found) > SHOWN


def each_difference(before: Any, after: Any) -> Iterator[Change]:
    """Every change, with whole values."""
    return _walk(before, after, "")


def plain(value: Any) -> Any:
    """A struct as plain data, defaults left out as they are stored."""
    return msgspec.to_builtins(value)


def _walk(before: Any, after: Any, path: str) -> Iterator[Change]:
    if before == after and type(before) is type(after):
        return
    if isinstance(before, dict) and isinstance(after, dict):
        old, new = cast("dict[str, Any]", before), cast("dict[str, Any]", after)
        for name in sorted(old.keys() | new.keys()):
            yield from _walk(old.get(name), new.get(name), f"{path}.{name}" if path else name)
    elif isinstance(before, list) and isinstance(after, list):
        yield from _lists(cast("list[Any]", before), cast("list[Any]", after), path)
    else:
        yield Change(path=path, before=before, after=after)


def _lists(before: list[Any], after: list[Any], path: str) -> Iterator[Change]:
    # Entries with a name, such as variables, are compared by it, so that one more does not shift all others.
    if all(_name_of(item) is not None for item in (*before, *after)):
        old = {str(_name_of(item)): item for item in before}
        new = {str(_name_of(item)): item for item in after}
        for name in sorted(old.keys() | new.keys()):
            yield from _walk(old.get(name), new.get(name), f"{path}.{name}")
        return
    for index in range(max(len(before), len(after))):
        was = before[index] if index < len(before) else None
        now = after[index] if index < len(after) else None
        yield from _walk(was, now, f"{path}[{index}]")


def _name_of(item: Any) -> str | None:
    if not isinstance(item, dict):
        return None
    known = cast("dict[str, Any]", item)
    name = known.get("name", known.get("key"))
    return name if isinstance(name, str) else None


def _short(value: Any) -> Any:
    return f"{value[:_TEXT]}…" if isinstance(value, str) and len(value) > _TEXT else value
