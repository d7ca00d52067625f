"""The second executor: a container, by whatever OCI command is found (docker, podman, nerdctl).

The command is the attempt's first process, so its output, quota, timeout and exit code are those of any other attempt.
It passes TERM on to the container; what KILL does to the command does not reach the container, so the process host
removes the container by its name when the tree is gone, and the worker removes what a host that died has left.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Collection
from typing import Any, Final

from schemas.tasks import Execution, ExecutionRevision
from services.worker.refusal import Refused

ENGINES: Final = ("docker", "podman", "nerdctl")
LABEL: Final = "ql3.attempt"
NAME: Final = "ql3-"
ANSWER_S: Final = 10.0


def find_engine() -> str | None:
    """The path of an OCI command whose engine answers, or None. Blocking."""
    for name in ENGINES:
        path = shutil.which(name)
        # What `info` can be asked to print differs; the list of containers needs the engine with all of them.
        if path is not None and _run([path, "ps", "--quiet"]) is not None:
            return path
    return None


def wanted(revision: ExecutionRevision) -> bool:
    """Whether attempts of this revision run in a container."""
    return revision.terms.placement.executor == "docker" or revision.execution.image is not None


def left_behind(engine: str) -> dict[str, str] | None:
    """Containers of attempts that exist now: container id by attempt id; None if that cannot be told. Blocking."""
    # By the name: how a label is printed differs.
    listed = _run([engine, "ps", "--all", "--filter", f"label={LABEL}", "--format", "{{.ID}} {{.Names}}"])
    if listed is None:
        return None
    rows = [line.split() for line in listed.splitlines()]
    return {row[1].removeprefix(NAME): row[0] for row in rows if len(row) == 2 and row[1].startswith(NAME)}


def remove(engine: str, containers: Collection[str]) -> bool:
    """Remove containers and what runs in them; whether that is done. Blocking."""
    return not containers or _run([engine, "rm", "--force", "--volumes", *containers]) is not None


def command(engine: str, attempt_id: str, execution: Execution, work: str, names: Collection[str]) -> dict[str, Any]:
    """Attributes of a spawn item. `names` are the variables that go into the container: no value is in argv."""
    if execution.image is None:
        raise Refused("runtime_invalid", "A task of the docker executor names an image.")
    name = f"{NAME}{attempt_id}"
    argv = [engine, "run", "--rm", "--init", "--name", name, "--label", f"{LABEL}={attempt_id}"]
    argv += ["--volume", f"{work}:/work", "--workdir", execution.working_directory or "/work"]
    for variable in sorted(names):
        argv += ["--env", variable]
    argv += _limits(execution)
    # Behind `--` nothing is an option of ours.
    argv += ["--", execution.image, *execution.command]
    return {"argv": argv, "cleanup": [engine, "rm", "--force", "--volumes", name]}


def _limits(execution: Execution) -> list[str]:
    wanted = execution.isolation
    if wanted is None:
        return []
    options: dict[str, Any] = {
        "--memory": f"{wanted.memory_bytes}b" if wanted.memory_bytes else None,
        "--cpus": f"{wanted.cpu_percent / 100:g}" if wanted.cpu_percent else None,
        "--pids-limit": wanted.processes,
        "--user": wanted.user,
    }
    argv = [word for option, value in options.items() if value is not None for word in (option, str(value))]
    if wanted.open_files is not None:
        argv += ["--ulimit", f"nofile={wanted.open_files}:{wanted.open_files}"]
    if wanted.file_bytes is not None:
        argv += ["--ulimit", f"fsize={wanted.file_bytes}:{wanted.file_bytes}"]
    if wanted.cpu_seconds is not None:
        argv += ["--ulimit", f"cpu={wanted.cpu_seconds}:{wanted.cpu_seconds}"]
    return argv


def _run(argv: list[str]) -> str | None:
    try:
        done = subprocess.run(argv, capture_output=True, timeout=ANSWER_S, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None
