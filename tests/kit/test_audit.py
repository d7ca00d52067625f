"""The audit ledger: written with the mutation, chained in commit order, telling when somebody touched it."""

from __future__ import annotations

import asyncio

import pytest

from schemas.errors import Ql3Error
from schemas.identity import Actor, PolicyDecision, Subject
from schemas.paging import Page
from services.kit import audit
from services.kit.audit import Sealer, verify
from services.kit.database import Database, NotPermitted, Statement, Transaction
from tests.fixtures_database import DatabaseFor, Tamper, reopen, shift_clock

ACTOR = Actor(
    type="user",
    id="local-console",
    authentication_id="session-1",
    assurance="local_console",
    authenticated_at_ms=1,
    expires_at_ms=2,
)
ALLOWED = PolicyDecision(effect="allow", reasons=["local_console"], project_version=3, binding_version=None)


async def record(database: Database, *targets: str) -> None:
    async def work(tx: Transaction) -> None:
        for target in targets:
            await audit.append(tx, ACTOR, "task.update", "default", target, ALLOWED, {"version": 2})

    await database.transact(work)


async def seal(database: Database) -> None:
    sealer = Sealer(database)
    while await sealer.step():
        pass


async def test_a_row_tells_who_did_what_under_which_fence(database: Database):
    await record(database, "backup")
    page = await database.read(lambda tx: audit.read_page(tx, None, Page()))
    (event,) = page.items
    assert event.actor == Subject(type="user", id="local-console")
    assert event.authentication_id == "session-1"
    assert (event.action, event.project, event.target, event.outcome) == ("task.update", "default", "backup", "allow")
    assert event.detail["version"] == 2
    assert event.detail["policy"]["project_version"] == 3
    assert event.position is None
    assert event.service == "plain"


async def test_no_mutation_no_row(database: Database):
    async def work(tx: Transaction) -> None:
        await audit.append(tx, None, "sign-in", None, None, "deny")
        raise LookupError

    with pytest.raises(LookupError):
        await database.transact(work)
    assert (await database.read(lambda tx: audit.read_page(tx, None, Page()))).items == []
    assert (await verify(database)).unsealed == 0


async def test_detail_is_bounded(database: Database):
    with pytest.raises(Ql3Error) as refused:
        await database.transact(lambda tx: audit.append(tx, None, "x", None, None, "allow", {"text": "x" * 5000}))
    assert refused.value.code == "too_large"


async def test_rows_are_sealed_in_commit_order_and_verify(database: Database):
    await record(database, "a", "b")
    assert database.bell(audit.BELL).is_set()
    verdict = await verify(database)
    assert (verdict.sealed, verdict.unsealed, verdict.intact) == (0, 2, True)
    await seal(database)
    await record(database, "c")
    verdict = await verify(database)
    assert (verdict.sealed, verdict.unsealed, verdict.intact) == (2, 1, True)
    await seal(database)
    page = await database.read(lambda tx: audit.read_page(tx, None, Page()))
    assert [(event.target, event.position) for event in page.items] == [("c", 3), ("b", 2), ("a", 1)]


async def test_pages_follow_a_cursor_and_a_project(database: Database):
    await record(database, "a", "b", "c")

    async def other(tx: Transaction) -> None:
        await audit.append(tx, ACTOR, "task.update", "other", "z", "allow")

    await database.transact(other)
    seen, cursor = [], None
    while True:
        page = await database.read(lambda tx, at=cursor: audit.read_page(tx, "default", Page(limit=2, cursor=at)))
        seen += [event.target for event in page.items]
        cursor = page.next
        if cursor is None:
            break
    assert seen == ["c", "b", "a"]
    with pytest.raises(Ql3Error):
        await database.read(lambda tx: audit.read_page(tx, None, Page(cursor="' OR 1=1")))


async def test_a_page_fits_into_a_message(database: Database):
    async def work(tx: Transaction) -> None:
        for n in range(40):
            await audit.append(tx, None, "x", None, str(n), "allow", {"text": "x" * 4000})

    await database.transact(work)
    seen, pages, cursor = [], 0, None
    while pages == 0 or cursor is not None:
        page = await database.read(lambda tx, at=cursor: audit.read_page(tx, None, Page(limit=200, cursor=at)))
        seen += [event.target for event in page.items]
        pages, cursor = pages + 1, page.next
    assert seen == [str(n) for n in reversed(range(40))]
    assert pages > 1


async def test_a_row_that_commits_late_is_sealed_later_and_not_passed_over(database_on: DatabaseFor):
    database = await database_on("postgresql", "plain")
    other = await reopen(database)
    written, may_commit = asyncio.Event(), asyncio.Event()

    async def slow(tx: Transaction) -> None:
        await audit.append(tx, ACTOR, "task.update", "default", "late", "allow")
        written.set()
        await may_commit.wait()

    late = asyncio.create_task(other.transact(slow))
    await asyncio.wait_for(written.wait(), 10)
    await record(database, "early")
    await seal(database)
    may_commit.set()
    await late
    await seal(database)
    page = await database.read(lambda tx: audit.read_page(tx, None, Page()))
    assert {event.target: event.position for event in page.items} == {"early": 1, "late": 2}
    assert (await verify(database)).intact
    await other.close()


async def test_replicas_that_seal_at_once_make_one_chain(database_on: DatabaseFor):
    database = await database_on("postgresql", "plain")
    other = await reopen(database)
    await record(database, *(f"t{n}" for n in range(40)))
    await asyncio.gather(*(seal(one) for one in (database, other, database, other)))
    verdict = await verify(database)
    assert (verdict.sealed, verdict.unsealed, verdict.intact) == (40, 0, True)
    await other.close()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE audit_events SET action = 'x'",
        "DELETE FROM audit_events",
        "UPDATE audit_seals SET hash = 'x'",
        "DELETE FROM audit_seals",
        "DELETE FROM audit_checkpoints",
    ],
)
async def test_a_service_cannot_change_its_ledger(database: Database, statement: str):
    await record(database, "a")
    await seal(database)
    checkpoint = Statement("INSERT INTO audit_checkpoints (position, hash, created_at_ms) VALUES (0, '', 0)")
    await database.transact(lambda tx: tx.execute(checkpoint))
    with pytest.raises(NotPermitted):
        await database.transact(lambda tx: tx.execute(Statement(statement)))


@pytest.mark.parametrize(
    ("tampering", "problem"),
    [
        ("UPDATE audit_events SET action = 'x' WHERE target = 'b'", "position 2: its event was edited"),
        ("DELETE FROM audit_events WHERE target = 'b'", "position 2: its event is missing"),
        ("DELETE FROM audit_seals WHERE position = 2", "positions 2 to 2: missing"),
        ("DELETE FROM audit_seals WHERE position = 3", "positions 3 to 3: missing"),
        (
            "UPDATE audit_seals SET position = CASE position WHEN 1 THEN 102 ELSE 101 END WHERE position < 3;"
            "UPDATE audit_seals SET position = position - 100 WHERE position > 100",
            "position 1: its place or its seal was changed",
        ),
        (
            "INSERT INTO audit_events (id, occurred_at_ms, action, decision, detail) VALUES ('0', 1, 'x', 'y', '{}')",
            "event 0: left out of the chain",
        ),
    ],
)
async def test_tampering_shows(database: Database, tamper: Tamper, tampering: str, problem: str):
    await record(database, "a", "b", "c")
    await seal(database)
    await tamper(database, ("audit_events", "audit_seals"), tampering)
    verdict = await verify(database)
    assert not verdict.intact
    assert problem in verdict.problems


async def test_a_purge_leaves_a_checkpoint_and_the_rest_verifies(database: Database):
    await record(database, "a", "b")
    await seal(database)
    await shift_clock(database, 60_000)
    before_ms = await database.transact(lambda tx: tx.now_ms())
    await record(database, "c")
    await seal(database)
    assert await database.transact(lambda tx: audit.purge(tx, before_ms)) == 2
    assert await database.transact(lambda tx: audit.purge(tx, before_ms)) == 0
    verdict = await verify(database)
    assert (verdict.sealed, verdict.intact) == (1, True)
    page = await database.read(lambda tx: audit.read_page(tx, None, Page()))
    assert [event.target for event in page.items] == ["c"]
    await record(database, "d")
    await seal(database)
    assert (await verify(database)).intact
