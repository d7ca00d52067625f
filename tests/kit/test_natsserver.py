"""The embedded nats-server: its files, its start and end, and what each of its users may do."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
from pathlib import Path

import msgspec
import pytest

from schemas.base import Message
from schemas.errors import Ql3Error
from schemas.subjects import SERVICES
from services.kit.bus import Bus, Delivery
from services.kit.bus.connection import ConnectionLost, NoResponders
from services.kit.bus.streams import jetstream_api
from services.kit.natsserver import NatsServer, render_config
from services.kit.natsusers import MAINTENANCE, OPERATOR, users, worker_permissions
from tests.fixtures_nats import WAIT_S, WORKER, BusFactory, Heard


class Order(Message, frozen=True, kw_only=True, tag="test.order/1"):
    number: int


async def test_its_files_are_ours_alone_and_hold_the_passwords(nats_server: NatsServer) -> None:
    assert stat.S_IMODE(nats_server.folder.stat().st_mode) == 0o700
    for name in ("nats-server.conf", "credentials.json"):
        assert stat.S_IMODE((nats_server.folder / name).stat().st_mode) == 0o600
    credentials = msgspec.json.decode((nats_server.folder / "credentials.json").read_bytes())
    # Whoever shares this server may have added workers of their own.
    others = {name for name in credentials if not name.startswith("worker-")}
    assert others == {*SERVICES, OPERATOR, MAINTENANCE}
    assert f"worker-{WORKER}" in credentials
    assert len(set(credentials.values())) == len(credentials)


async def test_no_password_is_on_a_command_line_or_in_its_environment(nats_server: NatsServer) -> None:
    passwords = msgspec.json.decode((nats_server.folder / "credentials.json").read_bytes()).values()
    process = Path(f"/proc/{nats_server.pid}")
    shown = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
    assert not any(password.encode() in shown for password in passwords)


async def test_it_listens_on_loopback_only_and_without_user_nobody_comes_in(nats_server: NatsServer) -> None:
    with pytest.raises(OSError):
        await asyncio.open_connection(_own_address(), nats_server.port)
    stranger = Bus(msgspec.structs.replace(nats_server.options("scheduler"), user="", password=""))
    with pytest.raises(Ql3Error):
        await stranger.start(wait_s=WAIT_S)


async def test_it_has_a_session_of_its_own(nats_server: NatsServer) -> None:
    """A Ctrl-C in the terminal goes to our group; the server is ended after the services."""
    assert nats_server.pid is not None
    assert os.getsid(nats_server.pid) != os.getsid(0)
    assert os.getpgid(nats_server.pid) != os.getpgid(0)


async def test_credentials_and_port_outlive_a_restart(tmp_path: Path) -> None:
    first = NatsServer(tmp_path / "nats")
    await first.start(keep=False)
    options, port = first.options("scheduler"), first.port
    await first.kill()
    await first._launch()
    assert first.port == port
    await first.stop()
    second = NatsServer(tmp_path / "nats", port=port, workers=("w2",))
    await second.start(keep=False)
    assert second.options("scheduler") == options
    assert second.options("worker", worker="w2").password
    await second.stop()


async def test_it_is_started_again_when_it_dies(tmp_path: Path) -> None:
    pids = Heard()
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    def started(pid: int) -> None:
        tasks.add(loop.create_task(pids.add(pid)))

    server = NatsServer(tmp_path / "nats", on_child=started)
    await server.start()
    bus = await Bus(server.options("scheduler")).start()
    first = server.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await pids.count(2)
    await bus.publish("ql3.cmd.dispatcher.submit", Order(number=1), timeout=WAIT_S)
    assert server.pid not in (None, first)
    await bus.stop()
    await server.stop()


async def test_stopping_ends_the_child_and_leaves_none(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats")
    await server.start()
    pid = server.pid
    assert pid is not None
    await server.stop()
    assert server.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    await server.stop()


async def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        server = NatsServer(tmp_path / "nats", port=port)
        with pytest.raises(Ql3Error) as caught:
            await server.start()
    assert caught.value.code == "setup_invalid"
    assert f"Port {port} is in use" in str(caught.value)
    assert server.pid is None


async def test_a_folder_that_cannot_be_used_is_told_without_its_path(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(Ql3Error) as caught:
        await NatsServer(blocked / "nats").start()
    assert (caught.value.code, caught.value.field) == ("setup_invalid", "data_dir")
    assert str(tmp_path) not in str(caught.value)


async def test_a_store_that_cannot_be_used_is_told_without_its_path(tmp_path: Path) -> None:
    folder = tmp_path / "nats"
    folder.mkdir()
    (folder / "jetstream").write_text("not a folder")
    server = NatsServer(folder)
    with pytest.raises(Ql3Error) as caught:
        await server.start()
    assert caught.value.code == "setup_invalid"
    assert str(tmp_path) not in str(caught.value)
    assert server.pid is None


async def test_a_binary_that_does_not_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(Ql3Error) as caught:
        await NatsServer(tmp_path / "nats", binary=tmp_path / "none").start()
    assert caught.value.code == "setup_invalid"


def test_text_in_a_configuration_cannot_leave_its_quotes(tmp_path: Path) -> None:
    rendered = render_config({"store_dir": 'x" } authorization { no_auth_user: a', "port": 1})
    assert msgspec.json.decode(rendered) == {"store_dir": 'x" } authorization { no_auth_user: a', "port": 1}


async def test_a_folder_with_odd_characters_works(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / 'a "quoted" $HOME folder', workers=(WORKER,))
    await server.start(keep=False)
    await (await Bus(server.options("scheduler")).start()).stop()
    assert server.store.is_dir()
    await server.stop()


# -- what each user may do


async def refused_publish(bus: Bus, subject: str) -> bool:
    """Whether the server refuses what `bus` sends on `subject`."""
    errors = Heard()
    client = await bus._connection.client(WAIT_S)

    async def noted(error: Exception) -> None:
        await errors.add(str(error))

    client._error_cb = noted
    await bus.publish_raw(subject, b"{}")
    await bus.flush()
    return any("permissions violation" in str(error).lower() for error in errors.items)


async def refused_subscribe(bus: Bus, subject: str) -> bool:
    errors = Heard()
    client = await bus._connection.client(WAIT_S)

    async def noted(error: Exception) -> None:
        await errors.add(str(error))

    async def ignore(_: Delivery) -> None:
        return

    client._error_cb = noted
    subscription = await bus.subscribe(subject, ignore)
    await bus.flush()
    await subscription.close(0.0)
    return any("permissions violation" in str(error).lower() for error in errors.items)


@pytest.mark.parametrize(
    ("subject", "refused"),
    [
        (f"ql3.rpc.dispatcher.attempts.start.{WORKER}", False),
        ("ql3.rpc.dispatcher.attempts.start.w2", True),
        (f"ql3.rpc.dispatcher.workers.beat.{WORKER}", False),
        ("ql3.rpc.dispatcher.workers.beat.w2", True),
        (f"ql3.cmd.dispatcher.report.{WORKER}", False),
        ("ql3.cmd.dispatcher.report.w2", True),
        ("ql3.cmd.dispatcher.submit", True),
        ("ql3.rpc.dispatcher.runs.cancel", True),
        ("ql3.rpc.vault.secrets.set", True),
        ("ql3.evt.run.default.x.ended", True),
        ("ql3.ack.scheduler", True),
        ("ql3.worker.w2.offer", True),
        (f"ql3.worker.{WORKER}.offer", True),
        ("_INBOX_dispatcher.x", True),
        ("$JS.API.STREAM.DELETE.QL3_COMMANDS", True),
        ("$JS.API.STREAM.UPDATE.QL3_COMMANDS", True),
        ("$JS.API.STREAM.CREATE.QL3_COMMANDS", True),
        ("$JS.API.STREAM.PURGE.QL3_WORKERS", True),
        ("$JS.API.CONSUMER.MSG.NEXT.QL3_WORKERS.w2", True),
        ("$JS.API.CONSUMER.CREATE.QL3_WORKERS.w2.ql3.worker.w2.>", True),
        ("$JS.API.CONSUMER.CREATE.QL3_COMMANDS.dispatcher.ql3.cmd.dispatcher.>", True),
        ("$JS.ACK.QL3_WORKERS.w2.1.1.1.1.1", True),
    ],
)
async def test_a_worker_speaks_only_with_its_own_id(bus_for: BusFactory, subject: str, refused: bool) -> None:
    worker = await bus_for("worker", worker=WORKER, streams=False)
    assert await refused_publish(worker, subject) is refused


@pytest.mark.parametrize(
    ("service", "subject", "refused"),
    [
        ("scheduler", "ql3.cmd.dispatcher.submit", False),
        ("scheduler", "ql3.worker.w1.offer", True),
        ("dispatcher", "ql3.worker.w1.offer", False),
        ("retention", "ql3.worker.w1.retire", False),
        ("scheduler", "ql3.dead.dispatcher.x", True),
        ("scheduler", "$JS.API.CONSUMER.MSG.NEXT.QL3_COMMANDS.dispatcher", True),
        ("scheduler", "$JS.API.STREAM.UPDATE.QL3_EVENTS", True),
        ("scheduler", "$JS.API.STREAM.DELETE.QL3_EVENTS", True),
        ("scheduler", "_INBOX_gateway.x", True),
        ("maintenance", "ql3.rpc.dispatcher.runs.cancel", True),
    ],
)
async def test_a_user_says_only_what_is_its_part(
    bus_for: BusFactory, service: str, subject: str, refused: bool
) -> None:
    bus = await bus_for(service, streams=False)
    assert await refused_publish(bus, subject) is refused


@pytest.mark.parametrize(
    ("service", "subject", "refused"),
    [
        ("scheduler", "ql3.rpc.scheduler.tasks.get", False),
        ("scheduler", "ql3.rpc.dispatcher.runs.submit", True),
        ("scheduler", "ql3.rpc.>", True),
        ("scheduler", "ql3.cmd.>", True),
        ("scheduler", "ql3.ack.dispatcher", True),
        ("scheduler", "ql3.log.>", True),
        ("gateway", "ql3.log.>", False),
        ("gateway", "_INBOX_dispatcher.>", True),
        ("gateway", "_INBOX.>", True),
        ("gateway", ">", True),
    ],
)
async def test_a_user_hears_only_what_is_for_it(bus_for: BusFactory, service: str, subject: str, refused: bool) -> None:
    bus = await bus_for(service, streams=False)
    assert await refused_subscribe(bus, subject) is refused


@pytest.mark.parametrize(
    ("subject", "refused"),
    [(f"ql3.rpc.worker.{WORKER}.log.read", False), ("ql3.rpc.worker.w2.log.read", True), ("ql3.evt.>", True)],
)
async def test_a_worker_hears_only_what_is_for_it(bus_for: BusFactory, subject: str, refused: bool) -> None:
    worker = await bus_for("worker", worker=WORKER, streams=False)
    assert await refused_subscribe(worker, subject) is refused


async def test_the_operator_looks_and_does_nothing(nats_server: NatsServer, bus_for: BusFactory) -> None:
    from nats.aio.client import Client

    scheduler = await bus_for("scheduler")
    options = nats_server.options(OPERATOR)
    errors = Heard()

    async def noted(error: Exception) -> None:
        await errors.add(str(error))

    client = Client()
    # As the `nats` command connects: with its own inbox prefix.
    await client.connect(nats_server.url, user=options.user, password=options.password, error_cb=noted)
    heard = await client.subscribe("ql3.evt.>")
    names = msgspec.json.decode((await client.request("$JS.API.STREAM.NAMES", b"", timeout=WAIT_S)).data)
    assert "QL3_COMMANDS" in names["streams"]
    await client.request("$JS.API.STREAM.INFO.QL3_EVENTS", b"", timeout=WAIT_S)
    await scheduler.publish("ql3.evt.task.default.x.changed", Order(number=1))
    assert b'"number":1' in (await heard.next_msg(timeout=WAIT_S)).data
    assert errors.items == []
    forbidden = (
        "ql3.rpc.dispatcher.runs.cancel",
        "ql3.cmd.dispatcher.submit",
        "ql3.evt.run.default.x.ended",
        "$JS.API.STREAM.DELETE.QL3_EVENTS",
        "$JS.API.STREAM.PURGE.QL3_EVENTS",
        "$JS.API.STREAM.CREATE.OTHER",
        "$JS.API.CONSUMER.MSG.NEXT.QL3_COMMANDS.dispatcher",
    )
    for number, subject in enumerate(forbidden, start=1):
        await client.publish(subject, b"{}")
        await errors.count(number)
    assert all("permissions violation for publish" in str(error).lower() for error in errors.items)
    await client.close()


async def test_an_answer_goes_to_the_asker_and_nowhere_else(bus_for: BusFactory) -> None:
    """A service has no right to other inboxes; the server lets one answer through to the one that asked."""
    dispatcher, gateway = await bus_for("dispatcher"), await bus_for("gateway")
    seen = Heard()
    replies: list[str] = []

    async def twice(message: object) -> None:
        reply = message.reply  # type: ignore[attr-defined]
        replies.append(reply)
        await dispatcher._connection.publish(reply, b"one", None)

    await dispatcher._connection.subscribe("ql3.rpc.dispatcher.test", twice)
    await dispatcher.flush()
    answer = await gateway._connection.request("ql3.rpc.dispatcher.test", b"", timeout=WAIT_S)
    assert answer.data == b"one"

    async def hear(delivery: Delivery) -> None:
        await seen.add(delivery.payload)

    await gateway.subscribe(replies[0], hear)
    await gateway.flush()
    await dispatcher.publish_raw(replies[0], b"two")
    await dispatcher.flush()
    await gateway.flush()
    assert seen.items == []


async def test_a_service_may_only_create_the_declared_streams(bus_for: BusFactory) -> None:
    scheduler = await bus_for("scheduler")
    with pytest.raises((TimeoutError, ConnectionLost, NoResponders)):
        await jetstream_api(
            scheduler._connection, "STREAM.CREATE.SPY", {"name": "SPY", "subjects": ["ql3.rpc.>"]}, timeout=0.2
        )


def test_every_known_user_gets_its_row_and_a_worker_id_is_a_slug() -> None:
    passwords = dict.fromkeys([*SERVICES, OPERATOR, MAINTENANCE, "worker-w1"], "x")
    rows = {row["user"]: row["permissions"] for row in users(passwords, ["w1"])}
    assert set(rows) == set(passwords) - {"worker"}
    for permissions in rows.values():
        assert ">" not in permissions["publish"]["allow"]
        assert ">" not in permissions["subscribe"]["allow"]
    with pytest.raises(ValueError, match="slug"):
        worker_permissions("w1.>")


def _own_address() -> str:
    """An address of this machine that is not loopback, or one that surely does not answer."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.2"
