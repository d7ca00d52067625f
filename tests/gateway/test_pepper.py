"""The gateway's key: made once, kept from others, and each purpose has its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from schemas.errors import Ql3Error
from services.gateway import credentials, totp
from services.gateway.pepper import Pepper, load_pepper


def test_a_key_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "gateway.key"
    first = load_pepper(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_pepper(path).digest("x", "a") == first.digest("x", "a")
    assert os.listdir(path.parent) == ["gateway.key"]


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "gateway.key"
    load_pepper(path)
    path.chmod(0o644)
    with pytest.raises(Ql3Error, match="Others may read") as caught:
        load_pepper(path)
    assert caught.value.field == "QL3_GATEWAY_KEY"


def test_a_key_of_another_length_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "gateway.key"
    path.touch(0o600)
    path.write_bytes(b"short")
    with pytest.raises(Ql3Error, match="32 bytes"):
        load_pepper(path)


def test_purposes_and_names_do_not_open_each_other() -> None:
    pepper = Pepper.generate()
    assert pepper.digest("a", "x") != pepper.digest("b", "x")
    sealed = pepper.seal("totp", b"secret", "mira")
    assert pepper.open("totp", sealed, "mira") == b"secret"
    for purpose, name, key in (
        ("totp", "noor", pepper),
        ("other", "mira", pepper),
        ("totp", "mira", Pepper.generate()),
    ):
        with pytest.raises(Ql3Error):
            key.open(purpose, sealed, name)


def test_a_secret_counts_for_its_own_credential_and_version_only() -> None:
    pepper = Pepper.generate()
    secret = credentials.new_secret()
    assert len({credentials.digest(pepper, name, version, secret) for name in "ab" for version in (1, 2)}) == 4


@pytest.mark.parametrize(
    ("seconds", "code"),
    # RFC 6238, appendix B (SHA-1), the last six of its eight digits.
    [(59, "287082"), (1111111109, "081804"), (1111111111, "050471"), (1234567890, "005924"), (2000000000, "279037")],
)
def test_codes_are_those_of_rfc_6238(seconds: int, code: str) -> None:
    secret = b"12345678901234567890"
    assert totp.code_at(secret, seconds // 30) == code
    assert totp.accepted_step(secret, code, seconds * 1000, last_step=0) == seconds // 30
    assert totp.accepted_step(secret, code, seconds * 1000, last_step=seconds // 30) is None
    assert totp.accepted_step(secret, code, (seconds + 90) * 1000, last_step=0) is None
