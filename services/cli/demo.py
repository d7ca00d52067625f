"""`ql3 demo`: the main job, on the real thing, in a temporary folder, step by step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from schemas.errors import Ql3Error
from schemas.runs import RUN_TERMINAL
from services.cli.client import Client, chunk_bytes, find
from services.cli.refusals import say

LIMIT_S: Final = 60.0
"""A bound for a machine that is stuck; the steps wait on events, not on this."""
PROJECT: Final = "/projects/default"
SCHEDULED: Final = (
    "import os, sys, time\n"
    "print('hello from a scheduled run: process', os.getpid(), flush=True)\n"
    "time.sleep(0.3)\n"
    "print('this line was written while the log was being followed', flush=True)\n"
)


def run() -> int:
    """Run the demo; 0 when every step held. Raises `Ql3Error` when one did not."""
    tell = _teller()
    with tempfile.TemporaryDirectory(prefix="ql3-demo-") as folder:
        tell(say("starting the platform in a temporary folder", "在临时目录中启动平台"))
        with _platform(Path(folder)) as client:
            _show(client, tell)
        tell(say("stopped the platform; nothing is left running", "平台已停止，没有留下任何进程"))
    tell(say("done", "完成"))
    return 0


def _show(client: Client, tell: Callable[[str], None]) -> None:
    client.post(
        f"{PROJECT}/tasks",
        {
            "name": "every-two-seconds",
            "spec": {"execution": {"command": [sys.executable, "-u", "-c", SCHEDULED]}},
            "triggers": [{"kind": "cron", "expression": "*/2 * * * * *", "timezone": "UTC"}],
        },
    )
    tell(say("created a task with a cron trigger that fires every 2 seconds", "已创建任务，cron 触发器每 2 秒触发一次"))
    scheduled = _first_run(client, "every-two-seconds")
    tell(say(f"the schedule fired: run {scheduled['id']}", f"计划已触发：运行 {scheduled['id']}"))
    log = _follow(client, scheduled, lambda line: tell(say(f"live log: {line}", f"实时日志：{line}")))
    ended = _ended(client, scheduled["id"])
    tell(say(f"the run {ended['status']} with exit code {ended['exit_code']}", _outcome(ended)))
    client.post(f"{PROJECT}/tasks/every-two-seconds/disable")

    client.post(
        f"{PROJECT}/tasks",
        {
            "name": "needs-approval",
            "spec": {
                "execution": {"command": [sys.executable, "-c", "print('approved, so this ran')"]},
                "terms": {"needs_approval": True},
            },
        },
    )
    held = client.post(f"{PROJECT}/tasks/needs-approval/runs")
    tell(
        say(
            f"created a task that needs approval; its run is {held['status']}",
            f"需要审批的任务，运行状态为 {held['status']}",
        )
    )
    _approve(client, held["id"])
    tell(say("approved it", "已批准"))
    released = _ended(client, held["id"])
    tell(say(f"the approved run {released['status']} with exit code {released['exit_code']}", _outcome(released)))

    stored = client.raw(f"{PROJECT}/runs/{scheduled['id']}/log").content
    tell(say(f"read the finished log back: {len(stored)} bytes", f"读回完整日志：{len(stored)} 字节"))
    for line in stored.decode(errors="replace").splitlines():
        tell(say(f"stored log: {line}", f"存储的日志：{line}"))
    if not (ended["status"] == released["status"] == "succeeded") or not stored.startswith(log):
        raise Ql3Error("internal_error", "The demo did not go as it should; see the lines above.")


def _first_run(client: Client, task: str) -> dict[str, Any]:
    with client.events(f"{PROJECT}/events") as events:
        # Asked after the stream stands, so that a run between the two is seen by one of them.
        listed = client.get(f"{PROJECT}/runs", task=task)["items"]
        if listed:
            return listed[-1]
        for _name, data in _bounded(events):
            if data.get("task_name") == task:
                return client.get(f"{PROJECT}/runs/{data['run_id']}")
    raise Ql3Error("unavailable", "The stream of events ended before the schedule fired.")


def _follow(client: Client, run_row: dict[str, Any], tell: Callable[[str], None]) -> bytes:
    log, pending = b"", b""
    with client.events(f"{PROJECT}/runs/{run_row['id']}/log/stream", offset=0) as events:
        for name, data in _bounded(events):
            if name == "chunk":
                chunk = chunk_bytes(data)
                log, pending = log + chunk, pending + chunk
                *lines, pending = pending.split(b"\n")
                for line in lines:
                    tell(line.decode(errors="replace"))
            elif name == "end":
                break
    return log


def _ended(client: Client, run_id: str) -> dict[str, Any]:
    with client.events(f"{PROJECT}/runs/{run_id}/stream") as events:
        row = client.get(f"{PROJECT}/runs/{run_id}")
        if row["status"] in RUN_TERMINAL:
            return row
        for _name, data in _bounded(events):
            if data.get("status") in RUN_TERMINAL:
                break
    return client.get(f"{PROJECT}/runs/{run_id}")


def _approve(client: Client, run_id: str) -> None:
    # The request id is the run id; the request is made by an order that may take a moment to arrive.
    until = time.monotonic() + LIMIT_S
    while True:
        try:
            client.post(f"{PROJECT}/approvals/{run_id}/decision", {"decision": "approved", "reason": "demo"})
        except Ql3Error as error:
            if error.code != "not_found" or time.monotonic() > until:
                raise
            time.sleep(0.1)
        else:
            return


def _bounded(events: Generator[tuple[str, Any]]) -> Generator[tuple[str, Any]]:
    until = time.monotonic() + LIMIT_S
    for event in events:
        yield event
        if time.monotonic() > until:
            raise Ql3Error("unavailable", "The demo waited too long.")


def _outcome(row: dict[str, Any]) -> str:
    words = {"succeeded": "成功", "failed": "失败", "cancelled": "已取消", "timed_out": "超时"}
    return f"运行{words.get(row['status'], row['status'])}，退出码 {row['exit_code']}"


@contextmanager
def _platform(folder: Path) -> Generator[Client]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("QL3_")}
    errors = (folder / "up.log").open("w+")
    data = folder / "data"
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "services.cli.main",
            "up",
            "--data",
            str(data),
            "--listen",
            "127.0.0.1:0",
            "--stop-runs",
        ],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        # A Ctrl-C reaches the demo alone, which then ends the platform in order.
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        if not process.stdout.readline():
            errors.seek(0)
            raise Ql3Error("unavailable", f"The platform did not start: {errors.read()[-800:].strip()}")
        url, token = find(data)
        with Client(url, token) as client:
            yield client
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        errors.close()


def _teller() -> Callable[[str], None]:
    started = time.monotonic()
    if not sys.stdout.isatty():
        return lambda text: print(f"[{time.monotonic() - started:5.1f}s] {text}", flush=True)
    from rich.console import Console

    console = Console()

    def tell(text: str) -> None:
        from rich.markup import escape

        console.print(f"[dim]{time.monotonic() - started:5.1f}s[/] [green]●[/] {escape(text)}")

    return tell
