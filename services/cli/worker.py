"""`ql3 worker`: the machines that run things."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from services.cli.options import Data, Json, Limit

worker_app = typer.Typer(no_args_is_help=True, help="Workers: list, drain, resume.")

Worker = Annotated[str, typer.Argument(metavar="WORKER", help="The worker's id.")]


@worker_app.command("list")
def list_command(limit: Limit = 50, as_json: Json = False, data: Data = None) -> None:
    """List workers."""
    from services.cli import output
    from services.cli.client import connect
    from services.cli.words import say
    from services.cli.words import status as word

    with connect(data) as client:
        found = client.items("/workers", limit)
    if as_json:
        output.document(found)
        return
    output.table(
        [
            say("WORKER", "节点"),
            say("STATUS", "状态"),
            say("BUSY", "占用"),
            say("SLOTS", "容量"),
            say("MACHINE", "机器"),
            say("HEARD OF", "最近心跳"),
        ],
        (
            (
                worker["id"],
                word(worker["status"]),
                worker["leased"],
                worker["slots"],
                _machine(worker["capabilities"]),
                output.when(worker["last_heartbeat_at_ms"]),
            )
            for worker in found["items"]
        ),
        more=found["next"] is not None,
    )


def _machine(found: dict[str, Any]) -> str:
    from services.cli import output

    memory = found.get("memory_bytes")
    parts = [found.get("architecture"), f"{found.get('cpu_cores', 1)} cpu", output.size(memory) if memory else None]
    return ", ".join(part for part in parts if part)


@worker_app.command("drain")
def drain_command(worker: Worker, as_json: Json = False, data: Data = None) -> None:
    """Give a worker nothing new; what runs there goes on."""
    _order(worker, "drain", as_json, data)


@worker_app.command("resume")
def resume_command(worker: Worker, as_json: Json = False, data: Data = None) -> None:
    """Let a drained worker work again."""
    _order(worker, "resume", as_json, data)


def _order(worker: str, verb: str, as_json: bool, data: Data) -> None:
    from services.cli import output
    from services.cli.client import connect, segment
    from services.cli.words import status as word

    with connect(data) as client:
        found = client.post(f"/workers/{segment(worker, field='WORKER')}/{verb}")
    if as_json:
        output.document(found)
    else:
        output.line(f"{found['id']}: {word(found['status'])}")
