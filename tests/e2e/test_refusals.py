"""A wrong set-up is refused with one clear line that names the field or file; nothing is left half-written."""

from __future__ import annotations

import json
import socket
import sqlite3
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.e2e.box import QL3, Box


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Generator[Box]:
    """One box for the tests that only ask it."""
    made = Box(tmp_path_factory.mktemp("box"))
    try:
        made.start()
        yield made
    finally:
        made.close()


def up(box: Box, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*QL3, "up", *arguments],
        env={**box.environment(), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def one_line(result: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.stderr
    return lines[0]


def test_a_second_up_on_the_same_folder_is_refused(box: Box) -> None:
    box.start()
    result = up(box, "--listen", "127.0.0.1:0")
    assert result.returncode == 2
    assert "in use" in one_line(result)
    assert box.ql3("worker", "list", "--json").returncode == 0, "the first one is not disturbed"


def test_a_busy_port_is_named_and_nothing_stays(box: Box) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = up(box, "--listen", address)
    assert result.returncode != 0
    assert address in one_line(result)
    assert box.processes() == {}
    assert not (box.data / "console.json").exists()


def test_a_folder_that_cannot_be_written_is_named(box: Box, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = up(box, "--data", str(tmp_path / "file" / "data"), "--listen", "127.0.0.1:0")
    assert result.returncode == 2
    assert "--data" in one_line(result)


def test_an_unknown_setting_is_named(box: Box) -> None:
    result = up(box, "--listen", "127.0.0.1:0", QL3_WORKER_SLOT="3")
    assert result.returncode == 2
    assert "QL3_WORKER_SLOT" in one_line(result)


def test_an_address_that_is_none_is_named(box: Box) -> None:
    result = up(box, "--listen", "nonsense")
    assert result.returncode == 2
    assert "nonsense" in one_line(result) or "listen" in one_line(result).lower()


def test_a_database_of_a_newer_version_is_refused_and_not_changed(box: Box) -> None:
    box.start()
    box.stop()
    path = box.data / "db" / "scheduler.sqlite3"
    with sqlite3.connect(path) as connection:
        columns = [row[1] for row in connection.execute("PRAGMA table_info(schema_migrations)")]
        newest = connection.execute("SELECT * FROM schema_migrations ORDER BY migration_id DESC LIMIT 1").fetchone()
        future = dict(zip(columns, newest, strict=True)) | {"migration_id": "9999_future"}
        marks = ", ".join("?" for _ in columns)
        connection.execute(f"INSERT INTO schema_migrations VALUES ({marks})", list(future.values()))
    result = up(box, "--listen", "127.0.0.1:0")
    assert result.returncode != 0
    assert "9999_future" in one_line(result)
    assert box.processes() == {}


def test_a_nats_server_that_will_not_start_says_why(box: Box) -> None:
    box.data.mkdir()
    (box.data / "nats").write_text("in the way")
    result = up(box, "--listen", "127.0.0.1:0")
    assert result.returncode != 0
    one_line(result)
    assert box.processes() == {}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["task", "create", "Not A Slug", "--", "true"], "name"),
        (["task", "create", "a", "--cron", "61 * * * *", "--", "true"], "minute"),
        (["task", "create", "a", "--cron", "* * * * *", "--timezone", "Mars/Olympus", "--", "true"], "timezone"),
        (["task", "create", "a", "--timeout", "soon", "--", "true"], "timeout"),
        (["task", "create", "a", "--max-attempts", "17", "--", "true"], "max"),
        (["task", "create", "a", "--env", "1X=2", "--", "true"], "env"),
        (["task", "create", "a"], "COMMAND"),
        (["task", "show", "nowhere"], "task"),
        (["run", "show", "nonsense"], "run"),
    ],
)
def test_bad_input_of_a_command_names_the_field(running: Box, arguments: list[str], named: str) -> None:
    result = running.ql3(*arguments)
    assert result.returncode == 2, result.stderr
    assert named.lower() in result.stderr.lower()
    assert "Traceback" not in result.stderr
    assert json.loads(running.ql3("task", "list", "--json").stdout) == {"items": [], "next": None}


def test_without_a_running_system_the_command_says_so(box: Box) -> None:
    result = box.ql3("task", "list")
    assert result.returncode == 5
    assert "ql3 up" in result.stderr
