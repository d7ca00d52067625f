"""Logs: one JSON object a line on stderr (or coloured lines on a terminal), with what looks secret blotted out."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import MutableMapping
from typing import Any, Final

import structlog

REDACTED: Final = "[redacted]"
_SECRET_KEY = re.compile(r"(password|passwd|secret|token|credential|authorization|cookie|api_?key|private|proof)", re.I)
_SECRET_TEXT = re.compile(r"ql3[cwsb]_[A-Za-z0-9_-]{8,}|(?<=://)[^/@\s:]+:[^/@\s]+(?=@)")


def configure(level: str = "info", *, console: bool | None = None) -> None:
    """Set logging up for this process; `console` forces coloured lines (default: when stderr is a terminal)."""
    pretty = sys.stderr.isatty() if console is None else console
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        redact,
    ]
    renderer: Any = structlog.dev.ConsoleRenderer() if pretty else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processor=renderer))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # Libraries speak from warning upwards only; their debug lines may hold payloads.
    root.setLevel(max(number, logging.WARNING))


def redact(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Blot out values under secret-looking names, and tokens or passwords of addresses inside any text."""
    for key, value in list(event.items()):
        if _SECRET_KEY.search(key) and key != "event":
            event[key] = REDACTED
        elif isinstance(value, str):
            event[key] = _SECRET_TEXT.sub(REDACTED, value)
    return event
