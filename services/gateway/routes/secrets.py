"""Secrets: set, listed by name, never read. Owner: vault, to whose key values are sealed here."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from schemas import endpoints
from schemas.base import Value
from schemas.errors import Ql3Error
from schemas.limits import SECRET_BYTES
from schemas.secrets import Secret, SecretList, SecretSet, VaultKeyRead
from services.gateway.calls import Call, listing
from services.gateway.operations import Listing, Operations, Paged
from services.kit.sealing import seal, secret_context

operations = Operations("secrets")
BODY_BYTES = 6 * SECRET_BYTES + 1024
"""A value whose every byte is written as a JSON escape."""


class SecretValue(Value, frozen=True, kw_only=True):
    """The value of the secret's next version. `expected_version` is 0 for a secret that is not there yet."""

    value: Annotated[str, Meta(min_length=1, max_length=SECRET_BYTES)]
    expected_version: Annotated[int, Meta(ge=0)] | None = None


@operations.get("/projects/{project}/secrets", Paged, Listing[Secret])
async def list_secrets(call: Call[Paged]) -> Listing[Secret]:
    """Names and versions of a project's secrets; their values are never shown."""
    question = SecretList(actor=call.actor, project=call.project, page=call.input.page)
    return listing(await call.ask(endpoints.SECRETS_LIST, question))


@operations.put("/projects/{project}/secrets/{name}", SecretValue, Secret, body_bytes=BODY_BYTES, keep="no")
async def set_secret(call: Call[SecretValue]) -> Secret:
    """Give a secret a new value."""
    value = call.input.value.encode()
    if len(value) > SECRET_BYTES:
        raise Ql3Error("too_large", f"A secret has at most {SECRET_BYTES} bytes.", field="value")
    name = call.slug("name")
    key = (await call.ask(endpoints.VAULT_KEY, VaultKeyRead())).public_key
    question = SecretSet(
        actor=call.actor,
        project=call.project,
        name=name,
        sealed=seal(key, value, secret_context(call.project, name, call.mutation_id)),
        expected_version=call.input.expected_version,
        mutation_id=call.mutation_id,
    )
    return (await call.ask(endpoints.SECRETS_SET, question)).secret
