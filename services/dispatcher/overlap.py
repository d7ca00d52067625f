"""Overlap: what happens when a run comes in while others of its task are open.

A run that asks for an approval ahead of its time comes in when it is released, which is when it starts; until then it
is in nobody's way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from schemas.tasks import Overlap
from services.dispatcher.records import RunRecord

SKIPPED: Final = "overlap_skipped"
QUEUE_FULL: Final = "overlap_queue_full"
REPLACED: Final = "overlap_replaced"
REPLACE_MOST: Final = 64
ASKS_AHEAD_MS: Final = 2_000
"""A run that may not start for longer than this after it was made and that is held asks ahead of its time."""


class Open(NamedTuple):
    """A run of the same task that has not ended."""

    run_id: str
    status: str


class Entry(NamedTuple):
    """How a new run goes on: refused with an error code, or in, after the end of `replaces`."""

    refused: str | None = None
    replaces: tuple[str, ...] = ()


def asks_ahead(run: RunRecord) -> bool:
    """Whether a held run was made so long before it may start."""
    return run.not_before_ms is not None and run.not_before_ms > run.created_at_ms + ASKS_AHEAD_MS


def enter(overlap: Overlap, others: Sequence[Open]) -> Entry:
    """The policy's answer for one more run beside `others`.

    `allow` and `queue` let the limit do its work at placement; `queue` bounds how many wait behind the one in work.
    """
    if overlap.policy == "skip" and others:
        return Entry(refused=SKIPPED)
    if overlap.policy == "queue" and overlap.limit is not None:
        waiting = len(others) - (1 if any(o.status in ("dispatching", "running") for o in others) else 0)
        if others and waiting >= overlap.limit:
            return Entry(refused=QUEUE_FULL)
    if overlap.policy == "replace":
        return Entry(replaces=tuple(other.run_id for other in others[:REPLACE_MOST]))
    return Entry()
