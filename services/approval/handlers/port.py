"""What a handler of an approved action offers.

`inspect` has no effect. `execute` runs behind the start barrier, once an execution, and hands the dispatch id to the
receiver as its idempotency key. `observe` looks for evidence when the outcome is in doubt. `close` makes sure that a
late effect is refused, before a recovery may end the action as failed or abandoned.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import msgspec

from schemas.endpoints import Endpoint
from schemas.identity import Actor
from services.approval.executions import Execution
from services.approval.gate import SERVICE
from services.approval.recovery import Finding
from services.approval.store.actions import Dispatch

Q = TypeVar("Q", bound=msgspec.Struct)
A = TypeVar("A", bound=msgspec.Struct)


class Ask(Protocol):
    """The bus, as far as handlers need it."""

    def __call__(self, endpoint: Endpoint[Q, A], message: Q, /) -> Awaitable[A]: ...


class Planned(NamedTuple):
    """A plan that was understood: its canonical fields, what a person is shown, and labels for the project's rules."""

    plan: dict[str, Any]
    preview: dict[str, Any]
    labels: Mapping[str, str] = MappingProxyType({})


class Inspection(NamedTuple):
    """What `inspect` found: the digest to compare with the approved one, or why it cannot be carried out."""

    digest: str | None
    verdict: Literal["ready", "retry", "blocked"] = "ready"
    code: str = ""


class Outcome(NamedTuple):
    """What came of an execution. A success names the resource that is its proof."""

    kind: Literal["succeeded", "failed", "indeterminate"]
    code: str
    resource_type: str = ""
    resource_id: str = ""


class Handler(Protocol):
    """One kind of action."""

    @property
    def action_type(self) -> str:
        """Its name, such as `run.release`."""
        ...

    @property
    def permission(self) -> str:
        """What the requester would need to do it alone."""
        ...

    @property
    def needs(self) -> str | None:
        """The service that must answer before an execution is claimed; None for ourselves."""
        ...

    async def understand(self, project: str, action_ref: str, plan: dict[str, Any]) -> Planned:
        """A plan as people send it, checked. Raises `invalid`; has no effect."""
        ...

    async def inspect(self, dispatch: Dispatch) -> Inspection:
        """Whether the action is still the approved one. Has no effect."""
        ...

    async def execute(self, dispatch: Dispatch) -> Outcome:
        """Do it, once. Raises `unavailable` when it is not known whether it was done."""
        ...

    async def observe(self, dispatch: Dispatch, execution: Execution) -> Finding:
        """Look for evidence of what came of it."""
        ...

    async def close(self, dispatch: Dispatch) -> Finding | None:
        """Refuse a late effect for ever; a finding when it had taken effect already. Raises `unavailable`."""
        ...


Now = Callable[[], int]


def service_actor(now_ms: int) -> Actor:
    """The actor under which approval asks other services to carry out what was approved."""
    return Actor(
        type=SERVICE.type,
        id=SERVICE.id,
        authentication_id="service",
        assurance="service",
        authenticated_at_ms=now_ms,
        expires_at_ms=now_ms + 60_000,
    )
