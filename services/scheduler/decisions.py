"""What a scheduler does about a trigger now: which instants become runs, which are missed, when to look again. No I/O.

An instant may be admitted up to a second ahead (the run carries `not_before`), and longer ahead where it has to ask for
an approval: then one at a time, when the one before it has passed. Later than the grace it is late, and the
trigger's policy decides: `skip`, `fire_once` (the latest of all that is due), `catch_up` (the latest n). What does not
become a run is counted with its cause.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from schemas.limits import SUBMIT_AHEAD_MS
from services.scheduler.triggers import Plan, Span

SCHEDULER_DOWN: Final = "scheduler_down"
PAUSED: Final = "paused"
TRIGGER_DISABLED: Final = "trigger_disabled"
TASK_DISABLED: Final = "task_disabled"
PROJECT_ARCHIVED: Final = "project_archived"
BLOCKED_BY_OVERLAP: Final = "blocked_by_overlap"
INPUTS_REFUSED: Final = "inputs_refused"
CAUSES: Final = frozenset({
    SCHEDULER_DOWN, PAUSED, TRIGGER_DISABLED, TASK_DISABLED, PROJECT_ARCHIVED, BLOCKED_BY_OVERLAP, INPUTS_REFUSED,
})  # fmt: skip
"""Why an instant did not become a run. Besides, an order that the dispatcher refused has its error's code."""

_RECENT: Final = 2_048
"""Instants looked at one by one in one decision; what is older than the grace is counted as a span instead."""


@dataclass(frozen=True, slots=True)
class Missed:
    """Instants that will not become runs, and why."""

    cause: str
    span: Span


@dataclass(frozen=True, slots=True)
class Fire:
    """An instant that becomes a run. `not_before_ms` is set when it may not start at once."""

    instant_ms: int
    not_before_ms: int | None
    asked: bool = False
    """It asks for an approval ahead of its time."""


@dataclass(frozen=True, slots=True)
class Decision:
    """All up to `decided_through_ms` is settled; `wake_at_ms` is when to look again, None for never."""

    fires: tuple[Fire, ...]
    missed: tuple[Missed, ...]
    decided_through_ms: int
    next_fire_at_ms: int | None
    wake_at_ms: int | None


def decide(plan: Plan, decided_through_ms: int, now_ms: int, *, limit: int, ahead_ms: int = 0) -> Decision:
    """Settle what is due at `now_ms` with at most `limit` runs (at least 1), and what asks `ahead_ms` before it is."""
    spec = plan.spec
    missed: list[Missed] = []
    through = decided_through_ms
    if spec.pause_until_ms is not None and through < spec.pause_until_ms:
        end = min(spec.pause_until_ms - 1, now_ms)
        missed += _missed(PAUSED, plan.span(through, end))
        through = max(through, end)
        if now_ms < spec.pause_until_ms:
            return _settled(plan, (), missed, through, now_ms, ahead_ms)
    oldest = now_ms - spec.grace_ms - spec.jitter_ms - 1
    older = plan.span(through, oldest) if oldest > through else None
    # A fire waits for the one before it, which starts later where the jitter says so: within the jitter none is late.
    recent = _recent(plan, max(through, oldest), now_ms)
    wanted = {"skip": 0, "fire_once": 1, "catch_up": spec.catch_up or 0}[spec.missed] - len(recent)
    again = [Fire(instant, None) for instant in plan.last(through, oldest, wanted)] if older and wanted > 0 else []
    missed += _missed(SCHEDULER_DOWN, plan.span(through, again[0].instant_ms - 1) if again else older)
    fires = [*again, *recent]
    if len(fires) > limit:
        # The others stay due; what was passed over before them is settled now.
        fires = fires[:limit]
        through = fires[-1].instant_ms
    else:
        through = max([through, oldest, *(fire.instant_ms for fire in recent)])
        if len(fires) < limit and (coming := _asking(plan, through, now_ms, ahead_ms)) is not None:
            fires.append(coming)
            through = coming.instant_ms
    return _settled(plan, tuple(fires), missed, through, now_ms, ahead_ms)


def settle_stop(plan: Plan, decided_through_ms: int, now_ms: int, cause: str) -> Decision:
    """Begin again after a stop: all that passed meanwhile is missed for `cause`, and the next instant lies ahead."""
    missed = _missed(cause, plan.span(decided_through_ms, now_ms))
    return _settled(plan, (), missed, max(decided_through_ms, now_ms), now_ms)


def begin(plan: Plan, after_ms: int, now_ms: int) -> Decision:
    """A new or edited trigger: the next instant is strictly after `after_ms`; no history is invented."""
    return _settled(plan, (), [], after_ms, now_ms)


def _settled(
    plan: Plan, fires: tuple[Fire, ...], missed: list[Missed], through: int, now_ms: int, ahead_ms: int = 0
) -> Decision:
    if through > now_ms + SUBMIT_AHEAD_MS:
        # The next one has asked already and is still to come; the one behind it asks when it has passed.
        return Decision(fires, tuple(missed), through, through, through)
    upcoming = plan.after(through)
    pause = plan.spec.pause_until_ms
    paused = pause is not None and now_ms < pause
    if pause is not None and paused and upcoming is not None and upcoming < pause:
        upcoming = plan.after(pause - 1)
    if upcoming is None:
        return Decision(fires, tuple(missed), through, None, None)
    latest = max(0, upcoming + plan.jitter_ms(upcoming) - SUBMIT_AHEAD_MS)
    if ahead_ms <= SUBMIT_AHEAD_MS:
        return Decision(fires, tuple(missed), through, upcoming, latest)
    first = latest + SUBMIT_AHEAD_MS - ahead_ms
    wake = min(latest, max(first, through, pause if pause is not None and paused else 0, now_ms + 1))
    return Decision(fires, tuple(missed), through, upcoming, wake)


def _asking(plan: Plan, through: int, now_ms: int, ahead_ms: int) -> Fire | None:
    """The next instant, if it is time to ask about it."""
    if ahead_ms <= SUBMIT_AHEAD_MS or through > now_ms:
        return None
    instant = plan.after(through)
    if instant is None:
        return None
    starts = instant + plan.jitter_ms(instant)
    return Fire(instant, starts, asked=True) if starts <= now_ms + ahead_ms else None


def _recent(plan: Plan, after_ms: int, now_ms: int) -> list[Fire]:
    """The instants after `after_ms` that may be admitted now, in order."""
    found: list[Fire] = []
    instant = plan.after(after_ms)
    while instant is not None and len(found) < _RECENT:
        starts = instant + plan.jitter_ms(instant)
        if starts > now_ms + SUBMIT_AHEAD_MS:
            break
        found.append(Fire(instant, starts if starts > now_ms else None))
        instant = plan.after(instant)
    return found


def _missed(cause: str, span: Span | None) -> list[Missed]:
    return [] if span is None else [Missed(cause, span)]
