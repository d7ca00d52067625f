"""`ql3 serve SERVICE…` and `ql3 migrate`: the same services on PostgreSQL and a NATS server of one's own."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import structlog

from schemas.errors import Ql3Error
from schemas.subjects import SERVICES
from services.cli.assembly import House, check_names, database_config
from services.cli.data_folder import DataFolder, write_private_json
from services.kit.config import Config

if TYPE_CHECKING:
    from services.kit.bus import BusOptions
    from services.kit.health import ProbeServer

log: structlog.stdlib.BoundLogger = structlog.get_logger("ql3")


async def run(
    config: Config, names: Sequence[str], *, migrating: bool, stop_runs: bool, on_ready: Callable[[list[str]], None]
) -> None:
    """Run the named services until SIGINT or SIGTERM. Raises `Ql3Error` when one cannot start."""
    wanted = check_names(names)
    if not config.nats_url:
        raise Ql3Error("setup_invalid", "Name the NATS server.", field="QL3_NATS_URL")
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    house = House(config, wanted, lambda service: bus_options(config, service), stop_runs=stop_runs)
    probes = await _probes(config, house)
    try:
        await house.start(migrating=migrating)
        if "gateway" in wanted:
            await _write_console(config, house.services["gateway"])
        on_ready(wanted)
        await ended.wait()
        log.info("stopping")
    finally:
        await house.stop()
        if probes is not None:
            await probes.stop()


async def _probes(config: Config, house: House) -> ProbeServer | None:
    """Answer a container's probes from the first moment; not ready until every service is."""
    if config.probe_listen is None:
        return None
    from services.kit.health import Health, ProbeServer

    host, _, port = config.probe_listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise Ql3Error("setup_invalid", "Write it as host:port.", field="QL3_PROBE_LISTEN")
    health = Health()
    health.add("services", house.reasons)
    probes = ProbeServer(health, host.strip("[]"), int(port))
    try:
        await probes.start()
    except OSError as error:
        raise Ql3Error(
            "setup_invalid",
            f"It cannot be listened on ({error.strerror}).",
            field="QL3_PROBE_LISTEN",
        ) from error
    return probes


async def _write_console(config: Config, gateway: Any) -> None:
    """The local console's way in, for `ql3` on this machine. It stays at the end: the next start writes it anew."""
    console = await gateway.issue_console_credential()
    try:
        config.data.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private_json(DataFolder(config.data).console, {"url": gateway.local_url, **console})
    except OSError as error:  # a container without a folder to write to serves people all the same
        log.warning("console.json cannot be written", reason=error.strerror)


def bus_options(config: Config, service: str) -> BusOptions:
    """How a service's NATS user connects: named after the service; a worker's after its id."""
    from services.kit.bus import BusOptions

    user = f"worker-{config.worker_id}" if service == "worker" else service
    user = config.nats_user or user
    return BusOptions(
        servers=tuple(config.nats_url.split(",")),
        service=user,
        user=user,
        password=config.nats_password_for(user) or "",
        tls_ca=str(config.nats_ca) if config.nats_ca else None,
        tls_certificate=str(config.nats_certificate) if config.nats_certificate else None,
        tls_key=str(config.nats_key) if config.nats_key else None,
        replicas=config.nats_replicas,
        edge=config.profile == "edge",
    )


async def migrate_all(config: Config) -> list[str]:
    """Bring schemas, roles and streams to this version; answers what was done, a sentence each."""
    from services.kit.database import DatabaseConfig
    from services.kit.migrations import migrate
    from services.kit.migrations.privileges import provision_postgresql

    done: list[str] = []
    owners = [service for service in SERVICES if service != "worker"]
    if config.database_admin_url:
        passwords = {service: config.database_password_for(service) for service in owners}
        missing = [service for service, password in passwords.items() if password is None]
        if missing:
            raise Ql3Error(
                "setup_invalid", f"There is no password for {', '.join(missing)}.", field="QL3_DATABASE_CREDENTIALS"
            )
        await provision_postgresql(
            config.database_admin_url, owners, {name: word for name, word in passwords.items() if word is not None}
        )
    elif database_config(config, "scheduler").dialect == "postgresql":
        raise Ql3Error(
            "setup_invalid", "Name a role that owns the schemas and may create them.", field="QL3_DATABASE_ADMIN_URL"
        )
    for service in owners:
        where = database_config(config, service)
        if config.database_admin_url:
            where = DatabaseConfig(url=config.database_admin_url)
        done += [f"{service}: {step}" for step in await migrate(where, service)]
    if config.nats_url:
        from services.kit.bus import Bus

        async with Bus(bus_options(config, "maintenance")) as bus:
            done += [f"stream {name}" for name in await bus.migrate_streams()]
    return done
