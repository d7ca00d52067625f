"""`ql3 cron`: what a schedule expression means. Pure: no service, no data folder."""

from __future__ import annotations

import json
import sys
import time
from itertools import islice
from typing import Annotated, Literal, NoReturn

import typer

from schemas.errors import Ql3Error
from services.cli.words import error_line

COUNT_MAX = 100_000

cron_app = typer.Typer(no_args_is_help=True, help="Check a schedule expression: its next instants, its words.")

Expression = Annotated[
    str, typer.Argument(metavar="EXPR", help="Five or six fields (leading seconds), or a macro; quoted.")
]
Trigger = Annotated[str, typer.Option("--trigger", metavar="ID", help="The trigger whose spread `H` takes.")]


@cron_app.command("next")
def next_command(
    expression: Expression,
    timezone: Annotated[str, typer.Option("--timezone", metavar="ZONE", help="An IANA zone.")] = "UTC",
    after: Annotated[
        str | None, typer.Option("--after", metavar="INSTANT", help="RFC 3339 with offset or Z; now when absent.")
    ] = None,
    count: Annotated[int, typer.Option("--count", metavar="N", help=f"How many, 1 to {COUNT_MAX}.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list document.")] = False,
    trigger: Trigger = "",
) -> None:
    """Print the next instants in UTC, one a line. Exit code 2 when the input is refused."""
    from services.scheduler.cron.grammar import parse
    from services.scheduler.cron.instants import FIRST_S, LAST_S, instants, refuse_never
    from services.scheduler.cron.rfc3339 import read_instant, write_instant
    from services.scheduler.cron.zones import zone

    try:
        schedule = parse(expression, seed=trigger)
        refuse_never(schedule)
        where = zone(timezone)
    except Ql3Error as error:
        _refuse(error_line(error))
    try:
        after_ms = time.time_ns() // 1_000_000 if after is None else read_instant(after)
    except ValueError as error:
        _refuse(f"--after: {_said(f'{error}.')}")
    if not FIRST_S * 1000 <= after_ms < LAST_S * 1000:
        _refuse(f"--after: {_said('it is outside of the years 1900 to 2999.')}")
    if not 1 <= count <= COUNT_MAX:
        _refuse(f"--count: {_said(f'write 1 to {COUNT_MAX}.')}")
    found = [write_instant(at_ms) for at_ms in islice(instants(schedule, where, after_ms), count)]
    if as_json:
        print(json.dumps({"items": found, "next": None}))
    else:
        sys.stdout.writelines(f"{line}\n" for line in found)


@cron_app.command("explain")
def explain_command(
    expression: Expression,
    lang: Annotated[
        Literal["en", "zh"] | None, typer.Option("--lang", help="English or Chinese; as QL3_LANG says when absent.")
    ] = None,
    trigger: Trigger = "",
) -> None:
    """Say a schedule in words. Exit code 2 when the expression is refused."""
    from services.cli.words import chinese
    from services.scheduler.cron.grammar import parse
    from services.scheduler.cron.instants import refuse_never
    from services.scheduler.cron.words import explain

    try:
        schedule = parse(expression, seed=trigger)
        refuse_never(schedule)
    except Ql3Error as error:
        _refuse(error_line(error))
    print(explain(schedule, lang or ("zh" if chinese() else "en")))


def _said(english: str) -> str:
    from services.cli import details
    from services.cli.words import chinese

    return details.chinese(english) or english if chinese() else english


def _refuse(sentence: str) -> NoReturn:
    print(f"ql3 cron: {sentence}", file=sys.stderr)
    raise typer.Exit(2)
