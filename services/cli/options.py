"""Options that many commands have, and the reading of what people type into them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from schemas.errors import Ql3Error

Data = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", help="The data folder of `ql3 up`; default QL3_DATA, else ./ql3-data."),
]
Project = Annotated[
    str, typer.Option("--project", metavar="PROJECT", envvar="QL3_PROJECT", help="The project.", show_envvar=True)
]
Json = Annotated[bool, typer.Option("--json", help="Print the API's own object as one JSON document.")]
Limit = Annotated[int, typer.Option("--limit", metavar="N", min=1, max=100_000, help="At most so many items.")]
Task = Annotated[str, typer.Argument(metavar="TASK", help="The task's name or id.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="The run's id.")]

_UNITS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h|d))+")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGT])?(?:i?B)?", re.IGNORECASE)
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


def milliseconds(text: str, field: str) -> int:
    """`30s`, `1h30m`, `500ms` or `2d` in milliseconds. Raises `invalid`, naming the field."""
    if _DURATION.fullmatch(text) is None:
        raise Ql3Error("invalid", f"{text!r} is not a duration; write 30s, 5m, 2h or 1h30m.", field=field)
    total = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))
    if total < 1:
        raise Ql3Error("invalid", "The duration is less than a millisecond.", field=field)
    return round(total)


def size(text: str, field: str) -> int:
    """`512`, `64K`, `1.5G` (also with `iB`) in bytes, by powers of 1024. Raises `invalid`, naming the field."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise Ql3Error("invalid", f"{text!r} is not a size; write 512K, 64M or 2G.", field=field)
    return round(float(found[1]) * 1024 ** " KMGT".index((found[2] or " ").upper()))


def pair(text: str, field: str) -> tuple[str, str]:
    """`NAME=VALUE`; the value may be empty and may hold more equals signs. Raises `invalid`, naming the field."""
    name, found, value = text.partition("=")
    if not found or not name:
        # Not echoed: it may be a value that was put in the wrong place.
        raise Ql3Error("invalid", "Write NAME=VALUE.", field=field)
    return name, value
