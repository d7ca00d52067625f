"""Refused writes, recorded: an event of the run and an audit row, once per holder and reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from schemas.identity import Subject
from services.dispatcher.lease import Held, refusal
from services.dispatcher.records import Case
from services.dispatcher.store import cases
from services.dispatcher.store.cases import Change
from services.kit import audit
from services.kit.database import Transaction


class Rejection(NamedTuple):
    """One refused write about a run that exists."""

    run_id: str
    code: str
    what: str
    held: Held
    worker: str


async def record(tx: Transaction, rejections: Sequence[Rejection], held: Mapping[str, Case]) -> None:
    """Records rejections about runs that the caller holds (`held`, as they stand now)."""
    if not rejections:
        return
    known = await cases.dedupe_keys(tx, {rejection.run_id for rejection in rejections})
    now_held = dict(held)
    changes: dict[str, Change] = {}
    for rejection in rejections:
        before = now_held[rejection.run_id]
        after = refusal(before, rejection.code, rejection.what, rejection.held, rejection.worker)
        event = after.events[-1]
        if (rejection.run_id, event.dedupe_key or "") in known:
            continue
        known.add((rejection.run_id, event.dedupe_key or ""))
        now_held[rejection.run_id] = after
        first = changes[rejection.run_id].before if rejection.run_id in changes else before
        changes[rejection.run_id] = Change(first, after)
        await audit.append(
            tx,
            Subject(type="worker", id=rejection.worker),
            rejection.what,
            before.run.project_id,
            rejection.held.attempt_id,
            rejection.code,
            {"run": rejection.run_id, "lease_generation": rejection.held.lease_generation},
        )
    await cases.write(tx, list(changes.values()))
