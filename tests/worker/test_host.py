"""The process host with real processes: starts, output, ends."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from pathlib import Path

import msgspec

from schemas import proof
from schemas.workers import ReportBody
from tests.worker.conftest import KEY, Box, Client


def decode_body(text: str) -> ReportBody:
    return msgspec.json.decode(text, type=ReportBody)


def test_a_process_runs_and_its_end_is_told_with_a_proof(box: Box, host: Client) -> None:
    item = box.item("sh", "-c", "echo out; echo err >&2; exit 3")
    host.send({"op": "spawn", "items": [item]})
    started = host.started(item["attempt"])
    body = host.exit(item["attempt"])
    assert body["exit_code"] == 3
    assert body["signal"] is None
    assert body["stopped_for"] is None
    assert started["pid"] > 0
    assert box.log(item["attempt"]) == b"out\nerr\n"
    assert body["log"] == {
        "artifact_id": item["attempt"],
        "size": 8,
        "produced": 8,
        "truncated": False,
        "cut": None,
        "sha256": hashlib.sha256(b"out\nerr\n").hexdigest(),
    }
    told = host.find("exits", item["attempt"])
    assert told is not None
    assert told["context"] == {"run": "r"}
    assert proof.proof_holds(KEY.hex(), item["attempt"], told["sequence"], told["body"].encode(), told["proof"])
    assert decode_body(told["body"]).exit_code == 3
    mode = (box.logs / f"{item['attempt']}.log").stat().st_mode
    assert stat.S_IMODE(mode) == 0o600
    assert stat.S_IMODE(box.directory.stat().st_mode) == 0o700


def test_no_output_makes_no_file(box: Box, host: Client) -> None:
    item = box.item("/bin/true")
    host.send({"op": "spawn", "items": [item]})
    body = host.exit(item["attempt"])
    assert body["exit_code"] == 0
    assert (body["log"]["artifact_id"], body["log"]["size"], body["log"]["sha256"]) == (None, 0, None)
    assert box.log(item["attempt"]) is None


def test_the_environment_is_exactly_what_was_given(box: Box, host: Client) -> None:
    item = box.item("/usr/bin/env", "-0", env={"A": "b=c\nd", "EMPTY": "", "Ü": "ü"})
    host.send({"op": "spawn", "items": [item]})
    host.exit(item["attempt"])
    log = box.log(item["attempt"])
    assert log is not None
    assert dict(line.split("=", 1) for line in log.decode().split("\0") if line) == item["env"]


def test_a_child_gets_default_signals_its_own_session_and_no_descriptor_of_ours(box: Box, host: Client) -> None:
    script = (
        "import os;"
        "signals = dict(l.split() for l in open('/proc/self/status') if l.startswith(('SigIgn', 'SigBlk')));"
        "print(len(os.listdir('/proc/self/fd')), os.readlink('/proc/self/fd/0'), os.getsid(0) == os.getpid(),"
        "os.getcwd(), oct(os.umask(0)), int(signals['SigBlk:'], 16), int(signals['SigIgn:'], 16) & ((1 << 31) - 1))"
    )
    item = box.item(sys.executable, "-I", "-S", "-c", script, cwd=str(box.logs))
    host.send({"op": "spawn", "items": [item]})
    host.exit(item["attempt"])
    # Python itself ignores SIGPIPE (13) and SIGXFSZ (25); 32 and 33 are the C library's own.
    ignored = (1 << 12) | (1 << 24)
    # The fourth descriptor is the one that lists them.
    assert box.log(item["attempt"]) == f"4 /dev/null True {box.logs} 0o22 0 {ignored}\n".encode()


def test_starts_that_cannot_be_are_refused_with_a_code(box: Box, host: Client) -> None:
    plain = box.logs / "plain"
    plain.write_text("no program")
    cases = {
        "command_not_found": box.item("no-such-program"),
        "command_not_executable": box.item(str(plain)),
        "working_directory_unusable": box.item("/bin/true", cwd="/no/such"),
        "command_invalid": box.item("/bin/true", "a\0b"),
        "environment_too_large": box.item("/bin/true", env={"BIG": "x" * (1 << 18)}),
        "start_window_passed": box.item("/bin/true", not_after_ns=1),
    }
    host.send({"op": "spawn", "items": list(cases.values())})
    for code, item in cases.items():
        assert host.refused(item["attempt"]) == code
    assert not host.news["started"]


def test_a_script_without_interpreter_line_runs_in_a_shell(box: Box, host: Client) -> None:
    script = box.logs / "script"
    script.write_text('echo "$1"')
    script.chmod(0o700)
    item = box.item(str(script), "hello")
    host.send({"op": "spawn", "items": [item]})
    assert host.exit(item["attempt"])["exit_code"] == 0
    assert box.log(item["attempt"]) == b"hello\n"


def test_an_attempt_is_never_started_twice(box: Box, host: Client) -> None:
    mark = box.logs / "mark"
    item = box.item("sh", "-c", f"echo x >> {mark}")
    other = box.item("/bin/true")
    host.send({"op": "spawn", "items": [item, item]})
    host.exit(item["attempt"])
    host.send({"op": "spawn", "items": [item]})
    host.ack(item["attempt"])
    host.send({"op": "spawn", "items": [item, other]})
    assert host.refused(item["attempt"]) == "already_ran"
    host.exit(other["attempt"])
    assert mark.read_text() == "x\n"


def test_ends_are_told_again_until_they_are_acknowledged(box: Box, host: Client) -> None:
    ended, refused, acked = box.item("/bin/true"), box.item("no-such-program"), box.item("/bin/true")
    host.send({"op": "spawn", "items": [ended, refused, acked]})
    for item in (ended, acked):
        host.exit(item["attempt"])
    host.refused(refused["attempt"])
    host.ack(acked["attempt"])
    host.close()
    again = box.connect()
    assert again.exit(ended["attempt"])["exit_code"] == 0
    assert again.refused(refused["attempt"]) == "command_not_found"
    assert again.find("exits", acked["attempt"]) is None


def test_a_worker_that_comes_back_finds_what_runs_and_its_whole_output(box: Box, host: Client) -> None:
    gate = box.logs / "gate"
    os.mkfifo(gate)
    item = box.item("sh", "-c", f"echo before; cat {gate}; echo after; exit 7")
    host.send({"op": "spawn", "items": [item]})
    first = host.started(item["attempt"])
    host.close()
    again = box.connect()
    (row,) = again.hello["attempts"]
    assert (row["attempt"], row["state"], row["pid"]) == (item["attempt"], "running", first["pid"])
    assert row["start_ticks"] > 0
    gate.write_bytes(b"between\n")
    assert again.exit(item["attempt"])["exit_code"] == 7
    assert box.log(item["attempt"]) == b"before\nbetween\nafter\n"


def test_the_host_ends_when_told_and_nothing_runs(box: Box, host: Client) -> None:
    gate = box.logs / "gate"
    os.mkfifo(gate)
    item = box.item("cat", str(gate))
    host.send({"op": "spawn", "items": [item]})
    host.started(item["attempt"])
    host.send({"op": "retire"})
    gate.write_bytes(b"x")
    assert box.process is not None
    assert box.process.wait(60) == 0
    assert not (box.directory / "host.sock").exists()
    # Its receipt is on disk for the next host.
    assert box.start().exit(item["attempt"])["exit_code"] == 0


def test_a_second_host_on_the_same_directory_gives_way(box: Box, host: Client) -> None:
    from services.worker.launch import start_host

    second = start_host(box.directory, box.logs)
    assert second.wait() == 75
    item = box.item("/bin/true")
    host.send({"op": "spawn", "items": [item]})
    host.exit(item["attempt"])


def test_a_directory_deeper_than_the_kernels_socket_path_limit(tmp_path: Path, box: Box) -> None:
    box.directory = tmp_path / ("d" * 100) / ("e" * 100) / "host"
    item = box.item("/bin/true")
    client = box.start()
    client.send({"op": "spawn", "items": [item]})
    client.exit(item["attempt"])


def test_the_host_is_small(box: Box, host: Client) -> None:
    items = [box.item("sleep", "1000") for _ in range(200)]
    host.send({"op": "spawn", "items": items})
    host.wait(lambda: len(host.news["started"]) == 200)
    assert box.process is not None
    status = dict(line.split(":", 1) for line in Path(f"/proc/{box.process.pid}/status").read_text().splitlines())
    assert int(status["VmRSS"].split()[0]) < 20 * 1024
    host.send({"op": "kill", "items": [{"attempt": item["attempt"], "reason": "cancel"} for item in items]})
    host.wait(lambda: len(host.news["exits"]) == 200)
