"""Boxes for end-to-end tests."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from tests.e2e.box import Box


@pytest.fixture
def box(tmp_path: Path) -> Generator[Box]:
    """A box that is not started yet; everything of it is ended after the test."""
    made = Box(tmp_path)
    try:
        yield made
    finally:
        made.close()
