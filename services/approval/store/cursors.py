"""Keyset cursors: the sort keys of the last row, opaque to whoever hands them back."""

from __future__ import annotations

import base64
import binascii
from typing import TypeVar

import msgspec

from schemas.errors import Ql3Error
from schemas.strict import refuse_unkept

T = TypeVar("T")

LAST = 2**63 - 1
"""Sorts behind every time, for a first page in falling order."""


def encode(*keys: int | str) -> str:
    """The cursor of a row."""
    return base64.urlsafe_b64encode(msgspec.json.encode(keys)).rstrip(b"=").decode()


def decode_time_id(cursor: str | None) -> tuple[int, str]:
    """Time and id of a falling list; the values of a first page for None. Raises `invalid`."""
    return (LAST, "") if cursor is None else _decode(cursor, tuple[int, str])


def decode_texts(cursor: str | None) -> tuple[str, str]:
    """Two texts of a rising list. Raises `invalid`."""
    return ("", "") if cursor is None else _decode(cursor, tuple[str, str])


def decode_text(cursor: str | None) -> str:
    """One text of a rising list. Raises `invalid`."""
    return "" if cursor is None else _decode(cursor, tuple[str])[0]


def _decode(cursor: str, wanted: type[T]) -> T:
    try:
        found = msgspec.json.decode(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)), type=wanted)
        refuse_unkept(found)
        return found
    except (binascii.Error, ValueError, Ql3Error) as error:
        raise Ql3Error("invalid", "This is not a cursor of this list.", field="cursor") from error
