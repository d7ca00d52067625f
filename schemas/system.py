"""What every service answers alike: feeds, audit, orders' answers, dead letters."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Raw

from schemas import limits
from schemas.base import Message, Value, View
from schemas.identity import Actor, Subject
from schemas.ids import Id, ProjectId
from schemas.paging import Page


class OrdersAck(Message, frozen=True, kw_only=True, tag="orders.ack/1"):
    """On `ql3.ack.<sender>`: the receiver has committed these orders."""

    ids: Annotated[list[str], Meta(max_length=4096)]


class FeedRead(Message, frozen=True, kw_only=True, tag="feed.read/1"):
    """Facts of a service after an opaque position (null: from the oldest that is kept, 24 h)."""

    after: str | None = None
    subjects: list[str] = []
    """Prefixes of subjects that are wanted; empty means all."""
    limit: Annotated[int, Meta(ge=1, le=limits.BATCH_ITEMS)] = limits.BATCH_ITEMS


class FeedItem(Value, frozen=True, kw_only=True):
    """One fact as it was published."""

    subject: str
    schema: str
    payload: Raw


class FeedPage(Message, frozen=True, kw_only=True, tag="feed.page/1"):
    """Facts in order; `position` goes into the next read; `more` says that it should follow at once.

    `gap`: facts after the asked position are kept no longer; whoever builds rows from them reads its source anew.
    """

    items: list[FeedItem]
    position: str | None
    more: bool
    gap: bool = False


class AuditEvent(View, frozen=True, kw_only=True):
    """One act, as recorded in the transaction that did it. `position` is null until it is sealed into the chain."""

    id: str
    service: str
    position: int | None
    at_ms: int
    project: str | None
    actor: Subject | None
    authentication_id: str | None
    action: str
    target: str | None
    outcome: str
    detail: dict[str, Any]


class AuditRead(Message, frozen=True, kw_only=True, tag="audit.read/1"):
    """Audit rows of a service, newest first."""

    actor: Actor
    project: ProjectId | None = None
    page: Page = Page()


class AuditPage(Message, frozen=True, kw_only=True, tag="audit.page/1"):
    """A page of audit rows."""

    items: list[AuditEvent]
    next: str | None


class AuditVerify(Message, frozen=True, kw_only=True, tag="audit.verify/1"):
    """Walk the hash chain of a service."""

    actor: Actor


class AuditVerdict(Message, frozen=True, kw_only=True, tag="audit.verdict/1"):
    """What the walk found; `problems` names the first positions that do not hold."""

    service: str
    sealed: int
    unsealed: int
    intact: bool
    problems: list[str]


class HealthRead(Message, frozen=True, kw_only=True, tag="health.read/1"):
    """Ask a service for its readiness."""


class HealthAnswer(Message, frozen=True, kw_only=True, tag="health.answer/1"):
    """Reasons why it is not ready; empty when it is."""

    service: str
    version: str
    reasons: list[str]


class ErrorAnswer(Message, frozen=True, kw_only=True, tag="error/1"):
    """A refusal instead of an answer: a code of `schemas.errors.REGISTRY` and bounded facts."""

    code: str
    detail: str | None = None
    field: str | None = None
    data: dict[str, Any] = {}


class Done(Message, frozen=True, kw_only=True, tag="done/1"):
    """Done, nothing more to say."""

    id: Id | None = None
