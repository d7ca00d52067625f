"""Sealed boxes: what only the holder of one X25519 key can open.

A secret travels over the bus only like this: from the gateway to the vault (sealed to the vault's key) and from the
vault to a worker's session (sealed to the session's key). Each box has its own ephemeral key (X25519, HKDF-SHA256,
AES-256-GCM), and its context says what it was sealed for, so that a box moved to another name or attempt does not open.

Form: unpadded base64url of `ephemeral public key (32) | nonce (12) | ciphertext and tag`.
"""

from __future__ import annotations

import base64
import os
import re

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

KEY_BYTES = 32
NONCE_BYTES = 12
TAG_BYTES = 16
_DOMAIN = b"ql3.sealed-box.v1\0"
_ALPHABET = re.compile(r"[A-Za-z0-9_-]*")


class SealError(Exception):
    """A box could not be made or opened. One constant text for every cause: it must not tell which."""

    def __init__(self) -> None:
        super().__init__("The sealed value could not be opened.")


class SealingKey:
    """An X25519 key pair. `public` (unpadded base64url) is what others seal to."""

    __slots__ = ("_private", "public")

    def __init__(self, private: X25519PrivateKey) -> None:
        self._private = private
        self.public = encode_base64url(private.public_key().public_bytes_raw())

    @classmethod
    def generate(cls) -> SealingKey:
        """A fresh key, for one session."""
        return cls(X25519PrivateKey.generate())

    @classmethod
    def from_bytes(cls, raw: bytes) -> SealingKey:
        """The key of 32 private bytes. Raises SealError on another length."""
        if len(raw) != KEY_BYTES:
            raise SealError
        return cls(X25519PrivateKey.from_private_bytes(raw))

    def private_bytes(self) -> bytes:
        """The 32 private bytes, to be kept in a file of mode 0600."""
        return self._private.private_bytes(
            serialization.Encoding.Raw, serialization.PrivateFormat.Raw, serialization.NoEncryption()
        )

    def open(self, sealed: str, context: bytes) -> bytearray:
        """What was sealed to this key under the same context; the caller wipes it. Raises SealError, never says why."""
        try:
            box = decode_base64url(sealed)
            if len(box) < KEY_BYTES + NONCE_BYTES + TAG_BYTES:
                raise SealError
            ephemeral, nonce, content = (
                box[:KEY_BYTES],
                box[KEY_BYTES : KEY_BYTES + NONCE_BYTES],
                box[KEY_BYTES + NONCE_BYTES :],
            )
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(ephemeral))
            key = _derive(shared, ephemeral, self._private.public_key().public_bytes_raw(), context)
            return bytearray(AESGCM(key).decrypt(nonce, content, _DOMAIN + context))
        except (ValueError, InvalidTag) as error:
            raise SealError from error


def seal(public_key: str, plaintext: bytes | bytearray, context: bytes) -> str:
    """Seal to an X25519 public key (unpadded base64url). Raises SealError when that is not a usable key."""
    try:
        recipient = decode_base64url(public_key)
        ephemeral = X25519PrivateKey.generate()
        ephemeral_public = ephemeral.public_key().public_bytes_raw()
        shared = ephemeral.exchange(X25519PublicKey.from_public_bytes(recipient))
    except ValueError as error:
        raise SealError from error
    nonce = os.urandom(NONCE_BYTES)
    content = AESGCM(_derive(shared, ephemeral_public, recipient, context)).encrypt(nonce, plaintext, _DOMAIN + context)
    return encode_base64url(ephemeral_public + nonce + content)


def secret_context(project: str, name: str, mutation_id: str) -> bytes:
    """The context of a secret's value on its way in (`secrets.set`)."""
    return f"secret|{project}|{name}|{mutation_id}".encode()


def attempt_context(attempt_id: str, lease_generation: int) -> bytes:
    """The context of an attempt's secrets on their way to the worker's session (`context.open`)."""
    return f"attempt|{attempt_id}|{lease_generation}".encode()


def encode_base64url(raw: bytes) -> str:
    """Unpadded base64url."""
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def decode_base64url(text: str) -> bytes:
    """Strict unpadded base64url. Raises ValueError on a foreign character or trailing bits that are not canonical."""
    # urlsafe_b64decode drops foreign characters silently, so the alphabet is checked and the text encoded again.
    if _ALPHABET.fullmatch(text) is None:
        raise ValueError("not base64url")
    raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    if encode_base64url(raw) != text:
        raise ValueError("not canonical base64url")
    return raw


def _derive(shared: bytes, ephemeral: bytes, recipient: bytes, context: bytes) -> bytes:
    return HKDF(algorithm=hashes.SHA256(), length=KEY_BYTES, salt=ephemeral + recipient, info=_DOMAIN + context).derive(
        shared
    )
