"""`ql3 task`: what is run, and when."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from services.cli import execution as how
from services.cli.options import Data, Json, Limit, Project, Task
from services.cli.run import Follow, Wait
from services.cli.spec import (
    Env,
    Folder,
    Grace,
    Keys,
    Labels,
    MaxAttempts,
    Notes,
    Overlap,
    OverlapLimit,
    Parameters,
    Safety,
    SecretNames,
    Timeout,
    Title,
    Workdir,
    write_spec,
)
from services.cli.trigger import described
from services.cli.triggerspec import an_input

task_app = typer.Typer(no_args_is_help=True, help="Tasks: create, update, list, show, run, enable, disable, delete.")

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
    env: Env = None,
    secret: SecretNames = None,
    timeout: Timeout = None,
    grace: Grace = None,
    max_attempts: MaxAttempts = None,
    safety: Safety = None,
    overlap: Overlap = None,
    overlap_limit: OverlapLimit = None,
    concurrency: Keys = None,
    needs_approval: Annotated[
        bool, typer.Option("--needs-approval", help="Each run waits until somebody approves it.")
    ] = False,
    workdir: Workdir = None,
    runtime: how.RuntimeKind = None,
    requirement: how.Requirements = None,
    script: how.Script = None,
    file: how.AsFiles = None,
    secret_file: how.SecretFiles = None,
    image: how.Image = None,
    executor: how.Executor = None,
    log_quota: how.LogQuota = None,
    run_as: how.RunAs = None,
    umask: how.Umask = None,
    nice: how.Nice = None,
    memory: how.Memory = None,
    cpu: how.Cpu = None,
    processes: how.Processes = None,
    open_files: how.OpenFiles = None,
    file_size: how.FileSize = None,
    cpu_time: how.CpuTime = None,
    best_effort: how.BestEffort = None,
    label: Labels = None,
    title: Title = None,
    folder: Folder = None,
    notes: Notes = None,
    parameters: Parameters = None,
    disabled: Annotated[bool, typer.Option("--disabled", help="Do not let its triggers fire yet.")] = False,
    project: Project = "default",
    as_json: Json = False,
    data: Data = None,
) -> None:
    """Create a task with its triggers. Options come before the --; what follows it is the command."""
    from services.cli.client import connect, in_project
    from services.cli.words import say

    spec = write_spec(
        {},
        command=command,
        env=env,
        secret=secret,
        timeout=timeout,
        grace=grace,
        max_attempts=max_attempts,
        safety=safety,
        overlap=overlap,
        overlap_limit=overlap_limit,
        concurrency=concurrency,
        needs_approval=needs_approval or None,
        workdir=workdir,
        runtime=runtime,
        requirement=requirement,
        script=script,
        file=file,
        secret_file=secret_file,
        image=image,
        executor=executor,
        log_quota=log_quota,
        run_as=run_as,
        umask=umask,
        nice=nice,
        memory=memory,
        cpu=cpu,
        processes=processes,
        open_files=open_files,
        file_size=file_size,
        cpu_time=cpu_time,
        best_effort=best_effort,
        label=label,
        title=title,
        folder=folder,
        notes=notes,
        parameters=parameters,
    )
    triggers = [{"kind": "cron", "expression": expression, "timezone": timezone} for expression in cron or []]
    body = {"name": name, "spec": spec, "triggers": triggers, "enabled": not disabled}
    with connect(data) as client:
        made = client.post(in_project(project, "/tasks"), body)
    _told(made, as_json, say(f"Task {name} created ({made['id']}).", f"已创建任务 {name}({made['id']})。"))


@task_app.command("update")
def update_command(
    task: Task,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="COMMAND...", help="Another program with its arguments, after --.")
    ] = None,
    env: Env = None,
    secret: SecretNames = None,
    unset: Annotated[
        list[str] | None, typer.Option("--unset", metavar="NAME", help="Remove a variable; may be repeated.")
    ] = None,
    timeout: Timeout = None,
    grace: Grace = None,
    max_attempts: MaxAttempts = None,
    safety: Safety = None,
    overlap: Overlap = None,
    overlap_limit: OverlapLimit = None,
    concurrency: Keys = None,
    needs_approval: Annotated[
        bool | None, typer.Option("--needs-approval/--no-approval", help="Whether each run waits for an approval.")
    ] = None,
    workdir: Workdir = None,
    runtime: how.RuntimeKind = None,
    requirement: how.Requirements = None,
    script: how.Script = None,
    file: how.AsFiles = None,
    secret_file: how.SecretFiles = None,
    image: how.Image = None,
    executor: how.Executor = None,
    log_quota: how.LogQuota = None,
    run_as: how.RunAs = None,
    umask: how.Umask = None,
    nice: how.Nice = None,
    memory: how.Memory = None,
    cpu: how.Cpu = None,
    processes: how.Processes = None,
    open_files: how.OpenFiles = None,
    file_size: how.FileSize = None,
    cpu_time: how.CpuTime = None,
    best_effort: how.BestEffort = None,
    clear: how.Clear = None,
    label: Labels = None,
    title: Title = None,
    folder: Folder = None,
    notes: Notes = None,
    parameters: Parameters = None,
    project: Project = "default",
    as_json: Json = False,
    data: Data = None,
) -> None:
    """Make a new revision of a task: what is given changes, the rest stays. What runs keeps its own revision."""
    from schemas.errors import Ql3Error
    from services.cli.client import connect
    from services.cli.words import say

    with connect(data) as client:
        path = _path(project, task)
        current = client.get(path)
        spec = write_spec(
            current["spec"],
            command=command,
            env=env,
            secret=secret,
            unset=unset,
            timeout=timeout,
            grace=grace,
            max_attempts=max_attempts,
            safety=safety,
            overlap=overlap,
            overlap_limit=overlap_limit,
            concurrency=concurrency,
            needs_approval=needs_approval,
            workdir=workdir,
            runtime=runtime,
            requirement=requirement,
            script=script,
            file=file,
            secret_file=secret_file,
            image=image,
            executor=executor,
            log_quota=log_quota,
            run_as=run_as,
            umask=umask,
            nice=nice,
            memory=memory,
            cpu=cpu,
            processes=processes,
            open_files=open_files,
            file_size=file_size,
            cpu_time=cpu_time,
            best_effort=best_effort,
            clear=clear,
            label=label,
            title=title,
            folder=folder,
            notes=notes,
            parameters=parameters,
        )
        if spec == current["spec"]:
            raise Ql3Error("invalid", "Nothing would change: name what is to be another way.", field="TASK")
        made = client.put(path, {"expected_revision": current["revision"], "spec": spec})
    revision = made["revision"]
    _told(made, as_json, say(f"{made['name']}: revision {revision}", f"{made['name']}：版本 {revision}"))


def _told(task: dict[str, Any], as_json: bool, sentence: str) -> None:
    from services.cli import output

    if as_json:
        output.document(task)
        return
    for warning in task["warnings"]:
        output.note(output.clean(warning))
    output.line(sentence)


@task_app.command("list")
def list_command(
    project: Project = "default",
    folder: Annotated[str | None, typer.Option("--folder", metavar="FOLDER", help="Only tasks of this folder.")] = None,
    label: Annotated[str | None, typer.Option("--label", metavar="K=V", help="Only tasks with this label.")] = None,
    limit: Limit = 50,
    as_json: Json = False,
    data: Data = None,
) -> None:
    """List tasks by name."""
    from services.cli import output
    from services.cli.client import connect, in_project
    from services.cli.words import say

    with connect(data) as client:
        found = client.items(in_project(project, "/tasks"), limit, folder=folder, label=label)
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
            (say("folder", "目录"), spec.get("folder")),
            (say("labels", "标签"), ", ".join(f"{name}={value}" for name, value in terms.get("labels", {}).items())),
            (say("notes", "备注"), spec.get("notes")),
            (say("enabled", "启用"), say("yes", "是") if found["enabled"] else say("no", "否")),
            (say("revision", "版本"), found["revision"]),
            (say("command", "命令"), _command(found)),
            (say("timeout", "超时"), None if timeout is None else f"{timeout / 1000:g} s"),
            (say("works in", "工作目录"), execution.get("working_directory")),
            (say("packages", "依赖包"), how.packages(execution)),
            (say("image", "镜像"), execution.get("image")),
            (say("limits", "限制"), how.bounds(execution)),
            (say("attempts", "尝试次数"), terms.get("retry", {}).get("max_attempts", 1)),
            (say("approval", "审批"), say("needed", "需要") if terms.get("needs_approval") else None),
            (say("updated", "更新"), output.when(found["updated_at_ms"])),
        ]
    )
    for variable in execution.get("environment", []):
        secret = variable.get("secret")
        told = say(f"secret {secret['secret']}", f"密文 {secret['secret']}") if secret else variable.get("value")
        if variable.get("as_file"):
            told = say("a file", "文件") + (f": {told}" if secret else "")
        output.line(f"  {variable['name']}={output.clean(told)}")
    parameters: dict[str, Any] = spec.get("parameters") or {}
    for name in map(str, parameters.get("properties", ())):
        output.line(f"  {say('input', '输入')} {output.clean(name)}")
    for trigger in found["triggers"]:
        following = output.when(trigger["next_fire_at_ms"])
        told = f"  {say('next', '下次')} {following}" if following else ""
        output.line(f"  {trigger['id']}  {described(trigger['spec'])}{told}")
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
    trigger: Annotated[
        str | None,
        typer.Option("--trigger", metavar="ID", help="Take the inputs of this manual trigger; --input wins."),
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
        body["inputs"] = dict(map(an_input, inputs))
    if trigger is not None:
        body["trigger"] = trigger
    if priority is not None:
        body["priority"] = priority
    with connect(data) as client:
        made = client.post(f"{_path(project, task)}/runs", body)
        finish(client, project, made, wait=wait, follow=follow, as_json=as_json)


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
