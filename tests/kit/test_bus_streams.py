"""Streams: declared from the table, left alone when they exist, changed by a migration only."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from schemas.errors import Ql3Error
from schemas.subjects import COMMANDS, DEAD, EVENTS, STREAMS, WORKERS
from services.kit.bus import Bus
from services.kit.bus.streams import NANO, jetstream_api, stream_config
from services.kit.natsserver import NatsServer
from tests.fixtures_nats import BusFactory


async def config_of(bus: Bus, stream: str) -> dict[str, Any]:
    return (await jetstream_api(bus._connection, f"STREAM.INFO.{stream}"))["config"]


async def test_every_stream_is_there_as_declared(bus_for: BusFactory) -> None:
    await bus_for("scheduler")
    maintenance = await bus_for("maintenance", streams=False)
    for stream in STREAMS:
        config = await config_of(maintenance, stream.name)
        assert config["subjects"] == list(stream.subjects)
        assert config["retention"] == stream.retention
        assert config["max_bytes"] == stream.max_bytes_edge
        assert config["max_age"] == (stream.max_age_s or 0) * NANO
        assert config["discard"] == stream.discard
        assert config["duplicate_window"] == 120 * NANO
    assert {s.name: s.retention for s in (COMMANDS, WORKERS, EVENTS, DEAD)} == {
        "QL3_COMMANDS": "workqueue",
        "QL3_WORKERS": "workqueue",
        "QL3_EVENTS": "limits",
        "QL3_DEAD": "limits",
    }


async def test_a_service_never_changes_a_stream_that_exists(bus_for: BusFactory) -> None:
    """In a rolling upgrade two versions run side by side and must not undo each other's bounds."""
    maintenance = await bus_for("maintenance", streams=False)
    own = {**stream_config(EVENTS, edge=True, replicas=1), "max_age": 3600 * NANO}
    await jetstream_api(maintenance._connection, f"STREAM.CREATE.{EVENTS.name}", own)
    scheduler = await bus_for("scheduler")
    await scheduler.ensure_streams()
    assert (await config_of(maintenance, EVENTS.name))["max_age"] == 3600 * NANO


async def test_a_migration_brings_streams_to_their_declaration(bus_for: BusFactory) -> None:
    maintenance = await bus_for("maintenance", streams=False)
    own = {**stream_config(EVENTS, edge=True, replicas=1), "max_age": 3600 * NANO}
    await jetstream_api(maintenance._connection, f"STREAM.CREATE.{EVENTS.name}", own)
    assert sorted(await maintenance.migrate_streams()) == sorted(stream.name for stream in STREAMS)
    assert (await config_of(maintenance, EVENTS.name))["max_age"] == (EVENTS.max_age_s or 0) * NANO
    assert await maintenance.migrate_streams() == []


async def test_a_migration_can_lift_the_bounds_of_an_edge_box(bus_for: BusFactory, nats_server: NatsServer) -> None:
    await bus_for("scheduler")
    bigger = msgspec.structs.replace(nats_server.options("maintenance"), edge=False)
    bus = await Bus(bigger).start(streams=False)
    try:
        # Everything together is more than the server of an edge box gives: the refusal names the stream.
        with pytest.raises(Ql3Error) as caught:
            await bus.migrate_streams()
    finally:
        await bus.stop()
    assert caught.value.code == "setup_invalid"
    assert "QL3_" in str(caught.value)


async def test_several_may_declare_at_once(bus_for: BusFactory) -> None:
    buses = [await bus_for(service, streams=False) for service in ("scheduler", "dispatcher", "approval", "vault")]
    await asyncio.gather(*(bus.ensure_streams() for bus in buses))


async def test_what_the_server_has_no_room_for_is_a_set_up_error(tmp_path: Any) -> None:
    server = NatsServer(tmp_path / "nats", storage_bytes=1024 * 1024)
    await server.start(keep=False)
    bus = Bus(server.options("scheduler"))
    try:
        with pytest.raises(Ql3Error) as caught:
            await bus.start()
    finally:
        await server.stop()
    assert caught.value.code == "setup_invalid"
    assert "QL3_COMMANDS" in str(caught.value)
