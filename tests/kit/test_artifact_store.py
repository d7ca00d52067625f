"""The artifact directory: a name never shows a part of a file, follows no link, and a lost volume is no deletion."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from services.kit import artifact_store
from services.kit.artifact_store import ArtifactsAwayError, Retired, StoredRange, UnsafeArtifactError, artifact_path

ID = "01990000-0000-7000-8000-ab0000000001"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "data" / "artifacts"
    artifact_store.prepare_root(root)
    return root


def publish(tmp_path: Path, root: Path, content: bytes) -> Path:
    source = tmp_path / "attempt.log"
    source.write_bytes(content)
    artifact_store.publish(source, root, ID)
    return source


def test_the_path_rule(root: Path) -> None:
    assert artifact_path(root, ID) == root / "ab" / f"{ID}.log"
    for bad in ("", "../x", ID.upper(), ID + "\n", ID[:-1]):
        with pytest.raises(ValueError, match="UUIDv7"):
            artifact_path(root, bad)


def test_directories_are_private(tmp_path: Path, root: Path) -> None:
    publish(tmp_path, root, b"x")
    for directory in (root, root.parent, root / "ab"):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_publish_again_is_harmless_with_and_without_the_source(tmp_path: Path, root: Path) -> None:
    source = publish(tmp_path, root, b"bytes\x00\xff")
    artifact_store.publish(source, root, ID)
    source.unlink()
    artifact_store.publish(source, root, ID)
    assert artifact_store.read_range(root, ID, 0, 100) == StoredRange(b"bytes\x00\xff", 0, 7)
    assert artifact_store.stored_size(root, ID) == 7


def test_a_missing_source_publishes_nothing(tmp_path: Path, root: Path) -> None:
    with pytest.raises(FileNotFoundError):
        artifact_store.publish(tmp_path / "nothing", root, ID)
    assert artifact_store.read_range(root, ID, 0, 1) is None


def test_across_file_systems_it_is_copied_whole(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The kernel's refusal is the one thing that one file system cannot give us.
    real = os.link

    def link(source: Path, target: Path, *, follow_symlinks: bool) -> None:
        if Path(source).name == "attempt.log":
            raise OSError(18, "Invalid cross-device link")
        real(source, target, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(os, "link", link)
    publish(tmp_path, root, b"content" * 1000)
    assert [entry.name for entry in (root / "ab").iterdir()] == [f"{ID}.log"]
    assert artifact_store.stored_size(root, ID) == 7000
    assert stat.S_IMODE(artifact_path(root, ID).stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("offset", "length", "expected"),
    [(0, 4, (b"0123", 0)), (8, 4, (b"89", 8)), (10, 4, (b"", 10)), (99, 4, (b"", 10)), (3, 1, (b"3", 3))],
)
def test_ranges(tmp_path: Path, root: Path, offset: int, length: int, expected: tuple[bytes, int]) -> None:
    publish(tmp_path, root, b"0123456789")
    found = artifact_store.read_range(root, ID, offset, length)
    assert found == StoredRange(*expected, 10)


def test_retire_counts_once(tmp_path: Path, root: Path) -> None:
    publish(tmp_path, root, b"0123456789")
    assert artifact_store.retire(root, ID) == Retired("deleted", 10)
    assert artifact_store.retire(root, ID) == Retired("already_absent", 0)
    assert artifact_store.read_range(root, ID, 0, 1) is None


def test_a_missing_root_is_a_fault_and_no_deletion(tmp_path: Path) -> None:
    nowhere = tmp_path / "unmounted"
    for call in (
        lambda: artifact_store.retire(nowhere, ID),
        lambda: artifact_store.read_range(nowhere, ID, 0, 1),
        lambda: artifact_store.stored_size(nowhere, ID),
        lambda: artifact_store.publish(tmp_path, nowhere, ID),
    ):
        with pytest.raises(UnsafeArtifactError):
            call()


@pytest.mark.parametrize("kind", ["symlink", "fifo", "directory"])
def test_what_is_no_regular_file_is_refused_and_stays(tmp_path: Path, root: Path, kind: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("keep")
    path = artifact_path(root, ID)
    path.parent.mkdir(mode=0o700)
    if kind == "symlink":
        path.symlink_to(victim)
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(UnsafeArtifactError):
        artifact_store.read_range(root, ID, 0, 1)
    with pytest.raises(UnsafeArtifactError):
        artifact_store.retire(root, ID)
    assert os.path.lexists(path)
    assert victim.read_text() == "keep"


def test_a_linked_shard_is_refused(tmp_path: Path, root: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / f"{ID}.log").write_text("keep")
    (root / "ab").symlink_to(elsewhere)
    with pytest.raises(UnsafeArtifactError):
        artifact_store.retire(root, ID)
    with pytest.raises(UnsafeArtifactError):
        artifact_store.read_range(root, ID, 0, 1)
    assert (elsewhere / f"{ID}.log").read_text() == "keep"


def test_a_linked_shard_is_the_stores_fault_and_not_that_of_the_log(tmp_path: Path, root: Path) -> None:
    source = tmp_path / "log"
    source.write_bytes(b"bytes")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    artifact_path(root, ID).parent.symlink_to(elsewhere)
    with pytest.raises(ArtifactsAwayError):
        artifact_store.publish(source, root, ID)
    assert list(elsewhere.iterdir()) == []
