"""Errors as people get them: application/problem+json from the registry (RFC 9457)."""

from __future__ import annotations

from typing import Any

import msgspec

from schemas.base import View
from schemas.errors import Ql3Error

MEDIA_TYPE = "application/problem+json"


class Problem(View, frozen=True, kw_only=True):
    """What went wrong: a stable `code`, the `field` to correct, one sentence of what to do, and facts for programs."""

    type: str
    title: str
    status: int
    code: str
    detail: str | None
    field: str | None
    mend: str
    data: dict[str, Any]


def problem_of(error: Ql3Error) -> Problem:
    """The registered row of an error, with what this case adds."""
    kind = error.kind
    return Problem(
        type=f"urn:ql3:error:{error.code}",
        title=kind.title,
        status=kind.status,
        code=error.code,
        detail=error.detail,
        field=error.field,
        mend=kind.mend,
        data=error.data,
    )


def problem_body(error: Ql3Error) -> bytes:
    """The problem as JSON."""
    return msgspec.json.encode(problem_of(error))


def extra_headers(error: Ql3Error) -> dict[str, str]:
    """What the status asks for besides the body."""
    if error.code == "rate_limited":
        return {"Retry-After": str(error.data.get("retry_after_s", 1))}
    if error.code in ("capacity", "unavailable", "database_unavailable"):
        return {"Retry-After": "1"}
    if error.code == "unauthenticated":
        return {"WWW-Authenticate": 'Bearer realm="ql3"'}
    return {}
