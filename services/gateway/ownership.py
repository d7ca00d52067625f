"""The owner link: how the first person of an installation becomes its owner, once."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import NamedTuple

from schemas import endpoints
from schemas.errors import Ql3Error
from schemas.identity import DEFAULT_PROJECT, LOCAL_CONSOLE, Actor, BootstrapClaim, BootstrapIssue, BootstrapRead
from services.gateway.accounts import Accounts, SignedIn, person
from services.gateway.authenticate import ACTOR_MS
from services.gateway.throttle import Throttle
from services.kit.bus import Bus
from services.kit.clock import Clock


class OwnerLink(NamedTuple):
    """`url` is None when a link of an earlier start still lives: its token is kept nowhere."""

    url: str | None
    expires_at_ms: int | None


class Ownership:
    """Issues and claims the owner link of a project."""

    def __init__(self, *, bus: Bus, clock: Clock, accounts: Accounts, throttle: Throttle) -> None:
        self._bus = bus
        self._clock = clock
        self._accounts = accounts
        self._throttle = throttle

    async def issue(self, base_url: str, project: str = DEFAULT_PROJECT) -> OwnerLink | None:
        """A link for a project that never had an owner; None when it has or had one. Only the composition root asks."""
        challenge, token = secrets.token_urlsafe(16), secrets.token_urlsafe(32)
        now = self._clock.now_ms()
        console = Actor(
            type="user",
            id=LOCAL_CONSOLE,
            authentication_id="owner-link",
            assurance="local_console",
            authenticated_at_ms=now,
            expires_at_ms=now + ACTOR_MS,
        )
        try:
            state = await self._bus.request(
                endpoints.BOOTSTRAP_ISSUE,
                BootstrapIssue(
                    actor=console,
                    project=project,
                    challenge_id=challenge,
                    token_digest=_digest(project, challenge, token),
                ),
            )
        except Ql3Error as error:
            if error.code == "bootstrap_closed":
                return None
            if error.code == "challenge_active":
                return OwnerLink(None, error.data.get("expires_at_ms"))
            raise
        return OwnerLink(f"{base_url}/#claim={challenge}.{token}", state.expires_at_ms)

    async def claim(
        self,
        *,
        project: str,
        challenge: str,
        token: str,
        user_name: str,
        password: str,
        display_name: str | None,
        peer: str,
    ) -> SignedIn:
        """Makes the person, claims the project for it and signs it in. Every wrong link raises `bootstrap_rejected`."""
        if user_name == LOCAL_CONSOLE:
            raise Ql3Error("name_taken", field="user")
        address = f"address:{peer}"
        with self._throttle.attempting(address):
            state = await self._bus.request(endpoints.BOOTSTRAP_READ, BootstrapRead(project=project))
            # Whoever has no link cannot know the challenge's id; nothing is made for them.
            known = hmac.compare_digest((state.challenge_id or "").encode(), challenge.encode())
            if not state.open or not state.challenge_id or not known:
                raise Ql3Error("bootstrap_rejected")
            hashed: str | None = None
            try:
                hashed = await self._accounts.first_password(user_name, password, display_name)
                signed_in = await self._accounts.begin_session(user_name, "single_factor", peer)
            except Ql3Error as error:
                if error.code != "name_taken":
                    raise
                # A claim whose answer was lost comes again with the same name and password.
                signed_in = await self._accounts.sign_in(user_name, password, None, peer)
            actor = person(signed_in.session)
            digest = _digest(project, challenge, token)
            claim = BootstrapClaim(actor=actor, project=project, challenge_id=challenge, token_digest=digest)
            try:
                await self._bus.request(endpoints.BOOTSTRAP_CLAIM, claim)
            except Ql3Error as error:
                # The person gets no password from a link that did not count. A lost answer may have been a yes.
                if error.code not in ("unavailable", "database_unavailable", "commit_unknown") and hashed is not None:
                    await self._accounts.sign_out(actor, signed_in.session.id)
                    await self._accounts.forget_password(user_name, hashed)
                raise
        self._throttle.undo(address)
        return signed_in


def _digest(project: str, challenge: str, token: str) -> str:
    return hashlib.sha256(f"ql3.owner-link.v1\0{project}\0{challenge}\0{token}".encode()).hexdigest()
