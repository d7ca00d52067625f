"""What people type and what is told back, by table."""

from __future__ import annotations

import pytest

from schemas.errors import REGISTRY, Ql3Error
from services.cli import output, words
from services.cli.options import milliseconds, pair


@pytest.mark.parametrize(
    ("text", "ms"),
    [("30s", 30_000), ("500ms", 500), ("1h30m", 5_400_000), ("2d", 172_800_000), ("1.5s", 1_500), ("0.5m", 30_000)],
)
def test_durations(text: str, ms: int) -> None:
    assert milliseconds(text, "--timeout") == ms


@pytest.mark.parametrize("text", ["", "30", "s", "-1s", "1 s", "1s ", "1y", "1s2", "0s", "0.1ms", "1,5s", "٣s\n"])
def test_what_is_no_duration_is_refused_by_name(text: str) -> None:
    with pytest.raises(Ql3Error) as caught:
        milliseconds(text, "--timeout")
    assert (caught.value.code, caught.value.field) == ("invalid", "--timeout")


def test_pairs() -> None:
    assert pair("A=b=c", "--env") == ("A", "b=c")
    assert pair("A=", "--env") == ("A", "")
    for text in ("s3cret", "=s3cret", ""):
        with pytest.raises(Ql3Error) as caught:
            pair(text, "--env")
        assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("environment", "chinese"),
    [
        ({}, False),
        ({"LANG": "zh_CN.UTF-8"}, True),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C"}, False),
        ({"LANG": "en_US.UTF-8", "QL3_LANG": "zh"}, True),
        ({"LANG": "zh_CN.UTF-8", "QL3_LANG": "en"}, False),
        ({"LANG": "zh_CN.UTF-8", "QL3_LANG": ""}, True),
    ],
)
def test_the_language(environment: dict[str, str], chinese: bool) -> None:
    assert words.chinese(environment) is chinese


def test_every_error_is_told_in_chinese_too() -> None:
    assert set(words.ERRORS_ZH) == set(REGISTRY)


def test_what_was_removed_is_told_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QL3_LANG", "en")
    line = words.error_line(Ql3Error("gone", data={"retired_at_ms": 1_700_000_000_000}))
    assert line.startswith("Retention removed this on 2023-11-1")
    monkeypatch.setenv("QL3_LANG", "zh")
    assert words.error_line(Ql3Error("gone", data={"retired_at_ms": 1_700_000_000_000})).startswith("已按保留策略于")


@pytest.mark.parametrize(
    ("start", "end", "told"),
    [
        (0, 310, "0.31 s"),
        (0, 59_999, "60.00 s"),
        (0, 242_000, "4 min 02 s"),
        (0, 11_100_000, "3 h 05 min"),
        (5, 1, "0.00 s"),
        (None, 1, ""),
    ],
)
def test_how_long(start: int | None, end: int | None, told: str) -> None:
    assert output.duration(start, end) == told


@pytest.mark.parametrize(("count", "told"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**40, "1024.0 GiB")])
def test_sizes(count: int, told: str) -> None:
    assert output.size(count) == told


def test_nothing_steers_the_terminal() -> None:
    assert output.clean("a\x1b]0;x\x07b\tc\nd\x9be\x00") == "a]0;xb c de"
    assert output.clean(None) == ""
    assert output.clean("日志 ✓") == "日志 ✓"
