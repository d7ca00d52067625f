"""The port of the artifact store: where the worker puts finished logs, and retention reads and removes them.

One local directory when worker and retention see the same disk (`artifact_store`), an object store when they do not
(`object_store`). An artifact is named by its worker and its id; whoever runs a worker can be given rights to its own
name alone. All methods but `run` and `close` block and may be called from several threads; `run` has threads for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar, TypeVarTuple

from services.kit import artifact_store
from services.kit.artifact_store import Retired, StoredRange
from services.kit.config import Config
from services.kit.store_threads import StoreThreads

T = TypeVar("T")
R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class Artifacts(Protocol):
    """Every method raises ArtifactsAwayError while the store cannot be used, which says nothing about any file, and
    UnsafeArtifactError when what is there is not what it has to be."""

    def prepare(self) -> None:
        """Make what has to be there before the first artifact."""
        ...

    def publish(self, worker: str, artifact_id: str, source: Path) -> None:
        """Put a finished, synced file into the store; idempotent. Raises FileNotFoundError when it is not there."""
        ...

    def read(self, worker: str, artifact_id: str, offset: int, length: int) -> StoredRange | None:
        """At most `length` bytes at `offset`; None when there is nothing."""
        ...

    def size(self, worker: str, artifact_id: str) -> int | None:
        """Bytes that are stored of an artifact, fewer than it has while it is on its way; None when there are none."""
        ...

    def retire(self, worker: str, artifact_id: str) -> Retired:
        """Delete an artifact, durably; what is left of an unfinished one too."""
        ...

    def free_bytes(self) -> int | None:
        """Room that is left, or None where that is nobody's concern. Raises OSError."""
        ...

    def each(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """`work` for each item, in order; at once as far as that helps with this store."""
        ...

    async def run(self, function: Callable[[*Ts], R], *args: *Ts) -> R:
        """Run what calls the methods above on a thread of the store's own: a slow store delays nobody else."""
        ...

    def close(self) -> None:
        """End without waiting: what has not begun raises ArtifactsAwayError."""
        ...


class LocalArtifacts(StoreThreads):
    """A directory; see `artifact_store`. The worker's name is no part of a path: ids are unique."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    def prepare(self) -> None:
        """Make the root and check it."""
        artifact_store.prepare_root(self._root)

    def publish(self, worker: str, artifact_id: str, source: Path) -> None:
        """A second hard link, or a copy."""
        artifact_store.publish(source, self._root, artifact_id)

    def read(self, worker: str, artifact_id: str, offset: int, length: int) -> StoredRange | None:
        """A range of the file."""
        return artifact_store.read_range(self._root, artifact_id, offset, length)

    def size(self, worker: str, artifact_id: str) -> int | None:
        """The file's size."""
        return artifact_store.stored_size(self._root, artifact_id)

    def retire(self, worker: str, artifact_id: str) -> Retired:
        """Unlink the file and sync its directory."""
        return artifact_store.retire(self._root, artifact_id)

    def free_bytes(self) -> int | None:
        """Free bytes of the root's file system."""
        return artifact_store.free_bytes(self._root)

    def each(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """One after the other: a link is quicker than another thread."""
        return [work(item) for item in items]


def open_artifacts(config: Config) -> Artifacts:
    """The store of the configuration; nothing is asked of it yet. Raises `setup_invalid`."""
    if not config.artifacts_url:
        return LocalArtifacts(config.artifact_directory)
    # Only where it is asked for: the library weighs 15 MiB.
    from services.kit.object_store import ObjectArtifacts

    return ObjectArtifacts(config.artifacts_url)
