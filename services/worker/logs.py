"""Logs while this worker holds them: ranges, live chunks to whoever follows, and their way into the artifact store."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import stat
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import structlog

from schemas import limits, subjects
from schemas.errors import Ql3Error
from schemas.ids import is_id
from schemas.workers import LogChunk, LogFollow, LogRange, LogRead
from services.kit.artifact_store import ArtifactsAwayError, UnsafeArtifactError
from services.kit.artifacts import Artifacts
from services.kit.clock import monotonic_ms
from services.kit.loops import STOP_S, Aside, Loop
from services.kit.rush import rush
from services.worker.attempt import Held

FOLLOW_MS: Final = 30_000
MAX_FOLLOWED: Final = 256
CHUNKS_A_TURN: Final = 16
PUBLISH_BATCH: Final = 64
PUBLISH_PAUSE_S: Final = 0.1
"""How long finished logs wait for others, so that a burst of runs makes few batches of them."""
DROP_AFTER_S: Final = 3600.0

log: structlog.stdlib.BoundLogger = structlog.get_logger("ql3.worker")


SendChunk = Callable[[str, LogChunk], Awaitable[None]]


class _Follow(msgspec.Struct):
    subject: str
    until_ms: int
    offset: int


class Piece(NamedTuple):
    """A part of a file and the file's size."""

    data: bytes
    start: int
    total: int


def read_piece(directory: Path, attempt_id: str, offset: int, length: int) -> Piece | None:
    """Bytes of an attempt's output as far as they are written; None when there is no file. Blocking."""
    if not is_id(attempt_id):
        raise ValueError("an attempt id is a lower-case UUIDv7")
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(directory / f"{attempt_id}.log", flags)
    except FileNotFoundError:
        return None
    except OSError as error:  # a link in its place: commands can reach this directory
        raise Ql3Error("unavailable", "The log is not a regular file.") from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise Ql3Error("unavailable", "The log is not a regular file.")
        start = min(offset, found.st_size)
        wanted = min(length, found.st_size - start)
        parts: list[bytes] = []
        while wanted and (part := os.pread(fd, wanted, start + sum(map(len, parts)))):
            parts.append(part)
            wanted -= len(part)
        return Piece(b"".join(parts), start, found.st_size)
    finally:
        os.close(fd)


def log_size(directory: Path, attempt_id: str) -> int:
    """How many bytes of an attempt's output are here; 0 when there is no such file. Blocking."""
    try:
        piece = read_piece(directory, attempt_id, 0, 0)
    except Ql3Error:
        return 0
    return piece.total if piece else 0


def log_digest(directory: Path, attempt_id: str) -> str | None:
    """SHA-256 of an attempt's output, or None when there is no such file. Blocking, as long as reading it takes."""
    try:
        fd = os.open(directory / f"{attempt_id}.log", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return None
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


class Logs:
    """Serves the logs in `directory`, and puts finished ones into the store under the worker's name.

    `held` looks an attempt up, `follow` tells the host whose growth counts.
    """

    def __init__(
        self,
        *,
        directory: Path,
        worker: str,
        store: Artifacts,
        held: Callable[[str], Held | None],
        follow: Callable[[list[str]], object],
        send: SendChunk,
        aside: Aside = rush.over,
    ) -> None:
        self._directory = directory
        self._worker = worker
        self._store = store
        self._held = held
        self._tell_host = follow
        self._send = send
        self._aside = aside
        self._followed: dict[str, _Follow] = {}
        self._grown: dict[str, bool] = {}
        self._unpublished: dict[str, None] = {}
        self._trouble = 0
        self._closing = False
        self.live = Loop("worker.live", self._push, every_s=FOLLOW_MS / 1000)
        self.publishing = Loop("worker.publish", self._publish, every_s=60.0, aside=self._stand_aside)

    def health(self) -> list[str]:
        """Why logs do not get where they belong."""
        return ["finished logs cannot be put into the artifact store"] if self._trouble >= 3 else []

    async def start(self) -> None:
        """Make the store's root, and take up what an earlier life of this worker had not published."""
        await self._store.run(self._store.prepare)
        await self.live.start()
        await self.publishing.start()

    async def stop(self) -> None:
        """Publish what is finished, then end; a store that is slow is waited for a while, but not to its end."""
        await self.live.stop()
        await self.publishing.stop(STOP_S)
        if not self._trouble:  # the next start takes up what is left
            with contextlib.suppress(OSError, UnsafeArtifactError, TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await self._publish()
        self._closing = True
        self._store.close()

    # -- reading

    async def read(self, question: LogRead) -> LogRange:
        """A range of a log that is here. Raises `not_found`: then it is in the store, or never was."""
        held = self._held(question.attempt_id)
        piece = await asyncio.to_thread(
            read_piece, self._directory, question.attempt_id, question.offset, question.length
        )
        if piece is None:
            if held is None:
                raise Ql3Error("not_found", "This worker does not hold the log.")
            piece = Piece(b"", 0, 0)
        return LogRange(
            offset=piece.start,
            data=piece.data,
            total=piece.total,
            ended=held is None or held.state == "ended",
            truncated=None if held is None else held.truncated,
        )

    # -- following

    async def follow(self, question: LogFollow) -> None:
        """Send live chunks for 30 s more, from here on. Raises `not_found`, `capacity`."""
        held = self._held(question.attempt_id)
        if held is None:
            raise Ql3Error("not_found", "This worker does not run the attempt.")
        if held.project != question.project or held.run_id != question.run_id:
            raise Ql3Error("not_found", "This worker does not run the attempt.")
        known = self._followed.get(held.attempt_id)
        until = monotonic_ms() + FOLLOW_MS
        if known is not None:
            known.until_ms = until
            return
        if len(self._followed) >= MAX_FOLLOWED:
            raise Ql3Error("capacity", "Too many logs are followed at once.")
        piece = await asyncio.to_thread(read_piece, self._directory, held.attempt_id, 0, 0)
        subject = subjects.live_log(held.project, held.run_id, held.attempt_id)
        self._followed[held.attempt_id] = _Follow(subject, until, piece.total if piece else 0)
        self.tell_host()
        if held.state == "ended":
            self.ended(held.attempt_id)

    def tell_host(self) -> None:
        """Say again whose growth counts, as after a new host."""
        if self._followed:
            self._tell_host(list(self._followed))

    def grown(self, attempt_ids: Iterable[str]) -> None:
        """These logs have more bytes."""
        for attempt_id in attempt_ids:
            if attempt_id in self._followed:
                self._grown.setdefault(attempt_id, False)
        if self._grown:
            self.live.ring()

    def ended(self, attempt_id: str) -> None:
        """No more bytes will come."""
        if attempt_id in self._followed:
            self._grown[attempt_id] = True
            self.live.ring()

    async def _push(self) -> bool | float | None:
        now = monotonic_ms()
        stale = [name for name, follow in self._followed.items() if follow.until_ms <= now]
        for name in stale:
            del self._followed[name]
        if stale:
            self._tell_host(list(self._followed))
        grown, self._grown = self._grown, {}
        for name, ended in grown.items():
            follow = self._followed.get(name)
            if follow is None:
                continue
            if await self._push_one(name, follow):
                self._grown[name] = ended or self._grown.get(name, False)  # more of it, after the others
            elif ended:
                await self._send(follow.subject, LogChunk(offset=follow.offset, ended=True))
                self._followed.pop(name, None)
        if self._grown:
            return True
        return 1.0 if self._followed else None

    async def _push_one(self, name: str, follow: _Follow) -> bool:
        """Send what is new, at most a megabyte; True when there is more."""
        for _ in range(CHUNKS_A_TURN):
            try:
                piece = await asyncio.to_thread(
                    read_piece, self._directory, name, follow.offset, limits.LIVE_CHUNK_BYTES
                )
            except Ql3Error:
                return False  # whoever follows asks for a range, and is told
            if piece is None or not piece.data:
                return False
            await self._send(follow.subject, LogChunk(offset=piece.start, data=piece.data))
            follow.offset = piece.start + len(piece.data)
            if follow.offset >= piece.total:
                return False
        return True

    # -- publishing

    def finished(self, attempt_id: str) -> None:
        """This log is whole and synced; it goes to the store under the attempt's id."""
        self._unpublished[attempt_id] = None
        self.publishing.ring()

    async def take_up(self, held: set[str]) -> None:
        """Publish again what lies here and belongs to no attempt that is held: it ended in an earlier life."""
        names = await asyncio.to_thread(os.listdir, self._directory)
        for name in names:
            stem = name.removesuffix(".log")
            if name.endswith(".log") and is_id(stem) and stem not in held:
                self._unpublished[stem] = None
        self.publishing.ring()

    async def sweep(self, held: set[str]) -> None:
        """Remove copies that the store has and nobody asked to drop for an hour."""
        await self._store.run(self._sweep, held, time.time())

    async def drop(self, attempt_ids: Iterable[str]) -> None:
        """The store has these; the copies here go."""
        await asyncio.to_thread(_unlink, self._directory, list(attempt_ids))

    async def _stand_aside(self) -> None:
        # Nobody waits for it: what is not in the store yet is read here.
        if self._unpublished:
            await asyncio.sleep(PUBLISH_PAUSE_S)
            await self._aside()

    async def _publish(self) -> bool:
        batch = list(self._unpublished)[:PUBLISH_BATCH]
        if not batch:
            return False
        try:
            outcomes = await self._store.run(self._store.each, self._publish_one, batch)
        except asyncio.CancelledError:
            self._trouble += 1  # it took too long: not to be begun anew by the stop
            raise
        failed: Exception | None = None
        for name, error in zip(batch, outcomes, strict=True):
            self._unpublished.pop(name, None)
            if error is not None:
                failed = failed or error
                self._unpublished[name] = None  # again, after the others
        if failed is not None:
            self._trouble += 1
            raise failed
        self._trouble = 0
        return bool(self._unpublished)

    def _publish_one(self, attempt_id: str) -> Exception | None:
        if self._closing:  # its batch goes on while nobody waits for it any more
            return ArtifactsAwayError()
        try:
            self._store.publish(self._worker, attempt_id, self._directory / f"{attempt_id}.log")
        except FileNotFoundError:
            return None  # it was dropped: the store has it
        except ArtifactsAwayError as error:
            return error
        except UnsafeArtifactError:
            # Its command has put something else in its place; no repeat makes a log of that.
            log.error("what lies in the place of a log is none; it is not published", attempt=attempt_id)
            return None
        except OSError as error:
            return error
        return None

    def _sweep(self, held: set[str], now_s: float) -> None:
        for name in os.listdir(self._directory):
            stem = name.removesuffix(".log")
            if not name.endswith(".log") or not is_id(stem) or stem in held:
                continue
            try:
                found = (self._directory / name).lstat()
                old = now_s - found.st_mtime > DROP_AFTER_S
                if old and self._store.size(self._worker, stem) == found.st_size:
                    os.unlink(self._directory / name)
            except ArtifactsAwayError:
                return
            except (FileNotFoundError, UnsafeArtifactError):
                continue


def _unlink(directory: Path, attempt_ids: list[str]) -> None:
    for attempt_id in attempt_ids:
        if is_id(attempt_id):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(directory / f"{attempt_id}.log")
