"""`ql3 dead`: orders that could not be handled, with their reason."""

from __future__ import annotations

from typing import Annotated

import typer

from services.cli.options import Data, Json, Limit

dead_app = typer.Typer(no_args_is_help=True, help="Dead letters: list, replay.")


@dead_app.command("list")
def list_command(
    service: Annotated[
        str | None, typer.Option("--service", metavar="SERVICE", help="Only those of this service.")
    ] = None,
    limit: Limit = 50,
    as_json: Json = False,
    data: Data = None,
) -> None:
    """List dead letters, oldest first."""
    from services.cli import output
    from services.cli.client import connect
    from services.cli.words import say

    with connect(data) as client:
        found = client.items("/dead", limit, service=service)
    if as_json:
        output.document(found)
        return
    output.table(
        ["#", say("TIME", "时间"), say("SUBJECT", "主题"), say("REASON", "原因"), say("ERROR", "错误")],
        (
            (letter["sequence"], letter["time"], letter["subject"], letter["reason"], letter["error"])
            for letter in found["items"]
        ),
        more=found["next"] is not None,
    )


@dead_app.command("replay")
def replay_command(
    sequence: Annotated[int, typer.Argument(metavar="NUMBER", min=1, help="Its number in the list.")],
    as_json: Json = False,
    data: Data = None,
) -> None:
    """Send a dead letter again to where it came from, once the cause is mended."""
    from services.cli import output
    from services.cli.client import connect
    from services.cli.words import say

    with connect(data) as client:
        found = client.post(f"/dead/{sequence}/replay")
    if as_json:
        output.document(found)
    else:
        output.line(say(f"Letter {sequence} was sent again.", f"已重新发送第 {sequence} 条。"))
