"""Threads that belong to one artifact store: while it does not answer, its callers wait there, and nobody else does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar, TypeVarTuple

from services.kit.artifact_store import ArtifactsAwayError

CALLERS: Final = 4
"""Calls at once; more wait for their turn."""

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class StoreThreads:
    """A store's threads until it is closed."""

    def __init__(self) -> None:
        self._callers = ThreadPoolExecutor(CALLERS, thread_name_prefix="artifact-store")
        self._closed = False

    async def run(self, function: Callable[[*Ts], R], *args: *Ts) -> R:
        """What `function` returns or raises, run on one of these threads. Whoever is cancelled leaves it to its end."""
        self.refuse_closed()
        return await asyncio.get_running_loop().run_in_executor(self._callers, self._call, function, *args)

    def close(self) -> None:
        """Wait for nothing: what runs ends with its present request, what has not begun raises ArtifactsAwayError."""
        self._closed = True
        self._callers.shutdown(wait=False)

    def refuse_closed(self) -> None:
        """Raises ArtifactsAwayError once the store is closed."""
        if self._closed:
            raise ArtifactsAwayError

    def _call(self, function: Callable[[*Ts], R], *args: *Ts) -> R:
        self.refuse_closed()
        return function(*args)
