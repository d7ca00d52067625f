"""Logs. They are at the worker while they are written, and in retention's store afterwards."""

from __future__ import annotations

from typing import Annotated, Any

from litestar import Response
from litestar.response import Stream
from msgspec import Meta

from schemas import endpoints, limits
from schemas.base import Value
from schemas.runs import RUN_TERMINAL, RunRead
from services.gateway.calls import Call
from services.gateway.front import OPEN
from services.gateway.logs import Piece, find_attempt, follow, pass_on, read, require_reader
from services.gateway.operations import Operations
from services.gateway.streams import open_answer

operations = Operations("logs")


class LogQuery(Value, frozen=True, kw_only=True):
    """Which attempt (number or id; the latest by default) and which bytes (all by default)."""

    attempt: Annotated[str, Meta(max_length=36)] | None = None
    offset: Annotated[int, Meta(ge=0)] = 0
    length: Annotated[int, Meta(ge=0)] | None = None


class FollowQuery(Value, frozen=True, kw_only=True):
    """Which attempt, and from which byte."""

    attempt: Annotated[str, Meta(max_length=36)] | None = None
    offset: Annotated[int, Meta(ge=0)] = 0


@operations.get("/projects/{project}/runs/{run}/log", LogQuery, None, produces="bytes")
async def read_log(call: Call[LogQuery]) -> Response[Any]:
    """Exactly the bytes that the process wrote, as far as they are there and kept."""
    await require_reader(call)
    run_id, query = call.id("run"), call.input
    attempt = await find_attempt(call, run_id, query.attempt)
    if attempt is None:
        run = (await call.ask(endpoints.RUNS_GET, RunRead(actor=call.actor, project=call.project, run=run_id))).run
        nothing = Piece(query.offset, b"", 0, ended=run.status in RUN_TERMINAL, truncated=False)
        return Response(b"", media_type="application/octet-stream", headers=_headers(nothing))
    wanted = limits.LOG_RANGE_BYTES if query.length is None else query.length
    piece = await read(call, attempt, query.offset, max(1, min(limits.LOG_RANGE_BYTES, wanted)))
    end = piece.total if query.length is None else min(piece.total, query.offset + query.length)
    end = max(end, query.offset)
    if end - query.offset <= len(piece.data):
        body = piece.data[: end - query.offset]
        return Response(body, media_type="application/octet-stream", headers=_headers(piece))
    content = pass_on(call, attempt, piece, end)
    call.request.scope["state"][OPEN] = content
    headers = {**_headers(piece), "Content-Length": str(end - query.offset)}
    return Stream(content, media_type="application/octet-stream", headers=headers)


@operations.get("/projects/{project}/runs/{run}/log/stream", FollowQuery, None, produces="events")
async def follow_log(call: Call[FollowQuery]) -> Response[Any]:
    """The log as it is written: events `chunk` (`offset`, base64 `data`), then `end`. `Last-Event-ID` resumes."""
    await require_reader(call)
    run_id, query = call.id("run"), call.input
    if query.attempt is not None:
        await find_attempt(call, run_id, query.attempt)
    else:
        await call.ask(endpoints.RUNS_GET, RunRead(actor=call.actor, project=call.project, run=run_id))
    mark = call.request.headers.get("last-event-id", "")
    offset = int(mark) if mark.isascii() and mark.isdecimal() and len(mark) < 16 else query.offset
    return open_answer(call, follow(call, run_id, query.attempt, offset), lambda: require_reader(call))


def _headers(piece: Piece) -> dict[str, str]:
    truncated = "unknown" if piece.truncated is None else str(piece.truncated).lower()
    return {
        "Ql3-Log-Offset": str(piece.offset),
        "Ql3-Log-Total": str(piece.total),
        "Ql3-Log-Ended": str(piece.ended).lower(),
        "Ql3-Log-Truncated": truncated,
        "Content-Disposition": 'attachment; filename="run.log"',
    }
