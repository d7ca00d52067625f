"""Memory, CPU and process limits of a whole tree through cgroup v2, where this process may write one.

A base is a directory whose children may have the controllers: our own cgroup when nothing else is enforced there (the
root of a machine or container), or its parent when the parent holds no process (a delegated unit whose processes sit in
a sub-group). Where there is none, a required limit refuses the start.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any, Final

WANTED: Final = ("memory", "cpu", "pids")
CPU_PERIOD_US: Final = 100_000


class CgroupError(Exception):
    """The limits cannot be enforced here."""


class Cgroups:
    """Makes and removes one cgroup an attempt. `roots` are candidates for the base, best first."""

    def __init__(self, roots: list[str] | None = None) -> None:
        self._roots = roots
        self._base: str | None = None
        self._able: frozenset[str] = frozenset()
        self._looked = False

    def able(self) -> frozenset[str]:
        """The controllers that can limit an attempt."""
        if not self._looked:
            self._looked = True
            for root in self._roots if self._roots is not None else _candidates():
                able = _enabled(root)
                if len(able) > len(self._able):
                    self._base, self._able = root, able
        return self._able

    def possible(self) -> frozenset[str]:
        """The controllers that most likely can, without touching anything; for telling others."""
        roots = self._roots if self._roots is not None else _candidates()
        found = [_possible(root) for root in roots]
        return max(found, key=len) if found else frozenset()

    def make(self, attempt: str, limits: dict[str, Any]) -> str:
        """A cgroup with these limits (`memory_bytes`, `cpu_percent`, `processes`). Raises CgroupError."""
        needed = {"memory_bytes": "memory", "cpu_percent": "cpu", "processes": "pids"}
        if not {needed[name] for name in limits} <= self.able():
            raise CgroupError
        path = f"{self._base}/ql3-{attempt}"
        try:
            os.mkdir(path, 0o755)
            if "memory_bytes" in limits:
                _write(f"{path}/memory.max", str(limits["memory_bytes"]))
                # Swap would let the tree have more than it may; a kernel without swap accounting has no such file.
                with contextlib.suppress(FileNotFoundError):
                    _write(f"{path}/memory.swap.max", "0")
            if "cpu_percent" in limits:
                _write(f"{path}/cpu.max", f"{limits['cpu_percent'] * CPU_PERIOD_US // 100} {CPU_PERIOD_US}")
            if "processes" in limits:
                _write(f"{path}/pids.max", str(limits["processes"]))
        except OSError as error:
            with contextlib.suppress(OSError):
                os.rmdir(path)
            raise CgroupError from error
        return path

    @staticmethod
    def kill(path: str) -> None:
        """KILL to everything in it at once; a kernel without `cgroup.kill` has the tree's signals."""
        with contextlib.suppress(OSError):
            _write(f"{path}/cgroup.kill", "1")

    @staticmethod
    def remove(path: str) -> bool:
        """Remove it when it is empty; answers whether the kernel killed in it for want of memory."""
        killed = False
        with contextlib.suppress(OSError):
            for line in _read(f"{path}/memory.events").splitlines():
                name, _, count = line.partition(" ")
                killed = killed or (name == "oom_kill" and count.strip() != "0")
        with contextlib.suppress(OSError):
            os.rmdir(path)
        return killed


def _candidates() -> list[str]:
    """Our own cgroup and its parent, where cgroup v2 is mounted."""
    try:
        own = next(line[3:] for line in _read("/proc/self/cgroup").splitlines() if line.startswith("0::"))
        rows = [line.split() for line in _read("/proc/self/mounts").splitlines()]
    except (OSError, StopIteration):
        return []
    found: list[str] = []
    for row in rows:
        if len(row) > 2 and row[2] == "cgroup2":
            path = f"{row[1]}{own}".rstrip("/")
            found.append(path)
            if path != row[1]:
                found.append(os.path.dirname(path))
    return found


def _possible(root: str) -> frozenset[str]:
    try:
        if not os.access(f"{root}/cgroup.subtree_control", os.W_OK) or not os.access(root, os.W_OK):
            return frozenset()
        now = frozenset(_read(f"{root}/cgroup.subtree_control").split()) & frozenset(WANTED)
        # Only the root of all may have processes beside children with controllers; it has no `cgroup.type`.
        if os.path.exists(f"{root}/cgroup.type") and _read(f"{root}/cgroup.procs").strip():
            return now
        return now | frozenset(_read(f"{root}/cgroup.controllers").split()) & frozenset(WANTED)
    except OSError:
        return frozenset()


def _enabled(root: str) -> frozenset[str]:
    control = f"{root}/cgroup.subtree_control"
    if not os.access(control, os.W_OK) or not os.access(root, os.W_OK):
        return frozenset()
    for name in WANTED:
        # One by one: a controller that is not there must not keep the others.
        with contextlib.suppress(OSError):
            _write(control, f"+{name}")
    try:
        return frozenset(_read(control).split()) & frozenset(WANTED)
    except OSError:
        return frozenset()


def _read(path: str) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts: list[bytes] = []
        while part := os.read(fd, 65536):
            parts.append(part)
        return b"".join(parts).decode()
    finally:
        os.close(fd)


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
