"""A small file is seen whole or not at all, and one that was made once stays."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from services.kit import whole_files


def test_a_file_is_replaced_as_a_whole_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o644)
    whole_files.replace(path, b"new" * 100_000)
    assert path.read_bytes() == b"new" * 100_000
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_what_was_made_first_stays(tmp_path: Path) -> None:
    path = tmp_path / "key"
    assert whole_files.create(path, b"first") is True
    assert whole_files.create(path, b"second") is False
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_in_the_way_is_not_written_through(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"untouched")
    path = tmp_path / "key"
    path.symlink_to(elsewhere)
    assert whole_files.create(path, b"key") is False
    whole_files.replace(path, b"key")
    assert elsewhere.read_bytes() == b"untouched"
    assert not path.is_symlink()


@pytest.mark.parametrize("call", ["rename", "fsync"])
def test_a_failure_leaves_the_old_file_and_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if call == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    else:
        monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        whole_files.replace(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
