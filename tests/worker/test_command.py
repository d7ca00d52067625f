"""From an offer to a start: environments, files, isolation, containers, package environments."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from schemas import limits
from schemas.tasks import Execution, ExecutionRevision, Isolation, Placement, Runtime, SecretRef, Terms, Variable
from schemas.workers import OfferItem
from services.kit.ids import new_id
from services.worker.attempt import hold
from services.worker.command import Builder, Extras, Place, prepare
from services.worker.files import Files
from services.worker.host.cgroups import CgroupError, Cgroups
from services.worker.prepare import FAILED
from services.worker.refusal import Refused
from services.worker.runtimes import READY, UNUSED_S, Metadata, Runtimes, for_installers, metadata
from tests.worker.conftest import Box, Client

BASE = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/home/me", "LANG": "C.UTF-8"}
PLACE = Place(BASE, "/data/projects")


def revision(execution: Execution, **terms: Any) -> ExecutionRevision:
    return ExecutionRevision(
        project="p", task_id=new_id(), task_name="t", task_revision=3, execution=execution, terms=Terms(**terms)
    )


def build(execution: Execution, *, place: Place = PLACE, extras: Extras | None = None, **terms: Any) -> dict[str, Any]:
    one = revision(execution, **terms)
    offer = OfferItem(
        offer_id=new_id(),
        attempt_id=new_id(),
        run_id=new_id(),
        project="p",
        attempt=2,
        lease_generation=1,
        revision=one.digest,
    )
    builder = Builder()
    builder.place = place
    held = hold(b"k" * 32, offer, one, "host", place.engine, 0.0)
    prepared = builder.prepare(offer.revision, one)
    return builder.item(held, prepared, offer, not_after_ns=5, timeout_ms=7, extras=extras)


def test_an_item_has_what_the_host_needs_and_no_token() -> None:
    item = build(Execution(command=["a", "b"], grace_ms=9, environment=[Variable(name="X", value="1")]))
    assert item["argv"] == ["a", "b"]
    assert (item["cwd"], item["grace_ms"], item["timeout_ms"], item["not_after_ns"]) == ("/data/projects/p", 9, 7, 5)
    assert item["quota"] == limits.LOG_QUOTA_DEFAULT_BYTES
    assert item["env"].items() >= (BASE | {"X": "1", "QL3_ATTEMPT": "2", "QL3_TASK_REVISION": "3"}).items()
    assert len(item["key"]) == 64
    assert not {"nice", "limits", "uid", "cgroup"} & item.keys()


def test_a_value_larger_than_the_kernel_takes_is_refused_by_name() -> None:
    fits = limits.KERNEL_STRING_BYTES - len("BIG") - 1
    build(Execution(command=["a"], environment=[Variable(name="BIG", value="x" * fits)]))
    with pytest.raises(Refused) as refused:
        build(Execution(command=["a"], environment=[Variable(name="BIG", value="x" * (fits - 1) + "ü")]))
    assert refused.value.code == "environment_too_large"
    assert "BIG" in refused.value.summary


def test_the_largest_value_that_is_not_refused_really_starts(box: Box, host: Client) -> None:
    item = box.item("/bin/true", env={"BIG": "x" * (limits.KERNEL_STRING_BYTES - len("BIG") - 1)})
    host.send({"op": "spawn", "items": [item]})
    assert host.exit(item["attempt"])["exit_code"] == 0


def test_secrets_are_in_the_environment_or_a_file_and_always_masked() -> None:
    execution = Execution(
        command=["a"],
        environment=[
            Variable(name="TOKEN", secret=SecretRef(secret="s")),
            Variable(name="CERT", secret=SecretRef(secret="c"), as_file=True),
            Variable(name="CONFIG", value="text", as_file=True),
        ],
    )
    prepared = prepare(revision(execution), PLACE)
    assert (prepared.secrets, prepared.secret_files, prepared.files) == (
        ("TOKEN", "CERT"),
        ("CERT",),
        {"CONFIG": "text"},
    )
    extras = Extras(secrets={"TOKEN": "t-1234", "CERT": "c-1234"}, paths={"CERT": "/m/CERT", "CONFIG": "/f/CONFIG"})
    item = build(execution, extras=extras)
    assert {name: item["env"][name] for name in ("TOKEN", "CERT", "CONFIG")} == {
        "TOKEN": "t-1234",
        "CERT": "/m/CERT",
        "CONFIG": "/f/CONFIG",
    }
    assert sorted(item["mask"]) == ["c-1234", "t-1234"]
    assert "1234" not in json.dumps(item["argv"]) + json.dumps(item["context"])


def test_files_are_private_secret_ones_only_in_memory_and_gone_afterwards(tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    files = Files(tmp_path / "files", f"test-{os.getpid()}", [memory])
    attempt, other = new_id(), new_id()
    paths = files.deliver(attempt, {"CONFIG": "grün"}, {"CERT": "secret"})
    public, secret = Path(paths["CONFIG"]), Path(paths["CERT"])
    assert public.read_text() == "grün"
    assert secret.read_text() == "secret"
    assert memory in secret.parents
    for path in (public, secret):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    kept = Path(files.deliver(other, {"CONFIG": "x"}, {})["CONFIG"])
    files.sweep({other})
    assert not secret.parent.exists()
    assert not public.parent.exists()
    assert kept.exists()
    files.drop(other)
    assert not kept.parent.exists()
    secret.parent.parent.rmdir()


def test_without_memory_a_secret_file_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    files = Files(tmp_path / "files", "test", [tmp_path])
    with pytest.raises(Refused):
        files.deliver(new_id(), {"CONFIG": "x"}, {"CERT": "secret"})
    assert not (tmp_path / "files").exists()


# -- isolation


def test_isolation_becomes_attributes_of_the_start() -> None:
    wanted = Isolation(umask=0o27, nice=5, open_files=64, file_bytes=1000, cpu_seconds=3, memory_bytes=1 << 20)
    item = build(Execution(command=["a"], isolation=wanted))
    assert (item["umask"], item["nice"]) == (0o27, 5)
    assert item["limits"] == {"nofile": 64, "fsize": 1000, "cpu": 3}
    assert (item["cgroup"], item["cgroup_required"]) == ({"memory_bytes": 1 << 20}, True)


def test_a_user_that_does_not_exist_is_refused() -> None:
    with pytest.raises(Refused) as refused:
        build(Execution(command=["a"], isolation=Isolation(user="no-such-user", required=False)))
    assert refused.value.code == "limit_unsupported"


def test_limits_hold_in_the_process(box: Box, host: Client) -> None:
    script = (
        "import os,resource as r;"
        "print(r.getrlimit(r.RLIMIT_NOFILE), r.getrlimit(r.RLIMIT_FSIZE), os.getpriority(0, 0), oct(os.umask(0)))"
    )
    more = build(Execution(command=["a"], isolation=Isolation(umask=0o27, nice=5, open_files=64, file_bytes=1000)))
    wanted = {name: more[name] for name in ("umask", "nice", "limits")}
    item = box.item(sys.executable, "-I", "-S", "-c", script, **wanted)
    host.send({"op": "spawn", "items": [item]})
    assert host.exit(item["attempt"])["exit_code"] == 0
    assert box.log(item["attempt"]) == b"(64, 64) (1000, 1000) 5 0o27\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
def test_a_process_runs_as_the_user_that_was_asked_for(box: Box, host: Client) -> None:
    more = build(Execution(command=["a"], isolation=Isolation(user="nobody")))
    wanted = {name: more[name] for name in ("uid", "gid", "groups")}
    item = box.item("id", "-un", **wanted, cwd="/")
    host.send({"op": "spawn", "items": [item]})
    assert host.exit(item["attempt"])["exit_code"] == 0
    assert box.log(item["attempt"]) == b"nobody\n"
    assert more["env"]["USER"] == "nobody"
    # Its whole tree can be ended by us, too.
    stubborn = box.item("sh", "-c", "trap '' TERM; setsid sleep 1000 & sleep 1000", **wanted, cwd="/", grace_ms=100)
    host.send({"op": "spawn", "items": [stubborn]})
    host.started(stubborn["attempt"])
    host.send({"op": "kill", "items": [{"attempt": stubborn["attempt"], "reason": "user"}]})
    assert host.exit(stubborn["attempt"])["stopped_for"] == "user"


def test_a_limit_that_cannot_be_set_refuses_before_the_start(box: Box, host: Client) -> None:
    mark = box.logs / "mark"
    items = {
        "limit": box.item("touch", str(mark), limits={"nofile": 1 << 40}),
        "memory": box.item("touch", str(mark), cgroup={"memory_bytes": 1, "unheard_of": 2}),
    }
    del items["memory"]["cgroup"]["unheard_of"]
    host.send({"op": "spawn", "items": [items["limit"]]})
    assert host.refused(items["limit"]["attempt"]) == "limit_unsupported"
    assert host.find("refused", items["limit"]["attempt"])["limits"] == "nofile"
    if "memory" not in Cgroups().possible():
        host.send({"op": "spawn", "items": [items["memory"]]})
        assert host.refused(items["memory"]["attempt"]) == "limit_unsupported"
        assert host.find("refused", items["memory"]["attempt"])["limits"] == "memory_bytes"
        lax = box.item("true", cgroup={"memory_bytes": 1 << 30}, cgroup_required=False)
        host.send({"op": "spawn", "items": [lax]})
        assert host.exit(lax["attempt"])["exit_code"] == 0
    assert not mark.exists()


class Tree:
    """A directory that looks like cgroup v2 to whoever writes files; the kernel's part is played by nobody."""

    def __init__(self, root: Path, controllers: str) -> None:
        self.root = root
        root.mkdir()
        (root / "cgroup.controllers").write_text(controllers)
        (root / "cgroup.subtree_control").write_text(controllers)


def test_cgroup_limits_are_written_in_the_kernels_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = Tree(tmp_path / "cg", "cpu memory pids")
    written: dict[str, str] = {}
    monkeypatch.setattr("services.worker.host.cgroups._write", lambda path, text: written.update({path: text}))
    groups = Cgroups([str(tree.root)])
    path = groups.make("a-1", {"memory_bytes": 1 << 20, "cpu_percent": 150, "processes": 9})
    assert Path(path).is_dir()
    found = {os.path.basename(name): text for name, text in written.items() if name.startswith(path)}
    assert found == {
        "memory.max": "1048576",
        "memory.swap.max": "0",
        "cpu.max": "150000 100000",
        "pids.max": "9",
    }
    (Path(path) / "memory.events").write_text("low 0\noom_kill 2\n")
    assert groups.remove(path)


def test_a_missing_controller_refuses_and_leaves_no_directory(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "cg", "pids")
    (tree.root / "cgroup.subtree_control").write_text("")
    with pytest.raises(CgroupError):
        Cgroups([str(tree.root)]).make("a-1", {"memory_bytes": 1})
    assert [path.name for path in tree.root.iterdir() if path.is_dir()] == []


# -- package environments


def test_inline_metadata_of_a_script_is_read() -> None:
    script = (
        '# hi\n# /// script\n# requires-python = ">=3.11"\n# dependencies = [\n#   "a<2",\n#   "b",\n# ]\n# ///\nx=1'
    )
    assert metadata(script) == Metadata(">=3.11", ("a<2", "b"))
    assert metadata("print('# ///')\n") == Metadata(None, ())
    for bad in ("# /// script\n# a = \n# ///\n", "# /// script\n# dependencies = 3\n# ///\n"):
        with pytest.raises(Refused) as refused:
            metadata(bad)
        assert refused.value.code == "runtime_invalid"


def wheel(directory: Path, name: str, code: str) -> Path:
    """A wheel of one module, made by hand, so that no index is needed."""
    path = directory / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", code)
        archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return path


def start(box: Box, host: Client, ready: Any, **more: Any) -> tuple[dict[str, Any], str]:
    environment = BASE | {"HOME": str(box.logs)} | ready.environment
    environment["PATH"] = f"{ready.environment['PATH']}:{os.environ['PATH']}"
    item = box.item(*ready.argv, env=environment, **more)
    host.send({"op": "spawn", "items": [item]})
    return host.exit(item["attempt"]), (box.log(item["attempt"]) or b"").decode()


def test_a_script_with_requirements_runs_in_an_environment_that_is_shared(
    box: Box, host: Client, tmp_path: Path
) -> None:
    package = wheel(tmp_path, "greeter", "def hello(name): return f'hello {name}'")
    script = (
        f"# /// script\n# dependencies = ['greeter @ {package.as_uri()}']\n# ///\n"
        "import sys, greeter, os\n"
        "print(greeter.hello(sys.argv[1]), sys.prefix == os.environ['VIRTUAL_ENV'])\n"
        "print([n for n in os.environ if n.startswith('QL3_INSTALL')])\n"
    )
    runtimes = Runtimes(tmp_path / "environments", {"UV_OFFLINE": "1"})
    runtime = Runtime(kind="python", script=script)
    first = runtimes.ready(runtime, ["script", "world"])
    assert "prepare.py" in first.argv[3]
    body, log = start(box, host, first)
    assert body["exit_code"] == 0, log
    assert log.endswith("hello world True\n[]\n")
    again = runtimes.ready(runtime, ["script", "again"])
    assert again.argv[0].endswith("/venv/bin/python")
    assert start(box, host, again)[1] == "hello again True\n[]\n"
    # Another script with the same needs finds the same environment.
    other = Runtime(kind="python", requirements=[f"greeter @ {package.as_uri()}"])
    command = runtimes.ready(other, ["python", "-c", "import greeter; print(greeter.hello('you'))"])
    assert start(box, host, command)[1] == "hello you\n"


def test_a_failed_install_fails_the_attempt_with_its_output_in_the_log(box: Box, host: Client, tmp_path: Path) -> None:
    runtimes = Runtimes(tmp_path / "environments", {"UV_OFFLINE": "1"})
    ready = runtimes.ready(Runtime(kind="python", requirements=["no-such-package==9"]), ["python", "-c", "1"])
    body, log = start(box, host, ready)
    assert body["exit_code"] == FAILED
    assert "no-such-package" in log
    assert "ql3: the environment could not be made" in log
    # Nothing half-made is taken for ready.
    assert (
        "prepare.py" in runtimes.ready(Runtime(kind="python", requirements=["no-such-package==9"]), ["python"]).argv[3]
    )


def test_node_packages_are_installed_the_same_way(box: Box, host: Client, tmp_path: Path) -> None:
    package = tmp_path / "greeter"
    package.mkdir()
    (package / "package.json").write_text('{"name": "greeter", "version": "1.0.0", "main": "index.js"}')
    (package / "index.js").write_text("module.exports = name => `hello ${name}`;")
    runtimes = Runtimes(tmp_path / "environments", {"npm_config_offline": "true"})
    for script in ("console.log(require('greeter')(process.argv[2]))", "import g from 'greeter'\nconsole.log(g('m'))"):
        runtime = Runtime(kind="node", requirements=[f"file:{package}"], script=script)
        body, log = start(box, host, runtimes.ready(runtime, ["script", "m"]))
        assert body["exit_code"] == 0, log
        assert log.endswith("hello m\n")


def test_a_command_that_its_environment_lacks_is_named_in_the_log_with_its_folder(
    box: Box, host: Client, tmp_path: Path
) -> None:
    ready = Runtimes(tmp_path / "environments", {"UV_OFFLINE": "1"}).ready(
        Runtime(kind="python"), ["absent", "--key=1"]
    )
    body, log = start(box, host, ready, cwd=str(tmp_path))
    assert body["exit_code"] == 127
    assert log.endswith(f"ql3: absent: No such file or directory (from the folder {tmp_path})\n")


def test_two_runs_that_need_the_same_environment_make_it_once(box: Box, host: Client, tmp_path: Path) -> None:
    package = wheel(tmp_path, "greeter", "x = 1")
    runtimes = Runtimes(tmp_path / "environments", {"UV_OFFLINE": "1"})
    runtime = Runtime(kind="python", requirements=[f"greeter @ {package.as_uri()}"])
    ready = runtimes.ready(runtime, ["python", "-c", "import greeter; print(greeter.x)"])
    environment = BASE | {"HOME": str(box.logs)} | ready.environment
    environment["PATH"] = f"{ready.environment['PATH']}:{os.environ['PATH']}"
    items = [box.item(*ready.argv, env=environment) for _ in range(3)]
    host.send({"op": "spawn", "items": items})
    for item in items:
        assert host.exit(item["attempt"])["exit_code"] == 0
    logs = [(box.log(item["attempt"]) or b"").decode() for item in items]
    assert all(log.endswith("1\n") for log in logs)
    assert sum("Installed 1 package" in log for log in logs) == 1


def test_environments_that_nobody_needs_go(tmp_path: Path) -> None:
    runtimes = Runtimes(tmp_path / "environments")
    ready = runtimes.ready(Runtime(kind="python"), ["python"])
    place = Path(ready.argv[4])
    (place / READY).touch()
    assert runtimes.sweep() == []
    assert runtimes.sweep(time.time() + UNUSED_S + 1) == [place.name]
    assert not place.exists()


def test_only_what_tells_where_packages_are_goes_to_installers() -> None:
    given = {"UV_INDEX_URL": "a", "pip_index_url": "b", "https_proxy": "c", "PASSWORD": "d", "PATH": "e"}
    assert for_installers(given) == {"UV_INDEX_URL": "a", "pip_index_url": "b", "https_proxy": "c"}


# -- containers

NOW = {"not_after_ns": 1 << 62, "timeout_ms": None}
DOUBLE = """#!/bin/sh
# Plays an OCI command: notes what it was asked, and runs the command of `run` here instead of in a container.
printf '%s\\n' "$*" >> "$(dirname "$0")/asked"
case "$1" in
run)
  while [ "$1" != "--" ]; do shift; done
  shift 2
  exec "$@";;
esac
"""


def engine(directory: Path) -> str:
    path = directory / "docker"
    path.write_text(DOUBLE)
    path.chmod(0o755)
    return str(path)


def test_a_container_run_has_the_same_control_and_is_removed_behind_the_attempt(
    box: Box, host: Client, tmp_path: Path
) -> None:
    place = Place(BASE, str(box.logs), engine(tmp_path))
    execution = Execution(
        command=["sh", "-c", "echo $GREETING; exit 4"],
        image="img:1",
        environment=[Variable(name="GREETING", value="hi there")],
        isolation=Isolation(memory_bytes=1 << 26, cpu_percent=50, processes=20, user="1000:1000", open_files=99),
    )
    item = build(execution, place=place, placement=Placement(executor="docker"))
    attempt = item["attempt"]
    item |= NOW | {"cwd": str(box.logs)}
    host.send({"op": "spawn", "items": [item]})
    body = host.exit(attempt)
    assert body["exit_code"] == 4
    assert box.log(attempt) == b"hi there\n"
    run, remove = (tmp_path / "asked").read_text().splitlines()
    assert run.startswith(f"run --rm --init --name ql3-{attempt} --label ql3.attempt={attempt} ")
    assert f"--volume {box.logs}/p:/work --workdir /work" in run
    for option in (
        "--env GREETING",
        "--env QL3_RUN_ID",
        "--memory 67108864b",
        "--cpus 0.5",
        "--pids-limit 20",
        "--user 1000:1000",
        "--ulimit nofile=99:99",
    ):
        assert option in run
    assert "hi there" not in run
    assert "--env PATH" not in run
    assert run.endswith(" -- img:1 sh -c echo $GREETING; exit 4")
    assert remove == f"rm --force --volumes ql3-{attempt}"


def test_a_stopped_container_is_removed_too(box: Box, host: Client, tmp_path: Path) -> None:
    place = Place(BASE, str(box.logs), engine(tmp_path))
    item = (
        build(Execution(command=["sh", "-c", "echo up; sleep 1000"], image="img"), place=place)
        | NOW
        | {"cwd": str(box.logs)}
    )
    host.send({"op": "spawn", "items": [item]})
    host.send({"op": "follow", "attempts": [item["attempt"]]})
    host.wait(lambda: host.find("grown", item["attempt"]))
    host.send({"op": "kill", "items": [{"attempt": item["attempt"], "reason": "user", "grace_ms": 0}]})
    assert host.exit(item["attempt"])["stopped_for"] == "user"
    assert (tmp_path / "asked").read_text().splitlines()[-1].startswith("rm --force")


def test_without_an_engine_or_image_a_container_is_refused(tmp_path: Path) -> None:
    for execution, place in (
        (Execution(command=["a"], image="img"), PLACE),
        (Execution(command=["a"]), Place(BASE, "/w", engine(tmp_path))),
    ):
        with pytest.raises(Refused) as refused:
            build(execution, place=place, placement=Placement(executor="docker"))
        assert refused.value.code in ("runtime_unsupported", "runtime_invalid")


def test_a_cleanup_that_fails_or_cannot_start_hides_no_end(box: Box, host: Client) -> None:
    item = box.item("true", cleanup=["/bin/sh", "-c", "exit 3"])
    missing = box.item("true", cleanup=["no-such-program"])
    host.send({"op": "spawn", "items": [item, missing]})
    for one in (item, missing):
        assert host.exit(one["attempt"])["exit_code"] == 0


def test_the_preparing_program_is_plain_python() -> None:
    import services.worker.prepare as module

    # -I and -S: no site packages and nothing of ours on its path.
    argv = [sys.executable, "-I", "-S", str(module.__file__), "/nowhere", "true"]
    done = subprocess.run(argv, capture_output=True, check=False)
    assert done.returncode == 1
    assert b"FileNotFoundError" in done.stderr
