"""Rules of artifacts: when to look for a file, and when it counts as stored, missing or old. Times in milliseconds."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from schemas import limits
from services.retention.policy import DAY_MS, HOUR_MS

FIRST_LOOK_MS: Final = 200
LAST_LOOK_MS: Final = 60_000
MISSING_LOOK_MS: Final = HOUR_MS
RING_FOR_MS: Final = 30 * DAY_MS
"""A worker that did not answer for so long is gone for good; its order is dropped."""


class Look(NamedTuple):
    """What a look for a file found, and when to look again (None: never)."""

    state: Literal["pending", "stored", "missing"]
    again_at_ms: int | None


class Candidate(NamedTuple):
    """An artifact that may be old enough, with its place in the order of the sweep."""

    finished_at_ms: int
    artifact_id: str
    attempt_id: str
    run_id: str
    worker_id: str
    state: str


def look(*, found: int | None, size: int, looks: int, finished_at_ms: int, now_ms: int) -> Look:
    """Decide after a look: `found` is the size of the file, None when there is none; `looks` were made before.

    A file of another size is not this artifact. For a day it is looked for with growing pauses, then hourly: a worker
    that was away for longer still publishes what it kept.
    """
    if found == size:
        return Look("stored", None)
    if now_ms - finished_at_ms >= DAY_MS:
        return Look("missing", now_ms + MISSING_LOOK_MS)
    return unanswered(state="pending", looks=looks, now_ms=now_ms)


def unanswered(*, state: Literal["pending", "missing"], looks: int, now_ms: int) -> Look:
    """What is known stays so when the store did not answer; the next look waits as after one that found nothing."""
    return Look(state, now_ms + min(LAST_LOOK_MS, FIRST_LOOK_MS * 2 ** min(looks, 20)))


def purge_left(attempts: int) -> int | None:
    """What is left of an hour's count after one purge order was done; None when the hour is finished.

    One order more than the count asks for: runs that ended without an attempt were never counted.
    """
    return None if attempts <= 0 else attempts - limits.BATCH_ITEMS
