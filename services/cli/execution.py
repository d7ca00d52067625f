"""Options of `task create` and `task update` about how a command is executed: packages, limits, containers, files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from schemas import limits
from schemas.errors import Ql3Error
from services.cli.options import milliseconds, pair, size

RuntimeKind = Annotated[
    Literal["python", "node"] | None,
    typer.Option("--runtime", help="Run in an environment of packages of its own, made by uv or npm and shared."),
]
Requirements = Annotated[
    list[str] | None,
    typer.Option("--requirement", metavar="REQ", help="A package for it, such as httpx>=0.28; may be repeated."),
]
Script = Annotated[
    Path | None,
    typer.Option(
        "--script",
        metavar="FILE",
        help="A script that is kept with the task (PEP 723 is read); the command's first word stands for it.",
    ),
]
Image = Annotated[str | None, typer.Option("--image", metavar="IMAGE", help="Run in a container of this image.")]
Executor = Annotated[
    Literal["local_process", "docker"] | None,
    typer.Option("--executor", help="Where it runs; docker with --image, else local_process."),
]
AsFiles = Annotated[
    list[str] | None,
    typer.Option(
        "--file", metavar="K=PATH", help="Variable K is the path of a private file with the content that PATH has now."
    ),
]
SecretFiles = Annotated[
    list[str] | None,
    typer.Option("--secret-file", metavar="[ENV=]NAME", help="As --secret, but the variable is the path of a file."),
]
LogQuota = Annotated[
    str | None, typer.Option("--log-quota", metavar="SIZE", help="What is kept of each attempt's output; default 64M.")
]
RunAs = Annotated[
    str | None, typer.Option("--run-as", metavar="USER", help="Run as this user; needs a worker that is root.")
]
Umask = Annotated[str | None, typer.Option("--umask", metavar="OCTAL", help="Rights that new files lack; default 022.")]
Nice = Annotated[int | None, typer.Option("--nice", metavar="N", help="-20 (first) to 19 (last).")]
Memory = Annotated[str | None, typer.Option("--memory", metavar="SIZE", help="At most so much for the whole tree.")]
Cpu = Annotated[
    int | None, typer.Option("--cpu", metavar="PERCENT", help="At most so much for the whole tree; 100 is one core.")
]
Processes = Annotated[int | None, typer.Option("--processes", metavar="N", help="At most so many in the tree.")]
OpenFiles = Annotated[int | None, typer.Option("--open-files", metavar="N", help="At most so many in a process.")]
FileSize = Annotated[str | None, typer.Option("--file-size", metavar="SIZE", help="No file may become larger.")]
CpuTime = Annotated[
    str | None, typer.Option("--cpu-time", metavar="DURATION", help="A process is ended after so much CPU time.")
]
BestEffort = Annotated[
    bool | None,
    typer.Option(
        "--best-effort/--required", help="Whether it may run where a limit cannot be enforced; default --required."
    ),
]
Clear = Annotated[
    list[str] | None,
    typer.Option(
        "--clear", metavar="WHAT", help="Take runtime, image, limits, workdir or timeout off it; may be repeated."
    ),
]

_CLEARED: Final = {
    "runtime": "runtime",
    "image": "image",
    "limits": "isolation",
    "workdir": "working_directory",
    "timeout": "timeout_ms",
}
_SUFFIXES: Final = {".py": "python", ".js": "node", ".cjs": "node", ".mjs": "node"}


def clear(execution: dict[str, Any], terms: dict[str, Any], what: list[str] | None) -> None:
    """Take parts off an execution; a container's executor goes with its image."""
    for name in what or []:
        if name not in _CLEARED:
            raise Ql3Error("invalid", f"Only these can be taken off: {', '.join(_CLEARED)}.", field="--clear")
        execution.pop(_CLEARED[name], None)
        if name == "image":
            _place(terms, "local_process")


def write_runtime(
    execution: dict[str, Any], *, kind: str | None, requirements: list[str] | None, script: Path | None
) -> None:
    """Write the environment of packages. Requirements that are given replace those that there were."""
    if kind is None and requirements is None and script is None:
        return
    runtime: dict[str, Any] = dict(execution.get("runtime") or {})
    kind = kind or runtime.get("kind") or (_SUFFIXES.get(script.suffix) if script is not None else None)
    if kind is None:
        raise Ql3Error("invalid", "Say for which: --runtime python or --runtime node.", field="--runtime")
    runtime["kind"] = kind
    if requirements is not None:
        runtime["requirements"] = requirements
    if script is not None:
        runtime["script"] = read_text(script, "--script", limits.SPEC_BYTES)
    execution["runtime"] = runtime


def write_container(
    execution: dict[str, Any], terms: dict[str, Any], *, image: str | None, executor: str | None
) -> None:
    """Write image and executor; an image without an executor means a container."""
    if image is not None:
        execution["image"] = image
    if executor is not None or image is not None:
        _place(terms, executor or "docker")


def _place(terms: dict[str, Any], executor: str) -> None:
    terms["placement"] = {**terms.get("placement", {}), "executor": executor}


def write_limits(
    execution: dict[str, Any],
    *,
    run_as: str | None,
    umask: str | None,
    nice: int | None,
    memory: str | None,
    cpu: int | None,
    processes: int | None,
    open_files: int | None,
    file_size: str | None,
    cpu_time: str | None,
    best_effort: bool | None,
) -> None:
    """Write what bounds the process tree; what was not given stays. Raises `invalid`, naming the option."""
    given = {
        "user": run_as,
        "umask": None if umask is None else octal(umask, "--umask"),
        "nice": nice,
        "memory_bytes": None if memory is None else size(memory, "--memory"),
        "cpu_percent": cpu,
        "processes": processes,
        "open_files": open_files,
        "file_bytes": None if file_size is None else size(file_size, "--file-size"),
        "cpu_seconds": None if cpu_time is None else max(1, milliseconds(cpu_time, "--cpu-time") // 1000),
        "required": None if best_effort is None else not best_effort,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if given:
        execution["isolation"] = {**(execution.get("isolation") or {}), **given}


def packages(execution: dict[str, Any]) -> str | None:
    """The environment of packages in a few words."""
    runtime = execution.get("runtime")
    return None if runtime is None else " ".join([runtime["kind"], *runtime.get("requirements", [])])


def bounds(execution: dict[str, Any]) -> str | None:
    """What bounds the process tree, under the names of the API."""
    isolation: dict[str, Any] = execution.get("isolation") or {}
    told = [
        f"{name}={value:03o}" if name == "umask" else f"{name}={value}"
        for name, value in isolation.items()
        if value is not None and name != "required"
    ]
    if told and not isolation.get("required", True):
        told.append("best-effort")
    return " ".join(told) or None


def octal(text: str, field: str) -> int:
    """`027` as people write rights. Raises `invalid`."""
    if not 1 <= len(text) <= 4 or set(text) - set("01234567") or int(text, 8) > 0o777:
        raise Ql3Error("invalid", "Write rights in octal, such as 022 or 077.", field=field)
    return int(text, 8)


def file_variable(text: str) -> dict[str, Any]:
    """`K=PATH` as a public variable that is delivered as a file."""
    name, path = pair(text, "--file")
    return {"name": name, "value": read_text(Path(path), "--file", limits.ENVIRONMENT_BYTES), "as_file": True}


def read_text(path: Path, field: str, most: int) -> str:
    """A file of the one who types. Raises `invalid` or `too_large`, naming the option."""
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise Ql3Error("invalid", f"The file cannot be read ({error.strerror}).", field=field) from error
    if len(content) > most:
        raise Ql3Error("too_large", f"The file has more than {most} bytes.", field=field)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise Ql3Error("invalid", "The file is no UTF-8 text.", field=field) from error
