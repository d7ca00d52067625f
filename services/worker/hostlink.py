"""The worker's side of the process host's socket: connect or start a host, come back when it hangs up, send, hear."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from services.worker.host import wire
from services.worker.launch import start_host

CONNECT_TRIES: Final = 5
HELLO_S: Final = 10.0
MESSAGE_BYTES: Final = wire.MAX_FRAME // 2
"""Above this, items go into another message; one item alone is far smaller."""
BACKOFF_S: Final = 0.1
BACKOFF_MAX_S: Final = 5.0

log: structlog.stdlib.BoundLogger = structlog.get_logger("ql3.worker")


class Started(msgspec.Struct):
    """A process that exists, or existed."""

    attempt: str
    pid: int
    at_ms: int


class RefusedStart(msgspec.Struct):
    """A start that was refused for certain; nothing of it ran."""

    attempt: str
    code: str
    command: str = ""
    directory: str = ""
    limits: str = ""


class Exit(msgspec.Struct):
    """A durable end: `body` is the report, signed."""

    attempt: str
    sequence: int
    body: str
    proof: str
    context: dict[str, Any]


class Grown(msgspec.Struct):
    """A followed log has this many bytes."""

    attempt: str
    size: int


class Gone(msgspec.Struct):
    """Nothing of an attempt is left, or that cannot be known."""

    attempt: str
    presence: str


class News(msgspec.Struct):
    """What the host tells; one frame."""

    op: str
    started: list[Started] = []
    refused: list[RefusedStart] = []
    exits: list[Exit] = []
    grown: list[Grown] = []
    gone: list[Gone] = []
    host: dict[str, Any] = {}
    attempts: list[dict[str, Any]] = []
    protocol: int = 0


class HostLink:
    """One connection to the host, kept up. `on_news` and `on_hello` are called on the event loop, in order.

    What is sent while there is no connection is dropped: the hello after it says what the host has, and whoever called
    decides again.
    """

    def __init__(
        self, directory: Path, logs: Path, *, on_hello: Callable[[News], None], on_news: Callable[[News], None]
    ) -> None:
        self._directory = directory
        self._logs = logs
        self._on_hello = on_hello
        self._on_news = on_news
        self._transport: asyncio.WriteTransport | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._keeper: asyncio.Task[None] | None = None
        self._lost = asyncio.Event()
        self._greeted: asyncio.Future[None] | None = None
        self._stopping = False
        self._decoder = msgspec.json.Decoder(News)
        self._encoder = msgspec.json.Encoder()

    @property
    def connected(self) -> bool:
        """Whether a host listens to us."""
        greeted = self._greeted
        return greeted is not None and greeted.done() and self._transport is not None

    async def start(self) -> None:
        """Reach a host, starting one if there is none. Raises RuntimeError or OSError when none can be had."""
        for left in reversed(range(CONNECT_TRIES)):
            try:
                await self._connect()
                break
            except (ConnectionResetError, TimeoutError):
                if not left:  # one that was about to end; the next try starts another
                    raise
        self._keeper = asyncio.create_task(self._keep(), name="process host")

    async def stop(self, *, retire: bool = True) -> None:
        """Hang up; a host that is told to retire ends by itself when nothing runs."""
        self._stopping = True
        if retire:
            self.send({"op": "retire"})
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._transport is not None:
            self._transport.close()
        # A host with nothing to do is gone in a moment; one that stays is not waited for.
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, 0.5)

    def send(self, message: dict[str, Any]) -> bool:
        """Send one message; False if there is no host. What was sent may still be lost with the connection."""
        return self._write(self._encoder.encode(message))

    def send_items(self, op: str, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Send items in as many messages as their size asks for; answers those that there was no host for."""
        head, tail = b'{"op":' + self._encoder.encode(op) + b',"items":[', b"]}"
        parts: list[bytes] = []
        size = first = 0
        for index, item in enumerate(items):
            part = self._encoder.encode(item)
            if parts and size + len(part) > MESSAGE_BYTES:
                if not self._write(head + b",".join(parts) + tail):
                    return items[first:]
                parts, size, first = [], 0, index
            parts.append(part)
            size += len(part) + 1
        if parts and not self._write(head + b",".join(parts) + tail):
            return items[first:]
        return []

    def _write(self, body: bytes) -> bool:
        if self._transport is None or self._transport.is_closing():
            return False
        if len(body) > wire.MAX_FRAME:
            raise ValueError("a message for the process host is too large")
        self._transport.write(struct.pack(">I", len(body)) + body)
        # A host that is gone shows at the first write; then nothing of it went out.
        return not self._transport.is_closing()

    async def _keep(self) -> None:
        pause_s = BACKOFF_S
        while True:
            await self._lost.wait()
            try:
                await self._connect()
                pause_s = BACKOFF_S
            except (OSError, RuntimeError, TimeoutError) as error:
                log.warning("no process host", cause=str(error) or type(error).__name__)
                await asyncio.sleep(pause_s)
                pause_s = min(BACKOFF_MAX_S, 2 * pause_s)

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        peer = await asyncio.to_thread(self._reach)
        self._lost.clear()
        self._greeted = greeted = loop.create_future()
        try:
            transport, _ = await loop.create_unix_connection(lambda: _Protocol(self), sock=peer)
        except BaseException:
            peer.close()
            raise
        self._transport = transport
        self.send({"op": "hello", "protocol": wire.PROTOCOL})
        async with asyncio.timeout(HELLO_S):
            await greeted

    def _reach(self) -> socket.socket:
        self._processes = [process for process in self._processes if process.poll() is None]
        error: Exception = RuntimeError("the process host does not answer")
        for _ in range(CONNECT_TRIES):
            try:
                return self._dial()
            except (FileNotFoundError, ConnectionRefusedError) as refused:
                error = refused
            # Whoever owns the directory's lock is the host; another one gives way.
            process = start_host(self._directory, self._logs)
            if process.poll() is None:
                self._processes.append(process)
        raise error

    def _dial(self) -> socket.socket:
        directory = wire.open_directory(str(self._directory))
        try:
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            try:
                peer.connect(wire.socket_address(directory))
                _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                if uid != os.geteuid():
                    raise PermissionError("the process host belongs to somebody else")
                peer.setblocking(False)
            except BaseException:
                peer.close()
                raise
            return peer
        finally:
            os.close(directory)

    def heard(self, body: memoryview) -> None:
        """One frame. Called by the protocol."""
        news = self._decoder.decode(body)
        if news.op == "hello":
            self._on_hello(news)
            if self._greeted is not None and not self._greeted.done():
                self._greeted.set_result(None)
        else:
            self._on_news(news)

    def hung_up(self) -> None:
        """The connection is gone. Called by the protocol."""
        self._transport = None
        if self._greeted is not None and not self._greeted.done():
            self._greeted.set_exception(ConnectionResetError("the process host hung up"))
        if not self._stopping:
            self._lost.set()


class _Protocol(asyncio.Protocol):
    def __init__(self, link: HostLink) -> None:
        self._link = link
        self._buffer = bytearray()
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        at = 0
        while len(buffer) - at >= 4:
            (size,) = struct.unpack_from(">I", buffer, at)
            if size > wire.MAX_FRAME:
                self._hang_up()
                return
            if len(buffer) - at - 4 < size:
                break
            try:
                with memoryview(buffer) as view, view[at + 4 : at + 4 + size] as body:
                    self._link.heard(body)
            except msgspec.DecodeError:
                self._hang_up()
                return
            at += 4 + size
        del buffer[:at]

    def connection_lost(self, exc: Exception | None) -> None:
        self._link.hung_up()

    def _hang_up(self) -> None:
        log.error("the process host sent what is no message")
        if self._transport is not None:
            self._transport.close()
