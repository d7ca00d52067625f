"""A real gateway: real HTTP, real NATS, a real database. Owners of other rooms answer from memory."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from schemas import endpoints
from schemas.errors import Ql3Error
from schemas.identity import (
    AuthenticationBinding,
    BindingAnswer,
    BindingRevoke,
    BootstrapClaim,
    BootstrapIssue,
    BootstrapRead,
    BootstrapState,
    Identity,
    IdentityAnswer,
    IdentityRegister,
    IdentityResolve,
    PolicyCheck,
    PolicyDecision,
    RoleAnswer,
    RoleBinding,
    Subject,
)
from services.gateway.service import GatewayService
from services.gateway.settings import GatewaySettings
from services.kit.bus import Bus, Caller, Route
from services.kit.clock import ManualClock
from services.kit.config import Config

PASSWORD = "correct horse battery"
USER = "mira"
PROJECT = "/api/v3/projects/default"


class Authority:
    """What the gateway needs of approval: names, one owner link, and a policy that a test sets."""

    def __init__(self) -> None:
        self.bound: dict[tuple[str, str], Subject] = {}
        self.disabled: set[str] = set()
        self.denied: set[str] = set()
        self.challenge: BootstrapIssue | None = None
        self.owner: Subject | None = None
        self.away = False
        self.names_away = False
        self.asked_while_away = asyncio.Event()

    async def register(self, message: IdentityRegister, _: Caller) -> IdentityAnswer:
        if message.actor.type != "system" and message.actor.id not in (USER, "local-console"):
            raise Ql3Error("forbidden")
        self.bound[message.provider, message.provider_subject] = message.subject
        return IdentityAnswer(identity=self._identity(message.subject))

    async def resolve(self, message: IdentityResolve, _: Caller) -> IdentityAnswer:
        if self.names_away:
            raise Ql3Error("unavailable")
        subject = self.bound.get((message.provider, message.provider_subject))
        if subject is None or subject.id in self.disabled:
            return IdentityAnswer(identity=None)
        return IdentityAnswer(identity=self._identity(subject))

    async def revoke_binding(self, message: BindingRevoke, _: Caller) -> BindingAnswer:
        if self.away:
            raise Ql3Error("unavailable")
        if self.bound.pop((message.provider, message.provider_subject), None) is None:
            raise Ql3Error("not_found")
        binding = AuthenticationBinding(
            provider=message.provider,
            provider_subject=message.provider_subject,
            version=2,
            state="revoked",
            created_at_ms=1,
        )
        return BindingAnswer(binding=binding)

    async def check(self, message: PolicyCheck, _: Caller) -> PolicyDecision:
        if self.away:
            self.asked_while_away.set()
            raise Ql3Error("unavailable")
        denied = message.permission in self.denied
        return PolicyDecision(
            effect="deny" if denied else "allow",
            reasons=["permission_missing"] if denied else ["role_grant"],
            project_version=1,
            binding_version=1,
            valid_for_ms=0,
        )

    async def issue(self, message: BootstrapIssue, _: Caller) -> BootstrapState:
        if self.owner is not None:
            raise Ql3Error("bootstrap_closed")
        if self.challenge is not None:
            raise Ql3Error("challenge_active", data={"expires_at_ms": 600_000})
        assert message.actor.assurance == "local_console"
        self.challenge = message
        return self._state(message.project)

    async def read(self, message: BootstrapRead, _: Caller) -> BootstrapState:
        return self._state(message.project)

    async def claim(self, message: BootstrapClaim, _: Caller) -> RoleAnswer:
        known = self.challenge
        if known is None or self.owner is not None or message.token_digest != known.token_digest:
            raise Ql3Error("bootstrap_rejected")
        self.owner = Subject(type="user", id=message.actor.id)
        return RoleAnswer(
            binding=RoleBinding(
                project=message.project,
                subject=self.owner,
                version=1,
                state="active",
                role="owner",
                mutation_id="0190a0a0-0000-7000-8000-000000000000",
                changed_by=self.owner,
                created_at_ms=1,
            )
        )

    def routes(self) -> list[Route[Any, Any]]:
        return [
            Route(endpoints.IDENTITIES_REGISTER, self.register),
            Route(endpoints.IDENTITIES_RESOLVE, self.resolve),
            Route(endpoints.IDENTITIES_REVOKE_BINDING, self.revoke_binding),
            Route(endpoints.POLICY_CHECK, self.check),
            Route(endpoints.BOOTSTRAP_ISSUE, self.issue),
            Route(endpoints.BOOTSTRAP_READ, self.read),
            Route(endpoints.BOOTSTRAP_CLAIM, self.claim),
        ]

    def _state(self, project: str) -> BootstrapState:
        if self.challenge is None or self.owner is not None:
            return BootstrapState(project=project, open=self.owner is None)
        return BootstrapState(project=project, open=True, challenge_id=self.challenge.challenge_id, expires_at_ms=9)

    @staticmethod
    def _identity(subject: Subject) -> Identity:
        return Identity(
            type=subject.type,
            id=subject.id,
            display_name=None,
            status="active",
            version=1,
            created_at_ms=1,
            updated_at_ms=1,
        )


class House:
    """A running gateway and what a test does with it."""

    def __init__(self, gateway: GatewayService, authority: Authority, bus_for: Any, clock: ManualClock) -> None:
        self.gateway = gateway
        self.authority = authority
        self.clock = clock
        self.database = gateway._database
        self._bus_for = bus_for
        self.console_token = ""
        self.clients: list[httpx.AsyncClient] = []

    def client(self, token: str | None = None, **headers: str) -> httpx.AsyncClient:
        """A browser or program that has signed in with a token, or not."""
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        client = httpx.AsyncClient(base_url=self.gateway.url, headers=headers, trust_env=False, timeout=30)
        self.clients.append(client)
        return client

    def console(self) -> httpx.AsyncClient:
        """The local console."""
        return self.client(self.console_token)

    async def serve(self, service: str, *routes: Route[Any, Any]) -> Bus:
        """Answer for a service that is not under test."""
        bus = await self._bus_for(service)
        await bus.serve(service, "1.0.0", list(routes))
        await bus.flush()  # from here on it is heard
        return bus

    async def owner(self) -> httpx.AsyncClient:
        """A browser whose person has claimed the owner link; its CSRF token goes along."""
        link = await self.gateway.issue_owner_link()
        assert link is not None
        challenge, _, token = link.partition("#claim=")[2].partition(".")
        client = self.client()
        answer = await client.post(
            "/api/v3/bootstrap/claim",
            json={"challenge": challenge, "token": token, "user": USER, "password": PASSWORD},
        )
        assert answer.status_code == 200, answer.text
        client.headers["Ql3-Csrf"] = answer.json()["csrf"]
        return client


HouseFor = Callable[..., Awaitable[House]]


@pytest.fixture
async def house_for(database_for: Any, bus_for: Any, tmp_path: Path) -> AsyncIterator[HouseFor]:
    """`await house_for(**settings)`: a gateway on a free port of loopback; the test runs on both dialects."""
    houses: list[House] = []

    async def make(**changed: Any) -> House:
        database = await database_for("gateway")
        bus = await bus_for("gateway")
        authority, clock = Authority(), ManualClock()
        settings = GatewaySettings(
            **{"listen": "127.0.0.1:0", "key_file": str(tmp_path / "keys" / "gateway.key"), **changed}
        )
        gateway = GatewayService(config=Config(), database=database, bus=bus, clock=clock, settings=settings)
        house = House(gateway, authority, bus_for, clock)
        await house.serve("approval", *authority.routes())
        await gateway.start()
        houses.append(house)
        console = await gateway.issue_console_credential()
        house.console_token = f"ql3c_{console['credential_id']}_{console['secret']}"
        return house

    yield make
    for house in houses:
        for client in house.clients:
            await client.aclose()
        await house.gateway.stop()


@pytest.fixture
async def house(house_for: HouseFor) -> House:
    """A gateway with its defaults."""
    return await house_for()


def digest(text: str) -> str:
    """What a test puts where a digest belongs."""
    return hashlib.sha256(text.encode()).hexdigest()
