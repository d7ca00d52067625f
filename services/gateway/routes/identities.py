"""People, applications and agents. Owner: approval; the password links are the gateway's."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from schemas import endpoints
from schemas.base import Value, View
from schemas.errors import Ql3Error
from schemas.identity import (
    DEFAULT_PROJECT,
    LOCAL_CONSOLE,
    AuthenticationBinding,
    BindingRevoke,
    Identity,
    IdentityList,
    IdentityRead,
    IdentitySet,
)
from services.gateway.calls import Call, listing
from services.gateway.operations import Listing, Operations, Paged

operations = Operations("identities")


class StatusChange(Value, frozen=True, kw_only=True):
    """Disabled subjects are refused everywhere within two seconds."""

    status: Literal["active", "disabled"]
    expected_version: int


class IdentityView(View, frozen=True, kw_only=True):
    """A subject and a page of its authentication bindings, revoked ones too."""

    identity: Identity
    bindings: list[AuthenticationBinding]
    next: str | None = None


class BindingName(Value, frozen=True, kw_only=True):
    """One binding, as the subject's page names it."""

    provider: Annotated[str, Meta(min_length=1, max_length=64)]
    provider_subject: Annotated[str, Meta(min_length=1, max_length=128)]
    expected_version: int | None = None


class NewUser(Value, frozen=True, kw_only=True):
    """A person who gets a link to set a password."""

    user: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._@-]{0,62}\Z")]


class Invitation(View, frozen=True, kw_only=True):
    """A one-time link; it is shown now and never again."""

    user: str
    url: str
    expires_at_ms: int


@operations.get("/identities", Paged, Listing[Identity])
async def list_identities(call: Call[Paged]) -> Listing[Identity]:
    """Who is known here."""
    return listing(await call.ask(endpoints.IDENTITIES_LIST, IdentityList(actor=call.actor, page=call.input.page)))


@operations.get("/identities/{type}/{id}", Paged, IdentityView)
async def get_identity(call: Call[Paged]) -> IdentityView:
    """One subject with a page of the names under which it signs in."""
    question = IdentityRead(actor=call.actor, subject=call.subject, page=call.input.page)
    found = await call.ask(endpoints.IDENTITIES_GET, question)
    return IdentityView(identity=found.identity, bindings=found.bindings, next=found.next)


@operations.post("/identities/{type}/{id}/bindings/revoke", BindingName, AuthenticationBinding)
async def revoke_binding(call: Call[BindingName]) -> AuthenticationBinding:
    """Let nobody sign in under one name of a subject any more; its other names stay."""
    question = BindingRevoke(
        actor=call.actor,
        subject=call.subject,
        provider=call.input.provider,
        provider_subject=call.input.provider_subject,
        expected_version=call.input.expected_version,
    )
    return (await call.ask(endpoints.IDENTITIES_REVOKE_BINDING, question)).binding


@operations.put("/identities/{type}/{id}", StatusChange, Identity)
async def set_identity(call: Call[StatusChange]) -> Identity:
    """Disable or enable a subject."""
    question = IdentitySet(
        actor=call.actor,
        subject=call.subject,
        expected_version=call.input.expected_version,
        status=call.input.status,
    )
    answer = await call.ask(endpoints.IDENTITIES_SET, question)
    if answer.identity is None:
        raise Ql3Error("not_found")
    return answer.identity


@operations.post("/invitations", NewUser, Invitation, status=201, keep="no")
async def invite(call: Call[NewUser]) -> Invitation:
    """Invite a person, or let one set a forgotten password anew. Who may do this can become anybody: owners only."""
    if call.input.user == LOCAL_CONSOLE:
        raise Ql3Error("name_taken", field="user")
    await call.desk.policy.require(call.actor, DEFAULT_PROJECT, "project.manage")
    link = await call.desk.accounts.issue_link(call.actor, call.input.user)
    return Invitation(
        user=call.input.user, url=f"{call.desk.base_url}/#{link.fragment}", expires_at_ms=link.expires_at_ms
    )
