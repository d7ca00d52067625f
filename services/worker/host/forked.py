"""The second way to start a process: fork, then the steps that `posix_spawn` does not know, then exec.

Used only for attempts that ask for a nice value, resource limits, another user or a cgroup. Each step that fails
refuses the start: a limit that cannot be had must not be missing silently. The failure travels through a
close-on-exec pipe.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
from typing import Any, NoReturn


def fork_exec(item: dict[str, Any], path: str, output: int, null: int, nofile: tuple[int, int]) -> int:
    """Start `path` with the item's argv and env; returns the pid. Raises OSError of the step that failed."""
    read_end, write_end = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        os.close(read_end)
        os.close(write_end)
        raise
    if pid == 0:
        _become(item, path, output, null, nofile, write_end)
    os.close(write_end)
    try:
        report = os.read(read_end, 64)  # empty: the exec closed the other end
    finally:
        os.close(read_end)
    if not report:
        return pid
    os.waitpid(pid, 0)
    step, number = report.split()
    code = int(number)
    if step != b"exec" and code not in (errno.EAGAIN, errno.ENOMEM):
        raise LimitUnsupportedError(step.decode())
    raise OSError(code, os.strerror(code))


class LimitUnsupportedError(OSError):
    """A required limit could not be set on this machine; `args[1]` is the step."""

    def __init__(self, step: str) -> None:
        super().__init__(errno.EOPNOTSUPP, step)


def _become(item: dict[str, Any], path: str, output: int, null: int, nofile: tuple[int, int], report: int) -> NoReturn:
    """In the child: never returns, never raises."""
    step = "session"
    try:
        os.setsid()
        step = "cgroup"
        if "cgroup_path" in item:
            procs = os.open(f"{item['cgroup_path']}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
            os.write(procs, b"0")
        step = "nice"
        if "nice" in item:
            os.setpriority(os.PRIO_PROCESS, 0, item["nice"])
        step = "limits"
        resource.setrlimit(resource.RLIMIT_NOFILE, nofile)
        for name, value in item.get("limits", {}).items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name.upper()}"), (value, value))
        step = "user"
        if "uid" in item:
            os.setgroups(item.get("groups", []))
            os.setgid(item["gid"])
            os.setuid(item["uid"])
        step = "directory"
        os.chdir(item.get("cwd") or "/")  # again, as that user
        step = "exec"
        os.dup2(null, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        for number in range(1, signal.NSIG):
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                try:
                    signal.signal(number, signal.SIG_DFL)
                except (OSError, ValueError):
                    continue
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.execve(path, item["argv"], item["env"])  # noqa: S606
    except BaseException as error:
        number = error.errno if isinstance(error, OSError) and error.errno else errno.EINVAL
        os.write(report, f"{step} {number}".encode())
    os._exit(127)
