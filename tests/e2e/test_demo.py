"""The README's first promise, and what an operator sees with the `nats` command."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path

import nats

from schemas.base import encode
from schemas.endpoints import HEALTH
from schemas.subjects import SERVICES, STREAMS
from schemas.system import HealthRead
from tests.e2e.box import PROJECT, QL3, Box, all_ended


def test_the_demo_shows_the_scheduled_runs_own_line_and_leaves_nothing(tmp_path: Path) -> None:
    result = subprocess.run(
        [*QL3, "demo"], capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path, stdin=subprocess.DEVNULL
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "live log: hello from a scheduled run" in result.stdout
    assert "stored log: hello from a scheduled run" in result.stdout
    assert "approved it" in result.stdout
    left = [
        command
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit()
        for command in [_command(entry)]
        if "ql3-demo-" in command
    ]
    assert left == []
    assert list(tmp_path.iterdir()) == []


def _command(entry: Path) -> str:
    try:
        return (entry / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


async def test_an_operator_sees_streams_services_and_readable_facts(box: Box) -> None:
    box.start()
    url = json.loads((box.data / "nats" / "endpoint.json").read_text())["url"]
    password = json.loads((box.data / "nats" / "credentials.json").read_text())["operator"]
    client = await nats.connect(url, user="operator", password=password, inbox_prefix="_INBOX_operator")
    try:
        facts = await client.subscribe("ql3.evt.>")
        await client.flush()
        names = {stream.config.name for stream in await client.jetstream().streams_info()}
        assert {stream.name for stream in STREAMS} <= names

        inbox = client.new_inbox()
        pings = await client.subscribe(inbox)
        await client.publish("$SRV.PING", b"", reply=inbox)
        services: set[str] = set()
        while len(services) < len(SERVICES):
            answer = await pings.next_msg(timeout=20)
            services.add(json.loads(answer.data)["name"])
        assert {f"ql3-{service}" for service in SERVICES} <= services

        with box.client() as http:
            box.create(http, "seen", box.recording("seen"))
            run_id = http.post(f"{PROJECT}/tasks/seen/runs")["id"]
            all_ended(http, [run_id])
        while True:
            fact = await facts.next_msg(timeout=20)
            body = json.loads(fact.data)
            if fact.subject.startswith("ql3.evt.run.") and body["run_id"] == run_id and body["status"] == "succeeded":
                break
    finally:
        await client.close()


async def test_an_operator_may_look_but_not_ask(box: Box) -> None:
    box.start()
    url = json.loads((box.data / "nats" / "endpoint.json").read_text())["url"]
    password = json.loads((box.data / "nats" / "credentials.json").read_text())["operator"]
    refused = asyncio.Event()

    async def hear(error: Exception) -> None:
        if "permissions violation" in str(error).lower():
            refused.set()

    client = await nats.connect(url, user="operator", password=password, inbox_prefix="_INBOX_operator", error_cb=hear)
    try:
        await client.publish(HEALTH["dispatcher"].subject, encode(HealthRead()), reply=client.new_inbox())
        await asyncio.wait_for(refused.wait(), 20)
    finally:
        await client.close()
