"""Secrets that a task names and nobody has set yet: a warning, because they may be set before the first run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import structlog

from schemas import limits
from schemas.errors import Ql3Error
from schemas.identity import Actor
from schemas.paging import Page
from schemas.secrets import SecretList, SecretPage
from schemas.tasks import SecretRef, TaskSpec

PAGES: Final = 32

log: structlog.stdlib.BoundLogger = structlog.get_logger("ql3.scheduler")


class SecretsNamed:
    """Asks the vault, as whoever saves the task, which may use secrets; a vault that is away warns of nothing."""

    def __init__(self, ask: Callable[[SecretList], Awaitable[SecretPage]]) -> None:
        self._ask = ask

    async def warnings(self, actor: Actor, project: str, specs: Sequence[TaskSpec]) -> list[list[str]]:
        """One list a specification, in their order."""
        names = {ref.secret for spec in specs for _, ref in named(spec)}
        if not names:
            return [[] for _ in specs]
        try:
            versions = await self._versions(actor, project, max(names))
        except Ql3Error as error:
            log.warning("it is not known which secrets exist", error=error.code)
            return [[] for _ in specs]
        return [missing(spec, versions) for spec in specs]

    async def _versions(self, actor: Actor, project: str, last: str) -> dict[str, int]:
        versions: dict[str, int] = {}
        cursor: str | None = None
        for _ in range(PAGES):
            page = await self._ask(
                SecretList(actor=actor, project=project, page=Page(limit=limits.LIST_ITEMS, cursor=cursor))
            )
            versions |= {secret.name: secret.version for secret in page.items}
            cursor = page.next
            if cursor is None or cursor >= last:
                return versions
        raise Ql3Error("capacity", "The project has more secrets than are looked through.")


def named(spec: TaskSpec) -> list[tuple[str, SecretRef]]:
    """The variables of a task that a secret fills."""
    return [(one.name, one.secret) for one in spec.execution.environment if one.secret is not None]


def missing(spec: TaskSpec, versions: dict[str, int]) -> list[str]:
    """What to say about secrets that do not exist; `versions` holds the current version of those that do."""
    found: list[str] = []
    for variable, ref in named(spec):
        known = versions.get(ref.secret, 0)
        if known < (ref.version or 1):
            which = ref.secret if ref.version is None else f"{ref.secret} (version {ref.version})"
            found.append(f"{variable}: the secret {which} does not exist; runs fail until it is set.")
    return found
