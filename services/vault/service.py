"""The vault: takes sealed values in, keeps them encrypted, and seals them to the worker that holds the attempt.

No value is in a message, a table, a log or an error: on the bus it is in a box for one key (`services.kit.sealing`), in
the table it is in an envelope (`services.vault.envelope`), and errors are constant.
"""

from __future__ import annotations

import asyncio

import msgspec

from schemas import limits
from schemas.endpoints import CONTEXT_OPEN, LEASES_VERIFY, SECRETS_LIST, SECRETS_SET, VAULT_KEY
from schemas.errors import Ql3Error
from schemas.identity import PolicyDecision
from schemas.ids import is_slug
from schemas.secrets import (
    ContextAnswer,
    ContextOpen,
    SealedValues,
    Secret,
    SecretAnswer,
    SecretChanged,
    SecretList,
    SecretPage,
    SecretSet,
    VaultKey,
    VaultKeyRead,
)
from schemas.subjects import event
from schemas.workers import LeaseVerified, LeaseVerify
from services.kit import audit, dispatches, outbox
from services.kit.bus import Bus, Caller, Route
from services.kit.clock import Clock
from services.kit.config import Config
from services.kit.database import Database, Transaction
from services.kit.dispatches import closing_route
from services.kit.health import Health
from services.kit.loops import Loop
from services.kit.policy import PolicyClient
from services.kit.sealing import SealError, attempt_context, seal, secret_context
from services.kit.standing import standing_routes
from services.kit.upkeep import upkeep
from services.kit.version import VERSION
from services.vault import secret, store
from services.vault.envelope import Envelope, EnvelopeFacts, decrypt, encrypt, same_value, wipe
from services.vault.keyring import Keyring, KeyringFile, unavailable

NAME = "vault"
_TRIES = 5
_KEYRING_CHECK_S = 30.0


class VaultService:
    """The keyring file of the configuration must exist (`services.vault.keyring.provision`)."""

    def __init__(self, *, config: Config, database: Database, bus: Bus, clock: Clock) -> None:
        self._database = database
        self._bus = bus
        self._clock = clock
        self._keyring = KeyringFile(config.keyring_file)
        self._policy = PolicyClient(bus, clock=clock)
        self._reasons: list[str] = ["the keyring was not read yet"]
        self._checks = Loop("vault.keyring", self.check_keyring, every_s=_KEYRING_CHECK_S)
        self._upkeep = upkeep(database, bus)

    async def start(self) -> None:
        """Answer, and look after the keyring."""
        await self.check_keyring()
        health = Health()
        health.add(NAME, self.health)
        await self._bus.serve(
            NAME,
            VERSION,
            [
                Route(SECRETS_SET, self.set_secret),
                Route(SECRETS_LIST, self.list_secrets),
                Route(VAULT_KEY, self.read_key),
                Route(CONTEXT_OPEN, self.open_context, concurrency=64),
                closing_route(NAME, self._database),
                *standing_routes(NAME, VERSION, database=self._database, policy=self._policy, health=health),
            ],
        )
        await self._bus.flush()  # from here on who asks is heard
        for loop in (self._checks, *self._upkeep):
            await loop.start()

    async def stop(self) -> None:
        """End the loops after their present step."""
        for loop in (self._checks, *self._upkeep):
            await loop.stop()

    def health(self) -> list[str]:
        """Reasons why secrets cannot be opened."""
        return [*self._reasons, *self._bus.health()]

    async def set_secret(self, message: SecretSet, _caller: Caller) -> SecretAnswer:
        """Append a version. The same mutation id with the same value gives the same version again."""
        decision = await self._policy.require(message.actor, message.project, "secret.manage")
        ring = await self._read_keyring()
        value = bytearray()
        try:
            value = _unseal(ring, message)
            secret.check_value(value)
            for _ in range(_TRIES):
                answer = await self._database.transact(lambda tx: self._append(tx, message, value, ring, decision))
                if answer is not None:
                    return answer
            raise Ql3Error("version_conflict", field="expected_version")
        finally:
            wipe(value)
            ring.wipe()

    async def _append(
        self, tx: Transaction, message: SecretSet, value: bytearray, ring: Keyring, decision: PolicyDecision
    ) -> SecretAnswer | None:
        # A repeat after success must succeed again, also one that overlaps with it: so the mutation is looked up behind
        # the version. Were it the other way round, it could be written in between and look like somebody else's.
        current = await store.current_version(tx, message.project, message.name)
        existing = await store.find_by_mutation(tx, message.project, message.name, message.mutation_id)
        if existing is not None:
            _check_replay(existing, message, value, ring)
            return SecretAnswer(secret=_public(existing), replayed=True)
        envelope = encrypt(
            EnvelopeFacts(
                project=message.project,
                name=message.name,
                version=secret.next_version(current, message.expected_version),
                mutation_id=message.mutation_id,
                key_id=ring.active_key_id,
                created_at_ms=self._clock.now_ms(),
            ),
            value,
            ring.active,
        )
        if not await store.insert(tx, envelope):
            return None
        if not await dispatches.claim(tx, message.dispatch_id, message.project, f"{message.name}@{envelope.version}"):
            raise Ql3Error("mutation_conflict", field="dispatch_id")
        await audit.append(
            tx,
            message.actor,
            "secret.set",
            message.project,
            message.name,
            decision,
            {"version": envelope.version, "key_id": envelope.key_id},
        )
        await outbox.fact(
            tx,
            event("secret", message.project, message.name, "set"),
            SecretChanged(
                project=message.project, name=message.name, version=envelope.version, at_ms=envelope.created_at_ms
            ),
        )
        return SecretAnswer(secret=_public(envelope))

    async def list_secrets(self, message: SecretList, _caller: Caller) -> SecretPage:
        """Names and current versions."""
        await self._policy.require(message.actor, message.project, "secret.use")
        after = message.page.cursor or ""
        if after and not is_slug(after):
            raise Ql3Error("invalid", "The cursor is not one of ours.", field="page.cursor")
        limit = message.page.limit
        items = await self._database.read(lambda tx: store.page(tx, message.project, after, limit + 1))
        return SecretPage(items=items[:limit], next=items[limit - 1].name if len(items) > limit else None)

    async def read_key(self, _message: VaultKeyRead, _caller: Caller) -> VaultKey:
        """The public key to which values are sealed."""
        ring = await self._read_keyring()
        try:
            return VaultKey(public_key=ring.intake().public)
        finally:
            ring.wipe()

    async def open_context(self, message: ContextOpen, caller: Caller) -> ContextAnswer:
        """Seal an attempt's secrets to the session that holds it at the start barrier.

        The dispatcher is the judge of who holds it; the vault takes project, references and the session's key from its
        answer and none of them from the worker.
        """
        if caller.token != message.fence.worker:
            raise Ql3Error("fence_rejected")
        verified = await self._bus.request(
            LEASES_VERIFY,
            LeaseVerify(
                fence=message.fence,
                attempt_id=message.attempt_id,
                lease_generation=message.lease_generation,
                sequence=message.sequence,
                proof=message.proof,
            ),
        )
        wanted = secret.wanted_by(verified.revision)
        envelopes = await self._database.read(
            lambda tx: store.resolve(tx, verified.project, [(ref.name, ref.version) for ref in wanted])
        )
        ring = await self._read_keyring()
        try:
            sealed = _seal_values(message, verified, wanted, envelopes, ring)
        finally:
            ring.wipe()
        return ContextAnswer(attempt_id=message.attempt_id, sealed=sealed)

    async def check_keyring(self) -> None:
        """Look whether the keyring can be read and holds every key that an envelope needs."""
        try:
            ring = await self._read_keyring()
        except Ql3Error:
            self._reasons = ["the keyring cannot be read"]
            return
        known = ring.key_ids
        ring.wipe()
        needed = await self._database.read(store.key_ids)
        self._reasons = [] if needed <= known else ["the keyring lacks a key that stored secrets need"]

    async def _read_keyring(self) -> Keyring:
        return await asyncio.to_thread(self._keyring.read)


def _unseal(ring: Keyring, message: SecretSet) -> bytearray:
    context = secret_context(message.project, message.name, message.mutation_id)
    for key in ring.intakes():
        try:
            return key.open(message.sealed, context)
        except SealError:
            continue
    raise Ql3Error("invalid", "The value was not sealed to this vault's key.", field="sealed")


def _check_replay(existing: Envelope, message: SecretSet, value: bytearray, ring: Keyring) -> None:
    stored = decrypt(existing, ring.key(existing.key_id))
    try:
        secret.check_replay(existing.version, message.expected_version, same_value=same_value(stored, value))
    finally:
        wipe(stored)


def _public(envelope: EnvelopeFacts) -> Secret:
    return Secret(
        project=envelope.project,
        name=envelope.name,
        version=envelope.version,
        key_id=envelope.key_id,
        created_at_ms=envelope.created_at_ms,
    )


def _seal_values(
    message: ContextOpen,
    verified: LeaseVerified,
    wanted: list[secret.Wanted],
    envelopes: list[Envelope | None],
    ring: Keyring,
) -> str:
    values: dict[str, str] = {}
    size = 0
    for ref, envelope in zip(wanted, envelopes, strict=True):
        if envelope is None:
            raise secret.absent(ref)
        opened = decrypt(envelope, ring.key(envelope.key_id))
        try:
            size += len(opened)
            values[ref.variable] = opened.decode("utf-8", "strict")
        except UnicodeDecodeError:
            raise unavailable() from None
        finally:
            wipe(opened)
    if size > limits.ENVIRONMENT_BYTES:
        raise Ql3Error("secret_unavailable", f"A run's secrets have at most {limits.ENVIRONMENT_BYTES} bytes.")
    plain = bytearray(msgspec.json.encode(SealedValues(values=values)))
    try:
        return seal(verified.public_key, plain, attempt_context(message.attempt_id, message.lease_generation))
    except SealError:
        raise unavailable() from None
    finally:
        wipe(plain)
