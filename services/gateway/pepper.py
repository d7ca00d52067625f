"""The gateway's own key: what is stored about a secret is worth nothing without it."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from schemas.errors import Ql3Error
from services.kit import whole_files
from services.kit.sealing import decode_base64url, encode_base64url

PEPPER_BYTES = 32
NONCE_BYTES = 12


class Pepper:
    """32 secret bytes, used only through keys of one purpose each."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        if len(key) != PEPPER_BYTES:
            raise Ql3Error("setup_invalid", "The gateway's key must have 32 bytes.", field="QL3_GATEWAY_KEY")
        self._key = key

    @classmethod
    def generate(cls) -> Pepper:
        """A fresh key that is kept nowhere."""
        return cls(secrets.token_bytes(PEPPER_BYTES))

    def digest(self, purpose: str, *parts: str) -> str:
        """Hex HMAC-SHA256 of the parts under the purpose's own key. Parts hold no NUL."""
        return hmac.new(self._derive(purpose), "\0".join(parts).encode(), hashlib.sha256).hexdigest()

    def seal(self, purpose: str, plaintext: bytes, bound_to: str) -> str:
        """What only this key opens again, and only for the name that it was bound to."""
        nonce = os.urandom(NONCE_BYTES)
        return encode_base64url(nonce + AESGCM(self._derive(purpose)).encrypt(nonce, plaintext, bound_to.encode()))

    def open(self, purpose: str, sealed: str, bound_to: str) -> bytes:
        """The inverse of `seal`. Raises `secret_unavailable` when the key or the name is another."""
        try:
            raw = decode_base64url(sealed)
            return AESGCM(self._derive(purpose)).decrypt(raw[:NONCE_BYTES], raw[NONCE_BYTES:], bound_to.encode())
        except (ValueError, InvalidTag) as error:
            raise Ql3Error("secret_unavailable", "A stored factor could not be opened with this key.") from error

    def _derive(self, purpose: str) -> bytes:
        return hmac.new(self._key, b"ql3.gateway." + purpose.encode() + b".v1", hashlib.sha256).digest()


def load_pepper(path: Path) -> Pepper:
    """The key in a file that others cannot read; made (mode 0600) when there is none. Raises `setup_invalid`."""
    if not path.exists():
        _make(path)
    try:
        if path.stat().st_mode & 0o027:
            raise Ql3Error(
                "setup_invalid", "Others may read or change the gateway's key file.", field="QL3_GATEWAY_KEY"
            )
        return Pepper(path.read_bytes())
    except OSError as error:
        raise Ql3Error("setup_invalid", "The gateway's key file cannot be read.", field="QL3_GATEWAY_KEY") from error


def _make(path: Path) -> None:
    # Another process sees a whole key or none, and the first one made stays.
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        whole_files.create(path, secrets.token_bytes(PEPPER_BYTES))
    except OSError as error:
        raise Ql3Error("setup_invalid", "The gateway's key file cannot be made.", field="QL3_GATEWAY_KEY") from error
