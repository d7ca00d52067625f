"""Rules of triggers: what a specification must keep to, and its plan on the calendar. No I/O."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, Final

import msgspec

from schemas.canonical import digest_bytes
from schemas.errors import Ql3Error
from schemas.strict import read_plain
from schemas.triggers import PreviewAnswer, TriggerSpec
from services.scheduler import exclusions
from services.scheduler.cron import instants
from services.scheduler.cron.grammar import Boot, Every, Once, Schedule, parse
from services.scheduler.cron.rfc3339 import write_instant
from services.scheduler.cron.words import explain
from services.scheduler.cron.zones import Zone, zone
from services.scheduler.exclusions import Exclusions
from services.scheduler.parameters import INPUT_BYTES, check_preset
from services.scheduler.tasks import sorted_text

CALENDAR: Final = frozenset({"cron", "interval", "once"})
"""Kinds that have instants on the calendar, and so a schedule."""
COUNTED: Final = 10_000
"""Missed instants are counted up to here; beyond it is said that there are at least so many."""
_WINDOW_MS: Final = 60_000
_SMALL_CHARS: Final = 4_096
_EXCLUDED_IN_A_ROW: Final = 20_000
"""A calendar of which so many instants in a row are excluded is over."""
_YEAR_MS: Final = 31_557_600_000
_HOLIDAY_YEARS: Final = 12
"""Public holidays are worked out year by year: in so many with nothing but excluded instants, the calendar is over."""


@dataclass(frozen=True, slots=True)
class Span:
    """Some instants that follow each other: the first, the last and how many (`at_least`, when there are more)."""

    first_ms: int
    last_ms: int
    count: int
    at_least: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """One trigger's calendar. `anchor_ms` is where an interval counts from; all times in milliseconds UTC."""

    trigger_id: str
    spec: TriggerSpec
    schedule: Schedule
    zone: Zone
    anchor_ms: int
    exclusions: Exclusions | None = None

    def after(self, after_ms: int, until_ms: int | None = None) -> int | None:
        """The first instant strictly later than `after_ms`, paused or not; none beyond `until_ms` is looked for."""
        spec = self.spec
        if spec.start_at_ms is not None:
            after_ms = max(after_ms, spec.start_at_ms - 1)
        found = self._next(after_ms)
        if self.exclusions is not None:
            years: set[int] = set()
            for _ in range(_EXCLUDED_IN_A_ROW):
                if found is None or (until_ms is not None and found > until_ms):
                    return None
                if (free_ms := self.exclusions.free_from(found, self.zone)) is None:
                    break
                years.add(found // _YEAR_MS)
                if self.exclusions.countries and len(years) > _HOLIDAY_YEARS:
                    return None
                found = self._next(max(found, free_ms - 1))
            else:
                return None
        if found is None or (spec.end_at_ms is not None and found > spec.end_at_ms):
            return None
        return found

    def _next(self, after_ms: int) -> int | None:
        return instants.next_instant(self.schedule, self.zone, after_ms, anchor_ms=self.anchor_ms)

    def between(self, after_ms: int, until_ms: int) -> Iterator[int]:
        """All instants with `after_ms < instant <= until_ms`, in order."""
        found = self.after(after_ms, until_ms)
        while found is not None and found <= until_ms:
            yield found
            found = self.after(found, until_ms)

    def span(self, after_ms: int, until_ms: int) -> Span | None:
        """How many instants lie in between, counted up to `COUNTED`."""
        first = self.after(after_ms, until_ms)
        if first is None or first > until_ms:
            return None
        schedule = self.schedule
        if isinstance(schedule, Every) and self.exclusions is None:
            until_ms = min(until_ms, self.spec.end_at_ms or until_ms)
            step = schedule.seconds * 1000
            count = (until_ms - first) // step + 1
            return Span(first, first + (count - 1) * step, count)
        walked = list(islice(self.between(after_ms, until_ms), COUNTED))
        if len(walked) < COUNTED:
            return Span(first, walked[-1], len(walked))
        latest = self.last(after_ms, until_ms, 1)[-1]
        return Span(first, latest, COUNTED, at_least=latest > walked[-1])

    def last(self, after_ms: int, until_ms: int, count: int) -> list[int]:
        """The latest `count` instants in between, in order, without walking through all of them."""
        width, low, high = _WINDOW_MS, after_ms, until_ms
        while True:
            low = max(after_ms, until_ms - width)
            found = list(islice(self.between(low, until_ms), COUNTED + count))
            if len(found) < COUNTED + count and (low == after_ms or len(found) >= count):
                return found[-count:]
            if len(found) >= count:
                break
            high = low
            width *= 8
        # Nothing for long and then too many: after `low` there are `count` or more, after `high` fewer.
        while high - low > 1_000:
            middle = (low + high) // 2
            if len(list(islice(self.between(middle, until_ms), count))) == count:
                low = middle
            else:
                high = middle
        return list(islice(self.between(low, until_ms), count))

    def jitter_ms(self, instant_ms: int) -> int:
        """How much later than its instant this fire starts; the same whenever it is asked."""
        if self.spec.jitter_ms == 0:
            return 0
        mixed = hashlib.blake2b(f"{self.trigger_id}:{instant_ms}".encode(), digest_size=8).digest()
        return int.from_bytes(mixed, "big") % (self.spec.jitter_ms + 1)


def plan(trigger_id: str, spec: TriggerSpec, anchor_ms: int) -> Plan | None:
    """The calendar of a checked specification; None for a kind that has none."""
    if spec.kind not in CALENDAR:
        return None
    return _plan(trigger_id, spec_text(spec), anchor_ms)


def _plan(trigger_id: str, text: str, anchor_ms: int) -> Plan:
    kept = _kept if len(text) <= _SMALL_CHARS else _kept_large
    return kept(trigger_id, text, anchor_ms)


def _make(trigger_id: str, text: str, anchor_ms: int) -> Plan:
    spec = msgspec.json.decode(text, type=TriggerSpec)
    excluded = exclusions.read(spec.exclude) if spec.exclude else None
    return Plan(trigger_id, spec, _schedule(spec, trigger_id), zone(spec.timezone), anchor_ms, excluded)


_kept = lru_cache(maxsize=8_192)(_make)
_kept_large = lru_cache(maxsize=128)(_make)
"""A calendar with a thousand exclusions and large inputs takes 300 KiB."""


def stored_spec(row: Any) -> TriggerSpec:
    """The specification in a row of a trigger. Raises `revision_unavailable` when it is not what was written."""
    if content_digest(row["spec"]) != row["content_digest"]:
        raise Ql3Error("revision_unavailable", data={"trigger_id": row["id"]})
    return msgspec.json.decode(row["spec"], type=TriggerSpec)


def stored_plan(trigger_id: str, text: str, digest: str, anchor_ms: int) -> Plan:
    """The calendar of a stored specification. Raises `revision_unavailable` when the row is not what was written."""
    if content_digest(text) != digest:
        raise Ql3Error("revision_unavailable", data={"trigger_id": trigger_id})
    try:
        return _plan(trigger_id, text, anchor_ms)
    except (ValueError, AssertionError) as error:
        raise Ql3Error("revision_unavailable", data={"trigger_id": trigger_id}) from error


def _schedule(spec: TriggerSpec, seed: str) -> Schedule:
    if spec.kind == "once":
        assert spec.at_ms is not None
        return Once(f"@once {write_instant(spec.at_ms)}", spec.at_ms // 1000)
    assert spec.expression is not None
    return parse(spec.expression, seed=seed)


def read_specs(plain: list[Any], now_ms: int) -> list[TriggerSpec]:
    """Triggers as people sent them with a task. Raises with the path of the field."""
    specs: list[TriggerSpec] = []
    for index, item in enumerate(plain):
        with placed(f"triggers[{index}]"):
            specs.append(check(item if isinstance(item, TriggerSpec) else read_plain(item, TriggerSpec), now_ms))
    return specs


def check(spec: TriggerSpec, now_ms: int) -> TriggerSpec:
    """The specification in its one stored form. Raises `cron_invalid`, `cron_never_fires`, `invalid` and others."""
    kind, expression, at_ms = spec.kind, spec.expression, spec.at_ms
    if kind in ("cron", "interval", "boot") and expression is None and kind != "boot":
        raise Ql3Error("invalid", f"A trigger of kind `{kind}` needs an expression.", field="expression")
    if expression is not None:
        if kind not in ("cron", "interval", "once", "boot"):
            raise Ql3Error("invalid", f"A trigger of kind `{kind}` takes no expression.", field="expression")
        with placed("expression"):
            schedule = parse(expression, seed="check")
            instants.refuse_never(schedule)
        kind, expression, at_ms = _kind_of(schedule, spec)
    elif kind == "once" and at_ms is None:
        raise Ql3Error("invalid", "Give the instant.", field="at_ms")
    elif kind != "once" and at_ms is not None:
        raise Ql3Error("invalid", f"A trigger of kind `{kind}` takes no instant.", field="at_ms")
    if at_ms is not None and at_ms % 1000:
        raise Ql3Error("invalid", "Instants are whole seconds.", field="at_ms")
    excluded = exclusions.check(spec.exclude, spec.exclude_calendar, zone(spec.timezone), now_ms)
    _check_times(spec)
    if (spec.catch_up is not None) != (spec.missed == "catch_up"):
        raise Ql3Error("invalid", "`catch_up` is given with `missed: catch_up`, and only then.", field="catch_up")
    if (spec.after_task is not None) != (kind == "after_task"):
        raise Ql3Error(
            "invalid", "`after_task` is given with the kind of this name, and only then.", field="after_task"
        )
    if excluded and kind not in CALENDAR:
        raise Ql3Error("invalid", f"A trigger of kind `{kind}` has no calendar to exclude from.", field="exclude")
    if spec.inputs is not None and len(msgspec.json.encode(spec.inputs)) > INPUT_BYTES:
        raise Ql3Error("too_large", f"Inputs have at most {INPUT_BYTES} bytes.", field="inputs")
    return msgspec.structs.replace(
        spec, kind=kind, expression=expression, at_ms=at_ms, exclude=excluded, exclude_calendar=None
    )


def _kind_of(schedule: Schedule, spec: TriggerSpec) -> tuple[Any, str | None, int | None]:
    """A macro says its kind itself, so that `--cron "@every 5m"` is an interval."""
    if isinstance(schedule, Boot):
        if spec.kind not in ("cron", "boot"):
            raise Ql3Error("invalid", "`@boot` is a trigger of kind `boot`.", field="kind")
        return "boot", None, None
    if isinstance(schedule, Once):
        if spec.kind not in ("cron", "once") or spec.at_ms is not None:
            raise Ql3Error("invalid", "Give the instant once, with kind `once`.", field="at_ms")
        if not 0 <= schedule.at_s < instants.LAST_S:
            raise Ql3Error("invalid", "Write a time from 1970 on and before the year 3000.", field="expression")
        return "once", None, schedule.at_s * 1000
    if spec.at_ms is not None:
        raise Ql3Error("invalid", "Only a trigger of kind `once` has an instant.", field="at_ms")
    if isinstance(schedule, Every):
        if spec.kind not in ("cron", "interval"):
            raise Ql3Error("invalid", "`@every` is a trigger of kind `interval`.", field="kind")
        return "interval", schedule.text, None
    if spec.kind != "cron":
        raise Ql3Error("invalid", "Calendar fields are a trigger of kind `cron`.", field="kind")
    return "cron", schedule.text, None


def preview(spec: TriggerSpec, now_ms: int, count: int) -> PreviewAnswer:
    """What a trigger would do from now on. Raises as `check` does."""
    with placed("spec"):
        checked = check(spec, now_ms)
    found = plan("preview", checked, now_ms // 1000 * 1000)
    if found is None:
        return PreviewAnswer(spec=checked, english=None, chinese=None, instants=[])
    after_ms = max(now_ms, *(ms - 1 for ms in (spec.start_at_ms, spec.pause_until_ms) if ms is not None), 0)
    holidays = found.exclusions is not None and bool(found.exclusions.countries)
    until_ms = after_ms + _HOLIDAY_YEARS * _YEAR_MS if holidays else instants.LAST_S * 1000
    return PreviewAnswer(
        spec=checked,
        english=explain(found.schedule),
        chinese=explain(found.schedule, "zh"),
        instants=list(islice(found.between(after_ms, until_ms), count)),
    )


def check_given(spec: TriggerSpec, parameters: dict[str, Any] | None) -> None:
    """Whether what a trigger gives to its runs is what the task takes. Raises as `check_inputs` does."""
    check_preset(parameters, spec.inputs, more_later=spec.kind in ("manual", "webhook"))


def _check_times(spec: TriggerSpec) -> None:
    if spec.start_at_ms is not None and spec.end_at_ms is not None and spec.end_at_ms < spec.start_at_ms:
        raise Ql3Error("invalid", "It ends before it starts.", field="end_at_ms")
    for field in ("at_ms", "start_at_ms", "end_at_ms", "pause_until_ms"):
        value: int | None = getattr(spec, field)
        if value is not None and value >= instants.LAST_S * 1000:
            raise Ql3Error("invalid", "Write a time before the year 3000.", field=field)


class placed:  # noqa: N801 - reads as a statement
    """Puts a path before the field of a refusal."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, Ql3Error):
            field = f"{self._path}.{error.field}" if error.field else self._path
            raise Ql3Error(error.code, error.detail, field=field, data=error.data) from error


def spec_text(spec: TriggerSpec) -> str:
    """The stored text. Raises `invalid` for what has none."""
    return sorted_text(spec, "inputs")


def content_digest(text: str) -> str:
    """The digest of a stored text."""
    return digest_bytes("ql3.trigger-revision.v1", text.encode())
