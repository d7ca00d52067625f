"""Why a run is where it is: a stable cause, a sentence, and what moves it next."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from schemas import limits
from services.dispatcher.records import CancellationRecord, Case, LeaseRecord
from services.dispatcher.store.holds import HoldRecord
from services.dispatcher.waiting import Why, behind


class Reason(NamedTuple):
    """A cause with its words; `facts` are times (ms) and names for programs."""

    cause: str
    sentence: str
    next_step: str
    facts: dict[str, Any]


_END_WORDS: Final = {
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
_TOLD_MORE: Final = frozenset({"context_unavailable", "executor_start_failed", "not_started"})
"""Ends whose own summary names the command, the folder or the secret."""


_SILENT_MS: Final = 2 * limits.BEAT_MS


def explain(
    case: Case,
    now: int,
    *,
    waiting: Why | None = None,
    cancellation: CancellationRecord | None = None,
    hold: HoldRecord | None = None,
    listening: bool = False,
) -> Reason:
    """The reason as the ledger's records tell it.

    `waiting` is placement's answer for a queued run; `listening` says that we were away ourselves, so that a silence of
    workers is not held against them yet.
    """
    run = case.run
    if run.finished_at_ms is not None:
        return _ended(case)
    if run.cancel_reason is not None:
        return _ending(case, cancellation, now)
    if run.status == "waiting_approval":
        return _held(hold, run.not_before_ms)
    if run.status == "retry_wait":
        return _pausing(case, now)
    if run.status in ("created", "queued"):
        found = waiting or behind(0)
        return Reason(found.cause, found.sentence, _NEXT[found.cause], found.facts)
    return _in_work(case, now, listening=listening)


_NEXT: Final = {
    "no_worker": "Start a worker, or look why none is online (ql3 worker list).",
    "worker_offline": "Start it again, or look why it is not heard (ql3 worker list).",
    "worker_draining": "Let it work again (ql3 worker resume), or start another worker that may take it.",
    "worker_without_slots": "Make room on its disk, or start another worker that may take it.",
    "no_matching_worker": "Start a worker that has it, or change where the task may run.",
    "no_free_slot": "It is placed when a slot is free.",
    "task_limit": "It is placed when a run of the task ends.",
    "overlap": "It is placed when the run before it ends.",
    "project_limit": "It is placed when a run of the project ends; ql3 project limit changes the limit.",
    "key_limit": "It is placed when a run under the key ends; ql3 project limit --key changes the limit.",
    "behind_others": "It is placed in its turn.",
    "next": "Nothing has to be done.",
    "revision_unavailable": "Save the task again and run it anew.",
}


def _held(hold: HoldRecord | None, not_before_ms: int | None) -> Reason:
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
        {"expires_at_ms": hold.expires_at_ms if hold else None, "not_before_ms": not_before_ms},
    )


def _pausing(case: Case, now: int) -> Reason:
    run, policy = case.run, case.policy
    at = policy.next_attempt_at_ms if policy else None
    most = policy.max_attempts if policy else 1
    facts = {"next_attempt_at_ms": at, "attempt": run.attempt, "max_attempts": most, "error_code": run.error_code}
    before = f"Attempt {run.attempt} of {most} ended ({run.error_code})"
    if at is not None and at <= now:
        return Reason(
            "retry_due", f"{before}; the pause before the next is over.", "It is queued again in a moment.", facts
        )
    return Reason(
        "retry_wait",
        f"{before}; the pause before the next is not over.",
        "The next attempt is queued when the pause is over.",
        facts,
    )


def _in_work(case: Case, now: int, *, listening: bool) -> Reason:
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
    if attempt.deadline_at_ms is not None:
        facts["deadline_at_ms"] = attempt.deadline_at_ms
    if lease.expires_at_ms <= now:
        return _over(name, facts, started=attempt.status != "claimed", listening=listening)
    if attempt.status == "claimed":
        return _offered(case, lease, now, facts)
    if now - lease.renewed_at_ms > _SILENT_MS:
        return Reason(
            "silent_worker",
            f"It is in the hands of worker {name}, which has not renewed its lease for a while.",
            "It goes on when the worker is heard again; otherwise it is lost when the lease runs out.",
            facts,
        )
    if attempt.status == "starting":
        return Reason("starting", f"Worker {name} may start it now.", "The worker reports its start or its end.", facts)
    return Reason("running", f"It runs on worker {name}.", "It ends when its process tree ends.", facts)


def _over(name: str, facts: dict[str, Any], *, started: bool, listening: bool) -> Reason:
    if started and listening:
        return Reason(
            "listening",
            f"The lease of worker {name} is over, but the dispatcher was away itself and could not hear it.",
            "The worker has a few seconds to be heard before it is judged.",
            facts,
        )
    if started:
        return Reason(
            "lease_over",
            f"Worker {name} let its lease run out, and what became of the process is not known.",
            "It is judged in a moment: the attempt is lost, and tried again where that is safe.",
            facts,
        )
    return Reason(
        "offer_lapsed",
        f"Worker {name} did not take it within the time of its lease.",
        "It goes back to the queue in a moment; nothing was started.",
        facts,
    )


def _offered(case: Case, lease: LeaseRecord, now: int, facts: dict[str, Any]) -> Reason:
    name, due = lease.worker_id, case.run.not_before_ms
    facts["offers"] = lease.offers
    if due is not None and due > now:
        return Reason(
            "not_due",
            f"It lies ready at worker {name}; its time has not come.",
            "The worker starts it when it is due.",
            {**facts, "not_before_ms": due},
        )
    if lease.offers > 1:
        return Reason(
            "offer_not_taken",
            f"It was offered to worker {name} {lease.offers} times and not taken yet.",
            "It is offered again until the lease runs out, then it goes back to the queue.",
            facts,
        )
    return Reason(
        "offered",
        f"It was offered to worker {name} and not started yet.",
        "It is offered again until the lease runs out, then it goes back to the queue.",
        facts,
    )


_ENDING_WORDS: Final = {
    "user": "Somebody cancelled it",
    "timeout": "Its time is over",
    "policy": "A rule ends it",
    "shutdown": "The platform is being shut down",
    "reconcile": "It is being put in order",
}


def _ending(case: Case, cancellation: CancellationRecord | None, now: int) -> Reason:
    run, attempt, lease = case.run, case.attempt, case.lease
    why = _ENDING_WORDS[run.cancel_reason or "user"]
    facts: dict[str, Any] = {"reason": run.cancel_reason}
    if attempt is None or attempt.status not in ("starting", "running") or lease is None:
        return Reason("ending", f"{why}; nothing of it runs.", "It ends in a moment.", facts)
    name = lease.worker_id
    facts |= {"worker": name, "lease_expires_at_ms": lease.expires_at_ms}
    if cancellation is None or cancellation.dispatch_count == 0:
        return Reason("cancel_undelivered", f"{why}; worker {name} is being told.", "The worker ends the tree.", facts)
    facts |= {
        "deliveries": cancellation.dispatch_count,
        "next_delivery_at_ms": cancellation.next_attempt_at_ms,
        "grace_ms": cancellation.grace_ms,
    }
    if cancellation.status == "blocked":
        return Reason(
            "cancel_blocked",
            f"{why}; worker {name} was told {cancellation.dispatch_count} times and has not proved the end.",
            "Look at the worker; cancelling again tells it anew.",
            facts,
        )
    if now - lease.renewed_at_ms > _SILENT_MS:
        return Reason(
            "cancel_unheard",
            f"{why}; worker {name} was told, but is not heard.",
            "It is told again; the run ends with the worker's proof, or when the lease runs out.",
            facts,
        )
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
    elif run.error_code in _TOLD_MORE and run.error_summary:
        words += f" {run.error_summary}"
    step = "Nothing; a retry makes a new run." if run.status != "succeeded" else "Nothing."
    facts: dict[str, Any] = {"status": run.status, "attempts": run.attempt, "finished_at_ms": run.finished_at_ms}
    if run.exit_code is not None:
        facts["exit_code"] = run.exit_code
    if run.error_summary is not None:
        facts["error_summary"] = run.error_summary
    if case.attempt is not None and case.attempt.signal is not None:
        facts["signal"] = case.attempt.signal
    if case.attempt is not None and case.attempt.late_receipt:
        facts["late_exit_code"] = case.attempt.late_exit_code
        words += " A receipt that came later tells how it ended."
    return Reason(run.error_code or run.status, words, step, facts)
