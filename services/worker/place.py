"""What this machine is: directories of the worker, its key, what it can do, how much room it has."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import secrets
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from schemas.errors import Ql3Error
from schemas.workers import Capabilities
from services.kit import whole_files
from services.kit.artifact_store import free_bytes
from services.kit.config import Config
from services.worker.attempt import Held
from services.worker.command import Place
from services.worker.container import find_engine
from services.worker.host.cgroups import Cgroups

KEY_BYTES: Final = 32
DEFAULT_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
INHERITED: Final = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ")
"""The only variables that a process gets from the worker's own environment."""
_RUNTIMES: Final = {
    "python": ("python3", "--version"),
    "node": ("node", "--version"),
    "bash": ("bash", "--version"),
    "uv": ("uv", "--version"),
}


class Directories:
    """The worker's directories under the data folder, all 0700: host, logs, work; and its lock."""

    def __init__(self, data: Path) -> None:
        self.root = data.absolute() / "worker"
        self.host = self.root / "host"
        self.logs = self.root / "logs"
        self.work = data.absolute() / "work"
        self.files = self.root / "files"
        self.environments = self.root / "environments"
        self.mark = hashlib.sha256(str(self.root).encode()).hexdigest()[:16]
        """Tells this data folder apart from others of the same machine."""
        self._lock = -1

    def own(self) -> None:
        """Make them, and be their only owner until `release` or the end of the process. Raises `setup_invalid`."""
        for path in (self.root, self.host, self.logs, self.work):
            whole_files.make_folders(path)
            if path.is_symlink():
                raise Ql3Error("setup_invalid", "A directory of the worker is a symbolic link.", field="QL3_DATA")
            path.chmod(0o700)
        self._lock = os.open(self.root / "owner.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise Ql3Error("setup_invalid", "Another worker uses this data folder.", field="QL3_DATA") from None

    def release(self) -> None:
        """Let another worker have them."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def project(self, name: str) -> None:
        """Make a project's working directory."""
        with contextlib.suppress(FileExistsError):
            (self.work / name).mkdir(mode=0o700)


class Room:
    """Room on the disk of the logs: what is free, less what running attempts may still write. Sizes in bytes."""

    def __init__(self, directory: Path, minimum_free: int) -> None:
        self._directory = directory
        self._minimum_free = minimum_free
        self._reserved: dict[str, int] = {}
        self._sum = 0

    def fits(self, quota: int) -> bool:
        """Whether an attempt of this quota could be started. What cannot be known is no room."""
        try:
            return free_bytes(self._directory) >= self._minimum_free + self._sum + quota
        except OSError:
            return False

    def reserve(self, held: Held, quota: int) -> bool:
        """Keep room for an attempt's log until it ends; False if there is none."""
        if not self.fits(quota):
            return False
        self._reserved[held.attempt_id] = quota
        self._sum += quota
        return True

    def release(self, held: Held) -> None:
        """An attempt writes no more."""
        self._sum -= self._reserved.pop(held.attempt_id, 0)


def load_key(path: Path) -> bytes:
    """The worker's own 32 bytes, made once, mode 0600. Raises `setup_invalid` when the file is not what it must be."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags)
    except FileNotFoundError:
        whole_files.create(path, secrets.token_bytes(KEY_BYTES))
        fd = os.open(path, flags)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        key = file.read(KEY_BYTES + 1)
    if status.st_mode & 0o77 or status.st_uid != os.geteuid() or len(key) != KEY_BYTES:
        raise Ql3Error("setup_invalid", "The worker's key file must be ours, 32 bytes, mode 0600.", field="worker.key")
    return key


def describe(directories: Directories) -> Place:
    """What every process gets from this machine. Blocking: asks a container engine whether it answers."""
    environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
    environment["PATH"] = _path(environment.get("PATH") or DEFAULT_PATH)
    environment.setdefault("LANG", "C.UTF-8")
    return Place(environment, str(directories.work), find_engine())


def _path(path: str) -> str:
    """The search path with our own virtual environment last: what a task installs must not land among our packages."""
    if sys.prefix == sys.base_prefix:
        return path
    ours = str(Path(sys.prefix) / "bin")
    others = [part for part in path.split(":") if part != ours]
    return ":".join([*others, ours])


def look(config: Config, place: Place) -> Capabilities:
    """What a task may ask of this machine. Blocking: runs each runtime's version command once."""
    features = ["umask", "nice", "rlimits", "files"]
    features += [f"cgroup_{name}" for name in sorted(Cgroups().possible())]
    if os.geteuid() == 0:
        features.append("run_as")
    return Capabilities(
        architecture=platform.machine(),
        system=platform.system().lower(),
        cpu_cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        executors=("local_process", "docker") if place.engine is not None else ("local_process",),
        runtimes={name: version for name, command in _RUNTIMES.items() if (version := _version(*command))},
        labels=dict(config.worker_labels),
        pool=config.worker_pool,
        features=features,
    )


def _version(program: str, flag: str) -> str | None:
    path = shutil.which(program)
    if path is None:
        return None
    try:
        done = subprocess.run([path, flag], capture_output=True, timeout=5, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    for word in done.stdout.decode("utf-8", "replace").split():
        version = word.lstrip("v")
        if version[:1].isdigit():
            return version[:64]
    return "unknown"
