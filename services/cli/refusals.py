"""How the command ends when something is refused: one line on stderr, and the documented exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager

import typer

from schemas.errors import Ql3Error


def chinese() -> bool:
    """Whether messages are wanted in Chinese (`QL3_LANG`, else the locale)."""
    for name in ("QL3_LANG", "LC_ALL", "LC_MESSAGES", "LANG"):
        if os.environ.get(name):
            return os.environ[name].lower().startswith("zh")
    return False


def say(english: str, mandarin: str) -> str:
    """The text in the language of whoever reads it."""
    return mandarin if chinese() else english


@contextmanager
def refusals() -> Generator[None]:
    """Turn a `Ql3Error` into its sentence on stderr and its exit code."""
    try:
        yield
    except Ql3Error as error:
        print(f"{say('error', '错误')}: {error.sentence}", file=sys.stderr)
        raise typer.Exit(error.kind.exit_code) from error
