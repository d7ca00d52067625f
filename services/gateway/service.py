"""The gateway as a service: what it needs, what it starts, what it hands to the composition root."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

from services.gateway.accounts import Accounts
from services.gateway.app import create_app
from services.gateway.authenticate import Authenticator
from services.gateway.desk import Desk
from services.gateway.issuing import Issuer
from services.gateway.ownership import OwnerLink, Ownership
from services.gateway.pepper import Pepper, load_pepper
from services.gateway.readiness import Readiness
from services.gateway.server import HttpServer
from services.gateway.settings import GatewaySettings, settings_of
from services.gateway.store import accounts as accounts_store
from services.gateway.store import idempotency
from services.gateway.throttle import Throttle
from services.kit.bus import Bus, Delivery
from services.kit.clock import Clock
from services.kit.config import Config
from services.kit.database import Database, Transaction
from services.kit.health import Health
from services.kit.loops import Loop
from services.kit.policy import PolicyClient
from services.kit.standing import standing_routes
from services.kit.upkeep import upkeep
from services.kit.version import VERSION

NAME = "gateway"
IDEMPOTENCY_KEPT_MS = 86_400_000
ENDED_KEPT_MS = 7 * 86_400_000
FORGET_EVERY_S = 600.0


class ConsoleCredential(TypedDict):
    """What `console.json` holds besides the address."""

    credential_id: str
    secret: str


class GatewayService:
    """People's way in. `pepper` is the key under which credentials are kept; by default it comes from its file."""

    def __init__(
        self,
        *,
        config: Config,
        database: Database,
        bus: Bus,
        clock: Clock,
        settings: GatewaySettings | None = None,
        pepper: Pepper | None = None,
    ) -> None:
        self._database = database
        self._bus = bus
        self._clock = clock
        self._settings = settings or settings_of(config)
        self._pepper = pepper or load_pepper(Path(self._settings.key_file))
        self._desk = self._assemble()
        self._server = HttpServer(create_app(self._desk), self._settings)
        self._forgetting = Loop("gateway-forget", self._forget, every_s=FORGET_EVERY_S)
        self._upkeep = upkeep(database, bus)
        self._listening = False

    @property
    def url(self) -> str:
        """Where people reach it, once it has started."""
        return self._server.url

    @property
    def local_url(self) -> str:
        """Where programs on this machine reach it, once it has started: the local console counts only from here."""
        return self._server.local_url

    async def start(self) -> None:
        """Answers on the bus, then listens. Raises `setup_invalid` naming the address when it is taken."""
        await self._desk.policy.start()
        await self._bus.on_event("ql3.evt.policy.>", self._policy_changed)
        health = Health()
        health.add(NAME, self.health)
        routes = standing_routes(NAME, VERSION, database=self._database, policy=self._desk.policy, health=health)
        await self._server.start()
        self._desk.base_url = self._server.url
        self._listening = True
        await self._bus.serve(NAME, VERSION, routes)
        for loop in (*self._upkeep, self._forgetting):
            await loop.start()

    async def _policy_changed(self, _: Delivery) -> None:
        # Somebody may be shut out, or no more: who a request comes from is asked anew, without waiting.
        self._desk.authenticator.forget()

    async def stop(self) -> None:
        """Tells probes first, ends open answers, lets running ones finish, then stops listening."""
        self._desk.readiness.draining = True
        self._desk.stopping.set()
        if self._listening:
            self._listening = False
            await self._server.stop()
            await self._desk.closed()
        for loop in (self._forgetting, *self._upkeep):
            await loop.stop()

    def health(self) -> list[str]:
        """Reasons why the gateway itself is not ready."""
        return [] if self._listening else ["it does not listen"]

    async def issue_console_credential(self) -> ConsoleCredential:
        """A credential for `user/local-console`, good on this machine only; that of an earlier start ends."""
        issued = await self._desk.issuer.console()
        return ConsoleCredential(credential_id=issued.version.id, secret=issued.secret)

    async def issue_owner_link(self) -> str | None:
        """The one-time link with which the first person becomes owner; None when nobody may use one any more, or when
        a link of an earlier start still lives."""
        link = await self.open_ownership()
        return link.url if link else None

    async def open_ownership(self) -> OwnerLink | None:
        """The same with the instant until which a link lives, that of an earlier start too; None when one is owner."""
        return await self._desk.ownership.issue(self._server.url)

    def _assemble(self) -> Desk:
        database, bus, clock, pepper, settings = (
            self._database,
            self._bus,
            self._clock,
            self._pepper,
            self._settings,
        )
        throttle = Throttle(clock)
        authenticator = Authenticator(
            database=database, bus=bus, clock=clock, pepper=pepper, throttle=throttle, settings=settings
        )
        accounts = Accounts(database=database, bus=bus, clock=clock, pepper=pepper, throttle=throttle)
        return Desk(
            settings=settings,
            database=database,
            bus=bus,
            clock=clock,
            policy=PolicyClient(bus, clock=clock),
            authenticator=authenticator,
            accounts=accounts,
            issuer=Issuer(
                database=database,
                bus=bus,
                clock=clock,
                pepper=pepper,
                accounts=accounts,
                authenticator=authenticator,
            ),
            ownership=Ownership(bus=bus, clock=clock, accounts=accounts, throttle=throttle),
            readiness=Readiness(bus),
            proxies=settings.proxies,
        )

    async def _forget(self) -> None:
        now = self._clock.now_ms()

        async def forget(tx: Transaction) -> None:
            await idempotency.forget(tx, now - IDEMPOTENCY_KEPT_MS)
            await accounts_store.forget(tx, now - ENDED_KEPT_MS)

        await self._database.transact(forget)
