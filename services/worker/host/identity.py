"""Which process is that: boot id, pid and start ticks together name one process for ever; a pid alone names nobody."""

from __future__ import annotations

import os
from typing import Literal, NamedTuple

Presence = Literal["running", "gone", "unknown"]


class Identity(NamedTuple):
    """One process of one boot. `start_ticks` counts clock ticks since boot, as in `/proc/PID/stat`."""

    boot_id: str
    pid: int
    start_ticks: int


class Stat(NamedTuple):
    """What `/proc/PID/stat` says about a process, as far as we need it."""

    pid: int
    state: str
    ppid: int
    group: int
    session: int
    start_ticks: int


def boot_id() -> str:
    """The id of this boot of the machine."""
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:
        return file.read(64).decode("ascii").strip()


def read_stat(pid: int) -> Stat | None:
    """The process's row, or None if there is no such process. Raises OSError if `/proc` does not answer."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        return None
    try:
        raw = os.read(fd, 2048)
    except ProcessLookupError:
        return None
    finally:
        os.close(fd)
    # The name stands in parentheses and may itself hold spaces and parentheses: the last one ends it.
    fields = raw[raw.rindex(b")") + 2 :].split(None, 20)
    return Stat(pid, chr(fields[0][0]), int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))


def inspect(identity: Identity) -> Presence:
    """Whether that process still runs. A zombie is gone; what cannot be seen is unknown, never gone."""
    try:
        if boot_id() != identity.boot_id:
            return "gone"
        if read_stat(os.getpid()) is None:
            return "unknown"
        stat = read_stat(identity.pid)
    except OSError:
        return "unknown"
    if stat is not None:
        return "running" if stat.start_ticks == identity.start_ticks and stat.state not in "ZX" else "gone"
    try:
        os.kill(identity.pid, 0)
    except ProcessLookupError:
        return "gone"
    except PermissionError:
        pass
    return "unknown"  # it exists but /proc hides it (hidepid), or it appeared just now
