"""`ql3 cron`: the offline tool."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from services.cli.main import app

BERLIN = ["cron", "next", "30 2 * * *", "--timezone", "Europe/Berlin", "--after", "2026-03-28T12:00:00+01:00"]


def test_next_prints_one_instant_a_line() -> None:
    result = CliRunner().invoke(app, [*BERLIN, "--count", "2"])
    assert result.exit_code == 0
    assert result.stdout == "2026-03-29T01:00:00Z\n2026-03-30T00:30:00Z\n"


def test_next_as_json_is_one_list_document() -> None:
    result = CliRunner().invoke(app, [*BERLIN, "--count", "1", "--json"])
    assert json.loads(result.stdout) == {"items": ["2026-03-29T01:00:00Z"], "next": None}


def test_next_takes_the_present_and_five_when_not_told() -> None:
    result = CliRunner().invoke(app, ["cron", "next", "* * * * *"])
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["next", "? * * * *"], "minute: `?`"),
        (["next", "0 0 30 2 *"], "day of month: "),
        (["next", "* * * * *", "--timezone", "Mars/Olympus"], "timezone: "),
        (["next", "* * * * *", "--timezone", "europe/berlin"], "Europe/Berlin"),
        (["next", "* * * * *", "--after", "2026-01-01T00:00:00"], "--after: "),
        (["next", "* * * * *", "--after", "0001-01-01T00:00:00Z"], "--after: "),
        (["next", "* * * * *", "--count", "0"], "--count: "),
        (["next", "* * * * *", "--count", "many"], "--count"),
        (["explain", "61 * * * *"], "minute: "),
        (["explain", "0 0 31 6 *"], "day of month: "),
    ],
)
def test_refused_input_exits_with_2_and_says_where(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["cron", *arguments])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert said in result.stderr


def test_explain_in_both_languages() -> None:
    assert CliRunner().invoke(app, ["cron", "explain", "30 2 * * *"]).stdout == "at 02:30 every day\n"
    assert CliRunner().invoke(app, ["cron", "explain", "30 2 * * *", "--lang", "zh"]).stdout == "每天 02:30\n"
    assert CliRunner(env={"QL3_LANG": "zh"}).invoke(app, ["cron", "explain", "30 2 * * *"]).stdout == "每天 02:30\n"


def test_spread_follows_the_trigger() -> None:
    said = {
        CliRunner().invoke(app, ["cron", "next", "H H * * *", "--trigger", trigger, "--count", "1"]).stdout
        for trigger in ("one", "two", "three", "four")
    }
    assert len(said) > 1


def test_it_starts_no_service() -> None:
    """Neither the bus, a database nor the web is even imported."""
    code = (
        "import sys; from services.cli.main import app\n"
        "try: app(['cron', 'next', '@daily'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "print(sorted({'nats', 'asyncpg', 'aiosqlite', 'litestar', 'uvicorn', 'cryptography'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
