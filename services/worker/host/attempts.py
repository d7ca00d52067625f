"""One attempt as the host knows it, and the facts that its receipt states."""

from __future__ import annotations

import os
from typing import Any, Final, Literal

from services.worker.host.pump import Pump
from services.worker.host.spawn import tag_of

Phase = Literal["running", "stopping", "killing", "cleaning", "syncing", "ended"]
ID_CHARS: Final = frozenset("0123456789abcdef-")
MAX_CONTEXT: Final = 2048


class Attempt:
    """Everything about one started attempt. Times named `_ms` are wall-clock milliseconds, `_s` monotonic seconds."""

    __slots__ = (
        "cgroup",
        "cleanup",
        "context",
        "ended_ms",
        "ended_s",
        "eof",
        "grace_s",
        "id",
        "key",
        "kill_pause_s",
        "left_behind",
        "oom_killed",
        "phase",
        "pid",
        "pump",
        "sequence",
        "start_ticks",
        "started_ms",
        "status",
        "stopped",
        "survivors",
        "tag",
        "usage",
    )

    def __init__(self, item: dict[str, Any], pid: int, pump: Pump, now_ms: int) -> None:
        self.id: str = item["attempt"]
        self.context: dict[str, Any] = item.get("context") or {}
        self.key = bytes.fromhex(item["key"])
        self.sequence: int = item["sequence"]
        self.grace_s: float = item.get("grace_ms", 5000) / 1000
        self.pid = pid
        self.tag = tag_of(self.id)
        self.pump = pump
        self.started_ms = now_ms
        self.start_ticks: int | None = None
        self.ended_ms = 0
        self.ended_s = 0.0
        self.status: int | None = None
        self.usage: tuple[int, int] = (0, 0)
        self.stopped: str | None = None
        self.phase: Phase = "running"
        self.eof = False
        self.left_behind = 0
        self.cgroup: str | None = item.get("cgroup_path")
        self.cleanup: tuple[list[str], dict[str, str]] | None = None
        """A command that has to run when the tree is gone, with its environment."""
        if item.get("cleanup"):
            self.cleanup = (item["cleanup"], item["env"])
        self.oom_killed = False
        self.survivors = 0
        self.kill_pause_s = 0.02

    def facts(self) -> dict[str, Any]:
        """The report of the end (`schemas.workers.ReportBody`, and more under `host` for whoever reads it).

        `exit_code` is 128 + number for a process that a signal ended, as shells do.
        """
        status = self.status or 0
        by_signal = os.WIFSIGNALED(status)
        pump = self.pump
        return {
            "kind": "ended",
            "started_at_ms": self.started_ms,
            "finished_at_ms": max(self.started_ms, self.ended_ms),
            "exit_code": 128 + os.WTERMSIG(status) if by_signal else os.WEXITSTATUS(status),
            "signal": os.WTERMSIG(status) if by_signal else None,
            "stopped_for": self.stopped,
            "pid": self.pid,
            "log": {
                "artifact_id": self.id if pump.stored else None,
                "size": pump.stored,
                "produced": pump.written,
                "sha256": pump.sha256() if pump.stored else None,
                "truncated": pump.stored < pump.written,
                "cut": pump.cut,
            },
            "host": {
                "cpu_ms": self.usage[0],
                "max_rss_kib": self.usage[1],
                "left_behind": self.left_behind,
                "survivors": self.survivors,
                "oom_killed": self.oom_killed,
            },
        }

    def row(self) -> dict[str, Any]:
        """The attempt in the list that a re-attaching worker gets."""
        return {
            "attempt": self.id,
            "state": self.phase,
            "pid": self.pid,
            "start_ticks": self.start_ticks,
            "started_at_ms": self.started_ms,
            "context": self.context,
        }


def check(item: dict[str, Any]) -> None:
    """Refuse with ValueError what could not be started or named safely; the worker is trusted, its bugs are not."""
    attempt = item["attempt"]
    if not (isinstance(attempt, str) and len(attempt) == 36 and ID_CHARS.issuperset(attempt)):
        raise ValueError("attempt id")
    argv, env = item["argv"], item["env"]
    if not (isinstance(argv, list) and argv and all(isinstance(word, str) for word in argv)):  # pyright: ignore[reportUnknownVariableType]
        raise ValueError("argv")
    if not (isinstance(env, dict) and all(isinstance(value, str) for value in env.values())):  # pyright: ignore[reportUnknownVariableType]
        raise ValueError("env")
    if len(bytes.fromhex(item["key"])) != 32 or not isinstance(item["sequence"], int):
        raise ValueError("key")
    if not isinstance(item["quota"], int) or item["quota"] < 0:
        raise ValueError("quota")
    cleanup = item.get("cleanup", [])
    if not (isinstance(cleanup, list) and all(isinstance(word, str) for word in cleanup)):  # pyright: ignore[reportUnknownVariableType]
        raise ValueError("cleanup")
    if len(str(item.get("context", ""))) > MAX_CONTEXT:
        raise ValueError("context")
