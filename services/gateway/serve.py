"""How a request becomes a call of an operation, and its outcome an answer."""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qsl

import msgspec
import structlog
from litestar import Request, Response
from litestar.exceptions import HTTPException
from litestar.handlers import HTTPRouteHandler

from schemas.errors import Ql3Error
from schemas.strict import read_json, read_plain, refuse_unkept
from services.gateway.authenticate import Principal
from services.gateway.calls import Call
from services.gateway.desk import Desk
from services.gateway.front import PLACE
from services.gateway.operations import Answer, Nothing, Operation
from services.gateway.peers import peer_of
from services.gateway.problem import MEDIA_TYPE, extra_headers, problem_body
from services.gateway.store import idempotency
from services.kit.bus import current_traceparent
from services.kit.ids import new_id

BODY_S = 30.0
"""How long a client may take to send a body."""
KEPT_BODY_BYTES = 64 * 1024
KEY_HEADER = "idempotency-key"
UNREAD = "ql3.unread"
"""In the scope's state: a body may still be on its way."""

log: structlog.stdlib.BoundLogger = structlog.get_logger("ql3.gateway")


def handlers(operations: Sequence[Operation], desk: Desk) -> list[HTTPRouteHandler]:
    """A Litestar handler for each operation."""
    return [_handler(operation, desk) for operation in operations]


def _handler(operation: Operation, desk: Desk) -> HTTPRouteHandler:
    async def handle(request: Request[Any, Any, Any]) -> Response[Any]:
        return await _serve(operation, desk, request)

    # The annotations are text in this module; the router reads them.
    handle.__annotations__ = {"request": Request, "return": Response}
    return HTTPRouteHandler(
        operation.path.replace("}", ":str}"),
        http_method=operation.method,
        name=operation.name,
        include_in_schema=False,
        status_code=operation.status,
    )(handle)


async def _serve(operation: Operation, desk: Desk, request: Request[Any, Any, Any]) -> Response[Any]:
    request.scope["state"][UNREAD] = operation.method != "GET"
    headers = headers_of(request)
    peer = peer_of(request.scope, desk.proxies)
    principal: Principal | None = None
    if not operation.public:
        principal = await desk.authenticator.authenticate(operation.method, headers, peer)
    raw = b""
    if operation.method != "GET":
        raw = await _body(request, headers, operation.body_bytes, known=principal is not None)
    call: Call[Any] = Call(
        desk=desk,
        request=request,
        input=_input(operation, request, raw),
        principal=principal,
        peer=peer,
        idempotency_key=_key(headers),
    )
    if call.idempotency_key is None or operation.keep != "kept" or principal is None:
        return _answer(operation.status, await operation.run(call))
    return await _once(operation, call, raw)


async def _once(operation: Operation, call: Call[Any], raw: bytes) -> Response[Any]:
    """Runs a change whose repeats get the answer of the first. While it is not answered, a repeat asks the owner again
    with the same mutation id: the owner makes it once."""
    actor, key = f"{call.actor.type}/{call.actor.id}", call.idempotency_key or ""
    told = hashlib.sha256(b"\0".join((operation.method.encode(), call.request.scope["raw_path"], raw))).hexdigest()
    database, now = call.desk.database, call.desk.clock.now_ms()
    fresh = new_id()
    record = await database.transact(lambda tx: idempotency.begin(tx, actor, key, told, fresh, now))
    if record.request_digest != told:
        raise Ql3Error("idempotency_conflict", field=KEY_HEADER)
    if record.status is not None and record.body is not None:
        return Response(
            record.body.encode(), status_code=record.status, media_type="application/json",
            headers={"Idempotency-Replayed": "true"},
        )  # fmt: skip
    call.mutation_id = record.mutation_id
    answer = _answer(operation.status, await operation.run(call))
    content: bytes = answer.content
    if len(content) <= KEPT_BODY_BYTES:
        await database.transact(lambda tx: idempotency.answer(tx, actor, key, operation.status, content.decode()))
    return answer


def headers_of(request: Request[Any, Any, Any]) -> dict[str, str]:
    """The request's headers. Raises `invalid` when one that decides something came twice."""
    headers: dict[str, str] = {}
    for name, value in request.scope["headers"]:
        text = name.decode("latin-1")
        if text in headers and text in ("authorization", "content-length", "content-type", "cookie", KEY_HEADER):
            raise Ql3Error("invalid", "This header was sent twice.", field=text)
        headers[text] = value.decode("latin-1")
    return headers


async def _body(request: Request[Any, Any, Any], headers: dict[str, str], limit: int, *, known: bool) -> bytes:
    raw = await (body_of if known else anonymous_body_of)(request, headers, limit)
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    # A form of another site can send text/plain without asking; JSON it cannot.
    if raw and kind != "application/json":
        raise Ql3Error("invalid", "Send application/json.", field="content-type")
    return raw


async def body_of(request: Request[Any, Any, Any], headers: dict[str, str], limit: int) -> bytes:
    """A request's body, of any kind. Raises `too_large`, or `invalid` when it does not arrive."""
    request.scope["state"][UNREAD] = True
    declared = headers.get("content-length")
    if declared is not None and (not declared.isascii() or not declared.isdigit() or int(declared) > limit):
        raise Ql3Error("too_large", f"The body may have {limit} bytes.", data={"limit": limit})
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise Ql3Error("too_large", f"The body may have {limit} bytes.", data={"limit": limit})
                parts.append(part)
    except TimeoutError:
        raise Ql3Error("invalid", f"The body did not arrive within {BODY_S:.0f} s.") from None
    request.scope["state"][UNREAD] = False
    return b"".join(parts)


async def anonymous_body_of(request: Request[Any, Any, Any], headers: dict[str, str], limit: int) -> bytes:
    """The same, of a client that nobody knows yet: while it sends, it takes nobody's place. Raises `capacity` too."""
    place = request.scope["state"][PLACE]
    place.give_back()
    body = await body_of(request, headers, limit)
    place.take()
    return body


def _input(operation: Operation, request: Request[Any, Any, Any], raw: bytes) -> Any:
    if operation.method != "GET":
        if request.scope["query_string"]:
            raise Ql3Error("unknown_field", "This operation has no query.", field="query")
        return read_json(raw or b"{}", operation.reads, max_bytes=operation.body_bytes)
    return _query(request.scope["query_string"], operation.reads)


def _query(raw: bytes, reads: type[msgspec.Struct]) -> Any:
    try:
        pairs = parse_qsl(raw.decode("ascii"), keep_blank_values=True, strict_parsing=bool(raw), max_num_fields=32)
    except ValueError:
        raise Ql3Error("invalid", "The query cannot be read.", field="query") from None
    plain: dict[str, Any] = {}
    for name, text in pairs:
        if name in plain:
            raise Ql3Error("invalid", "This was given twice.", field=name)
        plain[name] = text
    if reads is Nothing and plain:
        raise Ql3Error("unknown_field", "This operation has no query.", field=next(iter(plain)))
    known = _lists(reads)
    for name, text in plain.items():
        if name not in known:
            return read_plain(plain, reads)  # refuses, with the name that was meant
        if known[name]:
            plain[name] = text.split(",")
    refuse_unkept(plain)
    try:
        found = msgspec.convert(plain, reads, strict=False)
        refuse_unkept(msgspec.to_builtins(found))
        return found
    except msgspec.ValidationError as error:
        what, found, path = str(error).rpartition(" - at `$")
        field = path.rstrip("`").lstrip(".") if found else None
        raise Ql3Error("invalid", (what or str(error)) + ".", field=field) from None


@functools.cache
def _lists(reads: type[msgspec.Struct]) -> dict[str, bool]:
    """The fields of a query, and whether each is a list (`a,b`)."""
    return {field.encode_name: "tuple[" in str(field.type) for field in msgspec.structs.fields(reads)}


def _key(headers: dict[str, str]) -> str | None:
    key = headers.get(KEY_HEADER)
    if key is not None and not (0 < len(key) <= 255 and key.isascii() and key.isprintable()):
        raise Ql3Error("invalid", "Use 1 to 255 printable ASCII characters.", field=KEY_HEADER)
    return key


def _answer(status: int, outcome: Any) -> Response[Any]:
    if isinstance(outcome, Response):
        return outcome  # pyright: ignore[reportUnknownVariableType]
    headers: dict[str, str] = {}
    if isinstance(outcome, Answer):
        outcome, headers = outcome.body, outcome.headers
    return Response(msgspec.json.encode(outcome), status_code=status, media_type="application/json", headers=headers)


def on_error(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """Every error as a problem; what is not registered is logged and shows nothing of itself."""
    registered = _registered(error)
    headers = extra_headers(registered)
    if request.scope["state"].get(UNREAD) or registered.kind.status >= 500:
        # What else the client is sending is not read to its end.
        headers["Connection"] = "close"
    return Response(
        problem_body(registered), status_code=registered.kind.status, media_type=MEDIA_TYPE, headers=headers
    )


def _registered(error: Exception) -> Ql3Error:
    if isinstance(error, Ql3Error):
        return error
    if isinstance(error, HTTPException):
        if error.status_code == 404:
            return Ql3Error("not_found", "There is no such route.", field="path")
        if error.status_code == 405:
            return Ql3Error("invalid", "This route does not have this method.", field="method")
        if error.status_code < 500:
            return Ql3Error("invalid")
    log.error("a request failed", error=type(error).__name__, trace=current_traceparent(), exc_info=error)
    return Ql3Error("internal_error")
