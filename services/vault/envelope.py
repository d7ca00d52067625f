"""Envelopes: one secret value, encrypted with AES-256-GCM and bound to everything that is stored about it.

Every column of the row is in the additional data, so that a row moved to another project, name or version, an old
ciphertext under a new version, or another key's id does not open. Each fault is the same error.
"""

from __future__ import annotations

import hmac
import os
import struct
from collections.abc import Callable

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from services.kit.sealing import decode_base64url, encode_base64url
from services.vault.keyring import KEY_BYTES, unavailable

ALGORITHM = "aes-256-gcm"
NONCE_BYTES = 12
TAG_BYTES = 16
_DOMAIN = b"ql3.secret.v1\0"


class EnvelopeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an envelope without its key."""

    project: str
    name: str
    version: int
    mutation_id: str
    key_id: str
    algorithm: str = ALGORITHM
    created_at_ms: int


class Envelope(EnvelopeFacts, frozen=True, kw_only=True):
    """A stored value; the three parts are unpadded base64url."""

    nonce: str
    ciphertext: str
    auth_tag: str


def additional_data(facts: EnvelopeFacts) -> bytes:
    """Domain, then each field as a big-endian 32-bit length and its UTF-8 text (numbers in decimal)."""
    parts = (
        facts.project,
        facts.name,
        str(facts.version),
        facts.mutation_id,
        facts.key_id,
        facts.algorithm,
        str(facts.created_at_ms),
    )
    encoded = (part.encode() for part in parts)
    return _DOMAIN + b"".join(struct.pack(">I", len(part)) + part for part in encoded)


def _random_nonce() -> bytes:
    # 96 random bits: a key is to be rotated well before 2^32 envelopes.
    return os.urandom(NONCE_BYTES)


def encrypt(
    facts: EnvelopeFacts,
    plaintext: bytes | bytearray,
    key: bytes | bytearray,
    nonce_factory: Callable[[], bytes] = _random_nonce,
) -> Envelope:
    """Encrypt a value under a key of 32 bytes. Raises `secret_unavailable`."""
    nonce = nonce_factory()
    # AESGCM itself would take shorter keys and other nonce lengths.
    if len(key) != KEY_BYTES or len(nonce) != NONCE_BYTES or facts.algorithm != ALGORITHM:
        raise unavailable()
    content = AESGCM(key).encrypt(nonce, plaintext, additional_data(facts))
    return Envelope(
        project=facts.project,
        name=facts.name,
        version=facts.version,
        mutation_id=facts.mutation_id,
        key_id=facts.key_id,
        algorithm=facts.algorithm,
        created_at_ms=facts.created_at_ms,
        nonce=encode_base64url(nonce),
        ciphertext=encode_base64url(content[:-TAG_BYTES]),
        auth_tag=encode_base64url(content[-TAG_BYTES:]),
    )


def decrypt(envelope: Envelope, key: bytes | bytearray) -> bytearray:
    """The value; the caller wipes it. Raises `secret_unavailable` for every fault alike."""
    try:
        nonce, tag = decode_base64url(envelope.nonce), decode_base64url(envelope.auth_tag)
        content = decode_base64url(envelope.ciphertext)
        if (
            len(key) != KEY_BYTES
            or len(nonce) != NONCE_BYTES
            or len(tag) != TAG_BYTES
            or envelope.algorithm != ALGORITHM
        ):
            raise unavailable()
        return bytearray(AESGCM(key).decrypt(nonce, content + tag, additional_data(envelope)))
    except (ValueError, InvalidTag):
        raise unavailable() from None


def same_value(left: bytes | bytearray, right: bytes | bytearray) -> bool:
    """Constant-time comparison of two values."""
    return hmac.compare_digest(left, right)


def wipe(buffer: bytearray) -> None:
    """Overwrite a buffer. Best effort: Python may have copied it."""
    buffer[:] = bytes(len(buffer))
