"""The HTTP server: uvicorn in our own event loop, with bounds on what a client may send before we know who it is."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections import Counter
from typing import ClassVar

from uvicorn import Config, Server
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from schemas.errors import Ql3Error
from services.gateway.front import ABORT, App
from services.gateway.peers import Networks, within
from services.gateway.settings import GatewaySettings, is_loopback

HEAD_BYTES = 16 * 1024
HEAD_S = 10.0
"""How long a client may take to send the head of a request; uvicorn itself would wait for ever."""
IDLE_S = 15
STOP_S = 3

_TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with bounds on the size of a request's head, on the time that it takes, and on the connections
    of one address, so that no client alone shuts the door for all."""

    connected: ClassVar[Counter[str]]
    """Connections by address; of this machine and of proxies, behind which many may be, none are counted."""
    connected_max: ClassVar[int]
    uncounted: ClassVar[Networks]
    _address: str | None = None
    _head_bytes = 0
    _in_head = True
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected: its first request has to begin soon."""
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        address = str(peer[0]) if peer else ""
        if not is_loopback(address) and not within(address, self.uncounted):
            self._address = address
            self.connected[address] += 1
            if self.connected[address] > self.connected_max:
                transport.abort()
                return
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._disarm()
        if self._address is not None:
            self.connected.subtract((self._address,))
            if not self.connected[self._address]:
                del self.connected[self._address]
            self._address = None
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self.scope.setdefault("state", {})[ABORT] = self.transport.abort
        self._in_head = True
        self._head_bytes = 0
        if self._head_timer is None:
            self._arm()

    def on_headers_complete(self) -> None:
        """A head is there in full."""
        self._in_head = False
        self._disarm()
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > HEAD_BYTES:
            self._refuse_head()
            return
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Bytes came. A field that never ends reaches no callback, so what a head swallowed whole is counted here."""
        was_in_head = self._in_head
        super().data_received(data)
        if was_in_head and self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self._refuse_head()

    def _arm(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self._too_slow)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        self._head_timer = None
        self.transport.close()

    def _refuse_head(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(_TOO_LONG)
            self.transport.close()


def _protocol(settings: GatewaySettings) -> type[GuardedProtocol]:
    class Protocol(GuardedProtocol):
        connected: ClassVar[Counter[str]] = Counter()
        connected_max = max(1, settings.connections // 2)
        uncounted = settings.proxies

    return Protocol


class HttpServer:
    """Listens where the settings say."""

    def __init__(self, app: App, settings: GatewaySettings) -> None:
        self._settings = settings
        self._app = app
        self._server: Server | None = None
        self._socket: socket.socket | None = None

    @property
    def port(self) -> int:
        """The port that is listened on."""
        assert self._socket is not None
        return int(self._socket.getsockname()[1])

    @property
    def url(self) -> str:
        """Where people reach it: as set, or the address that is listened on."""
        if self._settings.public_url:
            return self._settings.public_url.rstrip("/")
        scheme = "https" if self._settings.tls else "http"
        return f"{scheme}://{_shown(self._settings.address[0])}:{self.port}"

    @property
    def local_url(self) -> str:
        """Where programs on this machine reach it without a proxy; over TLS the name counts, so there it is `url`."""
        if self._settings.tls:
            return self.url
        return f"http://{_shown(self._settings.address[0])}:{self.port}"

    async def start(self) -> None:
        """Binds and accepts. Raises `setup_invalid` naming the address when it is taken or not ours."""
        self._socket = await _bind(self._settings)
        config = Config(
            self._app,  # pyright: ignore[reportArgumentType]
            http=_protocol(self._settings),
            loop="none",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=STOP_S,
            limit_concurrency=self._settings.connections,
            ssl_certfile=self._settings.tls_certificate_file,
            ssl_keyfile=self._settings.tls_key_file,
        )
        try:
            config.load()
        except OSError as error:
            self._socket.close()
            raise Ql3Error(
                "setup_invalid", "The certificate or its key cannot be used.", field="QL3_TLS_CERTIFICATE"
            ) from error
        # Its own loop would wake ten times a second and take the signals; start and stop are all that is needed of it.
        self._server = Server(config)
        self._server.lifespan = config.lifespan_class(config)
        self._server.server_state.default_headers = config.encoded_headers
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        await self._server.startup(sockets=[self._socket])

    async def stop(self) -> None:
        """Accepts no more, lets running answers end for up to 3 s, closes what is left."""
        if self._server is not None and self._socket is not None:
            await self._server.shutdown(sockets=[self._socket])
            self._server = None


def _shown(host: str) -> str:
    everywhere = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104 - compared, not bound
    return everywhere.get(host, f"[{host}]" if ":" in host else host)


async def _bind(settings: GatewaySettings) -> socket.socket:
    host, port = settings.address
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise Ql3Error("setup_invalid", f"{host} is not an address of this machine.", field="QL3_LISTEN") from error
    family, kind, protocol, _, address = found[0]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            with contextlib.suppress(OSError):
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listening.setblocking(False)
        listening.bind(address)
        listening.listen(1024)
    except OSError as error:
        listening.close()
        raise Ql3Error("setup_invalid", _bind_sentence(error, settings.listen), field="QL3_LISTEN") from error
    return listening


def _bind_sentence(error: OSError, listen: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{listen} is already used by another program; choose another with --listen."
    if error.errno == errno.EACCES:
        return f"{listen} may not be used by this account; choose a port above 1023."
    return f"{listen} cannot be listened on: {error.strerror}."
