"""What was closed long ago goes as a whole; what is open, young or in doubt stays, and so does the audit ledger."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.approvals import ActionRecover, ApprovalCreate
from services.approval import executions, purging
from services.approval.asking import Asking
from services.approval.purging import DAY_MS, KEPT_MS, Purging
from services.approval.store import purge
from services.approval.store import requests as rows
from services.kit import audit
from services.kit.database import Database, IntegrityViolation, NotPermitted, Statement
from services.kit.ids import new_id
from tests.approval.conftest import HOUR, Works, console, hold
from tests.fixtures_database import shift_clock

TABLES = [
    "approval_requests",
    "approval_decisions",
    "approval_endings",
    "approved_action_plans",
    "approved_action_dispatches",
    "approved_action_dispatch_executions",
    "approved_action_receipts",
    "approved_action_recovery_controls",
    "approved_action_recovery_resolutions",
    "approved_action_recovery_authorizations",
]


async def counts(database: Database) -> dict[str, int]:
    found: dict[str, int] = {}
    for table in TABLES:
        row = await database.read(lambda tx, table=table: tx.fetch_one(Statement(f"SELECT count(*) AS n FROM {table}")))
        assert row is not None
        found[table] = row["n"]
    return found


async def rejected(works: Works) -> str:
    order = hold(now_ms=works.clock.now_ms())
    await works.approvals.hold([order])
    await works.decided(order.request_id, "rejected")
    return order.request_id


async def told(works: Works, request_id: str) -> None:
    now_ms = works.clock.now_ms()
    await works.database.transact(lambda tx: rows.ending_answered(tx, request_id, "ended", now_ms))


async def by_an_agent(works: Works) -> str:
    bot = await works.person("bot", "operator", kind="agent")
    asking = Asking(works.gate, works.approvals, {"run.release": works.receiver})
    wanted = ApprovalCreate(
        actor=bot, project="default", id=new_id(), action_type="run.release", plan={"x": 1}, ttl_ms=HOUR
    )
    await asking.create(wanted)
    await works.decided(wanted.id, "approved")
    assert await works.hand_over.one(wanted.id)
    return wanted.id


async def resolved_by_a_person(works: Works) -> None:
    dispatch, lease = await works.started()
    await shift_clock(works.database, executions.LEASE_MS)
    await works.reconciler.recover(
        ActionRecover(
            actor=console(works.clock.now_ms()),
            project="default",
            dispatch=dispatch.id,
            mutation_id=new_id(),
            decision="confirm_succeeded",
            reason_code="seen",
            expected_execution_version=lease.version,
            expected_recovery_version=0,
        )
    )


async def later(works: Works, ms: int) -> None:
    """The wall shows so long after the database's clock, which judges when executions ended."""
    now_ms = await works.database.read(lambda tx: tx.now_ms())
    works.clock.advance(now_ms + ms - works.clock.now_ms())


async def test_what_was_closed_long_ago_goes_as_a_whole(works: Works) -> None:
    await later(works, 0)
    await told(works, await rejected(works))
    asked = await by_an_agent(works)
    await works.executor.run((await works.dispatch_of(asked)).id, {})
    await resolved_by_a_person(works)
    before = await counts(works.database)
    assert all(before.values()), before
    acts = await works.database.read(lambda tx: tx.fetch(Statement("SELECT id FROM audit_events")))
    cleaning = Purging(works.gate)
    await later(works, KEPT_MS - DAY_MS)
    await cleaning.step()
    assert await counts(works.database) == before
    await later(works, KEPT_MS + 2 * DAY_MS)
    assert await cleaning.step() is None
    assert await counts(works.database) == dict.fromkeys(TABLES, 0)
    after = await works.database.read(lambda tx: tx.fetch(Statement("SELECT id, action, detail FROM audit_events")))
    assert {row["id"] for row in acts} < {row["id"] for row in after}
    (act,) = [row for row in after if row["action"] == "approvals.purge"]
    assert '"requests":3' in act["detail"].replace(" ", "")
    assert (await audit.verify(works.database)).intact


async def test_what_is_open_young_or_in_doubt_stays(works: Works) -> None:
    untold = await rejected(works)
    expired = hold(now_ms=works.clock.now_ms())
    await works.approvals.hold([expired])
    doubtful, _ = await works.started()
    waiting = await works.dispatched()
    await later(works, KEPT_MS + 2 * DAY_MS)
    young = hold(now_ms=works.clock.now_ms())
    await works.approvals.hold([young])
    before = await counts(works.database)
    assert await Purging(works.gate).step() is None
    assert await counts(works.database) == before
    kept = await works.database.read(
        lambda tx: rows.many(
            tx, [untold, expired.request_id, doubtful.approval_id, waiting.approval_id, young.request_id]
        )
    )
    assert len(kept) == 5


async def test_it_goes_in_pages(works: Works, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(5):
        await told(works, await rejected(works))
    await later(works, KEPT_MS + 2 * DAY_MS)
    monkeypatch.setattr(purging, "PAGE", 2)
    cleaning = Purging(works.gate)
    left: list[int] = []
    while await cleaning.step():
        left.append((await counts(works.database))["approval_requests"])
    assert (left, (await counts(works.database))["approval_requests"]) == ([3, 1], 0)


async def test_a_failure_midway_removes_nothing(works: Works, monkeypatch: pytest.MonkeyPatch) -> None:
    await told(works, await rejected(works))
    await later(works, KEPT_MS + 2 * DAY_MS)
    before = await counts(works.database)

    async def broken(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(audit, "append", broken)
    with pytest.raises(RuntimeError):
        await Purging(works.gate).step()
    monkeypatch.undo()
    assert await counts(works.database) == before
    assert await Purging(works.gate).step() is None
    assert (await counts(works.database))["approval_requests"] == 0


async def test_nothing_above_the_watermark_goes(works: Works) -> None:
    request_id = await rejected(works)
    for sql in (
        "DELETE FROM approval_decisions",
        "UPDATE approval_decisions SET reason = 'x'",
    ):
        with pytest.raises(NotPermitted):
            await works.database.transact(lambda tx, sql=sql: tx.execute(Statement(sql)))
    found = [purge.Closed(request_id, None, "-")]
    with pytest.raises(IntegrityViolation):
        await works.database.transact(lambda tx: purge.delete(tx, found, 1))
    assert (await counts(works.database))["approval_decisions"] == 1
