"""One attempt's output: from the pipe that is both its stdout and stderr into one file, byte for byte, up to the quota.

Beyond the quota (or a full disk) the process is not disturbed: its output is drained and counted, and the end says that
it was cut. Memory is one shared buffer, however much is written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from typing import Final, Literal

from services.worker.host.digest import sha256
from services.worker.host.mask import Mask

CHUNK: Final = 256 * 1024
SPLICE_BYTES: Final = 1024 * 1024
WIDE_AFTER: Final = 256 * 1024
"""From here on output is large: the pipe is widened, the kernel moves the pages, the digest is left to others."""

DRAIN_MOVES: Final = 64
_F_SETPIPE_SZ: Final = 1031
_buffer = memoryview(bytearray(CHUNK))
_splicing = hasattr(os, "splice")

Cut = Literal["quota", "disk_full", "io_error"]


class Pump:
    """Moves what a pipe holds to `directory/name`, created at the first byte."""

    def __init__(self, pipe: int, directory: int, name: str, quota: int, mask: Mask | None) -> None:
        self.pipe: int = pipe
        self.written = 0
        """Bytes the process wrote (after masking), stored or not."""
        self.stored = 0
        """Bytes in the file."""
        self.cut: Cut | None = None
        self.file: int = -1
        self._directory = directory
        self._name = name
        self._quota = quota
        self._mask = mask
        self._hash = sha256()
        self._wide = False
        self._seen = 0

    def move(self) -> bool:
        """Move what is there, at most about 1 MiB. Returns False at the end of the output."""
        if self._wide and _splicing:
            return self._splice()
        try:
            got = os.readv(self.pipe, [_buffer])
        except BlockingIOError:
            return True
        self._seen += got
        if got == 0:
            if self._mask is not None:
                self._store(memoryview(self._mask.finish()))
            return False
        chunk = _buffer[:got]
        self._store(chunk if self._mask is None else memoryview(self._mask.feed(bytes(chunk))))
        if self.written > WIDE_AFTER and not self._wide and self._mask is None:
            self._widen()
        return True

    def drain(self) -> bool:
        """Move what is there now (a pipe holds at most 1 MiB). Returns False at the end of the output."""
        for _ in range(DRAIN_MOVES):
            before = self._seen
            if not self.move():
                return False
            if before == self._seen:
                break
        return True

    def sha256(self) -> str | None:
        """The digest of the file, or None for large output, whose digest is taken from the file."""
        return None if self._wide else self._hash.hexdigest()

    def begin_sync(self) -> None:
        """Begin to write the file's bytes to disk, without waiting."""
        if self.file >= 0:
            with contextlib.suppress(OSError):
                os.posix_fadvise(self.file, 0, 0, os.POSIX_FADV_DONTNEED)

    def sync(self) -> None:
        """Make the file's bytes durable; its name needs a sync of the directory too. Raises OSError."""
        if self.file >= 0:
            os.fsync(self.file)

    def close(self) -> None:
        """Close pipe and file."""
        for fd in (self.pipe, self.file):
            if fd >= 0:
                os.close(fd)
        self.pipe = self.file = -1

    def close_pipe(self) -> None:
        """Read no more; whoever still holds the other end may get SIGPIPE."""
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1

    def _store(self, chunk: memoryview) -> None:
        self.written += len(chunk)
        room = self._quota - self.stored
        if len(chunk) > room:
            self._cut("quota")
            chunk = chunk[:room]
        if self.cut not in (None, "quota"):
            return
        at = 0
        try:
            while at < len(chunk):
                at += os.write(self._open(), chunk[at:])
        except OSError as error:
            self._fail(error)
        if at:
            self.stored += at
            if not self._wide:
                self._hash.update(chunk[:at])

    def _splice(self) -> bool:
        room = self._quota - self.stored
        storing = room > 0 and self.cut is None
        try:
            target, count = (self._open(), min(room, SPLICE_BYTES)) if storing else (_null(), SPLICE_BYTES)
            moved = os.splice(self.pipe, target, count, flags=os.SPLICE_F_NONBLOCK)
        except BlockingIOError:
            return True
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOSYS):
                global _splicing
                _splicing = False  # this kernel or file system cannot; reading and writing always can
                return True
            if not storing:
                raise
            self._fail(error)
            return True
        self._seen += moved
        if moved == 0:
            return False
        self.written += moved
        if storing:
            self.stored += moved
        else:
            self._cut("quota")
        return True

    def _widen(self) -> None:
        self._wide = True
        with contextlib.suppress(OSError):  # over the user's budget for pipes: the usual 64 KiB do
            fcntl.fcntl(self.pipe, _F_SETPIPE_SZ, SPLICE_BYTES)

    def _open(self) -> int:
        if self.file < 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self.file = os.open(self._name, flags, 0o600, dir_fd=self._directory)
        return self.file

    def _fail(self, error: OSError) -> None:
        # The first failure stays: a gap in the middle of a file would be worse than a marked end.
        self._cut("disk_full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "io_error")

    def _cut(self, reason: Cut) -> None:
        if self.cut is None:
            self.cut = reason


_null_fd = -1


def _null() -> int:
    global _null_fd
    if _null_fd < 0:
        _null_fd = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
    return _null_fd
