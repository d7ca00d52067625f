"""Which processes `up` started: pid and start ticks, so that a pid that was used again is never taken for ours."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

import msgspec

from services.cli.data_folder import write_private_json


class Child(msgspec.Struct, frozen=True):
    """One recorded process. `ticks` is field 22 of /proc/PID/stat (clock ticks since boot)."""

    name: str
    pid: int
    ticks: int
    boot: str


def describe(name: str, pid: int) -> Child | None:
    """The identity of a living process, or None when it is gone."""
    ticks = _ticks(pid)
    return None if ticks is None else Child(name, pid, ticks, _boot())


def record(path: Path, children: list[Child]) -> None:
    """Write the list, replacing the one before."""
    write_private_json(path, children)


def recorded(path: Path) -> list[Child]:
    """The list of the `up` before, of those that live still; an unreadable file counts as none."""
    try:
        listed = msgspec.json.decode(path.read_bytes(), type=list[Child])
    except (OSError, msgspec.DecodeError):
        return []
    return [child for child in listed if child.boot == _boot() and _ticks(child.pid) == child.ticks]


def end(child: Child, *, grace_s: float) -> None:
    """TERM, wait up to `grace_s`, KILL; blocking. Only the very process that was recorded is signalled."""
    try:
        descriptor = os.pidfd_open(child.pid)
    except (OSError, AttributeError):
        return
    try:
        if _ticks(child.pid) != child.ticks:
            return
        for number, patience in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
            try:
                signal.pidfd_send_signal(descriptor, number)
            except ProcessLookupError:
                return
            # Not select(): it cannot take a descriptor above 1023.
            waiter = select.poll()
            waiter.register(descriptor, select.POLLIN)
            if waiter.poll(patience * 1000):
                return
    finally:
        os.close(descriptor)


def _ticks(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name in brackets may hold anything, so count from the last one; Z is a process that is gone already.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
