"""A service as NATS tools see it: ping, info and stats of the micro protocol, and endpoints with bounded concurrency.

The client library's own implementation handles the requests of an endpoint one after another and answers an unknown
exception with its text. Here each endpoint handles several at once, waits are bounded, and a person or another service
sees a registered code and nothing more.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, Generic, TypeVar

import msgspec
import structlog
from nats.aio.msg import Msg

from schemas.base import decode, encode
from schemas.endpoints import Endpoint
from schemas.errors import Ql3Error
from schemas.ids import is_slug
from schemas.limits import RPC_TIMEOUT_S
from schemas.system import ErrorAnswer
from services.kit.bus.connection import Connection, ConnectionLost, Subscription
from services.kit.bus.envelope import TRACEPARENT, headers_for, set_traceparent

ERROR_HEADER: Final = "Nats-Service-Error"
ERROR_CODE_HEADER: Final = "Nats-Service-Error-Code"
REQUEST_BYTES: Final = 768 * 1024
"""A batch (512 KiB) and what may stand around it."""
ANSWER_BYTES: Final = 1024 * 1024 - 4096
"""What the server takes (1 MiB), less headers."""
WAITING: Final = 1024
DRAIN_S: Final = 5.0

Q = TypeVar("Q", bound=msgspec.Struct)
A = TypeVar("A", bound=msgspec.Struct)

log: structlog.stdlib.BoundLogger = structlog.get_logger("ql3.rpc")


class Caller(msgspec.Struct, frozen=True):
    """Who asked, as far as the bus knows. `token` is the last token of a wildcard subject (a worker's id)."""

    subject: str
    headers: Mapping[str, str]
    token: str | None = None


class Route(Generic[Q, A]):
    """An endpoint and what answers it: `handler(question, caller) -> answer`, or a raised `Ql3Error`.

    At most `concurrency` questions are handled at once; others wait their turn for at most the time that the asker
    waits, and are answered with `capacity` after that.
    """

    __slots__ = ("concurrency", "endpoint", "handler")

    def __init__(
        self, endpoint: Endpoint[Q, A], handler: Callable[[Q, Caller], Awaitable[A]], *, concurrency: int = 16
    ) -> None:
        self.endpoint = endpoint
        self.handler = handler
        self.concurrency = concurrency


class _Served:
    """One endpoint at work, with its counters."""

    def __init__(self, connection: Connection, route: Route[Any, Any], group: str) -> None:
        self.route = route
        self.subject = f"{route.endpoint.subject}.*" if route.endpoint.wildcard else route.endpoint.subject
        self.group = group
        self.requests = 0
        self.errors = 0
        self.last_error = ""
        self.nanoseconds = 0
        self.subscription: Subscription | None = None
        self._connection = connection
        self._slots = asyncio.Semaphore(route.concurrency)
        self._tasks: set[asyncio.Task[None]] = set()

    async def take(self, message: Msg) -> None:
        """Begin handling a request; returns at once, so that requests do not stand in line behind a slow one."""
        self.requests += 1
        if len(self._tasks) >= WAITING:
            await self._refuse(message, Ql3Error("capacity"))
            return
        task = asyncio.create_task(self._handle(message, time.monotonic()))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _handle(self, message: Msg, arrived: float) -> None:
        async with self._slots:
            started = time.monotonic_ns()
            try:
                # Whoever asked has given up by now: working it off would only make the queue longer.
                if time.monotonic() - arrived > RPC_TIMEOUT_S:
                    raise Ql3Error("capacity")
                answer = await self._answer(message)
            except Ql3Error as error:
                await self._refuse(message, error)
            except asyncio.CancelledError:
                await self._refuse(message, Ql3Error("unavailable"))
                raise
            except Exception:
                log.exception("endpoint failed", subject=message.subject)
                await self._refuse(message, Ql3Error("internal_error"))
            else:
                await self._reply(message, encode(answer), headers_for(answer))
            finally:
                self.nanoseconds += time.monotonic_ns() - started

    async def _answer(self, message: Msg) -> msgspec.Struct:
        if len(message.data) > REQUEST_BYTES:
            raise Ql3Error("too_large")
        headers = message.headers or {}
        set_traceparent(headers.get(TRACEPARENT))
        token = None
        if self.route.endpoint.wildcard:
            token = message.subject.rpartition(".")[2]
            if not is_slug(token):
                raise Ql3Error("message_invalid", field="subject")
        question = decode(message.data, self.route.endpoint.question)
        return await self.route.handler(question, Caller(message.subject, headers, token))

    async def _refuse(self, message: Msg, error: Ql3Error) -> None:
        self.errors += 1
        self.last_error = error.code
        body = ErrorAnswer(code=error.code, detail=error.detail, field=error.field, data=error.data)
        headers = headers_for(body)
        headers[ERROR_CODE_HEADER] = str(error.kind.status)
        headers[ERROR_HEADER] = error.code
        await self._reply(message, encode(body), headers)

    async def _reply(self, message: Msg, payload: bytes, headers: dict[str, str]) -> None:
        if not message.reply:
            return
        if len(payload) > ANSWER_BYTES:
            log.error("answer is larger than a message may be", subject=message.subject, bytes=len(payload))
            await self._refuse(message, Ql3Error("too_large", "The answer is larger than a message may be."))
            return
        try:
            # Not waiting for a new connection: the asker's inbox went with the old one, and it asks again.
            await self._connection.publish(message.reply, payload, headers, timeout=0.0)
        except ConnectionLost:
            log.info("an answer was lost with the connection", subject=message.subject)

    async def close(self) -> None:
        """Take no more requests; give those at work a bounded time to end."""
        if self.subscription is not None:
            await self.subscription.close()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=DRAIN_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=DRAIN_S)

    def info(self) -> dict[str, Any]:
        """The endpoint in the protocol's info answer."""
        endpoint = self.route.endpoint
        return {"name": endpoint.name, "subject": self.subject, "queue_group": self.group, "metadata": {}}

    def stats(self) -> dict[str, Any]:
        """The endpoint in the protocol's stats answer."""
        return {
            "name": self.route.endpoint.name,
            "subject": self.subject,
            "queue_group": self.group,
            "num_requests": self.requests,
            "num_errors": self.errors,
            "last_error": self.last_error,
            "processing_time": self.nanoseconds,
            "average_processing_time": self.nanoseconds // max(1, self.requests),
        }


class MicroService:
    """One running service on the bus: `ql3-<name>` with its endpoints."""

    def __init__(self, connection: Connection, service: str, version: str, routes: list[Route[Any, Any]]) -> None:
        self._connection = connection
        self._identity: dict[str, Any] = {
            "name": f"ql3-{service}",
            "id": secrets.token_hex(11),
            "version": version,
            "metadata": {},
        }
        self._started = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        self._served = [_Served(connection, route, f"ql3-{service}") for route in routes]
        self._control: list[Subscription] = []

    async def start(self) -> None:
        """Subscribe the endpoints, then the control subjects, so that who is listed also answers."""
        for served in self._served:
            served.subscription = await self._connection.subscribe(served.subject, served.take, queue=served.group)
        for verb, answer in (("PING", self._ping), ("INFO", self._info), ("STATS", self._stats)):
            name, instance = self._identity["name"], self._identity["id"]
            for subject in (f"$SRV.{verb}", f"$SRV.{verb}.{name}", f"$SRV.{verb}.{name}.{instance}"):
                self._control.append(await self._connection.subscribe(subject, self._responder(answer), limit=64))

    async def stop(self) -> None:
        """End the service; requests at work are finished first."""
        await asyncio.gather(*(served.close() for served in self._served))
        for subscription in self._control:
            await subscription.close(0.0)
        self._control.clear()

    def _responder(self, answer: Callable[[], dict[str, Any]]) -> Callable[[Msg], Awaitable[None]]:
        async def respond(message: Msg) -> None:
            if message.reply:
                await self._connection.publish(message.reply, msgspec.json.encode(answer()), None, timeout=0.0)

        return respond

    def _ping(self) -> dict[str, Any]:
        return {"type": "io.nats.micro.v1.ping_response", **self._identity}

    def _info(self) -> dict[str, Any]:
        return {
            "type": "io.nats.micro.v1.info_response",
            **self._identity,
            "description": "",
            "endpoints": [served.info() for served in self._served],
        }

    def _stats(self) -> dict[str, Any]:
        return {
            "type": "io.nats.micro.v1.stats_response",
            **self._identity,
            "started": self._started,
            "endpoints": [served.stats() for served in self._served],
        }
