"""`ql3 secret`: values go in, and are never shown again."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from services.cli.options import Data, Json, Limit, Project

secret_app = typer.Typer(no_args_is_help=True, help="Secrets: set a value, list names.")


@secret_app.command("set")
def set_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A slug: a-z, 0-9 and dashes.")],
    expected_version: Annotated[
        int | None,
        typer.Option("--expect-version", metavar="N", min=0, help="Refuse unless N is current; 0: it must be new."),
    ] = None,
    project: Project = "default",
    as_json: Json = False,
    data: Data = None,
) -> None:
    """Store a new version. The value comes from standard input (one line end at its end is dropped) or a prompt."""
    from services.cli import output
    from services.cli.client import connect, in_project, segment
    from services.cli.words import say

    path = in_project(project, f"/secrets/{segment(name, field='NAME')}")
    client = connect(data)
    body: dict[str, object] = {"value": _read_value()}
    if expected_version is not None:
        body["expected_version"] = expected_version
    with client:
        stored = client.put(path, body)
    if as_json:
        output.document(stored)
    else:
        version = stored["version"]
        output.line(say(f"Secret {name} stored (version {version}).", f"已保存密文 {name}(版本 {version})。"))


def _read_value() -> str:
    from schemas.errors import Ql3Error
    from schemas.limits import SECRET_BYTES
    from services.cli.words import say

    if sys.stdin.isatty():
        import getpass

        raw = getpass.getpass(say("Value (not shown): ", "值(不显示):")).encode(errors="surrogateescape")
    else:
        # Two more for the line end, one more to see that there is more.
        raw = sys.stdin.buffer.read(SECRET_BYTES + 3)
        raw = raw.removesuffix(b"\n").removesuffix(b"\r") if raw.endswith(b"\n") else raw
    if len(raw) > SECRET_BYTES:
        raise Ql3Error("too_large", f"A secret has at most {SECRET_BYTES} bytes.", field="value")
    if not raw:
        raise Ql3Error("invalid", "The value is empty.", field="value")
    try:
        return raw.decode("utf-8", "strict")
    except UnicodeDecodeError:
        raise Ql3Error("invalid", "The value is not UTF-8 text.", field="value") from None


@secret_app.command("list")
def list_command(project: Project = "default", limit: Limit = 50, as_json: Json = False, data: Data = None) -> None:
    """List names and versions."""
    from services.cli import output
    from services.cli.client import connect, in_project
    from services.cli.words import say

    with connect(data) as client:
        found = client.items(in_project(project, "/secrets"), limit)
    if as_json:
        output.document(found)
        return
    output.table(
        [say("NAME", "名称"), say("VERSION", "版本"), say("SET", "设置时间")],
        ((secret["name"], secret["version"], output.when(secret["created_at_ms"])) for secret in found["items"]),
        more=found["next"] is not None,
    )
