"""docs/state-machines.md cannot rot: its tests exist, its arrows are the rules' arrows."""

from __future__ import annotations

import re
from pathlib import Path

from services.dispatcher.records import ATTEMPT_EDGES, RUN_EDGES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "state-machines.md").read_text()


def arrows(heading: str) -> set[tuple[str, str]]:
    section = PAGE.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    found = re.findall(r"^    (\w+) --> (\w+)", section, re.MULTILINE)
    return {(before, after) for before, after in found}


def edges(table: dict[str, frozenset[str]]) -> set[tuple[str, str]]:
    return {(before, after) for before, afters in table.items() for after in afters}


def test_the_drawn_run_is_the_ruled_run() -> None:
    assert arrows("Run") == edges(RUN_EDGES)


def test_the_drawn_attempt_is_the_ruled_attempt() -> None:
    assert arrows("Attempt") == edges(ATTEMPT_EDGES)


def test_every_test_that_the_page_names_exists() -> None:
    here = Path(__file__).parent
    named = re.findall(r"`(test_\w+\.py)?::(\w+)`|`(test_\w+\.py)::(\w+)`", PAGE)
    assert len(named) > 40
    file = ""
    for first, name, _, _ in named:
        file = first or file
        text = (here / file).read_text()
        assert f"def {name}(" in text, f"{file}::{name}"
