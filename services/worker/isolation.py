"""What a task's isolation asks of a start: attributes for the process host, or a refusal before anything runs."""

from __future__ import annotations

import grp
import os
import pwd
from typing import Any, NamedTuple

from schemas.tasks import Isolation
from services.worker.refusal import Refused


class Person(NamedTuple):
    """The user that a process runs as."""

    name: str
    uid: int
    gid: int
    groups: list[int]
    home: str


def person(name: str) -> Person:
    """Look a user up. Raises Refused when there is none, or when only root could become them and we are not root."""
    try:
        entry = pwd.getpwnam(name)
    except (KeyError, ValueError):
        raise Refused("limit_unsupported", "The user that the task runs as does not exist on this worker.") from None
    if os.geteuid() != 0 and entry.pw_uid != os.geteuid():
        # Whatever `required` says: running as somebody else than asked for is never a lesser form of it.
        raise Refused("limit_unsupported", "This worker may not run as another user.")
    groups = [group.gr_gid for group in grp.getgrall() if name in group.gr_mem]
    return Person(name, entry.pw_uid, entry.pw_gid, sorted({entry.pw_gid, *groups}), entry.pw_dir)


def attributes(wanted: Isolation) -> dict[str, Any]:
    """Attributes of a spawn item. The host refuses what it cannot set, if `required` says so."""
    found: dict[str, Any] = {}
    if wanted.umask is not None:
        found["umask"] = wanted.umask
    if wanted.nice is not None:
        found["nice"] = wanted.nice
    limits = {"nofile": wanted.open_files, "fsize": wanted.file_bytes, "cpu": wanted.cpu_seconds}
    limits = {name: value for name, value in limits.items() if value is not None}
    if limits:
        found["limits"] = limits
    # Not RLIMIT_NPROC for processes: it counts all of a user's processes and does not hold root.
    cgroup = {
        "memory_bytes": wanted.memory_bytes,
        "cpu_percent": wanted.cpu_percent,
        "processes": wanted.processes,
    }
    cgroup = {name: value for name, value in cgroup.items() if value is not None}
    if cgroup:
        found["cgroup"] = cgroup
        found["cgroup_required"] = wanted.required
    return found
