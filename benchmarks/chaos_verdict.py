"""Compares what the scripts recorded with what the ledger says. Pure: no process, no clock, no network.

Times are seconds since boot, as the scripts record them. The order of lines is the order of the writes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, NamedTuple

from benchmarks.chaos_plan import BY_NAME, LONG_PAUSE_S, Kind
from schemas.runs import ATTEMPT_ACTIVE, RUN_TERMINAL

RECEIPT_S: Final = 8.0
"""How long an ended process may wait for its receipt to be on disk, its host being paused or starved at times."""
LEASE_S: Final = 33.0
"""A started lease lives 30 s; a beat that is due renews it."""
AWAY_S: Final = 21.0
LOOK_S: Final = 0.5
SAID_BYTES: Final = 37
"""What a script in mode `say` prints: an id and a newline."""


class Start(NamedTuple):
    """A script began: which attempt of which run, its pid, the code that it will end with, when, on which line."""

    attempt: str
    run: str
    pid: int
    code: int
    at_s: float
    line: int


class End(NamedTuple):
    """A script came to its end."""

    attempt: str
    code: int
    at_s: float
    line: int


class Violation(NamedTuple):
    """One thing that must not be. `rule` is one of `RULES`."""

    rule: str
    run: str | None
    attempt: str | None
    detail: str


UNTRIED: Final = frozenset({"not_started", "start_window_passed"})
"""Codes of attempts that were granted and never started: they count for nothing, and another one has to follow."""
RULES: Final = ("lost_run", "started_twice", "without_end", "contradiction")


class Outage(NamedTuple):
    """A time, in seconds since boot, in which something was not there: a part of the worker with this id, or a part of
    this name."""

    of: str
    down_s: float
    up_s: float


@dataclass
class Done:
    """What the check itself did, so that its own blows are not taken for faults."""

    runs: dict[str, str]
    """Run id to the kind of its task, for every run that was acknowledged."""
    cancels: set[str] = field(default_factory=set[str])
    """Runs whose cancel was asked for, whether or not an answer came."""
    host_down: list[Outage] = field(default_factory=list["Outage"])
    """From the kill of a process host until the next one was there."""
    cut: list[Outage] = field(default_factory=list["Outage"])
    """When a worker (by its id) or another part (by its name) was killed or stood still."""
    worker_kills: int = 0
    killed: dict[str, float] = field(default_factory=dict[str, float])
    """Attempts whose script was killed."""
    longest_pause_s: float = 0.0
    """The longest time that worker, host, or the road between worker and dispatcher stood still."""


class Ledger(NamedTuple):
    """Every run of the project as the API shows it, its attempts in order, and what late receipts said."""

    runs: Mapping[str, Mapping[str, Any]]
    attempts: Mapping[str, Sequence[Mapping[str, Any]]]
    late: Mapping[str, Mapping[str, Any]] = {}
    """Attempt id to the payload of its event `attempt.late_receipt`."""


def read_records(lines: Iterable[str]) -> tuple[list[Start], list[End]]:
    """Reads the recorder's lines. Raises ValueError for a line that it cannot have written."""
    starts: list[Start] = []
    ends: list[End] = []
    for number, line in enumerate(lines):
        match line.split():
            case ["start", attempt, run, pid, code, at]:
                starts.append(Start(attempt, run, int(pid), int(code), float(at), number))
            case ["end", attempt, code, at]:
                ends.append(End(attempt, int(code), float(at), number))
            case _:
                raise ValueError(f"line {number + 1} is no record: {line[:100]!r}")
    return starts, ends


def judge(starts: Sequence[Start], ends: Sequence[End], ledger: Ledger, done: Done) -> list[Violation]:
    """Everything that must not be, in the order of `RULES`."""
    found = [*_lost(ledger, done), *_started_twice(starts, ends), *_unknown_starts(starts, ledger)]
    away = {worker: _away(worker, done.cut) for worker in {outage.of for outage in done.cut}}
    first = {start.attempt: start for start in reversed(starts)}
    end_of = {end.attempt: end for end in ends}
    for run_id, run in ledger.runs.items():
        kind = BY_NAME.get(done.runs.get(run_id, ""))
        attempts = ledger.attempts.get(run_id, ())
        if run["status"] not in RUN_TERMINAL:
            found.append(Violation("without_end", run_id, run["attempt_id"], f"the run is {run['status']}"))
        elif kind is not None:
            found += _judge_run(run, attempts, kind, done)
        for attempt in attempts:
            if attempt["status"] in ATTEMPT_ACTIVE:
                if run["status"] in RUN_TERMINAL:
                    found.append(Violation("without_end", run_id, attempt["id"], f"an attempt is {attempt['status']}"))
            elif kind is not None:
                name = attempt["id"]
                case = _Case(run, attempt, kind, first.get(name), end_of.get(name), ledger.late.get(name), done, away)
                found += [
                    Violation("contradiction", run_id, attempt["id"], f"{attempt['status']}: {detail}")
                    for detail in case.contradictions()
                ]
        found += _overlaps(run_id, attempts, first, end_of)
    return sorted(found, key=lambda violation: RULES.index(violation.rule))


def _away(worker: str, cut: Sequence[Outage]) -> list[Outage]:
    """Stretches as long as a started lease in which the worker could hardly renew one.

    Itself, nats-server or all dispatchers were down for most of it, be it in one piece or in several.
    """
    dispatchers = {outage.of for outage in cut if outage.of.startswith("dispatcher")}

    def is_cut(at_s: float) -> bool:
        down = {outage.of for outage in cut if outage.down_s <= at_s <= outage.up_s}
        return worker in down or "nats" in down or (bool(dispatchers) and dispatchers <= down)

    found: list[Outage] = []
    for outage in cut:
        looks = [outage.down_s + LOOK_S * number for number in range(int(LEASE_S / LOOK_S))]
        if sum(is_cut(at_s) for at_s in looks) * LOOK_S >= AWAY_S:
            found.append(Outage(worker, outage.down_s, outage.down_s + LEASE_S))
    return found


def count(violations: Iterable[Violation]) -> dict[str, int]:
    """Violations by rule, zeros included."""
    counted = Counter(violation.rule for violation in violations)
    return {rule: counted[rule] for rule in RULES}


def _lost(ledger: Ledger, done: Done) -> list[Violation]:
    missing = [
        Violation("lost_run", run, None, "acknowledged, not in the ledger")
        for run in done.runs.keys() - ledger.runs.keys()
    ]
    # One key, one run: a second one was made from a request whose answer was lost.
    doubled = [
        Violation("started_twice", run, None, "in the ledger, though nobody was told of it")
        for run in ledger.runs.keys() - done.runs.keys()
    ]
    return missing + doubled


def _started_twice(starts: Sequence[Start], ends: Sequence[End]) -> list[Violation]:
    by_attempt: dict[str, list[Start]] = defaultdict(list)
    for start in starts:
        by_attempt[start.attempt].append(start)
    found = [
        Violation("started_twice", rows[0].run, attempt, f"{len(rows)} processes: {[row.pid for row in rows]}")
        for attempt, rows in by_attempt.items()
        if len(rows) > 1
    ]
    ended = Counter(end.attempt for end in ends)
    found += [Violation("started_twice", None, attempt, "ended twice") for attempt, times in ended.items() if times > 1]
    return found


def _unknown_starts(starts: Sequence[Start], ledger: Ledger) -> list[Violation]:
    owner = {attempt["id"]: run for run, attempts in ledger.attempts.items() for attempt in attempts}
    return [
        Violation(
            "contradiction",
            start.run,
            start.attempt,
            f"started, but the ledger has it under {owner.get(start.attempt)}",
        )
        for start in starts
        if owner.get(start.attempt) != start.run
    ]


def _judge_run(
    run: Mapping[str, Any], attempts: Sequence[Mapping[str, Any]], kind: Kind, done: Done
) -> list[Violation]:
    said: list[str] = []
    status = run["status"]
    numbers = [attempt["attempt"] for attempt in attempts]
    if numbers != list(range(1, len(numbers) + 1)) or run["attempt"] != len(numbers):
        said.append(f"attempts are numbered {numbers}, the run says {run['attempt']}")
    tried = [attempt for attempt in attempts if attempt["error_code"] not in UNTRIED]
    if len(tried) > kind.max_attempts:
        said.append(f"{len(tried)} attempts where {kind.max_attempts} are allowed")
    for attempt in attempts[:-1]:
        if not _repeatable(attempt, kind):
            said.append(f"attempt {attempt['attempt']} ended {attempt['status']} and was followed by another")
    last = attempts[-1] if attempts else None
    allowed = {
        "succeeded": ("succeeded",),
        "failed": ("failed", "lost"),
        # Its time was over and its end was asked for; then its host died before it could tell.
        "timed_out": ("timed_out",) if kind.timeout_ms is None else ("timed_out", "lost"),
        "cancelled": ("cancelled", "failed", "lost", "timed_out"),
    }[status]
    if last is None or last["status"] not in allowed:
        said.append(f"the run is {status}, its last attempt {last and last['status']}")
    elif status in ("succeeded", "failed") and not last["late_receipt"] and run["exit_code"] != last["exit_code"]:
        said.append(f"the run's exit code is {run['exit_code']}, its attempt's {last['exit_code']}")
    elif status in ("failed", "timed_out") and len(tried) < kind.max_attempts and _repeatable(last, kind):
        said.append(f"{status} after attempt {len(tried)} of {kind.max_attempts}, {last['status']}")
    if status == "cancelled" and run["id"] not in done.cancels:
        said.append("cancelled, though nobody asked")
    return [Violation("contradiction", run["id"], None, text) for text in said]


def _repeatable(attempt: Mapping[str, Any], kind: Kind) -> bool:
    return attempt["status"] in ("failed", "timed_out") or (attempt["status"] == "lost" and kind.safe)


def _overlaps(
    run_id: str,
    attempts: Sequence[Mapping[str, Any]],
    first: Mapping[str, Start],
    end_of: Mapping[str, End],
) -> list[Violation]:
    found: list[Violation] = []
    for one, after in pairwise(attempts):
        end, start = end_of.get(one["id"]), first.get(after["id"])
        if end is not None and start is not None and start.line < end.line:
            detail = f"attempt {after['attempt']} started while {one['attempt']} was still at work"
            found.append(Violation("contradiction", run_id, after["id"], detail))
    return found


@dataclass
class _Case:
    """One settled attempt beside what its script recorded."""

    run: Mapping[str, Any]
    attempt: Mapping[str, Any]
    kind: Kind
    start: Start | None
    end: End | None
    late: Mapping[str, Any] | None
    done: Done
    away: Mapping[str, Sequence[Outage]]

    def contradictions(self) -> list[str]:
        """What does not fit, a sentence each."""
        if self.late is not None and self.late["exit_code"] is not None and self.late["signal"] is None:
            shown, said = self.attempt["exit_code"], self.late["exit_code"]
            if self.end is None or not self.end.code == said == shown:
                return [f"a late receipt says {said}, the attempt shows {shown}, the script {self.end}"]
        status = self.attempt["status"]
        if status == "succeeded":
            return self._ended_with(0)
        if status == "failed":
            return self._failed()
        if status == "lost":
            return self._lost()
        if status == "cancelled":
            return [] if self.run["id"] in self.done.cancels else ["nobody asked for it"]
        if self.kind.timeout_ms is None:
            return ["the task has no time limit"]
        return []

    def _ended_with(self, code: int) -> list[str]:
        said: list[str] = []
        if self.attempt["exit_code"] != code or self.attempt["signal"] is not None:
            said.append(f"exit code {self.attempt['exit_code']}, signal {self.attempt['signal']}")
        if self.start is None:
            said.append("the script never started")
        elif self.end is None:
            said.append("the script never came to its end")
        elif self.end.code != code or self.start.code != code:
            said.append(f"the script ended with {self.end.code}")
        size = self.attempt["log"].get("size", 0) if self.attempt["log"] else 0
        expected = SAID_BYTES if self.kind.mode == "say" else 0
        if size != expected:
            said.append(f"its log has {size} bytes, the script wrote {expected}")
        return said

    def _failed(self) -> list[str]:
        code, signal = self.attempt["exit_code"], self.attempt["signal"]
        if signal is not None:
            if self.start is None:
                return [f"ended by signal {signal}, but the script never started"]
            return [] if self._we_ended_it() else [f"ended by signal {signal}, which nobody sent"]
        if code is not None:
            return ["with exit code 0"] if code == 0 else self._ended_with(code)
        if self.start is not None:
            return [f"{self.attempt['error_code']} without an exit code, but the script started"]
        cause = self.attempt["error_code"]
        if cause == "not_started" and (self.done.worker_kills or self.done.host_down):
            return []  # granted, and the worker was gone before the spawn; nothing ran, and the ledger says so
        if cause == "start_window_passed" and self.done.longest_pause_s >= LONG_PAUSE_S:
            return []
        return [f"never started: {cause}"]

    def _lost(self) -> list[str]:
        if self.attempt["exit_code"] is not None and not self.attempt["late_receipt"]:
            return [f"with exit code {self.attempt['exit_code']}"]
        if self.start is None:
            # Granted and not yet spawned when its host died; there is no record that could tell when.
            worker = self.attempt["worker_id"]
            known = self.away.get(worker) or any(outage.of == worker for outage in self.done.host_down)
            return [] if known else ["no process host was killed"]
        if self._we_ended_it() or self._within(self.away.get(self.attempt["worker_id"], ())):
            return []
        return ["the script ended by itself under a living host"]

    def _we_ended_it(self) -> bool:
        return self.attempt["id"] in self.done.killed or self._within(self.done.host_down)

    def _within(self, outages: Sequence[Outage]) -> bool:
        """Whether the script was at work, or its receipt may still not have been on disk, in one of these."""
        assert self.start is not None
        until = float("inf") if self.end is None else self.end.at_s + RECEIPT_S
        return any(
            outage.of == self.attempt["worker_id"] and self.start.at_s <= outage.up_s and outage.down_s <= until
            for outage in outages
        )
