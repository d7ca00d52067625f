"""Rows as people read them. No I/O."""

from __future__ import annotations

import msgspec

from schemas.identity import Subject
from schemas.tasks import Task, TaskRevision
from schemas.triggers import MissedFire, Trigger, TriggerSpec
from services.kit.database import Row
from services.scheduler import tasks as rules


def task_view(row: Row, triggers: list[Row], warnings: list[str] | None = None) -> Task:
    """A task with its current specification, checked against its digest, and its triggers."""
    spec = rules.read_spec(row["spec"], row["project"], row["id"], row["revision"], row["content_digest"])
    return Task(
        id=row["id"],
        project=row["project"],
        name=row["name"],
        revision=row["revision"],
        version=row["version"],
        enabled=bool(row["enabled"]),
        deleted=bool(row["deleted"]),
        spec=spec,
        digest=row["content_digest"],
        created_at_ms=row["created_at_ms"],
        updated_at_ms=row["updated_at_ms"],
        triggers=[trigger_view(trigger) for trigger in triggers],
        warnings=warnings or [],
    )


def revision_view(row: Row) -> TaskRevision:
    """Who made a revision, and when."""
    return TaskRevision(
        revision=row["revision"],
        digest=row["content_digest"],
        created_by=Subject(type=row["created_by_type"], id=row["created_by_id"]),
        created_at_ms=row["created_at_ms"],
    )


def trigger_view(row: Row) -> Trigger:
    """A trigger with its place on the calendar; its specification is enabled as it is now, for who writes it back."""
    spec = msgspec.json.decode(row["spec"], type=TriggerSpec)
    return Trigger(
        id=row["id"],
        project=row["project"],
        task_id=row["task_id"],
        task_name=row["task_name"],
        revision=row["revision"],
        version=row["version"],
        enabled=bool(row["enabled"]),
        spec=msgspec.structs.replace(spec, enabled=bool(row["enabled"])),
        next_fire_at_ms=row["next_fire_at_ms"],
        last_scheduled_at_ms=row["last_scheduled_at_ms"],
        missed_count=row["missed_count"],
        created_at_ms=row["created_at_ms"],
        updated_at_ms=row["updated_at_ms"],
    )


def missed_view(row: Row) -> MissedFire:
    """Some instants that were missed for one cause."""
    return MissedFire(
        id=row["id"],
        trigger_id=row["trigger_id"],
        task_id=row["task_id"],
        scheduled_for_ms=row["first_ms"],
        last_ms=row["last_ms"],
        cause=row["cause"],
        count=row["count"],
        at_least=bool(row["at_least"]),
        recorded_at_ms=row["recorded_at_ms"],
    )
