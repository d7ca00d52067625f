"""Health: reasons, the endpoint on the bus, and probes over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from schemas.endpoints import HEALTH
from schemas.system import HealthRead
from services.kit.health import Health, ProbeServer
from tests.fixtures_nats import WAIT_S, BusFactory


@pytest_asyncio.fixture
async def probed() -> AsyncIterator[tuple[Health, str]]:
    health = Health()
    server = ProbeServer(health, "127.0.0.1", 0)
    await server.start()
    yield health, f"http://127.0.0.1:{server.port}"
    await server.stop()


def fail() -> list[str]:
    raise RuntimeError("secret")


async def test_probes_tell_life_from_readiness(probed: tuple[Health, str]) -> None:
    health, url = probed
    async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client:
        assert (await client.get("/readyz")).status_code == 200
        health.add("database", lambda: ["it is not reachable"])
        health.add("broken", fail)
        ready = await client.get("/readyz")
        assert ready.status_code == 503
        assert ready.json()["reasons"] == ["database: it is not reachable", "broken: its health is not known"]
        assert (await client.get("/livez")).status_code == 200


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/", 404), ("POST", "/livez", 405)])
async def test_probes_answer_nothing_else(probed: tuple[Health, str], method: str, path: str, status: int) -> None:
    async with httpx.AsyncClient(base_url=probed[1], timeout=WAIT_S) as client:
        assert (await client.request(method, path)).status_code == status


async def test_a_long_request_is_not_read(probed: tuple[Health, str]) -> None:
    async with httpx.AsyncClient(base_url=probed[1], timeout=WAIT_S) as client:
        with pytest.raises(httpx.TransportError):
            await client.get("/livez", headers={"x": "y" * 100_000})


async def test_readiness_is_asked_on_the_bus(bus_for: BusFactory) -> None:
    asked, asker = await bus_for("vault"), await bus_for("gateway")
    health = Health()
    health.add("bus", asked.health)
    health.add("keyring", lambda: ["there is none"])
    await asked.serve("vault", "1.0.0", [health.route("vault", "1.0.0")])
    await asked.flush()
    answer = await asker.request(HEALTH["vault"], HealthRead(), timeout=WAIT_S)
    assert (answer.service, answer.reasons) == ("vault", ["keyring: there is none"])
