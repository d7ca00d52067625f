"""`ql3 approval`: who has to be asked, what they decided, and what came of it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from services.cli.options import Data, Json, Limit, Project
from services.cli.typed import json_from, shown

if TYPE_CHECKING:
    from services.cli.client import Client

approval_app = typer.Typer(no_args_is_help=True, help="Approvals: list, decide, ask, and what came of them.")

PATIENCE_S: Final = 3.0
"""A run that has just begun to wait is asked for by an order that may still be on its way."""

Approval = Annotated[str, typer.Argument(metavar="APPROVAL", help="The request's id; that of a held run is the run's.")]
Reason = Annotated[str | None, typer.Option("--reason", metavar="TEXT", help="Why; kept with the decision.")]
State = Annotated[
    str | None,
    typer.Option("--state", metavar="STATE", help="pending, approved, rejected, consumed, withdrawn or expired."),
]


@approval_app.command("list")
def list_approvals(
    project: Project = "default", state: State = None, limit: Limit = 50, as_json: Json = False, data: Data = None
) -> None:
    """List requests, newest first."""
    from services.cli import output
    from services.cli.client import connect, in_project
    from services.cli.words import say

    with connect(data) as client:
        found = client.items(in_project(project, "/approvals"), limit, state=state)
    if as_json:
        output.document(found)
        return
    output.table(
        [
            say("APPROVAL", "审批"),
            say("STATE", "状态"),
            say("ACTION", "操作"),
            say("ABOUT", "内容"),
            say("RISK", "风险"),
            say("ASKED BY", "申请人"),
            say("EXPIRES", "过期时间"),
        ],
        (
            (
                item["id"],
                _state(item["state"]),
                item["action_type"],
                _about(item["preview"]),
                item["risk"],
                shown(item["requested_by"]),
                output.when(item["expires_at_ms"]),
            )
            for item in found["items"]
        ),
        more=found["next"] is not None,
    )


@approval_app.command("show")
def show_approval(
    approval: Approval,
    project: Project = "default",
    plan: Annotated[bool, typer.Option("--plan", help="Show the whole of what would be done, as JSON.")] = False,
    as_json: Json = False,
    data: Data = None,
) -> None:
    """Show one request: what would happen, who has decided, what came of it."""
    from services.cli import output
    from services.cli.client import connect
    from services.cli.files import tell_changes
    from services.cli.words import say

    with connect(data) as client:
        found = client.get(_approval_path(project, approval))
    if as_json or plan:
        output.document(found["plan"] if plan else found)
        return
    changes = found["preview"].pop("changes", [])
    cut = found["preview"].pop("cut", False)
    output.facts(
        [
            (say("approval", "审批"), found["id"]),
            (say("state", "状态"), _state(found["state"])),
            (say("action", "操作"), found["action_type"]),
            (say("risk", "风险"), found["risk"]),
            (say("asked by", "申请人"), shown(found["requested_by"])),
            (say("asked", "申请时间"), output.when(found["requested_at_ms"])),
            (say("due", "到点开始"), output.when(found.get("not_before_ms"))),
            (say("expires", "过期时间"), output.when(found["expires_at_ms"])),
            (say("mode", "方式"), found["mode"]),
            (say("needs", "需要"), say(f"{found['quorum']} of those who may", f"{found['quorum']} 人")),
            *((f"  {name}", _plain(value)) for name, value in found["preview"].items()),
            (say("outcome", "结果"), _joined(found["execution_status"], found["execution_result"])),
        ]
    )
    tell_changes(changes, at_most=None)
    if cut:
        output.note(say("not all of it is shown; see the whole with --plan", "未全部显示；用 --plan 查看完整内容"))
    for decision in found["decisions"]:
        said = f"{output.when(decision['decided_at_ms'])}  {shown(decision['decided_by'])}  {decision['decision']}"
        output.line(output.clean(said + (f": {decision['reason']}" if decision["reason"] else "")))


@approval_app.command("approve")
def approve(
    approval: Approval, project: Project = "default", reason: Reason = None, as_json: Json = False, data: Data = None
) -> None:
    """Approve a request."""
    _decide(project, approval, "approved", reason, as_json, data)


@approval_app.command("reject")
def reject(
    approval: Approval, project: Project = "default", reason: Reason = None, as_json: Json = False, data: Data = None
) -> None:
    """Reject a request."""
    _decide(project, approval, "rejected", reason, as_json, data)


def _decide(project: str, approval: str, decision: str, reason: str | None, as_json: bool, data: Path | None) -> None:
    from services.cli.client import connect

    path = _approval_path(project, approval)
    with connect(data) as client:
        seen = _patiently(client, path)
        # What is decided is what stands there now; if it changed in between, it is refused.
        body = {"decision": decision, "reason": reason, "expected_digest": seen["action_digest"]}
        decided = client.post(f"{path}/decision", {name: value for name, value in body.items() if value is not None})
    _tell(decided, as_json)


def _patiently(client: Client, path: str) -> Any:
    from schemas.errors import Ql3Error

    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return client.get(path)
        except Ql3Error as error:
            if error.code != "not_found" or time.monotonic() > until:
                raise
        time.sleep(0.1)


@approval_app.command("withdraw")
def withdraw(approval: Approval, project: Project = "default", as_json: Json = False, data: Data = None) -> None:
    """Take back a request of your own; a run that waits for it is cancelled."""
    from services.cli.client import connect

    with connect(data) as client:
        taken = client.post(f"{_approval_path(project, approval)}/withdraw")
    _tell(taken, as_json)


@approval_app.command("request")
def request(
    action: Annotated[
        str,
        typer.Argument(metavar="ACTION", help="run.create, task.change, secret.set, role.bind or worker.drain."),
    ],
    plan: Annotated[
        str, typer.Option("--plan", metavar="JSON", help="The action's plan; @FILE reads a file, - standard input.")
    ],
    risk: Annotated[str, typer.Option("--risk", metavar="RISK", help="low, medium, high or critical.")] = "medium",
    ttl: Annotated[str, typer.Option("--expires", metavar="DURATION", help="How long it may wait.")] = "24h",
    project: Project = "default",
    as_json: Json = False,
    data: Data = None,
) -> None:
    """Ask for an action that you may not do alone."""
    from services.cli.client import connect, in_project
    from services.cli.options import milliseconds

    body = {
        "action_type": action,
        "plan": json_from(plan, "--plan"),
        "risk": risk,
        "ttl_ms": milliseconds(ttl, "--expires"),
    }
    with connect(data) as client:
        made = client.post(in_project(project, "/approvals"), body)
    _tell(made, as_json)


@approval_app.command("actions")
def actions(
    doubtful: Annotated[
        bool, typer.Option("--recovery", help="Only those whose outcome is in doubt and needs a person's word.")
    ] = False,
    project: Project = "default",
    limit: Limit = 50,
    as_json: Json = False,
    data: Data = None,
) -> None:
    """List what came of approved requests."""
    from services.cli import output
    from services.cli.client import connect, in_project
    from services.cli.words import say

    with connect(data) as client:
        found = client.items(in_project(project, "/actions"), limit, recovery="true" if doubtful else None)
    if as_json:
        output.document(found)
        return
    output.table(
        [
            say("DISPATCH", "派发"),
            say("ACTION", "操作"),
            say("STATUS", "状态"),
            say("RESULT", "结果"),
            say("MADE", "产物"),
        ],
        (
            (
                item["dispatch_id"],
                item["action_type"],
                item["status"],
                item["result_code"] or item["finding_code"],
                _joined(item["resource_type"], item["resource_id"]),
            )
            for item in found["items"]
        ),
        more=found["next"] is not None,
    )


@approval_app.command("recover")
def recover(
    dispatch: Annotated[str, typer.Argument(metavar="DISPATCH", help="The dispatch, from `ql3 approval actions`.")],
    outcome: Annotated[
        str, typer.Argument(metavar="OUTCOME", help="succeeded, failed or unknown: what you found out.")
    ],
    reason: Annotated[str, typer.Option("--reason", metavar="CODE", help="A short code, such as looked_at_the_host.")],
    project: Project = "default",
    as_json: Json = False,
    data: Data = None,
) -> None:
    """Say what became of an action whose outcome is in doubt. It is never done again."""
    from schemas.errors import Ql3Error
    from services.cli import output
    from services.cli.client import connect, in_project, segment

    decisions = {"succeeded": "confirm_succeeded", "failed": "confirm_failed", "unknown": "abandon_unknown"}
    if outcome not in decisions:
        raise Ql3Error("invalid", "Say succeeded, failed or unknown.", field="OUTCOME")
    path = in_project(project, f"/actions/{segment(dispatch, field='DISPATCH')}")
    with connect(data) as client:
        seen = client.get(path)
        body = {
            "decision": decisions[outcome],
            "reason_code": reason,
            "expected_execution_version": seen["version"],
            "expected_recovery_version": seen["recovery_version"] or 0,
        }
        ended = client.post(f"{path}/recover", body)
    if as_json:
        output.document(ended)
    else:
        output.line(f"{ended['dispatch_id']}: {ended['status']}")


_STATES_ZH: Final = {
    "pending": "待审批",
    "approved": "已批准",
    "rejected": "已拒绝",
    "consumed": "已执行",
    "withdrawn": "已撤回",
    "expired": "已过期",
}


def _state(name: str) -> str:
    from services.cli.words import say

    return say(name, _STATES_ZH.get(name, name))


def _about(preview: dict[str, Any]) -> str:
    for name in ("task", "secret", "subject", "worker"):
        if name in preview:
            return _plain(preview[name])
    return ""


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _joined(*parts: Any) -> str:
    return " ".join(str(part) for part in parts if part)


def _approval_path(project: str, approval: str) -> str:
    from services.cli.client import in_project, segment

    return in_project(project, f"/approvals/{segment(approval, field='APPROVAL')}")


def _tell(approval: dict[str, Any], as_json: bool) -> None:
    from services.cli import output

    if as_json:
        output.document(approval)
    else:
        output.line(f"{approval['id']}: {_state(approval['state'])}")
