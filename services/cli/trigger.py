"""`ql3 trigger`: when tasks run, and which instants were missed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from services.cli.options import Data, Json, Limit, Project, Task

trigger_app = typer.Typer(no_args_is_help=True, help="Triggers: list, add, enable, disable, delete, missed.")

Trigger = Annotated[str, typer.Argument(metavar="TRIGGER", help="The trigger's id.")]


@trigger_app.command("list")
def list_command(
    task: Annotated[str | None, typer.Option("--task", metavar="TASK", help="Only those of this task.")] = None,
    project: Project = "default",
    limit: Limit = 50,
    as_json: Json = False,
    data: Data = None,
) -> None:
    """List triggers with their next instants."""
    from services.cli import output
    from services.cli.client import connect, in_project
    from services.cli.words import say

    with connect(data) as client:
        found = client.items(in_project(project, "/triggers"), limit, task=task)
    if as_json:
        output.document(found)
        return
    output.table(
        [
            say("TRIGGER", "触发器"),
            say("TASK", "任务"),
            say("WHEN", "时间"),
            say("ENABLED", "启用"),
            say("NEXT", "下次"),
            say("MISSED", "错过"),
        ],
        (
            (
                trigger["id"],
                trigger["task_name"],
                described(trigger["spec"]),
                say("yes", "是") if trigger["enabled"] else say("no", "否"),
                output.when(trigger["next_fire_at_ms"]),
                trigger["missed_count"] or "",
            )
            for trigger in found["items"]
        ),
        more=found["next"] is not None,
    )


def described(spec: dict[str, Any]) -> str:
    """A trigger in a few words: its expression and zone, or its kind."""
    what = spec.get("expression") or spec.get("kind", "cron")
    zone = spec.get("timezone", "UTC")
    return str(what) if zone == "UTC" else f"{what} {zone}"


@trigger_app.command("add")
def add_command(
    task: Task,
    expression: Annotated[str, typer.Argument(metavar="EXPR", help="When it runs: a cron expression or a macro.")],
    timezone: Annotated[str, typer.Option("--timezone", metavar="ZONE", help="An IANA zone.")] = "UTC",
    missed: Annotated[
        Literal["skip", "fire_once", "catch_up"] | None,
        typer.Option("--missed", help="What happens with instants that passed unseen; default fire_once."),
    ] = None,
    catch_up: Annotated[
        int | None, typer.Option("--catch-up", metavar="N", help="With --missed catch_up: at most so many.")
    ] = None,
    project: Project = "default",
    as_json: Json = False,
    data: Data = None,
) -> None:
    """Add a trigger to a task."""
    spec: dict[str, Any] = {"kind": "cron", "expression": expression, "timezone": timezone}
    if missed is not None:
        spec["missed"] = missed
    if catch_up is not None:
        spec["catch_up"] = catch_up
    _change("POST", "/triggers", project, as_json, data, {"task": task, "spec": spec})


@trigger_app.command("enable")
def enable_command(trigger: Trigger, project: Project = "default", as_json: Json = False, data: Data = None) -> None:
    """Let a trigger fire."""
    _change("POST", f"{_path(trigger)}/enable", project, as_json, data)


@trigger_app.command("disable")
def disable_command(trigger: Trigger, project: Project = "default", as_json: Json = False, data: Data = None) -> None:
    """Keep a trigger from firing."""
    _change("POST", f"{_path(trigger)}/disable", project, as_json, data)


@trigger_app.command("delete")
def delete_command(trigger: Trigger, project: Project = "default", as_json: Json = False, data: Data = None) -> None:
    """Remove a trigger."""
    _change("DELETE", _path(trigger), project, as_json, data)


def _path(trigger: str) -> str:
    from services.cli.client import segment

    return f"/triggers/{segment(trigger, field='TRIGGER')}"


def _change(method: str, path: str, project: str, as_json: bool, data: Data, body: Any = None) -> None:
    from services.cli import output
    from services.cli.client import connect, in_project
    from services.cli.words import say

    with connect(data) as client:
        found = client.ask(method, in_project(project, path), body={} if body is None else body)
    if as_json:
        output.document(found)
        return
    following = output.when(found["next_fire_at_ms"]) if found["enabled"] and method != "DELETE" else ""
    told = say(f"  next {following}", f"  下次 {following}") if following else ""
    output.line(f"{found['id']}  {described(found['spec'])}{told}")


@trigger_app.command("missed")
def missed_command(
    trigger: Annotated[
        str | None, typer.Option("--trigger", metavar="TRIGGER", help="Only those of this trigger, by its id.")
    ] = None,
    project: Project = "default",
    limit: Limit = 50,
    as_json: Json = False,
    data: Data = None,
) -> None:
    """List instants that did not become a run, and why; newest first."""
    from services.cli import output
    from services.cli.client import connect, in_project
    from services.cli.words import say

    with connect(data) as client:
        found = client.items(in_project(project, "/triggers/missed"), limit, trigger=trigger)
    if as_json:
        output.document(found)
        return
    output.table(
        [
            say("FIRST", "首次"),
            say("LAST", "末次"),
            say("TRIGGER", "触发器"),
            say("CAUSE", "原因"),
            say("COUNT", "次数"),
        ],
        (
            (
                output.when(missed["scheduled_for_ms"]),
                output.when(missed["last_ms"]),
                missed["trigger_id"],
                missed["cause"],
                f"{missed['count']}+" if missed["at_least"] else missed["count"],
            )
            for missed in found["items"]
        ),
        more=found["next"] is not None,
    )
