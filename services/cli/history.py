"""`ql3 task history|diff|restore`: a task's revisions."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from services.cli.options import Data, Json, Limit, Project, Task

Revision = Annotated[int, typer.Argument(metavar="REVISION", min=1, help="A revision's number.")]


def register(app: typer.Typer) -> None:
    """Add the commands to `ql3 task`."""
    app.command("history")(history_command)
    app.command("diff")(diff_command)
    app.command("restore")(restore_command)


def history_command(
    task: Task, project: Project = "default", limit: Limit = 50, as_json: Json = False, data: Data = None
) -> None:
    """List a task's revisions, newest first."""
    from services.cli import output
    from services.cli.client import connect
    from services.cli.words import say

    with connect(data) as client:
        found = client.items(f"{_path(project, task)}/revisions", limit)
    if as_json:
        output.document(found)
        return
    output.table(
        [say("REVISION", "版本"), say("MADE", "时间"), say("BY", "作者"), say("DIGEST", "摘要")],
        (
            (
                row["revision"],
                output.when(row["created_at_ms"]),
                f"{row['created_by']['type']}/{row['created_by']['id']}",
                row["digest"][:12],
            )
            for row in found["items"]
        ),
        more=found["next"] is not None,
    )


def diff_command(
    task: Task,
    before: Revision,
    after: Annotated[
        int | None, typer.Argument(metavar="[REVISION]", min=1, help="Compared with; the current one when absent.")
    ] = None,
    project: Project = "default",
    as_json: Json = False,
    data: Data = None,
) -> None:
    """Tell what differs between two revisions."""
    from services.cli import output
    from services.cli.client import connect
    from services.cli.files import tell_changes
    from services.cli.words import say

    with connect(data) as client:
        path = _path(project, task)
        other = after if after is not None else client.get(path)["revision"]
        found: dict[str, Any] = client.get(f"{path}/diff", before=before, after=other)
    if as_json:
        output.document(found)
        return
    tell_changes(found["changes"])
    if not found["changes"]:
        output.line(say("no difference", "无差异"))
    if found["more"]:
        output.note(say("there are more differences", "还有更多差异"))


def restore_command(
    task: Task, revision: Revision, project: Project = "default", as_json: Json = False, data: Data = None
) -> None:
    """Make the content of an old revision the next one."""
    from services.cli import output
    from services.cli.client import connect
    from services.cli.words import say

    with connect(data) as client:
        path = _path(project, task)
        current = client.get(path)["revision"]
        made = client.post(f"{path}/restore", {"revision": revision, "expected_revision": current})
    if as_json:
        output.document(made)
        return
    name, now = made["name"], made["revision"]
    output.line(
        say(f"{name}: revision {now} is revision {revision} again", f"{name}：版本 {now} 恢复自版本 {revision}")
    )


def _path(project: str, task: str) -> str:
    from services.cli.client import in_project, segment

    return in_project(project, f"/tasks/{segment(task, field='TASK')}")
