"""One connection to NATS that is made again for ever, with the subscriptions and the reply inbox that live on it.

The client library can reconnect by itself, but some errors close it for good, its subscriptions cancel the handler that
is running when they end, and a request whose answer was lost with the connection waits out its whole timeout. So each
connection here is a fresh client: when it ends, all open requests fail at once, and the next client gets every
subscription again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import secrets
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import msgspec
import structlog
from nats import errors as nats_errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from schemas.errors import Ql3Error

BACKOFF_MIN_S: Final = 0.05
BACKOFF_MAX_S: Final = 2.0
CONNECT_TIMEOUT_S: Final = 5
PING_INTERVAL_S: Final = 5
PROBE_S: Final = 10.0
PENDING_BYTES: Final = 32 * 1024 * 1024

_NO_ANSWER: Final = "no server answered"

log: structlog.stdlib.BoundLogger = structlog.get_logger("ql3.bus")


class BusOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where NATS is and who we are there. `user` and `password` may be empty on a server without users.

    `replicas` is the number of servers that keep each stream (1, or 3 in a cluster); `edge` chooses the small stream
    bounds. `password` is never shown by `repr`. An order that failed is delivered again after `redelivery_s` seconds,
    then after twice as long each time, at most a minute; one whose handler says nothing for `ack_wait_s` seconds (a
    crash) goes to another reader.
    """

    servers: tuple[str, ...]
    service: str
    user: str = ""
    password: str = ""
    tls_ca: str | None = None
    tls_certificate: str | None = None
    tls_key: str | None = None
    replicas: int = 1
    edge: bool = True
    redelivery_s: float = 1.0
    ack_wait_s: float = 60.0

    def __repr__(self) -> str:
        return f"BusOptions(service={self.service!r}, servers={len(self.servers)})"


class ConnectionLost(Exception):  # noqa: N818 - a fact about the connection, turned into `unavailable` for callers
    """The connection ended while an answer was awaited."""


class NoResponders(Exception):  # noqa: N818 - likewise
    """Nobody listens on the subject, or no stream holds it."""


class Subscription:
    """One subject whose messages are handled one after another in a task of ours that outlives a connection.

    `handler(message)` may raise: the error is logged and the next message is taken. At most `limit` messages wait; more
    are dropped and counted, as core NATS may lose messages anyway.
    """

    def __init__(
        self, connection: Connection, subject: str, queue: str, handler: Callable[[Msg], Awaitable[None]], limit: int
    ) -> None:
        self._connection = connection
        self._subject = subject
        self._group = queue
        self._handler = handler
        self._waiting: asyncio.Queue[Msg] = asyncio.Queue(limit)
        self._task = asyncio.create_task(self._run(), name=f"subscription {subject}")
        self._native: Any = None
        self.client: Client | None = None
        self._closing = False
        self.dropped = 0

    async def attach(self, client: Client) -> None:
        """Subscribe on a new client."""
        self.client = client
        self._native = await client.subscribe(  # pyright: ignore[reportUnknownMemberType] - the library's own types
            self._subject, queue=self._group, cb=self._take, pending_bytes_limit=PENDING_BYTES
        )

    async def _take(self, message: Msg) -> None:
        try:
            self._waiting.put_nowait(message)
        except asyncio.QueueFull:
            self.dropped += 1
            if self.dropped & (self.dropped - 1) == 0:  # 1, 2, 4, 8, ...: enough to notice, never a flood
                log.warning("messages dropped", subject=self._subject, dropped=self.dropped)

    async def _run(self) -> None:
        while True:
            message = await self._waiting.get()
            try:
                await self._handler(message)
            except asyncio.CancelledError:
                if self._closing:
                    raise
                log.warning("handler was cancelled from within", subject=message.subject)
            except Exception:
                log.exception("handler failed", subject=message.subject)
            finally:
                self._waiting.task_done()

    async def close(self, drain_s: float = 2.0) -> None:
        """End the interest, then let what already came be handled for at most `drain_s` seconds."""
        self._connection.forget(self)
        native, self._native = self._native, None
        if native is not None and self._connection.connected:
            if drain_s > 0:
                # Draining lets through what the client already holds. It must not be cancelled: a PONG for a cancelled
                # flush ends the library's read loop.
                draining = asyncio.create_task(native.drain())
                draining.add_done_callback(lambda task: task.cancelled() or task.exception())
                await asyncio.wait({draining}, timeout=drain_s)
            else:
                with contextlib.suppress(nats_errors.Error):
                    await native.unsubscribe()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._waiting.join(), drain_s)
        self._closing = True
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class Connection:
    """The supervised connection. `start()` makes it, `stop()` ends it; `client()` waits until there is one."""

    def __init__(self, options: BusOptions) -> None:
        self.options = options
        self.inbox = f"_INBOX_{options.user or options.service}"
        self._replies = f"{self.inbox}.{secrets.token_hex(12)}"
        self._open: dict[str, asyncio.Future[Msg]] = {}
        self._tokens = itertools.count()
        self._subscriptions: list[Subscription] = []
        self._client: Client | None = None
        self._up = asyncio.Event()
        self._ended = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None
        self._refusal: str | None = None
        self._refused = asyncio.Event()
        self._stopping = False
        self._on_lost: list[Callable[[], None]] = []
        self.generation = 0

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self._up.is_set() and self._client is not None and not self._client.is_closed

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Call `callback()` whenever a connection ends."""
        self._on_lost.append(callback)

    async def start(self, wait_s: float) -> None:
        """Begin connecting; return with the first connection.

        Raises `unavailable` when there is none within `wait_s` seconds, or at once when we are refused: waiting mends
        no password.
        """
        self._supervisor = asyncio.create_task(self._supervise(), name="nats connection")
        up = asyncio.create_task(self._up.wait())
        refused = asyncio.create_task(self._refused.wait())
        try:
            await asyncio.wait({up, refused}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            up.cancel()
            refused.cancel()
        if not self._up.is_set():
            cause = self._refusal or _NO_ANSWER
            await self.stop()
            raise Ql3Error("unavailable", f"The message server cannot be used: {cause}.", field="nats")

    async def stop(self) -> None:
        """End the connection and do not make another."""
        await asyncio.gather(*(subscription.close() for subscription in list(self._subscriptions)))
        self._stopping = True
        supervisor, self._supervisor = self._supervisor, None
        while supervisor is not None and not supervisor.done():
            # More than once, because the library swallows a cancellation that meets it while it closes.
            supervisor.cancel()
            await asyncio.wait({supervisor}, timeout=0.5)
        await self._end_client(flush=True)

    async def client(self, timeout: float) -> Client:
        """The connected client, waiting up to `timeout` seconds for one. Raises `ConnectionLost`."""
        client = self._client
        if client is not None and client.is_closed:
            # The library does not call back when closing failed half-way; who finds it closed tells the supervisor.
            self._up.clear()
            self._ended.set()
        if not self._up.is_set():
            try:
                await asyncio.wait_for(self._up.wait(), timeout)
            except TimeoutError:
                raise ConnectionLost from None
        client = self._client
        if client is None:
            raise ConnectionLost
        return client

    async def subscribe(
        self, subject: str, handler: Callable[[Msg], Awaitable[None]], *, queue: str = "", limit: int = 4096
    ) -> Subscription:
        """Subscribe now and on every later connection."""
        subscription = Subscription(self, subject, queue, handler, limit)
        self._subscriptions.append(subscription)
        client = self._client
        if client is not None and self.connected:
            # A connection that ends right here is no loss: the next one attaches what is in the list.
            with contextlib.suppress(nats_errors.Error, OSError):
                await subscription.attach(client)
        return subscription

    def forget(self, subscription: Subscription) -> None:
        """Do not attach this subscription to later connections."""
        with contextlib.suppress(ValueError):
            self._subscriptions.remove(subscription)

    async def publish(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None, *, reply: str = "", timeout: float = 5.0
    ) -> None:
        """Hand a message to the server, without an acknowledgement. Raises `ConnectionLost`."""
        client = await self.client(timeout)
        try:
            await client.publish(subject, payload, reply=reply, headers=dict(headers) if headers else None)
        except (nats_errors.ConnectionClosedError, nats_errors.OutboundBufferLimitError, OSError) as error:
            raise ConnectionLost from error
        except nats_errors.MaxPayloadError as error:
            raise Ql3Error("too_large", "The message is larger than the server takes.") from error

    def expect(self) -> tuple[str, asyncio.Future[Msg]]:
        """A reply subject and the future of its one answer. Drop an answer no longer awaited with `future.cancel()`."""
        token = f"{next(self._tokens):x}"
        future: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self._open[token] = future
        future.add_done_callback(lambda _: self._open.pop(token, None))
        return f"{self._replies}.{token}", future

    async def request(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None, *, timeout: float
    ) -> Msg:
        """One answer within `timeout` seconds. Raises `ConnectionLost`, `NoResponders` or `asyncio.TimeoutError`."""
        async with asyncio.timeout(timeout):
            reply, future = self.expect()
            try:
                await self.publish(subject, payload, headers, reply=reply, timeout=timeout)
                message = await future
            finally:
                future.cancel()
        if is_no_responders(message):
            raise NoResponders
        return message

    async def flush(self, timeout: float = 5.0) -> None:
        """Return when the server has taken everything written so far. Raises `ConnectionLost`."""
        client = await self.client(timeout)
        try:
            async with asyncio.timeout(timeout):
                await self._echo(client)
        except (nats_errors.Error, TimeoutError, OSError) as error:
            raise ConnectionLost from error

    async def _echo(self, client: Client) -> None:
        # The library's own flush writes its PING past what still waits to be written, so its PONG proves nothing. A
        # message to ourselves keeps its place in the line.
        reply, future = self.expect()
        try:
            await client.publish(reply, b"")
            await future
        finally:
            future.cancel()

    # -- the supervisor

    async def _supervise(self) -> None:
        servers = list(self.options.servers)
        backoff = 0.0
        while not self._stopping:
            random.shuffle(servers)
            for server in servers:
                if await self._connect(server):
                    backoff = 0.0
                    await self._until_ended()
                    self._lose()
                    await self._end_client(flush=False)
            backoff = min(BACKOFF_MAX_S, max(BACKOFF_MIN_S, backoff * 2))
            await asyncio.sleep(backoff * random.uniform(0.7, 1.0))  # noqa: S311 - spreads reconnects, not a secret

    async def _until_ended(self) -> None:
        # The client tells when it closes; asking now and then covers the ways in which its own tasks can die unheard.
        while not self._ended.is_set():
            try:
                await asyncio.wait_for(self._ended.wait(), PROBE_S)
            except TimeoutError:
                try:
                    await self.flush(PROBE_S)
                except ConnectionLost:
                    return

    async def _connect(self, server: str) -> bool:
        self._ended = ended = asyncio.Event()
        refused: list[str] = []

        async def closed() -> None:
            ended.set()

        async def failed(error: Exception) -> None:
            # The library's texts name subjects and operations; credentials never are in them.
            if self._up.is_set() and not isinstance(error, nats_errors.UnexpectedEOF):
                log.warning("message server reported", error=str(error)[:300])
            elif "ermissions violation" in str(error).lower():
                refused.append(str(error))

        client = Client()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await client.connect(
                    servers=[server],
                    name=f"ql3-{self.options.service}",
                    user=self.options.user or None,
                    password=self.options.password or None,
                    tls=self._tls(),
                    inbox_prefix=self.inbox,
                    allow_reconnect=False,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0,
                    connect_timeout=CONNECT_TIMEOUT_S,
                    ping_interval=PING_INTERVAL_S,
                    flush_timeout=2.0,
                    closed_cb=closed,
                    error_cb=failed,
                )
                await client.subscribe(  # pyright: ignore[reportUnknownMemberType] - the library's own types
                    f"{self._replies}.*", cb=self._answer, pending_bytes_limit=PENDING_BYTES
                )
                await self._echo(client)
                # Others may subscribe while we wait here; who is not attached when we are up would stay deaf.
                while missing := [each for each in self._subscriptions if each.client is not client]:
                    for subscription in missing:
                        await subscription.attach(client)
                    await self._echo(client)
        except asyncio.CancelledError:
            await _close(client)
            raise
        except (TimeoutError, nats_errors.Error, OSError) as error:
            refusal = "this user may not use its own inbox" if refused else _refusal(error)
            if refusal != self._refusal:
                log.warning("no connection to the message server", cause=refusal)
            self._refusal = refusal
            if refusal != _NO_ANSWER:
                self._refused.set()
            await _close(client)
            return False
        if ended.is_set():
            return False
        self._client = client
        self._refusal = None
        self.generation += 1
        self._up.set()
        log.info("connected to the message server", generation=self.generation)
        return True

    def _tls(self) -> ssl.SSLContext | None:
        options = self.options
        if options.tls_ca is None and options.tls_certificate is None:
            return None
        context = ssl.create_default_context(cafile=options.tls_ca)
        if options.tls_certificate is not None:
            context.load_cert_chain(options.tls_certificate, options.tls_key)
        return context

    async def _answer(self, message: Msg) -> None:
        future = self._open.get(message.subject.rpartition(".")[2])
        if future is not None and not future.done():
            future.set_result(message)

    def _lose(self) -> None:
        self._up.clear()
        log.warning("connection to the message server ended")
        for future in list(self._open.values()):
            if not future.done():
                future.set_exception(ConnectionLost())
        for callback in self._on_lost:
            callback()

    async def _end_client(self, *, flush: bool) -> None:
        client, self._client = self._client, None
        self._up.clear()
        if client is None:
            return
        if flush and client.is_connected:
            with contextlib.suppress(nats_errors.Error, TimeoutError, OSError, ConnectionLost):
                async with asyncio.timeout(2.0):
                    await self._echo(client)
        await _close(client)


async def _close(client: Client) -> None:
    with contextlib.suppress(Exception):
        async with asyncio.timeout(2.0):
            await client.close()


def is_no_responders(message: Msg) -> bool:
    """Whether the server itself answered that nobody listens."""
    return not message.data and bool(message.headers) and (message.headers or {}).get("Status") == "503"


def _refusal(error: BaseException) -> str:
    text = str(error)
    if "Authorization Violation" in text or isinstance(error, nats_errors.AuthorizationError):
        return "it refused the user or password"
    if isinstance(error, ssl.SSLError):
        return "its certificate was not accepted"
    return _NO_ANSWER
