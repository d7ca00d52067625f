"""Isolated environments of scripts: what one is made of, where it lies, how a command is run in it.

An environment is shared by everything that asks for the same packages, so its place is named by a digest of them. It is
made inside the first attempt that needs it (see `prepare.py`), under that attempt's log, timeout and kill; later
attempts find it ready. `requirements` are those of the task and those of the script's own metadata (PEP 723).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import time
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from schemas.tasks import Runtime
from services.kit import whole_files
from services.worker.refusal import Refused

UNUSED_S: Final = 30 * 86_400
READY: Final = ".ready"
_PREPARE: Final = str(Path(__file__).with_name("prepare.py"))
_BLOCK: Final = re.compile(r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$")


class Metadata(NamedTuple):
    """What a script says about itself."""

    requires_python: str | None
    dependencies: tuple[str, ...]


class Ready(NamedTuple):
    """How to run a command in an environment. `argv` begins with `prepare.py` while it has to be made first."""

    argv: list[str]
    environment: dict[str, str]


def metadata(script: str) -> Metadata:
    """The PEP 723 block of a script, or nothing. Raises Refused when there is one that cannot be read."""
    # The pattern of the PEP, which wants a line end behind the block.
    blocks = [m for m in _BLOCK.finditer(script if script.endswith("\n") else script + "\n") if m["type"] == "script"]
    if not blocks:
        return Metadata(None, ())
    lines = blocks[0]["content"].splitlines()
    try:
        if len(blocks) > 1:
            raise ValueError
        table = tomllib.loads("\n".join(line[2:] if line.startswith("# ") else line[1:] for line in lines))
        requires: Any = table.get("requires-python")
        dependencies: Any = table.get("dependencies", [])
        if not (requires is None or isinstance(requires, str)) or not isinstance(dependencies, list):
            raise ValueError
        if not all(isinstance(one, str) for one in dependencies):  # pyright: ignore[reportUnknownVariableType]
            raise ValueError
    except ValueError:
        raise Refused("runtime_invalid", "The script's inline metadata cannot be read.") from None
    return Metadata(requires, tuple(dependencies))  # pyright: ignore[reportUnknownArgumentType]


class Runtimes:
    """Environments below one directory of the worker."""

    def __init__(self, root: Path, installing: Mapping[str, str] | None = None) -> None:
        self._root = root
        self._installing = {f"QL3_INSTALL_{name}": value for name, value in (installing or {}).items()}

    def ready(self, runtime: Runtime, command: list[str]) -> Ready:
        """How to run `command` (behind a script: its arguments). Writes what is small; blocking. Raises Refused."""
        about = metadata(runtime.script) if runtime.script is not None and runtime.kind == "python" else None
        requirements = sorted({*runtime.requirements, *(about.dependencies if about else ())})
        tool = _tool(runtime.kind)
        wanted: dict[str, Any] = {
            "kind": runtime.kind,
            "requirements": requirements,
            "python": about.requires_python if about else None,
        }
        place = self._root / f"{runtime.kind}-{hashlib.sha256(_canonical(wanted)).hexdigest()[:32]}"
        whole_files.make_folders(place)
        run, environment = _run(place, runtime, command)
        marker = place / READY
        if marker.exists():
            with contextlib.suppress(OSError):
                os.utime(marker)  # it was needed now; see `sweep`
            return Ready(run, environment)
        _write_once(place / "wanted.json", _canonical({**wanted, "tool": tool, "cache": str(self._root / "cache")}))
        # What the worker was told of package indexes and proxies is for the installer, not for the command.
        return Ready([sys.executable, "-I", "-S", _PREPARE, str(place), *run], environment | self._installing)

    def sweep(self, now_s: float | None = None, *, keep: Collection[str] = ()) -> list[str]:
        """Remove environments that nobody needed for 30 days; answers their names. Blocking."""
        gone: list[str] = []
        if not self._root.is_dir():
            return gone
        for place in self._root.iterdir():
            marker = place / READY
            try:
                unused = (time.time() if now_s is None else now_s) - marker.stat().st_mtime
            except OSError:
                continue  # being made, or not one of ours
            if unused > UNUSED_S and place.name not in keep:
                marker.unlink()
                shutil.rmtree(place, ignore_errors=True)
                gone.append(place.name)
        return gone


def for_installers(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of the worker that tell installers where to find packages."""
    prefixes = ("UV_", "PIP_", "NPM_CONFIG_")
    proxies = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "SSL_CERT_FILE")
    return {
        name: value
        for name, value in environment.items()
        if name.upper().startswith(prefixes) or name.upper() in proxies
    }


def _tool(kind: str) -> str:
    name = "uv" if kind == "python" else "npm"
    beside = str(Path(sys.executable).parent)
    found = shutil.which(name) or shutil.which(name, path=beside)
    if found is None:
        raise Refused("runtime_unsupported", f"This worker has no {name}, which makes the environment.")
    return found


def _run(place: Path, runtime: Runtime, command: list[str]) -> tuple[list[str], dict[str, str]]:
    if runtime.kind == "python":
        binaries = place / "venv" / "bin"
        environment = {"VIRTUAL_ENV": str(place / "venv"), "PATH": str(binaries)}
        program, suffix = str(binaries / "python"), "py"
    else:
        binaries = place / "node_modules" / ".bin"
        environment = {"NODE_PATH": str(place / "node_modules"), "PATH": str(binaries)}
        # Beside node_modules, because that is where imports of modules are looked for.
        program, suffix = "node", "mjs" if runtime.script and _is_module(runtime.script) else "cjs"
    if runtime.script is None:
        return list(command), environment
    content = runtime.script.encode()
    script = place / f"script-{hashlib.sha256(content).hexdigest()[:32]}.{suffix}"
    _write_once(script, content)
    # The first word of the command stands for the script; what follows it are its arguments.
    return [program, str(script), *command[1:]], environment


def _is_module(script: str) -> bool:
    return re.search(r"(?m)^\s*(import\s[\w{*\"']|export\s)", script) is not None


def _canonical(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _write_once(path: Path, content: bytes) -> None:
    # A file under its name is whole, and never changes; mostly it is there already.
    if not path.exists():
        whole_files.create(path, content)
