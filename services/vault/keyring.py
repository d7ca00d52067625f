"""The keyring file: the keys under which envelopes are encrypted, outside of the database.

    {"version": 1, "activeKeyId": "k-…", "keys": {"k-…": "<43 characters of unpadded base64url>"}}

It is read anew for every operation, so that a rotation works while the vault runs: (1) write a file with the old and
the new key, active the new one, and rename it over the old (`rotate`); (2) set secrets again where old envelopes should
move to the new key; (3) remove the old key when no envelope that is still wanted bears its id. A key removed too early
makes envelopes unavailable, not corrupt. Back up database and keyring as a pair.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import secrets
import stat
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from schemas.errors import Ql3Error
from services.kit import whole_files
from services.kit.sealing import SealingKey, decode_base64url, encode_base64url

KEY_BYTES = 32
MAX_KEYS = 16
MAX_FILE_BYTES = 16 * 1024
MAX_KEY_ID_CHARS = 128
_KeyId = Annotated[str, Meta(min_length=1, max_length=MAX_KEY_ID_CHARS)]
_INTAKE_DOMAIN = b"ql3.vault-intake.v1"


def unavailable() -> Ql3Error:
    """The one error for every fault of keys and envelopes: it must not tell which."""
    return Ql3Error("secret_unavailable")


class Keyring:
    """The keys of one reading of the file. `wipe` when done; Python's wiping is best effort."""

    def __init__(self, active_key_id: str, keys: dict[str, bytearray]) -> None:
        self.active_key_id = active_key_id
        self._keys = keys

    @property
    def active(self) -> bytearray:
        """The key for new envelopes."""
        return self._keys[self.active_key_id]

    @property
    def key_ids(self) -> frozenset[str]:
        """Ids of all keys."""
        return frozenset(self._keys)

    def key(self, key_id: str) -> bytearray:
        """The key of an envelope. Raises `secret_unavailable` when it is not in the ring."""
        found = self._keys.get(key_id)
        if found is None:
            raise unavailable()
        return found

    def intake(self) -> SealingKey:
        """The X25519 key to which values are sealed on their way in.

        It is derived from the active key, so that every replica that mounts the same keyring opens the same boxes and
        there is no second file to lose.
        """
        return _intake(self.active)

    def intakes(self) -> list[SealingKey]:
        """The keys of boxes that may still be on their way: the active one first, then those from before a rotation."""
        others = [key for key_id, key in self._keys.items() if key_id != self.active_key_id]
        return [self.intake(), *(_intake(key) for key in others)]

    def wipe(self) -> None:
        """Overwrite the key bytes."""
        for key in self._keys.values():
            key[:] = bytes(len(key))


class KeyringFile:
    """Reads the file at an absolute path; nothing is kept between readings."""

    def __init__(self, path: Path) -> None:
        if not path.is_absolute():
            raise ValueError("the keyring path is absolute")
        self._path = path

    def read(self) -> Keyring:
        """All keys, each validated. Raises `secret_unavailable`; blocking, a few kilobytes."""
        try:
            return _parse(_read_private(self._path))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            # The cause may hold bytes of the file, so it is not kept with the error.
            raise unavailable() from None


def provision(path: Path) -> None:
    """Make a keyring with one fresh key, mode 0600, unless a file is there; never replaces one. Raises OSError."""
    if os.path.lexists(path):
        return
    key_id = _new_key_id()
    # Of two that provision at once, one file stands and both use it.
    whole_files.create(path, _render(key_id, {key_id: secrets.token_bytes(KEY_BYTES)}))


def rotate(path: Path, expected_active: str) -> str:
    """Add a fresh key and make it active; the new key's id.

    Raises `version_conflict` when another key is active, `capacity` when the ring is full.
    """
    lock = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ring = KeyringFile(path).read()
        if ring.active_key_id != expected_active:
            raise Ql3Error("version_conflict", "Another key is active.")
        if len(ring.key_ids) >= MAX_KEYS:
            raise Ql3Error("capacity", f"The keyring holds {MAX_KEYS} keys.")
        keys = {key_id: bytes(ring.key(key_id)) for key_id in sorted(ring.key_ids)}
        ring.wipe()
        key_id = _new_key_id()
        keys[key_id] = secrets.token_bytes(KEY_BYTES)
        whole_files.replace(path, _render(key_id, keys))
        return key_id
    finally:
        os.close(lock)


def _intake(key: bytes | bytearray) -> SealingKey:
    return SealingKey.from_bytes(hmac.digest(bytes(key), _INTAKE_DOMAIN, hashlib.sha256))


def _new_key_id() -> str:
    return f"k-{secrets.token_hex(8)}"


def _render(active: str, keys: dict[str, bytes]) -> bytes:
    encoded = {key_id: encode_base64url(key) for key_id, key in keys.items()}
    return json.dumps({"version": 1, "activeKeyId": active, "keys": encoded}, indent=1).encode() + b"\n"


def _read_private(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as reader:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077 or found.st_uid not in (os.geteuid(), 0):
            raise ValueError("not a private file")
        if not 1 <= found.st_size <= MAX_FILE_BYTES:
            raise ValueError("size")
        content = reader.read(MAX_FILE_BYTES + 1)
        if len(content) != found.st_size:  # torn, or written meanwhile
            raise ValueError("size")
        return content


class _File(msgspec.Struct, forbid_unknown_fields=True):
    version: Literal[1]
    active: str = msgspec.field(name="activeKeyId")
    keys: Annotated[dict[_KeyId, str], Meta(min_length=1, max_length=MAX_KEYS)]


def _parse(content: bytes) -> Keyring:
    plain = json.loads(content.decode("utf-8", "strict"), object_pairs_hook=_no_duplicates)
    found = msgspec.convert(plain, _File)
    ring = {key_id: bytearray(decode_base64url(text)) for key_id, text in found.keys.items()}
    if found.active not in ring or any(len(key) != KEY_BYTES for key in ring.values()):
        raise ValueError("keys")
    return Keyring(found.active, ring)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    plain = dict(pairs)
    if len(plain) != len(pairs):
        raise ValueError("a name stands twice")
    return plain
