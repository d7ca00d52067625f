"""Envelopes open with their key and every stored fact unchanged, and fail alike otherwise."""

from __future__ import annotations

import msgspec
import pytest

from schemas.errors import Ql3Error
from services.kit.sealing import decode_base64url, encode_base64url
from services.vault.envelope import EnvelopeFacts, additional_data, decrypt, encrypt, same_value

KEY = bytes(range(32))
FACTS = EnvelopeFacts(
    project="default",
    name="db-password",
    version=3,
    mutation_id="01990000-0000-7000-8000-000000000001",
    key_id="k-1",
    created_at_ms=1_700_000_000_000,
)


def test_golden_vector() -> None:
    """Frozen: envelopes written by an earlier version must open for ever."""
    assert (
        additional_data(FACTS).hex()
        == (
            b"ql3.secret.v1\0"
            b"\0\0\0\x07default"
            b"\0\0\0\x0bdb-password"
            b"\0\0\0\x013"
            b"\0\0\0\x2401990000-0000-7000-8000-000000000001"
            b"\0\0\0\x03k-1"
            b"\0\0\0\x0baes-256-gcm"
            b"\0\0\0\x0d1700000000000"
        ).hex()
    )
    envelope = encrypt(FACTS, "pässword".encode(), KEY, lambda: bytes(12))
    assert (envelope.nonce, envelope.ciphertext, envelope.auth_tag) == GOLDEN
    assert decrypt(envelope, KEY) == "pässword".encode()


GOLDEN = ("AAAAAAAAAAAAAAAA", "fn8RrcZb7M9s", "uWBprUSyN-VJek_r03-Dgw")


def test_nonces_are_fresh() -> None:
    assert encrypt(FACTS, b"x", KEY).nonce != encrypt(FACTS, b"x", KEY).nonce


@pytest.mark.parametrize(
    "change",
    [
        {"project": "other"},
        {"name": "db-passwore"},
        {"version": 2},
        {"mutation_id": "01990000-0000-7000-8000-000000000002"},
        {"key_id": "k-2"},
        {"algorithm": "aes-128-gcm"},
        {"created_at_ms": 1_700_000_000_001},
        {"nonce": "AAAAAAAAAAAAAAAB"},
        {"nonce": "AAAA"},
        {"nonce": "not base64url!!!"},
        {"ciphertext": "AAAAAAAA"},
        {"auth_tag": "AAAAAAAAAAAAAAAAAAAAAA"},
        {"auth_tag": "AAAA"},
    ],
)
def test_every_stored_fact_counts(change: dict[str, object]) -> None:
    envelope = msgspec.structs.replace(encrypt(FACTS, b"value", KEY), **change)
    with pytest.raises(Ql3Error) as caught:
        decrypt(envelope, KEY)
    assert caught.value.code == "secret_unavailable"
    assert caught.value.detail is None
    assert caught.value.__cause__ is None


def test_moving_a_boundary_between_fields_does_not_open() -> None:
    envelope = encrypt(msgspec.structs.replace(FACTS, project="ab", name="c"), b"value", KEY)
    with pytest.raises(Ql3Error):
        decrypt(msgspec.structs.replace(envelope, project="a", name="bc"), KEY)


@pytest.mark.parametrize("length", [0, 16, 24, 31, 33])
def test_only_keys_of_32_bytes(length: int) -> None:
    with pytest.raises(Ql3Error):
        encrypt(FACTS, b"value", bytes(length))
    with pytest.raises(Ql3Error):
        decrypt(encrypt(FACTS, b"value", KEY), bytes(length))


def test_another_nonce_length_is_refused() -> None:
    with pytest.raises(Ql3Error):
        encrypt(FACTS, b"value", KEY, lambda: bytes(16))


def test_a_flipped_bit_of_the_ciphertext() -> None:
    envelope = encrypt(FACTS, b"value", KEY)
    content = bytearray(decode_base64url(envelope.ciphertext))
    content[0] ^= 1
    with pytest.raises(Ql3Error):
        decrypt(msgspec.structs.replace(envelope, ciphertext=encode_base64url(bytes(content))), KEY)


def test_comparison() -> None:
    assert same_value(b"a", bytearray(b"a"))
    assert not same_value(b"a", b"ab")
