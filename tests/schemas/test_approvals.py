"""How dangerous an action is said to be."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.approvals import risk_of


@pytest.mark.parametrize(
    ("labels", "asked", "default", "risk"),
    [
        ({}, "low", "medium", "medium"),
        ({}, "low", "low", "low"),
        ({}, "critical", "medium", "critical"),
        ({"risk": "low"}, "low", "medium", "low"),
        ({"risk": "critical"}, "low", "medium", "critical"),
        ({"risk": "high"}, "critical", "medium", "critical"),
        ({"risk": "enormous"}, "low", "medium", "medium"),
    ],
)
def test_the_label_counts_and_nobody_asks_for_less(labels: dict[str, str], asked: Any, default: Any, risk: str) -> None:
    assert risk_of(labels, asked, default) == risk
