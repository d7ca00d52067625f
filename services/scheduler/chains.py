"""Tasks that follow others: no circle, and no chain without end."""

from __future__ import annotations

from typing import Final

import msgspec

from schemas.errors import Ql3Error
from schemas.triggers import TriggerSpec
from services.kit.database import Transaction
from services.scheduler.store import tasks as task_store
from services.scheduler.store import triggers as store

CHAIN_LENGTH: Final = 64
"""How many tasks may follow each other."""


async def refuse_cycle(tx: Transaction, project: str, task: str, spec: TriggerSpec, *, absent: bool = False) -> bool:
    """Whether the task that this one is to follow is there; with `absent` it need not be.

    Raises `invalid` when a task would follow itself, at once or through others; a chain is also bounded.
    """
    there = True
    ahead = [spec.after_task]
    seen: set[str] = set()
    while ahead:
        name = ahead.pop()
        if name is None or name in seen:
            continue
        seen.add(name)
        if name == task:
            raise Ql3Error("invalid", "The task would follow itself without end.", field="after_task")
        if len(seen) > CHAIN_LENGTH:
            raise Ql3Error("invalid", f"At most {CHAIN_LENGTH} tasks follow each other.", field="after_task")
        row = await task_store.find(tx, project, name)
        if row is None or row["deleted"]:
            there = there and name != spec.after_task
            if not there and not absent:
                raise Ql3Error("not_found", "There is no such task in this project.", field="after_task")
            continue
        # Held, as the task that is to follow is: of two that would follow each other at once, one sees the other.
        await task_store.lock(tx, row["id"])
        for trigger in await store.of_tasks(tx, [row["id"]]):
            if trigger["kind"] == "after_task":
                ahead.append(msgspec.json.decode(trigger["spec"], type=TriggerSpec).after_task)
    return there
