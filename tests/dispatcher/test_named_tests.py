"""docs/traps.md: each trap names a test, and the test exists."""

from __future__ import annotations

from pathlib import Path

from tests.named_tests import missing, named

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "traps.md").read_text()


def test_each_trap_names_a_test() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| Trap ")]
    assert len(rows) > 60
    assert [row for row in rows if not named(row)] == []


def test_every_test_that_is_named_exists() -> None:
    assert missing(PAGE) == []
