"""API credentials. Owner: the gateway."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from schemas.base import Value, View
from schemas.errors import Ql3Error
from schemas.identity import DEFAULT_PROJECT, Subject
from schemas.limits import LIST_DEFAULT, LIST_ITEMS
from services.gateway.calls import Call
from services.gateway.credentials import TTL_DEFAULT_MS, TTL_MAX_MS, Version
from services.gateway.issuing import Issued
from services.gateway.operations import Listing, Nothing, Operations

operations = Operations("credentials")
Ttl = Annotated[int, Meta(ge=60_000, le=TTL_MAX_MS)]


class CredentialQuery(Value, frozen=True, kw_only=True):
    """Your own, or those of everybody (for owners and admins)."""

    all: bool = False
    limit: Annotated[int, Meta(ge=1, le=LIST_ITEMS)] = LIST_DEFAULT
    cursor: Annotated[str, Meta(max_length=36)] | None = None


class NewCredential(Value, frozen=True, kw_only=True):
    """A credential for yourself, or for `subject` (an application, for example), which owners may make."""

    name: Annotated[str, Meta(min_length=1, max_length=255)]
    subject: Subject | None = None
    ttl_ms: Ttl = TTL_DEFAULT_MS


class Rotation(Value, frozen=True, kw_only=True):
    """The secret before it stays good for `overlap_ms`, so that programs can be changed over."""

    ttl_ms: Ttl = TTL_DEFAULT_MS
    overlap_ms: Annotated[int, Meta(ge=0, le=7 * 86_400_000)] = 0


class Credential(View, frozen=True, kw_only=True):
    """What is known of a credential. `token` is there once, in the answer that made it."""

    id: str
    version: int
    name: str
    subject: Subject
    state: Literal["active", "expired", "revoked"]
    created_by: str
    created_at_ms: int
    expires_at_ms: int
    token: str | None


@operations.get("/credentials", CredentialQuery, Listing[Credential])
async def list_credentials(call: Call[CredentialQuery]) -> Listing[Credential]:
    """Credentials and their states; secrets are never shown again."""
    query = call.input
    subject = None if query.all else Subject(type=call.actor.type, id=call.actor.id)
    if query.all:
        await call.desk.policy.require(call.actor, DEFAULT_PROJECT, "policy.manage")
    found, following = await call.desk.issuer.page(query.cursor or "", subject, query.limit)
    now = call.desk.clock.now_ms()
    return Listing(items=[_shown(version, now) for version in found], next=following)


@operations.post("/credentials", NewCredential, Credential, status=201, keep="no")
async def create_credential(call: Call[NewCredential]) -> Credential:
    """Make a credential; its token is in this answer and nowhere else."""
    new = call.input
    own = Subject(type=call.actor.type, id=call.actor.id)
    subject = new.subject or own
    if subject != own:
        # Whoever holds it acts as that subject, whatever roles it has or will have.
        await call.desk.policy.require(call.actor, DEFAULT_PROJECT, "project.manage")
    elif call.principal is None or call.principal.kind != "session":
        raise Ql3Error("forbidden", "A credential cannot make another one of its own.")
    return _issued(call, await call.desk.issuer.issue(call.actor, subject, new.name, new.ttl_ms))


@operations.post("/credentials/{credential}/rotate", Rotation, Credential, keep="no")
async def rotate_credential(call: Call[Rotation]) -> Credential:
    """Give a credential a new secret. A credential may do this for itself, and its end stays where it was."""
    current = await call.desk.issuer.find(call.id("credential"))
    ttl_ms = call.input.ttl_ms
    if not _own(call, current):
        await call.desk.policy.require(call.actor, DEFAULT_PROJECT, "project.manage")
    elif call.principal is not None and call.principal.kind == "credential":
        # Whoever carried a token off must not outlive it, nor take those of its siblings.
        if call.principal.id != current.id:
            raise Ql3Error("forbidden", "A credential rotates only itself; sign in to rotate your others.")
        ttl_ms = min(ttl_ms, current.expires_at_ms - call.desk.clock.now_ms())
    return _issued(call, await call.desk.issuer.rotate(call.actor, current, ttl_ms, call.input.overlap_ms))


@operations.post("/credentials/{credential}/revoke", Nothing, Credential, keep="no")
async def revoke_credential(call: Call[Nothing]) -> Credential:
    """End a credential."""
    current = await call.desk.issuer.find(call.id("credential"))
    if not _own(call, current):
        await call.desk.policy.require(call.actor, DEFAULT_PROJECT, "policy.manage")
    await call.desk.issuer.revoke(call.actor, current)
    return _shown(await call.desk.issuer.find(current.id), call.desk.clock.now_ms())


def _own(call: Call[Rotation] | Call[Nothing], current: Version) -> bool:
    return (current.subject_type, current.subject_id) == (call.actor.type, call.actor.id)


def _issued(call: Call[NewCredential] | Call[Rotation], issued: Issued) -> Credential:
    return _shown(issued.version, call.desk.clock.now_ms(), issued.token)


def _shown(version: Version, now_ms: int, token: str | None = None) -> Credential:
    return Credential(
        id=version.id,
        version=version.version,
        name=version.name,
        subject=Subject(type=version.subject_type, id=version.subject_id),
        state=version.state(now_ms),
        created_by=version.created_by,
        created_at_ms=version.created_at_ms,
        expires_at_ms=version.expires_at_ms,
        token=token,
    )
