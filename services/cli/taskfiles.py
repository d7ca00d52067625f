"""Tasks as YAML files: reading what people keep in a folder, and writing what a system holds.

YAML's old habits are left out: `on`, `12:30` and a date are text; only what JSON knows is anything else.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import yaml

from schemas.errors import Ql3Error
from schemas.strict import read_plain
from schemas.tasks import TaskFile
from schemas.triggers import TriggerSpec

FILE_BYTES: Final = 4 * 1024 * 1024
_SUFFIXES: Final = (".yaml", ".yml")


class _Loader(yaml.SafeLoader):
    """Reads what JSON knows, and everything else as text."""


class _Dumper(yaml.SafeDumper):
    """Writes long text as blocks, and quotes what any reader would take for something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: Any, value: str) -> yaml.ScalarNode:
    # YAML takes these for line breaks and would read another text back, unless they are written as escapes.
    style = '"' if any(mark in value for mark in _OTHER_BREAKS) else "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_OTHER_BREAKS: Final = "\r\x85\u2028\u2029\ufeff"


_JSON_SCALARS: Final = (
    ("bool", r"true|false", "tf"),
    ("null", r"null|~|", ("n", "~", "")),
    ("int", r"-?(?:0|[1-9][0-9]*)", "-0123456789"),
    ("float", r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?", "-0123456789"),
)
_Loader.yaml_implicit_resolvers = {}
for _kind in cast("list[Any]", [_Loader, _Dumper]):
    for _tag, _pattern, _first in _JSON_SCALARS:
        _kind.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))
_Dumper.add_representer(str, _text)


def read(paths: Iterable[Path]) -> list[TaskFile]:
    """The tasks of files and of all YAML files below folders; `-` is standard input. Raises with file and field."""
    tasks: list[TaskFile] = []
    placed: dict[str, str] = {}
    for name, text in _texts(paths):
        for task in _tasks(name, text):
            if task.name in placed:
                raise Ql3Error("invalid", f"The task {task.name} stands in {placed[task.name]} too.", field=name)
            placed[task.name] = name
            tasks.append(task)
    if not tasks:
        raise Ql3Error("invalid", "There is no task in these files.", field="-f")
    return tasks


def _texts(paths: Iterable[Path]) -> Iterator[tuple[str, str]]:
    for path in paths:
        if str(path) == "-":
            yield "-", sys.stdin.read(FILE_BYTES + 1)
            continue
        if path.is_dir():
            found = sorted(one for one in path.rglob("*") if one.suffix in _SUFFIXES and one.is_file())
        else:
            found = [path]
        for file in found:
            try:
                yield str(file), file.read_text("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
                raise Ql3Error("invalid", f"The file cannot be read: {why}.", field=str(file)) from error


def _tasks(name: str, text: str) -> Iterator[TaskFile]:
    if len(text.encode()) > FILE_BYTES:
        raise Ql3Error("too_large", f"A file has at most {FILE_BYTES} bytes.", field=name)
    try:
        documents = list(yaml.load_all(text, Loader=_Loader))
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark is not None else ""
        raise Ql3Error("invalid", f"It is not valid YAML{where}.", field=name) from error
    for document in documents:
        many = cast("list[Any]", document) if isinstance(document, list) else [document]
        yield from (_task(name, plain) for plain in many if plain is not None)


def _task(name: str, plain: Any) -> TaskFile:
    try:
        task = read_plain(plain, TaskFile)
        for index, trigger in enumerate(task.triggers):
            try:
                read_plain(trigger, TriggerSpec)
            except Ql3Error as error:
                raise _placed(error, f"triggers[{index}]") from error
    except Ql3Error as error:
        task_name = cast("dict[str, Any]", plain).get("name") if isinstance(plain, dict) else None
        raise _placed(error, f"{name}: {task_name}" if isinstance(task_name, str) else name) from error
    return task


def _placed(error: Ql3Error, path: str) -> Ql3Error:
    return Ql3Error(error.code, error.detail, field=f"{path}.{error.field}" if error.field else path, data=error.data)


def document(task: dict[str, Any]) -> tuple[str, int]:
    """A task of the API as YAML, and how many of its triggers no file can hold (webhooks)."""
    triggers = [
        {name: value for name, value in trigger["spec"].items() if name != "enabled"}
        | ({} if trigger["enabled"] else {"enabled": False})
        for trigger in task["triggers"]
        if trigger["spec"].get("kind") != "webhook"
    ]
    plain: dict[str, Any] = {"name": task["name"], "spec": task["spec"]}
    if triggers:
        plain["triggers"] = triggers
    if not task["enabled"]:
        plain["enabled"] = False
    stream = io.StringIO()
    yaml.dump(plain, stream, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return stream.getvalue(), len(task["triggers"]) - len(triggers)


def plain(task: TaskFile) -> dict[str, Any]:
    """A task as the API takes it."""
    return cast("dict[str, Any]", msgspec.to_builtins(task))
