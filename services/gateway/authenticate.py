"""Who asks: an API credential, or a panel session with its CSRF token. Everything else is nobody."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections import OrderedDict
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from schemas import endpoints
from schemas.errors import Ql3Error
from schemas.identity import LOCAL_CONSOLE, Actor, Assurance, IdentityResolve, Subject, SubjectType
from services.gateway import credentials, sessions
from services.gateway.peers import Peer
from services.gateway.pepper import Pepper
from services.gateway.settings import GatewaySettings
from services.gateway.store import accounts as accounts_store
from services.gateway.store import credentials as credentials_store
from services.gateway.throttle import Throttle
from services.kit.bus import Bus
from services.kit.clock import Clock
from services.kit.database import Database

KEPT_MS = 2_000
"""How long an answer is kept: as long as policy's own, so that a revocation counts everywhere within 2 s."""
KEPT_ENTRIES = 1024
ACTOR_MS = 60_000
SAFE_METHODS = frozenset({"GET", "HEAD"})


class Principal(NamedTuple):
    """An authenticated caller; `id` is the credential's or the session's."""

    actor: Actor
    kind: Literal["credential", "session"]
    id: str
    csrf: str | None = None


class Authenticator:
    """Answers who a request comes from. Raises `unauthenticated`, `forbidden` (CSRF), `rate_limited`, `unavailable`."""

    def __init__(
        self,
        *,
        database: Database,
        bus: Bus,
        clock: Clock,
        pepper: Pepper,
        throttle: Throttle,
        settings: GatewaySettings,
    ) -> None:
        self._database = database
        self._bus = bus
        self._clock = clock
        self._pepper = pepper
        self._throttle = throttle
        self._cookie = sessions.SECURE_COOKIE if settings.secure else sessions.COOKIE
        self._kept: OrderedDict[bytes, tuple[Principal, int]] = OrderedDict()
        self.changed = asyncio.Event()
        """Set, and replaced by another one, when somebody may have been shut out."""

    async def authenticate(self, method: str, headers: Mapping[str, str], peer: Peer) -> Principal:
        """The caller of a request. `headers` have lower-case names."""
        authorization = headers.get("authorization")
        if authorization is not None:
            return await self._by_credential(authorization, peer)
        presented = self.presented_session(headers)
        if presented is None:
            raise Ql3Error("unauthenticated")
        principal = await self._by_session(presented)
        if method not in SAFE_METHODS:
            self._refuse_foreign(principal, headers)
        return principal

    def presented_session(self, headers: Mapping[str, str]) -> sessions.Presented | None:
        """The session that the cookie names, unchecked."""
        raw = headers.get("cookie")
        if raw is None or len(raw) > 4096:
            return None
        try:
            morsel = SimpleCookie(raw).get(self._cookie)
        except CookieError:
            return None
        return sessions.parse(morsel.value) if morsel else None

    async def end_presented(self, headers: Mapping[str, str]) -> None:
        """Ends the session that the browser had, when it signs in anew: nothing of it lives on."""
        presented = self.presented_session(headers)
        if presented is None:
            return
        session = await self._database.read(lambda tx: accounts_store.session(tx, presented.session_id))
        now = self._clock.now_ms()
        if sessions.accepted(self._pepper, presented, session, now):
            await self._database.transact(lambda tx: accounts_store.revoke_session(tx, presented.session_id, now))
            self.drop(presented.session_id)

    def csrf_of(self, presented: sessions.Presented) -> str:
        """The CSRF token of a session."""
        return sessions.csrf_token(self._pepper, presented)

    def drop(self, principal_id: str) -> None:
        """Forgets what is kept about a credential or session that ended."""
        for key in [key for key, (principal, _) in self._kept.items() if principal.id == principal_id]:
            del self._kept[key]
        self._tell()

    def forget(self) -> None:
        """Forgets everybody: whoever comes next is looked up anew."""
        self._kept.clear()
        self._tell()

    def _tell(self) -> None:
        told, self.changed = self.changed, asyncio.Event()
        told.set()

    async def _by_credential(self, authorization: str, peer: Peer) -> Principal:
        scheme, _, text = authorization.partition(" ")
        presented = credentials.parse(text) if scheme.lower() == "bearer" else None
        if presented is None:
            raise self._refused(peer)
        key = hashlib.sha256(text.encode()).digest()
        kept = self._recall(key)
        if kept is not None and (kept.actor.assurance != "local_console" or peer.local):
            return kept
        versions = await self._database.read(lambda tx: credentials_store.versions(tx, presented.credential_id))
        now = self._clock.now_ms()
        found = credentials.accepted(self._pepper, presented, versions, now)
        if found is None:
            raise self._refused(peer)
        actor = _actor(found.subject_type, found.subject_id, found.id, found.assurance, now, now, found.expires_at_ms)
        if found.assurance == "local_console":
            # Whoever reads the console's file is on this machine; the same secret from elsewhere was carried off.
            if not peer.local or found.subject_id != LOCAL_CONSOLE:
                raise self._refused(peer)
        elif not await self._active("api_credential", found.id, actor):
            raise self._refused(peer)
        return self._keep(key, Principal(actor, "credential", found.id))

    async def _by_session(self, presented: sessions.Presented) -> Principal:
        key = hashlib.sha256(sessions.cookie_value(*presented).encode()).digest()
        kept = self._recall(key)
        if kept is not None:
            return kept
        session = await self._database.read(lambda tx: accounts_store.session(tx, presented.session_id))
        now = self._clock.now_ms()
        if not sessions.accepted(self._pepper, presented, session, now) or session is None:
            raise Ql3Error("unauthenticated")
        actor = _actor(
            "user", session.user_name, session.id, session.assurance, session.authenticated_at_ms, now,
            session.expires_at_ms,
        )  # fmt: skip
        if not await self._active("password", session.user_name, actor):
            raise Ql3Error("unauthenticated")
        if now - session.seen_at_ms > sessions.SEEN_EVERY_MS:
            await self._database.transact(lambda tx: accounts_store.seen(tx, session.id, now))
        csrf = sessions.csrf_token(self._pepper, presented)
        return self._keep(key, Principal(actor, "session", session.id, csrf))

    async def _active(self, provider: str, provider_subject: str, actor: Actor) -> bool:
        answer = await self._bus.request(
            endpoints.IDENTITIES_RESOLVE, IdentityResolve(provider=provider, provider_subject=provider_subject)
        )
        found = answer.identity
        return found is not None and Subject(type=found.type, id=found.id) == Subject(type=actor.type, id=actor.id)

    def _refuse_foreign(self, principal: Principal, headers: Mapping[str, str]) -> None:
        # The cookie is SameSite=Strict; the token and the origin are what is left if a browser does not keep to that.
        sent = headers.get(sessions.CSRF_HEADER, "")
        if not hmac.compare_digest(sent.encode(), (principal.csrf or "").encode()):
            raise Ql3Error("forbidden", "The CSRF token is missing or not of this session.", field=sessions.CSRF_HEADER)
        origin = headers.get("origin")
        foreign = origin is not None and urlsplit(origin).netloc.lower() != headers.get("host", "").lower()
        if foreign or headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise Ql3Error("forbidden", "The request comes from another site.", field="origin")

    def _refused(self, peer: Peer) -> Ql3Error:
        # A right credential is never slowed down: 256 bits are not guessed. This keeps a flood of wrong ones cheap.
        try:
            self._throttle.attempt(f"credential:{peer.address}")
        except Ql3Error as limited:
            return limited
        return Ql3Error("unauthenticated")

    def _recall(self, key: bytes) -> Principal | None:
        kept = self._kept.get(key)
        if kept is None or kept[1] <= self._clock.now_ms():
            return None
        return kept[0]

    def _keep(self, key: bytes, principal: Principal) -> Principal:
        until = min(self._clock.now_ms() + KEPT_MS, principal.actor.expires_at_ms)
        self._kept[key] = (principal, until)
        self._kept.move_to_end(key)
        while len(self._kept) > KEPT_ENTRIES:
            self._kept.popitem(last=False)
        return principal


def _actor(
    subject_type: SubjectType,
    subject_id: str,
    authentication_id: str,
    assurance: Assurance,
    authenticated_at_ms: int,
    now_ms: int,
    until_ms: int,
) -> Actor:
    return Actor(
        type=subject_type,
        id=subject_id,
        authentication_id=authentication_id,
        assurance=assurance,
        authenticated_at_ms=authenticated_at_ms,
        expires_at_ms=min(now_ms + ACTOR_MS, until_ms),
    )
