"""Artifacts in an object store, against a real S3 server over HTTP."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas.errors import Ql3Error
from services.kit.artifact_store import ArtifactsAwayError, Retired, StoredRange, UnsafeArtifactError
from services.kit.artifacts import LocalArtifacts, open_artifacts
from services.kit.config import Config, load
from services.kit.ids import new_id
from services.kit.object_store import ObjectArtifacts
from tests.fixtures_objects import VARIABLES, Bucket

SEGMENT = 100


@pytest.fixture
def store(bucket: Bucket) -> ObjectArtifacts:
    bucket.make()
    return ObjectArtifacts(bucket.url, segment_bytes=SEGMENT)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "source.log"


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(min_size=1, max_size=3 * SEGMENT + 1), offset=st.integers(0, 400), length=st.integers(1, 400))
def test_every_range_is_what_was_published(
    store: ObjectArtifacts, source: Path, content: bytes, offset: int, length: int
) -> None:
    artifact = new_id()
    source.write_bytes(content)
    store.publish("w1", artifact, source)
    start = min(offset, len(content))
    expected = StoredRange(content[start : start + length], start, len(content))
    assert store.read("w1", artifact, offset, length) == expected
    assert store.size("w1", artifact) == len(content)
    assert store.retire("w1", artifact) == Retired("deleted", len(content))


def test_a_removed_artifact_is_gone_and_a_second_removal_removed_nothing(store: ObjectArtifacts, source: Path) -> None:
    artifact, neighbour = new_id(), new_id()
    source.write_bytes(b"x" * 250)
    for one in (artifact, neighbour):
        store.publish("w1", one, source)
    assert store.retire("w1", artifact) == Retired("deleted", 250)
    assert store.retire("w1", artifact) == Retired("already_absent", 0)
    assert store.read("w1", artifact, 0, 10) is None
    assert store.size("w1", artifact) is None
    assert store.size("w1", neighbour) == 250
    # A worker's name is a part of the artifact's name.
    assert store.size("w2", neighbour) is None


def puts_of(store: ObjectArtifacts, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    puts: list[tuple[str, int]] = []
    put = store._put

    def note(key: str, data: bytes) -> None:
        puts.append((key[-8:], len(data)))
        put(key, data)

    monkeypatch.setattr(store, "_put", note)
    return puts


def test_an_upload_that_broke_off_goes_on_with_what_is_missing(
    store: ObjectArtifacts, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = new_id()
    content = os.urandom(350)
    source.write_bytes(content)
    put = store._put

    def break_off(key: str, data: bytes) -> None:
        if key.endswith("2"):
            raise ArtifactsAwayError
        put(key, data)

    with monkeypatch.context() as patch:
        patch.setattr(store, "_put", break_off)
        with pytest.raises(ArtifactsAwayError):
            store.publish("w1", artifact, source)
    # What is there says itself that it is not all.
    assert store.size("w1", artifact) == 200
    puts = puts_of(store, monkeypatch)
    store.publish("w1", artifact, source)
    assert puts == [("00000002", 100), ("00000003", 50)]
    puts.clear()
    store.publish("w1", artifact, source)
    assert puts == []
    assert store.read("w1", artifact, 0, 1000) == StoredRange(content, 0, 350)


def test_no_more_than_a_segment_is_in_memory(
    store: ObjectArtifacts, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.write_bytes(b"x" * 1050)
    puts = puts_of(store, monkeypatch)
    store.publish("w1", new_id(), source)
    assert max(size for _, size in puts) == SEGMENT
    assert sum(size for _, size in puts) == 1050


CALLS: list[Callable[[ObjectArtifacts, Path], Any]] = [
    lambda store, source: store.publish("w1", new_id(), source),
    lambda store, _: store.read("w1", new_id(), 0, 1),
    lambda store, _: store.size("w1", new_id()),
    lambda store, _: store.retire("w1", new_id()),
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("away", ["no bucket", "no server"])
def test_a_store_that_is_away_says_nothing_about_any_artifact(
    bucket: Bucket, source: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any], away: str
) -> None:
    source.write_bytes(b"log")
    if away == "no server":
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    store = ObjectArtifacts(bucket.url)
    store.prepare()  # keeps nobody from starting
    with pytest.raises(ArtifactsAwayError) as refused:
        call(store, source)
    assert VARIABLES["AWS_SECRET_ACCESS_KEY"] not in str(refused.value)


def test_only_a_regular_file_is_published(store: ObjectArtifacts, source: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        store.publish("w1", new_id(), source)
    os.mkfifo(source)
    with pytest.raises(UnsafeArtifactError):
        store.publish("w1", new_id(), source)
    link = tmp_path / "link"
    link.symlink_to("/etc/hostname")
    with pytest.raises(UnsafeArtifactError):
        store.publish("w1", new_id(), link)


@pytest.mark.parametrize(("worker", "artifact"), [("../w", None), ("w1", "../../x"), ("w1", "0" * 36)])
def test_no_name_leads_out_of_the_prefix(
    store: ObjectArtifacts, source: Path, worker: str, artifact: str | None
) -> None:
    source.write_bytes(b"log")
    with pytest.raises(ValueError):
        store.publish(worker, artifact or new_id(), source)
    with pytest.raises(ValueError):
        store.retire(worker, artifact or new_id())


@pytest.mark.parametrize("url", ["file:///tmp/x", "http://host/x", "s3:", "nonsense", "memory:///"])
def test_an_address_that_is_no_object_store_is_refused_at_once(url: str) -> None:
    with pytest.raises(Ql3Error) as refused:
        ObjectArtifacts(url)
    assert (refused.value.code, refused.value.field) == ("setup_invalid", "QL3_ARTIFACTS_URL")


def test_the_configuration_chooses_the_store(bucket: Bucket, tmp_path: Path) -> None:
    assert isinstance(open_artifacts(Config(data=tmp_path)), LocalArtifacts)
    config = load({"QL3_ARTIFACTS_URL": bucket.url, "QL3_DATA": str(tmp_path)})
    assert isinstance(open_artifacts(config), ObjectArtifacts)


@pytest.mark.parametrize("call", CALLS)
def test_a_closed_store_asks_for_nothing_more(
    store: ObjectArtifacts, source: Path, call: Callable[[ObjectArtifacts, Path], Any]
) -> None:
    source.write_bytes(b"log")
    store.close()
    with pytest.raises(ArtifactsAwayError):
        call(store, source)
