"""The host's side of the socket: one worker at a time, of the same user; a newer one takes the older one's place."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from services.worker.host.wire import PROTOCOL, FrameError, FrameReader, encode

if TYPE_CHECKING:
    from services.worker.host.loop import Host

READ_BYTES: Final = 256 * 1024
KINDS: Final = ("started", "refused", "exits", "grown", "gone")
BATCH: Final = 256


class Link:
    """Reads requests, gathers what there is to tell, and sends it in one frame a turn."""

    def __init__(self, host: Host, listen_fd: int) -> None:
        self._host = host
        self._listener = socket.socket(fileno=listen_fd)
        self._listener.setblocking(False)
        self._peer: socket.socket | None = None
        self._reader = FrameReader()
        self._out = bytearray()
        self._news: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
        self._greeted = False
        self._blocked = False
        """Whether the worker is behind with reading."""
        host.epoll.register(listen_fd, select.EPOLLIN)

    @property
    def connected(self) -> bool:
        """Whether a worker is there."""
        return self._peer is not None

    def tell(self, kind: str, item: dict[str, Any]) -> None:
        """Have this told at the end of the turn; without a worker it is told when one comes (`Host.tell_again`)."""
        if self._greeted:
            self._news[kind].append(item)

    def ready(self, fd: int, mask: int) -> None:
        """Something is to be read, written or accepted."""
        if fd == self._listener.fileno():
            self._accept()
            return
        peer = self._peer
        if peer is None or peer.fileno() != fd:
            return
        try:
            if mask & select.EPOLLOUT:
                self._send(peer)
            if mask & ~select.EPOLLOUT:
                self._receive(peer)
        except (OSError, FrameError, KeyError, TypeError, ValueError) as error:
            if not isinstance(error, OSError):
                print(f"link: {type(error).__name__}, connection closed", file=sys.stderr, flush=True)
            self._drop()

    def flush(self) -> None:
        """Send the turn's news."""
        if self._peer is None:
            return
        while any(self._news.values()):
            frame: dict[str, Any] = {"op": "events"}
            for kind, items in self._news.items():
                if items:
                    frame[kind] = items[:BATCH]
                    del items[:BATCH]
            self._out += encode(frame)
        if self._out:
            try:
                self._send(self._peer)
            except OSError:
                self._drop()

    def close(self) -> None:
        """Stop listening and hang up."""
        self._drop()
        self._listener.close()

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError:
            return
        _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.geteuid():
            peer.close()
            return
        self._drop()
        peer.setblocking(False)
        self._peer = peer
        self._host.epoll.register(peer.fileno(), select.EPOLLIN)

    def _drop(self) -> None:
        if self._peer is not None:
            self._host.epoll.unregister(self._peer.fileno())
            self._peer.close()
            self._peer = None
        self._greeted = self._blocked = False
        self._reader = FrameReader()
        self._out.clear()
        for items in self._news.values():
            items.clear()
        self._host.follow([])
        self._host.lonely_since = time.monotonic()

    def _receive(self, peer: socket.socket) -> None:
        try:
            chunk = peer.recv(READ_BYTES)
        except BlockingIOError:
            return
        if not chunk:
            raise ConnectionResetError(errno.ECONNRESET, "hung up")
        for message in self._reader.feed(chunk):
            self._handle(message)

    def _handle(self, message: dict[str, Any]) -> None:
        host, op = self._host, message["op"]
        if op == "hello":
            self._out += encode({**host.hello(), "protocol": PROTOCOL})
            self._greeted = True
            host.tell_again()
        elif op == "spawn":
            host.spawn(message["items"])
        elif op == "kill":
            host.kill(message["items"])
        elif op == "ack":
            host.acknowledge(message["attempts"])
        elif op == "quarantine":
            host.quarantine(message["attempts"])
        elif op == "follow":
            host.follow(message["attempts"])
        elif op == "sweep":
            host.sweep(message["items"])
        elif op == "retire":
            host.retiring = True
        # A newer worker may say what this host does not know; it learns the protocol from our hello.

    def _send(self, peer: socket.socket) -> None:
        try:
            while self._out:
                sent = peer.send(self._out)
                del self._out[:sent]
        except BlockingIOError:
            pass
        if bool(self._out) != self._blocked:
            self._blocked = bool(self._out)
            wanted = select.EPOLLIN | (select.EPOLLOUT if self._blocked else 0)
            self._host.epoll.modify(peer.fileno(), wanted)
