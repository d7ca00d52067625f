"""Tests that a page of the documentation names: `test_file.py::test_name`, or `::test_name` of the file named last."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
_NAMED = re.compile(r"`(?:tests/)?((?:[a-z0-9_]+/)*test_\w+\.py)?::(test_\w+)`")


@cache
def _defined(path: Path) -> frozenset[str]:
    return frozenset(re.findall(r"^ *(?:async )?def (test_\w+)\(", path.read_text(), re.MULTILINE))


def named(text: str) -> list[tuple[str, str]]:
    """File and name of each test that a text names, in its order."""
    found: list[tuple[str, str]] = []
    file = ""
    for given, name in _NAMED.findall(text):
        file = given or file
        found.append((file, name))
    return found


def missing(text: str, room: str = "") -> list[str]:
    """Those that do not exist. A file without a folder is one of `room`."""
    absent: list[str] = []
    for file, name in named(text):
        path = TESTS / file if "/" in file else TESTS / room / file
        if not path.is_file() or name not in _defined(path):
            absent.append(f"{file}::{name}")
    return absent
