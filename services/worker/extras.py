"""What one attempt needs besides its revision: secret values, files, an environment of packages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from schemas.errors import Ql3Error
from services.worker.attempt import Held
from services.worker.command import INPUTS_FILE, Extras, Prepared, inputs_of
from services.worker.files import Files
from services.worker.runtimes import Runtimes

OpenSecrets = Callable[[Held, int], Awaitable[dict[str, str]]]


class Supplies:
    """Gets it before the start and puts it away after the end."""

    def __init__(self, *, files: Files, runtimes: Runtimes, secrets: OpenSecrets) -> None:
        self._files = files
        self._runtimes = runtimes
        self._secrets = secrets
        self._delivered: set[str] = set()

    async def get(self, held: Held, prepared: Prepared, command: list[str], not_after_ns: int) -> Extras:
        """Everything for one attempt. Raises Ql3Error or Refused, and leaves nothing behind then."""
        extras = Extras()
        if prepared.secrets:
            values = await self._secrets(held, not_after_ns)
            if not set(prepared.secrets) <= values.keys():
                raise Ql3Error("context_unavailable")
            extras.secrets = {name: values[name] for name in prepared.secrets}
        files = dict(prepared.files)
        inputs = None if held.offer is None or prepared.container is not None else inputs_of(held.offer)
        if inputs is not None:
            files[INPUTS_FILE] = inputs
        if files or prepared.secret_files:
            secret = {name: extras.secrets[name] for name in prepared.secret_files}
            self._delivered.add(held.attempt_id)
            extras.paths = await asyncio.to_thread(self._files.deliver, held.attempt_id, files, secret, prepared.owner)
        if prepared.runtime is not None:
            ready = await asyncio.to_thread(self._runtimes.ready, prepared.runtime, command)
            extras.argv, extras.environment = ready.argv, ready.environment
        return extras

    def put_away(self, held: Held) -> None:
        """Nothing of the attempt runs any more."""
        if held.attempt_id in self._delivered:
            self._delivered.discard(held.attempt_id)
            self._files.drop(held.attempt_id)

    async def sweep(self, held: set[str]) -> None:
        """Remove what a crash has left, and environments that nobody needs."""
        await asyncio.to_thread(self._files.sweep, held)
        await asyncio.to_thread(self._runtimes.sweep)
