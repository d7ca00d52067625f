"""What the command prints: the API's own JSON, or tables and lines for people."""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from services.cli.words import say

_CONTROL = dict.fromkeys((*range(9), *range(11, 32), 127, *range(128, 160))) | {9: " ", 10: " "}


def document(value: Any) -> None:
    """One JSON document on standard output."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, indent=2) + "\n")


def line(text: str) -> None:
    """One line on standard output."""
    sys.stdout.write(text + "\n")


def note(text: str) -> None:
    """One line for people beside the result, on standard error."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def clean(value: Any) -> str:
    """Text from elsewhere on one line, without what would steer a terminal."""
    return "" if value is None else str(value).translate(_CONTROL)


def when(at_ms: int | None) -> str:
    """A time in the local zone, to the second."""
    if at_ms is None:
        return ""
    return datetime.fromtimestamp(at_ms / 1000, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def duration(start_ms: int | None, end_ms: int | None) -> str:
    """How long something took: `0.31 s`, `4 min 02 s`, `3 h 05 min`."""
    if start_ms is None or end_ms is None:
        return ""
    seconds = max(0, end_ms - start_ms) / 1000
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def days(ms: int) -> str:
    """An age for people: `14 d`, `1 d 6 h`."""
    whole, rest = divmod(ms // 3_600_000, 24)
    return " ".join(part for part in (f"{whole} d" if whole else "", f"{rest} h" if rest or not whole else "") if part)


def size(count: int) -> str:
    """Bytes for people."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024 or unit == "GiB":
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    raise AssertionError


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, more: bool = False) -> None:
    """A table on standard output; plain columns that never wrap where it is no terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    terminal = sys.stdout.isatty()
    console = Console(file=sys.stdout, width=None if terminal else 10_000, highlight=False)
    drawn = Table(box=box.SIMPLE_HEAD if terminal else None, show_edge=False, pad_edge=False)
    for column in columns:
        drawn.add_column(column, overflow="fold" if terminal else "ignore", no_wrap=not terminal)
    count = 0
    for row in rows:
        drawn.add_row(*(Text(clean(cell)) for cell in row))
        count += 1
    if count:
        console.print(drawn)
    else:
        note(say("There is nothing.", "没有内容。"))
    if more:
        note(say("There are more; see --limit.", "还有更多；见 --limit。"))


def facts(pairs: Iterable[tuple[str, Any]]) -> None:
    """Names and values of one object, one a line; absent ones are left out."""
    told = [(name, clean(value)) for name, value in pairs if value not in (None, "")]
    width = max((_width(name) for name, _ in told), default=0)
    for name, value in told:
        line(f"{name}{' ' * (width - _width(name))}  {value}")


def _width(text: str) -> int:
    """The columns that a terminal takes for it: Chinese takes two a character."""
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)
