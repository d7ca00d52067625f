"""Refusals as people meet them: at the option that they typed, in their language."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from schemas.errors import Ql3Error
from services import scheduler
from services.cli import details
from services.cli.main import app, run
from services.cli.refusals import _TYPED, as_typed
from services.cli.words import CAUSES_ZH
from services.scheduler.cron.grammar import parse
from services.scheduler.cron.instants import refuse_never
from services.scheduler.cron.zones import zone
from services.scheduler.decisions import CAUSES
from tests.cli.conftest import clean_environment
from tests.scheduler.cron.test_grammar import REFUSED

TWO = ["task", "create", "x", "--cron", "0 0 * * *", "--cron", "0 0 ? * *", "--", "true"]
ONE = ["task", "create", "x", "--cron=0 0 ? * *", "--", "true"]


@pytest.mark.parametrize(
    ("arguments", "field", "typed"),
    [
        (ONE, "triggers[0].expression.day of month", "--cron (day of month)"),
        (ONE, "triggers[0].expression.expression", "--cron"),
        (TWO, "triggers[1].expression.day of month", "--cron 2 (day of month)"),
        (TWO, "triggers[1].timezone", "--timezone"),
        (ONE, "spec.execution.timeout_ms", "--timeout"),
        (ONE, "spec.execution.environment.QL3_A", "--env (QL3_A)"),
        (ONE, "spec.terms.labels[...]", "--label"),
        (ONE, "spec.parameters.properties.n", "--parameters (properties.n)"),
        (ONE, "name", "NAME"),
        (ONE, "--timeout", "--timeout"),
        (ONE, "something.new", "something.new"),
        (["task", "run", "x"], "inputs.n", "--input (n)"),
        (["trigger", "add", "x", "?"], "spec.expression.minute", "EXPR (minute)"),
        (["trigger", "set", "x"], "spec.expression.minute", "--cron (minute)"),
        (["trigger", "set", "x"], "spec.pause_until_ms", "--pause-until"),
        (["trigger", "after", "x", "y"], "spec.after_task", "OTHER"),
        (["trigger", "backfill", "x"], "until_ms", "--until"),
        (["apply", "-f", "x"], "task.spec.execution.timeout_ms", "task.spec.execution.timeout_ms"),
    ],
)
def test_a_field_is_named_as_it_was_typed(arguments: list[str], field: str, typed: str) -> None:
    assert as_typed(Ql3Error("invalid", "No.", field=field), arguments).field == typed


def test_what_is_named_can_be_typed() -> None:
    """No option stands in the table that its command does not have."""
    for command, table in _TYPED.items():
        helped = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "300"})
        assert helped.exit_code == 0, command
        known = set(re.findall(r"(--[a-z-]+)\b", helped.stdout)) | set(re.findall(r"\b[A-Z]{2,}\b", helped.stdout))
        wanted = {typed for _, typed in table}
        if command.startswith("trigger") and command not in ("trigger add", "trigger set"):
            wanted &= {"TASK", "TRIGGER"}
        assert wanted - {"OTHER"} <= known, command


@pytest.mark.parametrize("expression", sorted({expression for expression, _, _ in REFUSED} | {"0 0 30 2 *"}))
def test_every_refusal_of_an_expression_is_said_in_chinese(expression: str) -> None:
    with pytest.raises(Ql3Error) as refused:
        refuse_never(parse(expression))
    assert refused.value.detail is not None
    said = details.chinese(refused.value.detail)
    assert said is not None, refused.value.detail
    assert re.search(r"[\u4e00-\u9fff]", said)
    # What is quoted stays as it was.
    quoted = set(re.findall(r"`[^`]+`", refused.value.detail)) - {"`H`", "`L`", "`#`", "`W`", "`*`"}
    assert quoted <= set(re.findall(r"`[^`]+`", said)) | {"`cron(…)`"}, (refused.value.detail, said)


def test_every_cause_of_a_missed_fire_is_said_in_chinese() -> None:
    assert set(CAUSES_ZH) == CAUSES


def sentences() -> set[str]:
    """Every sentence with which the scheduler refuses, a 7 in each of its gaps."""
    found: set[str] = set()
    for path in sorted(Path(str(scheduler.__file__)).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Ql3Error" and len(node.args) > 1:
                said = node.args[1]
                parts = said.values if isinstance(said, ast.JoinedStr) else [said]
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "7" for part in parts)
                found.add(text)
    return found - {"7", "7."}  # handed on as they came


def test_every_refusal_of_the_scheduler_is_said_in_chinese() -> None:
    assert len(sentences()) > 50
    assert {english for english in sentences() if details.chinese(english) is None} == set()


@pytest.mark.parametrize("name", ["Mars", "europe/berlin", "Beijing", "UTC+8"])
def test_every_refusal_of_a_zone_is_said_in_chinese(name: str) -> None:
    with pytest.raises(Ql3Error) as refused:
        zone(name)
    assert details.chinese(refused.value.detail or "") is not None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["cron", "next", "? * * * *"], "分: `?` 属于另一种写法；请写 `*`。"),
        (["cron", "next", "* * * * *", "--after", "never"], "--after: 请写成 2031-05-04T08:00:00Z"),
        (["cron", "next", "* * * * *", "--count", "0"], "--count: 请写 1 到 100000。"),
        (["cron", "next"], "错误: 缺少参数 'EXPR'。"),
        (["cron", "nxt"], "错误: 没有命令 'nxt'"),
        (["task", "list", "--limt", "3"], "错误: 没有选项 --limt"),
        (["task", "list", "--limit", "x"], "'--limit' 的值无效：'x' 不是有效的数字。"),
        (["task", "list", "--limit", "0"], "'--limit' 的值无效：0 不在范围"),
        (["task", "list", "--limit"], "选项 '--limit' 需要一个值。"),
        (["task", "show", "a", "b"], "多出了参数 b。"),
        (["task", "create", "x", "--overlap", "no", "--", "y"], "'--overlap' 的值无效：'no' 不在"),
    ],
)
def test_what_was_typed_wrongly_is_said_in_chinese(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QL3_LANG", "zh")
    try:
        code: object = run(arguments)
    except SystemExit as end:
        code = end.code
    assert code == 2
    told = capsys.readouterr().err
    assert said in told
    assert "Error" not in told
    assert "Usage" not in told


def test_help_without_a_command_is_english(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("QL3_LANG", "zh")
    assert run(["cron"]) == 2
    assert "Usage: ql3 cron" in capsys.readouterr().err


def _ended(*arguments: str, reader_gone: bool = False, **environment: str) -> tuple[int, str]:
    """Exit code and standard error of a command that nobody may be reading from."""
    read, write = os.pipe()
    if reader_gone:
        os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "services.cli.main", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=write,
        stderr=subprocess.PIPE,
        env={**clean_environment(), **environment},
        text=True,
        check=False,
        timeout=60,
    )
    os.close(write)
    if not reader_gone:
        os.close(read)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "url", ["http://[::1", "http://x:abc", "http://", "ftp://x", "nonsense", "http://x:99999999999", "//x"]
)
def test_a_url_that_is_none_is_one_line(url: str) -> None:
    code, said = _ended("task", "list", QL3_URL=url, QL3_TOKEN="ql3c_x")
    assert (code, said.count("\n")) == (2, 1)
    assert said.startswith("error: QL3_URL: ")
    code, said = _ended("task", "list", QL3_URL=url, QL3_TOKEN="ql3c_x", QL3_LANG="zh")
    assert "请写 http://host:port" in said


@pytest.mark.parametrize("token", ["ü", "a\nb", "a\tb"])
def test_a_token_that_is_none_is_one_line_without_it(token: str) -> None:
    code, said = _ended("task", "list", QL3_URL="http://127.0.0.1:1", QL3_TOKEN=token)
    assert (code, said.count("\n")) == (2, 1)
    assert said.startswith("error: QL3_TOKEN: ")
    assert token not in said


def test_what_could_not_be_said_is_no_success() -> None:
    every_minute = ("cron", "next", "* * * * *", "--count", "3")
    assert _ended(*every_minute) == (0, "")
    assert _ended(*every_minute, reader_gone=True) == (141, "")
    assert _ended("cron", "next", "nonsense", reader_gone=True)[0] == 2
