"""Secrets: set by people, opened for a worker at the start barrier, never readable otherwise."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from schemas import limits
from schemas.base import Message, View
from schemas.identity import Actor
from schemas.ids import Id, Millis, ProjectId, Slug
from schemas.paging import Page
from schemas.workers import Proof, SessionFence


class SecretSet(Message, frozen=True, kw_only=True, tag="secrets.set/1"):
    """A new version. The value comes sealed to the vault's public key (`vault.key`): readable nowhere else.

    `sealed` is unpadded base64url of ephemeral X25519 public key, nonce and AES-256-GCM ciphertext.
    `expected_version` is 0 for a new secret, or null for "whatever is current". `dispatch_id` is that of the approved
    action behind it.
    """

    actor: Actor
    project: ProjectId
    name: Slug
    sealed: Annotated[str, Meta(max_length=2 * limits.SECRET_BYTES)]
    expected_version: int | None = None
    mutation_id: Id
    dispatch_id: Id | None = None


class SecretList(Message, frozen=True, kw_only=True, tag="secrets.list/1"):
    """Names and versions of a project's secrets, never values."""

    actor: Actor
    project: ProjectId
    page: Page = Page()


class Secret(View, frozen=True, kw_only=True):
    """A secret's public facts."""

    project: str
    name: str
    version: int
    key_id: str
    created_at_ms: int


class SecretAnswer(Message, frozen=True, kw_only=True, tag="secrets.answer/1"):
    """The stored version."""

    secret: Secret
    replayed: bool = False


class SecretPage(Message, frozen=True, kw_only=True, tag="secrets.page/1"):
    """A page of secrets."""

    items: list[Secret]
    next: str | None


class VaultKeyRead(Message, frozen=True, kw_only=True, tag="vault.key_read/1"):
    """Ask for the vault's public key."""


class VaultKey(Message, frozen=True, kw_only=True, tag="vault.key/1"):
    """X25519 public key (unpadded base64url) to which values are sealed on their way in."""

    public_key: str


class ContextOpen(Message, frozen=True, kw_only=True, tag="context.open/1"):
    """A worker at the start barrier asks for the secrets of its attempt's pinned revision."""

    fence: SessionFence
    attempt_id: Id
    lease_generation: int
    sequence: int
    proof: Proof


class ContextAnswer(Message, frozen=True, kw_only=True, tag="context.answer/1"):
    """The values, sealed to the session's public key: JSON object name -> value when opened (see `SealedValues`)."""

    attempt_id: Id
    sealed: str


class SealedValues(msgspec.Struct, frozen=True, kw_only=True):
    """What a sealed context holds: environment variable name -> value."""

    values: dict[str, str]


class SecretChanged(Message, frozen=True, kw_only=True, tag="secret.changed/1"):
    """Fact: a secret got a new version. Subject `ql3.evt.secret.<project>.<name>.set`."""

    project: ProjectId
    name: Slug
    version: int
    at_ms: Millis
