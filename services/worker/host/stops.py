"""Stopping whole trees: TERM to every member, the grace period, KILL again and again until nothing is left."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any, Final

from services.worker.host.identity import Identity, Presence, boot_id, inspect, read_stat
from services.worker.host.spawn import tag_of
from services.worker.host.tree import send

if TYPE_CHECKING:
    from services.worker.host.attempts import Attempt
    from services.worker.host.loop import Host

MAX_PAUSE_S: Final = 0.5
SWEEP_PAUSE_S: Final = 0.05


class Stops:
    """The stopping part of the host: trees of its own attempts, and what an earlier host left behind."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._sweeps: dict[str, float] = {}
        """Attempts of an earlier host that are being ended, with the monotonic time from which KILL is sent."""
        self._sessions: dict[str, int] = {}

    @property
    def busy(self) -> bool:
        """Whether something that an earlier host left is still being ended."""
        return bool(self._sweeps)

    def begin(self, attempts: list[Attempt]) -> None:
        """TERM to all members of these trees now, KILL after each one's grace period."""
        fresh = [attempt for attempt in attempts if attempt.phase in ("running", "stopping")]
        if not fresh:
            return
        members = self._host.trees.members(self._host.mains)
        now = time.monotonic()
        for attempt in fresh:
            for stat in members.get(attempt.id, []):
                send(stat, signal.SIGTERM)
                send(stat, signal.SIGCONT)  # a stopped process would not take notice
            attempt.phase = "stopping"
            self._host.at(now + attempt.grace_s, attempt.id, "kill")

    def kill(self, attempt: Attempt) -> None:
        """KILL to every member, and again until the host sees none."""
        attempt.phase = "killing"
        if attempt.cgroup is not None:
            self._host.cgroups.kill(attempt.cgroup)
        members = self._host.trees.members(self._host.mains).get(attempt.id, [])
        refused = [stat for stat in members if not send(stat, signal.SIGKILL)]
        if refused and len(refused) == len(members) and attempt.status is not None:
            attempt.survivors = len(refused)  # another user's processes: the receipt says that they were left
        self._host.at(time.monotonic() + attempt.kill_pause_s, attempt.id, "kill")
        attempt.kill_pause_s = min(2 * attempt.kill_pause_s, MAX_PAUSE_S)

    def kill_unknown(self, pids: list[int]) -> None:
        """KILL adopted processes that nothing tells about; only when no attempt runs to which they could belong."""
        for pid in pids:
            stat = read_stat(pid)
            if stat is not None:
                send(stat, signal.SIGKILL)

    def sweep(self, items: list[dict[str, Any]]) -> None:
        """Begin to end what is left of attempts that another host started: attempt, optional identity and grace_ms."""
        now = time.monotonic()
        for item in items:
            attempt: str = item["attempt"]
            if attempt in self._sweeps:
                continue
            session = 0
            if item.get("boot_id"):
                if item["boot_id"] != boot_id():
                    self._gone(attempt, "gone")
                    continue
                identity = Identity(item["boot_id"], item["pid"], item["start_ticks"])
                session = identity.pid if inspect(identity) == "running" else 0
            self._sweeps[attempt] = now + item.get("grace_ms", 5000) / 1000
            self._sessions[attempt] = session
            self._host.trees.add(attempt, tag_of(attempt), session)
        self._scan({item["attempt"] for item in items} & self._sweeps.keys(), first=True)

    def sweep_again(self, _: str) -> None:
        """Look again, as long as something is there."""
        self._scan(set(self._sweeps), first=False)

    def _scan(self, attempts: set[str], *, first: bool) -> None:
        if not attempts:
            return
        now = time.monotonic()
        try:
            left, whole = self._host.trees.strays(attempts)
        except OSError:
            for attempt in attempts:
                self._forget(attempt, "unknown")
            return
        for attempt in attempts:
            stats = left.get(attempt)
            if not stats:
                if whole:
                    self._forget(attempt, "gone")
                continue
            kill = now >= self._sweeps[attempt]
            sent = [send(stat, signal.SIGKILL) for stat in stats] if kill else []
            if first and not kill:
                for stat in stats:
                    send(stat, signal.SIGTERM)
                    send(stat, signal.SIGCONT)
            elif sent and not any(sent):
                self._forget(attempt, "unknown")  # another user's; it may run on
        if self._sweeps:
            self._host.at(now + SWEEP_PAUSE_S, "", "sweep")

    def _forget(self, attempt: str, presence: Presence) -> None:
        self._host.trees.remove(attempt, tag_of(attempt), self._sessions.pop(attempt, 0))
        del self._sweeps[attempt]
        self._gone(attempt, presence)

    def _gone(self, attempt: str, presence: Presence) -> None:
        self._host.link.tell("gone", {"attempt": attempt, "presence": presence})
