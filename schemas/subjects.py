"""Streams and subjects: one declared table, and the builders of every subject.

A subject token is an id, a slug or a verb of ours, never a person's text.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from schemas.ids import is_id, is_slug

Service = Literal["gateway", "scheduler", "dispatcher", "worker", "approval", "retention", "vault"]
SERVICES: Final[tuple[Service, ...]] = (
    "approval",
    "vault",
    "scheduler",
    "dispatcher",
    "retention",
    "worker",
    "gateway",
)

DAY_S: Final = 86_400
MIB: Final = 1024 * 1024


class Stream(NamedTuple):
    """One JetStream stream. Ages in seconds, sizes in bytes; `max_bytes_edge` holds on the edge profile."""

    name: str
    subjects: tuple[str, ...]
    retention: Literal["workqueue", "limits"]
    max_age_s: int | None
    max_bytes: int
    max_bytes_edge: int
    discard: Literal["old", "new"]


COMMANDS: Final = Stream("QL3_COMMANDS", ("ql3.cmd.>",), "workqueue", None, 1024 * MIB, 256 * MIB, "new")
WORKERS: Final = Stream("QL3_WORKERS", ("ql3.worker.>",), "workqueue", 3600, 512 * MIB, 64 * MIB, "old")
EVENTS: Final = Stream("QL3_EVENTS", ("ql3.evt.>",), "limits", 14 * DAY_S, 2048 * MIB, 64 * MIB, "old")
DEAD: Final = Stream("QL3_DEAD", ("ql3.dead.>",), "limits", 30 * DAY_S, 16 * MIB, 16 * MIB, "old")
STREAMS: Final = (COMMANDS, WORKERS, EVENTS, DEAD)

Aggregate = Literal[
    "run", "attempt", "task", "trigger", "worker", "approval", "policy", "artifact", "secret", "session", "audit"
]


def command(service: str, verb: str) -> str:
    """`ql3.cmd.<service>.<verb>`: an order to a service."""
    return f"ql3.cmd.{service}.{verb}"


def report(worker: str) -> str:
    """`ql3.cmd.dispatcher.report.<worker>`: a worker may publish only on subjects that end in its own id."""
    return f"ql3.cmd.dispatcher.report.{_token(worker)}"


def to_worker(worker: str, verb: Literal["offer", "cancel", "retire"]) -> str:
    """`ql3.worker.<worker>.<verb>`: an order to one worker."""
    return f"ql3.worker.{_token(worker)}.{verb}"


def event(aggregate: Aggregate, project: str, subject_id: str, what: str) -> str:
    """`ql3.evt.<aggregate>.<project>.<id>.<what>`: a fact. `project` is `-` for what belongs to no project."""
    return f"ql3.evt.{aggregate}.{project if project == '-' else _token(project)}.{_token(subject_id)}.{what}"


def dead(service: str, reason: str) -> str:
    """`ql3.dead.<service>.<reason>`: what could not be handled."""
    return f"ql3.dead.{service}.{reason}"


def ack(sender: str) -> str:
    """`ql3.ack.<sender>` (core NATS): ids of orders that the receiver has committed."""
    return f"ql3.ack.{_token(sender)}"


def live_log(project: str, run: str, attempt: str) -> str:
    """`ql3.log.<project>.<run>.<attempt>` (core NATS): live chunks, only while somebody follows."""
    return f"ql3.log.{_token(project)}.{_token(run)}.{_token(attempt)}"


def _token(text: str) -> str:
    if not (is_slug(text) or is_id(text)):
        raise ValueError("a subject token must be an id or a slug")
    return text
