"""The bus of one service: publish, ask, serve, consume. The only way in which services talk to each other."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Final, Self, TypeVar

import msgspec
import structlog
from nats.aio.msg import Msg

from schemas.base import decode, encode
from schemas.endpoints import Endpoint
from schemas.errors import REGISTRY, Ql3Error
from schemas.limits import BATCH_ITEMS, RPC_TIMEOUT_S
from schemas.subjects import ack
from schemas.system import ErrorAnswer, OrdersAck
from services.kit import metrics
from services.kit.bus import dead
from services.kit.bus.connection import (
    BACKOFF_MAX_S,
    BACKOFF_MIN_S,
    BusOptions,
    Connection,
    ConnectionLost,
    NoResponders,
    Subscription,
)
from services.kit.bus.consumer import BatchHandler, Consumer
from services.kit.bus.envelope import MSG_ID, TRACEPARENT, Delivery, headers_for, set_traceparent
from services.kit.bus.micro import ERROR_CODE_HEADER, MicroService, Route
from services.kit.bus.streams import ConsumerSpec, Streams, command_consumer, worker_consumer

PUBLISH_TIMEOUT_S: Final = 5.0
CONNECT_WAIT_S: Final = 10.0
ACK_IDS: Final = 4096

Outgoing = tuple[str, bytes, Mapping[str, str]]
DeliveryHandler = Callable[[Delivery], Awaitable[None]]
Q = TypeVar("Q", bound=msgspec.Struct)
A = TypeVar("A", bound=msgspec.Struct)

log: structlog.stdlib.BoundLogger = structlog.get_logger("ql3.bus")


class Bus:
    """One service's place on the bus. `await bus.start()` first; `await bus.stop()` drains and leaves.

    Everything that can fail for a while (no server, no stream, nobody answers) is `Ql3Error("unavailable")`, and never
    ends the bus: subscriptions, endpoints and consumers come back by themselves.
    """

    def __init__(self, options: BusOptions) -> None:
        self.options = options
        self._connection = Connection(options)
        self._streams = Streams(self._connection)
        self._services: list[MicroService] = []
        self._consumers: list[Consumer] = []

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self._connection.connected

    async def start(self, *, wait_s: float = CONNECT_WAIT_S, streams: bool = True) -> Self:
        """Connect within `wait_s` seconds or raise `unavailable`, then declare the streams.

        With `streams=False` this bus declares none, now or after a wipe: a worker has no right to.
        """
        self._streams.declares = streams
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        await self._connection.start(wait_s)
        try:
            backoff = BACKOFF_MIN_S
            while streams:
                try:
                    await self.ensure_streams()
                    break
                except Ql3Error as error:
                    # Servers that just started may not have chosen yet who leads.
                    if error.code != "unavailable" or loop.time() + backoff > deadline:
                        raise
                await asyncio.sleep(backoff)
                backoff = min(BACKOFF_MAX_S, backoff * 2)
        except BaseException:
            await self.stop()
            raise
        return self

    async def stop(self) -> None:
        """Finish what is at work (bounded), send what is written, leave."""
        consumers, self._consumers = self._consumers, []
        services, self._services = self._services, []
        await asyncio.gather(*(consumer.stop() for consumer in consumers))
        await asyncio.gather(*(service.stop() for service in services))
        await self._connection.stop()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def health(self) -> list[str]:
        """Reasons why the bus is not ready; empty when it is."""
        if not self.connected:
            return ["no connection to the message server"]
        return [reason for consumer in self._consumers for reason in consumer.health()]

    # -- streams

    async def ensure_streams(self) -> None:
        """Create the streams that are absent; never changes one that exists. Raises `unavailable`, `setup_invalid`."""
        try:
            await self._streams.ensure()
        except (TimeoutError, ConnectionLost, NoResponders) as error:
            raise Ql3Error("unavailable", "The message server does not answer for its streams.") from error

    async def migrate_streams(self) -> list[str]:
        """Bring existing streams to their declaration (`ql3 migrate` only); returns the names of those changed.

        Raises `setup_invalid` naming a stream that the server will not have so, or `unavailable`.
        """
        try:
            return await self._streams.migrate()
        except (ConnectionLost, NoResponders, TimeoutError) as error:
            raise Ql3Error("unavailable", "The message server does not answer for its streams.") from error

    # -- publishing

    async def publish(
        self, subject: str, message: msgspec.Struct, *, msg_id: str | None = None, timeout: float = PUBLISH_TIMEOUT_S
    ) -> None:
        """Store a message in its stream and return when the stream has it. Raises `unavailable`, `too_large`.

        Repeats itself within `timeout` seconds with the same id, so that a lost answer stores nothing twice.
        """
        headers = headers_for(message, msg_id or secrets.token_hex(16))
        (error,) = await self.publish_many([(subject, encode(message), headers)], timeout=timeout)
        if error is not None:
            raise error

    async def publish_many(
        self, items: Sequence[Outgoing], *, facts: Collection[int] = (), timeout: float = PUBLISH_TIMEOUT_S
    ) -> list[Exception | None]:
        """Store many messages, all under way at once; one outcome per item, None for what its stream has.

        Items are `(subject, payload, headers)`. Each needs a `Nats-Msg-Id` to be repeated safely after a lost answer:
        inside two minutes the stream drops a repeat silently. Raises nothing; an outcome is a `Ql3Error`.

        `facts` are the indices of items of one stream whose last one's answer may stand for all of them: a server takes
        in order what comes over one connection. What it loses of them all the same (its disk failed for a moment) is
        read in the feed. Servers that may take each other's place answer every message.
        """
        quiet: set[int] = set()
        if facts and self.options.replicas == 1:
            quiet = set(facts) - {max(facts)}
        outcomes: list[Exception | None] = [Ql3Error("unavailable")] * len(items)
        open_items = list(range(len(items)))
        backoff = BACKOFF_MIN_S
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while open_items:
            seen = self._streams.declared
            results = await self._publish_round([items[i] for i in open_items], deadline, quiet, max(facts, default=0))
            quiet = set[int]()  # whatever is repeated is answered
            again: list[int] = []
            no_stream = False
            for index, result in zip(open_items, results, strict=True):
                if isinstance(result, NoResponders | ConnectionLost):
                    again.append(index)
                    no_stream = no_stream or isinstance(result, NoResponders)
                    outcomes[index] = Ql3Error("unavailable", "No stream took the message.")
                else:
                    outcomes[index] = result
            open_items = again
            if not open_items or loop.time() + backoff >= deadline:
                break
            if no_stream:
                try:
                    async with asyncio.timeout_at(deadline):
                        await self._streams.redeclare(seen)
                except (TimeoutError, Ql3Error, ConnectionLost, NoResponders) as error:
                    log.warning("streams cannot be declared yet", cause=str(error) or type(error).__name__)
            await asyncio.sleep(backoff)
            backoff = min(BACKOFF_MAX_S, backoff * 2)
        return outcomes

    async def _publish_round(
        self, items: list[Outgoing], deadline: float, quiet: set[int], speaker: int
    ) -> list[Exception | None]:
        """Those in `quiet` get no answer of their own: the one at `speaker`, sent after them, has theirs."""
        connection = self._connection
        generation = connection.generation
        loop = asyncio.get_running_loop()
        futures: dict[int, asyncio.Future[Msg]] = {}
        results: list[Exception | None] = [None] * len(items)
        try:
            for index, (subject, payload, headers) in enumerate(items):
                reply = ""
                if index not in quiet:
                    reply, futures[index] = connection.expect()
                left = max(0.0, deadline - loop.time())
                try:
                    await connection.publish(subject, payload, headers, reply=reply, timeout=left)
                except (ConnectionLost, Ql3Error) as error:
                    results[index] = error
                    if reply:
                        futures.pop(index).cancel()
            if futures:
                await asyncio.wait(futures.values(), timeout=max(0.0, deadline - loop.time()))
            for index, future in futures.items():
                results[index] = _stored(future)
        finally:
            for future in futures.values():
                future.cancel()
        if quiet and (results[speaker] is not None or connection.generation != generation):
            for index in quiet:
                results[index] = results[index] or ConnectionLost()
        return results

    async def publish_core(self, subject: str, message: msgspec.Struct) -> None:
        """Send a message to whoever listens now. Raises `unavailable` when there is no connection."""
        try:
            await self._connection.publish(subject, encode(message), headers_for(message), timeout=PUBLISH_TIMEOUT_S)
        except ConnectionLost as error:
            raise Ql3Error("unavailable") from error

    async def publish_raw(self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None) -> None:
        """As `publish_core`, for bytes that are no message of the schemas (live log chunks)."""
        try:
            await self._connection.publish(subject, payload, headers, timeout=PUBLISH_TIMEOUT_S)
        except ConnectionLost as error:
            raise Ql3Error("unavailable") from error

    async def flush(self) -> None:
        """Return when the server has everything written so far. Raises `unavailable`."""
        try:
            await self._connection.flush()
        except ConnectionLost as error:
            raise Ql3Error("unavailable") from error

    # -- questions

    async def request(
        self, endpoint: Endpoint[Q, A], message: Q, *, timeout: float = RPC_TIMEOUT_S, token: str | None = None
    ) -> A:
        """Ask an endpoint; `timeout` in seconds. Raises the answer's `Ql3Error`, or `unavailable`.

        After `unavailable` it is not known whether the question was worked off: ask it again with the same ids.
        """
        subject = endpoint.subject_for(token)
        try:
            answer = await self._connection.request(subject, encode(message), headers_for(message), timeout=timeout)
        except NoResponders as error:
            raise Ql3Error("unavailable", f"The {endpoint.service} service is not running.") from error
        except (TimeoutError, ConnectionLost) as error:
            raise Ql3Error("unavailable", f"The {endpoint.service} service did not answer in time.") from error
        if answer.headers and ERROR_CODE_HEADER in answer.headers:
            raise _refusal(answer.data)
        return decode(answer.data, endpoint.answer)

    async def serve(self, service: str, version: str, routes: Sequence[Route[Any, Any]]) -> None:
        """Answer these endpoints as the micro service `ql3-<service>`, from now on."""
        micro = MicroService(self._connection, service, version, list(routes))
        self._services.append(micro)
        await micro.start()

    # -- orders

    async def consume(
        self,
        service: str,
        handlers: Mapping[type[msgspec.Struct], BatchHandler],
        *,
        spoken: Collection[type[msgspec.Struct]] = (),
    ) -> None:
        """Read the service's orders. A handler gets a list of one type of message and returns after its commit.

        It may return one outcome per item; an exception there, or a raised one after the batch was tried item by item,
        means that the order is delivered again later, and buried after eight deliveries. Orders of the types in
        `spoken` come as `Spoken`, with who sent them.
        """
        await self._consume(service, command_consumer(service), handlers, spoken)

    async def consume_worker(self, worker: str, handlers: Mapping[type[msgspec.Struct], BatchHandler]) -> None:
        """Read the orders to one worker, as `consume` does for a service."""
        await self._consume("worker", worker_consumer(worker), handlers)

    async def _consume(
        self,
        service: str,
        spec: ConsumerSpec,
        handlers: Mapping[type[msgspec.Struct], BatchHandler],
        spoken: Collection[type[msgspec.Struct]] = (),
    ) -> None:
        async def bury(message: Msg, reason: str, error: str, deliveries: int) -> bool:
            return await self._bury(service, message, reason, error, deliveries)

        consumer = Consumer(self._connection, self._streams, spec, handlers, bury, spoken)
        self._consumers.append(consumer)
        await consumer.start()

    async def _bury(self, service: str, message: Msg, reason: str, error: str, deliveries: int) -> bool:
        headers = dead.dead_headers(message, reason, error, deliveries)
        subject = dead.dead_subject(service, reason)
        (failure,) = await self.publish_many([(subject, dead.dead_payload(message), headers)])
        if failure is None:
            metrics.DEAD.labels(service).inc()
            log.error("an order was buried", subject=message.subject, reason=reason, deliveries=deliveries)
        return failure is None

    async def acknowledge(self, sender: str, ids: Sequence[str]) -> None:
        """Tell the sender that its orders are committed here. A lost answer is no loss: it rings again."""
        for start in range(0, len(ids), ACK_IDS):
            await self.publish_core(ack(sender), OrdersAck(ids=list(ids[start : start + ACK_IDS])))

    async def on_ack(self, service: str, handler: Callable[[list[str]], Awaitable[None]]) -> Subscription:
        """Hear which of our orders are committed elsewhere; of several replicas one hears each answer."""

        async def heard(delivery: Delivery) -> None:
            await handler(delivery.decode(OrdersAck).ids)

        return await self.subscribe(ack(service), heard, queue=f"ql3-{service}")

    # -- core subscriptions

    async def subscribe(self, subject: str, handler: DeliveryHandler, *, queue: str = "") -> Subscription:
        """Hear a core subject, one message after another. What is sent while we are away is lost."""

        async def take(message: Msg) -> None:
            headers = message.headers or {}
            set_traceparent(headers.get(TRACEPARENT))
            await handler(Delivery(message.subject, message.data, headers))

        return await self._connection.subscribe(subject, take, queue=queue)

    async def on_event(self, pattern: str, handler: DeliveryHandler) -> Subscription:
        """Hear facts (`ql3.evt.…`). They may be lost: whoever builds rows from them also pulls the owner's feed."""
        if not pattern.startswith("ql3.evt."):
            raise ValueError("facts are on ql3.evt.")
        return await self.subscribe(pattern, handler)

    # -- dead letters

    async def dead_letters(
        self, *, service: str | None = None, after: int = 0, limit: int = BATCH_ITEMS
    ) -> list[dead.DeadLetter]:
        """Up to `limit` dead letters behind the sequence `after`, oldest first. Raises `unavailable`."""
        return await dead.list_dead(self._connection, service=service, after=after, limit=limit)

    async def replay(self, sequence: int) -> str:
        """Send one dead letter to where it came from, under a new message id, and remove it; returns that id.

        Raises `not_found`, `too_large` (only its beginning was kept) or `unavailable`.
        """
        letter = await dead.read_dead(self._connection, sequence)
        if letter is None or letter.sequence != sequence:
            raise Ql3Error("not_found")
        if letter.cut is not None:
            raise Ql3Error("too_large", "Only the beginning of this message was kept.")
        if not letter.subject.startswith(("ql3.cmd.", "ql3.worker.")):
            raise Ql3Error("invalid", "This dead letter does not say where it came from.")
        msg_id = secrets.token_hex(16)
        (error,) = await self.publish_many([(letter.subject, letter.payload, {**letter.headers, MSG_ID: msg_id})])
        if error is not None:
            raise error
        await dead.delete_dead(self._connection, sequence)
        return msg_id


class _PubAck(msgspec.Struct):
    stream: str = ""
    error: dict[str, Any] | None = None


_pub_ack = msgspec.json.Decoder(_PubAck)


def _stored(future: asyncio.Future[Msg]) -> Exception | None:
    if not future.done() or future.cancelled():
        return Ql3Error("unavailable", "The stream did not confirm in time.")
    failure = future.exception()
    if failure is not None:
        return failure if isinstance(failure, Exception) else ConnectionLost()
    message = future.result()
    if message.headers and message.headers.get("Status") == "503":
        return NoResponders()
    try:
        answer = _pub_ack.decode(message.data)
    except msgspec.DecodeError:
        return Ql3Error("unavailable", "The stream's answer could not be read.")
    if answer.error is not None:
        # For example a full disk or a full work queue: the row stays where it is and is sent again.
        return Ql3Error("unavailable", f"The stream refused the message ({answer.error.get('err_code', 0)}).")
    return None


def _refusal(payload: bytes) -> Ql3Error:
    try:
        body = decode(payload, ErrorAnswer)
    except Ql3Error:
        return Ql3Error("internal_error")
    if body.code not in REGISTRY:
        # Of a newer version than ours.
        return Ql3Error("internal_error", data={"code": body.code[:64]})
    return Ql3Error(body.code, body.detail, field=body.field, data=body.data)
