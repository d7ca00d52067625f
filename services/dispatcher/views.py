"""What people read, made from the ledger's records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from schemas.identity import Subject
from schemas.runs import Attempt, LogFact, Run, RunEvent
from schemas.workers import Capabilities, Worker
from services.dispatcher.records import AttemptRecord, RunRecord, WorkerRecord


def run_view(run: RunRecord, waiting_reason: str | None = None) -> Run:
    """A run; `waiting_reason` tells in words why a queued one is not placed."""
    return Run(
        id=run.id,
        project=run.project_id,
        task_id=run.task_id,
        task_name=run.task_name,
        task_revision=run.task_revision,
        status=run.status,
        version=run.version,
        event_sequence=run.event_sequence,
        priority=run.priority,
        trigger_type=run.trigger_type,
        trigger_id=run.trigger_id,
        scheduled_for_ms=run.scheduled_for_ms,
        requested_by=msgspec.convert({"type": run.requested_by_type, "id": run.requested_by_id}, Subject),
        parent_run_id=run.parent_run_id,
        retry_of_run_id=run.retry_of_run_id,
        attempt=run.attempt,
        attempt_id=run.attempt_id,
        worker_id=run.worker_id,
        exit_code=run.exit_code,
        error_code=run.error_code,
        error_summary=run.error_summary,
        waiting_reason=waiting_reason,
        cancel_requested_at_ms=run.cancel_requested_at_ms,
        cancel_reason=run.cancel_reason,
        created_at_ms=run.created_at_ms,
        queued_at_ms=run.queued_at_ms,
        started_at_ms=run.started_at_ms,
        finished_at_ms=run.finished_at_ms,
    )


def attempt_view(attempt: AttemptRecord) -> Attempt:
    """An attempt; a late receipt's exit code is shown as its own."""
    return Attempt(
        id=attempt.id,
        run_id=attempt.run_id,
        attempt=attempt.attempt,
        status=attempt.status,
        executor=attempt.executor,
        worker_id=attempt.worker_id,
        exit_code=attempt.late_exit_code if attempt.late_receipt else attempt.exit_code,
        signal=attempt.signal,
        error_code=attempt.error_code,
        error_summary=attempt.error_summary,
        created_at_ms=attempt.created_at_ms,
        started_at_ms=attempt.started_at_ms,
        finished_at_ms=attempt.finished_at_ms,
        deadline_at_ms=attempt.deadline_at_ms,
        late_receipt=bool(attempt.late_receipt),
        log=None if attempt.log is None else msgspec.json.decode(attempt.log, type=LogFact),
    )


def event_view(row: Mapping[str, Any]) -> RunEvent:
    """An event."""
    return RunEvent(
        id=f"{row['run_id']}-{row['sequence']}",
        run_id=row["run_id"],
        sequence=row["sequence"],
        type=row["type"],
        actor_type=row["actor_type"],
        actor_id=row["actor_id"],
        attempt_id=row["attempt_id"],
        payload=msgspec.json.decode(row["payload"], type=dict[str, Any]),
        created_at_ms=row["created_at_ms"],
    )


def worker_view(worker: WorkerRecord, leased: int, now: int) -> Worker:
    """A worker; one whose session has run out, or that fell silent, is offline whatever it said last."""
    away = worker.lease_expires_at_ms <= now or worker.silent_since_ms is not None
    return msgspec.convert(
        {
            "id": worker.id,
            "session_id": worker.session_id,
            "generation": worker.generation,
            "status": "offline" if away else "draining" if worker.drain_requested else worker.status,
            "slots": worker.slots,
            "leased": leased,
            "capabilities": msgspec.json.decode(worker.capabilities, type=Capabilities),
            "registered_at_ms": worker.registered_at_ms,
            "last_heartbeat_at_ms": worker.last_heartbeat_at_ms,
        },
        Worker,
    )
