"""What the documentation says about schedules is so."""

from __future__ import annotations

import hashlib
import hmac
import re
from pathlib import Path

import pytest

from schemas.errors import Ql3Error
from services.gateway.hooks import sign
from services.scheduler import decisions
from services.scheduler.cron.grammar import parse
from services.scheduler.cron.words import explain

TEXT = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text()
EXAMPLES = [(row[1], row[2]) for row in re.finditer(r"^\| `([^`]+)` \| (.+) \|$", TEXT.split("## Time zones")[0], re.M)]


def test_there_are_examples() -> None:
    assert len(EXAMPLES) > 10


@pytest.mark.parametrize(("expression", "words"), EXAMPLES)
def test_an_example_means_what_it_says(expression: str, words: str) -> None:
    said = explain(parse(expression, seed="documentation"))
    if "H" in expression:
        said = re.sub(r"03:\d\d", "03:00", said)
    assert said == words


@pytest.mark.parametrize("expression", ["? * * * *", "0 0 * * 5L", "/6 * * * *", "0~30 * * * *", "9-9 * * * *"])
def test_what_is_said_to_be_refused_is(expression: str) -> None:
    with pytest.raises(Ql3Error):
        parse(expression)


def test_every_cause_is_listed() -> None:
    causes = {
        decisions.SCHEDULER_DOWN,
        decisions.PAUSED,
        decisions.TRIGGER_DISABLED,
        decisions.TASK_DISABLED,
        decisions.PROJECT_ARCHIVED,
        decisions.BLOCKED_BY_OVERLAP,
        decisions.INPUTS_REFUSED,
    }
    assert causes <= set(re.findall(r"`([a-z_]+)`", TEXT))


def test_a_signature_is_made_as_described() -> None:
    mac = hmac.new(b"secret", b'7.{"ref":"main"}', hashlib.sha256).hexdigest()
    assert sign("secret", 7, b'{"ref":"main"}') == f"t=7,v1={mac}"
