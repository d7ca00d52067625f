"""A sealed value opens for the key and the purpose it was sealed for, and for nothing else."""

from __future__ import annotations

import pytest

from services.kit.sealing import (
    SealError,
    SealingKey,
    attempt_context,
    decode_base64url,
    encode_base64url,
    seal,
    secret_context,
)

CONTEXT = secret_context("default", "token", "01990000-0000-7000-8000-000000000001")


def test_opens_for_its_key_and_context() -> None:
    key = SealingKey.generate()
    assert key.open(seal(key.public, b"\x00value\xff", CONTEXT), CONTEXT) == b"\x00value\xff"
    assert key.open(seal(key.public, b"", CONTEXT), CONTEXT) == b""


def test_a_key_read_back_from_its_file_opens_old_boxes() -> None:
    key = SealingKey.generate()
    sealed = seal(key.public, b"value", CONTEXT)
    again = SealingKey.from_bytes(key.private_bytes())
    assert again.public == key.public
    assert again.open(sealed, CONTEXT) == b"value"


def test_another_key_or_context_does_not_open() -> None:
    key = SealingKey.generate()
    sealed = seal(key.public, b"value", CONTEXT)
    with pytest.raises(SealError):
        SealingKey.generate().open(sealed, CONTEXT)
    with pytest.raises(SealError):
        key.open(sealed, secret_context("default", "other", "01990000-0000-7000-8000-000000000001"))
    with pytest.raises(SealError):
        key.open(sealed, attempt_context("01990000-0000-7000-8000-000000000001", 1))


@pytest.mark.parametrize("position", [0, 31, 32, 43, 44, -1])
def test_every_byte_counts(position: int) -> None:
    key = SealingKey.generate()
    box = bytearray(decode_base64url(seal(key.public, b"value", CONTEXT)))
    box[position] ^= 1
    with pytest.raises(SealError):
        key.open(encode_base64url(bytes(box)), CONTEXT)


@pytest.mark.parametrize("text", ["", "x", "====", "not base64!", "A" * 43, "A" * 79])
def test_a_malformed_box_is_refused_alike(text: str) -> None:
    with pytest.raises(SealError, match=r"^The sealed value could not be opened\.$"):
        SealingKey.generate().open(text, CONTEXT)


@pytest.mark.parametrize("public", ["", "A" * 42, "A" * 43, "*" * 43])
def test_a_useless_public_key_is_refused(public: str) -> None:
    with pytest.raises(SealError):
        seal(public, b"value", CONTEXT)


@pytest.mark.parametrize("text", ["QQ==", "QQ=", "QR", "Q Q", "QQ\n", "Q/"])
def test_base64url_is_read_strictly(text: str) -> None:
    with pytest.raises(ValueError, match="base64url"):
        decode_base64url(text)
    assert decode_base64url("QQ") == b"A"
