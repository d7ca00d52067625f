"""The verdict of a chaos check sees each kind of fault, and takes no blow of its own for one."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.chaos_verdict import SAID_BYTES, Done, End, Ledger, Outage, Start, Violation, count, judge, read_records


def attempt(number: int = 1, status: str = "succeeded", **changes: Any) -> dict[str, Any]:
    """An attempt `a1`, `a2`… as the API shows it."""
    codes = {"succeeded": 0, "failed": 3}
    row = {
        "id": f"a{number}",
        "attempt": number,
        "status": status,
        "exit_code": codes.get(status),
        "signal": None,
        "error_code": None if status == "succeeded" else "process_exit",
        "log": None,
        "late_receipt": False,
        "worker_id": "local",
    }
    return row | changes


def ledger(status: str, *attempts: dict[str, Any]) -> Ledger:
    """One run `r` with these attempts."""
    last = attempts[-1]
    run = {
        "id": "r",
        "status": status,
        "attempt": last["attempt"],
        "attempt_id": last["id"],
        "exit_code": last["exit_code"],
    }
    return Ledger({"r": run}, {"r": attempts})


def start(number: int = 1, code: int = 0, at_s: float = 10, line: int = 0) -> Start:
    return Start(f"a{number}", "r", 100, code, at_s, line)


def end(number: int = 1, code: int = 0, at_s: float = 11, line: int = 1) -> End:
    return End(f"a{number}", code, at_s, line)


def rules(found: list[Violation]) -> list[str]:
    return [violation.rule for violation in found]


CLEAN: list[tuple[str, list[Start], list[End], Ledger, Done]] = [
    ("success", [start()], [end()], ledger("succeeded", attempt()), Done({"r": "short"})),
    ("its own exit code", [start(code=3)], [end(code=3)], ledger("failed", attempt(1, "failed")), Done({"r": "fails"})),
    (
        "what it printed",
        [start()],
        [end()],
        ledger("succeeded", attempt(log={"size": SAID_BYTES})),
        Done({"r": "says"}),
    ),
    (
        "killed script",
        [start()],
        [],
        ledger("failed", attempt(1, "failed", exit_code=None, signal=9)),
        Done({"r": "short"}, killed={"a1": 10.5}),
    ),
    (
        "killed host",
        [start()],
        [],
        ledger("failed", attempt(1, "lost")),
        Done({"r": "short"}, host_down=[Outage("local", 10.5, 12)]),
    ),
    (
        "killed host, before the receipt was on disk",
        [start()],
        [end()],
        ledger("failed", attempt(1, "lost")),
        Done({"r": "short"}, host_down=[Outage("local", 11.5, 13)]),
    ),
    (
        "killed host, before the spawn",
        [],
        [],
        ledger("failed", attempt(1, "lost")),
        Done({"r": "short"}, host_down=[Outage("local", 11.5, 13)]),
    ),
    (
        "worker away until its lease was over, with a late receipt",
        [start()],
        [end()],
        ledger("failed", attempt(1, "lost", exit_code=0, late_receipt=True))._replace(
            late={"a1": {"exit_code": 0, "signal": None}}
        ),
        Done({"r": "short"}, cut=[Outage("local", 11.5, 50)]),
    ),
    (
        "cut off in several pieces until the lease was over",
        [start()],
        [end()],
        ledger("failed", attempt(1, "lost")),
        Done({"r": "short"}, cut=[Outage("nats", 12, 20), Outage("dispatcher", 21, 30), Outage("local", 32, 40)]),
    ),
    (
        "stopped after its lease was over",
        [start()],
        [],
        ledger("failed", attempt(1, "lost", exit_code=143, late_receipt=True))._replace(
            late={"a1": {"exit_code": 143, "signal": 15}}
        ),
        Done({"r": "short"}, cut=[Outage("local", 11.5, 50)]),
    ),
    ("cancelled", [start()], [], ledger("cancelled", attempt(1, "cancelled")), Done({"r": "cancelled"}, cancels={"r"})),
    ("cancelled unstarted", [], [], ledger("cancelled", attempt(1, "cancelled")), Done({"r": "short"}, cancels={"r"})),
    ("timed out", [start()], [], ledger("timed_out", attempt(1, "timed_out")), Done({"r": "out-of-time"})),
    (
        "third time",
        [start(1, 4), start(2, 5, line=2), start(3, 0, line=4)],
        [end(1, 4), end(2, 5, line=3), end(3, 0, line=5)],
        ledger("succeeded", attempt(1, "failed", exit_code=4), attempt(2, "failed", exit_code=5), attempt(3)),
        Done({"r": "third-time"}),
    ),
    (
        "killed worker, before the spawn",
        [start(2)],
        [end(2)],
        ledger("succeeded", attempt(1, "failed", exit_code=None, error_code="not_started"), attempt(2)),
        Done({"r": "short"}, worker_kills=1),
    ),
    (
        "window missed while everything stood still",
        [start(2)],
        [end(2)],
        ledger("succeeded", attempt(1, "failed", exit_code=None, error_code="start_window_passed"), attempt(2)),
        Done({"r": "short"}, longest_pause_s=18),
    ),
]


@pytest.mark.parametrize(("starts", "ends", "said", "done"), [row[1:] for row in CLEAN], ids=[row[0] for row in CLEAN])
def test_what_may_be_is_clean(starts: list[Start], ends: list[End], said: Ledger, done: Done) -> None:
    assert judge(starts, ends, said, done) == []


CONTRADICTIONS: list[tuple[str, list[Start], list[End], Ledger, Done]] = [
    ("success of what never started", [], [], ledger("succeeded", attempt()), Done({"r": "short"})),
    ("success of what never ended", [start()], [], ledger("succeeded", attempt()), Done({"r": "short"})),
    ("success of what failed", [start(code=3)], [end(code=3)], ledger("succeeded", attempt()), Done({"r": "fails"})),
    ("another exit code", [start(code=4)], [end(code=4)], ledger("failed", attempt(1, "failed")), Done({"r": "fails"})),
    ("a log cut short", [start()], [end()], ledger("succeeded", attempt()), Done({"r": "says"})),
    ("lost under a living host", [start()], [], ledger("failed", attempt(1, "lost")), Done({"r": "short"})),
    (
        "lost long before the host died",
        [start()],
        [end()],
        ledger("failed", attempt(1, "lost")),
        Done({"r": "short"}, host_down=[Outage("local", 40, 42)]),
    ),
    (
        "lost while another worker was away",
        [start()],
        [end()],
        ledger("failed", attempt(1, "lost")),
        Done({"r": "short"}, cut=[Outage("second", 10.5, 50)], host_down=[Outage("second", 10.5, 50)]),
    ),
    (
        "lost after a short pause",
        [start()],
        [end()],
        ledger("failed", attempt(1, "lost")),
        Done({"r": "short"}, cut=[Outage("local", 10.5, 18), Outage("dispatcher", 30, 40)]),
    ),
    (
        "lost while one of two dispatchers was away",
        [start()],
        [end()],
        ledger("failed", attempt(1, "lost")),
        Done({"r": "short"}, cut=[Outage("dispatcher", 10.5, 60), Outage("dispatcher-2", 70, 71)]),
    ),
    (
        "a late receipt that says something else",
        [start()],
        [end()],
        ledger("failed", attempt(1, "lost", exit_code=3, late_receipt=True))._replace(
            late={"a1": {"exit_code": 3, "signal": None}}
        ),
        Done({"r": "short"}, cut=[Outage("local", 10.5, 50)]),
    ),
    (
        "a signal that nobody sent",
        [start()],
        [],
        ledger("failed", attempt(1, "failed", exit_code=None, signal=9)),
        Done({"r": "short"}),
    ),
    (
        "not started, though it started",
        [start()],
        [end()],
        ledger("failed", attempt(1, "failed", exit_code=None, error_code="not_started")),
        Done({"r": "short"}, longest_pause_s=18),
    ),
    (
        "a run that was never tried",
        [],
        [],
        ledger("failed", attempt(1, "failed", exit_code=None, error_code="not_started")),
        Done({"r": "short"}, worker_kills=1),
    ),
    (
        "not started, though its worker lived",
        [start(2)],
        [end(2)],
        ledger("succeeded", attempt(1, "failed", exit_code=None, error_code="not_started"), attempt(2)),
        Done({"r": "short"}),
    ),
    (
        "window missed without a reason",
        [start(2)],
        [end(2)],
        ledger("succeeded", attempt(1, "failed", exit_code=None, error_code="start_window_passed"), attempt(2)),
        Done({"r": "short"}, longest_pause_s=3),
    ),
    ("cancelled by nobody", [], [], ledger("cancelled", attempt(1, "cancelled")), Done({"r": "short"})),
    ("timed out without a limit", [start()], [], ledger("timed_out", attempt(1, "timed_out")), Done({"r": "short"})),
    ("a run unlike its attempt", [start()], [end()], ledger("failed", attempt()), Done({"r": "short"})),
    (
        "a retry that was not allowed",
        [start(1), start(2, line=2)],
        [end(2, line=3)],
        ledger("succeeded", attempt(1, "lost"), attempt(2)),
        Done({"r": "hopeless"}, host_down=[Outage("local", 10.5, 12)]),
    ),
    (
        "a retry that was owed",
        [start(1, 9)],
        [end(1, 9)],
        ledger("failed", attempt(1, "failed", exit_code=9)),
        Done({"r": "hopeless"}),
    ),
    (
        "two attempts at once",
        [start(1, 4), start(2, 0, line=1)],
        [end(1, 4, line=2), end(2, 0, line=3)],
        ledger("succeeded", attempt(1, "failed", exit_code=4), attempt(2)),
        Done({"r": "third-time"}),
    ),
    (
        "a start that the ledger does not know",
        [start(), start(2, line=2)],
        [end()],
        ledger("succeeded", attempt()),
        Done({"r": "short"}),
    ),
]


@pytest.mark.parametrize(
    ("starts", "ends", "said", "done"), [row[1:] for row in CONTRADICTIONS], ids=[row[0] for row in CONTRADICTIONS]
)
def test_what_contradicts_the_scripts_is_found(starts: list[Start], ends: list[End], said: Ledger, done: Done) -> None:
    assert set(rules(judge(starts, ends, said, done))) == {"contradiction"}


def test_a_second_process_of_one_attempt_is_found() -> None:
    found = judge([start(), start(line=1)], [end(line=2)], ledger("succeeded", attempt()), Done({"r": "short"}))
    assert rules(found) == ["started_twice"]


def test_a_run_that_was_made_twice_from_one_key_is_found() -> None:
    found = judge([start()], [end()], ledger("succeeded", attempt()), Done({}))
    assert rules(found) == ["started_twice"]


def test_an_acknowledged_run_that_the_ledger_does_not_have_is_found() -> None:
    found = judge([start()], [end()], ledger("succeeded", attempt()), Done({"r": "short", "gone": "short"}))
    assert [(violation.rule, violation.run) for violation in found] == [("lost_run", "gone")]


def test_a_run_or_an_attempt_without_an_end_is_found() -> None:
    found = judge([start()], [end()], ledger("running", attempt(1, "running")), Done({"r": "short"}))
    assert count(found) == {"lost_run": 0, "started_twice": 0, "without_end": 1, "contradiction": 0}
    found = judge([start()], [end()], ledger("succeeded", attempt(1, "running", exit_code=0)), Done({"r": "short"}))
    assert "without_end" in rules(found)


def test_records_are_read_and_a_torn_line_is_not_passed_over() -> None:
    starts, ends = read_records(["start a r 12 3 100.25", "end a 3 100.50"])
    assert starts == [Start("a", "r", 12, 3, 100.25, 0)]
    assert ends == [End("a", 3, 100.5, 1)]
    with pytest.raises(ValueError, match="line 2"):
        read_records(["end a 3 100.50", "start a r"])
