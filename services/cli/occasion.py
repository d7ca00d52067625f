"""`ql3 trigger webhook|secret|after|boot|manual|backfill`: triggers besides the calendar, and what has passed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from services.cli.options import Data, Json, Project, Task
from services.cli.triggerspec import Inputs, instant, write_trigger

Trigger = Annotated[str, typer.Argument(metavar="TRIGGER", help="The trigger's id.")]


def register(app: typer.Typer) -> None:
    """Add the commands to `ql3 trigger`."""
    app.command("webhook")(webhook_command)
    app.command("secret")(secret_command)
    app.command("after")(after_command)
    app.command("boot")(boot_command)
    app.command("manual")(manual_command)
    app.command("backfill")(backfill_command)


def webhook_command(
    task: Task,
    unsigned: Annotated[bool, typer.Option("--unsigned", help="Take calls without a signature too.")] = False,
    project: Project = "default",
    as_json: Json = False,
    data: Data = None,
) -> None:
    """Add a webhook to a task and show its secret address, once."""
    from services.cli.client import connect, in_project

    spec: dict[str, Any] = {"kind": "webhook", "signed": not unsigned}
    with connect(data) as client:
        made = client.post(in_project(project, "/triggers"), {"task": task, "spec": spec})
        _show_secret(client, project, made["id"], as_json)


def secret_command(trigger: Trigger, project: Project = "default", as_json: Json = False, data: Data = None) -> None:
    """Give a webhook a new secret and show it, once; the one before is void."""
    from services.cli.client import connect

    with connect(data) as client:
        _show_secret(client, project, trigger, as_json)


def _show_secret(client: Any, project: str, trigger: str, as_json: bool) -> None:
    from services.cli import output
    from services.cli.client import in_project, segment
    from services.cli.words import say

    path = in_project(project, f"/triggers/{segment(trigger, field='TRIGGER')}/secret")
    # Not repeated by itself: the answer of the first would be lost, and its secret with it; a second is as good.
    found = client.ask("POST", path, body={}, repeat=False)
    if as_json:
        output.document(found)
        return
    output.note(say("Shown once; sign calls with the last part of it.", "仅显示一次；用最后一段对请求签名。"))
    output.line(f"{client.url}{found['path']}")


def after_command(
    task: Task,
    other: Annotated[str, typer.Argument(metavar="OTHER", help="The task whose end starts TASK, by name.")],
    on: Annotated[Literal["success", "failure", "any"], typer.Option("--on", help="Which end.")] = "success",
    project: Project = "default",
    as_json: Json = False,
    data: Data = None,
) -> None:
    """Run a task after another one."""
    _add(task, {"kind": "after_task", "after_task": other, "after_on": on}, project, as_json, data)


def boot_command(task: Task, project: Project = "default", as_json: Json = False, data: Data = None) -> None:
    """Run a task each time the system starts."""
    _add(task, {"kind": "boot"}, project, as_json, data)


def manual_command(
    task: Task, inputs: Inputs = None, project: Project = "default", as_json: Json = False, data: Data = None
) -> None:
    """Keep inputs for runs by hand: `ql3 task run TASK --trigger ID` takes them."""
    _add(task, write_trigger({"kind": "manual"}, inputs=inputs), project, as_json, data)


def _add(task: str, spec: dict[str, Any], project: str, as_json: bool, data: Data) -> None:
    from services.cli import output
    from services.cli.client import connect, in_project
    from services.cli.trigger import described

    with connect(data) as client:
        made = client.post(in_project(project, "/triggers"), {"task": task, "spec": spec})
    if as_json:
        output.document(made)
        return
    output.line(f"{made['id']}  {described(made['spec'])}")


def backfill_command(
    trigger: Trigger,
    since: Annotated[str, typer.Option("--from", metavar="INSTANT", help="RFC 3339, included.")],
    until: Annotated[str, typer.Option("--until", metavar="INSTANT", help="RFC 3339, included.")],
    every: Annotated[str, typer.Option("--every", metavar="DURATION", help="Between the starts of two runs.")] = "1s",
    again: Annotated[bool, typer.Option("--again", help="Also instants that ran already.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell which instants they are.")] = False,
    project: Project = "default",
    as_json: Json = False,
    data: Data = None,
) -> None:
    """Run a trigger's instants of a window that has passed."""
    from services.cli import output
    from services.cli.client import connect, in_project, segment
    from services.cli.options import milliseconds
    from services.cli.words import say

    body = {
        "from_ms": instant(since, "--from"),
        "until_ms": instant(until, "--until"),
        "every_ms": 0 if every == "0" else milliseconds(every, "--every"),
        "again": again,
        "dry_run": dry_run,
    }
    with connect(data) as client:
        path = in_project(project, f"/triggers/{segment(trigger, field='TRIGGER')}/backfill")
        found = client.post(path, body)
    if as_json:
        output.document(found)
        return
    for at_ms in found["instants"]:
        output.line(output.when(at_ms))
    count, left_out = len(found["instants"]), found["left_out"]
    output.note(
        say(
            f"{count} runs{' would start' if dry_run else ''}, {left_out} left out that ran already",
            f"{count} 次运行{'（预览）' if dry_run else ''}，{left_out} 次已运行过而略过",
        )
    )
