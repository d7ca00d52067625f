"""`ql3 audit`: who did what, and whether the ledgers hold."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from services.cli.options import Data, Json, Limit
from services.cli.typed import shown

audit_app = typer.Typer(no_args_is_help=True, help="The audit ledgers: list, export, verify.")

Service = Annotated[
    str | None,
    typer.Option("--service", metavar="SERVICE", help="One service's ledger; by default all, one after another."),
]
OfProject = Annotated[str | None, typer.Option("--project", metavar="PROJECT", help="Only what concerns it.")]


@audit_app.command("list")
def list_audit(
    service: Service = None, project: OfProject = None, limit: Limit = 50, as_json: Json = False, data: Data = None
) -> None:
    """List who did what, newest first within each service."""
    from services.cli import output
    from services.cli.client import connect
    from services.cli.words import say

    with connect(data) as client:
        found = client.items("/audit", limit, service=service, project=project)
    if as_json:
        output.document(found)
        return
    output.table(
        [
            say("WHEN", "时间"),
            say("SERVICE", "服务"),
            say("WHO", "主体"),
            say("DID", "操作"),
            say("TO", "对象"),
            say("OUTCOME", "结果"),
            say("SEALED", "已封存"),
        ],
        (
            (
                output.when(item["at_ms"]),
                item["service"],
                shown(item["actor"]),
                item["action"],
                item["target"],
                item["outcome"],
                item["position"],
            )
            for item in found["items"]
        ),
        more=found["next"] is not None,
    )


@audit_app.command("export")
def export_audit(service: Service = None, project: OfProject = None, data: Data = None) -> None:
    """Write every audit row as one JSON object a line, newest first within each service."""
    from schemas.limits import LIST_ITEMS
    from services.cli.client import connect

    cursor: str | None = None
    with connect(data) as client:
        while True:
            page = client.get("/audit", service=service, project=project, limit=LIST_ITEMS, cursor=cursor)
            for item in page["items"]:
                sys.stdout.write(json.dumps(item, ensure_ascii=False) + "\n")
            cursor = page["next"]
            if cursor is None:
                return


@audit_app.command("verify")
def verify_audit(as_json: Json = False, data: Data = None) -> int:
    """Walk every ledger's hash chain: an edited, missing or moved row shows. Exit code 1 when one does not hold."""
    from services.cli import output
    from services.cli.client import connect
    from services.cli.words import say

    with connect(data) as client:
        found = client.get("/audit/verify")
    if as_json:
        output.document(found)
    else:
        output.table(
            [say("SERVICE", "服务"), say("HOLDS", "完整"), say("SEALED", "已封存"), say("UNSEALED", "未封存")],
            (
                (
                    item["service"],
                    say("yes", "是") if item["intact"] else say("NO", "否"),
                    item["sealed"],
                    item["unsealed"],
                )
                for item in found["items"]
            ),
        )
        for item in found["items"]:
            for problem in item["problems"]:
                output.line(output.clean(f"{item['service']}: {problem}"))
    return 0 if all(item["intact"] for item in found["items"]) else 1
