"""Placement: which queued run goes to which worker now, and what a worker lacks for one.

Order: priority, then the project with the fewest live leases, then age. A lane's runs share where they may go and under
which limits, so a lane whose head cannot be placed is left out for this pass and hides nobody else.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple

from schemas.tasks import ExecutionRevision, Placement
from schemas.workers import Capabilities
from services.dispatcher.records import RunRecord, WorkerRecord

LimitKind = Literal["project", "task", "key"]


class Limit(NamedTuple):
    """The name of a limit within a project; sorts in the order in which limits are locked."""

    project: str
    kind: LimitKind
    key: str


class Lane(NamedTuple):
    """What all runs of a lane have in common."""

    name: str
    project: str
    placement: Placement
    limits: tuple[Limit, ...]


class Seat(NamedTuple):
    """A worker with free slots."""

    worker: WorkerRecord
    capabilities: Capabilities
    free: int


class Choice(NamedTuple):
    """One run for one worker."""

    run: RunRecord
    worker: WorkerRecord
    lane: Lane


class Plan(NamedTuple):
    """What a pass decided; `stuck` are the lanes that were left out."""

    choices: list[Choice]
    stuck: set[str]


def lane_terms(name: str, revision: ExecutionRevision) -> Lane:
    """The lane that a revision's runs stand in."""
    project = revision.project
    wanted = {Limit(project, "key", limit.key) for limit in revision.terms.concurrency}
    wanted.add(Limit(project, "project", project))
    if task_limit(revision) is not None:
        wanted.add(Limit(project, "task", revision.task_id))
    return Lane(name, project, revision.terms.placement, tuple(sorted(wanted)))


def task_limit(revision: ExecutionRevision) -> int | None:
    """How many runs of the task may be in work at once; None without limit."""
    overlap = revision.terms.overlap
    return overlap.limit if overlap.policy == "allow" else 1


def plan(
    lanes: Mapping[str, Lane],
    waiting: Mapping[str, Sequence[RunRecord]],
    seats: Sequence[Seat],
    live_by_project: Mapping[str, int],
    limits: Mapping[Limit, int],
    live_by_limit: Mapping[Limit, int],
) -> Plan:
    """Chooses runs for free slots. `waiting` holds each lane's runs in its order; limits without a row do not limit."""
    free = {seat.worker.id: seat.free for seat in seats}
    live = dict(live_by_project)
    used = dict(live_by_limit)
    choices: list[Choice] = []
    stuck: set[str] = set()
    total = sum(free.values())
    heap: list[tuple[tuple[int, int, int, str], str, int]] = []
    for name, runs in waiting.items():
        if runs:
            heapq.heappush(heap, (_rank(runs[0], live), name, 0))
    fitting: dict[str, list[Seat]] = {}
    while heap and total > 0:
        rank, name, index = heapq.heappop(heap)
        run, lane = waiting[name][index], lanes[name]
        now_rank = _rank(run, live)
        if now_rank > rank:
            # Another lane of the same project was served meanwhile.
            heapq.heappush(heap, (now_rank, name, index))
            continue
        if any(key in limits and used.get(key, 0) >= limits[key] for key in lane.limits):
            stuck.add(name)
            continue
        if name not in fitting:
            fitting[name] = [
                seat for seat in seats if mismatch(lane.placement, seat.worker.id, seat.capabilities) is None
            ]
        seat = _best(fitting[name], free, lane.placement)
        if seat is None:
            stuck.add(name)
            continue
        choices.append(Choice(run, seat.worker, lane))
        free[seat.worker.id] -= 1
        total -= 1
        live[lane.project] = live.get(lane.project, 0) + 1
        for key in lane.limits:
            used[key] = used.get(key, 0) + 1
        if index + 1 < len(waiting[name]):
            heapq.heappush(heap, (_rank(waiting[name][index + 1], live), name, index + 1))
    return Plan(choices, stuck)


def _rank(run: RunRecord, live: Mapping[str, int]) -> tuple[int, int, int, str]:
    return (-run.priority, live.get(run.project_id, 0), run.queued_at_ms or 0, run.id)


def _best(seats: Sequence[Seat], free: Mapping[str, int], placement: Placement) -> Seat | None:
    if len(seats) == 1:
        return seats[0] if free[seats[0].worker.id] > 0 else None
    best: Seat | None = None
    best_key: tuple[int, float] = (-1, -1.0)
    for seat in seats:
        left = free[seat.worker.id]
        if left <= 0:
            continue
        liked = sum(1 for name, value in placement.preferred.items() if seat.capabilities.labels.get(name) == value)
        key = (liked, left / max(1, seat.worker.slots))
        if key > best_key:
            best, best_key = seat, key
    return best


# What a worker lacks.


class Lack(NamedTuple):
    """The first thing that a run wants and a worker has not; `no_pool` means that the worker is for a pool's runs."""

    kind: Literal["executor", "name", "pool", "no_pool", "label", "runtime", "memory", "cores"]
    wanted: str

    def words(self) -> str:
        """What is missing: `label gpu=yes`."""
        if self.kind in ("memory", "cores"):
            return f"{self.wanted} of memory" if self.kind == "memory" else f"{self.wanted} cores"
        return f"{self.kind} {self.wanted}"


def mismatch(placement: Placement, worker: str, capabilities: Capabilities) -> Lack | None:
    """What of `placement` this worker lacks; None when it may go there."""
    if placement.executor not in capabilities.executors:
        return Lack("executor", placement.executor)
    if placement.workers and worker not in placement.workers:
        return Lack("name", " or ".join(placement.workers))
    if placement.pool != capabilities.pool:
        return Lack("pool", placement.pool) if placement.pool else Lack("no_pool", capabilities.pool or "")
    for name, value in sorted(placement.required.items()):
        if capabilities.labels.get(name) != value:
            return Lack("label", f"{name}={value}" if value else name)
    for wanted in placement.runtimes:
        if not _has_runtime(wanted, capabilities.runtimes):
            return Lack("runtime", wanted)
    if placement.min_memory_bytes is not None and capabilities.memory_bytes < placement.min_memory_bytes:
        return Lack("memory", f"{placement.min_memory_bytes / 2**20:.0f} MiB")
    if placement.min_cpu_cores is not None and capabilities.cpu_cores < placement.min_cpu_cores:
        return Lack("cores", str(placement.min_cpu_cores))
    return None


_wanted: Final = re.compile(r"([a-z][a-z0-9+-]*)\s*(.*)")
_bound: Final = re.compile(r"(>=|<=|==|>|<)\s*([0-9]+(?:\.[0-9]+)*)")


def _has_runtime(wanted: str, have: Mapping[str, str]) -> bool:
    """`python`, or `python>=3.11,<3.13`: a name and bounds that all hold. What cannot be read holds nowhere."""
    match = _wanted.fullmatch(wanted.strip())
    if match is None or match[1] not in have:
        return False
    found = _version(have[match[1]])
    for part in filter(None, (part.strip() for part in match[2].split(","))):
        bound = _bound.fullmatch(part)
        if bound is None or not _within(found, bound[1], _version(bound[2])):
            return False
    return True


def _within(found: tuple[int, ...], operator: str, asked: tuple[int, ...]) -> bool:
    width = max(len(found), len(asked))
    left, right = found + (0,) * (width - len(found)), asked + (0,) * (width - len(asked))
    if operator == "==":
        return left[: len(asked)] == asked
    return {">=": left >= right, "<=": left <= right, ">": left > right, "<": left < right}[operator]


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"[0-9]+", text)[:4])
