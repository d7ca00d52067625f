"""A wrong setting is refused by name, and never shown with another one's value."""

from __future__ import annotations

from pathlib import Path

import pytest

from schemas.errors import Ql3Error
from services.kit.config import default_slots, load, memory_bytes


def test_nothing_set_gives_the_edge_defaults() -> None:
    config = load({})
    assert config.profile == "edge"
    assert config.listen == "127.0.0.1:5700"
    assert config.database.startswith("sqlite:")
    assert config.slots >= 8


@pytest.mark.parametrize(
    ("cores", "gibibytes", "slots"),
    [(1, 0.25, 8), (1, 1, 16), (4, 1, 16), (2, 2, 32), (2, 24, 64), (8, 16, 128), (32, 128, 512)],
)
def test_a_machine_without_setting_runs_as_many_as_its_cores_and_its_memory_allow(cores, gibibytes, slots) -> None:
    assert default_slots(cores, int(gibibytes * 2**30)) == slots


def test_a_container_has_the_memory_of_its_limit(tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    machine = memory_bytes(limit)
    for text, expected in (("max\n", machine), ("536870912\n", 512 * 2**20), (f"{2 * machine}\n", machine)):
        limit.write_text(text)
        assert memory_bytes(limit) == expected


def test_variables_win_over_the_file_and_arguments_over_both(tmp_path: Path) -> None:
    file = tmp_path / "ql3.toml"
    file.write_text('listen = "127.0.0.1:1"\nworker_slots = 3\nlog_level = "error"\n')
    config = load(
        {"QL3_LISTEN": "127.0.0.1:2", "QL3_WORKER_SLOTS": "5"}, file=file, overrides={"listen": "127.0.0.1:3"}
    )
    assert (config.listen, config.worker_slots, config.log_level) == ("127.0.0.1:3", 5, "error")


def test_an_unknown_variable_is_refused_by_name() -> None:
    with pytest.raises(Ql3Error) as refused:
        load({"QL3_WORKER_SLOT": "5"})
    assert refused.value.field == "QL3_WORKER_SLOT"


def test_an_unknown_key_of_the_file_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "ql3.toml"
    file.write_text("worker_slot = 3\n")
    with pytest.raises(Ql3Error) as refused:
        load({}, file=file)
    assert refused.value.field == "worker_slot"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("QL3_WORKER_SLOTS", "0"),
        ("QL3_WORKER_SLOTS", "many"),
        ("QL3_PROFILE", "router"),
        ("QL3_WORKER_ID", "Not A Slug"),
    ],
)
def test_a_wrong_value_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(Ql3Error) as refused:
        load({name: value, "QL3_NATS_PASSWORD": "hush"})
    assert refused.value.field == name
    assert "hush" not in refused.value.sentence


def test_a_password_comes_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("hush\n")
    config = load({"QL3_NATS_PASSWORD_FILE": str(tmp_path / "password")})
    assert config.nats_password == "hush"
    assert "hush" not in repr(config)


def test_labels_are_read_from_a_variable() -> None:
    assert load({"QL3_WORKER_LABELS": "gpu=none, zone=a"}).worker_labels == {"gpu": "none", "zone": "a"}
