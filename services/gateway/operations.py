"""The table of operations: what the API can do, declared once, for the router and for the OpenAPI page.

An operation reads one struct (a GET from its query string, anything else from its JSON body) and answers another. The
routes are in `routes/`, one file per concern; `serve.py` runs them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta

from schemas.base import Value, View
from schemas.limits import LIST_DEFAULT, LIST_ITEMS
from schemas.paging import Page

if TYPE_CHECKING:
    from services.gateway.calls import Call

I = TypeVar("I", bound=msgspec.Struct)  # noqa: E741 - what an operation reads: its input
T = TypeVar("T")

PREFIX = "/api/v3"
BODY_BYTES = 64 * 1024
"""Of an ordinary request; an operation that needs more says so."""

Method = Literal["GET", "POST", "PUT", "DELETE"]
Kept = Literal["kept", "owner", "no"]
Produces = Literal["json", "bytes", "events"]


class Nothing(Value, frozen=True, kw_only=True):
    """An operation that reads nothing."""


class Paged(Value, frozen=True, kw_only=True):
    """How many items, and after which cursor (the `next` of the page before)."""

    limit: Annotated[int, Meta(ge=1, le=LIST_ITEMS)] = LIST_DEFAULT
    cursor: Annotated[str, Meta(max_length=512)] | None = None

    @property
    def page(self) -> Page:
        """The same, as the services take it."""
        return Page(limit=self.limit, cursor=self.cursor)


class Listing(View, Generic[T], frozen=True, kw_only=True):
    """A page of a list; `next` is the cursor of the following page, or null."""

    items: list[T]
    next: str | None = None


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A body with headers of its own."""

    body: Any
    headers: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation. `keep` says who makes a repeat with the same Idempotency-Key harmless: the record that the gateway
    keeps (`kept`), the owning service that gets the key (`owner`), or nobody, because the answer may not be stored
    (`no`)."""

    tag: str
    method: Method
    path: str
    name: str
    summary: str
    reads: type[msgspec.Struct]
    answers: Any
    run: Callable[[Call[Any]], Awaitable[Any]]
    status: int
    body_bytes: int
    keep: Kept
    public: bool
    produces: Produces


class Operations:
    """The operations of one concern."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.table: list[Operation] = []

    def get(
        self, path: str, reads: type[I], answers: Any, *, public: bool = False, produces: Produces = "json"
    ) -> Callable[[Callable[[Call[I]], Awaitable[Any]]], Callable[[Call[I]], Awaitable[Any]]]:
        """A read; `reads` comes from the query string."""
        return self._add("GET", path, reads, answers, public=public, produces=produces)

    def post(
        self,
        path: str,
        reads: type[I],
        answers: Any,
        *,
        status: int = 200,
        body_bytes: int = BODY_BYTES,
        keep: Kept = "kept",
        public: bool = False,
    ) -> Callable[[Callable[[Call[I]], Awaitable[Any]]], Callable[[Call[I]], Awaitable[Any]]]:
        """A change that may be repeated with the same Idempotency-Key."""
        return self._add("POST", path, reads, answers, status=status, body_bytes=body_bytes, keep=keep, public=public)

    def put(
        self, path: str, reads: type[I], answers: Any, *, body_bytes: int = BODY_BYTES, keep: Kept = "kept"
    ) -> Callable[[Callable[[Call[I]], Awaitable[Any]]], Callable[[Call[I]], Awaitable[Any]]]:
        """A change of what has a name."""
        return self._add("PUT", path, reads, answers, body_bytes=body_bytes, keep=keep)

    def delete(
        self, path: str, reads: type[I], answers: Any, *, keep: Kept = "kept"
    ) -> Callable[[Callable[[Call[I]], Awaitable[Any]]], Callable[[Call[I]], Awaitable[Any]]]:
        """A removal."""
        return self._add("DELETE", path, reads, answers, keep=keep)

    def _add(
        self,
        method: Method,
        path: str,
        reads: type[I],
        answers: Any,
        *,
        status: int = 200,
        body_bytes: int = BODY_BYTES,
        keep: Kept = "no",
        public: bool = False,
        produces: Produces = "json",
    ) -> Callable[[Callable[[Call[I]], Awaitable[Any]]], Callable[[Call[I]], Awaitable[Any]]]:
        def declare(run: Callable[[Call[I]], Awaitable[Any]]) -> Callable[[Call[I]], Awaitable[Any]]:
            self.table.append(
                Operation(
                    tag=self.tag,
                    method=method,
                    path=PREFIX + path,
                    name=run.__name__,
                    summary=(run.__doc__ or "").strip(),
                    reads=reads,
                    answers=answers,
                    run=run,
                    status=status,
                    body_bytes=body_bytes,
                    keep=keep,
                    public=public,
                    produces=produces,
                )
            )
            return run

        return declare
