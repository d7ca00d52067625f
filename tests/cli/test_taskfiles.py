"""Tasks as YAML files: read strictly, written so that they are read again as the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from schemas.errors import Ql3Error
from services.cli.taskfiles import document, plain, read

TASK = """
# Kept in git.
name: backup
spec:
  execution:
    command: [/bin/sh, -c, "date > /tmp/x"]
    environment:
      - name: MODE
        value: on
      - name: WHEN
        value: 12:30
    timeout_ms: 60000
  terms:
    retry: {max_attempts: 3}
triggers:
  - expression: 0 2 * * *
    timezone: Europe/Berlin
    exclude: [2026-12-25, holidays:DE]
"""


def write(folder: Path, name: str, text: str) -> Path:
    """A file."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_what_looks_like_something_else_is_text(tmp_path: Path) -> None:
    (task,) = read([write(tmp_path, "a.yaml", TASK)])
    assert [variable.value for variable in task.spec.execution.environment] == ["on", "12:30"]
    assert task.spec.execution.timeout_ms == 60_000
    assert task.triggers[0]["exclude"] == ["2026-12-25", "holidays:DE"]


def test_a_folder_is_read_with_all_below_it_and_many_in_one_file(tmp_path: Path) -> None:
    one = "name: {}\nspec: {{execution: {{command: [x]}}}}\n"
    write(tmp_path, "b/two.yml", one.format("b"))
    write(tmp_path, "a.yaml", one.format("c") + "---\n" + one.format("d"))
    write(tmp_path, "list.yaml", "- {name: e, spec: {execution: {command: [x]}}}\n")
    write(tmp_path, "notes.txt", "no task")
    assert [task.name for task in read([tmp_path])] == ["c", "d", "b", "e"]


@pytest.mark.parametrize(
    ("text", "code", "field"),
    [
        ("name: a\nspec: {execution: {comand: [x]}}\n", "unknown_field", ": a.spec.execution.comand"),
        ("name: a\nspec: {execution: {command: x}}\n", "invalid", ": a.spec.execution.command"),
        (
            "name: a\nspec: {execution: {command: [x]}}\ntriggers: [{cron: 1}]\n",
            "unknown_field",
            ": a.triggers[0].cron",
        ),
        ("name: Not A Slug\nspec: {execution: {command: [x]}}\n", "invalid", ": Not A Slug.name"),
        ("just text", "invalid", "a.yaml"),
        ("{", "invalid", "a.yaml"),
        ("!!python/object/apply:os.system [true]", "invalid", "a.yaml"),
        ("", "invalid", "-f"),
    ],
)
def test_a_wrong_file_is_refused_by_place(tmp_path: Path, text: str, code: str, field: str) -> None:
    with pytest.raises(Ql3Error) as refused:
        read([write(tmp_path, "a.yaml", text)])
    assert refused.value.code == code
    assert refused.value.field is not None
    assert refused.value.field.endswith(field)


def test_a_task_in_two_files_is_refused_with_both(tmp_path: Path) -> None:
    one = write(tmp_path, "a.yaml", "name: a\nspec: {execution: {command: [x]}}\n")
    two = write(tmp_path, "b.yaml", one.read_text())
    with pytest.raises(Ql3Error) as refused:
        read([one, two])
    assert str(one) in refused.value.sentence
    assert refused.value.field == str(two)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(Ql3Error) as refused:
        read([tmp_path / "absent.yaml"])
    assert refused.value.field == str(tmp_path / "absent.yaml")


TEXTS = st.text(max_size=30) | st.sampled_from(
    [
        "on",
        "no",
        "1e3",
        "012",
        "0x1f",
        "12:30",
        "2026-12-25",
        "~",
        "null",
        "true",
        "- a",
        "a: b",
        "x\ny\n",
        " x ",
        "",
        "#",
    ]
)


@given(values=st.lists(TEXTS.filter(lambda text: "\0" not in text), min_size=1, max_size=5))
@settings(max_examples=300)
@example(["\x85", "a\u2028b", "\u2029", "\r\n", "\ufeff", "a\n\x85"])
def test_what_is_written_is_read_as_the_same(tmp_path_factory: pytest.TempPathFactory, values: list[str]) -> None:
    spec: dict[str, Any] = {"execution": {"command": ["x", *values]}}
    task = {"name": "a", "spec": spec, "triggers": [], "enabled": True}
    text, left_out = document(task)
    path = tmp_path_factory.mktemp("files") / "a.yaml"
    path.write_bytes(text.encode())
    (again,) = read([path])
    assert left_out == 0
    assert plain(again)["spec"] == spec
    # Also for an ordinary reader.
    assert yaml.safe_load(text)["spec"] == spec


def test_a_disabled_trigger_is_written_as_such_and_a_webhook_left_out() -> None:
    triggers = [
        {"spec": {"expression": "0 2 * * *"}, "enabled": False},
        {"spec": {"expression": "0 3 * * *", "enabled": False}, "enabled": True},
        {"spec": {"kind": "webhook"}, "enabled": True},
    ]
    text, left_out = document({"name": "a", "spec": {}, "triggers": triggers, "enabled": False})
    assert left_out == 1
    assert yaml.safe_load(text) == {
        "name": "a",
        "spec": {},
        "triggers": [{"expression": "0 2 * * *", "enabled": False}, {"expression": "0 3 * * *"}],
        "enabled": False,
    }
