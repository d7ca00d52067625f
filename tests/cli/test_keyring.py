"""`ql3 keyring`: a private file once, and a fresh key on request."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from services.cli.main import run


def keys(path: Path) -> tuple[str, set[str]]:
    ring = json.loads(path.read_text())
    return ring["activeKeyId"], set(ring["keys"])


def test_it_is_made_once_and_rotated_on_request(tmp_path: Path) -> None:
    path = tmp_path / "keyring.json"
    assert run(["keyring", "--file", str(path)]) == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first, known = keys(path)
    assert run(["keyring", "--file", str(path)]) == 0
    assert keys(path) == (first, known)
    assert run(["keyring", "--file", str(path), "--rotate"]) == 0
    second, both = keys(path)
    assert second != first
    assert both == {first, second}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_cannot_be_rotated_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["keyring", "--file", str(tmp_path / "nothing.json"), "--rotate"]) == 5
    assert capsys.readouterr().err.count("\n") == 1
    assert run(["keyring", "--file", str(tmp_path / "no" / "folder.json")]) == 2
