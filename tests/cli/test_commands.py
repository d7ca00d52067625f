"""The commands: what they send, what they print, and how they end."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest

from schemas.tasks import Isolation, Runtime, SecretRef, TaskCreate, TaskRun, Variable
from services.kit.version import VERSION
from tests.cli.conftest import Command, uuid

EXIT = [("succeeded", 0), ("failed", 1), ("cancelled", 3), ("timed_out", 4)]


async def created(ql3: Command, name: str = "hello") -> None:
    assert (await ql3("task", "create", name, "--", "echo", "hi")).code == 0


async def test_a_task_is_created_as_it_was_written(ql3: Command) -> None:
    ended = await ql3(
        "task", "create", "sync",
        "--cron", "*/5 * * * *", "--cron", "@hourly", "--timezone", "Europe/Berlin",
        "--env", "MODE=fast=yes", "--secret", "api-token", "--secret", "PGPASSWORD=db",
        "--timeout", "1m30s", "--grace", "500ms", "--max-attempts", "3", "--safety", "idempotent",
        "--overlap", "skip", "--needs-approval", "--workdir", "/srv", "--label", "team=ops", "--title", "Sync",
        "--disabled", "--json", "--", "python", "sync.py", "--json", "-v", "--", "a b",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert ended.json["name"] == "sync"
    assert ended.json["enabled"] is False
    (asked,) = ql3.scene.asked
    assert isinstance(asked, TaskCreate)
    execution, terms = asked.spec.execution, asked.spec.terms
    assert execution.command == ["python", "sync.py", "--json", "-v", "--", "a b"]
    assert [(v.name, v.value, v.secret and v.secret.secret) for v in execution.environment] == [
        ("MODE", "fast=yes", None),
        ("API_TOKEN", None, "api-token"),
        ("PGPASSWORD", None, "db"),
    ]
    assert (execution.timeout_ms, execution.grace_ms, execution.working_directory) == (90_000, 500, "/srv")
    assert (terms.retry.max_attempts, terms.retry.safety, terms.overlap.policy) == (3, "idempotent", "skip")
    assert (terms.needs_approval, terms.labels, asked.spec.title) == (True, {"team": "ops"}, "Sync")
    assert [(spec["expression"], spec["timezone"]) for spec in asked.triggers] == [
        ("*/5 * * * *", "Europe/Berlin"),
        ("@hourly", "Europe/Berlin"),
    ]


async def test_a_task_says_how_it_is_executed(ql3: Command, tmp_path: Path) -> None:
    script, config = tmp_path / "job.py", tmp_path / "config.ini"
    script.write_text("print('hi')\n")
    config.write_text("[a]\nb = grün\n")
    ended = await ql3(
        "task", "create", "job", "--script", str(script), "--requirement", "httpx>=0.28", "--requirement", "rich",
        "--file", f"CONFIG={config}", "--secret-file", "KEY=deploy-key", "--log-quota", "1.5M",
        "--run-as", "nobody", "--umask", "027", "--nice", "5", "--memory", "256M", "--cpu", "150",
        "--processes", "20", "--open-files", "256", "--file-size", "2GiB", "--cpu-time", "1m30s", "--best-effort",
        "--", "job.py", "--verbose",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    (asked,) = ql3.scene.asked
    assert isinstance(asked, TaskCreate)
    execution = asked.spec.execution
    assert execution.runtime == Runtime(kind="python", requirements=["httpx>=0.28", "rich"], script="print('hi')\n")
    assert execution.command == ["job.py", "--verbose"]
    assert execution.environment == [
        Variable(name="CONFIG", value="[a]\nb = grün\n", as_file=True),
        Variable(name="KEY", secret=SecretRef(secret="deploy-key"), as_file=True),
    ]
    assert execution.log_quota_bytes == 1_572_864
    assert execution.isolation == Isolation(
        user="nobody", umask=0o027, nice=5, memory_bytes=256 << 20, cpu_percent=150, processes=20, open_files=256,
        file_bytes=2 << 30, cpu_seconds=90, required=False,
    )  # fmt: skip
    shown = await ql3("task", "show", "job")
    for text in ("python httpx>=0.28 rich", "umask=027", "memory_bytes=268435456", "best-effort", "KEY=a file: secret"):
        assert text in shown.out


async def test_an_update_changes_one_limit_and_takes_others_off(ql3: Command, tmp_path: Path) -> None:
    await ql3("task", "create", "x", "--memory", "1G", "--nice", "1", "--runtime", "node", "--", "node", "x.js")
    assert (await ql3("task", "update", "x", "--memory", "2G", "--requirement", "left-pad")).code == 0
    execution = ql3.scene.tasks["x"].spec.execution
    assert execution.isolation == Isolation(memory_bytes=2 << 30, nice=1)
    assert execution.runtime == Runtime(kind="node", requirements=["left-pad"])
    assert (await ql3("task", "update", "x", "--clear", "runtime", "--clear", "limits", "--image", "alpine")).code == 0
    spec = ql3.scene.tasks["x"].spec
    assert (spec.execution.isolation, spec.execution.runtime, spec.execution.image) == (None, None, "alpine")
    assert spec.terms.placement.executor == "docker"
    assert (await ql3("task", "update", "x", "--clear", "image", "--required", "--nice", "2")).code == 0
    spec = ql3.scene.tasks["x"].spec
    assert (spec.execution.image, spec.terms.placement.executor) == (None, "local_process")
    assert spec.execution.isolation == Isolation(nice=2)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["--requirement", "rich"], "--runtime"),
        (["--script", "/nowhere/job.py"], "--script"),
        (["--file", "A=/nowhere"], "--file"),
        (["--file", "A"], "--file"),
        (["--memory", "much"], "--memory"),
        (["--file-size", "-1"], "--file-size"),
        (["--umask", "888"], "--umask"),
        (["--umask", "1777"], "--umask"),
        (["--cpu-time", "5"], "--cpu-time"),
        (["--log-quota", "1 M"], "--log-quota"),
    ],
)
async def test_what_cannot_be_meant_is_refused_by_the_options_name(
    ql3: Command, options: list[str], field: str
) -> None:
    ended = await ql3("task", "create", "x", *options, "--", "true")
    assert ended.code == 2
    assert ended.err.startswith(f"error: {field}: ")
    assert ql3.scene.asked == []


async def test_an_update_changes_what_is_given_and_keeps_the_rest(ql3: Command) -> None:
    await ql3(
        "task", "create", "x", "--env", "A=1", "--env", "B=2", "--secret", "C=old", "--timeout", "5s",
        "--max-attempts", "3", "--needs-approval", "--label", "team=ops", "--", "true", "-v",
    )  # fmt: skip
    ended = await ql3(
        "task", "update", "x", "--env", "A=9", "--unset", "B", "--secret", "C=new", "--safety", "idempotent",
        "--no-approval", "--label", "tier=1",
    )  # fmt: skip
    assert (ended.code, ended.out) == (0, "x: revision 2\n")
    spec = ql3.scene.tasks["x"].spec
    assert [(v.name, v.value, v.secret and v.secret.secret) for v in spec.execution.environment] == [
        ("A", "9", None),
        ("C", None, "new"),
    ]
    assert (spec.execution.command, spec.execution.timeout_ms) == (["true", "-v"], 5_000)
    assert (spec.terms.retry.max_attempts, spec.terms.retry.safety) == (3, "idempotent")
    assert (spec.terms.needs_approval, spec.terms.labels) == (False, {"team": "ops", "tier": "1"})
    again = await ql3("task", "update", "x", "--json", "--", "false")
    assert (again.json["revision"], again.json["spec"]["execution"]["command"]) == (3, ["false"])
    assert (await ql3("task", "update", "nothing", "--title", "t")).code == 2
    unchanged = await ql3("task", "update", "x", "--env", "A=9")
    assert (unchanged.code, unchanged.err.startswith("error: TASK: Nothing would change")) == (2, True)
    unknown = await ql3("task", "update", "x", "--unset", "B")
    assert (unknown.code, unknown.err.startswith("error: --unset: The task has no variable B.")) == (2, True)
    assert ql3.scene.tasks["x"].revision == 3


async def test_limits_are_options_of_a_task(ql3: Command) -> None:
    made = await ql3(
        "task", "create", "x", "--overlap-limit", "3", "--concurrency", "db=2", "--concurrency", "api=9", "--", "true"
    )  # fmt: skip
    assert made.code == 0, made.err
    terms = ql3.scene.tasks["x"].spec.terms
    assert (terms.overlap.policy, terms.overlap.limit) == ("allow", 3)
    assert [(one.key, one.limit) for one in terms.concurrency] == [("db", 2), ("api", 9)]
    assert (await ql3("task", "update", "x", "--overlap", "queue", "--concurrency", "db=4")).code == 0
    terms = ql3.scene.tasks["x"].spec.terms
    assert (terms.overlap.policy, terms.overlap.limit) == ("queue", None)
    assert [(one.key, one.limit) for one in terms.concurrency] == [("db", 4), ("api", 9)]
    for wrong in ("db", "db=", "=3", "db=x", "db=-1"):
        refused = await ql3("task", "update", "x", "--concurrency", wrong)
        assert (refused.code, "--concurrency" in refused.err) == (2, True)


async def test_the_version_is_told(ql3: Command) -> None:
    told = await ql3("--version")
    assert (told.code, told.out) == (0, f"ql3 {VERSION}\n")


async def test_tasks_are_listed_shown_switched_and_deleted_by_name_or_id(ql3: Command) -> None:
    await created(ql3, "b")
    await created(ql3, "a")
    listed = await ql3("task", "list", "--json")
    assert ([task["name"] for task in listed.json["items"]], listed.json["next"]) == (["a", "b"], None)
    table = (await ql3("task", "list")).out.splitlines()
    assert table[0].split() == ["NAME", "ENABLED", "REVISION", "TRIGGERS", "COMMAND"]
    assert table[1].split() == ["a", "yes", "1", "echo", "hi"]
    first = await ql3("task", "list", "--json", "--limit", "1")
    assert (len(first.json["items"]), first.json["next"]) == (1, "1")
    shown = await ql3("task", "show", uuid("c", 1), "--json")
    assert shown.json["name"] == "b"
    assert "command   echo hi" in (await ql3("task", "show", "b")).out
    assert (await ql3("task", "disable", "b")).out == "b: disabled\n"
    assert (await ql3("task", "enable", "b", "--json")).json["enabled"] is True
    assert (await ql3("task", "delete", "b")).out == "b: deleted\n"
    assert (await ql3("task", "show", "b")).code == 2


async def test_a_warning_about_a_task_is_shown_beside_the_result(ql3: Command) -> None:
    ended = await ql3("task", "create", "x", "--env", "LOOKS_SECRET=1", "--", "true")
    assert (ended.code, ended.err) == (0, "LOOKS_SECRET: consider a secret.\n")


async def test_a_run_is_printed_as_committed(ql3: Command) -> None:
    await created(ql3)
    ended = await ql3("task", "run", "hello", "--json", "--input", "n=3", "--input", "text=hi", "--priority", "5")
    assert (ended.code, ended.json["status"], ended.json["id"]) == (0, "queued", uuid("b", 1))
    asked = ql3.scene.asked[-1]
    assert isinstance(asked, TaskRun)
    assert (asked.inputs, asked.priority) == ({"n": 3, "text": "hi"}, 5)
    assert (await ql3("task", "run", "hello")).out == uuid("b", 2) + "\n"


@pytest.mark.parametrize(("outcome", "code"), EXIT)
async def test_waiting_ends_with_the_outcome(ql3: Command, outcome: str, code: int) -> None:
    await created(ql3)
    ql3.scene.at_run = ["running", outcome]
    ended = await ql3.as_process("task", "run", "hello", "--wait", "--json")
    assert (ended.code, ended.json["status"]) == (code, outcome)


async def test_a_waiting_person_is_told_of_the_approval_that_is_needed(ql3: Command) -> None:
    await created(ql3)
    ql3.scene.at_run = ["waiting_approval", "running", "succeeded"]
    ended = await ql3("task", "run", "hello", "--wait")
    assert ended.code == 0
    assert ended.out == f"{uuid('b', 1)}: succeeded, exit code 0, 1.50 s\n"


async def test_following_shows_the_log_and_ends_with_the_outcome(ql3: Command) -> None:
    await created(ql3)
    ql3.scene.logs[uuid("a", 11)] = b"one\ntwo\n"
    ql3.scene.at_run = ["running", "failed"]
    ended = await ql3("task", "run", "hello", "--follow")
    assert (ended.code, ended.out) == (1, "one\ntwo\n")
    assert f"{uuid('b', 1)}: failed, exit code 7" in ended.err
    ql3.scene.logs[uuid("a", 21)] = b"three\n"
    both = await ql3("task", "run", "hello", "--follow", "--json")
    assert both.json["status"] == "failed"
    assert "three\n" in both.err


async def test_logs_are_exact_with_raw_and_readable_without(ql3: Command) -> None:
    await created(ql3)
    content = bytes(range(256)) * 2100 + b"no line end"
    ql3.scene.logs[uuid("a", 11)] = content
    ql3.scene.at_run = ["running", "succeeded"]
    assert (await ql3("task", "run", "hello", "--wait")).code == 0
    raw = await ql3.as_process("run", "logs", uuid("b", 1), "--raw")
    assert (raw.code, raw.raw) == (0, content)
    text = await ql3("run", "logs", uuid("b", 1))
    assert text.raw == content.decode("utf-8", "replace").encode() + b"\n"
    followed = await ql3.as_process("run", "logs", uuid("b", 1), "-f", "--raw")
    assert followed.raw == content
    assert (await ql3("run", "logs", uuid("b", 1), "--attempt", "1", "--raw")).raw == content
    assert (await ql3("run", "logs", uuid("b", 1), "--attempt", "2")).code == 2
    assert (await ql3("run", "logs", uuid("b", 9))).code == 2


async def test_who_follows_goes_on_when_the_platform_was_started_again(ql3: Command) -> None:
    await created(ql3)
    ql3.scene.logs[uuid("a", 11)] = b"one\n"
    ql3.scene.at_run = ["running"]
    process = await ql3.begin("task", "run", "hello", "--follow")
    assert process.stdout is not None
    async with asyncio.timeout(90):
        assert await process.stdout.readline() == b"one\n"
        await ql3.door.close()
        ql3.scene.logs[uuid("a", 11)] = b"one\ntwo\n"
        await ql3.door.open()
        await ql3.scene.change(uuid("b", 1), "succeeded")
        out, err = await process.communicate()
    assert (process.returncode, out) == (0, b"two\n"), err


async def test_an_interrupted_wait_leaves_the_run_alone(ql3: Command) -> None:
    await created(ql3)
    ql3.scene.at_run = ["running"]
    process = await ql3.begin("task", "run", "hello", "--wait")
    async with asyncio.timeout(90):
        await ql3.scene.ran.wait()
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
    assert (process.returncode, out) == (130, b"")
    assert b"Traceback" not in err
    assert ql3.scene.runs[uuid("b", 1)].status in ("queued", "running")


async def test_a_reader_that_has_had_enough_ends_the_command_in_silence_as_a_pipe_does(ql3: Command) -> None:
    await created(ql3)
    ql3.scene.logs[uuid("a", 11)] = b"x" * 4_000_000
    ql3.scene.at_run = ["running", "succeeded"]
    await ql3("task", "run", "hello", "--wait")
    process = await ql3.begin("run", "logs", uuid("b", 1), "--raw")
    assert process.stdout is not None
    assert process.stderr is not None
    assert await process.stdout.readexactly(10) == b"x" * 10
    process.stdout._transport.close()  # type: ignore[attr-defined]
    async with asyncio.timeout(90):
        assert await process.stderr.read() == b""
        assert await process.wait() == 141


async def test_runs_are_listed_shown_explained_cancelled_and_retried(ql3: Command) -> None:
    await created(ql3)
    ql3.scene.at_run = []
    run = (await ql3("task", "run", "hello", "--json")).json["id"]
    assert [row["id"] for row in (await ql3("run", "list", "--json")).json["items"]] == [run]
    assert run in (await ql3("run", "list")).out
    assert (await ql3("run", "list", "--status", "running", "--status", "failed", "--json")).json["items"] == []
    assert ql3.scene.asked[-1].status == ["running", "failed"]
    assert (await ql3("run", "show", run, "--json")).json["status"] == "queued"
    shown = (await ql3("run", "show", run)).out
    assert "run.queued" in shown
    assert (await ql3("run", "explain", run)).out == "All slots are taken.\nnext: It starts when one is free.\n"
    assert (await ql3("run", "explain", run, "--json")).json["cause"] == "no_slot"
    assert (await ql3("run", "retry", run)).code == 2
    assert (await ql3("run", "cancel", run)).out == f"{run}: cancelled\n"
    again = await ql3("run", "retry", run, "--json")
    assert again.json["retry_of_run_id"] == run


async def test_a_secret_comes_from_standard_input_and_is_never_shown(ql3: Command) -> None:
    ended = await ql3.as_process("secret", "set", "token", stdin=b"s3cret\n")
    assert (ended.code, ended.out) == (0, "Secret token stored (version 1).\n")
    assert ql3.scene.secrets["token"] == (1, "s3cret")
    assert (await ql3("secret", "set", "token", "--json", stdin=b"zwei\nZeilen\n\n")).json["version"] == 2
    assert ql3.scene.secrets["token"] == (2, "zwei\nZeilen\n")
    refused = await ql3("secret", "set", "token", "--expect-version", "1", stdin=b"other")
    assert refused.code == 2
    assert "expected_version" in refused.err
    listed = await ql3("secret", "list", "--json")
    assert [(row["name"], row["version"]) for row in listed.json["items"]] == [("token", 2)]
    assert "token" in (await ql3("secret", "list")).out


@pytest.mark.parametrize("value", [b"", b"\n", b"x" * 16385, b"\xff\xfe"])
async def test_a_value_that_no_secret_can_be_is_refused_and_not_echoed(ql3: Command, value: bytes) -> None:
    ended = await ql3("secret", "set", "token", stdin=value)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("error: value: ")
    assert len(ended.err) < 200
    assert ql3.scene.secrets == {}


async def test_workers_are_listed_drained_and_resumed(ql3: Command) -> None:
    assert [row["id"] for row in (await ql3("worker", "list", "--json")).json["items"]] == ["w1"]
    assert "w1      online  2     8      x86_64, 2 cpu, 4.0 GiB" in (await ql3("worker", "list")).out
    assert (await ql3("worker", "drain", "w1")).out == "w1: draining\n"
    assert (await ql3("worker", "resume", "w1", "--json")).json["status"] == "online"
    assert (await ql3("worker", "drain", "w9")).code == 2


async def test_denied_is_six_and_names_the_way_out(ql3: Command) -> None:
    await created(ql3)
    ql3.scene.denied = {"artifact.read"}
    ql3.scene.at_run = ["running", "succeeded"]
    await ql3("task", "run", "hello", "--wait")
    ended = await ql3("run", "logs", uuid("b", 1))
    assert (ended.code, ended.out) == (6, "")
    assert ended.err.count("\n") == 1


async def test_a_bad_credential_is_six(ql3: Command) -> None:
    url = ql3.environment["QL3_DATA"]
    console = (Path(url) / "console.json").read_text()
    address = console.partition('"url":"')[2].partition('"')[0]
    token = "ql3c_" + uuid("d", 1) + "_" + "A" * 43
    ended = await ql3("task", "list", QL3_URL=address, QL3_TOKEN=token)
    assert ended.code == 6
    assert token not in ended.err


async def test_nothing_there_is_five(ql3: Command, tmp_path: Path) -> None:
    ended = await ql3("task", "list", "--data", str(tmp_path / "elsewhere"))
    assert (ended.code, ended.out) == (5, "")
    assert "--data" in ended.err
    token = "ql3c_" + uuid("d", 1) + "_" + "A" * 43
    gone = await ql3("task", "list", QL3_URL="http://127.0.0.1:1", QL3_TOKEN=token)
    assert gone.code == 5


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["task", "create", "Bad Name", "--", "true"], "NAME"),
        (["task", "create", "x", "--timeout", "soon", "--", "true"], "--timeout"),
        (["task", "create", "x", "--env", "NOVALUE", "--", "true"], "--env"),
        (["task", "create", "x", "--env", "1X=y", "--", "true"], "--env"),
        (["task", "create", "x", "--max-attempts", "17", "--", "true"], "--max-attempts"),
        (["task", "show", "Bad Name"], "TASK"),
        (["run", "list", "--status", "bogus"], "--status"),
        (["run", "show", "../../x"], "RUN"),
        (["task", "list", "--project", "No Project"], "--project"),
        (["run", "logs", "x", "-f", "--attempt", "1"], "--attempt"),
    ],
)
async def test_bad_input_names_its_field_in_one_line(ql3: Command, arguments: list[str], field: str) -> None:
    ended = await ql3(*arguments)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"error: {field}: "), ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["task"], ["task", "crate"], ["task", "run"], ["task", "list", "--limit", "x"]])
async def test_a_wrong_command_line_is_two(ql3: Command, arguments: list[str]) -> None:
    assert (await ql3(*arguments)).code == 2


async def test_the_doctor_finds_a_well_system_well_and_a_sick_one_not(ql3: Command) -> None:
    well = await ql3("doctor", "--json")
    assert well.code == 0, well.out
    assert all(check["ok"] for check in well.json["items"])
    ql3.scene.sick = {"vault": ["the keyring cannot be read"]}
    async with asyncio.timeout(30):
        while (degraded := await ql3("doctor")).code == 0:
            pass
    assert degraded.code == 1
    assert "vault: the keyring cannot be read" in degraded.out
    ql3.scene.readiness = ["no worker is online"]
    async with asyncio.timeout(30):  # the gateway keeps an answer about readiness for half a second
        while (sick := await ql3("doctor")).code != 5:
            pass
    assert "no worker is online" in sick.out
    (Path(ql3.environment["QL3_DATA"]) / "console.json").chmod(0o644)
    assert "NOT WELL  0644" in (await ql3("doctor")).out


async def test_nats_env_gives_the_operator_and_nobody_else(ql3: Command) -> None:
    folder = Path(ql3.environment["QL3_DATA"]) / "nats"
    folder.mkdir()
    (folder / "credentials.json").write_text('{"operator": "it\'s", "dispatcher": "other"}')
    ended = await ql3("nats", "env")
    assert ended.out.splitlines() == [
        "export NATS_URL=nats://127.0.0.1:1",
        "export NATS_USER=operator",
        "export NATS_PASSWORD='it'\"'\"'s'",
    ]
    assert (await ql3("nats", "env", "--json")).json == {
        "url": "nats://127.0.0.1:1",
        "user": "operator",
        "password": "it's",
    }


async def test_messages_are_chinese_where_that_is_spoken(ql3: Command) -> None:
    await created(ql3)
    assert (await ql3("task", "disable", "hello", QL3_LANG="zh")).out == "hello: 已停用\n"
    refused = await ql3("task", "show", "nothing", LANG="zh_CN.UTF-8")
    assert (refused.code, refused.err) == (2, "错误: task: 这里没有此对象。请检查名称或编号以及项目。\n")
    assert (await ql3("task", "disable", "hello", LANG="zh_CN.UTF-8", QL3_LANG="en")).out == "hello: disabled\n"


async def test_limits_are_set_listed_and_taken_away(ql3: Command) -> None:
    await created(ql3)
    task = uuid("c", 1)
    ql3.scene.limits = {("task", task): 3, ("task", uuid("c", 99)): 4}
    assert (await ql3("project", "limit", "default", "7")).out == "default: at most 7, 1 in work\n"
    keyed = await ql3("project", "limit", "default", "2", "--key", "db", QL3_LANG="zh")
    assert keyed.out == "default/db:上限 2,进行中 1\n"
    rows = [line.split() for line in (await ql3("project", "limits")).out.splitlines()]
    assert rows[1:] == [
        ["key", "db", "2", "1"],
        ["project", "default", "7", "1"],
        ["task", "hello", "3", "1"],
        ["task", uuid("c", 99), "4", "1"],
    ]
    listed = await ql3("project", "limits", "default", "--json")
    assert [item["limit"] for item in listed.json["items"]] == [2, 7, 3, 4]
    assert (await ql3("project", "limit", "default", "none")).out == "default: no limit\n"
    assert (await ql3("project", "limit", "default", "none", "--key", "db", "--json")).json["items"] == []
    for wrong in ("0", "100001", "9" * 5000, "x", "٣"):
        refused = await ql3("project", "limit", "default", wrong)
        assert (refused.code, refused.err.split(":")[1]) == (2, " LIMIT")


async def test_a_run_or_a_task_that_is_not_there_is_named(ql3: Command) -> None:
    await created(ql3)
    assert (await ql3("run", "list", "--task", "hello")).code == 0
    for task in ("nothing", uuid("c", 77)):
        ended = await ql3("run", "list", "--task", task)
        assert (ended.code, ended.out, ended.err.startswith("error: task: ")) == (2, "", True)
    for act in ("show", "explain", "logs", "cancel", "retry"):
        for run in (uuid("b", 99), "nonsense", "UNKNOWN"):
            ended = await ql3("run", act, run)
            assert (ended.code, ended.out, "run" in ended.err.lower()) == (2, "", True), ended.err
    told = await ql3("run", "show", "nonsense")
    assert told.err.startswith("error: RUN: There is no such run; its id is what ql3 run list shows.")
    assert (await ql3("run", "show", uuid("b", 99), QL3_LANG="zh")).err.startswith("错误: 没有此运行。")


async def test_text_of_others_cannot_steer_the_terminal(ql3: Command) -> None:
    assert (await ql3("task", "create", "x", "--title", "a\x1b[31mb\nc", "--", "true")).code == 0
    shown = (await ql3("task", "show", "x")).out
    assert "a[31mb c" in shown
    assert "\x1b" not in shown


async def test_triggers_are_added_listed_switched_and_deleted(ql3: Command) -> None:
    await created(ql3)
    added = await ql3("trigger", "add", "hello", "@every 90s", "--missed", "catch_up", "--catch-up", "5", "--json")
    trigger = added.json["id"]
    assert added.json["spec"] | {"expression": "@every 90s", "missed": "catch_up", "catch_up": 5} == added.json["spec"]
    listed = await ql3("trigger", "list", "--task", "hello")
    assert listed.out.splitlines()[1].split() == [
        trigger, "hello", "@every", "90s", "yes", "2023-11-14", "22:14:20", "2",
    ]  # fmt: skip
    assert (await ql3("trigger", "list", "--json")).json["items"][0]["id"] == trigger
    assert (await ql3("trigger", "disable", trigger)).out == f"{trigger}  @every 90s\n"
    assert "next 2023-11-14 22:14:20" in (await ql3("trigger", "enable", trigger)).out
    assert "scheduler_down" in (await ql3("trigger", "missed")).out
    assert (await ql3("trigger", "missed", "--trigger", trigger, "--json")).json["items"][0]["count"] == 2
    assert (await ql3("trigger", "delete", trigger)).code == 0
    assert (await ql3("trigger", "enable", trigger)).code == 2
    assert (await ql3("trigger", "enable", "No Such")).err.startswith("error: TRIGGER: ")


async def test_a_credential_signs_its_holder_in_until_it_is_rotated_or_revoked(ql3: Command) -> None:
    console = json.loads((Path(ql3.environment["QL3_DATA"]) / "console.json").read_text())
    made = await ql3("credential", "create", "deploys", "--for", "api_app/ci", "--ttl", "1d", "--json")
    assert made.code == 0, made.err
    identity, token = made.json["id"], made.json["token"]
    elsewhere = {"QL3_URL": console["url"], "QL3_TOKEN": token}
    assert (await ql3("task", "list", **elsewhere)).code == 0
    assert token not in (await ql3("credential", "list", "--all")).out
    rotated = await ql3("credential", "rotate", identity)
    assert rotated.out.startswith(f"ql3c_{identity}_")
    assert rotated.out.strip() != token
    assert (await ql3("task", "list", **elsewhere)).code == 6
    assert (await ql3("task", "list", **{**elsewhere, "QL3_TOKEN": rotated.out.strip()})).code == 0
    assert (await ql3("credential", "revoke", identity)).out == f"{identity}: revoked\n"
    assert (await ql3("task", "list", **{**elsewhere, "QL3_TOKEN": rotated.out.strip()})).code == 6
    assert (await ql3("credential", "create", "x", "--for", "ci")).err.startswith("error: --for: ")


async def test_dead_letters_are_listed_and_sent_again(ql3: Command) -> None:
    bus = ql3.scene.bus
    assert bus is not None
    subject, body = "ql3.dead.dispatcher.undecodable", b"{}"
    headers = {"Nats-Msg-Id": "1", "Ql3-Dead-Subject": "ql3.cmd.dispatcher.submit", "Ql3-Dead-Error": "unreadable"}
    assert await bus.publish_many([(subject, body, headers)]) == [None]
    (letter,) = (await ql3("dead", "list", "--json")).json["items"]
    assert letter["service"] == "dispatcher"
    assert "undecodable" in (await ql3("dead", "list", "--service", "dispatcher")).out
    assert (await ql3("dead", "replay", "99")).code == 2
    assert (await ql3("dead", "replay", str(letter["sequence"]))).out == "Letter 1 was sent again.\n"
    assert (await ql3("dead", "list", "--json")).json["items"] == []


async def test_ages_and_holds_are_shown_and_changed(ql3: Command) -> None:
    assert (await ql3("retention", "show")).out.split() == ["logs", "30", "d", "runs", "90", "d", "changed", "never"]
    changed = await ql3("retention", "set", "--logs", "36h", "--json")
    assert (changed.json["logs_ms"], changed.json["runs_ms"]) == (36 * 3_600_000, 90 * 86_400_000)
    assert "1 d 12 h" in (await ql3("retention", "show")).out
    assert (await ql3("retention", "set", "--logs", "1m")).code == 2
    run = uuid("b", 1)
    assert (await ql3("retention", "hold", run, "--reason", "case 4711")).out == f"{run}: held\n"
    assert (await ql3("retention", "hold", "--json")).json["run_id"] is None
    listed = await ql3("retention", "holds", "--json")
    assert [(hold["run_id"], hold["reason"]) for hold in listed.json["items"]] == [(run, "case 4711"), (None, "")]
    assert "case 4711" in (await ql3("retention", "holds")).out
    assert (await ql3("retention", "release", run)).out == f"{run}: released\n"
    assert (await ql3("retention", "release", run)).code == 2
