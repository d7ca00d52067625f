"""Artifacts in an object store: S3 or what speaks like it, Google Cloud Storage, Azure.

    <prefix>/<worker id>/<artifact id>/<number of the segment, 8 digits>

A log is cut into segments of 8 MiB, each an object of its own. So memory is bounded whatever a log's size, an upload
that broke off goes on with the segments that are missing, nothing of an unfinished one stays hidden in the store (as
parts of a multipart upload would, at a price), and a range is read from the segments that hold it. Putting a segment
again puts the same bytes again. Whether an artifact is whole, its size tells.

Credentials come as the provider's own variables (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, …) or from the machine's
identity.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Final, NamedTuple, TypeVar
from urllib.parse import urlsplit

import structlog
from obstore.exceptions import BaseError
from obstore.store import from_url

from schemas.errors import Ql3Error
from schemas.ids import is_id, is_slug
from services.kit.artifact_store import ArtifactsAwayError, Retired, StoredRange, UnsafeArtifactError
from services.kit.store_threads import StoreThreads

SEGMENT_BYTES: Final = 8 * 1024 * 1024
PARALLEL: Final = 8
"""Requests at once; with the segment's size this bounds the memory of an upload to 64 MiB."""
SCHEMES: Final = ("s3", "gs", "az")

_STATUS: Final = re.compile(r"status code: (\d{3})")

T = TypeVar("T")
R = TypeVar("R")

log: structlog.stdlib.BoundLogger = structlog.get_logger("ql3.kit")


class Segment(NamedTuple):
    """One object of an artifact; `size` in bytes."""

    key: str
    size: int


class ObjectArtifacts(StoreThreads):
    """A bucket and a prefix in it, as `s3://bucket/prefix`. Raises `setup_invalid` for what is no such address."""

    def __init__(self, url: str, *, segment_bytes: int = SEGMENT_BYTES, parallel: int = PARALLEL) -> None:
        if urlsplit(url).scheme not in SCHEMES:
            raise Ql3Error("setup_invalid", "Write s3://bucket/prefix, gs:// or az://.", field="QL3_ARTIFACTS_URL")
        try:
            self._store = from_url(
                url,
                client_options={
                    "connect_timeout": timedelta(seconds=5),
                    "timeout": timedelta(seconds=30),
                    "allow_http": True,  # only where the endpoint was written so
                },
                # Whoever calls repeats what failed, with pauses of its own.
                retry_config={"max_retries": 1, "retry_timeout": timedelta(seconds=10)},
            )
        except (BaseError, ValueError):
            # The library's own words may hold a part of a key.
            raise Ql3Error("setup_invalid", "The address cannot be used.", field="QL3_ARTIFACTS_URL") from None
        super().__init__()
        self._segment_bytes = segment_bytes
        self._pool = ThreadPoolExecutor(parallel, thread_name_prefix="artifacts")

    def prepare(self) -> None:
        """Nothing: the bucket is the operator's, and a store that is away for a while keeps nobody from starting."""

    def publish(self, worker: str, artifact_id: str, source: Path) -> None:
        """Put what is missing of a file, segment by segment."""
        prefix = _prefix(worker, artifact_id)
        try:
            descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise UnsafeArtifactError from error
            raise
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise UnsafeArtifactError
            # What is one segment is put without a question: asking costs as much.
            single = found.st_size <= self._segment_bytes
            there = {} if single else {segment.key: segment.size for segment in self._segments(prefix)}
            for number, at in enumerate(range(0, found.st_size, self._segment_bytes)):
                key = f"{prefix}/{number:08d}"
                length = min(self._segment_bytes, found.st_size - at)
                if there.get(key) == length:
                    continue
                data = _read_exactly(descriptor, at, length)
                self._put(key, data)
        finally:
            os.close(descriptor)

    def read(self, worker: str, artifact_id: str, offset: int, length: int) -> StoredRange | None:
        """The range from the one or two segments that hold it."""
        segments = self._segments(_prefix(worker, artifact_id))
        if not segments:
            return None
        total = sum(segment.size for segment in segments)
        start = min(offset, total)
        end = min(start + length, total)
        parts: list[bytes] = []
        at = 0
        for segment in segments:
            first, last = max(start, at), min(end, at + segment.size)
            if first < last:
                try:
                    with self._asking():
                        part = self._store.get_range(segment.key, start=first - at, end=last - at)
                except FileNotFoundError:
                    return None  # removed meanwhile
                parts.append(bytes(part))
            at += segment.size
        return StoredRange(b"".join(parts), start, total)

    def size(self, worker: str, artifact_id: str) -> int | None:
        """Bytes of all segments that are there."""
        segments = self._segments(_prefix(worker, artifact_id))
        return sum(segment.size for segment in segments) if segments else None

    def retire(self, worker: str, artifact_id: str) -> Retired:
        """Delete all segments that are there."""
        segments = self._segments(_prefix(worker, artifact_id))
        if not segments:
            return Retired("already_absent", 0)
        with self._asking():
            self._store.delete([segment.key for segment in segments])
        return Retired("deleted", sum(segment.size for segment in segments))

    def free_bytes(self) -> int | None:
        """A bucket has no end."""
        return None

    def each(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Several at once: each waits for the network."""
        self.refuse_closed()
        return list(self._pool.map(work, items))

    def close(self) -> None:
        """No request is begun any more; those on their way end with their own timeouts."""
        super().close()
        self._pool.shutdown(wait=False)

    @contextlib.contextmanager
    def _asking(self) -> Generator[None]:
        """What the store does not do makes it away; FileNotFoundError is let through to whoever knows what it means."""
        self.refuse_closed()
        try:
            yield
        except FileNotFoundError:
            raise
        except (BaseError, OSError, ValueError) as error:
            # The library's words hold addresses, key ids and whole answers; kind and status are enough to go by.
            status = _STATUS.search(str(error))
            log.warning(
                "the artifact store refused or did not answer",
                cause=type(error).__name__,
                status=status[1] if status else None,
            )
            raise ArtifactsAwayError from None

    def _put(self, key: str, data: bytes) -> None:
        try:
            with self._asking():
                self._store.put(key, data, use_multipart=False)
        except FileNotFoundError:  # the bucket: not to be taken for a source that is not there
            raise ArtifactsAwayError from None

    def _segments(self, prefix: str) -> list[Segment]:
        try:
            with self._asking():
                found = [
                    Segment(item["path"], item["size"])
                    for page in self._store.list(prefix, chunk_size=1000)  # pyright: ignore[reportUnknownMemberType]
                    for item in page
                ]
        except FileNotFoundError:  # the bucket; a name without objects is an empty list
            raise ArtifactsAwayError from None
        return sorted(found)


def _prefix(worker: str, artifact_id: str) -> str:
    if not is_slug(worker) or not is_id(artifact_id):
        raise ValueError("an artifact is named by a worker's slug and a lower-case UUIDv7")
    return f"{worker}/{artifact_id}"


def _read_exactly(descriptor: int, at: int, length: int) -> bytes:
    data = os.pread(descriptor, length, at)
    while len(data) < length:
        more = os.pread(descriptor, length - len(data), at + len(data))
        if not more:  # it shrank: this is not the finished file that was promised
            raise UnsafeArtifactError
        data += more
    return data
