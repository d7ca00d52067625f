"""`ql3 apply` and `ql3 export`: a folder of files as the source of truth about tasks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from services.cli.options import Data, Json, Project

_TASKS = 64
_BYTES = 400 * 1024


def register(app: typer.Typer) -> None:
    """Add the commands to `ql3`."""
    app.command("apply")(apply_command)
    app.command("export")(export_command)


def apply_command(
    file: Annotated[
        list[Path], typer.Option("-f", "--file", metavar="PATH", help="A YAML file or a folder of them; - reads stdin.")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell what would change.")] = False,
    prune: Annotated[bool, typer.Option("--prune", help="Delete the project's tasks that no file names.")] = False,
    project: Project = "default",
    as_json: Json = False,
    data: Data = None,
) -> None:
    """Bring tasks and their triggers to what files say. What is so already is not touched."""
    from services.cli import output
    from services.cli.client import connect, in_project, segment
    from services.cli.taskfiles import plain, read
    from services.cli.words import say

    tasks = [plain(task) for task in read(file)]
    outcomes: list[dict[str, Any]] = []
    with connect(data) as client:
        for part in _parts(tasks):
            answer = client.post(in_project(project, "/apply"), {"tasks": part, "dry_run": dry_run})
            outcomes += answer["items"]
        if prune:
            named = {task["name"] for task in tasks}
            for task in client.items(in_project(project, "/tasks"), 100_000)["items"]:
                if task["name"] in named:
                    continue
                if not dry_run:
                    client.delete(in_project(project, f"/tasks/{segment(task['name'], field='TASK')}"))
                outcomes.append({"name": task["name"], "action": "deleted", "changes": [], "warnings": []})
    if as_json:
        output.document({"items": outcomes, "next": None, "dry_run": dry_run})
        return
    for outcome in outcomes:
        _tell(outcome)
    changed = sum(outcome["action"] != "unchanged" for outcome in outcomes)
    same = len(outcomes) - changed
    if dry_run:
        output.line(say(f"{changed} would change, {same} are so already", f"{changed} 项将更改，{same} 项无变化"))
    else:
        output.line(say(f"{changed} changed, {same} were so already", f"{changed} 项已更改，{same} 项无变化"))


def _parts(tasks: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    part: list[dict[str, Any]] = []
    size = 0
    for task in tasks:
        more = len(json.dumps(task, ensure_ascii=False).encode())
        if part and (len(part) == _TASKS or size + more > _BYTES):
            yield part
            part, size = [], 0
        part.append(task)
        size += more
    if part:
        yield part


def _tell(outcome: dict[str, Any]) -> None:
    from services.cli import output
    from services.cli.words import say

    words = {
        "created": say("created", "新建"),
        "changed": say("changed", "更改"),
        "unchanged": say("unchanged", "无变化"),
        "deleted": say("deleted", "删除"),
    }
    for warning in outcome["warnings"]:
        output.note(output.clean(f"{outcome['name']}: {warning}"))
    if outcome["action"] == "unchanged":
        return
    output.line(f"{words[outcome['action']]}  {outcome['name']}")
    if outcome["action"] == "changed":
        tell_changes(outcome["changes"])


def tell_changes(changes: list[dict[str, Any]], *, at_most: int | None = 160) -> None:
    """Differences, one or two lines each, of so many characters of each value."""
    from services.cli import output

    for change in changes:
        for sign, value in (("-", change["before"]), ("+", change["after"])):
            if value is not None:
                text = output.clean(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
                cut = "" if at_most is None or len(text) <= at_most else "…"
                output.line(f"  {sign} {change['path']}: {text[:at_most]}{cut}")


def export_command(
    task: Annotated[list[str] | None, typer.Argument(metavar="[TASK]...", help="Tasks by name; all when none.")] = None,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="DIR", help="Write one file a task there instead of to stdout.")
    ] = None,
    project: Project = "default",
    data: Data = None,
) -> None:
    """Write tasks with their triggers as YAML, as `ql3 apply` reads them."""
    import sys

    from schemas.errors import Ql3Error
    from services.cli import output
    from services.cli.client import connect, in_project, segment
    from services.cli.taskfiles import document
    from services.cli.words import say

    with connect(data) as client:
        if task:
            path = in_project(project, "/tasks/")
            found = [client.get(f"{path}{segment(name, field='TASK')}") for name in task]
        else:
            found = client.items(in_project(project, "/tasks"), 100_000)["items"]
    documents = [(one["name"], *document(one)) for one in found]
    for name, _, left_out in documents:
        if left_out:
            said = say(f"{name}: {left_out} webhook left out", f"{name}：未包含 {left_out} 个 webhook")
            output.note(said)
    if to is None:
        sys.stdout.write("---\n".join(text for _, text, _ in documents))
        return
    try:
        to.mkdir(parents=True, exist_ok=True)
        for name, text, _ in documents:
            draft = to / f".{name}.yaml.new"
            draft.write_text(text, "utf-8")
            draft.replace(to / f"{name}.yaml")
    except OSError as error:
        raise Ql3Error("invalid", f"The folder cannot be written: {error.strerror}.", field="--to") from error
    output.line(say(f"{len(documents)} tasks written to {to}", f"已将 {len(documents)} 个任务写入 {to}"))
