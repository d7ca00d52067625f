"""One call of an operation: who asks, for what, and the ways to the services."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
from litestar import Request

from schemas.endpoints import Endpoint
from schemas.errors import Ql3Error
from schemas.identity import Actor, Subject, SubjectType
from schemas.ids import is_id, is_slug
from services.gateway.operations import Listing
from services.kit.ids import new_id

if TYPE_CHECKING:
    from services.gateway.authenticate import Principal
    from services.gateway.desk import Desk
    from services.gateway.peers import Peer

I = TypeVar("I", bound=msgspec.Struct)  # noqa: E741 - the operation's input
Q = TypeVar("Q", bound=msgspec.Struct)
A = TypeVar("A", bound=msgspec.Struct)

SUBJECT_TYPES: tuple[SubjectType, ...] = ("user", "api_app", "mcp_client", "agent")


@dataclass(slots=True)
class Call(Generic[I]):
    """`mutation_id` is the same for every repeat of a request with the same Idempotency-Key."""

    desk: Desk
    request: Request[Any, Any, Any]
    input: I
    principal: Principal | None
    peer: Peer
    idempotency_key: str | None = None
    mutation_id: str = field(default_factory=new_id)

    @property
    def actor(self) -> Actor:
        """Who asks, as it travels with the question."""
        if self.principal is None:
            raise Ql3Error("unauthenticated")
        return self.principal.actor

    @property
    def project(self) -> str:
        """The project of the path."""
        return self.slug("project")

    def slug(self, name: str) -> str:
        """A slug of the path; anything else names nothing that exists."""
        text: str = self.request.path_params[name]
        if not is_slug(text):
            raise Ql3Error("not_found", field=name)
        return text

    def id(self, name: str) -> str:
        """An id of the path; anything else names nothing that exists."""
        text: str = self.request.path_params[name]
        if not is_id(text):
            raise Ql3Error("not_found", f"There is no such {name}.", field=name)
        return text

    def name_or_id(self, name: str) -> str:
        """A slug or an id of the path."""
        text: str = self.request.path_params[name]
        if not (is_slug(text) or is_id(text)):
            raise Ql3Error("not_found", field=name)
        return text

    @property
    def request_headers(self) -> dict[str, str]:
        """The request's headers, names in lower case."""
        return {name.decode("latin-1"): value.decode("latin-1") for name, value in self.request.scope["headers"]}

    @property
    def subject(self) -> Subject:
        """The subject that the path names by `type` and `id`."""
        kind, name = self.request.path_params["type"], self.request.path_params["id"]
        for known in SUBJECT_TYPES:
            if kind == known:
                return Subject(type=known, id=name)
        raise Ql3Error("not_found", "A subject is a user, api_app, mcp_client or agent.", field="type")

    async def renew(self) -> None:
        """Authenticates the same request again, for an answer that stays open. Raises `unauthenticated`."""
        self.principal = await self.desk.authenticator.authenticate("GET", self.request_headers, self.peer)

    async def ask(self, endpoint: Endpoint[Q, A], question: Q, *, timeout: float = 5.0) -> A:
        """Asks the owning service and waits `timeout` seconds for it; its refusal is this call's answer."""
        return await self.desk.bus.request(endpoint, question, timeout=timeout)


def listing(page: Any) -> Listing[Any]:
    """A service's page as a list of the API."""
    return Listing(items=page.items, next=page.next)
