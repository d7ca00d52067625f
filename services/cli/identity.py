"""`ql3 identity`: people, applications and agents, the names under which they sign in, and shutting them out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from services.cli.options import Data, Json, Limit
from services.cli.typed import parsed, shown

identity_app = typer.Typer(
    no_args_is_help=True, help="Who is known here: list, show, disable, enable, revoke a sign-in."
)

Who = Annotated[str, typer.Argument(metavar="SUBJECT", help="A user's name, or TYPE/ID such as agent/bot.")]


@identity_app.command("list")
def list_identities(limit: Limit = 50, as_json: Json = False, data: Data = None) -> None:
    """List people, applications and agents."""
    from services.cli import output
    from services.cli.client import connect
    from services.cli.words import say

    with connect(data) as client:
        found = client.items("/identities", limit)
    if as_json:
        output.document(found)
        return
    output.table(
        [say("SUBJECT", "主体"), say("NAME", "名称"), say("STATUS", "状态"), say("SINCE", "自")],
        (
            (shown(item), item["display_name"] or "", _status(item["status"]), output.when(item["updated_at_ms"]))
            for item in found["items"]
        ),
        more=found["next"] is not None,
    )


@identity_app.command("show")
def show_identity(who: Who, limit: Limit = 50, as_json: Json = False, data: Data = None) -> None:
    """Show a subject and the names under which it signs in."""
    from services.cli import output
    from services.cli.client import connect
    from services.cli.words import say

    with connect(data) as client:
        found = client.get(_path(who), limit=min(limit, 200))
        while found["next"] is not None and len(found["bindings"]) < limit:
            more = client.get(_path(who), limit=min(limit - len(found["bindings"]), 200), cursor=found["next"])
            found = {**more, "bindings": [*found["bindings"], *more["bindings"]]}
    if as_json:
        output.document(found)
        return
    _tell(found["identity"])
    output.table(
        [say("SIGN-IN", "登录方式"), say("NAME", "名称"), say("STATE", "状态"), say("SINCE", "自")],
        (
            (item["provider"], item["provider_subject"], _status(item["state"]), output.when(item["created_at_ms"]))
            for item in found["bindings"]
        ),
        more=found["next"] is not None,
    )


@identity_app.command("disable")
def disable_identity(who: Who, as_json: Json = False, data: Data = None) -> None:
    """Shut somebody out, with every sign-in and credential, effective everywhere within two seconds."""
    _set_status(who, "disabled", as_json, data)


@identity_app.command("enable")
def enable_identity(who: Who, as_json: Json = False, data: Data = None) -> None:
    """Let somebody in again, with the roles and sign-ins that are left."""
    _set_status(who, "active", as_json, data)


@identity_app.command("revoke-binding")
def revoke_binding(
    who: Who,
    provider: Annotated[str, typer.Argument(metavar="SIGN-IN", help="`password` or `api_credential`.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name, as `ql3 identity show` lists it.")],
    as_json: Json = False,
    data: Data = None,
) -> None:
    """End one sign-in of somebody; their others stay. A password's link makes it good again."""
    from services.cli import output
    from services.cli.client import connect

    with connect(data) as client:
        ended = client.post(f"{_path(who)}/bindings/revoke", {"provider": provider, "provider_subject": name})
    if as_json:
        output.document(ended)
    else:
        output.line(output.clean(f"{ended['provider']} {ended['provider_subject']}: {_status(ended['state'])}"))


def _path(who: str) -> str:
    from urllib.parse import quote

    kind, name = parsed(who)
    return f"/identities/{quote(kind, safe='')}/{quote(name, safe='@:')}"


def _set_status(who: str, status: str, as_json: bool, data: Path | None) -> None:
    from services.cli import output
    from services.cli.client import connect

    with connect(data) as client:
        version = client.get(_path(who), limit=1)["identity"]["version"]
        changed = client.put(_path(who), {"status": status, "expected_version": version})
    if as_json:
        output.document(changed)
    else:
        _tell(changed)


def _tell(identity: Any) -> None:
    from services.cli import output

    output.line(output.clean(f"{shown(identity)}: {_status(identity['status'])}"))


def _status(status: str) -> str:
    from services.cli.words import say

    words = {
        "active": say("active", "有效"),
        "disabled": say("disabled", "已停用"),
        "revoked": say("revoked", "已撤销"),
    }
    return words[status]
