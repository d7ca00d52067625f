"""How many runs may be in work at once. Owner: dispatcher."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from schemas import endpoints
from schemas.base import Value
from schemas.runs import ConcurrencyLimit, LimitList, LimitSet
from services.gateway.calls import Call, listing
from services.gateway.operations import Listing, Operations, Paged

operations = Operations("limits")


class NewLimit(Value, frozen=True, kw_only=True):
    """How many runs may be in work at once; null takes the limit away."""

    limit: Annotated[int, Meta(ge=1, le=100_000)] | None


@operations.get("/projects/{project}/limits", Paged, Listing[ConcurrencyLimit])
async def list_limits(call: Call[Paged]) -> Listing[ConcurrencyLimit]:
    """The limits of the project, its tasks and its named keys, with how many runs are in work under each."""
    question = LimitList(actor=call.actor, project=call.project, page=call.input.page)
    return listing(await call.ask(endpoints.LIMITS_LIST, question))


@operations.put("/projects/{project}/limit", NewLimit, Listing[ConcurrencyLimit])
async def limit_project(call: Call[NewLimit]) -> Listing[ConcurrencyLimit]:
    """Set the project's own limit. What is in work goes on; the answer is empty when there is no limit any more."""
    return await _set_limit(call, None)


@operations.put("/projects/{project}/limits/{key}", NewLimit, Listing[ConcurrencyLimit])
async def limit_key(call: Call[NewLimit]) -> Listing[ConcurrencyLimit]:
    """Set the limit of a named key, whatever its tasks say; null lets what they say count again."""
    return await _set_limit(call, call.slug("key"))


async def _set_limit(call: Call[NewLimit], key: str | None) -> Listing[ConcurrencyLimit]:
    question = LimitSet(actor=call.actor, project=call.project, key=key, limit=call.input.limit)
    return listing(await call.ask(endpoints.LIMITS_SET, question))
