"""`ql3 trigger`: when tasks run, and which instants were missed."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from services.cli.options import Data, Json, Limit, Project, Task
from services.cli.triggerspec import (
    CatchUp,
    End,
    Exclude,
    ExcludeCalendar,
    Inputs,
    Jitter,
    Late,
    Missed,
    PauseUntil,
    Start,
    Timezone,
    write_trigger,
)

trigger_app = typer.Typer(no_args_is_help=True, help="Triggers: list, add, set, enable, disable, delete, missed.")

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
    """A trigger in a few words: its expression and zone, its instant, what it follows, or its kind."""
    kind = spec.get("kind", "cron")
    what = spec.get("expression") or kind
    if kind == "once":
        from services.cli.output import when

        return f"once {when(spec.get('at_ms'))}"
    if kind == "after_task":
        return f"after {spec.get('after_task')} ({spec.get('after_on', 'success')})"
    zone = spec.get("timezone", "UTC")
    return str(what) if zone == "UTC" else f"{what} {zone}"


@trigger_app.command("add")
def add_command(
    task: Task,
    expression: Annotated[str, typer.Argument(metavar="EXPR", help="When it runs: a cron expression or a macro.")],
    timezone: Timezone = None,
    missed: Missed = None,
    catch_up: CatchUp = None,
    late: Late = None,
    jitter: Jitter = None,
    start: Start = None,
    end: End = None,
    pause_until: PauseUntil = None,
    exclude: Exclude = None,
    exclude_calendar: ExcludeCalendar = None,
    inputs: Inputs = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Save nothing; tell what it would do.")] = False,
    project: Project = "default",
    as_json: Json = False,
    data: Data = None,
) -> None:
    """Add a trigger to a task."""
    spec = write_trigger(
        {"kind": "cron", "expression": expression},
        timezone=timezone,
        missed=missed,
        catch_up=catch_up,
        late=late,
        jitter=jitter,
        start=start,
        end=end,
        pause_until=pause_until,
        exclude=exclude,
        exclude_calendar=exclude_calendar,
        inputs=inputs,
    )
    if dry_run:
        _preview(spec, project, as_json, data)
        return
    _change("POST", "/triggers", project, as_json, data, {"task": task, "spec": spec})


def _preview(spec: dict[str, Any], project: str, as_json: bool, data: Data) -> None:
    from services.cli import output
    from services.cli.client import connect, in_project
    from services.cli.words import chinese

    with connect(data) as client:
        found = client.post(in_project(project, "/triggers/preview"), {"spec": spec})
    if as_json:
        output.document(found)
        return
    words = found["chinese"] if chinese() else found["english"]
    output.line(words or described(found["spec"]))
    for at_ms in found["instants"]:
        output.line(output.when(at_ms))


@trigger_app.command("set")
def set_command(
    trigger: Trigger,
    expression: Annotated[
        str | None, typer.Option("--cron", metavar="EXPR", help="Another cron expression or macro.")
    ] = None,
    timezone: Timezone = None,
    missed: Missed = None,
    catch_up: CatchUp = None,
    late: Late = None,
    jitter: Jitter = None,
    start: Start = None,
    end: End = None,
    pause_until: PauseUntil = None,
    exclude: Exclude = None,
    exclude_calendar: ExcludeCalendar = None,
    inputs: Inputs = None,
    project: Project = "default",
    as_json: Json = False,
    data: Data = None,
) -> None:
    """Change a trigger: what is given changes, the rest stays. Its next instant is after the change."""
    from schemas.errors import Ql3Error
    from services.cli.client import connect, in_project

    with connect(data) as client:
        path = in_project(project, _path(trigger))
        listed = client.get(in_project(project, "/triggers"), trigger=trigger)["items"]
        if not listed:
            raise Ql3Error("not_found", "There is no such trigger in this project.", field="TRIGGER")
        current: dict[str, Any] = listed[0]
        spec = write_trigger(
            current["spec"],
            timezone=timezone,
            missed=missed,
            catch_up=catch_up,
            late=late,
            jitter=jitter,
            start=start,
            end=end,
            pause_until=pause_until,
            exclude=exclude,
            exclude_calendar=exclude_calendar,
            inputs=inputs,
        )
        if expression is not None:
            # The expression says the kind itself: `@every 5m` is an interval.
            spec |= {"kind": "cron", "expression": expression, "at_ms": None}
        if spec == current["spec"]:
            raise Ql3Error("invalid", "Nothing would change: name what is to be another way.", field="TRIGGER")
        found = client.put(path, {"expected_revision": current["revision"], "spec": spec})
    _tell(found, as_json)


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
    from services.cli.client import connect, in_project

    with connect(data) as client:
        found = client.ask(method, in_project(project, path), body={} if body is None else body)
    _tell(found, as_json)


def _tell(found: dict[str, Any], as_json: bool) -> None:
    from services.cli import output
    from services.cli.words import say

    if as_json:
        output.document(found)
        return
    following = output.when(found["next_fire_at_ms"]) if found["enabled"] else ""
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
    from services.cli.words import cause, say

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
                cause(missed["cause"]),
                f"{missed['count']}+" if missed["at_least"] else missed["count"],
            )
            for missed in found["items"]
        ),
        more=found["next"] is not None,
    )
