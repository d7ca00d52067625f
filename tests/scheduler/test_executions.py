"""What is kept of revisions stays within its bounds, whatever their number and size."""

from __future__ import annotations

import pytest

from services.scheduler import executions
from services.scheduler.executions import Kept


def test_what_was_used_last_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executions, "KEPT", 2)
    kept: Kept[str | None] = Kept()
    kept.put(("a", 1), "one", 1)
    kept.put(("b", 1), None, 1)
    assert kept.get(("a", 1)) == ("one",)
    kept.put(("c", 1), "three", 1)
    assert kept.get(("b", 1)) is None
    assert (kept.get(("a", 1)), kept.get(("c", 1))) == (("one",), ("three",))


def test_large_ones_make_room_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executions, "KEPT_CHARS", 100)
    kept: Kept[int] = Kept()
    for number in range(5):
        kept.put(("t", number), number, 40)
    assert [kept.get(("t", number)) for number in range(5)] == [None, None, None, (3,), (4,)]
    for _ in range(5):
        kept.put(("t", 4), 4, 40)  # read by several at once
    assert kept.get(("t", 3)) == (3,)
    kept.put(("t", 9), 9, 1_000)
    assert kept.get(("t", 9)) == (9,)
    assert kept.get(("t", 4)) is None
