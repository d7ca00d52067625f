"""What is said of runs: a hint beside a held one, and every sentence about an end in Chinese too."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from services import dispatcher, worker
from services.cli import outcomes
from services.cli.run import _error, finish
from services.dispatcher.attempt import _LOST_SUMMARY
from services.worker.holdings import _SENTENCES


def _text(said: ast.expr) -> str | None:
    """A literal, a 7 in each of its gaps; None for what is not written there."""
    parts = said.values if isinstance(said, ast.JoinedStr) else [said]
    if not any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in parts):
        return None
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "7" for part in parts)


def _said(tree: ast.AST, refusal: str | None) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", None) or getattr(node.func, "attr", "")
            yield from (keyword.value for keyword in node.keywords if keyword.arg == "summary")
            if name == refusal:
                yield node.args[1]
            elif name == "not_started":
                yield node.args[-1]
        elif isinstance(node, ast.FunctionDef) and node.name == "_why":
            for inner in ast.walk(node):
                if isinstance(inner, ast.Return) and isinstance(inner.value, ast.Tuple):
                    yield inner.value.elts[1]
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith("summary"):
            value = node.value.elts[-1] if isinstance(node.value, ast.Tuple) else node.value
            yield value
            for inner in ast.walk(value):
                if isinstance(inner, ast.IfExp):
                    yield from (inner.body, inner.orelse)


def sentences() -> set[str]:
    """What the worker and the dispatcher write as the summary of an end."""
    found = {text.format(command="7", directory="7", limits="7") for text in _SENTENCES.values()}
    found |= set(_LOST_SUMMARY.values())
    for package, refusal in ((worker, "Refused"), (dispatcher, None)):
        for path in sorted(Path(str(package.__file__)).parent.rglob("*.py")):
            texts = (_text(said) for said in _said(ast.parse(path.read_text()), refusal))
            found |= {text for text in texts if text}
    return found - {"7"}


def test_every_summary_of_an_end_is_said_in_chinese() -> None:
    found = sentences()
    assert len(found) > 30
    assert {english for english in found if outcomes.chinese(english) is None} == set()


def test_what_is_named_stays_as_it_was() -> None:
    said = outcomes.chinese(
        "The command backup.sh (or what its first line names to run it) was not found from the folder /srv/a b."
    )
    assert said is not None
    assert "backup.sh" in said
    assert "/srv/a b" in said
    assert re.search(r"[\u4e00-\u9fff]", said)
    assert outcomes.chinese("Something that a newer worker says.") is None


def test_whoever_starts_a_run_that_waits_for_an_approval_is_told_beside_its_id(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for language, hint in (("en", "It waits for an approval: "), ("zh", "等待审批：")):
        monkeypatch.setenv("QL3_LANG", language)
        for status, told in (("waiting_approval", hint + "ql3 approval approve RUN\n"), ("queued", "")):
            finish(None, "default", {"id": "RUN", "status": status}, wait=False, follow=False, as_json=False)
            assert capsys.readouterr() == ("RUN\n", told)


def test_the_error_of_a_run_is_told_in_chinese(monkeypatch: pytest.MonkeyPatch) -> None:
    run = {"error_code": "queue_timeout", "error_summary": "It was not started within its queue time."}
    monkeypatch.setenv("QL3_LANG", "en")
    assert _error(run) == "queue_timeout: It was not started within its queue time."
    monkeypatch.setenv("QL3_LANG", "zh")
    assert _error(run) == "queue_timeout: 未在排队时限内启动。"
