"""The pull loop of a durable consumer: fetch, group by type, hand over batches, then ack, nak or bury.

`num_delivered` is looked at before decoding, so that a message that kills its reader is buried by the next one. An ack
is sent only after the handler has returned, which means after its commit.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple, Union, cast

import msgspec
import structlog
from nats.aio.msg import Msg

from schemas.base import decode, schema_of
from schemas.errors import Ql3Error
from schemas.limits import BATCH_ITEMS, MAX_DELIVERIES
from services.kit.bus.connection import BACKOFF_MAX_S, BACKOFF_MIN_S, Connection, ConnectionLost, Subscription
from services.kit.bus.envelope import TRACEPARENT, place_of, set_traceparent
from services.kit.bus.streams import NANO, ConsumerSpec, Streams


class Spoken(NamedTuple):
    """An order with who spoke: the last token of its subject, which only the NATS user of that name may use."""

    speaker: str
    message: Any


BatchHandler = Callable[[list[Any]], Awaitable["Sequence[BaseException | None] | None"]]
Bury = Callable[[Msg, str, str, int], Awaitable[bool]]

PULL_EXPIRES_S: Final = 30
HEARTBEAT_EDGE_S: Final = 5
HEARTBEAT_S: Final = 2
"""Shorter where a server can be lost together with the pulls that it holds."""
PULL_BYTES: Final = 8 * 1024 * 1024
NAK_MAX_S: Final = 60.0

_AT_ONCE: Final = frozenset({"message_invalid", "schema_unsupported"})
"""Codes by which a handler says that no repetition will ever help."""

_NOT_ITS_FAULT: Final = frozenset({"database_unavailable"})
"""Codes by which no order fails for good: without its database a service can do nothing else meanwhile either."""

_Item = tuple[Msg, Any]

log: structlog.stdlib.BoundLogger = structlog.get_logger("ql3.bus")


class Consumer:
    """Reads one durable consumer until stopped; survives restarts and wipes of the server."""

    def __init__(
        self,
        connection: Connection,
        streams: Streams,
        spec: ConsumerSpec,
        handlers: Mapping[type[msgspec.Struct], BatchHandler],
        bury: Bury,
        spoken: Collection[type[msgspec.Struct]] = (),
    ) -> None:
        if not handlers:
            raise ValueError("a consumer needs handlers")
        self._connection = connection
        self._streams = streams
        self._spec = spec
        self._handlers = dict(handlers)
        self._decodable: Any = Union[tuple(self._handlers)]  # noqa: UP007 - built at run time
        self._bury = bury
        self._spoken = frozenset(spoken)
        self._next = f"$JS.API.CONSUMER.MSG.NEXT.{spec.stream}.{spec.name}"
        self._inbox = f"{connection.inbox}.pull-{spec.name}-{id(self):x}"
        self._arrived: asyncio.Queue[Msg | None] = asyncio.Queue()
        self._pulls = 0
        self._subscription: Subscription | None = None
        self._task: asyncio.Task[None] | None = None
        self._in_hand: list[Msg] = []
        self._working = False
        self._declared = False
        self._stopping = False
        self._ending = asyncio.Event()
        for message_type in self._handlers:
            schema_of(message_type)

    async def start(self) -> None:
        """Declare the consumer and begin reading."""
        self._subscription = await self._connection.subscribe(f"{self._inbox}.*", self._arrive)
        self._connection.on_lost(self._wake)
        await self._declare()
        self._task = asyncio.create_task(self._run(), name=f"consumer {self._spec.name}")

    async def stop(self, timeout: float = 10.0) -> None:
        """Fetch no more; let the batch at work end within `timeout` seconds and hand the rest back to the server."""
        self._stopping = True
        self._ending.set()
        if self._subscription is not None:
            # No interest, no more messages: an open pull would otherwise send orders to nobody.
            await self._subscription.close()
        if self._task is not None:
            if self._working:
                await asyncio.wait({self._task}, timeout=timeout)
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=timeout)
        while not self._arrived.empty():
            message = self._arrived.get_nowait()
            if message is not None and place_of(message.reply) is not None:
                self._in_hand.append(message)
        for message in self._in_hand:
            await self._answer(message, b"-NAK")

    def health(self) -> list[str]:
        """Why orders are not read just now; empty when they are."""
        return [] if self._declared else ["orders are not read: the consumer is not declared"]

    async def _declare(self) -> None:
        self._declared = False
        await self._streams.declare_consumer(self._spec)
        self._declared = True

    async def _arrive(self, message: Msg) -> None:
        self._arrived.put_nowait(message)

    def _wake(self) -> None:
        self._arrived.put_nowait(None)

    async def _run(self) -> None:
        backoff = 0.0
        while not self._stopping:
            try:
                healthy = await self._fetch()
                await self._work_off()
                if healthy:
                    backoff = 0.0
                    continue
                if not self._stopping:
                    await self._declare()
            except asyncio.CancelledError:
                if self._stopping:
                    raise
                log.warning("consumer was cancelled from within", consumer=self._spec.name)
            except ConnectionLost:
                pass
            except Exception:
                log.exception("consumer failed", consumer=self._spec.name)
            backoff = min(BACKOFF_MAX_S, max(BACKOFF_MIN_S, backoff * 2))
            await asyncio.sleep(backoff)

    async def _work_off(self) -> None:
        self._working = True
        try:
            messages, self._in_hand = self._in_hand, []
            await self._handle(messages)
        finally:
            self._working = False

    async def _fetch(self) -> bool:
        """Take what is there at once, or else the first that comes; answer whether the consumer itself is well.

        `no_wait` with `expires` waits for the first message and ends with a 404 behind the last that is there: no timer
        stands between a message and its handler.
        """
        self._pulls += 1
        reply = f"{self._inbox}.{self._pulls:x}"
        heartbeat_s = HEARTBEAT_EDGE_S if self._connection.options.edge else HEARTBEAT_S
        request = {
            "batch": BATCH_ITEMS,
            "max_bytes": PULL_BYTES,
            "expires": PULL_EXPIRES_S * NANO,
            "idle_heartbeat": heartbeat_s * NANO,
            "no_wait": True,
        }
        connection = self._connection
        await connection.publish(self._next, msgspec.json.encode(request), None, reply=reply, timeout=PULL_EXPIRES_S)
        generation = connection.generation
        messages = self._in_hand
        while len(messages) < BATCH_ITEMS:
            try:
                async with asyncio.timeout(3 * heartbeat_s):
                    message = await self._arrived.get()
            except TimeoutError:
                # Not even a heartbeat: the pull was lost, or the consumer with its stream.
                return False
            if message is None:
                if connection.connected and connection.generation == generation:
                    continue  # said of an earlier connection
                return False
            status = (message.headers or {}).get("Status") if not message.data else None
            if status is None or place_of(message.reply) is not None:
                messages.append(message)
            elif status == "100":
                continue  # a heartbeat
            elif message.subject != reply:
                # The end of an older pull that was given up. Its orders must not wait for the end of this one.
                if messages:
                    return True
            elif status in ("404", "408"):
                return True
            else:
                log.info("pull ended", consumer=self._spec.name, status=status)
                return False
        return True

    async def _handle(self, messages: list[Msg]) -> None:
        """Work off a batch; the server is told now and then that it is still at work."""
        groups: dict[type[msgspec.Struct], list[_Item]] = {}
        for message in messages:
            delivered = deliveries(message)
            if delivered > MAX_DELIVERIES:
                await self._end(message, "too-many-deliveries", "", delivered)
                continue
            try:
                decoded: Any = decode(message.data, self._decodable)
            except Ql3Error as error:
                await self._end(message, "undecodable", error.field or "", delivered)
                continue
            kind = cast("type[msgspec.Struct]", type(decoded))
            if kind in self._spoken:
                decoded = Spoken(message.subject.rpartition(".")[2], decoded)
            groups.setdefault(kind, []).append((message, decoded))
        waiting = {id(message): message for items in groups.values() for message, _ in items}
        work = asyncio.create_task(self._work(groups, waiting))
        try:
            while not work.done():
                _, still = await asyncio.wait({work}, timeout=self._connection.options.ack_wait_s / 3)
                if still:
                    for message in list(waiting.values()):
                        await self._answer(message, b"+WPI")
        except asyncio.CancelledError:
            work.cancel()
            raise
        work.result()

    async def _work(self, groups: dict[type[msgspec.Struct], list[_Item]], waiting: dict[int, Msg]) -> None:
        for message_type, items in groups.items():
            backoff = BACKOFF_MIN_S
            while items:
                again: list[_Item] = []
                for item, error in zip(items, await self._run_batch(message_type, items), strict=True):
                    if isinstance(error, Ql3Error) and error.code in _NOT_ITS_FAULT:
                        again.append(item)
                        continue
                    waiting.pop(id(item[0]), None)
                    if error is None:
                        await self._answer(item[0], b"+ACK")
                    else:
                        await self._failed(item[0], error)
                items = again
                if not items:
                    break
                # Handing the orders back would use up their deliveries in an outage of ours, and bury what is sound.
                log.warning("orders wait for the database", consumer=self._spec.name, items=len(items))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(backoff):
                        await self._ending.wait()
                if self._stopping:
                    for message, _ in items:
                        waiting.pop(id(message), None)
                        await self._answer(message, b"-NAK")
                    break
                backoff = min(BACKOFF_MAX_S, backoff * 2)

    async def _run_batch(
        self, message_type: type[msgspec.Struct], items: list[_Item]
    ) -> Sequence[BaseException | None]:
        handler = self._handlers[message_type]
        outcome = await self._call(handler, items)
        if isinstance(outcome, BaseException):
            if len(items) == 1 or (isinstance(outcome, Ql3Error) and outcome.code in _NOT_ITS_FAULT):
                return [outcome] * len(items)
            log.warning("a batch failed, trying its items one by one", schema=schema_of(message_type), items=len(items))
            outcomes: list[BaseException | None] = []
            for item in items:
                single = await self._call(handler, [item])
                outcomes.append(single if single is None or isinstance(single, BaseException) else single[0])
            return outcomes
        return outcome if outcome is not None else [None] * len(items)

    async def _call(
        self, handler: BatchHandler, items: list[_Item]
    ) -> Sequence[BaseException | None] | BaseException | None:
        set_traceparent((items[0][0].headers or {}).get(TRACEPARENT) if len(items) == 1 else None)
        try:
            outcome = await handler([decoded for _, decoded in items])
        except Exception as error:
            return error
        if outcome is not None and len(outcome) != len(items):
            return TypeError("a batch handler answers for every item or returns None")
        return outcome

    async def _failed(self, message: Msg, error: BaseException) -> None:
        delivered = deliveries(message)
        code = error.code if isinstance(error, Ql3Error) else type(error).__name__
        if code in _AT_ONCE:
            await self._end(message, code, "", delivered)
            return
        log.warning(
            "an order failed and will be delivered again",
            subject=message.subject,
            deliveries=delivered,
            error=code,
            exc_info=None if isinstance(error, Ql3Error) else error,
        )
        await self._nak(message, delivered)

    async def _end(self, message: Msg, reason: str, error: str, delivered: int) -> None:
        if await self._bury(message, reason, error, delivered):
            await self._answer(message, b"+TERM")
        else:
            await self._nak(message, delivered)

    async def _nak(self, message: Msg, delivered: int) -> None:
        delay = min(NAK_MAX_S, self._connection.options.redelivery_s * 2.0 ** min(delivered - 1, 8))
        await self._answer(message, b"-NAK " + msgspec.json.encode({"delay": int(delay * NANO)}))

    async def _answer(self, message: Msg, verdict: bytes) -> None:
        try:
            await self._connection.publish(message.reply, verdict, None, timeout=0.0)
        except ConnectionLost:
            # It is delivered again after its ack wait, and its handler is idempotent.
            log.info("an ack was lost with the connection", subject=message.subject)


def deliveries(message: Msg) -> int:
    """How many times a JetStream message was delivered, this time included."""
    place = place_of(message.reply)
    return place.delivered if place is not None else 1
