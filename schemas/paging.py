"""Keyset paging, the same for every list."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from schemas.base import Value
from schemas.limits import LIST_DEFAULT, LIST_ITEMS


class Page(Value, frozen=True, kw_only=True):
    """How many, and after which opaque cursor (the `next` of the page before)."""

    limit: Annotated[int, Meta(ge=1, le=LIST_ITEMS)] = LIST_DEFAULT
    cursor: Annotated[str, Meta(max_length=512)] | None = None
