"""SHA-256 and HMAC without `hashlib`, which would map OpenSSL into a process that is meant to be small."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Protocol


class Sha256(Protocol):
    """The part of a hash object that is used here."""

    def update(self, data: bytes | bytearray | memoryview, /) -> None: ...
    def digest(self) -> bytes: ...
    def hexdigest(self) -> str: ...


def _load() -> Callable[..., Sha256]:
    for name in ("_sha2", "_sha256", "hashlib"):  # the first is Python 3.12 and later, the last has OpenSSL behind it
        try:
            return import_module(name).sha256
        except ImportError:
            continue
    raise ImportError("this Python has no SHA-256")


sha256 = _load()
_inner = bytes(byte ^ 0x36 for byte in range(256))
_outer = bytes(byte ^ 0x5C for byte in range(256))


def sha256_hex(data: bytes) -> str:
    """Lower-case hex SHA-256."""
    return sha256(data).hexdigest()


def hmac_sha256_hex(key: bytes, data: bytes) -> str:
    """Lower-case hex HMAC-SHA256 (RFC 2104)."""
    key = (sha256(key).digest() if len(key) > 64 else key).ljust(64, b"\0")
    inner = sha256(key.translate(_inner) + data).digest()
    return sha256(key.translate(_outer) + inner).hexdigest()
