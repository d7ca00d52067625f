"""Small files that a reader sees whole or not at all, whatever crashes: passwords, keys, settings.

Written beside under a random name, synced, then put in place in one step: `replace` by rename, `create` by link, which
never replaces what stands. The folder is synced too, so that the name outlives a loss of power.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path


def replace(path: Path, content: bytes, *, mode: int = 0o600) -> None:
    """Put a file in place of the one that may be there. Raises `OSError`; then the old one stands as it was."""
    _publish(path, content, mode, lambda draft: os.replace(draft, path))


def create(path: Path, content: bytes, *, mode: int = 0o600) -> bool:
    """Make a file, or leave the one that is there as it is and answer False. Raises `OSError`."""
    made = True

    def link(draft: Path) -> None:
        nonlocal made
        try:
            os.link(draft, path, follow_symlinks=False)
        except FileExistsError:
            made = False

    _publish(path, content, mode, link)
    return made


def make_folders(path: Path) -> None:
    """Make a folder and each missing one above it, all for their owner alone. Raises `OSError`.

    `parents=True` would give those above it whatever the umask leaves.
    """
    if not path.is_dir():
        make_folders(path.parent)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)


def _publish(path: Path, content: bytes, mode: int, place: Callable[[Path], None]) -> None:
    draft = path.with_name(f".{path.name}.{secrets.token_hex(16)}.tmp")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        place(draft)
    finally:
        draft.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
