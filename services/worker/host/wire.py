"""Frames between worker and host: four bytes of big-endian length, then that many bytes of UTF-8 JSON.

Worker to host (`op`): `hello`, `spawn {items}`, `kill {items}`, `ack {attempts}`, `quarantine {attempts}`,
`follow {attempts}`, `sweep {items}`, `retire`. Host to worker: `hello {host, attempts}` and `events` with any of
`started`, `refused`, `exits`, `grown`, `gone`. Nothing waits for an answer: what the host has to say it says again
after a reconnect until it is acknowledged.
"""

from __future__ import annotations

import json
import os
import struct
from typing import Any, Final

PROTOCOL: Final = 1
MAX_FRAME: Final = 8 * 1024 * 1024
SOCKET_NAME: Final = "host.sock"

_header = struct.Struct(">I")
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False, ensure_ascii=False).encode


class FrameError(ValueError):
    """The other side sent what is not a frame."""


def encode(message: dict[str, Any]) -> bytes:
    """One frame. Raises FrameError if it is larger than `MAX_FRAME`."""
    body = _encode(message).encode()
    if len(body) > MAX_FRAME:
        raise FrameError(f"frame of {len(body)} bytes")
    return _header.pack(len(body)) + body


class FrameReader:
    """Turns a byte stream into messages; holds at most one partial frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> list[dict[str, Any]]:
        """The complete messages in what came so far. Raises FrameError on an oversized or malformed frame."""
        buffer = self._buffer
        buffer += chunk
        messages: list[dict[str, Any]] = []
        at = 0
        while len(buffer) - at >= 4:
            (size,) = _header.unpack_from(buffer, at)
            if size > MAX_FRAME:
                raise FrameError(f"frame of {size} bytes")
            if len(buffer) - at - 4 < size:
                break
            try:
                message = json.loads(buffer[at + 4 : at + 4 + size])
            except ValueError as error:
                raise FrameError("frame is not JSON") from error
            if not isinstance(message, dict):
                raise FrameError("frame is not an object")
            messages.append(message)  # pyright: ignore[reportUnknownArgumentType]
            at += 4 + size
        del buffer[:at]
        return messages


def socket_address(directory_fd: int) -> str:
    """An address of the socket in an open directory that keeps within the kernel's 108 bytes however deep it lies."""
    return f"/proc/self/fd/{directory_fd}/{SOCKET_NAME}"


def open_directory(path: str) -> int:
    """Open a directory of ours to be used as `dir_fd`; a symbolic link in its place is refused."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
