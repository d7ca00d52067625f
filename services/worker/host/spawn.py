"""Starting a process: `posix_spawn` for the common case, a fork with steps before the exec where limits are asked for.

Both give the child its own session, the pipe as stdout and stderr, nothing as stdin, default signals, exactly the given
environment, and the attempt's tag. The host has one thread that spawns, so working directory, umask and soft limits may
be set on the host itself for the moment of the spawn: they are inherited, and set back.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
from typing import Any, Final

from services.worker.host.digest import sha256

DEFAULT_UMASK: Final = 0o022
DEFAULT_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SIGNALS: Final = [signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD]
"""Python ignores the first two and we handle or ignore the others; an ignored signal would stay ignored after exec."""

_null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
_null_out = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)


class RefusedError(Exception):
    """The process was not started. `code` is stable; nothing of it ran."""

    def __init__(self, code: str) -> None:
        self.code = code
        super().__init__(code)


def tag_of(attempt: str) -> int:
    """The attempt's mark on its processes, derivable by anybody who knows the attempt's id.

    It is set as soft limit on real-time CPU microseconds (RLIMIT_RTTIME): a 64-bit number that every child inherits
    through fork, exec, setsid, double forks and cleaned environments, that anybody may read in `/proc/PID/limits`, and
    that limits nothing (an ordinary process has no real-time CPU time, and the smallest tag is over 2,000 years).
    """
    return (1 << 56) | int.from_bytes(sha256(attempt.encode()).digest()[:6], "big")


class Spawner:
    """Starts processes. Not thread-safe: it changes the host's own attributes while it spawns."""

    def __init__(self) -> None:
        self._nofile = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._rttime = resource.getrlimit(resource.RLIMIT_RTTIME)
        wanted = self._nofile[1] if self._nofile[1] != resource.RLIM_INFINITY else 65536
        # Two descriptors an attempt are ours, not the children's: they keep the limit that we were started with.
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(wanted, self._nofile[0]), 65536), self._nofile[1]))
        self._own_nofile = resource.getrlimit(resource.RLIMIT_NOFILE)

    def start(self, item: dict[str, Any], output: int) -> int:
        """Start one process with `output` as its stdout and stderr; returns its pid. Raises RefusedError.

        `item`: attempt, argv, env, and optionally cwd, umask, nice, limits, uid, gid, groups, cgroup_path.
        """
        argv: list[str] = item["argv"]
        env: dict[str, str] = item["env"]
        cwd: str = item.get("cwd") or "/"
        umask: int = item.get("umask", DEFAULT_UMASK)
        try:
            os.chdir(cwd)
        except (OSError, ValueError):
            raise RefusedError("working_directory_unusable") from None
        before = os.umask(umask)
        try:
            self._tag(tag_of(item["attempt"]))
            if needs_fork(item):
                from services.worker.host.forked import fork_exec

                return fork_exec(item, resolve(argv[0], env), output, _null, self._nofile)
            resource.setrlimit(resource.RLIMIT_NOFILE, self._nofile)
            return _posix_spawn(argv, env, output)
        except OSError as error:
            raise RefusedError(refusal(error)) from None
        except ValueError:
            raise RefusedError("command_invalid") from None  # a NUL byte or a name with "="
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, self._own_nofile)
            resource.setrlimit(resource.RLIMIT_RTTIME, self._rttime)
            os.umask(before)

    def leave(self) -> None:
        """Go back to the root after a batch: a working directory in use could not be unmounted."""
        os.chdir("/")

    def _tag(self, tag: int) -> None:
        hard = self._rttime[1]
        if hard == resource.RLIM_INFINITY or hard >= tag:
            resource.setrlimit(resource.RLIMIT_RTTIME, (tag, hard))


def start_helper(argv: list[str], env: dict[str, str]) -> int:
    """Start a helper of ours (a cleanup), with no input and no output; returns its pid. Raises OSError, ValueError."""
    return _posix_spawn(argv, env, _null_out)


def needs_fork(item: dict[str, Any]) -> bool:
    """Whether the attempt asks for what only steps between fork and exec can give."""
    return any(name in item for name in ("nice", "limits", "uid", "cgroup_path"))


def resolve(file: str, env: dict[str, str]) -> str:
    """The program's path, looked up in the child's own PATH. Raises FileNotFoundError or PermissionError."""
    if "/" in file:
        return file
    denied = False
    for directory in env.get("PATH", DEFAULT_PATH).split(":"):
        candidate = f"{directory or '.'}/{file}"
        if os.path.isfile(candidate):
            if os.access(candidate, os.X_OK):
                return candidate
            denied = True
    raise PermissionError(errno.EACCES, "not executable") if denied else FileNotFoundError(errno.ENOENT, "not found")


def refusal(error: OSError) -> str:
    """A stable code for why an exec failed."""
    return {
        errno.ENOENT: "command_not_found",
        errno.ENOTDIR: "command_not_found",
        errno.EACCES: "command_not_executable",
        errno.EPERM: "not_permitted",
        errno.ENOEXEC: "command_not_executable",
        errno.EOPNOTSUPP: "limit_unsupported",
        errno.E2BIG: "environment_too_large",
        errno.EAGAIN: "process_limit",
        errno.ENOMEM: "memory_exhausted",
        errno.EMFILE: "descriptor_limit",
        errno.ENFILE: "descriptor_limit",
    }.get(error.errno or 0, "spawn_failed")


def _posix_spawn(argv: list[str], env: dict[str, str], output: int) -> int:
    actions = [
        (os.POSIX_SPAWN_DUP2, _null, 0),
        (os.POSIX_SPAWN_DUP2, output, 1),
        (os.POSIX_SPAWN_DUP2, output, 2),
    ]
    path = resolve(argv[0], env)
    try:
        return os.posix_spawn(path, argv, env, file_actions=actions, setsid=True, setsigmask=[], setsigdef=_SIGNALS)
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
    # A script without `#!`: what a shell and execvp would do.
    return os.posix_spawn(
        "/bin/sh", ["sh", path, *argv[1:]], env, file_actions=actions, setsid=True, setsigmask=[], setsigdef=_SIGNALS
    )
