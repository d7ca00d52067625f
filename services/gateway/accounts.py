"""People at the door: sign-in, sign-out, second factor, and the links with which a password is set."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Awaitable, Mapping
from typing import Any, Literal, NamedTuple

from schemas import endpoints
from schemas.errors import Ql3Error
from schemas.identity import (
    GATEWAY,
    LOCAL_CONSOLE,
    Actor,
    IdentityRegister,
    IdentityResolve,
    Subject,
)
from services.gateway import sessions, totp
from services.gateway.authenticate import ACTOR_MS
from services.gateway.passwords import Passwords, refuse_weak
from services.gateway.pepper import Pepper
from services.gateway.sessions import Session
from services.gateway.store import accounts as store
from services.gateway.throttle import Throttle
from services.kit import audit
from services.kit.bus import Bus
from services.kit.clock import Clock
from services.kit.database import Database, Transaction
from services.kit.ids import new_id

LINK_MS = 24 * 3_600_000
_WRONG = "The name, the password or the code is wrong."


class SignedIn(NamedTuple):
    """A new session and the one thing that a browser keeps of it."""

    session: Session
    presented: sessions.Presented


class PasswordLink(NamedTuple):
    """A one-time link: `<id>.<token>` behind `#join=`."""

    fragment: str
    expires_at_ms: int


class Accounts:
    """Sign-in and what belongs to it. Every refusal of a sign-in looks the same."""

    def __init__(
        self,
        *,
        database: Database,
        bus: Bus,
        clock: Clock,
        pepper: Pepper,
        throttle: Throttle,
        passwords: Passwords | None = None,
    ) -> None:
        self._database = database
        self._bus = bus
        self._clock = clock
        self._pepper = pepper
        self._throttle = throttle
        self._passwords = passwords or Passwords()

    def gateway_actor(self) -> Actor:
        """The gateway itself, for what it does before anybody has a name."""
        now = self._clock.now_ms()
        return Actor(
            type="system",
            id=GATEWAY,
            authentication_id=GATEWAY,
            assurance="service",
            authenticated_at_ms=now,
            expires_at_ms=now + ACTOR_MS,
        )

    async def sign_in(self, user_name: str, password: str, code: str | None, peer: str) -> SignedIn:
        """A new session. Raises `unauthenticated` (with `data.second_factor` when only the code is missing),
        `rate_limited`, `capacity` or `unavailable`."""
        address, account = f"address:{peer}", f"account:{user_name}"
        with self._throttle.attempting(address, account):
            # Asked before the password is looked at: when nobody answers, that tells nothing about the password.
            active = await self._active(user_name)
            kept = await self._database.read(lambda tx: store.password(tx, user_name))
            if not (await self._passwords.matches(kept, password) and active):
                await self._refused(user_name, peer, "password")
                raise Ql3Error("unauthenticated", _WRONG)
            factor = await self._database.read(lambda tx: store.second_factor(tx, user_name))
            assurance: Literal["single_factor", "multi_factor"] = "single_factor"
            if factor is not None and factor.confirmed:
                if code is None:
                    self._throttle.undo(address)
                    self._throttle.undo(account)
                    raise Ql3Error(
                        "unauthenticated", "A code is needed too.", field="code", data={"second_factor": True}
                    )
                if not await self._use_code(user_name, factor, code):
                    await self._refused(user_name, peer, "code")
                    raise Ql3Error("unauthenticated", _WRONG)
                assurance = "multi_factor"
        self._throttle.undo(address)
        self._throttle.clear(account)
        return await self.begin_session(user_name, assurance, peer)

    async def begin_session(
        self, user_name: str, assurance: Literal["single_factor", "multi_factor"], peer: str
    ) -> SignedIn:
        """A session under a new id and secret, whatever the browser had before."""
        now = self._clock.now_ms()
        session_id, secret = new_id(), sessions.new_secret()
        session = Session(
            id=session_id,
            user_name=user_name,
            digest=sessions.digest(self._pepper, session_id, secret),
            assurance=assurance,
            authenticated_at_ms=now,
            seen_at_ms=now,
            expires_at_ms=now + sessions.LIFE_MS,
            revoked_at_ms=None,
        )

        async def begin(tx: Transaction) -> None:
            await store.insert_session(tx, session, keep=sessions.PER_USER)
            await _record(tx, person(session), "session.begin", session_id, {"assurance": assurance})

        await self._database.transact(begin)
        return SignedIn(session, sessions.Presented(session_id, secret))

    async def sign_out(self, actor: Actor, session_id: str) -> None:
        """Ends a session."""

        async def end(tx: Transaction) -> None:
            await store.revoke_session(tx, session_id, self._clock.now_ms())
            await _record(tx, actor, "session.end", session_id)

        await self._database.transact(end)

    async def has_second_factor(self, actor: Actor) -> bool:
        """Whether a person has confirmed a second factor."""
        factor = await self._database.read(lambda tx: store.second_factor(tx, actor.id))
        return factor is not None and factor.confirmed

    async def enrol(self, actor: Actor, password: str, peer: str) -> str:
        """A new second factor, to be confirmed with a code of it; its `otpauth://` address is shown once.

        The password is asked for again: a session that was left open must not be enough to become a stronger one.
        Raises `forbidden` for a wrong password, and `conflict` when a factor is confirmed already.
        """
        user_name = _user_name(actor)
        await self._prove_password(user_name, password, peer, field="password")
        secret = totp.new_secret()
        sealed = self._pepper.seal("totp", secret, user_name)

        async def enrol(tx: Transaction) -> None:
            if not await store.put_second_factor(tx, user_name, sealed, self._clock.now_ms()):
                raise Ql3Error("conflict", "A second factor is set already; remove it first.")
            await _record(tx, actor, "second_factor.enrol", user_name)

        await self._database.transact(enrol)
        return totp.provisioning_uri(secret, user_name)

    async def confirm(self, actor: Actor, session_id: str, code: str, peer: str) -> None:
        """A right code confirms a new second factor, and makes this session multi-factor and recent."""
        user_name = _user_name(actor)
        factor = await self._database.read(lambda tx: store.second_factor(tx, user_name))
        if factor is None:
            raise Ql3Error("not_found", "No second factor is set.")
        await self._prove_code(user_name, factor, code, peer)

        async def raise_assurance(tx: Transaction) -> None:
            await store.raise_session(tx, session_id, self._clock.now_ms())
            if not factor.confirmed:
                # Sessions that were opened before without it would stay below what the person now wants.
                await store.revoke_sessions(tx, user_name, self._clock.now_ms(), but=session_id)
            await _record(tx, actor, "second_factor.confirm", user_name)

        await self._database.transact(raise_assurance)

    async def remove_second_factor(self, actor: Actor, code: str, peer: str) -> None:
        """Removes the second factor with a code of it."""
        user_name = _user_name(actor)
        factor = await self._database.read(lambda tx: store.second_factor(tx, user_name))
        if factor is None:
            return
        await self._prove_code(user_name, factor, code, peer)

        async def remove(tx: Transaction) -> None:
            await store.drop_second_factor(tx, user_name)
            await _record(tx, actor, "second_factor.remove", user_name)

        await self._database.transact(remove)

    async def change_password(self, actor: Actor, session_id: str, current: str, new: str, peer: str) -> None:
        """Another password; every other session of the person ends."""
        user_name = _user_name(actor)
        refuse_weak(new, user_name)
        await self._prove_password(user_name, current, peer, field="current")
        hashed = await self._passwords.hash(new)

        async def change(tx: Transaction) -> None:
            now = self._clock.now_ms()
            await store.put_password(tx, user_name, hashed, now)
            await store.revoke_sessions(tx, user_name, now, but=session_id)
            await _record(tx, actor, "password.change", user_name)

        await self._database.transact(change)

    async def issue_link(self, actor: Actor, user_name: str) -> PasswordLink:
        """A link with which this person sets a password; links before it end. The caller has asked policy."""
        await self._bus.request(
            endpoints.IDENTITIES_REGISTER,
            IdentityRegister(
                actor=actor,
                subject=Subject(type="user", id=user_name),
                provider="password",
                provider_subject=user_name,
            ),
        )
        now = self._clock.now_ms()
        link_id, secret = new_id(), secrets.token_urlsafe(32)
        digest = self._pepper.digest("password-link", link_id, secret)

        async def issue(tx: Transaction) -> None:
            issued_by = f"{actor.type}/{actor.id}"
            await store.insert_link(tx, link_id, user_name, digest, issued_by, now, now + LINK_MS)
            await _record(tx, actor, "password_link.issue", user_name)

        await self._database.transact(issue)
        return PasswordLink(f"join={link_id}.{secret}", now + LINK_MS)

    async def use_link(self, link_id: str, secret: str, password: str, peer: str) -> SignedIn:
        """Sets the password for which a link was issued, ends the person's sessions and second factor, and signs in.

        Raises `bootstrap_rejected` for every link that does not count.
        """
        address = f"address:{peer}"
        with self._throttle.attempting(address):
            link = await self._database.read(lambda tx: store.link(tx, link_id))
            expected = link.digest if link else "0" * 64
            same = hmac.compare_digest(expected, self._pepper.digest("password-link", link_id, secret))
            now = self._clock.now_ms()
            if not same or link is None or link.used_at_ms is not None or link.expires_at_ms <= now:
                raise Ql3Error("bootstrap_rejected", "The link is not valid.")
        self._throttle.undo(address)
        refuse_weak(password, link.user_name)
        hashed = await self._passwords.hash(password)

        async def use(tx: Transaction) -> None:
            if not await store.use_link(tx, link_id, now):
                raise Ql3Error("bootstrap_rejected", "The link is not valid.")
            await store.put_password(tx, link.user_name, hashed, now)
            await store.drop_second_factor(tx, link.user_name)
            await store.revoke_sessions(tx, link.user_name, now)
            await _record(tx, self.gateway_actor(), "password_link.use", link.user_name)

        await self._database.transact(use)
        return await self.begin_session(link.user_name, "single_factor", peer)

    async def first_password(self, user_name: str, password: str, display_name: str | None) -> str:
        """Makes a person with a first password; answers its hash, with which `forget_password` takes it back.

        Raises `name_taken` when the person has a password already.
        """
        refuse_weak(password, user_name)
        await self._bus.request(
            endpoints.IDENTITIES_REGISTER,
            IdentityRegister(
                actor=self.gateway_actor(),
                subject=Subject(type="user", id=user_name),
                provider="password",
                provider_subject=user_name,
                display_name=display_name,
            ),
        )
        hashed = await self._passwords.hash(password)

        async def insert(tx: Transaction) -> None:
            if not await store.insert_password(tx, user_name, hashed, self._clock.now_ms()):
                raise Ql3Error("name_taken", "This name has a password already; sign in instead.", field="user")
            await _record(tx, self.gateway_actor(), "password.first", user_name)

        await self._database.transact(insert)
        return hashed

    async def forget_password(self, user_name: str, hashed: str) -> None:
        """Takes back a first password that came to nothing."""
        await self._database.transact(lambda tx: store.drop_password(tx, user_name, hashed))

    async def _prove_password(self, user_name: str, password: str, peer: str, *, field: str) -> None:
        address, account = f"address:{peer}", f"account:{user_name}"
        with self._throttle.attempting(address, account):
            kept = await self._database.read(lambda tx: store.password(tx, user_name))
            if not await self._passwords.matches(kept, password):
                await self._refused(user_name, peer, "password")
                raise Ql3Error("forbidden", "The password is wrong.", field=field)
        # It proves the half of an account only: wrong codes stay counted.
        self._throttle.undo(address)
        self._throttle.undo(account)

    async def _prove_code(self, user_name: str, factor: store.SecondFactor, code: str, peer: str) -> None:
        address, account = f"address:{peer}", f"account:{user_name}"
        with self._throttle.attempting(address, account):
            if not await self._use_code(user_name, factor, code):
                await self._refused(user_name, peer, "code")
                raise Ql3Error("forbidden", "The code is wrong or was used before.", field="code")
        self._throttle.undo(address)
        self._throttle.undo(account)

    async def _use_code(self, user_name: str, factor: store.SecondFactor, code: str) -> bool:
        secret = self._pepper.open("totp", factor.sealed, user_name)
        step = totp.accepted_step(secret, code, self._clock.now_ms(), factor.last_step)
        return step is not None and await self._database.transact(lambda tx: store.use_code(tx, user_name, step))

    async def _active(self, user_name: str) -> bool:
        answer = await self._bus.request(
            endpoints.IDENTITIES_RESOLVE, IdentityResolve(provider="password", provider_subject=user_name)
        )
        found = answer.identity
        return found is not None and (found.type, found.id) == ("user", user_name)

    async def _refused(self, user_name: str, peer: str, factor: str) -> None:
        detail = {"peer": peer, "factor": factor}

        async def record(tx: Transaction) -> None:
            await audit.append(tx, None, "session.refused", None, user_name, "deny", detail)

        await self._database.transact(record)


def _record(
    tx: Transaction, actor: Actor, action: str, target: str, detail: Mapping[str, Any] | None = None
) -> Awaitable[str]:
    return audit.append(tx, actor, action, None, target, "allow", detail)


def person(session: Session) -> Actor:
    """The person of a session, as it travels with a question."""
    return Actor(
        type="user",
        id=session.user_name,
        authentication_id=session.id,
        assurance=session.assurance,
        authenticated_at_ms=session.authenticated_at_ms,
        expires_at_ms=session.authenticated_at_ms + ACTOR_MS,
    )


def _user_name(actor: Actor) -> str:
    if actor.type != "user" or actor.id == LOCAL_CONSOLE:
        raise Ql3Error("forbidden", "Only a person with a password has this.")
    return actor.id
