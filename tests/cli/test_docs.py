"""Every command, argument and option has a help, and docs/cli.md is what the command says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import cli

ROOT = Path(__file__).parent.parent.parent
COMMANDS = dict(cli.commands())


@pytest.mark.parametrize("name", COMMANDS)
def test_everything_has_a_help(name: str) -> None:
    command = COMMANDS[name]
    assert command.help, f"{name} has no help"
    for part in command.params:
        assert part.help, f"{name} {part.name} has no help"


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "cli.md").read_text() == cli.render(), "run `just docs`"
