"""What a process counts about its own work, as text for Prometheus.

Labels come from closed sets in the code (a cause, an outcome, a loop's name), never from what people name or send, so
the number of series has a bound. Counting is adding to a number in memory, after the commit of what is counted; it
begins at zero with each start of the process. What would need a look at a table is looked at when somebody asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from services.kit.version import VERSION

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
READ_S: Final = 2.0
"""How long a look at a table may take; its number is left out then."""

REGISTRY: Final = CollectorRegistry()
ProcessCollector(registry=REGISTRY)

FIRES: Final = Counter(
    "ql3_fires_admitted", "Fires of triggers that became orders for runs, by kind of trigger.", ["kind"],
    registry=REGISTRY,
)  # fmt: skip
MISSED: Final = Counter(
    "ql3_fires_missed", "Instants of triggers that did not become runs, by cause.", ["cause"], registry=REGISTRY
)
LATENESS: Final = Histogram(
    "ql3_admission_lateness_seconds",
    "How long after its instant a scheduled fire was admitted; admitted ahead of it is 0.",
    buckets=(0.005, 0.025, 0.1, 0.5, 1, 5, 30, 300, 3600),
    registry=REGISTRY,
)
SETTLED: Final = Counter(
    "ql3_runs_settled", "Runs that came to their end, by outcome.", ["outcome"], registry=REGISTRY
)  # fmt: skip
LOST: Final = Counter("ql3_attempts_lost", "Attempts of which nobody can say how they ended.", registry=REGISTRY)
DEAD: Final = Counter(
    "ql3_dead_letters", "Orders that could not be handled and were laid aside, by service.", ["service"],
    registry=REGISTRY,
)  # fmt: skip
LOOP_ERRORS: Final = Counter(
    "ql3_loop_errors", "Steps of background loops that failed, by loop.", ["loop"], registry=REGISTRY
)
OUTBOX: Final = Gauge(
    "ql3_outbox_backlog", "Messages that are committed and not yet on the bus, by service.", ["service"],
    registry=REGISTRY,
)  # fmt: skip
SLOTS_USED: Final = Gauge("ql3_worker_slots_used", "Attempts that this worker holds.", registry=REGISTRY)
SLOTS: Final = Gauge("ql3_worker_slots", "Attempts that this worker may hold.", registry=REGISTRY)
Gauge("ql3_build", "The version, as a label.", ["version"], registry=REGISTRY).labels(VERSION).set(1)

Look = Callable[[], Awaitable[None]]
"""Sets gauges by what it finds."""

_looks: dict[str, Look] = {}
log: structlog.stdlib.BoundLogger = structlog.get_logger("ql3.metrics")


def look_at(name: str, look: Look) -> None:
    """Do this before each answer. A part of the process that starts again takes the place of its earlier life."""
    _looks[name] = look


def look_no_more(name: str) -> None:
    """The part has ended."""
    _looks.pop(name, None)


async def exposition() -> bytes:
    """All numbers as text."""
    await asyncio.gather(*(_look(name, look) for name, look in list(_looks.items())))
    return generate_latest(REGISTRY)


async def _look(name: str, look: Look) -> None:
    try:
        async with asyncio.timeout(READ_S):
            await look()
    except Exception as error:  # the other numbers are worth having
        log.warning("a number could not be read", part=name, error=type(error).__name__)
