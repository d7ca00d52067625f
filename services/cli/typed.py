"""What people type and read about subjects and plans."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

MAX_CHARS: Final = 256 * 1024


def shown(found: Any) -> str:
    """A subject of an answer: a user by name, anything else as TYPE/ID."""
    if not found:
        return ""
    return found["id"] if found["type"] == "user" else f"{found['type']}/{found['id']}"


def parsed(who: str) -> tuple[str, str]:
    """Type and id of what somebody typed. Raises `invalid`."""
    from schemas.errors import Ql3Error

    kind, found, name = who.partition("/")
    if not found:
        kind, name = "user", who
    if not name or kind not in ("user", "api_app", "mcp_client", "agent", "worker", "system"):
        raise Ql3Error("invalid", "Write a user's name, or TYPE/ID such as agent/bot.", field="SUBJECT")
    return kind, name


def json_from(text: str, field: str) -> Any:
    """JSON as typed, from `@FILE`, or from standard input for `-`. Raises `invalid`, naming the field."""
    from schemas.errors import Ql3Error

    try:
        if text == "-":
            text = sys.stdin.read(MAX_CHARS)
        elif text.startswith("@"):
            text = Path(text[1:]).read_text()
        return json.loads(text)
    except OSError as error:
        raise Ql3Error("invalid", f"The file cannot be read ({error.strerror}).", field=field) from error
    except ValueError as error:
        raise Ql3Error("invalid", "This is not JSON.", field=field) from error
