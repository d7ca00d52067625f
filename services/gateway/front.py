"""The outermost layer: what is refused before anything of ours reads it, and what every answer carries.

Paths are compared as sent. Nothing is decoded, folded or collapsed, so there is one spelling of each route and no
second way round the sign-in.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from schemas.errors import Ql3Error
from services.gateway.problem import MEDIA_TYPE, extra_headers, problem_body
from services.gateway.settings import GatewaySettings, is_address, is_loopback
from services.kit.bus.envelope import set_traceparent

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

URL_BYTES: Final = 2048
SEND_STALL_S: Final = 60.0
"""A reader that takes nothing for this long is let go."""
PLACE: Final = "ql3.place"
"""In the scope's state: the request's `Place`."""

OPEN: Final = "ql3.open"
"""In the scope's state: the generator behind an open answer, to be closed when its client is gone."""

ABORT: Final = "ql3.abort"
"""In the scope's state: cuts the connection off at once, whatever is still to be sent."""

_PATH = re.compile(rb"(?:/[A-Za-z0-9_.:@~-]+)+|/")
_DOTS = re.compile(rb"/\.\.?(?:/|$)")
_TRACE = re.compile(rb"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_HOST = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([A-Za-z0-9._-]+))(?::\d{1,5})?")

HEADERS: Final = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        b"manifest-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
)


class Place:
    """A request's place among those that are worked on; what waits for its client gives it back meanwhile."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._held = False

    def take(self) -> None:
        """Raises `capacity` when there is none."""
        if not self._held and self._front.taken >= self._front.places:
            raise Ql3Error("capacity", "Too many requests are being worked on.")
        self._front.taken += not self._held
        self._held = True

    def give_back(self) -> None:
        """Somebody else may be worked on."""
        self._front.taken -= self._held
        self._held = False


class Front:
    """Wraps the application; `/livez` and `/readyz` pass whatever the load is."""

    def __init__(self, app: App, settings: GatewaySettings) -> None:
        self._app = app
        self.places = settings.in_flight
        self.taken = 0
        self._hosts = {host.lower() for host in settings.allowed_hosts}
        self._any_host = not self._hosts and not is_loopback(settings.address[0])
        hsts = ((b"strict-transport-security", b"max-age=31536000"),) if settings.secure else ()
        self._headers = HEADERS + hsts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request (ASGI)."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        trace = _trace(scope)
        set_traceparent(trace)
        guarded = self._guarded(scope, send, trace)
        probe = scope["path"] in ("/livez", "/readyz")
        refusal = self._refusal(scope, probe=probe)
        if refusal is not None:
            await refuse(guarded, refusal)
            return
        if probe:
            await self._app(scope, receive, guarded)
            return
        place = Place(self)
        try:
            place.take()
        except Ql3Error as error:
            await refuse(guarded, error)
            return
        scope.setdefault("state", {})[PLACE] = place
        try:
            await self._app(scope, receive, guarded)
        finally:
            place.give_back()
            opened = scope["state"].pop(OPEN, None)
            if opened is not None:
                await opened.aclose()

    def _refusal(self, scope: Scope, *, probe: bool) -> Ql3Error | None:
        path: bytes = scope["raw_path"]
        if len(path) + len(scope["query_string"]) > URL_BYTES:
            return Ql3Error("too_large", f"An address has at most {URL_BYTES} bytes.", field="url")
        if _PATH.fullmatch(path) is None or _DOTS.search(path):
            return Ql3Error("invalid", "The path is not written as the API writes its paths.", field="path")
        if probe:
            return None
        if not self._host_allowed([value for name, value in scope["headers"] if name == b"host"]):
            return Ql3Error("invalid", "This name is not one of this server.", field="host")
        return None

    def _host_allowed(self, values: list[bytes]) -> bool:
        # A page of another site can make its own name point here (DNS rebinding); its browser still sends that name.
        if len(values) != 1:
            return False
        found = _HOST.fullmatch(values[0].decode("latin-1"))
        if found is None:
            return False
        host = (found[1] or found[2]).lower().removesuffix(".")
        return self._any_host or host == "localhost" or is_address(host) or host in self._hosts

    def _guarded(self, scope: Scope, send: Send, trace: str) -> Send:
        api = scope["path"].startswith("/api/") or scope["path"] in ("/livez", "/readyz")

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), *self._headers, (b"ql3-trace", trace.split("-")[1].encode())]
                if api:
                    headers.append((b"cache-control", b"no-store"))
                message["headers"] = headers
            try:
                async with asyncio.timeout(SEND_STALL_S):
                    await send(message)
            except TimeoutError:
                # Closing in order would wait for the reader again. What is sent from here on goes nowhere.
                scope["state"][ABORT]()

        return guarded


def _trace(scope: Scope) -> str:
    """The caller's trace, or a new one: what this request sets off at the services carries it."""
    for name, value in scope["headers"]:
        if name == b"traceparent" and _TRACE.fullmatch(value):
            return value.decode()
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"


async def refuse(send: Send, error: Ql3Error) -> None:
    """Answers with a problem and ends the connection: what else came with the request is not read."""
    body = problem_body(error)
    headers = [
        (b"content-type", MEDIA_TYPE.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
        *((name.lower().encode(), value.encode()) for name, value in extra_headers(error).items()),
    ]
    await send({"type": "http.response.start", "status": error.kind.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
