"""The data folder of `ql3 up`: its layout, its lock, and the small files of mode 0600 in it."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from schemas.errors import Ql3Error
from services.kit import whole_files

LAYOUT = ("nats", "db", "worker", "artifacts", "keys")


class DataFolder:
    """Paths under one data folder. `create` makes it (0700); `locked` is held by the one `up` that uses it."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._lock: int | None = None

    @property
    def console(self) -> Path:
        """`console.json`: where the command finds the running system."""
        return self.root / "console.json"

    @property
    def children(self) -> Path:
        """`children.json`: pid and start ticks of what `up` started."""
        return self.root / "children.json"

    @property
    def nats_endpoint(self) -> Path:
        """`nats/endpoint.json`: the url of the embedded nats-server; passwords are in `nats/credentials.json`."""
        return self.root / "nats" / "endpoint.json"

    def part(self, name: str) -> Path:
        """One of the folders of the layout."""
        return self.root / name

    def create(self) -> None:
        """Make what is missing. Raises `setup_invalid` naming the folder when it cannot be written."""
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in LAYOUT:
                self.part(name).mkdir(mode=0o700, exist_ok=True)
            probe = self.root / f".probe-{os.getpid()}"
            descriptor = os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            os.close(descriptor)
            probe.unlink()
        except OSError as error:
            raise Ql3Error(
                "setup_invalid",
                f"The data folder {self.root} cannot be written ({os.strerror(error.errno or 0)}).",
                field="--data",
            ) from error

    def lock(self) -> None:
        """Take the folder for this process; children do not inherit it. Raises `conflict` when another `up` has it."""
        descriptor = os.open(self.root / "up.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            os.close(descriptor)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise Ql3Error(
                    "setup_invalid", f"The data folder {self.root} cannot be locked.", field="--data"
                ) from error
            who = f" by process {holder}" if holder.isdigit() else ""
            raise Ql3Error(
                "conflict",
                f"The data folder {self.root} is in use{who}. Stop that one, or name another folder.",
                field="--data",
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._lock = descriptor

    def unlock(self) -> None:
        """Give the folder back."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> DataFolder:
        self.create()
        self.lock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unlock()


def write_private_json(path: Path, value: Any) -> None:
    """Replace a file of mode 0600 with indented JSON, durably: a reader sees the old content or the new one."""
    whole_files.replace(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
