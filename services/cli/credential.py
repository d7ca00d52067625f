"""`ql3 credential`: how programs sign in (QL3_TOKEN)."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from services.cli.options import Data, Json, Limit

credential_app = typer.Typer(no_args_is_help=True, help="API credentials: list, create, rotate, revoke.")

Credential = Annotated[str, typer.Argument(metavar="CREDENTIAL", help="The credential's id.")]
Ttl = Annotated[str | None, typer.Option("--ttl", metavar="DURATION", help="How long it is good; default 90d.")]


@credential_app.command("list")
def list_command(
    everybody: Annotated[bool, typer.Option("--all", help="Those of everybody, not only your own.")] = False,
    limit: Limit = 50,
    as_json: Json = False,
    data: Data = None,
) -> None:
    """List credentials; their secrets are never shown again."""
    from services.cli import output
    from services.cli.client import connect
    from services.cli.words import say

    with connect(data) as client:
        found = client.items("/credentials", limit, all="true" if everybody else None)
    if as_json:
        output.document(found)
        return
    output.table(
        [
            say("CREDENTIAL", "凭据"),
            say("NAME", "名称"),
            say("FOR", "主体"),
            say("STATE", "状态"),
            say("UNTIL", "有效至"),
        ],
        (
            (
                item["id"],
                item["name"],
                f"{item['subject']['type']}/{item['subject']['id']}",
                item["state"],
                output.when(item["expires_at_ms"]),
            )
            for item in found["items"]
        ),
        more=found["next"] is not None,
    )


@credential_app.command("create")
def create_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What it is for.")],
    subject: Annotated[
        str | None,
        typer.Option("--for", metavar="TYPE/ID", help="Whom it stands for, such as api_app/ci; default yourself."),
    ] = None,
    ttl: Ttl = None,
    as_json: Json = False,
    data: Data = None,
) -> None:
    """Make a credential and print its token, once. Give its subject a role, or it may do nothing."""
    from schemas.errors import Ql3Error
    from services.cli.options import milliseconds

    body: dict[str, Any] = {"name": name}
    if subject is not None:
        kind, found, who = subject.partition("/")
        if not found or not kind or not who:
            raise Ql3Error("invalid", "Write TYPE/ID, such as api_app/ci.", field="--for")
        body["subject"] = {"type": kind, "id": who}
    if ttl is not None:
        body["ttl_ms"] = milliseconds(ttl, "--ttl")
    _issue("/credentials", body, as_json, data)


@credential_app.command("rotate")
def rotate_command(
    credential: Credential,
    overlap: Annotated[
        str | None, typer.Option("--overlap", metavar="DURATION", help="The secret before stays good so long.")
    ] = None,
    ttl: Ttl = None,
    as_json: Json = False,
    data: Data = None,
) -> None:
    """Give a credential a new secret and print its token, once."""
    from services.cli.client import segment
    from services.cli.options import milliseconds

    body: dict[str, Any] = {}
    if ttl is not None:
        body["ttl_ms"] = milliseconds(ttl, "--ttl")
    if overlap is not None:
        body["overlap_ms"] = milliseconds(overlap, "--overlap")
    _issue(f"/credentials/{segment(credential, field='CREDENTIAL')}/rotate", body, as_json, data)


def _issue(path: str, body: dict[str, Any], as_json: bool, data: Data) -> None:
    from services.cli import output
    from services.cli.client import connect
    from services.cli.words import say

    with connect(data) as client:
        made = client.ask("POST", path, body=body, repeat=False)
    if as_json:
        output.document(made)
        return
    output.note(say(f"Credential {made['id']}; its token is shown only now:", f"凭据 {made['id']}；令牌只显示这一次："))
    output.line(made["token"])


@credential_app.command("revoke")
def revoke_command(credential: Credential, as_json: Json = False, data: Data = None) -> None:
    """End a credential at once."""
    from services.cli import output
    from services.cli.client import connect, segment
    from services.cli.words import say

    with connect(data) as client:
        found = client.post(f"/credentials/{segment(credential, field='CREDENTIAL')}/revoke")
    if as_json:
        output.document(found)
    else:
        output.line(say(f"{found['id']}: revoked", f"{found['id']}：已吊销"))
