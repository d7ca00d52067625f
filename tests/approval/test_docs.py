"""docs/approvals.md cannot rot: its matrix is the matrix, its rules are rules, its commands are there."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from schemas.approvals import ApprovalRule
from services.approval import policy, purging, requests
from services.approval.policy import MATRIX

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "approvals.md").read_text()
ROLES = ("viewer", "operator", "admin", "owner")


def test_the_matrix_is_the_one_in_force() -> None:
    rows = re.findall(r"^\| (`[^|]+) \|([^|]*)\|([^|]*)\|([^|]*)\|([^|]*)\|$", PAGE, re.MULTILINE)
    found: dict[str, set[str]] = {role: set() for role in ROLES}
    for permissions, *cells in rows:
        for role, cell in zip(ROLES, cells, strict=True):
            if cell.strip() == "yes":
                found[role] |= set(re.findall(r"`([^`]+)`", permissions))
    assert found == {role: set(MATRIX[role]) for role in ROLES}


def test_the_rules_ask_what_the_page_says() -> None:
    (text,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    rules = tuple(msgspec.json.decode(text, type=list[ApprovalRule]))
    for risk, name, people in (("critical", "critical", 2), ("high", "prod", 1), ("medium", "prod", 1)):
        rule = policy.rule_for(rules, "run.start", {"env": "prod"}, risk)
        assert rule is not None
        assert (rule.name, rule.quorum, rule.decider_role) == (name, people, "admin")
    assert policy.rule_for(rules, "run.start", {"env": "test"}, "critical") is None


@pytest.mark.parametrize("command", sorted(set(re.findall(r"ql3 ([a-z]+ [a-z-]+)", PAGE))))
def test_the_commands_exist(command: str) -> None:
    assert f"## ql3 {command}\n" in (DOCS / "cli.md").read_text()


def test_the_numbers() -> None:
    assert (requests.LIFETIME_MAX_MS, requests.RECENT_MS) == (24 * 3_600_000, 5 * 60_000)
    assert f"{purging.KEPT_MS // purging.DAY_MS} days" in (DOCS / "retention.md").read_text()
