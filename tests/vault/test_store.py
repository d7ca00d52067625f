"""Envelopes are appended, never changed; what is asked for comes in order, absent ones as nothing."""

from __future__ import annotations

import msgspec
import pytest

from services.kit.database import Database, NotPermitted, Statement
from services.vault import store
from services.vault.envelope import Envelope, EnvelopeFacts, encrypt

KEY = bytes(32)


@pytest.fixture
async def database(database_for) -> Database:
    return await database_for("vault")


def envelope(name: str = "token", version: int = 1, project: str = "default", mutation: int = 1) -> Envelope:
    facts = EnvelopeFacts(
        project=project,
        name=name,
        version=version,
        mutation_id=f"01990000-0000-7000-8000-{mutation:012d}",
        key_id=f"k-{version}",
        created_at_ms=1000 + version,
    )
    return encrypt(facts, f"{name}{version}".encode(), KEY)


async def insert(database: Database, *envelopes: Envelope) -> list[bool]:
    async def work(tx) -> list[bool]:
        return [await store.insert(tx, item) for item in envelopes]

    return await database.transact(work)


async def test_a_version_and_a_mutation_are_taken_once(database: Database) -> None:
    assert await insert(database, envelope(version=1, mutation=1)) == [True]
    assert await insert(database, envelope(version=1, mutation=2), envelope(version=2, mutation=1)) == [False, False]
    assert await insert(database, envelope(version=2, mutation=2)) == [True]
    assert await database.read(lambda tx: store.current_version(tx, "default", "token")) == 2
    assert await database.read(lambda tx: store.current_version(tx, "other", "token")) == 0


async def test_a_stored_envelope_comes_back_as_it_was(database: Database) -> None:
    stored = envelope()
    await insert(database, stored)
    found = await database.read(lambda tx: store.find_by_mutation(tx, "default", "token", stored.mutation_id))
    assert found == stored
    assert await database.read(lambda tx: store.find_by_mutation(tx, "other", "token", stored.mutation_id)) is None


async def test_resolving_keeps_order_with_pinned_current_absent_and_repeated(database: Database) -> None:
    await insert(
        database,
        envelope("a", 1, mutation=1),
        envelope("a", 2, mutation=2),
        envelope("b", 1, mutation=3),
        envelope("c", 1, project="other", mutation=4),
    )
    wanted = [("b", None), ("a", 1), ("a", None), ("c", None), ("a", 3), ("a", 1)]
    found = await database.read(lambda tx: store.resolve(tx, "default", wanted))
    assert [(item.name, item.version) if item else None for item in found] == [
        ("b", 1),
        ("a", 1),
        ("a", 2),
        None,
        None,
        ("a", 1),
    ]
    assert await database.read(lambda tx: store.resolve(tx, "default", [])) == []


async def test_the_list_shows_current_versions_by_name(database: Database) -> None:
    await insert(
        database,
        envelope("b", 1, mutation=1),
        envelope("a", 1, mutation=2),
        envelope("a", 2, mutation=3),
        envelope("z", 1, project="other", mutation=4),
    )
    page = await database.read(lambda tx: store.page(tx, "default", "", 10))
    assert [(item.name, item.version) for item in page] == [("a", 2), ("b", 1)]
    rest = await database.read(lambda tx: store.page(tx, "default", "a", 10))
    assert [item.name for item in rest] == ["b"]
    assert await database.read(store.key_ids) == {"k-1", "k-2"}


@pytest.mark.parametrize("sql", ["DELETE FROM secret_envelopes", "UPDATE secret_envelopes SET key_id = 'x'"])
async def test_nothing_changes_or_removes_an_envelope(database: Database, sql: str) -> None:
    await insert(database, envelope())
    with pytest.raises(NotPermitted):
        await database.transact(lambda tx: tx.execute(Statement(sql)))


async def test_a_row_that_was_moved_does_not_open(database: Database) -> None:
    from schemas.errors import Ql3Error
    from services.vault.envelope import decrypt

    moved = msgspec.structs.replace(envelope("theirs", project="other"), project="default", name="mine")
    await insert(database, moved)
    (found,) = await database.read(lambda tx: store.resolve(tx, "default", [("mine", None)]))
    assert found is not None
    with pytest.raises(Ql3Error, match="could not be opened"):
        decrypt(found, KEY)
