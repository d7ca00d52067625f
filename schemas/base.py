"""The base of every message: a tagged, frozen struct, and the one way to write and read it.

A message is UTF-8 JSON whose first field `schema` names its type and version (`runs.submit/1`), so that an operator can
read it and a reader can tell what it holds. Readers ignore fields that they do not know: a new writer beside an old
reader must work. What people send is refused on unknown fields instead (see `schemas.strict`).
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from schemas.errors import Ql3Error

TAG_FIELD = "schema"


class Message(msgspec.Struct, frozen=True, tag_field=TAG_FIELD, kw_only=True):
    """Base of whatever travels over the bus. A subclass sets `tag="aggregate.verb/version"`."""


class Value(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of the parts of which messages are made; not tagged, defaults left out."""


class View(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what people read: every field stands in the JSON, absent ones as null."""


M = TypeVar("M")

_encoder = msgspec.json.Encoder()
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def schema_of(message_type: type[msgspec.Struct]) -> str:
    """The `name/version` of a message type, as in its tag and in the `Ql3-Schema` header."""
    tag = message_type.__struct_config__.tag
    if not isinstance(tag, str):
        raise TypeError(f"{message_type.__name__} is not a tagged message")
    return tag


def encode(message: msgspec.Struct) -> bytes:
    """A message as UTF-8 JSON."""
    return _encoder.encode(message)


def decode(payload: bytes | bytearray | memoryview, message_type: type[M]) -> M:
    """A message from its bytes. Raises `Ql3Error("message_invalid")` naming the field, never echoing its value."""
    decoder = _decoders.get(message_type)
    if decoder is None:
        decoder = _decoders[message_type] = msgspec.json.Decoder(message_type)
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Ql3Error("message_invalid", field=_field_of(error)) from error


def _field_of(error: Exception) -> str | None:
    # msgspec ends its text with "- at `$.field`"; what comes before may echo the value.
    _, found, path = str(error).rpartition("at `$")
    return path.rstrip("`").lstrip(".") or None if found else None
