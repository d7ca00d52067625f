"""Kill anything, wipe the message server: nothing is lost, nothing is doubled, every run ends truthfully."""

from __future__ import annotations

import shutil
from collections import Counter

import pytest

from services.cli.client import Client
from tests.e2e.box import PROJECT, Box, all_ended, eventually, run_of

pytestmark = pytest.mark.timeout(300)
RUNS = 20


def host(command: str) -> bool:
    return "services.worker.host" in command or "worker/host" in command


def submit(box: Box, name: str, seconds: float, count: int) -> list[str]:
    with box.client() as client:
        box.create(client, name, box.recording(name, seconds=seconds))
        return [client.post(f"{PROJECT}/tasks/{name}/runs")["id"] for _ in range(count)]


def assert_none_started_twice(box: Box) -> None:
    attempts = Counter(row["attempt"] for row in box.starts())
    assert [attempt for attempt, count in attempts.items() if count > 1] == []


def test_killing_every_process_in_the_middle_of_twenty_runs_loses_none(box: Box) -> None:
    box.start()
    runs = submit(box, "work", 3.0, RUNS)
    # All of them, because a process that is killed before its first instruction records no start.
    eventually(lambda: len(box.starts()) >= RUNS, "the runs have started")
    box.kill()
    box.start()
    with box.client() as client:
        ended = all_ended(client, runs)
    assert_none_started_twice(box)
    started = {row["run"] for row in box.starts()}
    finished = {row["run"] for row in box.starts() if row["attempt"] in box.ends()}
    for run_id, row in ended.items():
        if row["status"] == "succeeded":
            assert run_id in finished
        else:
            # The host died with its processes: whoever started and has no exit code is lost, never a guess.
            assert row["status"] == "failed", row
            assert row["error_code"] in ("worker_lost", "process_vanished"), row
            assert row["exit_code"] is None, row
            assert run_id in started, row


def test_killing_all_but_the_host_lets_all_twenty_succeed(box: Box) -> None:
    box.start()
    runs = submit(box, "work", 3.0, RUNS)
    eventually(lambda: len(box.starts()) >= 4, "some runs have started")
    survivors = [pid for pid, command in box.processes().items() if host(command)]
    assert survivors, "there is a process host"
    box.kill(lambda command: not host(command) and "recorder.py" not in command)
    box.start()
    with box.client() as client:
        ended = all_ended(client, runs)
    assert Counter(row["status"] for row in ended.values()) == {"succeeded": RUNS}
    assert_none_started_twice(box)
    assert len(box.starts()) == RUNS


def test_what_a_process_had_written_before_its_host_was_killed_is_kept(box: Box) -> None:
    box.start()
    with box.client() as client:
        box.create(client, "chatty", ["/bin/sh", "-c", "echo so far; exec sleep 600"])
        run_id = client.post(f"{PROJECT}/tasks/chatty/runs")["id"]
        path = f"{PROJECT}/runs/{run_id}/log"
        eventually(lambda: client.raw(path).content == b"so far\n", "it has written")
        box.kill(host)
        row = all_ended(client, [run_id])[run_id]
        assert (row["status"], row["error_code"]) == ("failed", "process_vanished")
        (attempt,) = client.get(f"{PROJECT}/runs/{run_id}/attempts")["items"]
        assert (attempt["status"], attempt["log"]["size"]) == ("lost", 7)
        eventually(lambda: kept(client, run_id) == ["stored"], "its log is in the store")
    printed = box.ql3("run", "logs", run_id)
    assert (printed.returncode, printed.stdout) == (0, "so far\n")
    assert "may be incomplete" in printed.stderr
    followed = box.ql3("run", "logs", "--follow", run_id)
    assert (followed.stdout, "may be incomplete" in followed.stderr) == ("so far\n", True)
    assert "7 B (incomplete)" in box.ql3("run", "show", run_id).stdout


def kept(client: Client, run_id: str) -> list[str]:
    return [item["state"] for item in client.get(f"{PROJECT}/runs/{run_id}/artifacts")["items"]]


def test_wiping_the_message_server_while_running_loses_nothing(box: Box) -> None:
    box.start()
    with box.client() as client:
        box.create(client, "held", box.recording("held"), needs_approval=True)
        box.create(client, "due", box.recording("due"), triggers=[{"kind": "cron", "expression": "*/2 * * * * *"}])
        waiting = client.post(f"{PROJECT}/tasks/held/runs")["id"]
        runs = submit(box, "work", 0.5, RUNS)
        shutil.rmtree(box.data / "nats" / "jetstream")
        ended = all_ended(client, runs, limit_s=120)
        assert Counter(row["status"] for row in ended.values()) == {"succeeded": RUNS}
        seen = len(box.starts("due"))
        eventually(lambda: len(box.starts("due")) > seen, "the schedule still fires")
        eventually(lambda: approve(client, waiting), "the approval is still open")
        assert all_ended(client, [waiting])[waiting]["status"] == "succeeded"
    assert_none_started_twice(box)
    assert_each_instant_once(box)


def test_wiping_the_message_server_between_stop_and_start_loses_nothing(box: Box) -> None:
    box.start()
    with box.client() as client:
        box.create(client, "held", box.recording("held"), needs_approval=True)
        box.create(client, "due", box.recording("due"), triggers=[{"kind": "cron", "expression": "*/2 * * * * *"}])
        waiting = client.post(f"{PROJECT}/tasks/held/runs")["id"]
        runs = submit(box, "work", 1.0, RUNS)
    eventually(lambda: len(box.starts("work")) >= 1, "some have started")
    box.stop()
    shutil.rmtree(box.data / "nats" / "jetstream")
    box.start()
    with box.client() as client:
        ended = all_ended(client, runs, limit_s=120)
        assert Counter(row["status"] for row in ended.values()) == {"succeeded": RUNS}
        seen = len(box.starts("due"))
        eventually(lambda: len(box.starts("due")) > seen, "the schedule still fires")
        eventually(lambda: approve(client, waiting), "the approval is still open")
        assert all_ended(client, [waiting])[waiting]["status"] == "succeeded"
    assert_none_started_twice(box)
    assert_each_instant_once(box)


def test_stopping_with_nothing_running_leaves_nothing(box: Box) -> None:
    box.start()
    runs = submit(box, "work", 0.0, 2)
    with box.client() as client:
        all_ended(client, runs)
    assert box.stop() == 0
    eventually(lambda: box.processes() == {}, "no process is left")


def test_a_run_outlives_a_restart_with_its_exit_code_and_log(box: Box) -> None:
    box.start()
    with box.client() as client:
        box.create(client, "long", box.recording("long", seconds=600.0))
        run_id = client.post(f"{PROJECT}/tasks/long/runs")["id"]
        eventually(lambda: run_of(client, run_id)["status"] == "running", "the run runs")
    assert box.stop() == 0
    assert any(host(command) for command in box.processes().values()), "the host stays with what runs"
    box.start()
    box.enough("long")
    with box.client() as client:
        row = all_ended(client, [run_id])[run_id]
        assert (row["status"], row["exit_code"], row["attempt"]) == ("succeeded", 0, 1)
        assert client.raw(f"{PROJECT}/runs/{run_id}/log").content == b"started long\nended long\n"
    assert len(box.starts()) == 1


def approve(client: object, run_id: str) -> bool:
    from schemas.errors import Ql3Error

    try:
        client.post(f"{PROJECT}/approvals/{run_id}/decision", {"decision": "approved"})  # type: ignore[attr-defined]
    except Ql3Error as error:
        if error.code in ("not_found", "unavailable"):
            return False
        raise
    return True


def assert_each_instant_once(box: Box) -> None:
    with box.client() as client:
        runs = client.get(f"{PROJECT}/runs", task="due", limit=200)["items"]
    instants = Counter(row["scheduled_for_ms"] for row in runs)
    assert [instant for instant, count in instants.items() if count > 1] == []
