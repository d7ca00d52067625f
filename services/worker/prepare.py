"""Makes an environment when it is not there yet, then becomes the command: `python -I -S prepare.py PLACE COMMAND…`.

Runs as the first part of an attempt, so what the installer says is in the attempt's log, and a timeout or cancel ends
it. What the worker was given for installers (`QL3_INSTALL_…`, such as a package index) is theirs alone.
Exit code 125: the environment could not be made. Standard library only, nothing of ours.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from typing import Any

FAILED = 125
PREFIX = "QL3_INSTALL_"
installing: dict[str, str] = {}


def main() -> int:
    """Prepare under a lock that other attempts wait for, then exec."""
    place, command = sys.argv[1], sys.argv[2:]
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        installing[name.removeprefix(PREFIX)] = os.environ.pop(name)
    ready = os.path.join(place, ".ready")
    lock = os.open(os.path.join(place, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("another run makes the environment; waiting for it")
        fcntl.flock(lock, fcntl.LOCK_EX)
    if not os.path.exists(ready):
        with open(os.path.join(place, "wanted.json"), encoding="utf-8") as file:
            wanted = json.load(file)
        make = make_python if wanted["kind"] == "python" else make_node
        if not make(place, wanted):
            say("the environment could not be made")
            return FAILED
        os.close(os.open(ready, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    os.close(lock)
    try:
        os.execvp(command[0], command)  # noqa: S606 - the task's own command
    except OSError as error:
        say(f"{command[0]}: {error.strerror} (from the folder {os.getcwd()})")
        return 127 if isinstance(error, FileNotFoundError) else 126


def make_python(place: str, wanted: dict[str, Any]) -> bool:
    """A virtual environment with the requirements, by uv."""
    venv = os.path.join(place, "venv")
    shutil.rmtree(venv, ignore_errors=True)
    env = os.environ | installing | {"UV_CACHE_DIR": os.path.join(wanted["cache"], "uv")}
    env.pop("VIRTUAL_ENV", None)
    create = [wanted["tool"], "venv", "--no-project", "--quiet", venv]
    if wanted["python"]:
        create += ["--python", wanted["python"]]
    if not run(create, env):
        return False
    if not wanted["requirements"]:
        return True
    install = [wanted["tool"], "pip", "install", "--python", os.path.join(venv, "bin", "python"), "-r", "-"]
    return run(install, env, "\n".join(wanted["requirements"]) + "\n")


def make_node(place: str, wanted: dict[str, Any]) -> bool:
    """A `node_modules` with the requirements, by npm."""
    shutil.rmtree(os.path.join(place, "node_modules"), ignore_errors=True)
    with open(os.path.join(place, "package.json"), "w", encoding="utf-8") as file:
        json.dump({"private": True}, file)
    if not wanted["requirements"]:
        return True
    env = os.environ | installing | {"npm_config_cache": os.path.join(wanted["cache"], "npm")}
    install = [wanted["tool"], "install", "--prefix", place, "--no-audit", "--no-fund", "--no-package-lock", "--"]
    return run(install + wanted["requirements"], env)


def run(command: list[str], env: dict[str, str], text: str = "") -> bool:
    """Run one step with its output in the log; whether it went well."""
    try:
        done = subprocess.run(command, env=env, input=text.encode(), stdout=2, check=False)
    except OSError as error:
        say(f"{command[0]}: {error.strerror}")
        return False
    return done.returncode == 0


def say(text: str) -> None:
    """One line into the attempt's log."""
    print(f"ql3: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
