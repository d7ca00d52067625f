"""What every call may use, made once by the service."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from services.gateway.accounts import Accounts
from services.gateway.authenticate import Authenticator
from services.gateway.issuing import Issuer
from services.gateway.ownership import Ownership
from services.gateway.peers import Networks
from services.gateway.readiness import Readiness
from services.gateway.settings import GatewaySettings
from services.kit.bus import Bus, Subscription
from services.kit.clock import Clock
from services.kit.database import Database
from services.kit.policy import PolicyClient


@dataclass(slots=True)
class Desk:
    """The ways to the services and the gateway's own tables. `stopping` ends answers that would stay open."""

    settings: GatewaySettings
    database: Database
    bus: Bus
    clock: Clock
    policy: PolicyClient
    authenticator: Authenticator
    accounts: Accounts
    issuer: Issuer
    ownership: Ownership
    readiness: Readiness
    proxies: Networks = ()
    base_url: str = ""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    open_streams: Counter[str] = field(default_factory=Counter[str])
    """Open answers by caller."""
    _closing: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])

    async def let_go(self, subscription: Subscription) -> None:
        """Ends a subscription for sure: whoever followed may be cancelled, and cancelled again while it waits here."""
        closing = asyncio.create_task(subscription.close(drain_s=0))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        await asyncio.shield(closing)

    async def closed(self) -> None:
        """Returns when nothing is being closed any more."""
        await asyncio.gather(*self._closing, return_exceptions=True)
