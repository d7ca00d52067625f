"""Receipt files: create-once, durable, readable or absent after a crash at any byte, bad ones kept apart."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from services.worker.host import receipts as module
from services.worker.host.receipts import Receipt, Receipts, make

KEY = bytes(range(32))


def receipt(number: int) -> Receipt:
    attempt = f"0190a000-0000-7000-8000-{number:012d}"
    return make(attempt, 2, {"kind": "ended", "exit_code": number % 256}, {"run": "r"}, KEY)


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.receipts"))


def test_what_was_appended_is_there_after_reopening_until_it_is_acknowledged(tmp_path: Path) -> None:
    store = Receipts(str(tmp_path / "r"))
    many = [receipt(n) for n in range(300)]
    store.append(many[:200])
    store.append(many[200:])
    store.acknowledge([r.attempt for r in many[:250]])
    # No close: as after a crash.
    again = Receipts(str(tmp_path / "r"))
    assert list(again.pending.values()) == many[250:]
    again.acknowledge([r.attempt for r in many[250:]])
    again.append([receipt(999)])
    again.acknowledge([receipt(999).attempt])
    again.close()
    assert segments(tmp_path / "r") == []


def test_an_attempt_has_one_receipt(tmp_path: Path) -> None:
    store = Receipts(str(tmp_path / "r"))
    store.append([receipt(1)])
    with pytest.raises(ValueError):
        store.append([receipt(1)])


def test_files_and_directories_are_private(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir(mode=0o755)
    store = Receipts(str(tmp_path / "r"))
    store.append([receipt(1)])
    (segment,) = segments(tmp_path / "r")
    assert segment.stat().st_mode & 0o777 == 0o600
    assert segment.stat().st_nlink == 1
    for directory in (tmp_path / "r", tmp_path / "r" / "quarantine"):
        assert directory.stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(tmp_path / "r")
    with pytest.raises(OSError, match="Not a directory"):
        Receipts(str(tmp_path / "link"))


def test_a_crash_at_any_byte_leaves_a_record_whole_or_absent(tmp_path: Path) -> None:
    store = Receipts(str(tmp_path / "whole"))
    first, second = receipt(1), receipt(2)
    store.append([first])
    store.append([second])
    content = segments(tmp_path / "whole")[0].read_bytes()
    end_of_first = content.index(b"\n") + 1
    end = content.rindex(b"\n") + 1
    for cut in range(end + 1):
        directory = tmp_path / f"cut-{cut}"
        directory.mkdir()
        (directory / "00000001.receipts").write_bytes(content[:cut] + bytes(1024))
        again = Receipts(str(directory))
        expected = [] if cut < end_of_first else [first] if cut < end else [first, second]
        assert list(again.pending.values()) == expected
        assert again.torn == (cut not in (0, end_of_first, end))
        assert again.quarantined == 0
        again.append([receipt(3)])
        third = Receipts(str(directory))
        assert third.pending.keys() == again.pending.keys()
        again.close()
        third.close()


def test_a_damaged_record_is_set_aside_and_its_neighbours_are_read(tmp_path: Path) -> None:
    store = Receipts(str(tmp_path / "r"))
    store.append([receipt(n) for n in (1, 2, 3)])
    (segment,) = segments(tmp_path / "r")
    content = bytearray(segment.read_bytes())
    middle = content.index(b"\n") + 40
    for at in range(middle, middle + 120, 7):
        damaged = bytearray(content)
        damaged[at] ^= 0x01
        segment.write_bytes(damaged)
        again = Receipts(str(tmp_path / "r"))
        assert list(again.pending.values()) == [receipt(1), receipt(3)]
        assert again.quarantined == 1
        again.close()
    kept = list((tmp_path / "r" / "quarantine").iterdir())
    assert len(kept) == len(range(middle, middle + 120, 7))
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in kept)


def test_a_receipt_with_a_wrong_proof_is_set_aside(tmp_path: Path) -> None:
    store = Receipts(str(tmp_path / "r"))
    store.append([receipt(1), receipt(2)])
    assert store.set_aside(receipt(1).attempt)
    assert not store.set_aside(receipt(1).attempt)
    (kept,) = (tmp_path / "r" / "quarantine").iterdir()
    assert receipt(1).body.encode() in kept.read_bytes().replace(b'\\"', b'"')
    assert list(Receipts(str(tmp_path / "r")).pending) == [receipt(2).attempt]


def test_segments_roll_over_and_go_when_all_is_acknowledged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEGMENT_BYTES", 4096)
    store = Receipts(str(tmp_path / "r"))
    for number in range(40):
        store.append([receipt(number)])
    assert len(segments(tmp_path / "r")) > 2
    again = Receipts(str(tmp_path / "r"))
    assert len(again.pending) == 40
    again.acknowledge([receipt(n).attempt for n in range(40)])
    again.append([receipt(41)])
    assert len(segments(tmp_path / "r")) == 1


def fail(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def raising(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, name, raising)


@pytest.mark.parametrize("step", ["open", "write", "fsync", "link", "pwrite", "fdatasync"])
def test_a_failing_step_leaves_nothing_half_told_and_the_next_try_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    store = Receipts(str(tmp_path / "r"))
    with monkeypatch.context() as patch:
        fail(patch, step)
        with pytest.raises(OSError, match="full"):
            store.append([receipt(1)])
    assert store.pending == {}
    store.append([receipt(1), receipt(2)])
    again = Receipts(str(tmp_path / "r"))
    assert list(again.pending.values()) == [receipt(1), receipt(2)]
    assert again.quarantined == 0
    assert not list((tmp_path / "r").glob("*.tmp"))


def test_a_left_over_temporary_segment_is_removed(tmp_path: Path) -> None:
    directory = tmp_path / "r"
    directory.mkdir()
    (directory / "00000007.tmp").write_bytes(b"partial")
    (directory / "note").write_bytes(b"somebody's")
    store = Receipts(str(directory))
    assert not (directory / "00000007.tmp").exists()
    assert (directory / "note").exists()
    store.append([receipt(1)])
