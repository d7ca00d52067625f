"""Starting the process host, apart from the worker: its own session, no descriptor of ours, a clean environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import services

_CODE = "import sys; sys.path.insert(0, sys.argv.pop(1)); from services.worker.host.main import main; sys.exit(main())"
_MAX_LOG_BYTES = 1024 * 1024


def host_command(directory: Path, logs: Path) -> list[str]:
    """The argv of a host that owns `directory` and writes attempts' output to `logs`."""
    root = str(Path(services.__file__).resolve().parent.parent)
    return [sys.executable, "-I", "-S", "-c", _CODE, root, str(directory.resolve()), str(logs.resolve())]


def start_host(directory: Path, logs: Path) -> subprocess.Popen[bytes]:
    """Start a host and wait until it listens or has found that another one does. Raises RuntimeError if it cannot.

    Whoever calls keeps the returned object, so that an ended host is reaped; it is not stopped by dropping it.
    """
    for path in (directory, logs):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.chmod(0o700)
    errors = directory / "host.err"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(errors, flags, 0o600)
    try:
        if os.fstat(fd).st_size > _MAX_LOG_BYTES:
            os.ftruncate(fd, 0)
        process = subprocess.Popen(
            host_command(directory, logs),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=fd,
            env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8"},
            cwd="/",
            start_new_session=True,
        )
    finally:
        os.close(fd)
    assert process.stdout is not None
    with process.stdout as output:
        line = output.readline()
    if line != b"ready\n" and process.wait() != 75:
        raise RuntimeError("the process host did not start; see host.err in its directory")
    return process
