"""`ql3 nats`: what the `nats` command needs to look inside."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import typer

from services.cli.options import Data, Json

nats_app = typer.Typer(no_args_is_help=True, help="Looking inside with the nats command.")

OPERATOR = "operator"


@nats_app.callback()
def nats() -> None:
    """Looking inside with the nats command."""


@nats_app.command("env")
def env_command(as_json: Json = False, data: Data = None) -> None:
    """Print what the `nats` command needs: eval "$(ql3 nats env)"; nats sub 'ql3.evt.>'.

    The operator reads facts, orders, dead letters and statistics, and can change nothing. What is printed holds its
    password.
    """
    from services.cli import output

    found = operator_access(data)
    if as_json:
        output.document(found)
        return
    for name, key in (("NATS_URL", "url"), ("NATS_USER", "user"), ("NATS_PASSWORD", "password"), ("NATS_CA", "ca")):
        if found.get(key):
            output.line(f"export {name}={shlex.quote(found[key])}")


def operator_access(data: Path | None) -> dict[str, str]:
    """url, user and password (and ca) of the operator.

    From QL3_NATS_URL with QL3_NATS_PASSWORD where that is set and no data folder is named; else from the data folder of
    a running `ql3 up`.
    """
    from schemas.errors import Ql3Error
    from services.cli.client import data_folder, read_console

    url, password = os.environ.get("QL3_NATS_URL"), os.environ.get("QL3_NATS_PASSWORD")
    if data is None and url:
        if not password:
            raise Ql3Error("setup_invalid", "Name the operator's password.", field="QL3_NATS_PASSWORD")
        user = os.environ.get("QL3_NATS_USER") or OPERATOR
        found = {"url": url, "user": user, "password": password}
        ca = os.environ.get("QL3_NATS_CA")
        return found | ({"ca": ca} if ca else {})
    console = read_console(data)
    path = data_folder(data) / "nats" / "credentials.json"
    try:
        passwords: Any = json.loads(path.read_text())
        if console.nats_url is None:
            raise KeyError("nats_url")
        return {"url": console.nats_url, "user": OPERATOR, "password": str(passwords[OPERATOR])}
    except (OSError, ValueError, KeyError, TypeError):
        raise Ql3Error("setup_invalid", "The message server's credentials cannot be read.", field="--data") from None
