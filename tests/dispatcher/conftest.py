"""The ledger's fixtures: on both databases."""

from __future__ import annotations

import pytest_asyncio

from tests.dispatcher.house import Hand, Ledger
from tests.fixtures_database import DatabaseFor


@pytest_asyncio.fixture
async def ledger(database_for: DatabaseFor) -> Ledger:
    """An empty ledger; the test runs on both dialects."""
    ledger = Ledger(await database_for("dispatcher"))
    await ledger.outage_over()
    return ledger


@pytest_asyncio.fixture
async def hand(ledger: Ledger) -> Hand:
    """A registered worker with 8 slots."""
    hand = Hand(ledger)
    await hand.register()
    return hand
