"""Entry point: `python -I -S -c "…main()" DIRECTORY LOGS`. Prints `ready` once the socket listens, then runs.

Exit codes: 0 retired, 75 another host owns the directory, 1 anything else.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import sys
from typing import Final

from services.worker.host.loop import Host
from services.worker.host.receipts import Receipts
from services.worker.host.wire import SOCKET_NAME, open_directory, socket_address

ALREADY: Final = 75
SWITCH_S: Final = 0.001
_PR_SET_CHILD_SUBREAPER: Final = 36


def main() -> int:
    """Own the directory, listen, run until retired."""
    directory, logs = sys.argv[1], sys.argv[2]
    os.umask(0o077)
    directory_fd = open_directory(directory)
    os.fchmod(directory_fd, 0o700)
    lock = os.open("host.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory_fd)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return ALREADY
    os.ftruncate(lock, 0)
    os.write(lock, f"{os.getpid()}\n".encode())
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        print("this kernel has no subreapers; the process host needs them", file=sys.stderr)
        return 1
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    with contextlib.suppress(FileNotFoundError):  # of a host that died: the lock is ours
        os.unlink(SOCKET_NAME, dir_fd=directory_fd)
    listener.bind(socket_address(directory_fd))
    listener.listen(4)
    host = Host(listen_fd=listener.detach(), logs_fd=open_directory(logs), receipts=Receipts(f"{directory}/receipts"))
    # The syncer's thread has many short steps between its waits for the disk; it must not stand in line for 5 ms each.
    sys.setswitchinterval(SWITCH_S)
    _take_signals(host)
    os.chdir("/")
    print("ready", flush=True)
    _let_go_of_terminal()
    host.run()
    with contextlib.suppress(FileNotFoundError):
        os.unlink(SOCKET_NAME, dir_fd=directory_fd)
    return 0


def _take_signals(host: Host) -> None:
    def retire(*_: object) -> None:
        host.retiring = True

    def wake(*_: object) -> None:
        """The wakeup descriptor does the work."""

    signal.signal(signal.SIGCHLD, wake)
    signal.signal(signal.SIGTERM, retire)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _let_go_of_terminal() -> None:
    # Whoever started us may wait for the end of our output; errors go to the file that is our stderr.
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
