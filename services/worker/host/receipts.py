"""Completion receipts: one line an ended attempt, in append-only segment files, durable before anybody is told.

A record is `ql3r1 <sha256 of JSON> <JSON>` and a line end. Its body is the report that goes to the dispatcher, signed:
the proof is HMAC-SHA256 under the attempt's token digest, which is never stored here. Properties: an attempt has one
receipt (`append` refuses a second); a record is complete or absent after a crash at any byte (digest and line end; the
unwritten rest of a segment is zeros); what is neither is moved to `quarantine/`, never read again and never lost; a
segment goes when all of its records were acknowledged.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any, Final, NamedTuple

from services.worker.host.digest import hmac_sha256_hex, sha256_hex
from services.worker.host.wire import open_directory

MAGIC: Final = b"ql3r1"
ACK: Final = b"ql3a1"
SEGMENT_BYTES: Final = 1024 * 1024
MAX_RECORD: Final = 8 * 1024
MAX_QUARANTINED: Final = 256

_encode = json.JSONEncoder(separators=(",", ":"), sort_keys=True, check_circular=False, ensure_ascii=True).encode


class Receipt(NamedTuple):
    """One ended attempt. `body` is the exact JSON text that `proof` covers; `context` is what the worker gave along."""

    attempt: str
    sequence: int
    body: str
    proof: str
    context: dict[str, Any]


def make(attempt: str, sequence: int, facts: dict[str, Any], context: dict[str, Any], key: bytes) -> Receipt:
    """A receipt of `facts`, proven by the attempt's token digest `key`."""
    body = _encode(facts)
    # The same proof as `schemas.proof.proof`, which may not be imported here; a test holds the two together.
    text = f"{attempt}|{sequence}|{sha256_hex(body.encode())}"
    return Receipt(attempt, sequence, body, hmac_sha256_hex(key, text.encode()), context)


class Receipts:
    """The receipt files of one data folder. One owner (the host holds the folder's lock) and one thread at a time."""

    def __init__(self, directory: str) -> None:
        _private(directory)
        _private(f"{directory}/quarantine")
        self._directory = open_directory(directory)
        self._quarantine = open_directory(f"{directory}/quarantine")
        self._segment = -1
        self._used = 0
        self._number = 0
        self._open: dict[int, set[str]] = {}
        self._where: dict[str, int] = {}
        self.pending: dict[str, Receipt] = {}
        """Receipts that nobody has acknowledged yet, by attempt."""
        self.torn = 0
        self.quarantined = 0
        self._load()

    def append(self, receipts: list[Receipt]) -> None:
        """Make receipts durable with one sync. Raises OSError, then none is told of; ValueError on a second receipt."""
        if any(receipt.attempt in self.pending for receipt in receipts):
            raise ValueError("an attempt has one receipt")
        lines = b"".join(_line(receipt) for receipt in receipts)
        if self._segment < 0 or self._used + len(lines) > SEGMENT_BYTES:
            self._next_segment(max(SEGMENT_BYTES, len(lines)))
        try:
            os.pwrite(self._segment, lines, self._used)
            os.fdatasync(self._segment)
        except OSError:
            # After a failed sync the kernel may forget what it could not write: this segment takes no more records.
            os.close(self._segment)
            self._segment = -1
            raise
        self._used += len(lines)
        waiting = self._open.setdefault(self._number, set())
        for receipt in receipts:
            self.pending[receipt.attempt] = receipt
            self._where[receipt.attempt] = self._number
            waiting.add(receipt.attempt)

    def acknowledge(self, attempts: list[str]) -> None:
        """These need not be told again. Lost in a crash at worst, then they are told again."""
        done = [attempt for attempt in attempts if self.pending.pop(attempt, None) is not None]
        for attempt in done:
            segment = self._where.pop(attempt)
            waiting = self._open[segment]
            waiting.discard(attempt)
            if not waiting and segment != self._number:
                self._drop(segment)
        self._note(done)

    def set_aside(self, attempt: str) -> bool:
        """Move a receipt whose proof is wrong to quarantine."""
        receipt = self.pending.get(attempt)
        if receipt is None:
            return False
        self._keep(_line(receipt))
        self.acknowledge([attempt])
        return True

    def close(self) -> None:
        """Close the files; a segment of which everything was acknowledged is removed."""
        if self._segment >= 0:
            os.close(self._segment)
            self._segment = -1
            if not self._open.get(self._number):
                self._drop(self._number)
        os.close(self._directory)
        os.close(self._quarantine)

    def _load(self) -> None:
        for name in sorted(os.listdir(self._directory)):
            stem, dot, kind = name.partition(".")
            if not (dot and stem.isdigit() and len(stem) == 8):
                continue
            if kind == "tmp":
                os.unlink(name, dir_fd=self._directory)  # a segment that never got its name holds no record
            elif kind == "receipts":
                self._number = max(self._number, int(stem))
                self._load_segment(name, int(stem))
        for segment in [number for number, waiting in self._open.items() if not waiting]:
            self._drop(segment)

    def _load_segment(self, name: str, number: int) -> None:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._directory)
        with open(fd, "rb") as file:
            raw = file.read().rstrip(b"\0")
        waiting = self._open.setdefault(number, set())
        *lines, tail = raw.split(b"\n")
        if tail:
            self.torn += 1  # the power went while it was written; nobody was ever told of it
        for line in lines:
            if line.startswith(ACK + b" "):
                self._take_ack(line)
                continue
            receipt = parse(line)
            if receipt is not None and self.pending.get(receipt.attempt) == receipt:
                continue  # written again after a sync that failed
            if receipt is None or receipt.attempt in self.pending:
                self._keep(line + b"\n")
                continue
            self.pending[receipt.attempt] = receipt
            self._where[receipt.attempt] = number
            waiting.add(receipt.attempt)

    def _take_ack(self, line: bytes) -> None:
        for attempt in line[len(ACK) + 1 :].decode("ascii", "replace").split():
            if self.pending.pop(attempt, None) is not None:
                self._open[self._where.pop(attempt)].discard(attempt)

    def _next_segment(self, size: int) -> None:
        # Zeros first: later writes change no size and no extent, so that a sync is one write and no journal commit.
        if self._segment >= 0:
            os.close(self._segment)
            self._segment = -1
        number = self._number + 1
        name, temporary = f"{number:08d}.receipts", f"{number:08d}.tmp"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600, dir_fd=self._directory)
        try:
            view = memoryview(bytes(size))
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
            os.link(temporary, name, src_dir_fd=self._directory, dst_dir_fd=self._directory, follow_symlinks=False)
        except BaseException:
            os.close(fd)
            raise
        finally:
            os.unlink(temporary, dir_fd=self._directory)
        os.fsync(self._directory)
        previous, self._number, self._segment, self._used = self._number, number, fd, 0
        if previous and not self._open.get(previous):
            self._drop(previous)

    def _note(self, attempts: list[str]) -> None:
        line = ACK + b" " + " ".join(attempts).encode() + b"\n"
        if attempts and self._segment >= 0 and self._used + len(line) <= SEGMENT_BYTES:
            os.pwrite(self._segment, line, self._used)
            self._used += len(line)

    def _drop(self, segment: int) -> None:
        self._open.pop(segment, None)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{segment:08d}.receipts", dir_fd=self._directory)

    def _keep(self, line: bytes) -> None:
        self.quarantined += 1
        if len(os.listdir(self._quarantine)) >= MAX_QUARANTINED:
            return
        digest = sha256_hex(line)
        name, temporary = f"{digest}.record", f"{digest}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600, dir_fd=self._quarantine)
        try:
            with open(fd, "wb") as file:
                file.write(line)
                file.flush()
                os.fsync(fd)
            with contextlib.suppress(FileExistsError):  # the same evidence, kept before
                os.link(
                    temporary, name, src_dir_fd=self._quarantine, dst_dir_fd=self._quarantine, follow_symlinks=False
                )
        finally:
            os.unlink(temporary, dir_fd=self._quarantine)
        os.fsync(self._quarantine)


def parse(line: bytes) -> Receipt | None:
    """A record's receipt, or None if the line is not exactly what was once written."""
    parts = line.split(b" ", 2)
    if len(parts) != 3 or parts[0] != MAGIC or len(line) > MAX_RECORD:
        return None
    try:
        text = parts[2].decode("ascii")
        fields = json.loads(text)
        if sha256_hex(parts[2]) != parts[1].decode("ascii") or _encode(fields) != text:
            return None
        return Receipt(**fields)
    except (ValueError, TypeError):
        return None


def _line(receipt: Receipt) -> bytes:
    text = _encode(receipt._asdict()).encode("ascii")
    return b"%s %s %s\n" % (MAGIC, sha256_hex(text).encode(), text)


def _private(path: str) -> None:
    """Make one directory of mode 0700; what is there must be a directory of ours."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    fd = open_directory(path)
    os.fchmod(fd, 0o700)
    os.close(fd)
