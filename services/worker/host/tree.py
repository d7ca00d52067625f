"""Who belongs to whom. Every process that an attempt ever started is below the host, because the host is a subreaper: a
process whose parent died becomes the host's own child. So a tree is empty exactly when the host has no child of it.

Which attempt an adopted orphan belongs to is decided by, in this order: what was seen of it before, the tag it
inherited (`spawn.tag_of`), its session, the marker `QL3_ATTEMPT_ID` in its first environment. It can lose one of them,
hardly all.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Collection, Iterable
from typing import Final

from services.worker.host.identity import Stat, read_stat

MARKER: Final = b"QL3_ATTEMPT_ID="
ROUNDS: Final = 64
"""So often a listing is repeated while it shows somebody new."""
_RTTIME_LINE: Final = b"Max realtime timeout"

Key = tuple[int, int]
"""(pid, start ticks): one process."""


def children_of_self() -> list[int]:
    """Pids of the host's own children, adopted ones and zombies included."""
    try:
        fd = os.open("/proc/thread-self/children", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        own = os.getpid()
        mine: list[int] = []
        each_process(lambda stat: mine.append(stat.pid) if stat.ppid == own else None)
        return mine
    try:
        raw = b""
        while chunk := os.read(fd, 65536):
            raw += chunk
    finally:
        os.close(fd)
    return [int(pid) for pid in raw.split()]


def until_nobody_new(listing: Callable[[], Collection[int]], look: Callable[[int], None], seen: set[int]) -> bool:
    """Look at everyone whom a listing shows and who is not in `seen`, again until it shows nobody new.

    Between the listing and the look at one of its processes this one can fork and end, over and over. Its child is in
    the next listing; so only a listing of those who were looked at proves that there is nobody else. False if there
    still was somebody new in the last of `ROUNDS` listings.
    """
    for _ in range(ROUNDS):
        fresh = [pid for pid in listing() if pid not in seen]
        if not fresh:
            return True
        seen.update(fresh)
        for pid in fresh:
            look(pid)
    return False


def each_process(look: Callable[[Stat], None]) -> bool:
    """Show every process of the machine; whether nobody can have slipped through meanwhile."""

    def read(pid: int) -> None:
        with contextlib.suppress(OSError):
            stat = read_stat(pid)
            if stat is not None:
                look(stat)

    return until_nobody_new(lambda: [int(name) for name in os.listdir("/proc") if name.isdigit()], read, set())


def inherited_tag(pid: int) -> int | None:
    """The tag on a process, or None if it has none or is gone."""
    raw = _read(f"/proc/{pid}/limits")
    at = raw.find(_RTTIME_LINE)
    if at < 0:
        return None
    soft = raw[at + len(_RTTIME_LINE) :].split(None, 1)[0]
    return int(soft) if soft.isdigit() else None


def marker(pid: int) -> str | None:
    """The attempt id in the environment that the process was started with, or None."""
    for entry in _read(f"/proc/{pid}/environ").split(b"\0"):
        if entry.startswith(MARKER):
            return entry[len(MARKER) :].decode("ascii", "replace")
    return None


class Trees:
    """Attributes processes to attempts. `add` and `remove` name the attempts that are of interest."""

    def __init__(self) -> None:
        self._by_tag: dict[int, str] = {}
        self._by_session: dict[int, str] = {}
        self._known: dict[Key, str] = {}
        self._foreign: set[Key] = set()
        """Processes that were looked at and belong to none of the attempts; forgotten when one is added."""

    def add(self, attempt: str, tag: int, pid: int) -> None:
        """An attempt and its first process (0: not known)."""
        self._foreign.clear()
        self._by_tag[tag] = attempt
        if pid:
            self._by_session[pid] = attempt

    def remove(self, attempt: str, tag: int, pid: int) -> None:
        """Nothing of this attempt is left."""
        self._by_tag.pop(tag, None)
        self._by_session.pop(pid, None)
        if self._known:
            self._known = {key: owner for key, owner in self._known.items() if owner != attempt}

    def owner(self, stat: Stat) -> str | None:
        """The attempt that a process belongs to when its ancestry does not tell; remembered once found."""
        key = (stat.pid, stat.start_ticks)
        known = self._known.get(key)
        if known is not None:
            return known
        tag = inherited_tag(stat.pid)
        owner = self._by_tag.get(tag) if tag is not None else None
        if owner is None:
            owner = self._by_session.get(stat.session)
        if owner is None:
            named = marker(stat.pid)
            owner = named if named in self._by_tag.values() else None
        if owner is not None:
            self._known[key] = owner
        return owner

    def orphans(self, mains: Collection[int]) -> dict[str | None, list[int]]:
        """The host's adopted children by attempt; None holds those that nothing tells about."""
        living: list[Stat] = []
        ended: list[Stat] = []

        def look(pid: int) -> None:
            stat = read_stat(pid)
            if stat is not None:
                (ended if stat.state in "ZX" else living).append(stat)

        if not until_nobody_new(children_of_self, look, set(mains)):
            living += ended  # each may have left a child that was not listed yet
        found: dict[str | None, list[int]] = {}
        for stat in living:
            found.setdefault(self.owner(stat), []).append(stat.pid)
        return found

    def members(self, mains: dict[int, str]) -> dict[str, list[Stat]]:
        """Every living process below the host by attempt, and remembers them for when their parents are gone."""
        below: dict[int, list[Stat]] = {}
        each_process(lambda stat: below.setdefault(stat.ppid, []).append(stat))
        found: dict[str, list[Stat]] = {}
        for root in below.get(os.getpid(), []):
            attempt = mains.get(root.pid) or self.owner(root)
            if attempt is not None:
                self._collect(attempt, root, below, found.setdefault(attempt, []))
        return found

    def strays(self, attempts: Iterable[str]) -> tuple[dict[str, list[Stat]], bool]:
        """Living processes anywhere on the machine that carry these attempts' tag, session or marker: what a host
        that died has left; and whether these are all. Its descendants carry the tag themselves."""
        wanted = set(attempts)
        found: dict[str, list[Stat]] = {}
        own = os.getpid()

        def look(stat: Stat) -> None:
            key = (stat.pid, stat.start_ticks)
            if stat.pid == own or stat.state in "ZX" or stat.session == 0 or key in self._foreign:
                return
            owner = self.owner(stat)
            if owner in wanted:
                found.setdefault(owner, []).append(stat)
            elif owner is None:
                self._foreign.add(key)

        whole = each_process(look)
        return found, whole

    def _collect(self, attempt: str, root: Stat, below: dict[int, list[Stat]], into: list[Stat]) -> None:
        waiting = [root]
        while waiting:
            stat = waiting.pop()
            if stat.state not in "ZX":
                into.append(stat)
                self._known[stat.pid, stat.start_ticks] = attempt
            waiting += below.get(stat.pid, [])


def send(stat: Stat, number: signal.Signals) -> bool:
    """Signal exactly that process, never one that got its pid since. False if it may not be signalled."""
    try:
        fd = os.pidfd_open(stat.pid)
    except (ProcessLookupError, PermissionError):
        return True
    try:
        now = read_stat(stat.pid)
        if now is not None and now.start_ticks == stat.start_ticks:
            signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        pass
    except PermissionError:
        return False
    finally:
        os.close(fd)
    return True


def _read(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    raw = b""
    try:
        while len(raw) < 1 << 20 and (chunk := os.read(fd, 65536)):
            raw += chunk
    except OSError:
        pass  # it ended meanwhile, or is not ours to look at
    finally:
        os.close(fd)
    return raw
