"""Writes docs/cli.md from the command's own help: `python -m docs.cli`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from services.cli.main import app

HEAD = """# The command

`--json` prints the API's own object, or a list `{"items": […], "next": …}`, as one JSON document with the field names
of the API (`/api/v3/schema`). Everything else is for people, in English or, with `QL3_LANG=zh` or a Chinese locale, in
Chinese; errors are one line on standard error that names the field.

| Exit code | Meaning |
|---|---|
| 0 | success; with `--wait` or `--follow` of `task run` and `run retry`: the run succeeded |
| 1 | the run failed, or something of ours did |
| 2 | usage, or refused input |
| 3 | the run was cancelled |
| 4 | the run timed out |
| 5 | the service cannot be reached |
| 6 | denied |
| 130 | interrupted |

| Variable | Meaning |
|---|---|
| `QL3_DATA` | the data folder; default of every `--data` |
| `QL3_URL`, `QL3_TOKEN` | the address of a gateway and a credential for it, instead of a data folder |
| `QL3_PROJECT` | the project; default of every `--project` |
| `QL3_LANG` | `en` or `zh`; before `LC_ALL`, `LC_MESSAGES` and `LANG` |
"""


def commands() -> Iterator[tuple[str, Any]]:
    """Every command with its full name, groups left out, in the order of the help."""
    yield from _walk("ql3", get_command(app))


def _walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    children: dict[str, Any] | None = getattr(command, "commands", None)
    if children is None:
        yield name, command
        return
    for child in children:
        yield from _walk(f"{name} {child}", children[child])


def render() -> str:
    """The whole page."""
    return HEAD + "".join(_section(name, command) for name, command in commands())


def _section(name: str, command: Any) -> str:
    arguments = [part for part in command.params if part.param_type_name == "argument"]
    options = [part for part in command.params if part.param_type_name == "option"]
    usage = " ".join([name, *(f"[{_name(part)}]" if not part.required else _name(part) for part in arguments)])
    if options:
        usage += " [OPTIONS]"
    lines = [f"\n## {name}\n", inspect.cleandoc(command.help or ""), f"\n```\n{usage}\n```\n"]
    if arguments or options:
        lines.append("| | |\n|---|---|")
        lines += [f"| `{_name(part)}` | {_cell(part.help)} |" for part in arguments]
        lines += [f"| `{_flags(part)}` | {_cell(part.help)} |" for part in options]
    return "\n".join(lines) + "\n"


def _name(part: Any) -> str:
    return part.metavar or part.name.upper()


def _flags(part: Any) -> str:
    flags = ", ".join([*part.opts, *part.secondary_opts])
    if part.is_flag:
        return flags
    choices: list[str] = list(getattr(part.type, "choices", ()))
    return f"{flags} {part.metavar or '|'.join(choices) or part.name.upper()}".replace("|", "\\|")


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    print(render(), end="")
