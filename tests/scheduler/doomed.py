"""Schedulers in processes of their own that kill themselves at a named point: `python -m tests.scheduler.doomed`.

Each line of standard input is a case in JSON: `config` of the database, `now_ms`, `ledger` (a file that stands for the
dispatcher: it keeps every order it is given, in a line, and answers), and `point`. Each case runs in a fork, so that
imports are paid once; the line that answers it is the fork's exit code, 0 when it came to its end alive.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from schemas.base import encode
from schemas.runs import SubmitAnswer, SubmitRuns, Submitted
from services.kit.clock import ManualClock
from services.kit.database import DatabaseConfig, open_database
from services.scheduler import loops, scheduling, submitting
from services.scheduler.store import admissions, schedules
from tests.scheduler.conftest import Ledger, Room, run_of

POINTS = (
    "rows claimed",
    "orders inserted",
    "missed fires recorded",
    "schedules moved",
    "admission committed",
    "dispatcher asked",
    "dispatcher answered",
    "answers written",
    "answers committed",
    "orders queued again",
    "orders rung",
)
"""Each step of an admission, in order; a crash is right after it."""
RINGING = POINTS[-2:]
"""Those of orders that nobody answered, which are rung again."""


def die() -> None:
    """What no code can prepare for."""
    os.kill(os.getpid(), signal.SIGKILL)


def after(work: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Do it, then die."""

    async def doomed(*args: Any, **more: Any) -> Any:
        done = await work(*args, **more)
        die()
        return done

    return doomed


class FileLedger(Ledger):
    """A dispatcher whose memory is a file, so that it outlives who asks."""

    def __init__(self, path: Path, point: str) -> None:
        super().__init__()
        self._path = path
        self._point = point

    async def submit(self, message: SubmitRuns) -> SubmitAnswer:
        """Keep the orders, then answer."""
        if self._point == "dispatcher asked":
            die()
        with self._path.open("ab") as file:
            file.write(encode(message) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        if self._point == "dispatcher answered":
            die()
        return SubmitAnswer(results=[Submitted(order_id=order.order_id, run=run_of(order)) for order in message.runs])


async def main(case: dict[str, Any]) -> None:
    """Run one scheduler until it is done or dead."""
    database = await open_database(DatabaseConfig(**case["config"]), "scheduler")
    point = case["point"]
    room = Room(database, ManualClock(case["now_ms"]), FileLedger(Path(case["ledger"]), point))
    if point == "rows claimed":
        schedules.claim = after(schedules.claim)
    elif point == "orders inserted":
        admissions.insert = after(admissions.insert)
    elif point == "missed fires recorded":
        loops.record_missed = after(scheduling.record_missed)  # type: ignore[attr-defined]
    elif point == "schedules moved":
        schedules.move = after(schedules.move)
    elif point == "admission committed":
        room.submitter.post = lambda admissions: after(asyncio.sleep)(0)  # type: ignore[method-assign]
    elif point == "answers written":
        admissions.commit = after(admissions.commit)
    elif point == "answers committed":
        room.submitter.stop = after(room.submitter.stop)  # type: ignore[method-assign]
    elif point == "orders queued again":
        loops.queue_orders = after(submitting.queue_orders)  # type: ignore[attr-defined]
    elif point == "orders rung":
        room.ringing.step = after(room.ringing.step)  # type: ignore[method-assign]
    if point.startswith("orders queued") or point == "orders rung":
        await room.ringing.step()
    else:
        await room.look()
    await database.close()


def serve() -> None:
    """Run case after case."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            asyncio.run(main(json.loads(line)))
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve()
