"""Instants as people write them: RFC 3339 with an offset or `Z`, never a local time."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

_SHAPE = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,9})?(?:[Zz]|[+-][0-9]{2}:[0-9]{2})"
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def read_instant(text: str) -> int:
    """Milliseconds since the epoch, cut down to whole ones. Raises ValueError for anything else, local times too."""
    if _SHAPE.fullmatch(text) is None:
        raise ValueError("write the instant as 2031-05-04T08:00:00Z, or with an offset such as +08:00")
    try:
        at = datetime.fromisoformat(text.upper()).astimezone(UTC)
    except OverflowError as error:
        raise ValueError("write an instant of the years 1 to 9999, UTC") from error
    return (at - _EPOCH) // timedelta(milliseconds=1)


def write_instant(at_ms: int) -> str:
    """RFC 3339 in UTC with seconds precision and `Z`; what is below a second is cut off."""
    # Not strftime, which writes a year before 1000 short.
    return (_EPOCH + timedelta(seconds=at_ms // 1000)).isoformat().replace("+00:00", "Z")
