"""How the command ends when something is refused: one line on stderr, and the documented exit code."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager

import typer

from schemas.errors import Ql3Error
from services.cli.words import chinese, error_line, say

__all__ = ["chinese", "refusals", "refuse", "say"]


def refuse(error: Ql3Error) -> int:
    """Tell an error in one line on stderr; the exit code that it asks for."""
    print(f"{say('error', '错误')}: {error_line(error)}", file=sys.stderr)
    return error.kind.exit_code


@contextmanager
def refusals() -> Generator[None]:
    """Turn a `Ql3Error` into its sentence on stderr and its exit code."""
    try:
        yield
    except Ql3Error as error:
        raise typer.Exit(refuse(error)) from error
