"""Repeats of a change with the same Idempotency-Key."""

from __future__ import annotations

from typing import NamedTuple

from services.kit.database import Statement, Transaction

INSERT = Statement(
    "INSERT INTO idempotency_records (actor, idempotency_key, request_digest, mutation_id, created_at_ms) "
    "VALUES ($1, $2, $3, $4, $5) ON CONFLICT (actor, idempotency_key) DO NOTHING"
)
RECORD = Statement(
    "SELECT request_digest, mutation_id, status, body FROM idempotency_records "
    "WHERE actor = $1 AND idempotency_key = $2"
)
ANSWER = Statement(
    "UPDATE idempotency_records SET status = $3, body = $4 WHERE actor = $1 AND idempotency_key = $2 AND status IS NULL"
)
FORGET = Statement("DELETE FROM idempotency_records WHERE created_at_ms < $1", long=True)


class Record(NamedTuple):
    """What a key stands for; without a status it was not answered yet."""

    request_digest: str
    mutation_id: str
    status: int | None
    body: str | None


async def begin(tx: Transaction, actor: str, key: str, request_digest: str, mutation_id: str, now_ms: int) -> Record:
    """The record of this key: the one that is there, or a new one."""
    await tx.execute(INSERT, actor, key, request_digest, mutation_id, now_ms)
    row = await tx.fetch_one(RECORD, actor, key)
    assert row is not None
    return Record(row["request_digest"], row["mutation_id"], row["status"], row["body"])


async def answer(tx: Transaction, actor: str, key: str, status: int, body: str) -> None:
    """Keeps what was answered."""
    await tx.execute(ANSWER, actor, key, status, body)


async def forget(tx: Transaction, before_ms: int) -> None:
    """Deletes records older than a time."""
    await tx.execute(FORGET, before_ms)
