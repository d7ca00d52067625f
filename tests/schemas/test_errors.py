"""The registry of errors is complete, says what to do, and stands in the documentation."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.errors import REGISTRY, Ql3Error

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("code", sorted(REGISTRY))
def test_every_error_has_a_status_an_exit_code_and_a_mend(code: str) -> None:
    kind = REGISTRY[code]
    assert 400 <= kind.status < 600
    assert kind.exit_code in (1, 2, 5, 6)
    assert kind.title.endswith(".")
    assert kind.mend.endswith(".")


def test_an_unregistered_code_cannot_be_raised() -> None:
    with pytest.raises(ValueError, match="unregistered"):
        Ql3Error("no_such_code")


def test_the_sentence_names_the_field_and_the_mend() -> None:
    error = Ql3Error("invalid", "It is too long.", field="spec.title")
    assert error.sentence == "spec.title: It is too long. Correct the named field and send it again."


def test_an_error_survives_a_process_boundary() -> None:
    error = pickle.loads(pickle.dumps(Ql3Error("capacity", "Full.", field="f", data={"n": 1})))
    assert (error.code, error.detail, error.field, error.data) == ("capacity", "Full.", "f", {"n": 1})


def test_every_code_that_is_raised_is_registered() -> None:
    raised: set[str] = set()
    for folder in ("schemas", "services"):
        for path in (ROOT / folder).rglob("*.py"):
            raised.update(re.findall(r'Ql3Error\(\s*"([a-z_]+)"', path.read_text()))
    assert raised <= set(REGISTRY)


def test_the_documentation_lists_the_registry() -> None:
    result = subprocess.run([sys.executable, "-m", "docs.errors"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == (ROOT / "docs" / "errors.md").read_text(), "run `just docs`"
