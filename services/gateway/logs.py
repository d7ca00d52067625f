"""Logs: exact bytes from wherever they are (the worker that writes them, or the store), whole or as they come.

Services hand out at most 256 KiB at a time; what is answered may be a file of any size, so it is passed on piece by
piece. A log moves from the worker to the store while it is read: each piece is asked for where it is now.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncGenerator
from typing import Any, Final, NamedTuple

import structlog

from schemas import endpoints
from schemas.artifacts import ArtifactRead
from schemas.errors import Ql3Error
from schemas.ids import is_id
from schemas.limits import LOG_RANGE_BYTES
from schemas.runs import ATTEMPT_ACTIVE, RUN_TERMINAL, Attempt, AttemptList, RunRead
from schemas.subjects import live_log
from schemas.workers import LogChunk, LogFollow, LogRead
from services.gateway.calls import Call
from services.gateway.front import ABORT
from services.gateway.streams import QUIET, QUIET_S, frame, patiently, while_admitted, woken
from services.kit.bus import Delivery
from services.kit.clock import monotonic_ms

RENEW_MS: Final = 10_000
"""The worker sends live chunks for 30 s after each request to follow."""
UNFOLLOWED_MS: Final = 1_000
"""How soon to look again while there is nothing to follow yet."""
CHUNKS: Final = 64
_ELSEWHERE: Final = ("not_found", "conflict", "unavailable", "invalid_transition", "secret_unavailable")

log: structlog.stdlib.BoundLogger = structlog.get_logger("ql3.gateway")


class Piece(NamedTuple):
    """Bytes at an offset; `total` is what there is so far, `ended` that no more will come."""

    offset: int
    data: bytes
    total: int
    ended: bool
    truncated: bool | None


async def require_reader(call: Call[Any]) -> None:
    """Workers answer the gateway without asking who reads; so policy is asked here."""
    await call.desk.policy.require(call.actor, call.project, "artifact.read")


async def find_attempt(call: Call[Any], run_id: str, wanted: str | None) -> Attempt | None:
    """An attempt by number or id, the latest by default; None while the run has none. Raises `not_found`."""
    question = AttemptList(actor=call.actor, project=call.project, run=run_id)
    attempts = (await call.ask(endpoints.RUNS_ATTEMPTS, question)).items
    if wanted is None:
        return max(attempts, key=lambda attempt: attempt.attempt, default=None)
    for attempt in attempts:
        if wanted in (attempt.id, str(attempt.attempt)):
            return attempt
    if is_id(wanted) or wanted.isdecimal():
        raise Ql3Error("not_found", "The run has no such attempt.", field="attempt")
    raise Ql3Error("invalid", "An attempt is a number or an id.", field="attempt")


async def read(call: Call[Any], attempt: Attempt, offset: int, length: int) -> Piece:
    """A range of at most 256 KiB. Raises `gone` (removed by retention) or `unavailable`.

    `truncated` of a lost attempt is None: what is there was kept, and nobody can say whether more was written.
    """
    piece = await _read(call, attempt, offset, length)
    if not piece.ended:
        return piece
    if piece.truncated is None:  # it ended while its worker was asked
        attempt = await find_attempt(call, attempt.run_id, attempt.id) or attempt
        if attempt.log is not None:
            piece = piece._replace(truncated=attempt.log.truncated)
    if attempt.status == "lost" and not attempt.late_receipt:
        return piece._replace(truncated=None)
    return piece


async def _read(call: Call[Any], attempt: Attempt, offset: int, length: int) -> Piece:
    if attempt.status in ATTEMPT_ACTIVE:
        return await _at_worker(call, attempt, offset, length)
    kept = attempt.log
    if kept is not None and kept.artifact_id is None:
        return Piece(offset, b"", 0, ended=True, truncated=kept.truncated)
    try:
        return await _at_store(call, attempt, offset, length)
    except Ql3Error as error:
        if error.code not in _ELSEWHERE:
            raise
        # Not there yet: the worker keeps it until the store has it.
        try:
            return await _at_worker(call, attempt, offset, length)
        except Ql3Error:
            if kept is None:
                # Lost with its worker: nobody knows what it had written.
                return Piece(offset, b"", 0, ended=True, truncated=None)
            raise error from None


async def _at_worker(call: Call[Any], attempt: Attempt, offset: int, length: int) -> Piece:
    if attempt.worker_id is None:
        return Piece(offset, b"", 0, ended=False, truncated=None)
    endpoint = endpoints.LOG_READ.bound(attempt.worker_id)
    try:
        found = await call.ask(endpoint, LogRead(attempt_id=attempt.id, offset=offset, length=length))
    except Ql3Error as error:
        if error.code == "not_found" and attempt.status in ATTEMPT_ACTIVE:
            return Piece(offset, b"", 0, ended=False, truncated=None)
        raise
    return Piece(found.offset, found.data, found.total, found.ended, found.truncated)


async def _at_store(call: Call[Any], attempt: Attempt, offset: int, length: int) -> Piece:
    question = ArtifactRead(actor=call.actor, project=call.project, attempt_id=attempt.id, offset=offset, length=length)
    found = await call.ask(endpoints.ARTIFACTS_READ, question)
    if found.artifact.state == "gone":
        raise Ql3Error("gone")
    return Piece(found.offset, found.data, found.artifact.size, ended=True, truncated=found.artifact.truncated)


async def pass_on(call: Call[Any], attempt: Attempt, first: Piece, end: int) -> AsyncGenerator[bytes]:
    """The bytes from the first piece up to `end`. Its length was told: when no more come, the connection is cut off, so
    that nobody takes a part for the whole."""
    pieces = while_admitted(call, lambda: require_reader(call), _pieces(call, attempt, first, end))
    try:
        async with contextlib.aclosing(pieces):
            async for data in pieces:
                yield data
    except Ql3Error as error:
        log.warning("a log was broken off", attempt=attempt.id, error=error.code)
        call.request.scope["state"][ABORT]()


async def _pieces(call: Call[Any], attempt: Attempt, piece: Piece, end: int) -> AsyncGenerator[bytes]:
    position = piece.offset
    while True:
        data = piece.data[: end - position]
        if data:
            yield data
            position += len(data)
        if position >= end:
            return
        piece = await _again(call, attempt, position, min(LOG_RANGE_BYTES, end - position))
        if not piece.data or piece.offset != position:
            raise Ql3Error("unavailable", "The rest of the log is not there.")


async def _again(call: Call[Any], attempt: Attempt, offset: int, length: int) -> Piece:
    with contextlib.suppress(Ql3Error):
        piece = await read(call, attempt, offset, length)
        if piece.data:
            return piece
    # It has moved to the store meanwhile; the attempt's row says so by now.
    fresh = await find_attempt(call, attempt.run_id, attempt.id)
    return await read(call, fresh or attempt, offset, length)


class _Live:
    """Live chunks that were heard; too many are dropped, the gap shows in the offsets."""

    def __init__(self) -> None:
        self.bell = asyncio.Event()
        self._chunks: list[LogChunk] = []

    async def heard(self, delivery: Delivery) -> None:
        if len(self._chunks) < CHUNKS:
            self._chunks.append(delivery.decode(LogChunk))
        self.bell.set()

    async def rung(self, _: Delivery) -> None:
        self.bell.set()

    def take(self, position: int) -> tuple[bytes, bool]:
        """The bytes that follow `position` without a gap, and whether the rest has to be read."""
        self.bell.clear()
        chunks, self._chunks = self._chunks, []
        data = bytearray()
        for chunk in chunks:
            skip = position + len(data) - chunk.offset
            if chunk.ended or skip < 0:
                return bytes(data), True
            data += chunk.data[skip:]
        return bytes(data), not chunks


async def follow(call: Call[Any], run_id: str, wanted: str | None, offset: int) -> AsyncGenerator[bytes]:
    """`chunk` with `offset` and base64 `data` as they come, from any offset; `end` when no more will come."""
    bus, project = call.desk.bus, call.project
    live = _Live()
    run_facts = await bus.on_event(f"ql3.evt.run.{project}.{run_id}.*", live.rung)
    chunks = None
    try:
        await bus.flush()
        attempt = await find_attempt(call, run_id, wanted)
        while attempt is None:
            run = (await call.ask(endpoints.RUNS_GET, RunRead(actor=call.actor, project=project, run=run_id))).run
            if run.status in RUN_TERMINAL:
                yield frame("end", {"offset": 0, "truncated": False})
                return
            if not await woken(call, live.bell):
                if call.desk.stopping.is_set():
                    return
                yield QUIET
            live.bell.clear()
            attempt = await patiently(call, lambda: find_attempt(call, run_id, wanted))
        chunks = await bus.subscribe(live_log(project, run_id, attempt.id), live.heard)
        await bus.flush()
        async for event in _follow(call, live, attempt, offset):
            yield event
    finally:
        # The second must not depend on the first: either wait may be cancelled.
        try:
            await call.desk.let_go(run_facts)
        finally:
            if chunks is not None:
                await call.desk.let_go(chunks)


async def _follow(call: Call[Any], live: _Live, attempt: Attempt, position: int) -> AsyncGenerator[bytes]:
    async def again_where() -> Attempt | None:
        return await find_attempt(call, attempt.run_id, attempt.id)

    renew_at_ms = 0
    quiet_since_ms = monotonic_ms()
    while not call.desk.stopping.is_set():
        now = monotonic_ms()
        active = attempt.status in ATTEMPT_ACTIVE
        if active and now >= renew_at_ms:
            following = await _ask_to_follow(call, attempt)
            renew_at_ms = now + (RENEW_MS if following else UNFOLLOWED_MS)
        piece = await _read_patiently(call, attempt, position)
        if piece is not None and piece.data:
            yield _chunk(piece.offset, piece.data)
            position = piece.offset + len(piece.data)
            continue
        if piece is not None and piece.ended and position >= piece.total:
            yield frame("end", {"offset": piece.total, "truncated": piece.truncated}, mark=position)
            return
        # All that is there was sent. From here on chunks come by themselves, until a gap, the end, or silence.
        until_ms = max(renew_at_ms if active else 0, now + UNFOLLOWED_MS)
        again = False
        while not again and (left_ms := until_ms - monotonic_ms()) > 0:
            if not await woken(call, live.bell, quiet_s=left_ms / 1000):
                break
            data, again = live.take(position)
            if data:
                yield _chunk(position, data)
                position += len(data)
        if monotonic_ms() - quiet_since_ms > QUIET_S * 1000:
            quiet_since_ms = monotonic_ms()
            yield QUIET
        attempt = await patiently(call, again_where) or attempt


async def _ask_to_follow(call: Call[Any], attempt: Attempt) -> bool:
    if attempt.worker_id is None:
        return False
    endpoint = endpoints.LOG_FOLLOW.bound(attempt.worker_id)
    try:
        await call.ask(endpoint, LogFollow(attempt_id=attempt.id, project=call.project, run_id=attempt.run_id))
    except Ql3Error:
        return False
    return True


async def _read_patiently(call: Call[Any], attempt: Attempt, position: int) -> Piece | None:
    """A range, or None while whoever has the log does not answer."""
    try:
        return await read(call, attempt, position, LOG_RANGE_BYTES)
    except Ql3Error as error:
        if error.code in ("unavailable", "database_unavailable", "capacity", "not_found"):
            return None
        raise


def _chunk(offset: int, data: bytes) -> bytes:
    body = {"offset": offset, "data": base64.b64encode(data).decode()}
    return frame("chunk", body, mark=offset + len(data))
