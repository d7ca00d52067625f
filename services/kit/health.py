"""Whether this process lives and whether it is ready, with reasons: for people, for probes and on the bus."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import structlog

from schemas.endpoints import HEALTH
from schemas.system import HealthAnswer, HealthRead
from services.kit import metrics
from services.kit.bus import Caller, Route

Check = Callable[[], Sequence[str]]
"""Says why something is not ready, one sentence each; nothing when it is."""

JSON: Final = "application/json"
PROBE_BYTES: Final = 4096
PROBE_S: Final = 5.0

log: structlog.stdlib.BoundLogger = structlog.get_logger("ql3.health")


class Health:
    """Named checks of one process. A check that raises counts as a reason."""

    def __init__(self) -> None:
        self._checks: dict[str, Check] = {}

    def add(self, name: str, check: Check) -> None:
        """Ask this check too; its reasons are shown behind `name`."""
        self._checks[name] = check

    def ready(self) -> list[str]:
        """Why this process is not ready; empty when it is."""
        reasons: list[str] = []
        for name, check in self._checks.items():
            try:
                reasons += [f"{name}: {reason}" for reason in check()]
            except Exception:
                log.exception("a health check failed", check=name)
                reasons.append(f"{name}: its health is not known")
        return reasons

    def route(self, service: str, version: str) -> Route[HealthRead, HealthAnswer]:
        """The endpoint `ql3.rpc.<service>.health`."""

        async def answer(_: HealthRead, caller: Caller) -> HealthAnswer:
            return HealthAnswer(service=service, version=version, reasons=self.ready()[:64])

        return Route(HEALTH[service], answer)


class ProbeServer:
    """`GET /livez`, `/readyz` and `/metrics` on a port for machines; answers nothing else and reads at most 4 KiB.

    Liveness is that this answers at all: a loop that hangs does not. Reasons of readiness are in the answer's body.
    """

    def __init__(self, health: Health, host: str, port: int) -> None:
        self._health = health
        self._host = host
        self._port = port
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        """The port that is listened on."""
        assert self._server is not None
        return self._server.sockets[0].getsockname()[1]

    async def start(self) -> None:
        """Listen. Raises `OSError`."""
        self._server = await asyncio.start_server(self._answer, self._host, self._port, limit=PROBE_BYTES)

    async def stop(self) -> None:
        """Listen no more."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
            await server.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(PROBE_S):
                head = await reader.readuntil(b"\r\n\r\n")
                status, kind, payload = await self._respond(head.split(b"\r\n", 1)[0])
                writer.write(
                    f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(payload)}\r\n"
                    "Connection: close\r\n\r\n".encode()
                    + payload
                )
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()

    async def _respond(self, line: bytes) -> tuple[str, str, bytes]:
        method, _, rest = line.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if method not in (b"GET", b"HEAD"):
            return "405 Method Not Allowed", JSON, b"{}"
        if path == b"/livez":
            return "200 OK", JSON, b'{"alive":true}'
        if path == b"/readyz":
            reasons = self._health.ready()
            status = "503 Service Unavailable" if reasons else "200 OK"
            return status, JSON, msgspec.json.encode({"ready": not reasons, "reasons": reasons})
        if path == b"/metrics":
            return "200 OK", metrics.CONTENT_TYPE, await metrics.exposition()
        return "404 Not Found", JSON, b"{}"
