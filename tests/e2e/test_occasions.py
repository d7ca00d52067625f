"""Files, webhooks, chains, starts and backfills on one real box, as people use them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx

from services.cli.client import Client, find
from services.gateway.hooks import sign
from tests.e2e.box import PROJECT, Box, all_ended, eventually
from tests.metrics import read

FILES = """
name: first
spec:
  execution: {command: [/bin/true]}
triggers:
  - expression: 0 3 * * *
    timezone: Asia/Shanghai
---
name: second
spec:
  execution: {command: [/bin/sh, -c, "printf 'got %s' \\"$QL3_INPUTS\\""]}
triggers:
  - {kind: after_task, after_task: first}
  - {kind: boot}
"""

CALENDAR = """BEGIN:VCALENDAR
VERSION:2.0
PRODID:-//ql3//tests//EN
BEGIN:VEVENT
UID:1
DTSTAMP:20260101T000000Z
DTSTART;VALUE=DATE:20990104
DTEND;VALUE=DATE:20990105
SUMMARY:closed
END:VEVENT
END:VCALENDAR
"""


def runs(client: Client, task: str, trigger_type: str) -> list[dict[str, Any]]:
    """The runs of a task that were started for one reason."""
    listed = client.get(f"{PROJECT}/runs", task=task)["items"]
    return [run for run in listed if run["trigger_type"] == trigger_type]


def test_triggers_besides_the_calendar(box: Box, tmp_path: Path) -> None:
    file = tmp_path / "tasks.yaml"
    file.write_text(FILES)
    box.start()

    # A folder of files is the source of truth: previewed, applied, and then so.
    preview = box.ql3("apply", "-f", str(file), "--dry-run")
    assert preview.returncode == 0, preview.stderr
    assert "2 would change" in preview.stdout
    assert json.loads(box.ql3("task", "list", "--json").stdout)["items"] == []
    assert box.ql3("apply", "-f", str(file)).returncode == 0
    again = json.loads(box.ql3("apply", "-f", str(file), "--json").stdout)
    assert [item["action"] for item in again["items"]] == ["unchanged", "unchanged"]
    assert box.ql3("export", "--to", str(tmp_path / "out")).returncode == 0
    exported = box.ql3("apply", "-f", str(tmp_path / "out"), "--dry-run")
    assert "0 would change" in exported.stdout, exported.stdout + exported.stderr

    with box.client() as client:
        # Another task's end.
        run = client.post(f"{PROJECT}/tasks/first/runs")
        all_ended(client, [run["id"]])
        eventually(lambda: len(runs(client, "second", "after_task")) == 1, "the second task followed the first")
        (followed,) = runs(client, "second", "after_task")
        assert followed["parent_run_id"] == run["id"]

        # A webhook: a signed delivery makes one run with its payload; a wrong signature and a replay make none.
        made = box.ql3("trigger", "webhook", "second", "--json")
        secret = json.loads(made.stdout)
        body = json.dumps("from outside").encode()
        at_s = int(time.time())
        headers = {"Content-Type": "application/json", "X-Ql3-Delivery": "d-1"}
        url = f"{client.url}{secret['path']}"
        signed = {**headers, "X-Ql3-Signature": sign(secret["secret"], at_s, body)}
        first = httpx.post(url, content=body, headers=signed)
        assert first.status_code == 202, first.text
        replayed = httpx.post(url, content=body, headers=signed)
        assert (replayed.status_code, replayed.json()["run"]) == (200, first.json()["run"])
        for wrong in (
            headers,
            {**headers, "X-Ql3-Signature": sign("guess", at_s, body)},
            {**headers, "X-Ql3-Signature": sign(secret["secret"], at_s - 600, body)},
        ):
            assert httpx.post(url, content=body, headers=wrong).status_code == 401
        assert httpx.post(url[:-1] + ("A" if url[-1] != "A" else "B"), content=body, headers=headers).status_code == 404
        ended = all_ended(client, [first.json()["run"]])
        assert ended[first.json()["run"]]["status"] == "succeeded"
        assert len(runs(client, "second", "webhook")) == 1
        log = client.raw(f"{PROJECT}/runs/{first.json()['run']}/log").content
        assert log == b'got {"payload":"from outside"}'
        # The secret is in no file of the box.
        for path in box.data.rglob("*"):
            if path.is_file():
                assert secret["secret"].encode() not in path.read_bytes(), path

        # Instants that have passed.
        (calendar,) = client.get(f"{PROJECT}/tasks/first")["triggers"]
        window = ["--from", "2026-01-01T00:00:00Z", "--until", "2026-01-03T23:59:59Z"]
        told = box.ql3("trigger", "backfill", calendar["id"], *window, "--dry-run", "--json")
        assert len(json.loads(told.stdout)["instants"]) == 3, told.stderr
        assert runs(client, "first", "backfill") == []
        assert box.ql3("trigger", "backfill", calendar["id"], *window, "--every", "10ms").returncode == 0
        eventually(lambda: len(runs(client, "first", "backfill")) == 3, "three runs of the past")

        # A trigger for runs by hand: its inputs, and others over them, checked as they are submitted.
        schema = (
            '{"properties": {"n": {"type": "integer", "minimum": 1}, "who": {"default": "you"}}, "required": ["n"]}'
        )
        echo = ["/bin/sh", "-c", 'printf "%s " "$QL3_INPUTS"; cat "$QL3_INPUTS_FILE"']
        assert box.ql3("task", "create", "typed", "--parameters", schema, "--", *echo).returncode == 0
        refused = box.ql3("trigger", "manual", "typed", "--input", "n=0")
        assert (refused.returncode, refused.stderr.split(": ")[1]) == (2, "--input (n)")
        by_hand = json.loads(box.ql3("trigger", "manual", "typed", "--input", "n=3", "--json").stdout)
        told = box.ql3("task", "run", "typed", "--trigger", by_hand["id"], "--input", "who=me", "--wait", "--json")
        made = json.loads(told.stdout)
        assert (made["status"], made["trigger_id"]) == ("succeeded", by_hand["id"])
        log = client.raw(f"{PROJECT}/runs/{made['id']}/log").text
        assert log.split() == ['{"who":"me","n":3}'] * 2
        refused = box.ql3("task", "run", "typed", "--trigger", by_hand["id"], "--input", "n=none")
        assert (refused.returncode, refused.stderr.split(": ")[1]) == (2, "--input (n)")

        # A calendar with all its terms: previewed, added, paused, and begun again by itself or by hand.
        holidays = tmp_path / "closed.ics"
        holidays.write_text(CALENDAR)
        terms = ["0 9 * * *", "--timezone", "Asia/Shanghai", "--start", "2099-01-01T00:00:00Z", "--jitter", "5m"]
        terms += ["--end", "2099-01-09T00:00:00Z", "--exclude", "2099-01-02", "--exclude", "holidays:CN"]
        terms += ["--exclude-calendar", str(holidays), "--missed", "catch_up", "--catch-up", "2", "--late", "1m"]
        preview = json.loads(box.ql3("trigger", "add", "first", *terms, "--dry-run", "--json").stdout)
        days = [time.strftime("%d", time.gmtime(at_ms / 1000)) for at_ms in preview["instants"]]
        assert days[:1] == ["03"]  # the first is a holiday, the second and the fourth are left out
        assert "04" not in days
        assert days[-1] == "08" or len(days) == 5
        added = json.loads(box.ql3("trigger", "add", "first", *terms, "--json").stdout)
        assert added["spec"] == preview["spec"]
        assert added["next_fire_at_ms"] == preview["instants"][0]
        paused = box.ql3("trigger", "set", added["id"], "--pause-until", "2099-01-06T00:00:00Z", "--json")
        assert json.loads(paused.stdout)["next_fire_at_ms"] >= 4_071_081_600_000
        again = json.loads(box.ql3("trigger", "set", added["id"], "--pause-until", "none", "--json").stdout)
        assert (again["revision"], again["next_fire_at_ms"]) == (3, added["next_fire_at_ms"])
        assert again["spec"] == added["spec"]
        once = json.loads(box.ql3("trigger", "add", "first", "@once 2099-01-01T00:00:00Z", "--json").stdout)
        assert (once["spec"]["kind"], once["next_fire_at_ms"]) == ("once", once["spec"]["at_ms"])
        foreign = box.ql3("trigger", "set", once["id"], "--cron", "0 9 ? * *")
        assert (foreign.returncode, foreign.stderr.split(": ")[1]) == (2, "--cron (day of month)")

        # Whatever kinds of triggers there are: what is written out is what is there.
        assert box.ql3("export", "--to", str(tmp_path / "all")).returncode == 0
        same = json.loads(box.ql3("apply", "-f", str(tmp_path / "all"), "--json").stdout)
        assert {item["action"] for item in same["items"]} == {"unchanged"}
        assert len(client.get(f"{PROJECT}/triggers", limit=200)["items"]) == 7

        # Revisions.
        before = client.get(f"{PROJECT}/tasks/first")
        changed = {"execution": {"command": ["/bin/false"]}}
        client.put(f"{PROJECT}/tasks/first", {"expected_revision": 1, "spec": changed})
        assert "+ execution.command[0]: /bin/false" in box.ql3("task", "diff", "first", "1").stdout
        assert box.ql3("task", "restore", "first", "1").returncode == 0
        restored = client.get(f"{PROJECT}/tasks/first")
        assert (restored["revision"], restored["spec"]) == (3, before["spec"])
        assert len(json.loads(box.ql3("task", "history", "first", "--json").stdout)["items"]) == 3
        boots = len(runs(client, "second", "boot"))

        # What the box counted about all this.
        url, token = find(box.data)
        assert httpx.get(f"{url}/metrics").status_code == 401
        numbers = read(httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {token}"}).text)
        assert {key[1] for key in numbers if key[0] == "ql3_outbox_backlog"} >= {"scheduler", "dispatcher", "gateway"}
        assert numbers["ql3_fires_admitted_total", "backfill"] == 3
        assert numbers["ql3_fires_admitted_total", "webhook"] == 1
        assert numbers["ql3_runs_settled_total", "succeeded"] >= 5
        assert numbers[("ql3_worker_slots",)] >= 8

    # The system's start.
    assert box.stop() == 0
    box.start()
    with box.client() as client:
        eventually(lambda: len(runs(client, "second", "boot")) == boots + 1, "the boot trigger fired")
    assert box.stop() == 0
