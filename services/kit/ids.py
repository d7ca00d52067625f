"""New ids."""

from __future__ import annotations

from uuid_utils import uuid7


def new_id() -> str:
    """A lower-case UUIDv7; ids made later by this process sort later."""
    return str(uuid7())


def id_floor(time_ms: int) -> str:
    """The smallest text that no UUIDv7 made at `time_ms` or later lies below."""
    head = f"{time_ms:012x}"
    return f"{head[:8]}-{head[8:]}-7000-8000-000000000000"
