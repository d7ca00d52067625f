"""What the options of `trigger add` and `trigger set` say about a trigger, written into its spec."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from services.cli.options import milliseconds, pair

CALENDAR_BYTES: Final = 262_144
_NONE: Final = "none"

Timezone = Annotated[str | None, typer.Option("--timezone", metavar="ZONE", help="An IANA zone; default UTC.")]
Missed = Annotated[
    Literal["skip", "fire_once", "catch_up"] | None,
    typer.Option("--missed", help="What happens with instants that passed unseen; default fire_once."),
]
CatchUp = Annotated[
    int | None, typer.Option("--catch-up", metavar="N", help="With --missed catch_up: at most so many.")
]
Late = Annotated[str | None, typer.Option("--late", metavar="DURATION", help="How late is still on time; default 30s.")]
Jitter = Annotated[
    str | None, typer.Option("--jitter", metavar="DURATION", help="Start each fire up to so much later.")
]
Start = Annotated[str | None, typer.Option("--start", metavar="INSTANT", help="Not before; RFC 3339, or none.")]
End = Annotated[str | None, typer.Option("--end", metavar="INSTANT", help="Not after; RFC 3339, or none.")]
PauseUntil = Annotated[
    str | None, typer.Option("--pause-until", metavar="INSTANT", help="Begin again then by itself; RFC 3339, or none.")
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        "--exclude", metavar="DAYS", help="2026-12-25, 12-25, 2026-12-24/2027-01-02, holidays:DE-BY; or none."
    ),
]
ExcludeCalendar = Annotated[
    Path | None, typer.Option("--exclude-calendar", metavar="FILE", help="An iCalendar file of days to leave out.")
]
Inputs = Annotated[
    list[str] | None,
    typer.Option("--input", metavar="K=V", help="An input of each run; V is JSON where it can be read as JSON."),
]


def write_trigger(
    spec: dict[str, Any],
    *,
    timezone: str | None = None,
    missed: str | None = None,
    catch_up: int | None = None,
    late: str | None = None,
    jitter: str | None = None,
    start: str | None = None,
    end: str | None = None,
    pause_until: str | None = None,
    exclude: list[str] | None = None,
    exclude_calendar: Path | None = None,
    inputs: list[str] | None = None,
) -> dict[str, Any]:
    """The spec with what was given; what was not given stays as it is. Raises `invalid`, naming the option."""
    written = dict(spec)
    if timezone is not None:
        written["timezone"] = timezone
    if missed is not None:
        written["missed"] = missed
        written["catch_up"] = None
    if catch_up is not None:
        written["catch_up"] = catch_up
    for name, text, option in (("grace_ms", late, "--late"), ("jitter_ms", jitter, "--jitter")):
        if text is not None:
            written[name] = 0 if text in (_NONE, "0") else milliseconds(text, option)
    for name, text, option in (
        ("start_at_ms", start, "--start"),
        ("end_at_ms", end, "--end"),
        ("pause_until_ms", pause_until, "--pause-until"),
    ):
        if text is not None:
            written[name] = None if text == _NONE else instant(text, option)
    if exclude is not None:
        written["exclude"] = [days for days in exclude if days != _NONE]
    if exclude_calendar is not None:
        written["exclude_calendar"] = _calendar(exclude_calendar)
    if inputs:
        written["inputs"] = {**(written.get("inputs") or {}), **dict(map(an_input, inputs))}
    return written


def an_input(text: str) -> tuple[str, Any]:
    """`NAME=VALUE`, the value as JSON where it can be read as JSON, else as text."""
    name, value = pair(text, "--input")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def instant(text: str, field: str) -> int:
    """An instant as RFC 3339 in milliseconds UTC. Raises `invalid`, naming the field."""
    from schemas.errors import Ql3Error
    from services.scheduler.cron.rfc3339 import read_instant

    try:
        return read_instant(text)
    except ValueError as error:
        raise Ql3Error("invalid", f"{error}.", field=field) from error


def _calendar(path: Path) -> str:
    from schemas.errors import Ql3Error

    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(CALENDAR_BYTES + 1)
    except OSError as error:
        raise Ql3Error("invalid", f"It cannot be read ({error.strerror}).", field="--exclude-calendar") from error
    except UnicodeDecodeError:
        raise Ql3Error("invalid", "It is not text.", field="--exclude-calendar") from None
    if len(text) > CALENDAR_BYTES:
        raise Ql3Error("too_large", f"A calendar has at most {CALENDAR_BYTES} bytes.", field="--exclude-calendar")
    return text
