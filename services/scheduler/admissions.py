"""Orders for runs: how one is made, and how many travel together. No I/O."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from schemas import limits
from schemas.identity import Subject
from schemas.runs import RunOrder, SubmitRuns, TriggerType
from schemas.tasks import ExecutionRevision
from services.kit.ids import new_id
from services.scheduler.executions import Pinned

SENDER: Final = "scheduler"
KEY_PREFIX: Final = "ql3:"
"""Idempotency keys of ours; people's may not begin so."""
_ROOM: Final = limits.BATCH_BYTES - 4_096

_sorted = msgspec.json.Encoder(order="sorted")


@dataclass(frozen=True, slots=True)
class Admission:
    """One order with the revision it pins, as it is stored and sent."""

    order: RunOrder
    revision: ExecutionRevision
    trigger_revision: int | None = None
    again: bool = False
    """Its instant was admitted before, and runs once more because somebody asked for it."""

    def row(self) -> dict[str, Any]:
        """The row of the table of open orders."""
        order = self.order
        return {
            "id": order.order_id,
            "run_id": order.run_id,
            "project": order.project,
            "task_id": self.revision.task_id,
            "task_revision": self.revision.task_revision,
            "trigger_id": order.trigger_id,
            "trigger_revision": self.trigger_revision,
            "scheduled_for_ms": None if self.again else order.scheduled_for_ms,
            "not_before_ms": order.not_before_ms,
            "idempotency_key": order.idempotency_key,
            "request_digest": request_digest(self.revision.task_id, order.inputs, order.priority, order.trigger_type),
            "run_order": msgspec.json.encode(order).decode(),
        }


def request_digest(task_id: str, inputs: Any, priority: int | None, trigger_type: str) -> str:
    """What one idempotency key stands for; a later revision of the task does not change it."""
    content = _sorted.encode([task_id, inputs, priority, trigger_type])
    return hashlib.sha256(b"ql3.admission.v1\0" + content).hexdigest()


def for_fire(
    pinned: Pinned,
    *,
    trigger_id: str,
    trigger_revision: int,
    trigger_type: TriggerType,
    occasion: str,
    inputs: dict[str, Any] | None,
    now_ms: int,
    scheduled_for_ms: int | None = None,
    not_before_ms: int | None = None,
    parent_run_id: str | None = None,
    hold: bool = False,
    requested_by: Subject | None = None,
) -> Admission:
    """The order of one occasion of a trigger (an instant, a call, another run); its key is the same, whoever asks."""
    # What somebody asks for stays the same question when it is asked again after an edit of the trigger.
    revision = "" if trigger_type in ("webhook", "backfill") else f"{trigger_revision}:"
    key = f"{KEY_PREFIX}{trigger_type}:v1:{trigger_id}:{revision}{occasion}"
    order = RunOrder(
        order_id=new_id(),
        run_id=new_id(),
        project=pinned.revision.project,
        revision=pinned.digest,
        trigger_type=trigger_type,
        requested_by=requested_by or Subject(type="system", id=f"trigger:{trigger_id}"),
        created_at_ms=now_ms,
        idempotency_key=key,
        trigger_id=trigger_id,
        scheduled_for_ms=scheduled_for_ms,
        not_before_ms=not_before_ms,
        inputs=inputs,
        parent_run_id=parent_run_id,
        hold=hold,
    )
    return Admission(order, pinned.revision, trigger_revision)


def for_person(
    pinned: Pinned,
    *,
    trigger_type: TriggerType,
    requested_by: Subject,
    idempotency_key: str | None,
    priority: int | None,
    inputs: dict[str, Any] | None,
    hold: bool,
    now_ms: int,
    trigger: tuple[str, int] | None = None,
) -> Admission:
    """The order of a person or program that runs a task now, through a trigger (id, revision) or without one."""
    order_id = new_id()
    order = RunOrder(
        order_id=order_id,
        run_id=new_id(),
        project=pinned.revision.project,
        revision=pinned.digest,
        trigger_type=trigger_type,
        requested_by=requested_by,
        created_at_ms=now_ms,
        idempotency_key=idempotency_key or f"{KEY_PREFIX}run:v1:{order_id}",
        priority=priority,
        trigger_id=trigger[0] if trigger else None,
        inputs=inputs,
        hold=hold,
    )
    return Admission(order, pinned.revision, trigger[1] if trigger else None)


def messages(admissions: Iterable[Admission]) -> Iterator[SubmitRuns]:
    """Orders in as few messages as the bounds of one allow, in order; each revision once a message."""
    revisions: dict[str, ExecutionRevision] = {}
    orders: list[RunOrder] = []
    room = _ROOM
    for admission in admissions:
        size = len(msgspec.json.encode(admission.order))
        digest = admission.order.revision
        if digest not in revisions:
            size += len(msgspec.json.encode(admission.revision))
        if orders and (size > room or len(orders) == limits.BATCH_ITEMS):
            yield SubmitRuns(sender=SENDER, revisions=list(revisions.values()), runs=orders)
            revisions, orders, room = {}, [], _ROOM
            size = len(msgspec.json.encode(admission.order)) + len(msgspec.json.encode(admission.revision))
        revisions[digest] = admission.revision
        orders.append(admission.order)
        room -= size
    if orders:
        yield SubmitRuns(sender=SENDER, revisions=list(revisions.values()), runs=orders)
