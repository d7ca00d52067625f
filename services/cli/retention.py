"""`ql3 retention`: how long logs and ended runs are kept, and what is kept whatever its age."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from services.cli.options import Data, Json, Limit, Project

retention_app = typer.Typer(no_args_is_help=True, help="Retention: show, set, holds, hold, release.")

HeldRun = Annotated[
    str | None, typer.Argument(metavar="RUN", help="A run's id; without it, everything of the project.")
]


@retention_app.command("show")
def show_command(project: Project = "default", as_json: Json = False, data: Data = None) -> None:
    """Show how long a project keeps logs and ended runs."""
    from services.cli.client import connect, in_project

    with connect(data) as client:
        _print(client.get(in_project(project, "/retention")), as_json)


@retention_app.command("set")
def set_command(
    logs: Annotated[
        str | None, typer.Option("--logs", metavar="DURATION", help="How long logs are kept, such as 14d.")
    ] = None,
    runs: Annotated[
        str | None, typer.Option("--runs", metavar="DURATION", help="How long ended runs are kept, such as 90d.")
    ] = None,
    project: Project = "default",
    as_json: Json = False,
    data: Data = None,
) -> None:
    """Change how long a project keeps logs and ended runs; what is not named stays."""
    from services.cli.client import connect, in_project
    from services.cli.options import milliseconds

    with connect(data) as client:
        path = in_project(project, "/retention")
        current = client.get(path)
        body = {
            "logs_ms": current["logs_ms"] if logs is None else milliseconds(logs, "--logs"),
            "runs_ms": current["runs_ms"] if runs is None else milliseconds(runs, "--runs"),
            "expected_version": current["version"],
        }
        _print(client.put(path, body), as_json)


def _print(policy: dict[str, Any], as_json: bool) -> None:
    from services.cli import output
    from services.cli.words import say

    if as_json:
        output.document(policy)
        return
    output.facts(
        [
            (say("logs", "日志"), output.days(policy["logs_ms"])),
            (say("runs", "运行"), output.days(policy["runs_ms"])),
            (say("changed", "修改"), output.when(policy["updated_at_ms"] or None) or say("never", "从未")),
        ]
    )


@retention_app.command("holds")
def holds_command(project: Project = "default", limit: Limit = 50, as_json: Json = False, data: Data = None) -> None:
    """List what is kept whatever its age."""
    from services.cli import output
    from services.cli.client import connect, in_project
    from services.cli.words import say

    with connect(data) as client:
        found = client.items(in_project(project, "/holds"), limit)
    if as_json:
        output.document(found)
        return
    output.table(
        [say("RUN", "运行"), say("HELD BY", "由"), say("SINCE", "自"), say("REASON", "原因")],
        (
            (
                hold["run_id"] or say("(the whole project)", "(整个项目)"),
                hold["held_by"],
                output.when(hold["held_at_ms"]),
                hold["reason"],
            )
            for hold in found["items"]
        ),
        more=found["next"] is not None,
    )


@retention_app.command("hold")
def hold_command(
    run: HeldRun = None,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why it is kept.")] = "",
    project: Project = "default",
    as_json: Json = False,
    data: Data = None,
) -> None:
    """Keep a run with its logs, or everything of a project, whatever its age."""
    _change("PUT", run, project, {"reason": reason}, as_json, data)


@retention_app.command("release")
def release_command(
    run: HeldRun = None, project: Project = "default", as_json: Json = False, data: Data = None
) -> None:
    """End a hold; what is old may go from now on."""
    _change("DELETE", run, project, {}, as_json, data)


def _change(method: str, run: str | None, project: str, body: Any, as_json: bool, data: Data) -> None:
    from services.cli import output
    from services.cli.client import connect, in_project, segment
    from services.cli.words import say

    path = in_project(project, "/hold" if run is None else f"/runs/{segment(run, field='RUN')}/hold")
    with connect(data) as client:
        hold = client.ask(method, path, body=body)
    if as_json:
        output.document(hold)
        return
    what = run or project
    output.line(
        say(f"{what}: held", f"{what}:已保留") if method == "PUT" else say(f"{what}: released", f"{what}:已解除")
    )
