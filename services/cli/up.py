"""`ql3 up`: everything on one box, in the foreground, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from schemas.errors import Ql3Error
from schemas.subjects import SERVICES
from services.cli import children
from services.cli.assembly import House
from services.cli.data_folder import DataFolder, write_private_json
from services.kit.config import Config


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """What a started box tells: where it listens, and the one-time owner link while the project has no owner."""

    url: str
    owner_link: str | None
    owner_link_until_ms: int | None
    """Until when it is good. Without `owner_link`: that of an earlier start, which cannot be shown again."""


async def run(
    config: Config, *, stop_runs: bool, on_ready: Callable[[Ready], None], on_stopping: Callable[[bool], None]
) -> None:
    """Start, call `on_ready`, wait for SIGINT or SIGTERM, call `on_stopping` (with whether runs are cancelled), stop.
    Raises `Ql3Error` when it cannot start.

    `stop_runs` cancels what runs first (reason `shutdown`). It is always so for PID 1 of a container, because the
    kernel ends a container's processes with it. Otherwise the process host stays with what still runs.
    """
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    folder = DataFolder(config.data)
    stop_runs = stop_runs or os.getpid() == 1
    with folder:
        async with Box(config, folder, stop_runs=stop_runs) as box:
            on_ready(box.ready)
            await ended.wait()
            on_stopping(stop_runs)


class Box:
    """One running box: embedded nats-server and all services. The folder is locked by the caller."""

    ready: Ready

    def __init__(self, config: Config, folder: DataFolder, *, stop_runs: bool) -> None:
        from services.kit.natsserver import NatsServer

        self._config = config
        self._folder = folder
        self._nats = NatsServer(folder.part("nats"), workers=[config.worker_id], on_child=lambda _: self._record())
        self._house = House(config, SERVICES, self._options, stop_runs=stop_runs)

    async def __aenter__(self) -> Box:
        keyring: Any = importlib.import_module("services.vault.keyring")

        # A nats-server that outlived a killed `up` still holds the JetStream folder.
        for child in children.recorded(self._folder.children):
            await asyncio.to_thread(children.end, child, grace_s=5.0)
        keyring.provision(self._config.keyring_file)
        await self._nats.start()
        try:
            write_private_json(self._folder.nats_endpoint, {"url": self._nats.url})
            await self._house.start(migrating=True)
            gateway: Any = self._house.services["gateway"]
            console = await gateway.issue_console_credential()
            write_private_json(self._folder.console, {"url": gateway.local_url, "nats_url": self._nats.url, **console})
            link = await gateway.open_ownership()
            self.ready = Ready(
                url=gateway.url,
                owner_link=link.url if link else None,
                owner_link_until_ms=link.expires_at_ms if link else None,
            )
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def _stop(self) -> None:
        self._folder.console.unlink(missing_ok=True)
        await self._house.stop()
        await self._nats.stop()
        self._folder.children.unlink(missing_ok=True)

    def _options(self, service: str) -> Any:
        if service == "worker":
            return self._nats.options("worker", worker=self._config.worker_id)
        return self._nats.options(service)

    def _record(self) -> None:
        pid = self._nats.pid
        child = children.describe("nats-server", pid) if pid else None
        children.record(self._folder.children, [child] if child else [])


def config_for(data: Path | None, listen: str | None, base: Config) -> Config:
    """The configuration of `up`: edge, in a data folder. Raises `invalid` when a cluster's settings are mixed in."""
    if base.nats_url or base.database_url:
        raise Ql3Error(
            "setup_invalid",
            "ql3 up brings its own database and message server; use ql3 serve with QL3_DATABASE_URL and QL3_NATS_URL.",
            field="QL3_NATS_URL" if base.nats_url else "QL3_DATABASE_URL",
        )
    changed: dict[str, Any] = {"profile": "edge", "data": (data or base.data).absolute()}
    if listen is not None:
        changed["listen"] = listen
    return msgspec.structs.replace(base, **changed)
