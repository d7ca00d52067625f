"""Why a queued run is not placed: a stable cause, a sentence, and the names and numbers that are in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from schemas.tasks import Placement
from schemas.workers import Capabilities
from services.dispatcher.placement import Lane, Limit, mismatch
from services.dispatcher.records import RunRecord, WorkerRecord

Standing = Literal["ready", "no_slots", "draining", "offline"]
_NAMED = 3
"""How many workers or lacks a sentence names."""


class Why(NamedTuple):
    """A cause with its words; `facts` hold what the words are made of, for programs and other languages."""

    cause: str
    sentence: str
    facts: dict[str, Any]


class Known(NamedTuple):
    """A worker as it stands: `free` slots count only while it is ready."""

    worker: WorkerRecord
    capabilities: Capabilities
    free: int
    standing: Standing


def standing_of(worker: WorkerRecord, now: int) -> Standing:
    """Whether a worker takes new runs now, and if not, why."""
    if worker.lease_expires_at_ms <= now or worker.silent_since_ms is not None or worker.status == "offline":
        return "offline"
    if worker.drain_requested or worker.status == "draining":
        return "draining"
    return "ready" if worker.slots else "no_slots"


def why_not(
    run: RunRecord,
    lane: Lane,
    known: Sequence[Known],
    limits: Mapping[Limit, int],
    live: Mapping[Limit, int],
    *,
    in_turn: bool,
) -> Why | None:
    """Why this run is not placed now; None when nothing but its turn is missing.

    What no waiting mends is told first: where the run may go at all, then what holds those workers back, then limits,
    then slots. `in_turn` says that the task's own limit comes of a rule that lets its runs take turns.
    """
    online = [one for one in known if one.standing != "offline"]
    fitting = [one for one in online if mismatch(lane.placement, one.worker.id, one.capabilities) is None]
    if not fitting:
        return _nobody(lane.placement, known, online)
    ready = [one for one in fitting if one.standing == "ready"]
    if not ready:
        return _held_back(fitting)
    full = next((limit for limit in lane.limits if limit in limits and live.get(limit, 0) >= limits[limit]), None)
    if full is not None:
        return _limited(full, limits[full], run.task_name, in_turn=in_turn)
    if not any(one.free for one in ready):
        slots = sum(one.worker.slots for one in ready)
        words = "The only slot" if slots == 1 else f"All {slots} slots"
        is_taken = "is" if slots == 1 else "are"
        where = f"of worker {ready[0].worker.id}" if len(ready) == 1 else "of the workers it may go to"
        return Why("no_free_slot", f"{words} {where} {is_taken} taken.", {"slots": slots, "workers": _names(ready)})
    return None


def behind(ahead: int) -> Why:
    """The run's place in its line: `ahead` others (at most 1000) come before it."""
    if not ahead:
        return Why("next", "It is next and will be placed in a moment.", {})
    others = "is one run" if ahead == 1 else f"are {ahead} runs" if ahead < 1000 else "are 1000 or more runs"
    return Why("behind_others", f"There {others} before it.", {"ahead": ahead})


def unreadable() -> Why:
    """The run's revision is gone, so that nothing can be said of it."""
    return Why("revision_unavailable", "The task revision that it is to execute cannot be read.", {})


def _nobody(placement: Placement, known: Sequence[Known], online: Sequence[Known]) -> Why:
    away = [one for one in known if one.standing == "offline"]
    able = [one for one in away if mismatch(placement, one.worker.id, one.capabilities) is None]
    if able:
        names = _names(able)
        are = "is" if len(able) == 1 else "are"
        return Why("worker_offline", f"{_workers(able)} may take it, but {are} offline.", {"workers": names})
    if not online:
        return Why("no_worker", "No worker is online.", {})
    found = {mismatch(placement, one.worker.id, one.capabilities) for one in online}
    lacks = sorted(lack for lack in found if lack is not None)
    facts = {"lacking": [[lack.kind, lack.wanted] for lack in lacks[:_NAMED]]}
    if all(lack.kind == "no_pool" for lack in lacks):
        return Why("no_matching_worker", "Every worker online belongs to a pool, and the task names none.", facts)
    words = [lack.words() for lack in lacks if lack.kind != "no_pool"]
    return Why("no_matching_worker", f"No worker has {' and '.join(words[:_NAMED])}.", facts)


def _held_back(fitting: Sequence[Known]) -> Why:
    full = [one for one in fitting if one.standing == "no_slots"]
    if full:
        are = "offers" if len(full) == 1 else "offer"
        return Why(
            "worker_without_slots",
            f"{_workers(full)} may take it, but {are} no slot: the disk has too little room, or none is set.",
            {"workers": _names(full)},
        )
    are = "is" if len(fitting) == 1 else "are"
    return Why(
        "worker_draining",
        f"{_workers(fitting)} may take it, but {are} draining and take{'s' if len(fitting) == 1 else ''} nothing new.",
        {"workers": _names(fitting)},
    )


def _limited(limit: Limit, most: int, task_name: str, *, in_turn: bool) -> Why:
    times = "one run" if most == 1 else f"{most} runs"
    facts = {"limit": most, "name": task_name if limit.kind == "task" else limit.key}
    if limit.kind == "project":
        return Why("project_limit", f"Project {limit.project} has {times} in work, which is its limit.", facts)
    if limit.kind == "key":
        return Why("key_limit", f"The key {limit.key} has {times} in work, which is its limit.", facts)
    if in_turn:
        return Why("overlap", f"A run of task {task_name} is in work, and its runs take turns.", facts)
    return Why("task_limit", f"Task {task_name} has {times} in work, which is its limit.", facts)


def _names(some: Sequence[Known]) -> list[str]:
    return [one.worker.id for one in some[:_NAMED]]


def _workers(some: Sequence[Known]) -> str:
    names = _names(some)
    if len(some) > _NAMED:
        return f"Workers {', '.join(names)} and {len(some) - _NAMED} more"
    return f"Worker {names[0]}" if len(names) == 1 else f"Workers {' and '.join(names)}"
