"""Streams and durable consumers: declared from one table, created when absent, never changed by a running service."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final, cast

import msgspec
import structlog

from schemas.errors import Ql3Error
from schemas.subjects import COMMANDS, STREAMS, WORKERS, Stream
from services.kit.bus.connection import BACKOFF_MAX_S, BACKOFF_MIN_S, Connection, ConnectionLost, NoResponders

NANO: Final = 1_000_000_000
MAX_ACK_PENDING: Final = 10_000
DUPLICATE_WINDOW_S: Final = 120
WORKER_INACTIVE_S: Final = 3600
API_TIMEOUT_S: Final = 2.0

_STREAM_NOT_FOUND = 10059
_STREAM_DIFFERS = 10058
_CONSUMER_DIFFERS = 10148
_PASSING = frozenset({10005, 10008, 10009})
"""No peers yet, temporarily unavailable, not the leader: a cluster that has not chosen who leads."""

log: structlog.stdlib.BoundLogger = structlog.get_logger("ql3.bus")


class JetStreamRefusal(Exception):  # noqa: N818 - the server's own answer, looked at by code
    """JetStream answered an API request with an error. `code` is its number, `text` its description."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code} {text}")
        self.code = code
        self.text = text


class ConsumerSpec(msgspec.Struct, frozen=True):
    """One durable pull consumer: its stream, name and subjects, and after how long without interest it goes."""

    stream: str
    name: str
    filter: str
    inactive_s: int | None = None


def command_consumer(service: str) -> ConsumerSpec:
    """The one consumer of a service's orders. Finer, overlapping filters on a work queue are refused by the server."""
    return ConsumerSpec(COMMANDS.name, service, f"ql3.cmd.{service}.>")


def worker_consumer(worker: str) -> ConsumerSpec:
    """The consumer of one worker's orders; the server drops it an hour after the worker was last seen."""
    return ConsumerSpec(WORKERS.name, worker, f"ql3.worker.{worker}.>", WORKER_INACTIVE_S)


async def jetstream_api(
    connection: Connection, operation: str, body: Mapping[str, Any] | None = None, *, timeout: float = API_TIMEOUT_S
) -> dict[str, Any]:
    """One JetStream API request. Raises `JetStreamRefusal`, `ConnectionLost`, `NoResponders`, `TimeoutError`."""
    payload = msgspec.json.encode(body) if body is not None else b""
    message = await connection.request(f"$JS.API.{operation}", payload, timeout=timeout)
    answer = cast("dict[str, Any]", msgspec.json.decode(message.data))
    error = cast("dict[str, Any] | None", answer.get("error"))
    if error is not None:
        raise JetStreamRefusal(int(error.get("err_code", 0)), str(error.get("description", ""))[:300])
    return answer


def stream_config(stream: Stream, *, edge: bool, replicas: int) -> dict[str, Any]:
    """A stream's configuration as the JetStream API takes it."""
    return {
        "name": stream.name,
        "subjects": list(stream.subjects),
        "retention": stream.retention,
        "storage": "file",
        "discard": stream.discard,
        "max_age": (stream.max_age_s or 0) * NANO,
        "max_bytes": stream.max_bytes_edge if edge else stream.max_bytes,
        "max_msgs": -1,
        "max_msg_size": -1,
        "max_consumers": -1,
        "num_replicas": replicas,
        "duplicate_window": DUPLICATE_WINDOW_S * NANO,
        "allow_direct": False,
        "deny_purge": False,
    }


def consumer_config(spec: ConsumerSpec, ack_wait_s: float) -> dict[str, Any]:
    """A consumer's configuration as the JetStream API takes it."""
    config: dict[str, Any] = {
        "name": spec.name,
        "durable_name": spec.name,
        "ack_policy": "explicit",
        "deliver_policy": "all",
        "ack_wait": int(ack_wait_s * NANO),
        # A bound here would strand a message in the work queue for ever; the kit counts deliveries itself.
        "max_deliver": -1,
        "max_ack_pending": MAX_ACK_PENDING,
        "filter_subject": spec.filter,
    }
    if spec.inactive_s is not None:
        config["inactive_threshold"] = spec.inactive_s * NANO
    return config


class Streams:
    """Declares streams and consumers on one connection, again after a wipe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.declares = True
        """Whether this process may declare streams; workers may not, and wait until a service has."""
        self._lock = asyncio.Lock()
        self._declared = 0

    @property
    def declared(self) -> int:
        """How many times the streams were declared; hand it to `redeclare` to say what a failure was seen under."""
        return self._declared

    async def ensure(self) -> None:
        """Create every stream that is absent. A stream that exists, even with other bounds, is left as it is."""
        options = self._connection.options
        for stream in STREAMS:
            config = stream_config(stream, edge=options.edge, replicas=options.replicas)
            try:
                answer = await jetstream_api(self._connection, f"STREAM.CREATE.{stream.name}", config)
                if answer.get("did_create"):
                    log.info("stream created", stream=stream.name)
            except JetStreamRefusal as refusal:
                if refusal.code == _STREAM_DIFFERS:
                    log.debug("stream differs from its declaration", stream=stream.name)
                    continue
                if refusal.code in _PASSING:
                    raise Ql3Error("unavailable", f"The stream {stream.name} cannot be created yet.") from refusal
                raise Ql3Error(
                    "setup_invalid", f"The stream {stream.name} cannot be created: {refusal.text}.", field="nats"
                ) from refusal
        self._declared += 1

    async def redeclare(self, seen: int) -> None:
        """Declare again unless somebody did since `seen`. Raises what `ensure` raises."""
        if not self.declares:
            raise Ql3Error("unavailable", "The streams are not declared.")
        async with self._lock:
            if self._declared == seen:
                await self.ensure()

    async def ensure_consumer(self, spec: ConsumerSpec) -> None:
        """Create a consumer when absent; one that exists is left as it is. Raises as `jetstream_api` does."""
        body = {
            "stream_name": spec.stream,
            "action": "create",
            "config": consumer_config(spec, self._connection.options.ack_wait_s),
        }
        try:
            await jetstream_api(self._connection, f"CONSUMER.CREATE.{spec.stream}.{spec.name}.{spec.filter}", body)
        except JetStreamRefusal as refusal:
            if refusal.code != _CONSUMER_DIFFERS:
                raise

    async def declare_consumer(self, spec: ConsumerSpec) -> None:
        """Have the streams and one consumer, whatever was wiped; tries for ever, 50 ms to 2 s apart."""
        backoff = BACKOFF_MIN_S
        while True:
            seen = self._declared
            try:
                await self.ensure_consumer(spec)
                return
            except JetStreamRefusal as refusal:
                if refusal.code == _STREAM_NOT_FOUND:
                    cause = "stream is absent"
                    try:
                        await self.redeclare(seen)
                        continue
                    except (TimeoutError, Ql3Error, ConnectionLost, NoResponders) as error:
                        cause = str(error) or type(error).__name__
                else:
                    cause = refusal.text
            except (TimeoutError, ConnectionLost, NoResponders) as error:
                cause = type(error).__name__
            log.warning("consumer cannot be declared yet", consumer=spec.name, cause=cause)
            await asyncio.sleep(backoff)
            backoff = min(BACKOFF_MAX_S, backoff * 2)

    async def migrate(self) -> list[str]:
        """Bring existing streams to their declaration, creating absent ones; returns the names of those changed.

        Only `ql3 migrate` calls this: a rolling upgrade has two versions of the services running, and they must not
        undo each other's bounds.
        """
        changed: list[str] = []
        for stream in STREAMS:
            try:
                if await self._bring(stream):
                    changed.append(stream.name)
            except JetStreamRefusal as refusal:
                raise Ql3Error(
                    "setup_invalid", f"The stream {stream.name} cannot be changed: {refusal.text}.", field="nats"
                ) from refusal
        return changed

    async def _bring(self, stream: Stream) -> bool:
        options = self._connection.options
        config = stream_config(stream, edge=options.edge, replicas=options.replicas)
        try:
            answer = await jetstream_api(self._connection, f"STREAM.INFO.{stream.name}")
        except JetStreamRefusal as refusal:
            if refusal.code != _STREAM_NOT_FOUND:
                raise
            await jetstream_api(self._connection, f"STREAM.CREATE.{stream.name}", config)
            return True
        present = cast("dict[str, Any]", answer["config"])
        if all(present.get(key, _default_of(value)) == value for key, value in config.items()):
            return False
        await jetstream_api(self._connection, f"STREAM.UPDATE.{stream.name}", {**present, **config})
        return True


def _default_of(value: object) -> object:
    """What an absent field means in the server's answer: false or zero."""
    if isinstance(value, bool):
        return False
    return 0 if isinstance(value, int) else None
