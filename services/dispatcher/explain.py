"""Why a run is where it is: a stable cause, a sentence, and what moves it next."""

from __future__ import annotations

from typing import Any, NamedTuple

from services.dispatcher.records import CancellationRecord, Case, WorkerRecord
from services.dispatcher.store.holds import HoldRecord


class Reason(NamedTuple):
    """A cause with its words; `facts` are times (ms) and names for programs."""

    cause: str
    sentence: str
    next_step: str
    facts: dict[str, Any]


_END_WORDS = {
    "overlap_skipped": "Another run of this task was not over when it came in, and the task skips then.",
    "overlap_queue_full": "As many runs of this task as may wait were waiting already.",
    "overlap_replaced": "A newer run of this task took its place.",
    "queue_timeout": "It was not started within its queue time.",
    "approval_rejected": "Its approval was rejected or withdrawn.",
    "approval_expired": "Nobody approved it in time.",
    "worker_lost": "Its worker stopped renewing the lease, and what became of the process is not known.",
    "process_vanished": "Its process was gone without an exit code.",
    "context_unavailable": "Its secrets were not delivered in time.",
    "executor_start_failed": "Its process could not be started.",
    "not_started": "Its worker did not get to start it in time.",
    "revision_unavailable": "The task revision that it was to execute could not be read.",
    "run_timeout": "Its time was over and its process tree was ended.",
    "cancelled_by_user": "Somebody cancelled it.",
    "cancelled_by_policy": "A rule ended it.",
    "cancelled_by_shutdown": "It was ended with the platform.",
}


def explain(
    case: Case,
    now: int,
    *,
    waiting: tuple[str, str] | None = None,
    worker: WorkerRecord | None = None,
    cancellation: CancellationRecord | None = None,
    hold: HoldRecord | None = None,
) -> Reason:
    """The reason as the ledger's records tell it. `waiting` is placement's answer for a queued run."""
    run = case.run
    if run.finished_at_ms is not None:
        return _ended(case)
    if run.cancel_reason is not None:
        return _ending(case, cancellation, worker, now)
    if run.status == "waiting_approval":
        until = hold.expires_at_ms if hold else None
        if hold is not None and hold.next_ring_at_ms is not None:
            return Reason(
                "approval_not_asked",
                "It needs an approval; the approval service has not confirmed the request yet.",
                "The request is sent again until it is confirmed.",
                {"rings": hold.rings, "next_ring_at_ms": hold.next_ring_at_ms},
            )
        return Reason(
            "waiting_approval",
            "It needs an approval and was not released yet.",
            "Approve or reject it; it times out when the request expires, and is not released before it is due.",
            {"expires_at_ms": until, "not_before_ms": run.not_before_ms},
        )
    if run.status == "retry_wait":
        at = case.policy.next_attempt_at_ms if case.policy else None
        most = case.policy.max_attempts if case.policy else 1
        return Reason(
            "retry_wait",
            f"Attempt {run.attempt} of {most} ended ({run.error_code}); the pause before the next is not over.",
            "The next attempt is queued when the pause is over.",
            {"next_attempt_at_ms": at, "attempt": run.attempt, "max_attempts": most},
        )
    if run.status in ("created", "queued"):
        cause, words = waiting or ("next", "It is next and will be placed in a moment.")
        return Reason(cause, words, _NEXT.get(cause, "It is placed as soon as that changes."), {"lane": run.lane})
    return _in_work(case, worker, now)


_NEXT = {
    "no_worker": "Start a worker, or look why none is online (ql3 worker list).",
    "no_matching_worker": "Start a worker that has it, or change where the task may run.",
    "no_free_slot": "It is placed when a slot is free.",
    "task_limit": "It is placed when a run of the task ends.",
    "project_limit": "It is placed when a run of the project ends.",
    "key_limit": "It is placed when a run under the key ends.",
    "behind_others": "It is placed in its turn.",
    "next": "Nothing has to be done.",
    "revision_unavailable": "Save the task again and run it anew.",
}


def _in_work(case: Case, worker: WorkerRecord | None, now: int) -> Reason:
    run, attempt, lease = case.run, case.attempt, case.lease
    name = run.worker_id or "?"
    if attempt is None or lease is None:
        return Reason("inconsistent", "The ledger has no attempt in work for it.", "See the log of dispatcher.", {})
    facts: dict[str, Any] = {
        "worker": name,
        "lease_generation": lease.lease_generation,
        "lease_expires_at_ms": lease.expires_at_ms,
        "attempt": attempt.attempt,
    }
    if lease.expires_at_ms <= now:
        return Reason(
            "lease_over",
            f"Worker {name} let its lease run out.",
            "It is judged in a moment: an offer goes back to the queue, a started attempt is lost.",
            facts,
        )
    if attempt.status == "claimed":
        facts["offers"] = lease.offers
        return Reason(
            "offered",
            f"It was offered to worker {name} and not started yet.",
            "It is offered again until the lease runs out, then it goes back to the queue.",
            facts,
        )
    if attempt.status == "starting":
        return Reason("starting", f"Worker {name} may start it now.", "The worker reports its start or its end.", facts)
    if attempt.deadline_at_ms is not None:
        facts["deadline_at_ms"] = attempt.deadline_at_ms
    missed = worker is not None and now - lease.renewed_at_ms > 2 * 5_000
    if missed:
        return Reason(
            "silent_worker",
            f"It runs on worker {name}, which has not renewed its lease for a while.",
            "It goes on when the worker is heard again; otherwise it is lost when the lease runs out.",
            facts,
        )
    return Reason("running", f"It runs on worker {name}.", "It ends when its process tree ends.", facts)


def _ending(case: Case, cancellation: CancellationRecord | None, worker: WorkerRecord | None, now: int) -> Reason:
    run = case.run
    why = {
        "user": "Somebody cancelled it",
        "timeout": "Its time is over",
        "policy": "A rule ends it",
        "shutdown": "The platform is being shut down",
        "reconcile": "It is being put in order",
    }[run.cancel_reason or "user"]
    name = run.worker_id or "?"
    if cancellation is None or case.attempt is None or case.attempt.status not in ("starting", "running"):
        return Reason("ending", f"{why}; nothing of it runs.", "It ends in a moment.", {})
    facts: dict[str, Any] = {
        "worker": name,
        "deliveries": cancellation.dispatch_count,
        "next_delivery_at_ms": cancellation.next_attempt_at_ms,
        "grace_ms": cancellation.grace_ms,
    }
    if cancellation.status == "blocked":
        return Reason(
            "cancel_blocked",
            f"{why}; worker {name} was asked {cancellation.dispatch_count} times and has not proved the end.",
            "Look at the worker; cancelling again asks it anew.",
            facts,
        )
    if cancellation.dispatch_count == 0:
        return Reason("cancel_undelivered", f"{why}; worker {name} is being told.", "The worker ends the tree.", facts)
    return Reason(
        "cancel_delivered",
        f"{why}; worker {name} was told and has not proved that the process tree is gone.",
        "TERM, a grace period, then KILL; the worker reports the end.",
        facts,
    )


def _ended(case: Case) -> Reason:
    run = case.run
    words = _END_WORDS.get(run.error_code or "")
    if words is None:
        words = run.error_summary or {
            "succeeded": "Its process ended with code 0.",
            "failed": "Its process failed.",
            "cancelled": "It was cancelled.",
            "timed_out": "Its time was over.",
        }.get(run.status, "It has ended.")
    step = "Nothing; a retry makes a new run." if run.status != "succeeded" else "Nothing."
    facts: dict[str, Any] = {"attempts": run.attempt, "finished_at_ms": run.finished_at_ms}
    if run.exit_code is not None:
        facts["exit_code"] = run.exit_code
    if case.attempt is not None and case.attempt.late_receipt:
        facts["late_exit_code"] = case.attempt.late_exit_code
        words += " A receipt that came later tells how it ended."
    return Reason(run.error_code or run.status, words, step, facts)
