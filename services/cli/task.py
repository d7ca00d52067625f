"""`ql3 task`: what is run, and when."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import typer

from services.cli.options import Data, Json, Limit, Project, Task
from services.cli.run import Follow, Wait
from services.cli.trigger import described

task_app = typer.Typer(no_args_is_help=True, help="Tasks: create, list, show, run, enable, disable, delete.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="A slug, unique in its project: a-z, 0-9 and dashes.")]


@task_app.command("create")
def create_command(
    name: Name,
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND...", help="The program and its arguments, after --; no shell.")
    ],
    cron: Annotated[
        list[str] | None, typer.Option("--cron", metavar="EXPR", help="When it runs; may be repeated.")
    ] = None,
    timezone: Annotated[str, typer.Option("--timezone", metavar="ZONE", help="The IANA zone of every --cron.")] = "UTC",
    env: Annotated[
        list[str] | None, typer.Option("--env", metavar="K=V", help="A public variable; may be repeated.")
    ] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option("--secret", metavar="[ENV=]NAME", help="A secret as variable ENV, else its NAME in capitals."),
    ] = None,
    timeout: Annotated[
        str | None, typer.Option("--timeout", metavar="DURATION", help="End each attempt after 30s, 5m, 2h, …")
    ] = None,
    grace: Annotated[
        str | None, typer.Option("--grace", metavar="DURATION", help="Between TERM and KILL; default 5s.")
    ] = None,
    max_attempts: Annotated[
        int | None, typer.Option("--max-attempts", metavar="N", help="Automatic attempts, 1 to 16; default 1.")
    ] = None,
    safety: Annotated[
        Literal["unknown", "idempotent", "deduplicated"] | None,
        typer.Option(
            "--safety", help="Whether it may run again when its worker was lost; default unknown: it may not."
        ),
    ] = None,
    overlap: Annotated[
        Literal["allow", "skip", "queue", "replace"] | None,
        typer.Option("--overlap", help="When it is due while it still runs; default allow."),
    ] = None,
    needs_approval: Annotated[
        bool, typer.Option("--needs-approval", help="Each run waits until somebody approves it.")
    ] = False,
    workdir: Annotated[
        str | None, typer.Option("--workdir", metavar="DIR", help="The working directory on the worker.")
    ] = None,
    label: Annotated[list[str] | None, typer.Option("--label", metavar="K=V", help="A label; may be repeated.")] = None,
    title: Annotated[str | None, typer.Option("--title", metavar="TEXT", help="A title for people.")] = None,
    disabled: Annotated[bool, typer.Option("--disabled", help="Do not let its triggers fire yet.")] = False,
    project: Project = "default",
    as_json: Json = False,
    data: Data = None,
) -> None:
    """Create a task with its triggers. Options come before the name or the --; what follows -- is the command."""
    from services.cli import output
    from services.cli.client import connect, in_project
    from services.cli.options import milliseconds, pair
    from services.cli.words import say

    execution: dict[str, Any] = {"command": command}
    variables = [_public(text) for text in env or []] + [_secret(text) for text in secret or []]
    if variables:
        execution["environment"] = variables
    if timeout is not None:
        execution["timeout_ms"] = milliseconds(timeout, "--timeout")
    if grace is not None:
        execution["grace_ms"] = milliseconds(grace, "--grace")
    if workdir is not None:
        execution["working_directory"] = workdir
    retry: dict[str, Any] = {}
    if max_attempts is not None:
        retry["max_attempts"] = max_attempts
    if safety is not None:
        retry["safety"] = safety
    terms: dict[str, Any] = {"retry": retry} if retry else {}
    if overlap is not None:
        terms["overlap"] = {"policy": overlap}
    if needs_approval:
        terms["needs_approval"] = True
    if label:
        terms["labels"] = dict(pair(text, "--label") for text in label)
    spec: dict[str, Any] = {"execution": execution}
    if terms:
        spec["terms"] = terms
    if title is not None:
        spec["title"] = title
    triggers = [{"kind": "cron", "expression": expression, "timezone": timezone} for expression in cron or []]
    body = {"name": name, "spec": spec, "triggers": triggers, "enabled": not disabled}
    with connect(data) as client:
        made = client.post(in_project(project, "/tasks"), body)
    if as_json:
        output.document(made)
        return
    for warning in made["warnings"]:
        output.note(output.clean(warning))
    output.line(say(f"Task {made['name']} created ({made['id']}).", f"已创建任务 {made['name']}({made['id']})。"))


def _public(text: str) -> dict[str, Any]:
    from services.cli.options import pair

    name, value = pair(text, "--env")
    return {"name": name, "value": value}


def _secret(text: str) -> dict[str, Any]:
    variable, found, name = text.partition("=")
    if not found:
        variable, name = text.upper().replace("-", "_"), text
    return {"name": variable, "secret": {"secret": name}}


@task_app.command("list")
def list_command(
    project: Project = "default",
    folder: Annotated[str | None, typer.Option("--folder", metavar="FOLDER", help="Only tasks of this folder.")] = None,
    limit: Limit = 50,
    as_json: Json = False,
    data: Data = None,
) -> None:
    """List tasks by name."""
    from services.cli import output
    from services.cli.client import connect, in_project
    from services.cli.words import say

    with connect(data) as client:
        found = client.items(in_project(project, "/tasks"), limit, folder=folder)
    if as_json:
        output.document(found)
        return
    output.table(
        [
            say("NAME", "名称"),
            say("ENABLED", "启用"),
            say("REVISION", "版本"),
            say("TRIGGERS", "触发"),
            say("COMMAND", "命令"),
        ],
        (
            (
                task["name"],
                say("yes", "是") if task["enabled"] else say("no", "否"),
                task["revision"],
                ", ".join(described(trigger["spec"]) for trigger in task["triggers"]),
                _command(task),
            )
            for task in found["items"]
        ),
        more=found["next"] is not None,
    )


def _command(task: dict[str, Any]) -> str:
    import shlex

    return shlex.join(task["spec"]["execution"]["command"])


@task_app.command("show")
def show_command(task: Task, project: Project = "default", as_json: Json = False, data: Data = None) -> None:
    """Show one task."""
    from services.cli import output
    from services.cli.client import connect
    from services.cli.words import say

    with connect(data) as client:
        found: dict[str, Any] = client.get(_path(project, task))
    if as_json:
        output.document(found)
        return
    spec = found["spec"]
    execution, terms = spec["execution"], spec.get("terms", {})
    timeout = execution.get("timeout_ms")
    output.facts(
        [
            (say("name", "名称"), found["name"]),
            (say("id", "编号"), found["id"]),
            (say("title", "标题"), spec.get("title")),
            (say("enabled", "启用"), say("yes", "是") if found["enabled"] else say("no", "否")),
            (say("revision", "版本"), found["revision"]),
            (say("command", "命令"), _command(found)),
            (say("timeout", "超时"), None if timeout is None else f"{timeout / 1000:g} s"),
            (say("attempts", "尝试次数"), terms.get("retry", {}).get("max_attempts", 1)),
            (say("approval", "审批"), say("needed", "需要") if terms.get("needs_approval") else None),
            (say("updated", "更新"), output.when(found["updated_at_ms"])),
        ]
    )
    for variable in execution.get("environment", []):
        secret = variable.get("secret")
        told = say(f"secret {secret['secret']}", f"密文 {secret['secret']}") if secret else variable.get("value")
        output.line(f"  {variable['name']}={output.clean(told)}")
    for trigger in found["triggers"]:
        output.line(f"  {described(trigger['spec'])}  {say('next', '下次')} {output.when(trigger['next_fire_at_ms'])}")
    for warning in found["warnings"]:
        output.note(output.clean(warning))


@task_app.command("run")
def run_command(
    task: Task,
    wait: Wait = False,
    follow: Follow = False,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="K=V", help="An input; V is JSON where it can be read as JSON, else text."),
    ] = None,
    priority: Annotated[
        int | None, typer.Option("--priority", metavar="N", help="-1000 to 1000; higher goes first.")
    ] = None,
    project: Project = "default",
    as_json: Json = False,
    data: Data = None,
) -> None:
    """Run a task now. --json prints the run as committed; with --wait, as ended."""
    from services.cli.client import connect
    from services.cli.run import finish

    body: dict[str, Any] = {}
    if inputs:
        body["inputs"] = dict(_input(text) for text in inputs)
    if priority is not None:
        body["priority"] = priority
    with connect(data) as client:
        made = client.post(f"{_path(project, task)}/runs", body)
        finish(client, project, made, wait=wait, follow=follow, as_json=as_json)


def _input(text: str) -> tuple[str, Any]:
    from services.cli.options import pair

    name, value = pair(text, "--input")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


@task_app.command("enable")
def enable_command(task: Task, project: Project = "default", as_json: Json = False, data: Data = None) -> None:
    """Let a task's triggers fire."""
    _switch(task, "enable", project, as_json, data)


@task_app.command("disable")
def disable_command(task: Task, project: Project = "default", as_json: Json = False, data: Data = None) -> None:
    """Stop a task's triggers from firing. What runs goes on."""
    _switch(task, "disable", project, as_json, data)


def _switch(task: str, verb: str, project: str, as_json: bool, data: Data) -> None:
    from services.cli import output
    from services.cli.client import connect
    from services.cli.words import say

    with connect(data) as client:
        found = client.post(f"{_path(project, task)}/{verb}")
    if as_json:
        output.document(found)
    else:
        done = say("enabled", "已启用") if found["enabled"] else say("disabled", "已停用")
        output.line(f"{found['name']}: {done}")


@task_app.command("delete")
def delete_command(task: Task, project: Project = "default", as_json: Json = False, data: Data = None) -> None:
    """Remove a task and its triggers from use. Its runs stay readable; what runs goes on."""
    from services.cli import output
    from services.cli.client import connect
    from services.cli.words import say

    with connect(data) as client:
        found = client.delete(_path(project, task))
    if as_json:
        output.document(found)
    else:
        output.line(say(f"{task}: deleted", f"{task}:已删除"))


def _path(project: str, task: str) -> str:
    from services.cli.client import in_project, segment

    return in_project(project, f"/tasks/{segment(task, field='TASK')}")
