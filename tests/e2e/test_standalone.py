"""Each service in a process of its own, on PostgreSQL, with a NATS user per service and two dispatchers."""

from __future__ import annotations

import signal
import sys
from collections import Counter
from collections.abc import Generator

import httpx
import pytest

from benchmarks.standalone import Standalone, free_port, ql3_standalone
from tests.e2e.box import PROJECT, all_ended, eventually
from tests.metrics import read

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def installation() -> Generator[Standalone]:
    with ql3_standalone(durable=False) as system:
        system.serve("dispatcher", name="dispatcher-2")
        yield system


def test_a_run_goes_through_processes_that_share_nothing_but_the_bus(installation: Standalone) -> None:
    with installation.client() as client:
        command = [sys.executable, "-c", "print('across processes')"]
        client.post(f"{PROJECT}/tasks", {"name": "across", "spec": {"execution": {"command": command}}})
        run_id = client.post(f"{PROJECT}/tasks/across/runs")["id"]
        row = all_ended(client, [run_id])[run_id]
        assert (row["status"], row["exit_code"]) == ("succeeded", 0)
        assert client.raw(f"{PROJECT}/runs/{run_id}/log").content == b"across processes\n"


def test_a_service_answers_its_probes(installation: Standalone) -> None:
    port = free_port()
    installation.serve("vault", name="vault-2", QL3_PROBE_LISTEN=f"127.0.0.1:{port}")

    def status(path: str) -> int:
        return httpx.get(f"http://127.0.0.1:{port}{path}", trust_env=False).status_code

    assert status("/livez") == 200
    eventually(lambda: status("/readyz") == 200, "it is ready")
    assert status("/anything") == 404
    numbers = read(httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text)
    assert numbers["ql3_outbox_backlog", "vault"] == 0


def test_a_secret_and_an_approval_work_across_processes(installation: Standalone) -> None:
    with installation.client() as client:
        client.put(f"{PROJECT}/secrets/word", {"value": "open sesame"})
        spec = {
            "execution": {
                "command": [sys.executable, "-c", "import os; print(len(os.environ['WORD']))"],
                "environment": [{"name": "WORD", "secret": {"secret": "word"}}],
            },
            "terms": {"needs_approval": True},
        }
        client.post(f"{PROJECT}/tasks", {"name": "guarded", "spec": spec})
        run_id = client.post(f"{PROJECT}/tasks/guarded/runs")["id"]

        def decided() -> bool:
            listed = client.get(f"{PROJECT}/approvals", state="pending")["items"]
            return any(item["id"] == run_id for item in listed)

        eventually(decided, "the request for approval is there")
        client.post(f"{PROJECT}/approvals/{run_id}/decision", {"decision": "approved"})
        assert all_ended(client, [run_id])[run_id]["status"] == "succeeded"
        assert client.raw(f"{PROJECT}/runs/{run_id}/log").content == b"11\n"


def test_one_of_two_dispatchers_may_die_at_any_time(installation: Standalone) -> None:
    with installation.client() as client:
        client.post(f"{PROJECT}/tasks", {"name": "many", "spec": {"execution": {"command": ["/bin/sleep", "0.2"]}}})
        runs = [client.post(f"{PROJECT}/tasks/many/runs")["id"] for _ in range(20)]
        first = installation.processes["dispatcher"]
        first.send_signal(signal.SIGKILL)
        first.wait()
        runs += [client.post(f"{PROJECT}/tasks/many/runs")["id"] for _ in range(20)]
        ended = all_ended(client, runs, limit_s=120)
        assert Counter(row["status"] for row in ended.values()) == {"succeeded": 40}
        assert {row["attempt"] for row in ended.values()} == {1}
    installation.serve("dispatcher", name="dispatcher")
