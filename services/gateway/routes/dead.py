"""Dead letters: orders that could not be handled, kept with their reason, and sent again when it is gone."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from schemas.base import Value, View
from schemas.errors import Ql3Error
from schemas.identity import DEFAULT_PROJECT
from schemas.ids import Slug
from schemas.limits import LIST_DEFAULT, LIST_ITEMS
from services.gateway.calls import Call
from services.gateway.operations import Listing, Nothing, Operations
from services.kit import audit
from services.kit.database import Transaction

operations = Operations("dead letters")
PERMISSION = "project.manage"
"""In the default project: a letter may be of any project, and replaying it is an act on the whole installation."""


class DeadQuery(Value, frozen=True, kw_only=True):
    """Of which service, or of all; `cursor` is the sequence after which to begin."""

    service: Slug | None = None
    limit: Annotated[int, Meta(ge=1, le=LIST_ITEMS)] = LIST_DEFAULT
    cursor: Annotated[str, Meta(pattern=r"^[0-9]{1,15}\Z")] | None = None


class DeadOrder(View, frozen=True, kw_only=True):
    """One letter. `size` is in bytes; of a cut one only the beginning is there, and it cannot be sent again."""

    sequence: int
    service: str
    reason: str
    subject: str
    schema: str | None
    error: str
    deliveries: int
    size: int
    cut: bool
    time: str


class Replayed(View, frozen=True, kw_only=True):
    """The message id under which it was sent again."""

    sequence: int
    message_id: str


@operations.get("/dead", DeadQuery, Listing[DeadOrder])
async def list_dead(call: Call[DeadQuery]) -> Listing[DeadOrder]:
    """Dead letters, oldest first."""
    await call.desk.policy.require(call.actor, DEFAULT_PROJECT, PERMISSION)
    query = call.input
    after = int(query.cursor or 0)
    found = await call.desk.bus.dead_letters(service=query.service, after=after, limit=query.limit + 1)
    shown = found[: query.limit]
    return Listing(
        items=[
            DeadOrder(
                sequence=letter.sequence,
                service=letter.service,
                reason=letter.reason,
                subject=letter.subject,
                schema=letter.headers.get("Ql3-Schema"),
                error=letter.error,
                deliveries=letter.deliveries,
                size=letter.cut or len(letter.payload),
                cut=letter.cut is not None,
                time=letter.time,
            )
            for letter in shown
        ],
        next=str(shown[-1].sequence) if len(found) > len(shown) else None,
    )


@operations.post("/dead/{sequence}/replay", Nothing, Replayed, keep="no")
async def replay_dead(call: Call[Nothing]) -> Replayed:
    """Send a letter again to where it came from."""
    decision = await call.desk.policy.require(call.actor, DEFAULT_PROJECT, PERMISSION)
    text = str(call.request.path_params["sequence"])
    if not (text.isascii() and text.isdecimal() and len(text) <= 15):
        raise Ql3Error("not_found", field="sequence")

    async def record(tx: Transaction) -> None:
        await audit.append(tx, call.actor, "dead.replay", None, text, decision)

    await call.desk.database.transact(record)
    return Replayed(sequence=int(text), message_id=await call.desk.bus.replay(int(text)))
