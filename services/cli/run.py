"""`ql3 run`: runs, their logs, and why they are where they are."""

from __future__ import annotations

import sys
from typing import Annotated, Any, get_args

import typer

from services.cli.options import Data, Json, Limit, Project, Run

run_app = typer.Typer(no_args_is_help=True, help="Runs: list, show, logs, cancel, retry, explain.")

Wait = Annotated[bool, typer.Option("--wait", help="Wait for the end; the exit code is then the outcome's.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Show the live log until the run ends; implies --wait.")]


@run_app.command("list")
def list_command(
    project: Project = "default",
    task: Annotated[str | None, typer.Option("--task", metavar="TASK", help="Only runs of this task.")] = None,
    status: Annotated[
        list[str] | None, typer.Option("--status", metavar="STATUS", help="Only this status; may be repeated.")
    ] = None,
    limit: Limit = 50,
    as_json: Json = False,
    data: Data = None,
) -> None:
    """List runs, newest first."""
    from schemas.errors import Ql3Error
    from schemas.runs import RunStatus
    from services.cli import output
    from services.cli.client import connect, in_project, segment
    from services.cli.words import say
    from services.cli.words import status as word

    known = get_args(RunStatus)
    if any(one not in known for one in status or []):
        raise Ql3Error("invalid", f"Write one of {', '.join(known)}.", field="--status")
    with connect(data) as client:
        found = client.items(
            in_project(project, "/runs"), limit, task=task, status=",".join(status) if status else None
        )
        if task is not None and not found["items"]:
            # Either it has no such run, or it is not there at all, which is an error.
            client.get(in_project(project, f"/tasks/{segment(task, field='--task')}"))
    if as_json:
        output.document(found)
        return
    output.table(
        [
            say("RUN", "运行"),
            say("TASK", "任务"),
            say("STATUS", "状态"),
            say("CREATED", "创建"),
            say("TOOK", "耗时"),
            say("EXIT", "退出码"),
        ],
        (
            (
                run["id"],
                run["task_name"],
                word(run["status"]),
                output.when(run["created_at_ms"]),
                output.duration(run["started_at_ms"], run["finished_at_ms"]),
                run["exit_code"],
            )
            for run in found["items"]
        ),
        more=found["next"] is not None,
    )


@run_app.command("show")
def show_command(run: Run, project: Project = "default", as_json: Json = False, data: Data = None) -> None:
    """Show one run with its attempts and its history."""
    from services.cli import output
    from services.cli.causes import explained
    from services.cli.client import connect
    from services.cli.follow import run_path
    from services.cli.words import chinese, say

    with connect(data) as client:
        path = run_path(project, run)
        found: dict[str, Any] = client.get(path)
        if as_json:
            output.document(found)
            return
        if chinese() and found["waiting_reason"]:
            sentence, _ = explained(client.get(f"{path}/explain"))
            found = {**found, "waiting_reason": sentence}
        attempts = client.get(f"{path}/attempts")["items"]
        events = client.get(f"{path}/events", after=0, limit=200)["items"]
    print_run(found)
    output.line("")
    output.table(
        [
            say("ATTEMPT", "尝试"),
            say("STATUS", "状态"),
            say("WORKER", "节点"),
            say("STARTED", "开始"),
            say("TOOK", "耗时"),
            say("EXIT", "退出码"),
            say("LOG", "日志"),
        ],
        (_attempt_row(attempt) for attempt in attempts),
    )
    output.line("")
    output.table(
        ["#", say("TIME", "时间"), say("EVENT", "事件"), say("BY", "来源")],
        (
            (event["sequence"], output.when(event["created_at_ms"]), event["type"], event["actor_type"])
            for event in events
        ),
    )


def _attempt_row(attempt: dict[str, Any]) -> tuple[Any, ...]:
    from services.cli import output
    from services.cli.words import status as word

    log: dict[str, Any] = attempt.get("log") or {}
    told = output.size(log.get("size", 0)) if attempt.get("log") is not None else ""
    return (
        attempt["attempt"],
        word(attempt["status"]),
        attempt["worker_id"],
        output.when(attempt["started_at_ms"]),
        output.duration(attempt["started_at_ms"], attempt["finished_at_ms"]),
        attempt["exit_code"] if attempt["signal"] is None else f"signal {attempt['signal']}",
        told + _rest(attempt, log),
    )


def _rest(attempt: dict[str, Any], log: dict[str, Any]) -> str:
    from services.cli.words import say

    if log and attempt["status"] == "lost" and not attempt["late_receipt"]:
        return say(" (incomplete)", "(不完整)")
    return say(" (cut)", "(已截断)") if log.get("truncated") else ""


def print_run(run: dict[str, Any]) -> None:
    """The facts of one run, for people."""
    from services.cli import output
    from services.cli.words import say
    from services.cli.words import status as word

    who: dict[str, Any] = run["requested_by"]
    output.facts(
        [
            (say("run", "运行"), run["id"]),
            (say("task", "任务"), f"{run['task_name']} (revision {run['task_revision']})"),
            (say("status", "状态"), word(run["status"])),
            (say("waits for", "等待"), run["waiting_reason"]),
            (say("started by", "发起"), f"{run['trigger_type']} {who['type']}/{who['id']}"),
            (say("retry of", "重试自"), run["retry_of_run_id"]),
            (say("attempt", "尝试"), run["attempt"] or None),
            (say("worker", "节点"), run["worker_id"]),
            (say("exit code", "退出码"), run["exit_code"]),
            (say("error", "错误"), _error(run)),
            (say("created", "创建"), output.when(run["created_at_ms"])),
            (say("started", "开始"), output.when(run["started_at_ms"])),
            (say("finished", "结束"), output.when(run["finished_at_ms"])),
            (say("took", "耗时"), output.duration(run["started_at_ms"], run["finished_at_ms"])),
        ]
    )


def _error(run: dict[str, Any]) -> str | None:
    from services.cli import outcomes, words

    if run["error_code"] is None:
        return None
    summary = run["error_summary"]
    if summary and words.chinese():
        summary = outcomes.chinese(summary) or summary
    return f"{run['error_code']}: {summary}" if summary else run["error_code"]


@run_app.command("logs")
def logs_command(
    run: Run,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Exactly the bytes that the process wrote.")] = False,
    attempt: Annotated[
        str | None, typer.Option("--attempt", metavar="N", help="This attempt's log; default the latest.")
    ] = None,
    project: Project = "default",
    data: Data = None,
) -> None:
    """Print a run's log. Without --raw, bytes that are no UTF-8 are replaced."""
    from schemas.errors import Ql3Error
    from services.cli.client import connect
    from services.cli.follow import LogReader
    from services.cli.output import note
    from services.cli.words import say

    if follow and attempt is not None:
        raise Ql3Error("invalid", "A follower reads all attempts from the latest on.", field="--attempt")
    writer = LogWriter(raw=raw)
    with connect(data) as client:
        reader = LogReader(client, project, run, writer.write)
        try:
            if follow:
                reader.follow()
            else:
                reader.read(attempt)
        finally:
            writer.end()
    if reader.truncated:
        note(say("The log was cut at its quota; the process wrote more.", "日志已达配额而截断;进程写出了更多。"))
    elif reader.truncated is None:
        note(
            say(
                "The log may be incomplete: the process was lost, and this is what was kept of its output.",
                "日志可能不完整:进程已失联,以上是保留下来的输出。",
            )
        )


class LogWriter:
    """Writes log bytes to standard output (or error): exactly, or as text that a terminal can show."""

    def __init__(self, *, raw: bool, to_error: bool = False) -> None:
        import codecs

        self._stream = sys.stderr.buffer if to_error else sys.stdout.buffer
        self._decoder = None if raw else codecs.getincrementaldecoder("utf-8")("replace")
        self._last = b"\n"

    def write(self, data: bytes) -> None:
        """Write a piece at once."""
        if self._decoder is not None:
            data = self._decoder.decode(data).encode()
        if data:
            self._last = data[-1:]
            self._stream.write(data)
            self._stream.flush()

    def end(self) -> None:
        """Write what is left; text ends with a line's end."""
        if self._decoder is not None:
            rest = self._decoder.decode(b"", final=True).encode()
            self._last = rest[-1:] or self._last
            self._stream.write(rest if self._last == b"\n" else rest + b"\n")
            self._stream.flush()


@run_app.command("cancel")
def cancel_command(
    run: Run,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until nothing of the run is left.")] = False,
    project: Project = "default",
    as_json: Json = False,
    data: Data = None,
) -> None:
    """End a run: its whole process tree gets TERM, its grace period, then KILL. Repeats change nothing."""
    from services.cli import output
    from services.cli.client import connect
    from services.cli.follow import run_path
    from services.cli.follow import wait as wait_for_end
    from services.cli.words import say
    from services.cli.words import status as word

    with connect(data) as client:
        found = client.post(f"{run_path(project, run)}/cancel")
        if wait:
            found = wait_for_end(client, project, run)
    if as_json:
        output.document(found)
    else:
        output.line(say(f"{run}: {found['status']}", f"{run}:{word(found['status'])}"))


@run_app.command("retry")
def retry_command(
    run: Run,
    wait: Wait = False,
    follow: Follow = False,
    project: Project = "default",
    as_json: Json = False,
    data: Data = None,
) -> None:
    """Make a new run like an ended one, with the same revision and inputs."""
    from services.cli.client import connect
    from services.cli.follow import run_path

    with connect(data) as client:
        made = client.post(f"{run_path(project, run)}/retry")
        finish(client, project, made, wait=wait, follow=follow, as_json=as_json)


def finish(client: Any, project: str, made: dict[str, Any], *, wait: bool, follow: bool, as_json: bool) -> None:
    """Print a run that was made; with `wait` or `follow` see it through and exit with its outcome's code."""
    from services.cli import output
    from services.cli.client import EXIT_BY_OUTCOME
    from services.cli.follow import LogReader
    from services.cli.follow import wait as wait_for_end
    from services.cli.words import say
    from services.cli.words import status as word

    if not wait and not follow:
        if as_json:
            output.document(made)
        else:
            output.line(made["id"])
            _tell_if_held(made)
        return
    if follow:
        # With --json standard output holds the one document; the log goes beside it.
        writer = LogWriter(raw=False, to_error=as_json)
        try:
            run = LogReader(client, project, made["id"], writer.write).follow()
        finally:
            writer.end()
    else:
        run = wait_for_end(client, project, made["id"])
    if as_json:
        output.document(run)
    else:
        took = output.duration(run["started_at_ms"], run["finished_at_ms"])
        code = "" if run["exit_code"] is None else say(f", exit code {run['exit_code']}", f",退出码 {run['exit_code']}")
        text = f"{run['id']}: {word(run['status'])}{code}" + (f", {took}" if took else "")
        if follow:
            output.note(text)
        else:
            output.line(text)
        if error := _error(run):
            output.note(output.clean(error))
    raise typer.Exit(EXIT_BY_OUTCOME[run["status"]])


def _tell_if_held(made: dict[str, Any]) -> None:
    """Whoever starts a run that somebody has to approve is told beside its id."""
    from services.cli import output
    from services.cli.words import say

    if made["status"] == "waiting_approval":
        command = f"ql3 approval approve {made['id']}"
        output.note(say(f"It waits for an approval: {command}", f"等待审批：{command}"))


@run_app.command("explain")
def explain_command(run: Run, project: Project = "default", as_json: Json = False, data: Data = None) -> None:
    """Say why a run is where it is, and what moves it next."""
    from services.cli import output
    from services.cli.causes import explained
    from services.cli.client import connect
    from services.cli.follow import run_path
    from services.cli.words import say

    with connect(data) as client:
        found: dict[str, Any] = client.get(f"{run_path(project, run)}/explain")
    if as_json:
        output.document(found)
        return
    sentence, next_step = explained(found)
    output.line(output.clean(sentence))
    if next_step:
        output.line(say("next: ", "下一步：") + output.clean(next_step))
