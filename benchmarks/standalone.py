"""The standalone profile for benchmarks and end-to-end tests: PostgreSQL, nats-server, and a process per service.

It is set up the way an operator does it: `ql3 provision`, `ql3 migrate`, then `ql3 serve NAME` for each.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from schemas.subjects import SERVICES
from services.cli.client import Client
from services.kit.bus import BusOptions
from services.kit.natsserver import find_binary
from tests.fixtures_database import Postgres, postgres_server

LIMIT_S = 60.0


class Standalone:
    """A running installation. `processes` maps a name such as `dispatcher-1` to its process."""

    def __init__(self, folder: Path, postgres: Postgres, environment: dict[str, str]) -> None:
        self.folder = folder
        self.postgres = postgres
        self.data = folder / "gateway"
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self._environment = environment
        self.nats_port = free_port()
        self.url = f"http://127.0.0.1:{free_port()}"
        database = quote(str(postgres.folder), safe="")
        self._database_url = f"postgresql:///ql3?host={database}"
        self._admin_url = f"postgresql://postgres@/ql3?host={database}"

    @property
    def secrets(self) -> Path:
        """What `ql3 provision` wrote."""
        return self.folder / "secrets"

    @property
    def token(self) -> str:
        """The bearer token of the gateway's local console."""
        console = json.loads((self.data / "console.json").read_text())
        return f"ql3c_{console['credential_id']}_{console['secret']}"

    def bus_options(self, user: str) -> BusOptions:
        """How a service's user connects."""
        password = (self.secrets / f"nats_{user}").read_text()
        return BusOptions(
            servers=(f"nats://127.0.0.1:{self.nats_port}",), service=user, user=user, password=password, edge=False
        )

    def prepare(self) -> None:
        """Provision, start nats-server, make the database, migrate."""
        self.ql3(
            "provision", "--output", str(self.secrets), "--worker", "local", "--nats-host", "127.0.0.1",
            "--nats-port", str(self.nats_port), "--nats-store", str(self.folder / "jetstream"),
        )  # fmt: skip
        subprocess.run(
            [str(self.postgres.binaries / "createdb"), "-h", str(self.postgres.folder), "-U", "postgres", "ql3"],
            check=True,
        )
        self.start_nats()
        self.ql3("keyring", "--file", str(self.folder / "keyring.json"))
        self.ql3(
            "migrate",
            QL3_DATABASE_ADMIN_URL=self._admin_url,
            QL3_DATABASE_CREDENTIALS=str(self.secrets / "database_passwords.json"),
            QL3_NATS_PASSWORD_FILE=str(self.secrets / "nats_maintenance"),
        )

    def start_nats(self) -> None:
        """Start nats-server; the port it opens is the signal that it is there."""
        self.processes["nats"] = subprocess.Popen(
            [str(find_binary()), "-c", str(self.secrets / "nats.conf")],
            stdout=subprocess.DEVNULL,
            stderr=(self.folder / "nats.log").open("a"),
            text=True,
        )
        until = time.monotonic() + LIMIT_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.nats_port), 1).close()
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.02)  # nothing to wait on before the port is there
            else:
                return

    def serve(
        self, service: str, *, name: str | None = None, wait: bool = True, **settings: str
    ) -> subprocess.Popen[str]:
        """Start one service in a process of its own, with further settings, and wait until it says that it serves."""
        name = name or service
        user = "worker-local" if service == "worker" else service
        extra = {
            "QL3_NATS_PASSWORD_FILE": str(self.secrets / f"nats_{user}"),
            "QL3_DATA": str(self.folder / ("gateway" if service == "gateway" else name)),
            "QL3_LISTEN": self.url.removeprefix("http://"),
            "QL3_ARTIFACTS": str(self.folder / "artifacts"),
            "QL3_KEYRING": str(self.folder / "keyring.json"),
        }
        if service != "worker":
            extra["QL3_DATABASE_PASSWORD_FILE"] = str(self.secrets / f"database_{service}")
        arguments = ["serve", service, *(["--stop-runs"] if service == "worker" else [])]
        process = subprocess.Popen(
            [sys.executable, "-m", "services.cli.main", *arguments],
            env=self._full(extra | settings),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=(self.folder / f"{name}.log").open("a"),
            text=True,
        )
        self.processes[name] = process
        if wait:
            self.wait_serving(name)
        return process

    def wait_serving(self, name: str) -> None:
        """Wait for a service's line. Raises RuntimeError with the end of its log when it ended instead."""
        stream = self.processes[name].stdout
        assert stream is not None
        if not stream.readline():
            raise RuntimeError(f"{name} did not start: {(self.folder / f'{name}.log').read_text()[-3000:]}")

    def ql3(self, *arguments: str, **extra: str) -> str:
        """Run a `ql3` command of the installation; its output."""
        result = subprocess.run(
            [sys.executable, "-m", "services.cli.main", *arguments],
            env=self._full(extra),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if result.returncode != 0:
            raise RuntimeError(f"ql3 {arguments[0]} ended with {result.returncode}: {result.stderr[-3000:]}")
        return result.stdout

    def client(self) -> Client:
        """A client as the local console."""
        return Client(self.url, self.token)

    def stop(self) -> None:
        """End everything that was started, services before nats-server."""
        order = sorted(self.processes, key=lambda name: name == "nats")
        for name in order:
            process = self.processes[name]
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for name in order:
            process = self.processes[name]
            try:
                process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def _full(self, extra: dict[str, str]) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("QL3_")}
        return {
            **clean,
            "QL3_PROFILE": "standalone",
            "QL3_DATABASE_URL": self._database_url,
            "QL3_NATS_URL": f"nats://127.0.0.1:{self.nats_port}",
            **self._environment,
            **extra,
        }


@contextmanager
def ql3_standalone(
    *, environment: dict[str, str] | None = None, services: Sequence[str] = SERVICES, durable: bool = True, **_: Any
) -> Generator[Standalone]:
    """The whole installation in a temporary folder, ready; everything has ended on leaving."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ql3-standalone-")))
        postgres = stack.enter_context(postgres_server(durable=durable))
        system = Standalone(folder, postgres, environment or {})
        stack.callback(system.stop)
        system.prepare()
        for service in services:
            system.serve(service, wait=False)
        for service in services:
            system.wait_serving(service)
        yield system


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
