"""Containers for real, where an engine answers and there is something to make an image of."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from schemas.tasks import Execution, Isolation, Variable
from services.worker import container
from services.worker.command import Place
from tests.worker.conftest import DEADLINE_S, PATH, Box, Client
from tests.worker.test_command import NOW, build

APPLETS = ("sh", "cat", "echo", "sleep", "true", "setsid", "id", "env", "kill", "printf")
ENGINE = container.find_engine()
BUSYBOX = shutil.which("busybox")

pytestmark = pytest.mark.skipif(ENGINE is None or BUSYBOX is None, reason="no container engine, or no busybox")


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    """An image of a static busybox and nothing else, made here; skips where this machine runs no containers."""
    assert ENGINE is not None
    assert BUSYBOX is not None
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        archive.add(os.path.realpath(BUSYBOX), "bin/busybox")
        for name in APPLETS:
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(link)
        for folder in ("work", "tmp", "proc", "sys", "dev", "etc"):
            made = tarfile.TarInfo(folder)
            made.type, made.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(made)
    name = f"ql3-test:{os.getpid()}"
    _engine("import", "-", name, text=content.getvalue())
    tried = subprocess.run([ENGINE, "run", "--rm", "--init", name, "true"], capture_output=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"no container can be run here: {tried.stderr.decode(errors='replace')[-200:]}")
    yield name
    _engine("rmi", "--force", name)


def _engine(*arguments: str, text: bytes = b"") -> str:
    assert ENGINE is not None
    done = subprocess.run([ENGINE, *arguments], input=text, capture_output=True, check=True)
    return done.stdout.decode()


def item_of(box: Box, image: str, command: list[str], **more: Any) -> dict[str, Any]:
    base = {"PATH": os.environ.get("PATH", PATH), "HOME": os.environ.get("HOME", "/"), "LANG": "C.UTF-8"}
    work = box.logs / "p"
    work.mkdir(exist_ok=True)
    item = build(Execution(command=command, image=image, **more), place=Place(base, str(box.logs), ENGINE))
    return item | NOW | {"cwd": str(work)}


def containers() -> dict[str, str]:
    """Containers by attempt; a loaded engine may be slow to answer."""
    assert ENGINE is not None
    end = time.monotonic() + DEADLINE_S
    while (found := container.left_behind(ENGINE)) is None:
        assert time.monotonic() < end, "the engine does not answer"
    return found


def left(attempt: str) -> list[str]:
    return [name for name in containers() if name == attempt]


def test_exit_code_output_inputs_and_working_directory(box: Box, host: Client, image: str) -> None:
    command = ["sh", "-c", 'printf "a\\000b\\377"; echo "$GREETING $QL3_TASK" >&2; echo made > file; exit 4']
    item = item_of(box, image, command, environment=[Variable(name="GREETING", value="hi there")])
    host.send({"op": "spawn", "items": [item]})
    body = host.exit(item["attempt"])
    log = box.log(item["attempt"]) or b""
    assert body["exit_code"] == 4, log
    # The engine carries the two streams apart, so their order is its own.
    assert log.replace(b"hi there t\n", b"") == b"a\x00b\xff"
    assert log.count(b"hi there t\n") == 1
    assert (box.logs / "p" / "file").read_text() == "made\n"
    assert left(item["attempt"]) == []


def test_the_quota_holds_for_a_container(box: Box, host: Client, image: str) -> None:
    item = item_of(box, image, ["sh", "-c", "while true; do echo 0123456789; done"], log_quota_bytes=65_536)
    host.send({"op": "spawn", "items": [item | {"timeout_ms": 4000}]})
    body = host.exit(item["attempt"])
    assert body["stopped_for"] == "timeout"
    assert len(box.log(item["attempt"]) or b"") == 65_536
    assert body["log"]["cut"] == "quota"
    assert left(item["attempt"]) == []


def test_a_container_that_ignores_term_is_gone_after_its_grace(box: Box, host: Client, image: str) -> None:
    item = item_of(box, image, ["sh", "-c", "trap '' TERM; echo up; while true; do sleep 1; done"], grace_ms=200)
    attempt = item["attempt"]
    host.send({"op": "spawn", "items": [item]})
    host.send({"op": "follow", "attempts": [attempt]})
    host.wait(lambda: host.find("grown", attempt))
    assert left(attempt) == [attempt]
    host.send({"op": "kill", "items": [{"attempt": attempt, "reason": "user"}]})
    assert host.exit(attempt)["stopped_for"] == "user"
    assert left(attempt) == []


def test_a_container_of_a_host_that_died_is_found_and_removed(box: Box, host: Client, image: str) -> None:
    item = item_of(box, image, ["sh", "-c", "echo up; sleep 1000"])
    attempt = item["attempt"]
    host.send({"op": "spawn", "items": [item]})
    host.send({"op": "follow", "attempts": [attempt]})
    host.wait(lambda: host.find("grown", attempt))
    box.kill_host()
    assert ENGINE is not None
    assert container.remove(ENGINE, [containers()[attempt]])
    assert left(attempt) == []


def test_limits_reach_the_container(box: Box, host: Client, image: str) -> None:
    show = "cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null; true"
    item = item_of(box, image, ["sh", "-c", show], isolation=Isolation(memory_bytes=1 << 26, cpu_percent=50))
    host.send({"op": "spawn", "items": [item]})
    body = host.exit(item["attempt"])
    log = Path(box.logs / f"{item['attempt']}.log").read_bytes()
    assert body["exit_code"] == 0, log
    assert log.strip() == b"67108864"
