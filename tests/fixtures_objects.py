"""A real S3 server over HTTP for tests, in this process, and nothing else: each test has a prefix of its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import NamedTuple

import httpx
import pytest
from moto.moto_server.threaded_moto_server import ThreadedMotoServer

from services.kit.ids import new_id

VARIABLES = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "shown-nowhere", "AWS_REGION": "us-east-1"}


class Bucket(NamedTuple):
    """A bucket that exists once it is made; `url` is as in the configuration."""

    endpoint: str
    name: str

    @property
    def url(self) -> str:
        return f"s3://{self.name}/ql3"

    @property
    def variables(self) -> dict[str, str]:
        """What a process needs to use it."""
        return VARIABLES | {"AWS_ENDPOINT_URL": self.endpoint}

    def make(self) -> None:
        """From now on it is there."""
        httpx.put(f"{self.endpoint}/{self.name}").raise_for_status()


@pytest.fixture(scope="session")
def object_server() -> Iterator[str]:
    """The address of a server that knows every key."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(object_server: str, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A bucket that is not there yet, and this process's credentials for it."""
    found = Bucket(object_server, f"logs-{new_id()}")
    for name, value in found.variables.items():
        monkeypatch.setenv(name, value)
    return found
