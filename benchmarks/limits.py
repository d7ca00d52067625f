"""The machine's own limits, measured in the same run as the figure that is compared with them."""

from __future__ import annotations

import os
import time


def spawn_rate(count: int, *, in_flight: int = 8) -> float:
    """Processes a second of a bare loop of `os.posix_spawn` of /bin/true with `in_flight` at once, reaping in order."""
    environment = {"PATH": "/usr/bin:/bin"}
    alive: set[int] = set()
    started = time.perf_counter()
    for _ in range(count):
        if len(alive) >= in_flight:
            pid, _status = os.waitpid(-1, 0)
            alive.discard(pid)
        alive.add(os.posix_spawn("/bin/true", ["/bin/true"], environment))
    while alive:
        pid, _status = os.waitpid(-1, 0)
        alive.discard(pid)
    return count / (time.perf_counter() - started)
