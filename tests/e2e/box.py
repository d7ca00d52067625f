"""A real `ql3 up` in a folder of the test: started, killed, started again, with scripts that record their starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from schemas.runs import RUN_TERMINAL
from services.cli.client import Client, find

LIMIT_S = 60.0
PROJECT = "/projects/default"
RECORDER = Path(__file__).parent / "recorder.py"


class Box:
    """One data folder and the processes on it. Nothing that it started outlives `close`."""

    def __init__(self, folder: Path, *, environment: dict[str, str] | None = None) -> None:
        self.data = folder / "data"
        self.records = folder / "records"
        self.records.mkdir(parents=True)
        self.log = folder / "up.log"
        self._environment = environment or {}
        self._process: subprocess.Popen[str] | None = None

    # -- the process

    def start(self, *arguments: str) -> str:
        """Start `ql3 up` and return its line once it is ready."""
        self._process = subprocess.Popen(
            [*QL3, "up", "--data", str(self.data), "--listen", "127.0.0.1:0", *arguments],
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self.log.open("a"),
            text=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait(LIMIT_S)
            raise AssertionError(f"ql3 up did not start:\n{self.log.read_text()[-4000:]}")
        return line.strip()

    def environment(self) -> dict[str, str]:
        """What `ql3` is run with: no setting of the caller's, the data folder named."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("QL3_")}
        return {**clean, "QL3_DATA": str(self.data), **self._environment}

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Ask `up` to end and wait for it; its exit code."""
        assert self._process is not None
        self._process.send_signal(number)
        code = self._process.wait(LIMIT_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process = None
        return code

    def processes(self) -> dict[int, str]:
        """Living processes that name the data folder, `up` included: pid to command line."""
        found: dict[int, str] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                except OSError:
                    continue
                if str(self.data) in command and state != "Z":
                    found[int(entry.name)] = command
        return found

    def kill(self, which: Callable[[str], bool] = lambda command: True) -> list[int]:
        """SIGKILL every process whose command line `which` accepts, at once; the pids."""
        doomed = [pid for pid, command in self.processes().items() if which(command)]
        for pid in doomed:
            os.kill(pid, signal.SIGKILL)
        if self._process is not None and self._process.pid in doomed:
            self._process.wait(LIMIT_S)
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None
        eventually(lambda: not set(doomed) & set(self.processes()), "the killed processes are gone")
        return doomed

    def close(self) -> None:
        """End whatever is left, also what a failed test left running."""
        if self._process is not None:
            self.kill()
        self.kill()
        for record in self.starts():
            try:
                os.killpg(record["pid"], signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue

    # -- the API

    def client(self) -> Client:
        """A client as the local console."""
        return Client(*find(self.data))

    def ql3(self, *arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run a `ql3` command against this box."""
        return subprocess.run(
            [*QL3, *arguments],
            env=self.environment(),
            capture_output=True,
            text=True,
            input=text,
            timeout=LIMIT_S * 2,
            check=False,
        )

    def create(self, client: Client, name: str, command: list[str], **terms: Any) -> dict[str, Any]:
        """A task by the API; `triggers` and `execution` are lifted out of `terms`."""
        triggers = terms.pop("triggers", [])
        execution = {"command": command, **terms.pop("execution", {})}
        body = {"name": name, "spec": {"execution": execution, "terms": terms}, "triggers": triggers}
        return client.post(f"{PROJECT}/tasks", body)

    def recording(self, name: str, *, seconds: float = 0.0) -> list[str]:
        """A command that records its start and end under `name` and works for `seconds`, or until `enough(name)`."""
        return [sys.executable, "-S", str(RECORDER), str(self.records), name, str(seconds)]

    def enough(self, name: str) -> None:
        """Let the commands that record under `name` come to their end."""
        (self.records / f"{name}.enough").touch()

    def starts(self, name: str | None = None) -> list[dict[str, Any]]:
        """What the recorded scripts wrote at their start: attempt, run, pid."""
        rows = [json.loads(path.read_text()) for path in sorted(self.records.glob("*.start"))]
        return [row for row in rows if name is None or row["name"] == name]

    def ends(self) -> list[str]:
        """The attempts whose script came to its end."""
        return [path.stem for path in self.records.glob("*.end")]


QL3 = [sys.executable, "-m", "services.cli.main"]


def run_of(client: Client, run_id: str) -> dict[str, Any]:
    """The run as it is now."""
    return client.get(f"{PROJECT}/runs/{run_id}")


def all_ended(client: Client, run_ids: Iterable[str], *, limit_s: float = LIMIT_S) -> dict[str, dict[str, Any]]:
    """Wait until every run has ended; run id to run. Reads the API, because facts may be lost in these tests."""
    rows: dict[str, dict[str, Any]] = {}

    def ended() -> bool:
        for run_id in run_ids:
            if run_id not in rows:
                row = run_of(client, run_id)
                if row["status"] in RUN_TERMINAL:
                    rows[run_id] = row
        return len(rows) == len(list(run_ids))

    eventually(ended, "every run has ended", limit_s=limit_s)
    return rows


def eventually(holds: Callable[[], bool], what: str, *, limit_s: float = LIMIT_S) -> None:
    """Ask again until something of another process holds; for what sends no signal to us."""
    until = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > until:
            pytest.fail(f"not within {limit_s:.0f} s: {what}")
        time.sleep(0.05)
