"""Starts the real thing for a benchmark: `ql3 up` in a temporary folder, or a process per service on PostgreSQL."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from services.kit.bus import BusOptions

READY_LIMIT_S = 60.0


class System:
    """A running `ql3 up`: its data folder, its process, and when it was started and ready (monotonic seconds)."""

    def __init__(self, data: Path, process: subprocess.Popen[str], started: float, ready: float, line: str) -> None:
        self.data = data
        self.process = process
        self.cold_start_s = ready - started
        self.line = line

    @property
    def console(self) -> dict[str, Any]:
        """`console.json`: url, credential id and secret."""
        return json.loads((self.data / "console.json").read_text())

    @property
    def token(self) -> str:
        """The bearer token of the local console."""
        console = self.console
        return f"ql3c_{console['credential_id']}_{console['secret']}"

    @property
    def url(self) -> str:
        """Where the gateway listens."""
        return self.console["url"]

    def bus_options(self, user: str) -> BusOptions:
        """How a service's user connects to the embedded nats-server."""
        nats = self.data / "nats"
        password = json.loads((nats / "credentials.json").read_text())[user]
        url = json.loads((nats / "endpoint.json").read_text())["url"]
        return BusOptions(servers=(url,), service=user, user=user, password=password)

    def command(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a `ql3` command against this system."""
        environment = {**os.environ, "QL3_DATA": str(self.data)}
        result = subprocess.run(
            [sys.executable, "-m", "services.cli.main", *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if check and result.returncode != 0:
            raise RuntimeError(f"ql3 {' '.join(arguments)} ended with {result.returncode}: {result.stderr.strip()}")
        return result

    def pids(self) -> dict[int, str]:
        """Every living process that the system started, with itself: pid to command line."""
        found: dict[int, str] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                text = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            except OSError:
                continue
            if str(self.data) in text or int(entry.name) == self.process.pid:
                found[int(entry.name)] = text
        return found


@contextmanager
def ql3_up(*arguments: str, environment: dict[str, str] | None = None) -> Iterator[System]:
    """`ql3 up --data TEMPORARY --listen 127.0.0.1:0 …`, ready; everything it started has ended on leaving."""
    with tempfile.TemporaryDirectory(prefix="ql3-bench-") as folder:
        data = Path(folder) / "data"
        log = (Path(folder) / "up.log").open("w+")
        started = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "services.cli.main", "up", "--data", str(data), "--listen", "127.0.0.1:0",
             "--stop-runs", *arguments],
            env={**os.environ, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )  # fmt: skip
        assert process.stdout is not None
        try:
            # `up` prints its one line when it is ready; the line is the signal, the limit only bounds a failure.
            line = process.stdout.readline()
            ready = time.monotonic()
            if not line or process.poll() is not None:
                log.seek(0)
                raise RuntimeError(f"ql3 up did not start: {log.read()[-2000:]}")
            yield System(data, process, started, ready, line.strip())
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=READY_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
            log.close()
