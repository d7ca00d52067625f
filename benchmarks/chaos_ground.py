"""The installation of a chaos check: processes that may be killed and paused one by one, and the blows against them.

Every service is started as an operator would (`ql3 serve`), and started again when it ended, as a supervisor would. On
SQLite the dispatcher, the worker and the rest are processes of their own all the same; on PostgreSQL there are two
dispatchers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import quote

from benchmarks.chaos_plan import Fault, Plan
from benchmarks.chaos_verdict import Done, Outage
from benchmarks.standalone import free_port
from schemas.subjects import SERVICES
from services.cli.provision import provision
from services.cli.serve import migrate_all
from services.kit.config import load
from services.kit.logging import configure
from services.kit.natsserver import find_binary
from services.vault import keyring
from tests.fixtures_database import Postgres

LIMIT_S: Final = 60.0
FRONT: Final = tuple(name for name in SERVICES if name not in ("dispatcher", "worker"))
RECORDER: Final = Path(__file__).with_name("chaos_recorder.sh")
WORKER_SLOTS: Final = 32
WORKER_IDS: Final = {"worker": "local", "worker-2": "second"}
_QL3: Final = (sys.executable, "-m", "services.cli.main")


class Ground:
    """Processes by name: `nats`, `front`, `dispatcher`, `dispatcher-2`, `worker`, `worker-2`; process hosts are found
    by their locks. Whoever strikes or revives a process holds its lock meanwhile."""

    def __init__(self, plan: Plan, folder: Path, postgres: Postgres | None, done: Done) -> None:
        self.folder = folder
        self.records = folder / "records"
        self.postgres = postgres
        self.done = done
        self.blows: Counter[str] = Counter()
        self.crashes: list[str] = []
        """Services that ended although nobody struck them, with the end of what they said."""
        self.url = f"http://127.0.0.1:{free_port()}"
        self._nats_port = free_port()
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._locks = {name: asyncio.Lock() for name in plan.parts}
        self._paused: set[int] = set()

    # -- from nothing to a running installation

    async def raise_up(self) -> None:
        """Provision, migrate, start everything; returns when all of it serves."""
        configure("warning")
        self.records.touch()
        secrets = self.folder / "secrets"
        store, workers = str(self.folder / "jetstream"), list(WORKER_IDS.values())
        provision(
            secrets, workers=workers, host="127.0.0.1", port=self._nats_port, store=store, database="unused:1/ql3"
        )
        passwords = {path.name.removeprefix("nats_"): path.read_text() for path in secrets.glob("nats_*")}
        (self.folder / "nats.json").write_text(json.dumps(passwords))
        keyring.provision(self.folder / "keyring.json")
        extra: dict[str, str] = {}
        if self.postgres is not None:
            createdb = [str(self.postgres.binaries / "createdb"), "-h", str(self.postgres.folder), "-U", "postgres"]
            await asyncio.to_thread(subprocess.run, [*createdb, "ql3"], check=True)
            host = quote(str(self.postgres.folder), safe="")
            extra = {"QL3_DATABASE_ADMIN_URL": f"postgresql://postgres@/ql3?host={host}"}
        await self._start_nats()
        # Here and not by the command: a process more to start would be the longest part of a quick check.
        (self.folder / "db").mkdir()
        await migrate_all(load(self._environment("operator") | extra))
        names = [name for name in self._locks if name not in ("host", "host-2", "nats", "postgres")]
        await asyncio.gather(*(self._revive(name) for name in names))

    @property
    def token(self) -> str:
        """The bearer token of the local console, as the gateway that started last wrote it."""
        console = json.loads((self.folder / "front" / "console.json").read_text())
        return f"ql3c_{console['credential_id']}_{console['secret']}"

    def bring_down(self) -> None:
        """End everything that was started, at once, by pid; also scripts that still run."""
        for pid in self._paused:
            _signal(pid, signal.SIGCONT)
        for process in self._processes.values():
            _signal(process.pid, signal.SIGKILL)
        for process in self._processes.values():
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        # Process hosts and scripts are nobody's children by now; both name the folder, which is this check's alone.
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                command = _command(int(entry.name))
                if f"{RECORDER} {self.records} " in command or (
                    "worker.host.main" in command and f" {self.folder}/" in command
                ):
                    _signal(int(entry.name), signal.SIGKILL)

    # -- blows

    async def strike(self, fault: Fault, chance: random.Random) -> None:
        """Carry a fault out and bring back what it took down."""
        what = f"{fault.blow}:{'everything' if len(fault.victims) > 3 else '+'.join(fault.victims)}"
        self.blows[what] += 1
        if fault.blow == "script":
            for _ in range(60):
                if self._kill_a_script(chance):
                    break
                await asyncio.sleep(0.05)  # none runs just now
            return
        async with contextlib.AsyncExitStack() as stack:
            for name in sorted(fault.victims):
                await stack.enter_async_context(self._locks[name])
            stack.enter_context(self._noted(what))
            if fault.blow == "pause":
                await self._pause(fault.victims, fault.down_s)
            elif fault.blow == "restart":
                await self._restart_database(fault.down_s)
            else:
                await self._kill(fault.victims, fault.down_s, wipe=fault.blow == "wipe")

    @contextlib.contextmanager
    def _noted(self, what: str) -> Generator[None]:
        with (self.folder / "faults.log").open("a") as log:
            print(f"{now_s():.2f} {time.strftime('%H:%M:%S')} {what}", file=log, flush=True)
            yield
            print(f"{now_s():.2f} {time.strftime('%H:%M:%S')} {what} is over", file=log)

    async def watch(self) -> None:
        """Start again, and note, whatever ends without a blow. Runs until cancelled."""
        while True:
            for name, process in list(self._processes.items()):
                if process.poll() is not None and not self._locks[name].locked():
                    self.crashes.append(f"{name} ended with {process.returncode}: {self._last_words(name)}")
                    async with self._locks[name]:
                        await self._revive(name)
            await asyncio.sleep(0.2)

    async def _kill(self, victims: Sequence[str], down_s: float, *, wipe: bool) -> None:
        began = now_s()
        hosts = {name: pid for name in victims if name.startswith("host") and (pid := self._pid(name)) is not None}
        names = [name for name in victims if name in self._processes]
        for pid in (*hosts.values(), *(self._processes[name].pid for name in names)):
            _signal(pid, signal.SIGKILL)
        for name in names:
            await asyncio.to_thread(self._processes[name].wait)
        if wipe:
            await asyncio.to_thread(shutil.rmtree, self.folder / "jetstream", ignore_errors=True)
        await asyncio.sleep(down_s)
        if "nats" in names:
            await self._revive("nats")
        await asyncio.gather(*(self._revive(name) for name in names if name != "nats"))
        for name, pid in hosts.items():
            await self._await_host(name, after=pid)
            self.done.host_down.append(Outage(WORKER_IDS[_worker_of(name)], began, now_s()))
        self._stood_still(victims, began)
        self.done.worker_kills += len(WORKER_IDS.keys() & set(names))

    async def _pause(self, victims: Sequence[str], down_s: float) -> None:
        began = now_s()
        pids = [pid for name in victims if (pid := self._pid(name)) is not None]
        for pid in pids:
            _signal(pid, signal.SIGSTOP)
        self._paused.update(pids)
        try:
            await asyncio.sleep(down_s)
        finally:
            for pid in pids:
                _signal(pid, signal.SIGCONT)
            self._paused.difference_update(pids)
        self._stood_still(victims, began)

    async def _restart_database(self, down_s: float) -> None:
        assert self.postgres is not None
        self.postgres.stop()  # at once, as a crash would; in this thread, see Postgres.start
        await asyncio.sleep(down_s)
        self.postgres.start()

    def _kill_a_script(self, chance: random.Random) -> bool:
        open_scripts: dict[str, int] = {}
        for line in self.records.read_text().splitlines()[-400:]:
            match line.split():
                case ["start", attempt, _, pid, _, _]:
                    open_scripts[attempt] = int(pid)
                case ["end", attempt, *_]:
                    open_scripts.pop(attempt, None)
                case _:
                    continue
        attempts = sorted(open_scripts)
        chance.shuffle(attempts)
        for attempt in attempts:
            pid = open_scripts[attempt]
            try:
                descriptor = os.pidfd_open(pid)
            except OSError:
                continue
            try:
                if str(self.records) in _command(pid):
                    self.done.killed[attempt] = now_s()
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                    return True
            except ProcessLookupError:
                continue
            finally:
                os.close(descriptor)
        return False

    def _stood_still(self, victims: Sequence[str], began: float) -> None:
        now = now_s()
        if any(name != "front" for name in victims):
            self.done.longest_pause_s = max(self.done.longest_pause_s, now - began)
        self.done.cut += [Outage(WORKER_IDS.get(name, name), began, now) for name in victims]

    # -- processes

    async def _revive(self, name: str) -> None:
        if name == "nats":
            await self._start_nats()
            return
        until = time.monotonic() + LIMIT_S
        while True:
            process = self._serve(name)
            assert process.stdout is not None
            if await asyncio.to_thread(process.stdout.readline):
                return
            # It may have met a message server or a database that is down: a supervisor starts it again.
            await asyncio.to_thread(process.wait)
            if time.monotonic() > until:
                raise RuntimeError(f"{name} does not start: {self._last_words(name)}")
            await asyncio.sleep(0.3)

    def _serve(self, name: str) -> subprocess.Popen[str]:
        services = FRONT if name == "front" else (name.removesuffix("-2"),)
        return self._launch(name, [*_QL3, "serve", *services])

    async def _start_nats(self) -> None:
        process = self._launch("nats", [str(find_binary()), "-c", str(self.folder / "secrets" / "nats.conf")])
        until = time.monotonic() + LIMIT_S
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self._nats_port)
            except OSError:
                if time.monotonic() > until or process.poll() is not None:
                    raise RuntimeError(f"nats-server does not start: {self._last_words('nats')}") from None
                await asyncio.sleep(0.02)  # nothing to wait on before the port is there
            else:
                writer.close()
                return

    def _launch(self, name: str, command: list[str]) -> subprocess.Popen[str]:
        if name in self._processes and (stream := self._processes[name].stdout) is not None:
            stream.close()
        with (self.folder / f"{name}.log").open("a") as log:
            process = subprocess.Popen(
                command,
                env=self._environment(name),
                stdin=subprocess.DEVNULL,
                stdout=log if name == "nats" else subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._processes[name] = process
        return process

    async def _await_host(self, name: str, *, after: int) -> None:
        """Wait until the worker has started another process host; what it does not do in time, it is judged for."""
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            if self._pid(name) not in (None, after):
                return
            await asyncio.sleep(0.05)
        self.crashes.append(f"{name}: its worker did not start another process host")

    def _pid(self, name: str) -> int | None:
        """The process of a part; a process host by its lock, when its command line names its directory."""
        if not name.startswith("host"):
            return self._processes[name].pid
        directory = self.folder / _worker_of(name) / "worker" / "host"
        try:
            pid = int((directory / "host.lock").read_text())
        except (OSError, ValueError):
            return None
        return pid if str(directory) in _command(pid) else None

    def _environment(self, name: str) -> dict[str, str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("QL3_")}
        clean |= {
            "QL3_PROFILE": "standalone",
            "QL3_DATA": str(self.folder / name),
            "QL3_NATS_URL": f"nats://127.0.0.1:{self._nats_port}",
            "QL3_NATS_CREDENTIALS": str(self.folder / "nats.json"),
            "QL3_LISTEN": self.url.removeprefix("http://"),
            "QL3_ARTIFACTS": str(self.folder / "artifacts"),
            "QL3_KEYRING": str(self.folder / "keyring.json"),
            "QL3_WORKER_SLOTS": str(WORKER_SLOTS),
            "QL3_WORKER_ID": WORKER_IDS.get(name, "local"),
            "QL3_LOG_LEVEL": "warning",
        }
        if self.postgres is None:
            clean["QL3_DATABASE_URL"] = f"sqlite:{self.folder / 'db'}"
        else:
            clean["QL3_DATABASE_URL"] = f"postgresql:///ql3?host={quote(str(self.postgres.folder), safe='')}"
            clean["QL3_DATABASE_CREDENTIALS"] = str(self.folder / "secrets" / "database_passwords.json")
        return clean

    def _last_words(self, name: str) -> str:
        with contextlib.suppress(OSError):
            return (self.folder / f"{name}.log").read_text()[-1500:]
        return ""


def now_s() -> float:
    """Seconds since boot, as the scripts record them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _worker_of(host: str) -> str:
    return host.replace("host", "worker")


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
