"""A secret and every token are nowhere but where they belong: in no table, file, stream, log or argument."""

from __future__ import annotations

import base64
import json
import secrets
import sys
import urllib.parse
from pathlib import Path

from tests.e2e.box import PROJECT, Box, all_ended, eventually

ALLOWED = {"console.json", "credentials.json", "nats-server.conf"}
"""Files of mode 0600 whose purpose is to hold a credential, in the data folder and its `nats` folder."""


def encodings(value: bytes) -> set[bytes]:
    text = value.decode()
    return {
        value,
        base64.b64encode(value).rstrip(b"="),
        base64.urlsafe_b64encode(value).rstrip(b"="),
        value.hex().encode(),
        json.dumps(text).strip('"').encode(),
        urllib.parse.quote(text).encode(),
    }


def test_a_finished_demo_holds_the_secret_and_the_tokens_nowhere(box: Box) -> None:
    box.start("--verbose")
    value = f"s3cr3t-{secrets.token_hex(16)}"
    assert box.ql3("secret", "set", "api-token", text=value).returncode == 0
    with box.client() as client:
        box.create(
            client,
            "uses",
            [sys.executable, "-c", "import os; print(len(os.environ['API_TOKEN'])); print(os.environ['API_TOKEN'])"],
            execution={"environment": [{"name": "API_TOKEN", "secret": {"secret": "api-token"}}]},
        )
        run_id = client.post(f"{PROJECT}/tasks/uses/runs")["id"]
        row = all_ended(client, [run_id])[run_id]
        assert row["status"] == "succeeded", row
        log = client.raw(f"{PROJECT}/runs/{run_id}/log").content
        assert log.splitlines()[0] == str(len(value)).encode(), "the process had the secret"
        assert value.encode() not in log, "it is masked in stored output"
        console = json.loads((box.data / "console.json").read_text())
        api_secret = console["secret"]
        seen = set(box.processes().values())
        # What is stored for a while (streams, journals) is searched while it is there, and again after the end.
        for needle in (value, api_secret):
            assert_nowhere(box, needle)
            assert not any(needle in command for command in seen)
    box.stop()
    for needle in (value, api_secret):
        assert_nowhere(box, needle)


def test_no_attempt_token_or_worker_key_leaves_its_file(box: Box) -> None:
    box.start()
    with box.client() as client:
        box.create(client, "plain", box.recording("plain"))
        run_id = client.post(f"{PROJECT}/tasks/plain/runs")["id"]
        all_ended(client, [run_id])
    keys = [path for path in (box.data / "worker").rglob("*key*") if path.is_file() and path.stat().st_size >= 32]
    assert keys, "the worker has a key of its own"
    box.stop()
    eventually(lambda: box.processes() == {}, "all has ended")
    for key in keys:
        assert key.stat().st_mode & 0o077 == 0
        raw = key.read_bytes().strip()
        for path in files(box):
            if path != key:
                assert raw not in path.read_bytes(), path.name


def files(box: Box) -> list[Path]:
    return [path for path in (*box.data.rglob("*"), box.log) if path.is_file()]


def assert_nowhere(box: Box, needle: str) -> None:
    wanted = encodings(needle.encode())
    for path in files(box):
        if path.name in ALLOWED and path.stat().st_mode & 0o077 == 0:
            continue
        content = path.read_bytes()
        found = [encoded for encoded in wanted if encoded in content]
        assert not found, f"{path.name} holds it"
