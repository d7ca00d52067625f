"""From facts to stored files: attempts that ended become rows, files are looked for, workers are told to let go."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import structlog

from schemas import limits
from schemas.artifacts import ArtifactChanged
from schemas.base import Message
from schemas.runs import AttemptEnded, EndedPage
from schemas.subjects import event, to_worker
from schemas.system import FeedPage
from schemas.workers import RetireArtifacts, RetireItem
from services.kit import outbox
from services.kit.artifact_store import ArtifactsAwayError, UnsafeArtifactError
from services.kit.artifacts import Artifacts
from services.kit.clock import Clock
from services.kit.database import Database, Transaction
from services.kit.orders import next_ring_ms
from services.kit.outbox import fact_of
from services.retention import artifact, policy
from services.retention.store import artifacts, orders, policies

SOURCE = "dispatcher"
LEDGER = "dispatcher.attempts"
"""While a position stands under this name, ended attempts are read anew from there on ("" from the first)."""
SUBJECTS = "ql3.evt.attempt."
log: structlog.stdlib.BoundLogger = structlog.get_logger("ql3.retention")


async def apply_feed(database: Database, clock: Clock, page: FeedPage, after: str | None = None) -> int:
    """Store one page of the dispatcher's facts together with the position behind it; how many ends it told of.

    `after` is the position that the page was asked for: a page that tells nothing and moves nowhere writes nothing.

    Position and rows are one transaction, so each fact is counted once, however often a page is read. After a gap the
    dispatcher's ended attempts are read anew (`apply_ended`), also if this process ends in between.
    """
    facts = [fact for item in page.items if (fact := fact_of(item, AttemptEnded)) is not None]
    now_ms = clock.now_ms()

    async def work(tx: Transaction) -> None:
        await _store(tx, facts, now_ms)
        if page.gap:
            await policies.move_position(tx, LEDGER, "", now_ms)
        if page.position is not None:
            await policies.move_position(tx, SOURCE, page.position, now_ms)

    if facts or page.gap or page.position != after:
        await database.transact(work)
    return len(facts)


async def apply_ended(database: Database, clock: Clock, page: EndedPage) -> int:
    """Store one page of ended attempts, and where the next begins; how many it told of."""
    now_ms = clock.now_ms()

    async def work(tx: Transaction) -> None:
        await _store(tx, page.items, now_ms)
        if page.next is None:
            await policies.forget_position(tx, LEDGER)
        else:
            await policies.move_position(tx, LEDGER, page.next, now_ms)

    await database.transact(work)
    return len(page.items)


async def _store(tx: Transaction, facts: Sequence[AttemptEnded], now_ms: int) -> None:
    if not facts:
        return
    await policies.seen(tx, (fact.project for fact in facts), now_ms)
    await artifacts.register(tx, facts, now_ms)
    # Attempts that are read a second time count twice; that costs purge orders which find nothing, and no more.
    hours = Counter((fact.project, policy.hour_of(fact.finished_at_ms)) for fact in facts)
    await orders.count_ended(tx, ((project, hour, count) for (project, hour), count in sorted(hours.items())))


async def look_for_files(database: Database, clock: Clock, store: Artifacts) -> bool | float | None:
    """Look for files that are due; True when more are due, otherwise seconds until the next look.

    Raises ArtifactsAwayError when the store answered for none of them.
    """
    now_ms = clock.now_ms()
    sought = await database.read(lambda tx: artifacts.to_look_for(tx, now_ms, limits.BATCH_ITEMS))
    full = len(sought) == limits.BATCH_ITEMS
    if sought:
        sizes = await store.run(_sizes, store, sought)
        looks = {
            item.id: artifact.look(
                found=sizes[item.id],
                size=item.size,
                looks=item.looks,
                finished_at_ms=item.finished_at_ms,
                now_ms=now_ms,
            )
            for item in sought
            if item.id in sizes
        }
        # What the store refuses goes behind the others. When it answers for none, all stays as it is, unless that
        # keeps others from being asked about.
        if looks or full:
            for item in sought:
                if item.id not in sizes:
                    looks[item.id] = artifact.unanswered(state=item.state, looks=item.looks, now_ms=now_ms)
            await database.transact(lambda tx: _looked(tx, sought, looks, now_ms))
        if not sizes:
            raise ArtifactsAwayError
    if full:
        return True
    following = await database.read(artifacts.next_look_ms)
    return None if following is None else max(0.0, (following - now_ms) / 1000)


def _sizes(store: Artifacts, sought: Sequence[artifacts.Sought]) -> dict[str, int | None]:
    """What is there of each; nothing for those that the store did not answer about."""
    sizes: dict[str, int | None] = {}

    def size(item: artifacts.Sought) -> None:
        try:
            sizes[item.id] = store.size(item.worker_id, item.id)
        except ArtifactsAwayError:
            pass  # an unmounted volume, or a refusal, says nothing about any file
        except UnsafeArtifactError:
            log.error("an artifact's file is not in a safe state", artifact=item.id)
            sizes[item.id] = None

    store.each(size, sought)
    return sizes


async def _looked(
    tx: Transaction, sought: Sequence[artifacts.Sought], looks: Mapping[str, artifact.Look], now_ms: int
) -> None:
    changed = await artifacts.looked(tx, looks, now_ms)
    stored = [item for item in sought if item.id in changed and looks[item.id].state == "stored"]
    await orders.open_retire(tx, ((item.attempt_id, item.worker_id, item.id) for item in stored), now_ms)
    told = [item for item in sought if item.id in changed and looks[item.id].state not in ("pending", item.state)]
    await outbox.facts(
        tx,
        [
            (
                event("artifact", item.project, item.id, looks[item.id].state),
                ArtifactChanged(
                    project=item.project,
                    artifact_id=item.id,
                    run_id=item.run_id,
                    attempt_id=item.attempt_id,
                    state=looks[item.id].state,
                    at_ms=now_ms,
                ),
            )
            for item in told
        ],
    )
    if stored:
        await _ring(tx, now_ms)


async def ring_retire(database: Database, clock: Clock) -> bool:
    """Send the orders to workers that are due (again); whether more may be due. Writes nothing when none is."""
    now_ms = clock.now_ms()
    if not await database.read(lambda tx: orders.any_due(tx, now_ms)):
        return False
    return await database.transact(lambda tx: _ring(tx, now_ms))


async def _ring(tx: Transaction, now_ms: int) -> bool:
    await orders.drop_retire(tx, now_ms - artifact.RING_FOR_MS)
    due = await orders.due_retire(tx, now_ms, limits.BATCH_ITEMS)
    by_worker: dict[str, list[RetireItem]] = defaultdict(list)
    for order in due:
        by_worker[order.worker_id].append(RetireItem(attempt_id=order.attempt_id, artifact_id=order.artifact_id))
    messages: list[tuple[str, Message]] = [
        (to_worker(worker, "retire"), RetireArtifacts(worker=worker, items=items))
        for worker, items in sorted(by_worker.items())
    ]
    await outbox.orders(tx, messages)
    await orders.rung_retire(tx, ((order.attempt_id, next_ring_ms(order.rings + 1, now_ms)) for order in due))
    return len(due) == limits.BATCH_ITEMS
