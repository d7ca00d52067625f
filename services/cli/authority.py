"""`ql3 project` and `ql3 role`: where things belong, who may do what there, and who would be asked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli.options import Data, Json, Limit, Project
from services.cli.typed import json_from, parsed, shown

if TYPE_CHECKING:
    from services.cli.client import Client

project_app = typer.Typer(no_args_is_help=True, help="Projects: list, create, archive, rules, limits.")
role_app = typer.Typer(no_args_is_help=True, help="Roles: who may do what in a project.")

Who = Annotated[str, typer.Argument(metavar="SUBJECT", help="A user's name, or TYPE/ID such as agent/bot.")]


# -- projects


@project_app.command("list")
def list_projects(limit: Limit = 50, as_json: Json = False, data: Data = None) -> None:
    """List the projects that you may read."""
    from services.cli import output
    from services.cli.client import connect
    from services.cli.words import say

    with connect(data) as client:
        found = client.items("/projects", limit)
    if as_json:
        output.document(found)
        return
    output.table(
        [say("PROJECT", "项目"), say("NAME", "名称"), say("STATUS", "状态"), say("CREATED", "创建时间")],
        (
            (item["id"], item["name"], item["status"], output.when(item["created_at_ms"] or None))
            for item in found["items"]
        ),
        more=found["next"] is not None,
    )


ProjectId = Annotated[str, typer.Argument(metavar="PROJECT", help="The project: a slug, its name in commands.")]


@project_app.command("create")
def create_project(
    project: ProjectId,
    name: Annotated[str | None, typer.Option("--name", metavar="TEXT", help="A name for people.")] = None,
    as_json: Json = False,
    data: Data = None,
) -> None:
    """Make a project; you become its owner."""
    from services.cli.client import connect, segment

    body = {"id": segment(project, field="PROJECT")} | ({"name": name} if name else {})
    with connect(data) as client:
        made = client.post("/projects", body)
    _tell_project(made, as_json)


@project_app.command("show")
def show_project(project: ProjectId, as_json: Json = False, data: Data = None) -> None:
    """Show one project."""
    from services.cli.client import connect, in_project

    with connect(data) as client:
        found = client.get(in_project(project, ""))
    _tell_project(found, as_json)


@project_app.command("archive")
def archive_project(project: ProjectId, as_json: Json = False, data: Data = None) -> None:
    """Archive a project: nothing starts there any more, everything stays readable."""
    _set_project(project, "archive", as_json, data)


@project_app.command("activate")
def activate_project(project: ProjectId, as_json: Json = False, data: Data = None) -> None:
    """Make an archived project active again."""
    _set_project(project, "activate", as_json, data)


def _set_project(project: str, verb: str, as_json: bool, data: Path | None) -> None:
    from services.cli.client import connect, in_project

    with connect(data) as client:
        seen = client.get(in_project(project, ""))
        changed = client.post(in_project(project, f"/{verb}"), {"expected_version": seen["version"]})
    _tell_project(changed, as_json)


@project_app.command("rules")
def rules(
    project: ProjectId,
    file: Annotated[
        Path | None,
        typer.Option("--set", metavar="FILE", help="Replace the rules by this JSON list; - is standard input."),
    ] = None,
    as_json: Json = False,
    data: Data = None,
) -> None:
    """Show, or replace, a project's own rules about who has to approve what."""
    from services.cli import output
    from services.cli.client import connect, in_project
    from services.cli.words import say

    path = in_project(project, "/rules")
    with connect(data) as client:
        found = client.get(path)
        if file is not None:
            wanted = json_from("-" if str(file) == "-" else f"@{file}", "--set")
            found = client.put(path, {"rules": wanted, "expected_version": found["version"]})
    if as_json:
        output.document(found)
        return
    output.table(
        [
            say("RULE", "规则"),
            say("PERMISSION", "权限"),
            say("LABELS", "标签"),
            say("RISKS", "风险"),
            say("APPROVALS", "人数"),
            say("BY", "审批人"),
            say("MODE", "方式"),
        ],
        (
            (
                rule["name"],
                rule["permission"],
                ", ".join(f"{name}={value}" for name, value in rule.get("labels", {}).items()),
                ", ".join(rule.get("risks", [])),
                rule.get("quorum", 1),
                rule.get("decider_role"),
                rule.get("mode"),
            )
            for rule in found["rules"]
        ),
    )


@project_app.command("try")
def try_rules(
    project: ProjectId,
    permission: Annotated[str, typer.Argument(metavar="PERMISSION", help="Such as run.start.")],
    who: Annotated[str, typer.Option("--as", metavar="SUBJECT", help="Who would ask: a user's name, or TYPE/ID.")],
    label: Annotated[
        list[str] | None, typer.Option("--label", metavar="NAME=VALUE", help="A label of the task; repeatable.")
    ] = None,
    risk: Annotated[str, typer.Option("--risk", metavar="RISK", help="low, medium, high or critical.")] = "medium",
    file: Annotated[
        Path | None,
        typer.Option("--rules", metavar="FILE", help="As if these rules were in force; - is standard input."),
    ] = None,
    as_json: Json = False,
    data: Data = None,
) -> None:
    """Show who would have to approve something. Nothing is stored."""
    from services.cli import output
    from services.cli.client import connect, in_project
    from services.cli.options import pair
    from services.cli.words import say

    kind, name = parsed(who)
    body: dict[str, Any] = {
        "permission": permission,
        "requested_by": {"type": kind, "id": name},
        "labels": dict(pair(text, "--label") for text in label or []),
        "risk": risk,
    }
    if file is not None:
        body["rules"] = json_from("-" if str(file) == "-" else f"@{file}", "--rules")
    with connect(data) as client:
        seen = client.post(in_project(project, "/rules/trial"), body)
    if as_json:
        output.document(seen)
        return
    able = [shown(one) for one in seen["deciders"]] + (["console"] if seen["console_may_decide"] else [])
    output.facts(
        [
            (say("policy", "策略"), f"{seen['effect']} ({seen['reason']})"),
            (say("rule", "规则"), seen["rule"]),
            (say("needs", "需要"), say(f"{seen['quorum']} of:", f"{seen['quorum']} 人，其中：")),
            (say("who", "审批人"), ", ".join(able) or say("nobody", "无人")),
            (say("mode", "方式"), seen["mode"]),
        ]
    )


@project_app.command("limits")
def list_limits(project: ProjectId = "default", limit: Limit = 50, as_json: Json = False, data: Data = None) -> None:
    """List how many runs may be in work at once: in the project, of a task, under a named key."""
    from services.cli import output
    from services.cli.client import connect, in_project
    from services.cli.words import say

    with connect(data) as client:
        found = client.items(in_project(project, "/limits"), limit)
        if as_json:
            output.document(found)
            return
        rows = [_limit_row(client, item) for item in found["items"]]
    output.table(
        [say("LIMIT OF", "限制对象"), say("NAME", "名称"), say("AT MOST", "上限"), say("IN WORK", "进行中")],
        rows,
        more=found["next"] is not None,
    )


@project_app.command("limit")
def set_limit(
    project: ProjectId,
    most: Annotated[str, typer.Argument(metavar="LIMIT", help="How many runs at once; `none` takes the limit away.")],
    key: Annotated[
        str | None,
        typer.Option("--key", metavar="KEY", help="Of this named key instead, whatever its tasks say themselves."),
    ] = None,
    as_json: Json = False,
    data: Data = None,
) -> None:
    """Limit how many runs of a project, or under a named key of it, are in work at once; the others wait."""
    from schemas.errors import Ql3Error
    from services.cli import output
    from services.cli.client import connect, in_project, segment
    from services.cli.words import say

    if most != "none" and not (most.isascii() and most.isdigit() and 1 <= int(most[:7]) <= 100_000):
        raise Ql3Error("invalid", "Write a number from 1 to 100000, or none.", field="LIMIT")
    path = in_project(project, "/limit" if key is None else f"/limits/{segment(key, field='--key')}")
    with connect(data) as client:
        found = client.put(path, {"limit": None if most == "none" else int(most)})
    if as_json:
        output.document(found)
        return
    what = project if key is None else f"{project}/{key}"
    for item in found["items"]:
        most, live = item["limit"], item["live"]
        output.line(say(f"{what}: at most {most}, {live} in work", f"{what}:上限 {most},进行中 {live}"))
    if not found["items"]:
        output.line(say(f"{what}: no limit", f"{what}:无限制"))


def _limit_row(client: Client, item: dict[str, Any]) -> tuple[Any, ...]:
    from schemas.errors import Ql3Error
    from services.cli.client import in_project
    from services.cli.words import say

    kind = {"project": say("project", "项目"), "task": say("task", "任务"), "key": say("key", "键")}[item["kind"]]
    name = item["key"]
    if item["kind"] == "task":
        try:
            name = client.get(in_project(item["project"], f"/tasks/{name}"))["name"]
        except Ql3Error as error:
            if error.code not in ("not_found", "forbidden"):
                raise  # a task that was deleted keeps its id here
    return kind, name, item["limit"], item["live"]


# -- roles


@role_app.command("list")
def list_roles(project: Project = "default", limit: Limit = 50, as_json: Json = False, data: Data = None) -> None:
    """List who has which role."""
    from services.cli import output
    from services.cli.client import connect, in_project
    from services.cli.words import say

    with connect(data) as client:
        found = client.items(in_project(project, "/roles"), limit)
    if as_json:
        output.document(found)
        return
    output.table(
        [say("SUBJECT", "主体"), say("ROLE", "角色"), say("SINCE", "自"), say("BY", "由")],
        (
            (
                shown(item["subject"]),
                item["role"] or say("(revoked)", "(已撤销)"),
                output.when(item["created_at_ms"]),
                shown(item["changed_by"]),
            )
            for item in found["items"]
        ),
        more=found["next"] is not None,
    )


@role_app.command("set")
def set_role(
    who: Who,
    role: Annotated[str, typer.Argument(metavar="ROLE", help="owner, admin, operator or viewer.")],
    project: Project = "default",
    as_json: Json = False,
    data: Data = None,
) -> None:
    """Give somebody a role; it replaces the one they have."""
    _set_role(who, role, project, as_json, data)


@role_app.command("revoke")
def revoke_role(who: Who, project: Project = "default", as_json: Json = False, data: Data = None) -> None:
    """Take somebody's role away, effective everywhere within two seconds."""
    _set_role(who, None, project, as_json, data)


def _set_role(who: str, role: str | None, project: str, as_json: bool, data: Path | None) -> None:
    from urllib.parse import quote

    from services.cli import output
    from services.cli.client import connect, in_project
    from services.cli.words import say

    kind, name = parsed(who)
    with connect(data) as client:
        known = client.items(in_project(project, "/roles"), 100_000)["items"]
        version = max((item["version"] for item in known if item["subject"] == {"type": kind, "id": name}), default=0)
        path = in_project(project, f"/roles/{quote(kind, safe='')}/{quote(name, safe='@:')}")
        bound = client.put(path, {"role": role, "expected_version": version})
    if as_json:
        output.document(bound)
    else:
        output.line(output.clean(f"{shown(bound['subject'])}: {bound['role'] or say('no role', '无角色')}"))


def _tell_project(project: dict[str, Any], as_json: bool) -> None:
    from services.cli import output

    if as_json:
        output.document(project)
    else:
        output.line(output.clean(f"{project['id']}: {project['status']}"))
