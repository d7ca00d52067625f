"""Canonical JSON and domain-separated digests.

Canonical form: keys sorted at every level, separators `,` and `:`, UTF-8 not escaped to ASCII, integers within
±(2^53-1), no floats, no duplicate keys. Absent optional fields are left out, never null.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

MAX_SAFE_INTEGER = 2**53 - 1

_encoder = msgspec.json.Encoder(order="sorted")


def canonical(value: Any) -> bytes:
    """The canonical JSON of a struct or plain data. Raises ValueError on a float, lone surrogate or wide integer."""
    plain = msgspec.to_builtins(value, str_keys=True)
    _check(plain)
    try:
        return _encoder.encode(plain)
    except UnicodeEncodeError as error:
        raise ValueError("text with a lone surrogate has no canonical form") from error


def digest(domain: str, value: Any) -> str:
    """Lower-case hex SHA-256 of `domain NUL canonical(value)`; `domain` is such as `ql3.run-request.v1`."""
    return digest_bytes(domain, canonical(value))


def digest_bytes(domain: str, content: bytes) -> str:
    """Lower-case hex SHA-256 of `domain NUL content`."""
    return hashlib.sha256(domain.encode() + b"\0" + content).hexdigest()


def is_canonical(text: bytes) -> bool:
    """Whether text is its own canonical form; duplicate or unordered keys and white space are not."""
    try:
        return canonical(msgspec.json.decode(text)) == text
    except (msgspec.DecodeError, ValueError):
        return False


def _check(value: Any) -> None:
    if isinstance(value, float):
        raise ValueError("a float has no canonical form")
    if isinstance(value, bool):
        return
    if isinstance(value, int) and abs(value) > MAX_SAFE_INTEGER:
        raise ValueError("an integer beyond 2^53-1 has no canonical form")
    if isinstance(value, dict):
        for item in value.values():  # pyright: ignore[reportUnknownVariableType]
            _check(item)
    elif isinstance(value, list):
        for item in value:  # pyright: ignore[reportUnknownVariableType]
            _check(item)
