"""What grows old: logs are deleted and tombstoned, ended runs are purged on order, old tombstones are forgotten."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import structlog

from schemas import limits
from schemas.artifacts import ArtifactChanged, PurgeRuns
from schemas.subjects import command, event
from services.kit import outbox
from services.kit.artifact_store import ArtifactsAwayError, Retired, UnsafeArtifactError
from services.kit.artifacts import Artifacts
from services.kit.clock import Clock
from services.kit.database import Database, Transaction
from services.kit.ids import new_id
from services.kit.orders import next_ring_ms
from services.retention import artifact, policy
from services.retention.artifact import Candidate
from services.retention.policy import Ages
from services.retention.store import artifacts, orders, policies

log: structlog.stdlib.BoundLogger = structlog.get_logger("ql3.retention")


class Sweep:
    """One pass over what is old. Every step is bounded and can be repeated after a crash at any point."""

    def __init__(self, *, database: Database, clock: Clock, store: Artifacts, defaults: Ages, page: int = 64) -> None:
        self._database = database
        self._clock = clock
        self._store = store
        self._defaults = defaults
        self._page = page

    async def logs(self) -> bool:
        """Retire one page of old logs in each project that has some; whether more may be old."""
        now_ms = self._clock.now_ms()
        free = await self._store.run(self._store.free_bytes)
        pressure = free is not None and free < self._defaults.free_bytes
        if pressure:
            log.warning("little free space is left for artifacts; old logs go earlier")
        more = False
        for project in await self._database.read(policies.oldest):
            age_ms = policy.logs_age(project.logs_ms, self._defaults, pressure=pressure)
            if project.oldest_ms is not None and project.oldest_ms <= policy.cutoff(now_ms, age_ms):
                more = await self._logs_of(project.project, age_ms, now_ms) or more
        return more

    async def _logs_of(self, project: str, age_ms: int, now_ms: int) -> bool:
        cutoff_ms = policy.cutoff(now_ms, age_ms)

        async def find(tx: Transaction) -> tuple[artifacts.Cursor, list[Candidate]]:
            at = await artifacts.cursor(tx, project)
            return at, await artifacts.candidates(
                tx,
                project,
                cutoff_ms=cutoff_ms,
                unended_cutoff_ms=policy.cutoff(cutoff_ms, policy.UNENDED_GRACE_MS),
                after=at,
                limit=self._page,
            )

        at, found = await self._database.read(find)
        # Files first, then tombstones: a crash in between finds the file absent and records that, never a deletion
        # that did not happen. A file that cannot be removed is passed over and met again by the next full pass.
        retired, asked = await self._store.run(_retire, self._store, found)
        full = asked == self._page
        behind = found[max(asked, 1) - 1] if full or asked < len(found) else None
        if not found and at.artifact_id == "":
            return False

        async def record(tx: Transaction) -> bool:
            if not await artifacts.move_cursor(tx, project, at.version, behind, now_ms):
                log.info("another sweep is at work in this project", project=project)
            await artifacts.bury(tx, project, retired, age_ms=age_ms, now_ms=now_ms)
            # A file that never came into the store as a whole may still lie at its worker.
            kept = [
                candidate
                for candidate, outcome in retired
                if outcome.disposition == "already_absent" or candidate.state != "stored"
            ]
            await orders.open_retire(tx, ((item.attempt_id, item.worker_id, item.artifact_id) for item in kept), now_ms)
            await outbox.facts(tx, [_gone(project, candidate, now_ms) for candidate, _ in retired])
            return full

        return await self._database.transact(record)

    async def runs(self) -> bool:
        """Open purge orders for hours whose runs are old enough, and ring those that are due; whether more are."""
        now_ms = self._clock.now_ms()

        async def work(tx: Transaction) -> bool:
            for old in await orders.purgeable(tx):
                before_ms = policy.cutoff(now_ms, policy.runs_age(old.runs_ms, self._defaults))
                if old.hour_ms + policy.HOUR_MS <= before_ms:
                    await orders.open_purge(
                        tx, old.project, new_id(), old.hour_ms, old.hour_ms + policy.HOUR_MS, now_ms
                    )
            due = await orders.due_purge(tx, now_ms, limits.BATCH_ITEMS)
            for order in due:
                await outbox.order(
                    tx,
                    command("dispatcher", "purge"),
                    PurgeRuns(
                        order_id=order.order_id, project=order.project, finished_before_ms=order.finished_before_ms
                    ),
                )
                await orders.rung_purge(tx, order.order_id, next_ring_ms(order.rings + 1, now_ms))
            return len(due) == limits.BATCH_ITEMS

        return await self._database.transact(work)

    async def forget(self) -> bool:
        """Delete rows and tombstones whose runs are purged too; whether more are old enough."""
        now_ms = self._clock.now_ms()
        more = False
        for project in await self._database.read(policies.oldest):
            finished_before = policy.cutoff(now_ms, policy.runs_age(project.runs_ms, self._defaults))
            recorded_before = policy.cutoff(now_ms, policy.TOMBSTONE_MS)
            forgotten = await self._database.transact(
                lambda tx, name=project.project, finished=finished_before, recorded=recorded_before: artifacts.forget(
                    tx, name, finished_before_ms=finished, recorded_before_ms=recorded, limit=self._page
                )
            )
            more = more or forgotten == self._page
        return more


async def close_purges(tx: Transaction, ids: Sequence[str]) -> None:
    """The dispatcher has committed these purge orders."""
    for project, hour_ms in await orders.close_purge(tx, ids):
        left = artifact.purge_left(await orders.attempts_of_hour(tx, project, hour_ms))
        await orders.set_hour(tx, project, hour_ms, left)


def _retire(store: Artifacts, found: Sequence[Candidate]) -> tuple[list[tuple[Candidate, Retired]], int]:
    """What was retired, and up to how many the store was asked: when it is away, the others wait for a later step."""
    away = threading.Event()

    def retire(candidate: Candidate) -> Retired | Exception | None:
        if away.is_set():
            return None
        try:
            return store.retire(candidate.worker_id, candidate.artifact_id)
        except ArtifactsAwayError as error:
            away.set()
            return error
        except (UnsafeArtifactError, OSError) as error:
            log.error("a log could not be removed", artifact=candidate.artifact_id, error=type(error).__name__)
            return error

    outcomes = list(zip(found, store.each(retire, found), strict=True))
    if away.is_set():
        log.error("the artifact store is away; old logs wait")
    asked = next((number for number, (_, outcome) in enumerate(outcomes) if outcome is None), len(found))
    return [(candidate, outcome) for candidate, outcome in outcomes if isinstance(outcome, Retired)], asked


def _gone(project: str, candidate: Candidate, now_ms: int) -> tuple[str, ArtifactChanged]:
    return (
        event("artifact", project, candidate.artifact_id, "gone"),
        ArtifactChanged(
            project=project,
            artifact_id=candidate.artifact_id,
            run_id=candidate.run_id,
            attempt_id=candidate.attempt_id,
            state="gone",
            at_ms=now_ms,
        ),
    )
