"""What looks secret is blotted out of every log line, whatever the reader is."""

from __future__ import annotations

import json

import pytest

from services.kit.logging import REDACTED, configure, redact


@pytest.mark.parametrize("name", ["password", "nats_password", "api_key", "Authorization", "session_token", "cookie"])
def test_values_under_secret_names_are_blotted_out(name: str) -> None:
    assert redact(None, "info", {"event": "x", name: "hush"})[name] == REDACTED


def test_tokens_and_addresses_with_passwords_inside_text_are_blotted_out() -> None:
    event = {"event": "tried ql3c_abcdefgh_SECRETSECRET", "address": "postgresql://ql3:hush@db/ql3"}
    text = json.dumps(redact(None, "info", event))
    assert "SECRETSECRET" not in text
    assert "hush" not in text


def test_a_line_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    import structlog

    configure("info", console=False)
    try:
        structlog.get_logger("t").info("hello", password="hush", number=3)
        line = json.loads(capsys.readouterr().err)
    finally:
        structlog.reset_defaults()
    assert (line["event"], line["number"], line["password"]) == ("hello", 3, REDACTED)
