"""What stands around a message: its headers, the trace it belongs to, and what a subscriber is handed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Final, NamedTuple, TypeVar

import msgspec

from schemas.base import decode, schema_of

MSG_ID: Final = "Nats-Msg-Id"
SCHEMA: Final = "Ql3-Schema"
TRACEPARENT: Final = "traceparent"

M = TypeVar("M", bound=msgspec.Struct)

_traceparent = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\Z")
_trace: ContextVar[str | None] = ContextVar("ql3_traceparent", default=None)


def current_traceparent() -> str | None:
    """The W3C trace context under which this task works, or None."""
    return _trace.get()


def set_traceparent(value: str | None) -> None:
    """Work under this trace from now on in this task; what is not a well-formed traceparent counts as none."""
    _trace.set(value if value is not None and _traceparent.match(value) else None)


def headers_for(message: msgspec.Struct, msg_id: str | None = None) -> dict[str, str]:
    """The headers of an outgoing message, with the trace of this task."""
    headers = {SCHEMA: schema_of(type(message))}
    if msg_id is not None:
        headers[MSG_ID] = msg_id
    trace = _trace.get()
    if trace is not None:
        headers[TRACEPARENT] = trace
    return headers


class Place(NamedTuple):
    """Where a JetStream message stands, read from its ack subject. `stored_ns` is when the stream took it."""

    stream: str
    consumer: str
    delivered: int
    sequence: int
    stored_ns: int


def place_of(reply: str | None) -> Place | None:
    """The place of a delivered JetStream message, or None for what is none."""
    tokens = (reply or "").split(".")
    if tokens[:2] != ["$JS", "ACK"]:
        return None
    # $JS.ACK.<stream>.<consumer>.<delivered>.<sequence>.<consumer sequence>.<stored>.<pending>; the longer form has
    # domain and account hash before the stream and may have a token behind.
    rest = tokens[2:] if len(tokens) == 9 else tokens[4:]
    if len(rest) < 7 or not (rest[2].isdigit() and rest[3].isdigit() and rest[5].isdigit()):
        return None
    return Place(rest[0], rest[1], int(rest[2]), int(rest[3]), int(rest[5]))


class Delivery(msgspec.Struct, frozen=True):
    """A message as a core subscriber gets it."""

    subject: str
    payload: bytes
    headers: Mapping[str, str]

    def decode(self, message_type: type[M]) -> M:
        """The typed message. Raises `message_invalid`."""
        return decode(self.payload, message_type)
