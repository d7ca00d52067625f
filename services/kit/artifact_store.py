"""Artifacts in a local directory: the worker publishes a log there, retention reads and retires it.

    <root>/<first two characters of the id's last group>/<artifact id>.log      files 0600, directories 0700

UUIDv7 ids begin with the time, so their last, random group spreads the files. Nothing here follows a symbolic link, and
a path is formed only from an id whose shape was checked. A root that is missing is a fault of the set-up (an unmounted
volume), never the answer "this file is gone".
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from pathlib import Path
from typing import Literal, NamedTuple

from schemas.ids import is_id
from services.kit import whole_files

_CANNOT_LINK = frozenset({errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK})


class UnsafeArtifactError(Exception):
    """The root, a directory or a file is not what it has to be; nothing was changed. The text holds no path."""

    def __init__(self) -> None:
        super().__init__("The artifact store is not in a safe state.")


class ArtifactsAwayError(UnsafeArtifactError):
    """The store itself cannot be used now (not mounted, not reachable): that says nothing about any artifact."""

    def __init__(self) -> None:
        Exception.__init__(self, "The artifact store cannot be used now.")


class Retired(NamedTuple):
    """`deleted` only when this call removed the file; `bytes_reclaimed` is its apparent size."""

    disposition: Literal["deleted", "already_absent"]
    bytes_reclaimed: int


class StoredRange(NamedTuple):
    """`data` begins at `start`, which is at most `total`, the file's size when it was opened."""

    data: bytes
    start: int
    total: int


def artifact_path(root: Path, artifact_id: str) -> Path:
    """Where an artifact lies. Raises ValueError when the id is not a lower-case UUIDv7."""
    if not is_id(artifact_id):
        raise ValueError("an artifact id is a lower-case UUIDv7")
    return root / artifact_id.rsplit("-", 1)[1][:2] / f"{artifact_id}.log"


def prepare_root(root: Path) -> None:
    """Make the root and each missing directory above it, 0700, and check it."""
    if not root.is_absolute():
        raise ValueError("the artifact root is an absolute path")
    whole_files.make_folders(root)
    os.chmod(root, 0o700)
    _check_usable(root)


def publish(source: Path, root: Path, artifact_id: str) -> None:
    """Put a finished, synced file into the store under its id; idempotent, blocking.

    On one file system it becomes a second hard link, at once and without copying: the source stays the worker's until
    it is told to retire it. Elsewhere it is copied, synced and linked under its name. The name never shows a part of a
    file, and an existing one is never replaced: it is the same artifact, published before.
    """
    target = artifact_path(root, artifact_id)
    _check_usable(root)
    if not target.parent.is_dir():
        with contextlib.suppress(FileExistsError):
            target.parent.mkdir(mode=0o700)
        _sync_directory(root)
    _check_usable(target.parent)  # the store's fault, not the source's
    # A repeat after the source was dropped has nothing to do; only then may the source be missing.
    if os.path.lexists(target):
        return
    if not stat.S_ISREG(source.lstat().st_mode):
        raise UnsafeArtifactError  # a link to it would be linked, not what it points to
    try:
        os.link(source, target, follow_symlinks=False)
    except FileExistsError:
        return
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        _copy_once(source, target)
    _sync_directory(target.parent)


def read_range(root: Path, artifact_id: str, offset: int, length: int) -> StoredRange | None:
    """At most `length` bytes at `offset`, exactly as written; None when the file is not there. Blocking.

    An offset past the end gives no bytes and `start` = the size. Raises UnsafeArtifactError.
    """
    path = artifact_path(root, artifact_id)
    _check_usable(root)
    descriptor = _open(path)
    if descriptor is None:
        return None
    try:
        total = os.fstat(descriptor).st_size
        start = min(offset, total)
        wanted = min(length, total - start)
        parts: list[bytes] = []
        at = start
        while wanted:
            part = os.pread(descriptor, wanted, at)
            if not part:
                raise UnsafeArtifactError
            parts.append(part)
            at += len(part)
            wanted -= len(part)
        return StoredRange(b"".join(parts), start, total)
    finally:
        os.close(descriptor)


def stored_size(root: Path, artifact_id: str) -> int | None:
    """Size of a stored artifact in bytes, or None. Raises UnsafeArtifactError."""
    _check_usable(root)
    descriptor = _open(artifact_path(root, artifact_id))
    if descriptor is None:
        return None
    try:
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def retire(root: Path, artifact_id: str) -> Retired:
    """Delete an artifact's file and sync its directory; blocking.

    Raises UnsafeArtifactError when something there is not a regular file (nothing is removed), OSError when the
    directory cannot be synced: then no tombstone may be written.
    """
    path = artifact_path(root, artifact_id)
    _check_usable(root)
    try:
        found = path.lstat()
    except FileNotFoundError:
        return Retired("already_absent", 0)
    _check_directory(path.parent)
    if not stat.S_ISREG(found.st_mode):
        raise UnsafeArtifactError
    try:
        path.unlink()
    except FileNotFoundError:
        return Retired("already_absent", 0)
    _sync_directory(path.parent)
    return Retired("deleted", found.st_size)


def free_bytes(root: Path) -> int:
    """Bytes that an unprivileged writer may still use on the root's file system. Raises OSError."""
    found = os.statvfs(root)
    return found.f_bavail * found.f_frsize


def _open(path: Path) -> int | None:
    if path.parent.is_symlink():
        raise UnsafeArtifactError
    try:
        # O_NONBLOCK: a FIFO planted here must not block the reader.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnsafeArtifactError from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnsafeArtifactError
    return descriptor


def _copy_once(source: Path, target: Path) -> None:
    temporary = target.parent / f".{target.stem}.{secrets.token_hex(16)}.tmp"
    descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as reader:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UnsafeArtifactError
        try:
            opened = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(opened, "wb") as writer:
                shutil.copyfileobj(reader, writer, 1024 * 1024)
                writer.flush()
                os.fsync(opened)
            with contextlib.suppress(FileExistsError):
                os.link(temporary, target, follow_symlinks=False)
        finally:
            temporary.unlink(missing_ok=True)


def _check_usable(path: Path) -> None:
    try:
        _check_directory(path)
    except UnsafeArtifactError as error:
        raise ArtifactsAwayError from error


def _check_directory(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except OSError as error:
        raise UnsafeArtifactError from error
    if not stat.S_ISDIR(mode):
        raise UnsafeArtifactError


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
