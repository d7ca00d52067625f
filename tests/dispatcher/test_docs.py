"""docs/state-machines.md cannot rot: its tests exist, its arrows are the rules' arrows, its states the schema's."""

from __future__ import annotations

import re
from pathlib import Path

from services.dispatcher.records import ATTEMPT_EDGES, RUN_EDGES
from tests.dispatcher.test_explain import causes_of_the_code
from tests.dispatcher.test_refusals import refusals_of_the_code
from tests.named_tests import missing, named

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "state-machines.md").read_text()
SCHEMA = (ROOT / "migrations" / "dispatcher" / "0001_ledger.sql").read_text()
COLUMNS = {
    "runs.status": "run `status`",
    "runs.cancel_reason": "run `cancel_reason`",
    "run_attempts.status": "attempt `status`",
    "run_dispatch_leases.status": "lease `status`",
    "run_dispatch_leases.release_reason": "lease `release_reason`",
    "workers.status": "worker `status`",
    "run_cancellation_dispatches.status": "cancellation `status`",
    "run_retry_policies.safety": "retry `safety`",
    "approved_run_action_receipts.outcome": "receipt `outcome`",
    "concurrency_limits.kind": "limit `kind`",
}
ELSEWHERE = {"run_events.actor_type", "run_cancellation_dispatches.reason"}
"""No states: who did it, and the run's reason once more."""


def section(heading: str) -> str:
    return PAGE.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def rows(heading: str) -> list[list[str]]:
    lines = [line for line in section(heading).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def arrows(heading: str) -> set[tuple[str, str]]:
    found = re.findall(r"^    (\w+) --> (\w+)", section(heading), re.MULTILINE)
    return {(before, after) for before, after in found}


def edges(table: dict[str, frozenset[str]]) -> set[tuple[str, str]]:
    return {(before, after) for before, afters in table.items() for after in afters}


def states_of_the_schema() -> dict[str, set[str]]:
    """For each column that may hold one of some words, these words."""
    found: dict[str, set[str]] = {}
    for table, body in re.findall(r"CREATE TABLE (\w+) \((.*?)\n\);", SCHEMA, re.DOTALL):
        columns = re.findall(r"^  (\w+) TEXT[^,]*?CHECK \(\1 IN \(([^)]*)\)", body, re.MULTILINE)
        for column, words in columns:
            found[f"{table}.{column}"] = set(re.findall(r"'(\w+)'", words))
    return found


def test_the_drawn_run_is_the_ruled_run() -> None:
    assert arrows("Run") == edges(RUN_EDGES)


def test_the_drawn_attempt_is_the_ruled_attempt() -> None:
    assert arrows("Attempt") == edges(ATTEMPT_EDGES)


def test_every_state_stands_there_with_a_test() -> None:
    told: dict[str, set[str]] = {}
    column = ""
    for first, state, _, test in rows("Every state"):
        column = first or column
        told.setdefault(column, set()).add(state.strip("`"))
        assert named(test), f"{column} {state} names no test"
    schema = states_of_the_schema()
    assert set(schema) == set(COLUMNS) | ELSEWHERE
    assert {COLUMNS[column]: states for column, states in schema.items() if column in COLUMNS} == told


def test_every_refusal_stands_there() -> None:
    told = [(module.strip("`"), code.strip("`")) for module, code, *_ in rows("Every refusal")]
    assert sorted(told) == sorted(refusals_of_the_code())


def test_every_cause_stands_there() -> None:
    told = set(re.findall(r"`(\w+)`", " ".join(row[1] for row in rows("Why a run waits"))))
    waits, ends = causes_of_the_code()
    assert told - {"succeeded"} == waits
    assert ends, "ends are told by their error codes"


def test_every_test_that_the_page_names_exists() -> None:
    assert len(named(PAGE)) > 100
    assert missing(PAGE, "dispatcher") == []
