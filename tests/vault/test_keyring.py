"""The keyring file is taken only when it is private, whole and exact; rotation keeps old keys."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from schemas.errors import Ql3Error
from services.kit.sealing import encode_base64url, seal
from services.vault.keyring import KeyringFile, provision, rotate

KEY = encode_base64url(bytes(range(32)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keyring.json"


def write(path: Path, content: str | bytes, mode: int = 0o600) -> KeyringFile:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(mode)
    return KeyringFile(path)


def ring(**change: object) -> str:
    return json.dumps({"version": 1, "activeKeyId": "a", "keys": {"a": KEY}} | change)


def test_provision_makes_a_private_file_once(path: Path) -> None:
    provision(path)
    first = path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    provision(path)
    assert path.read_bytes() == first
    assert len(KeyringFile(path).read().active) == 32
    assert [entry.name for entry in path.parent.iterdir()] == ["keyring.json"]


def test_reads_the_exact_format(path: Path) -> None:
    found = write(path, ring()).read()
    assert found.active == bytes(range(32))
    assert found.key_ids == {"a"}
    with pytest.raises(Ql3Error):
        found.key("b")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        "[]",
        "not json",
        b'{"version": 1, "activeKeyId": "\xff", "keys": {}}',
        ring(version=2),
        ring(version=True),
        ring(activeKeyId="b"),
        ring(activeKeyId=1),
        ring(extra=1),
        ring(keys={}),
        ring(keys=[]),
        ring(keys={"a": KEY[:-1]}),
        ring(keys={"a": KEY + "="}),
        ring(keys={"a": KEY[:-1] + "/"}),
        ring(keys={"a": KEY, "b": "short"}),
        ring(keys={"a": KEY, "": KEY}),
        ring(keys={"a": KEY} | {f"k{n}": KEY for n in range(16)}),
        f'{{"version":1,"activeKeyId":"a","keys":{{"a":"{KEY}","a":"{KEY}"}}}}',
        ring() + " " * 16384,
    ],
)
def test_anything_else_is_unavailable(path: Path, content: str | bytes) -> None:
    with pytest.raises(Ql3Error) as caught:
        write(path, content).read()
    assert caught.value.code == "secret_unavailable"
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666, 0o610])
def test_a_file_that_others_may_touch_is_refused(path: Path, mode: int) -> None:
    with pytest.raises(Ql3Error):
        write(path, ring(), mode).read()


def test_links_and_special_files_are_refused_without_blocking(path: Path, tmp_path: Path) -> None:
    real = tmp_path / "real.json"
    write(real, ring())
    path.symlink_to(real)
    with pytest.raises(Ql3Error):
        KeyringFile(path).read()
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(Ql3Error):
        KeyringFile(path).read()


def test_a_missing_file_is_unavailable_and_a_relative_path_a_programming_error(path: Path) -> None:
    with pytest.raises(Ql3Error):
        KeyringFile(path).read()
    with pytest.raises(ValueError, match="absolute"):
        KeyringFile(Path("keyring.json"))


def test_rotation_keeps_old_keys_and_boxes_on_their_way(path: Path) -> None:
    provision(path)
    before = KeyringFile(path).read()
    box = seal(before.intake().public, b"value", b"context")
    new = rotate(path, before.active_key_id)
    after = KeyringFile(path).read()
    assert after.active_key_id == new
    assert after.key(before.active_key_id) == before.active
    assert after.intake().public != before.intake().public
    assert after.intakes()[1].open(box, b"context") == b"value"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(Ql3Error, match="Another key is active"):
        rotate(path, before.active_key_id)


def test_a_full_ring_takes_no_key(path: Path) -> None:
    provision(path)
    for _ in range(15):
        rotate(path, KeyringFile(path).read().active_key_id)
    with pytest.raises(Ql3Error) as caught:
        rotate(path, KeyringFile(path).read().active_key_id)
    assert caught.value.code == "capacity"


def test_wiping_clears_the_bytes(path: Path) -> None:
    provision(path)
    found = KeyringFile(path).read()
    active = found.active
    found.wipe()
    assert active == bytes(32)
