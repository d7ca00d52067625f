"""The bus on three servers with TLS, as in a cluster: replicated streams, and the loss of the server we are on."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from schemas.base import Message
from schemas.errors import Ql3Error
from schemas.subjects import STREAMS, command
from services.kit import whole_files
from services.kit.bus import Bus, BusOptions
from services.kit.bus.connection import NoResponders
from services.kit.bus.streams import JetStreamRefusal, jetstream_api
from services.kit.natsserver import find_binary, render_config
from services.kit.natsusers import users
from tests.fixtures_nats import WAIT_S, Heard

PASSWORDS = {name: f"password-of-{name}" for name in ("scheduler", "dispatcher", "maintenance")}


class Order(Message, frozen=True, kw_only=True, tag="test.order/1"):
    number: int


class Cluster:
    """Three nats-servers on loopback that know each other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = make_certificates(folder)
        with ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(6)]
            for each in sockets:
                each.bind(("127.0.0.1", 0))
            ports = [each.getsockname()[1] for each in sockets]
        self.ports, self.routes = ports[:3], ports[3:]
        self.processes: dict[int, asyncio.subprocess.Process] = {}

    async def start(self, number: int) -> None:
        """Start one server."""
        config = {
            "server_name": f"n{number}",
            "host": "127.0.0.1",
            "port": self.ports[number],
            "tls": {"cert_file": str(self.folder / "server.pem"), "key_file": str(self.folder / "server.key")},
            "jetstream": {"store_dir": str(self.folder / f"n{number}"), "max_file_store": 4 * 1024**3},
            "cluster": {
                "name": "ql3",
                "host": "127.0.0.1",
                "port": self.routes[number],
                "routes": [f"nats://127.0.0.1:{port}" for port in self.routes],
            },
            "authorization": {"users": users(PASSWORDS)},
        }
        path = self.folder / f"n{number}.conf"
        whole_files.replace(path, render_config(config).encode())
        self.processes[number] = await asyncio.create_subprocess_exec(
            str(find_binary()), "-c", str(path), "-l", str(self.folder / f"n{number}.log"), start_new_session=True
        )

    async def stop(self, number: int) -> None:
        """Kill one server."""
        process = self.processes.pop(number, None)
        if process is not None:
            process.send_signal(signal.SIGKILL)
            await process.wait()

    def options(self, service: str) -> BusOptions:
        """How a service connects to all three."""
        return BusOptions(
            servers=tuple(f"tls://127.0.0.1:{port}" for port in self.ports),
            service=service,
            user=service,
            password=PASSWORDS[service],
            tls_ca=str(self.ca),
            replicas=3,
            edge=False,
        )


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(tmp_path)
    for number in range(3):
        await cluster.start(number)
    yield cluster
    for number in range(3):
        await cluster.stop(number)


async def joined(cluster: Cluster, service: str) -> Bus:
    """A bus with its streams, as soon as the servers have chosen who leads."""
    async with asyncio.timeout(2 * WAIT_S):
        while True:
            bus = Bus(cluster.options(service))
            try:
                return await bus.start(wait_s=WAIT_S)
            except Ql3Error as error:
                if error.code not in ("unavailable", "setup_invalid"):
                    raise


async def config_of(bus: Bus, stream: str) -> dict[str, Any]:
    """A stream's configuration; while nobody leads, a question to JetStream is lost and asked again."""
    async with asyncio.timeout(2 * WAIT_S):
        while True:
            with suppress(TimeoutError, NoResponders, JetStreamRefusal):
                return (await jetstream_api(bus._connection, f"STREAM.INFO.{stream}", timeout=1.0))["config"]


async def stored(bus: Bus, number: int) -> None:
    async with asyncio.timeout(2 * WAIT_S):
        while True:
            try:
                await bus.publish(command("dispatcher", "submit"), Order(number=number), msg_id=f"order-{number}")
            except Ql3Error:
                continue
            return


async def test_orders_outlive_the_loss_of_a_server(cluster: Cluster) -> None:
    sender = await joined(cluster, "scheduler")
    receiver = await joined(cluster, "dispatcher")
    heard = Heard()

    async def handle(batch: list[Order]) -> None:
        await heard.add(*(order.number for order in batch))

    for number in range(20):
        await stored(sender, number)
    client = await sender._connection.client(WAIT_S)
    url = client.connected_url
    assert url is not None
    lost = cluster.ports.index(url.port)
    await cluster.stop(lost)
    await receiver.consume("dispatcher", {Order: handle})
    for number in range(20, 40):
        await stored(sender, number)
    await heard.until(lambda items: set(items) == set(range(40)), timeout=2 * WAIT_S)
    maintenance = Bus(cluster.options("maintenance"))
    await maintenance.start(wait_s=WAIT_S, streams=False)
    for stream in STREAMS:
        assert (await config_of(maintenance, stream.name))["num_replicas"] == 3
    await asyncio.gather(maintenance.stop(), sender.stop(), receiver.stop())


async def test_a_server_whose_certificate_is_of_another_authority_is_not_trusted(
    cluster: Cluster, tmp_path: Path
) -> None:
    await (await joined(cluster, "scheduler")).stop()
    other = tmp_path / "other"
    other.mkdir()
    options = msgspec.structs.replace(cluster.options("scheduler"), tls_ca=str(make_certificates(other)))
    with pytest.raises(Ql3Error) as caught:
        await Bus(options).start(wait_s=WAIT_S)
    assert caught.value.code == "unavailable"
    assert "certificate" in str(caught.value)


def make_certificates(folder: Path) -> Path:
    """An authority and a certificate for 127.0.0.1; returns the authority's file."""
    now = datetime.datetime.now(datetime.UTC)
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])

    def certificate(
        subject: x509.Name, public_key: ec.EllipticCurvePublicKey, extensions: list[tuple[x509.ExtensionType, bool]]
    ) -> bytes:
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(authority_name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical=critical)
        return builder.sign(authority_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    (folder / "ca.pem").write_bytes(
        certificate(
            authority_name,
            authority_key.public_key(),
            [
                (x509.BasicConstraints(ca=True, path_length=None), True),
                (x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), False),
            ],
        )
    )
    (folder / "server.pem").write_bytes(
        certificate(
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "nats")]),
            key.public_key(),
            [
                (x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False),
                (x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), False),
            ],
        )
    )
    (folder / "server.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return folder / "ca.pem"
