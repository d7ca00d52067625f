"""Ends are kept and told whatever fails once on the way."""

from __future__ import annotations

from typing import Any

import pytest

from services.kit.database import DatabaseUnavailable
from services.worker import store
from tests.worker.ledger import Ledger


async def test_the_end_of_a_long_log_is_told_though_the_journal_failed_once(
    worker: Any, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []
    keep = store.keep

    async def keeps_later(tx: Any, rows: Any, now_ms: int) -> None:
        tries.append(len(rows))
        if len(tries) == 1:
            raise DatabaseUnavailable("The disk is full.")
        await keep(tx, rows, now_ms)

    monkeypatch.setattr(store, "keep", keeps_later)
    await worker.start()
    attempt = await ledger.offer("sh", "-c", "head -c 400000 /dev/zero; exit 3")
    body = await ledger.end(attempt)
    assert (body.kind, body.exit_code, tries) == ("ended", 3, [1, 1])
    assert body.log is not None
    assert body.log.size == 400_000
    assert body.log.sha256 is not None
