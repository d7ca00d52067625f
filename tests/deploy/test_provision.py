"""`ql3 provision` writes what an installation needs, once, and nats-server accepts it."""

from __future__ import annotations

import json
import stat
import subprocess
from pathlib import Path

import pytest

from schemas.errors import Ql3Error
from services.cli.provision import OWNERS, provision
from services.kit.natsserver import find_binary

WHERE = {"port": 4222, "host": "127.0.0.1", "store": "/data", "database": "postgres:5432/ql3"}


def test_what_is_written_is_kept_and_added_to(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    provision(folder, workers=["one"], **WHERE)
    before = {path.name: path.read_text() for path in folder.glob("nats_*")}
    provision(folder, workers=["two"], **WHERE)
    after = {path.name: path.read_text() for path in folder.glob("nats_*")}
    assert after.items() >= before.items()
    users = {user["user"] for user in json.loads((folder / "nats.conf").read_text())["authorization"]["users"]}
    assert {"worker-one", "worker-two", "operator", "maintenance", *OWNERS} == users
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_nats_server_accepts_the_configuration(tmp_path: Path) -> None:
    provision(tmp_path, workers=["one"], **WHERE)
    subprocess.run([str(find_binary()), "-c", str(tmp_path / "nats.conf"), "-t"], check=True, capture_output=True)


def test_every_secret_that_compose_mounts_is_written(tmp_path: Path) -> None:
    import yaml

    names = provision(tmp_path, workers=["local"], **WHERE)
    compose = yaml.safe_load((Path(__file__).parents[2] / "compose" / "standalone.yaml").read_text())
    wanted = {Path(entry["file"]).name for entry in compose["secrets"].values()}
    assert wanted <= set(names)


def test_a_worker_id_that_is_no_slug_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(Ql3Error) as refused:
        provision(tmp_path, workers=["Not A Slug"], **WHERE)
    assert refused.value.field == "--worker"
    assert list(tmp_path.iterdir()) == []
