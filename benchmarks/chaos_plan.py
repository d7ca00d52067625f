"""What a chaos check does, from its seed alone: which runs are submitted when, and what is broken when and how."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

Database = Literal["sqlite", "postgresql"]
Blow = Literal["kill", "pause", "wipe", "script", "restart"]
"""SIGKILL and start again; SIGSTOP and SIGCONT; nats-server killed and its folder removed; one running script killed;
PostgreSQL stopped in the middle of everything."""

QUICK_RUNS: Final = 500
RUNS: Final = 5_000
QUICK_S: Final = 18.0
RUNS_PER_S: Final = 30.0
LONG_PAUSE_S: Final = 10.0
"""A worker or host that stands still this long may miss the window in which a granted attempt may start."""


class Kind(NamedTuple):
    """One task of the workload. `codes` are exit codes by attempt number; `seconds` is how long the script works."""

    name: str
    share: float
    codes: tuple[int, ...] = (0,)
    seconds: float = 0
    mode: Literal["plain", "say", "stubborn"] = "plain"
    max_attempts: int = 1
    safe: bool = False
    """Whether a lost attempt may be repeated."""
    timeout_ms: int | None = None
    cancel_within_s: float | None = None
    """Every run of it is cancelled at a random time after its submission."""


KINDS: Final = (
    Kind("short", 0.50),
    Kind("says", 0.08, mode="say"),
    Kind("fails", 0.08, codes=(3,)),
    Kind("fails-loudly", 0.03, codes=(77,), mode="say"),
    Kind("one-second", 0.06, seconds=1, mode="say"),
    Kind("three-seconds", 0.04, seconds=3),
    Kind("third-time", 0.06, codes=(4, 5, 0), max_attempts=3, safe=True),
    Kind("hopeless", 0.02, codes=(9,), max_attempts=3),
    Kind("repeatable", 0.06, seconds=2, mode="say", max_attempts=3, safe=True),
    Kind("cancelled", 0.04, seconds=5, cancel_within_s=2.5),
    Kind("stubborn", 0.01, seconds=5, mode="stubborn", cancel_within_s=2.5),
    Kind("out-of-time", 0.02, seconds=5, timeout_ms=800),
)
BY_NAME: Final = {kind.name: kind for kind in KINDS}


class Submission(NamedTuple):
    """One run to ask for. `at_s` counts from the begin; `batch` groups what goes in one request (-1: alone)."""

    at_s: float
    kind: str
    key: str
    batch: int
    cancel_after_s: float | None


class Fault(NamedTuple):
    """One blow: at which second, at whom, and how long the victims stay down."""

    at_s: float
    blow: Blow
    victims: tuple[str, ...]
    down_s: float


class Plan(NamedTuple):
    """All of a check. `parts` are the names of what may be struck."""

    seed: int
    database: Database
    parts: tuple[str, ...]
    length_s: float
    submissions: tuple[Submission, ...]
    faults: tuple[Fault, ...]


def plan(seed: int, database: Database, runs: int, *, quick: bool) -> Plan:
    """The plan of a seed; the same arguments give the same plan on every machine."""
    chance = random.Random(f"ql3-chaos:{seed}:{database}:{runs}:{quick}")
    length = QUICK_S if quick else max(QUICK_S, runs / RUNS_PER_S)
    parts = parts_of(database, quick=quick)
    submissions = _submissions(chance, runs, length * 0.9)
    return Plan(seed, database, parts, length, submissions, _faults(chance, parts, length, quick=quick))


def _submissions(chance: random.Random, runs: int, length: float) -> tuple[Submission, ...]:
    kinds = chance.choices(KINDS, [kind.share for kind in KINDS], k=runs)
    made: list[Submission] = []
    batch = 0
    while len(made) < runs:
        at = round(length * len(made) / runs, 3)
        size, number = 1, -1
        if chance.random() < 0.25:
            size, number = min(chance.choice((2, 5, 20)), runs - len(made)), batch
            batch += 1
        for kind in kinds[len(made) : len(made) + size]:
            within = kind.cancel_within_s
            cancel = None if within is None else round(chance.uniform(0, within), 3)
            made.append(Submission(at, kind.name, f"chaos-{len(made)}", number, cancel))
    return tuple(made)


def parts_of(database: Database, *, quick: bool) -> tuple[str, ...]:
    """Whom a fault may hit. `front` is one process with all services that have no part of their own here; a full check
    has a second worker, with a process host of its own, that may stay away until its leases are over."""
    parts = ["front", "dispatcher", "worker", "host", "nats"]
    if database == "postgresql":
        parts += ["dispatcher-2", "postgres"]
    if not quick:
        parts += ["worker-2", "host-2"]
    return tuple(parts)


def _faults(chance: random.Random, parts: Sequence[str], length: float, *, quick: bool) -> tuple[Fault, ...]:
    everybody = tuple(name for name in parts if name != "postgres")
    single = [name for name in everybody if name != "front"]
    blows: list[tuple[Blow, tuple[str, ...], float]] = []
    for name in single:
        blows.append(("kill", (name,), chance.uniform(0, 1.5)))
        blows.append(("pause", (name,), chance.uniform(0.5, 3.0)))
    blows.append(("wipe", ("nats",), chance.uniform(0, 1.0)))
    blows.append(("kill", everybody, chance.uniform(0, 1.0)))
    blows.append(("script", (), 0))
    if "postgres" in parts:
        blows.append(("restart", ("postgres",), chance.uniform(0, 1.0)))
    if not quick:
        blows += _long_blows(chance, everybody)
        for _ in range(int(length / 3) - len(blows)):
            blows.append(_any_blow(chance, single))
    chance.shuffle(blows)
    times = _spread(chance, len(blows), length)
    return tuple(
        Fault(round(at, 3), blow, victims, round(down, 3))
        for at, (blow, victims, down) in zip(times, blows, strict=True)
    )


def _long_blows(chance: random.Random, everybody: tuple[str, ...]) -> list[tuple[Blow, tuple[str, ...], float]]:
    dispatchers = tuple(name for name in everybody if name.startswith("dispatcher"))
    return [
        ("wipe", ("nats",), chance.uniform(0, 1.0)),
        ("kill", everybody, chance.uniform(0, 3.0)),
        ("kill", ("front",), chance.uniform(0, 3.0)),
        ("kill", ("nats",), LONG_PAUSE_S),
        # Longer than an offer's lease (15 s) and shorter than a started one's (30 s): nothing that runs may be lost.
        ("kill", dispatchers, chance.uniform(16, 20)),
        ("pause", dispatchers, chance.uniform(16, 20)),
        ("pause", ("worker",), chance.uniform(16, 20)),
        # Longer than both: what was safe to repeat runs elsewhere when the stale worker wakes.
        ("pause", ("worker-2",), chance.uniform(33, 40)),
        ("kill", ("host-2", "worker-2"), chance.uniform(33, 40)),
    ]


def _any_blow(chance: random.Random, services: Sequence[str]) -> tuple[Blow, tuple[str, ...], float]:
    number = chance.random()
    if number < 0.40:
        return "kill", (chance.choice(services),), chance.choice((0.0, chance.uniform(0, 3)))
    if number < 0.70:
        return "pause", (chance.choice(services),), chance.uniform(0.2, 6.0)
    if number < 0.85:
        return "kill", tuple(sorted(chance.sample(services, 2))), chance.uniform(0, 2)
    if number < 0.90:
        return "kill", ("front",), chance.uniform(0, 1)
    return "script", (), 0


def _spread(chance: random.Random, count: int, length: float) -> list[float]:
    # Evenly with jitter: a blow in each slice, so that no part of the work is left alone.
    slice_s = (length - 1.0) / count
    return [1.0 + slice_s * (number + chance.uniform(0, 0.8)) for number in range(count)]
