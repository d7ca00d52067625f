"""How the command ends when something is refused: one line on stderr, and the documented exit code.

A service names a field as its request has it; people typed options. `as_typed` is the one place that knows which option
became which field.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Final

import typer

from schemas.errors import Ql3Error
from services.cli.words import chinese, error_line, say

__all__ = ["as_typed", "chinese", "refusals", "refuse", "say"]

_TRIGGER: Final = (
    (r"spec\.timezone", "--timezone"),
    (r"spec\.missed", "--missed"),
    (r"spec\.catch_up", "--catch-up"),
    (r"spec\.grace_ms", "--late"),
    (r"spec\.jitter_ms", "--jitter"),
    (r"spec\.start_at_ms", "--start"),
    (r"spec\.end_at_ms", "--end"),
    (r"spec\.pause_until_ms", "--pause-until"),
    (r"spec\.exclude(\[\d+\])?", "--exclude"),
    (r"spec\.exclude_calendar", "--exclude-calendar"),
    (r"spec\.inputs(?:\.(?P<inner>.+))?", "--input"),
)
_ADDED: Final = (*_TRIGGER, (r"spec\.after_task", "OTHER"), (r"task", "TASK"))
_TASK: Final = (
    (r"spec\.execution\.command(\[\d+\])?", "COMMAND"),
    (r"spec\.execution\.timeout_ms", "--timeout"),
    (r"spec\.execution\.grace_ms", "--grace"),
    (r"spec\.execution\.working_directory", "--workdir"),
    (r"spec\.execution\.environment(?:\.(?P<inner>\w+))?.*", "--env"),
    (r"spec\.terms\.retry\.max_attempts", "--max-attempts"),
    (r"spec\.terms\.retry\.safety", "--safety"),
    (r"spec\.terms\.overlap\.limit", "--overlap-limit"),
    (r"spec\.terms\.overlap(\..+)?", "--overlap"),
    (r"spec\.terms\.concurrency.*", "--concurrency"),
    (r"spec\.terms\.placement\.executor", "--executor"),
    (r"spec\.execution\.runtime\.requirements.*", "--requirement"),
    (r"spec\.execution\.runtime\.script", "--script"),
    (r"spec\.execution\.runtime(\..+)?", "--runtime"),
    (r"spec\.execution\.image", "--image"),
    (r"spec\.execution\.log_quota_bytes", "--log-quota"),
    (r"spec\.execution\.isolation\.user", "--run-as"),
    (r"spec\.execution\.isolation\.umask", "--umask"),
    (r"spec\.execution\.isolation\.nice", "--nice"),
    (r"spec\.execution\.isolation\.memory_bytes", "--memory"),
    (r"spec\.execution\.isolation\.cpu_percent", "--cpu"),
    (r"spec\.execution\.isolation\.processes", "--processes"),
    (r"spec\.execution\.isolation\.open_files", "--open-files"),
    (r"spec\.execution\.isolation\.file_bytes", "--file-size"),
    (r"spec\.execution\.isolation\.cpu_seconds", "--cpu-time"),
    (r"spec\.terms\.labels.*", "--label"),
    (r"spec\.title", "--title"),
    (r"spec\.folder", "--folder"),
    (r"spec\.notes", "--notes"),
    (r"spec\.parameters(?:\.(?P<inner>.+))?", "--parameters"),
)
_TYPED: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "task create": (
        (r"name", "NAME"),
        (r"triggers\[(?P<number>\d+)\]\.expression(?:\.(?P<inner>.+))?", "--cron"),
        (r"triggers\[\d+\]\.timezone", "--timezone"),
        (r"triggers\[(?P<number>\d+)\]\.inputs", "--cron"),
        *_TASK,
    ),
    "task update": _TASK,
    "task diff": ((r"before|after", "REVISION"),),
    "task restore": ((r"revision", "REVISION"),),
    "task list": ((r"label", "--label"), (r"folder", "--folder")),
    "task run": (
        (r"inputs(?:\.(?P<inner>.+))?", "--input"),
        (r"priority", "--priority"),
        (r"trigger", "--trigger"),
        (r"task", "TASK"),
    ),
    "trigger add": ((r"spec\.expression(?:\.(?P<inner>.+))?", "EXPR"), *_ADDED),
    "trigger set": ((r"spec\.expression(?:\.(?P<inner>.+))?", "--cron"), (r"trigger", "TRIGGER"), *_TRIGGER),
    "trigger after": _ADDED,
    "trigger boot": _ADDED,
    "trigger manual": _ADDED,
    "trigger webhook": _ADDED,
    "trigger backfill": (
        (r"from_ms", "--from"),
        (r"until_ms", "--until"),
        (r"every_ms", "--every"),
        (r"trigger", "TRIGGER"),
    ),
}
"""By command: the fields of its request, and what people type for them."""


def as_typed(error: Ql3Error, arguments: Sequence[str]) -> Ql3Error:
    """The same refusal with its field as it was typed: `--cron (day of month)`, `--cron 2` of several, `--timeout`."""
    for pattern, typed in _TYPED.get(" ".join(arguments[:2]), ()) if error.field else ():
        found = re.fullmatch(pattern, error.field or "")
        if found is None:
            continue
        parts = found.groupdict()
        number = parts.get("number")
        if number is not None and sum(one.partition("=")[0] == typed for one in arguments) > 1:
            typed += f" {int(number) + 1}"
        inner = parts.get("inner")
        if inner and inner != "expression":
            typed += f" ({inner})"
        return Ql3Error(error.code, error.detail, field=typed, data=error.data)
    return error


def refuse(error: Ql3Error, arguments: Sequence[str] = ()) -> int:
    """Tell an error in one line on stderr; the exit code that it asks for. `arguments` are those of the command."""
    print(f"{say('error', '错误')}: {error_line(as_typed(error, arguments))}", file=sys.stderr)
    return error.kind.exit_code


@contextmanager
def refusals() -> Generator[None]:
    """Turn a `Ql3Error` into its sentence on stderr and its exit code."""
    try:
        yield
    except Ql3Error as error:
        raise typer.Exit(refuse(error)) from error
