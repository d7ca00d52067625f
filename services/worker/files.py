"""Variables that are delivered as a file: the process gets the path of a file that holds the value.

Public values lie under the worker's directory. Secret values lie only in memory (a tmpfs), because no secret may be on
a disk outside the vault's envelopes. The files go when the attempt ends, and what a crash left goes at the next start.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from schemas.ids import is_id
from services.worker.refusal import Refused

_TMPFS: Final = "tmpfs"
MEMORY: Final = (Path("/dev/shm"), Path("/run"))  # noqa: S108 - used only as a checked, private directory below it


class Files:
    """The files of attempts. `public` is a directory of the worker; `name` tells data folders of one machine apart."""

    def __init__(self, public: Path, name: str, memory: Collection[Path] = MEMORY) -> None:
        self._public = public
        self._memory = next((path for path in memory if _is_memory(path) and os.access(path, os.W_OK)), None)
        self._secret = self._memory / f"ql3-{os.geteuid()}-{name}" if self._memory is not None else None

    def deliver(
        self,
        attempt_id: str,
        public: Mapping[str, str],
        secret: Mapping[str, str],
        owner: tuple[int, int] | None = None,
    ) -> dict[str, str]:
        """Write the values, 0600 in a directory 0700, and answer the paths by variable. Raises Refused, OSError.

        `owner` is the user and group that the process runs as, when it is not ours. Blocking.
        """
        if secret and self._secret is None:
            raise Refused("limit_unsupported", "This worker has no place in memory for a secret file.")
        paths: dict[str, str] = {}
        for root, values in ((self._public, public), (self._secret, secret)):
            if values and root is not None:
                paths |= _write(root, attempt_id, values, owner)
        return paths

    def drop(self, attempt_id: str) -> None:
        """Remove an attempt's files. Blocking, cheap when there are none."""
        for root in (self._public, self._secret):
            if root is not None and is_id(attempt_id):
                shutil.rmtree(root / attempt_id, ignore_errors=True)

    def sweep(self, held: Collection[str]) -> None:
        """Remove the files of attempts that are not held."""
        for root in (self._public, self._secret):
            if root is not None:
                with contextlib.suppress(FileNotFoundError):
                    for name in os.listdir(root):
                        if name not in held:
                            self.drop(name)


def _write(root: Path, attempt_id: str, values: Mapping[str, str], owner: tuple[int, int] | None) -> dict[str, str]:
    with contextlib.suppress(FileExistsError):
        root.mkdir(mode=0o711)
    status = root.lstat()
    if not root.is_dir() or root.is_symlink() or status.st_uid != os.geteuid():
        raise Refused("limit_unsupported", "The worker's place for files belongs to somebody else.")
    root.chmod(0o711)  # another user's process passes through; it cannot list
    directory = root / attempt_id
    directory.mkdir(mode=0o700)
    paths: dict[str, str] = {}
    for name, value in values.items():
        path = directory / name
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(value.encode())
            if owner is not None:
                os.fchown(fd, *owner)
        paths[name] = str(path)
    if owner is not None:
        os.chown(directory, *owner, follow_symlinks=False)
    return paths


def _is_memory(path: Path) -> bool:
    """Whether a directory lies on a tmpfs."""
    try:
        rows = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return False
    mounted = {row.split()[1]: row.split()[2] for row in rows if len(row.split()) > 2}
    return mounted.get(str(path)) == _TMPFS
