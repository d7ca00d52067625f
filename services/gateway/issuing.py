"""API credentials: issued, rotated, revoked; and the local console's own, made anew at each start."""

from __future__ import annotations

from typing import NamedTuple

from schemas import endpoints
from schemas.errors import Ql3Error
from schemas.identity import LOCAL_CONSOLE, Actor, Assurance, BindingRevoke, IdentityRegister, Subject
from services.gateway import credentials
from services.gateway.accounts import Accounts
from services.gateway.authenticate import Authenticator
from services.gateway.credentials import Version
from services.gateway.pepper import Pepper
from services.gateway.store import credentials as store
from services.kit import audit
from services.kit.bus import Bus
from services.kit.clock import Clock
from services.kit.database import Database, Transaction
from services.kit.ids import new_id

CONSOLE_MS = 366 * 86_400_000
CONSOLE_KEPT_MS = 86_400_000


class Issued(NamedTuple):
    """A credential with its secret, which is shown now and never again."""

    version: Version
    secret: str

    @property
    def token(self) -> str:
        """What its holder sends."""
        return credentials.token(self.version.id, self.secret)


class Issuer:
    """Makes and ends credentials. Whether the actor may, its caller has asked policy."""

    def __init__(
        self,
        *,
        database: Database,
        bus: Bus,
        clock: Clock,
        pepper: Pepper,
        accounts: Accounts,
        authenticator: Authenticator,
    ) -> None:
        self._database = database
        self._bus = bus
        self._clock = clock
        self._pepper = pepper
        self._accounts = accounts
        self._authenticator = authenticator

    async def issue(self, actor: Actor, subject: Subject, name: str, ttl_ms: int) -> Issued:
        """A credential that says it is `subject`, an application or the person itself."""
        if subject.id == LOCAL_CONSOLE or subject.type not in ("user", "api_app", "mcp_client", "agent"):
            raise Ql3Error("invalid", "Credentials are for people, applications, tools and agents.", field="subject")
        credential_id = new_id()
        await self._bus.request(
            endpoints.IDENTITIES_REGISTER,
            IdentityRegister(
                actor=actor,
                subject=subject,
                provider="api_credential",
                provider_subject=credential_id,
                display_name=None if subject.type == "user" else name,
            ),
        )
        assurance: Assurance = "single_factor" if subject.type == "user" else "service"
        issued = self._make(actor, credential_id, 1, name, subject, assurance, ttl_ms)

        async def insert(tx: Transaction) -> None:
            await store.insert(tx, issued.version)
            detail = {"subject": f"{subject.type}/{subject.id}", "expires_at_ms": issued.version.expires_at_ms}
            await audit.append(tx, actor, "credential.issue", None, credential_id, "allow", detail)

        await self._database.transact(insert)
        return issued

    async def rotate(self, actor: Actor, current: Version, ttl_ms: int, overlap_ms: int) -> Issued:
        """A new secret for the same credential; the one before it lives for `overlap_ms` more."""
        subject = Subject(type=current.subject_type, id=current.subject_id)
        issued = self._make(actor, current.id, current.version + 1, current.name, subject, current.assurance, ttl_ms)

        async def insert(tx: Transaction) -> None:
            newest = await store.versions(tx, current.id)
            if newest[0].version != current.version or newest[0].revoked_at_ms is not None:
                raise Ql3Error("version_conflict")
            await store.insert(tx, issued.version)
            await store.shorten_before(tx, current.id, issued.version.version, self._clock.now_ms() + overlap_ms)
            detail = {"version": issued.version.version, "overlap_ms": overlap_ms}
            await audit.append(tx, actor, "credential.rotate", None, current.id, "allow", detail)

        await self._database.transact(insert)
        self._authenticator.drop(current.id)
        return issued

    async def revoke(self, actor: Actor, current: Version) -> None:
        """Ends every version of a credential: here at once, at other replicas within 2 s.

        Its name ends first, where it counts as one under which its subject signs in; so nobody is left with a name that
        opens nothing. Whoever repeats a revocation that broke off in between ends the rest. Raises `last_owner`,
        `forbidden` or `unavailable`; then nothing has ended.
        """
        credential_id = current.id
        subject = Subject(type=current.subject_type, id=current.subject_id)
        name = BindingRevoke(actor=actor, subject=subject, provider="api_credential", provider_subject=credential_id)
        try:
            await self._bus.request(endpoints.IDENTITIES_REVOKE_BINDING, name)
        except Ql3Error as error:
            if error.code != "not_found":  # it never was a name: its registration was lost with an older life
                raise

        async def end(tx: Transaction) -> None:
            await store.revoke(tx, credential_id, self._clock.now_ms())
            await audit.append(tx, actor, "credential.revoke", None, credential_id, "allow", {})

        await self._database.transact(end)
        self._authenticator.drop(credential_id)

    async def find(self, credential_id: str) -> Version:
        """The newest version. Raises `not_found`."""
        versions = await self._database.read(lambda tx: store.versions(tx, credential_id))
        if not versions or versions[0].assurance == "local_console":
            raise Ql3Error("not_found")
        return versions[0]

    async def page(self, after: str, subject: Subject | None, limit: int) -> tuple[list[Version], str | None]:
        """Credentials of one subject, or of all."""
        of = (subject.type, subject.id) if subject else None
        return await self._database.read(lambda tx: store.page(tx, after, of, limit))

    async def console(self) -> Issued:
        """A credential for `user/local-console`; those of earlier starts end."""
        actor = self._accounts.gateway_actor()
        subject = Subject(type="user", id=LOCAL_CONSOLE)
        issued = self._make(actor, new_id(), 1, "local console", subject, "local_console", CONSOLE_MS)

        async def replace(tx: Transaction) -> None:
            now = self._clock.now_ms()
            await store.revoke_console(tx, now)
            await store.forget_console(tx, now - CONSOLE_KEPT_MS)
            await store.insert(tx, issued.version)
            await audit.append(tx, actor, "credential.console", None, issued.version.id, "allow", {})

        await self._database.transact(replace)
        return issued

    def _make(
        self,
        actor: Actor,
        credential_id: str,
        version: int,
        name: str,
        subject: Subject,
        assurance: Assurance,
        ttl: int,
    ) -> Issued:
        now = self._clock.now_ms()
        secret = credentials.new_secret()
        return Issued(
            Version(
                id=credential_id,
                version=version,
                digest=credentials.digest(self._pepper, credential_id, version, secret),
                name=name,
                subject_type=subject.type,
                subject_id=subject.id,
                assurance=assurance,
                created_by=f"{actor.type}/{actor.id}",
                created_at_ms=now,
                expires_at_ms=now + ttl,
                revoked_at_ms=None,
            ),
            secret,
        )
