"""A whole system whose logs go to an object store: they are read from there when no worker has them any more."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from services.kit.object_store import ObjectArtifacts
from tests.e2e.box import PROJECT, Box, all_ended, eventually
from tests.fixtures_objects import Bucket


@pytest.fixture
def box(tmp_path: Path, bucket: Bucket) -> Generator[Box]:
    made = Box(tmp_path, environment=bucket.variables | {"QL3_ARTIFACTS_URL": bucket.url})
    try:
        yield made
    finally:
        made.close()


def test_a_log_goes_to_the_store_and_is_read_from_there(box: Box, bucket: Bucket) -> None:
    box.start()
    logs = box.data / "worker" / "logs"
    with box.client() as client:
        box.create(client, "speaks", ["sh", "-c", "printf 'a\\0b\\377\\n'"])
        early = client.post(f"{PROJECT}/tasks/speaks/runs")["id"]
        assert all_ended(client, [early])[early]["status"] == "succeeded"
        # While the bucket does not exist, the worker has it, and gives it.
        assert client.raw(f"{PROJECT}/runs/{early}/log").content == b"a\0b\xff\n"
        assert len(list(logs.glob("*.log"))) == 1
        bucket.make()
        late = client.post(f"{PROJECT}/tasks/speaks/runs")["id"]
        all_ended(client, [late])
        eventually(lambda: not list(logs.glob("*.log")), "the worker was told that the store has both")
        for run in (early, late):
            assert client.raw(f"{PROJECT}/runs/{run}/log").content == b"a\0b\xff\n"
            (artifact,) = client.get(f"{PROJECT}/runs/{run}/artifacts")["items"]
            assert artifact["state"] == "stored"
            assert ObjectArtifacts(bucket.url).size("local", artifact["id"]) == 5
    box.stop()
    assert not list((box.data / "artifacts").glob("**/*.log"))
