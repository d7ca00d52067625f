"""What both database adapters promise alike."""

from __future__ import annotations

from services.kit.database import Database, Statement

_CREATE = Statement("CREATE TABLE thing (id TEXT PRIMARY KEY, n INTEGER NOT NULL)")


async def test_smoke(database: Database):
    t = await database.transact(lambda tx: tx.now_ms())
    assert t > 1_600_000_000_000
    assert await database.read(lambda tx: tx.now_ms()) >= t
