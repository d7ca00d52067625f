"""Retention: knows which logs there are, reads them, and removes them and old runs when they are old enough."""

from __future__ import annotations

import asyncio
import functools

import structlog

from schemas import limits
from schemas.artifacts import (
    ArtifactList,
    ArtifactPage,
    ArtifactRange,
    ArtifactRead,
    Hold,
    HoldAnswer,
    HoldList,
    HoldPage,
    HoldSet,
    RetentionAnswer,
    RetentionPolicy,
    RetentionRead,
    RetentionSet,
)
from schemas.endpoints import (
    ARTIFACTS_LIST,
    ARTIFACTS_READ,
    ARTIFACTS_RETIRED,
    ATTEMPTS_ENDED,
    FEED_READ,
    HOLDS_LIST,
    HOLDS_SET,
    RETENTION_GET,
    RETENTION_SET,
)
from schemas.errors import Ql3Error
from schemas.ids import is_id
from schemas.runs import EndedRead
from schemas.system import Done, FeedRead
from schemas.workers import ArtifactsRetired
from services.kit import audit
from services.kit.artifact_store import UnsafeArtifactError
from services.kit.artifacts import open_artifacts
from services.kit.bus import Bus, Caller, Delivery, Route
from services.kit.clock import Clock
from services.kit.config import Config
from services.kit.database import Database, Transaction
from services.kit.health import Health
from services.kit.loops import Loop
from services.kit.policy import PolicyClient
from services.kit.standing import standing_routes
from services.kit.upkeep import upkeep
from services.kit.version import VERSION
from services.retention import intake, policy, sweep
from services.retention.store import artifacts, orders, policies

NAME = "retention"
FACTS_PAUSE_S = 0.25
"""Facts come by the thousand; reading the feed a few times a second gathers them into one transaction."""
SWEEP_S = 60.0
RING_S = 1.0
FAILURES = 3
"""So many looks in a row may fail before that is more than a hiccup."""
_WHOLE_PROJECT = "project"

log: structlog.stdlib.BoundLogger = structlog.get_logger("ql3.retention")


class RetentionService:
    """Works on the artifact store of the configuration, into which the workers publish."""

    def __init__(self, *, config: Config, database: Database, bus: Bus, clock: Clock) -> None:
        self._database = database
        self._bus = bus
        self._clock = clock
        self._store = open_artifacts(config)
        self._defaults = policy.defaults(config.project_logs_ms, edge=config.profile == "edge")
        self._policy = PolicyClient(bus, clock=clock)
        self._sweep = sweep.Sweep(database=database, clock=clock, store=self._store, defaults=self._defaults)
        self._facts = Loop("retention.facts", self._pull_facts, every_s=limits.FEED_PULL_S)
        self._looks = Loop("retention.looks", self._look, every_s=limits.FEED_PULL_S)
        self._rings = Loop("retention.rings", self._ring, every_s=RING_S)
        # Apart, because a store that is away must not keep old runs.
        self._old_logs = Loop("retention.logs", self._sweep.logs, every_s=SWEEP_S)
        self._old_runs = Loop("retention.runs", self._sweep_runs, every_s=SWEEP_S)
        self._loops = (self._facts, self._looks, self._rings, self._old_logs, self._old_runs, *upkeep(database, bus))

    # -- facts and files

    async def _pull_facts(self) -> bool | float | None:
        at = await self._database.read(functools.partial(policies.position, source=intake.SOURCE))
        page = await self._bus.request(
            FEED_READ[intake.SOURCE], FeedRead(after=at, subjects=[intake.SUBJECTS], limit=limits.BATCH_ITEMS)
        )
        if page.gap:
            log.warning("facts of the dispatcher are kept no longer; its ended attempts are read anew")
        told = await intake.apply_feed(self._database, self._clock, page, at)
        anew = await self._read_anew()
        if told or anew:
            self._looks.ring()
        if page.more or anew is not None:
            return True
        # The bell may ring for every fact; the pause is what makes a batch of them.
        await asyncio.sleep(FACTS_PAUSE_S)
        return None

    async def _read_anew(self) -> int | None:
        """One page of ended attempts after a gap; None when there is nothing to read."""
        after = await self._database.read(functools.partial(policies.position, source=intake.LEDGER))
        if after is None:
            return None
        page = await self._bus.request(ATTEMPTS_ENDED, EndedRead(after=after or None))
        return await intake.apply_ended(self._database, self._clock, page)

    async def _heard_fact(self, _delivery: Delivery) -> None:
        self._facts.ring()

    async def _look(self) -> bool | float | None:
        return await intake.look_for_files(self._database, self._clock, self._store)

    async def _ring(self) -> bool:
        return await intake.ring_retire(self._database, self._clock)

    async def _sweep_runs(self) -> bool:
        more = [await self._sweep.runs(), await self._sweep.forget()]
        return any(more)

    async def worker_retired(self, message: ArtifactsRetired, caller: Caller) -> Done:
        """A worker keeps these attempts' logs no more. It closes its own orders and nobody else's."""
        if caller.token is None:
            raise Ql3Error("fence_rejected")
        worker = caller.token
        await self._database.transact(lambda tx: orders.close_retire(tx, worker, message.attempt_ids))
        return Done()

    async def _heard_ack(self, ids: list[str]) -> None:
        await self._database.transact(lambda tx: sweep.close_purges(tx, ids))
        self._old_runs.ring()

    # -- what people read

    async def list_artifacts(self, message: ArtifactList, _caller: Caller) -> ArtifactPage:
        """Artifacts of a run, in the order of their ids."""
        await self._policy.require(message.actor, message.project, "artifact.read")
        after = message.page.cursor or ""
        if after and not is_id(after):
            raise Ql3Error("invalid", "The cursor is not one of ours.", field="page.cursor")
        limit = message.page.limit
        items = await self._database.read(
            lambda tx: artifacts.of_run(tx, message.project, message.run, after, limit + 1)
        )
        return ArtifactPage(items=items[:limit], next=items[limit - 1].id if len(items) > limit else None)

    async def read_artifact(self, message: ArtifactRead, _caller: Caller) -> ArtifactRange:
        """Bytes of an attempt's log, exactly as written.

        Raises `not_found`, `gone` once a tombstone stands for it, or `unavailable` with the state in its data while the
        file is not in the store: never an empty answer for bytes that exist.
        """
        await self._policy.require(message.actor, message.project, "artifact.read")
        found = await self._found(message)
        try:
            stored = await self._store.run(
                self._store.read, found.worker_id, found.artifact.id, message.offset, message.length
            )
        except UnsafeArtifactError as error:
            raise Ql3Error("unavailable", "The artifact store cannot be read.") from error
        if stored is not None and (found.artifact.state == "stored" or stored.total == found.artifact.size):
            return ArtifactRange(artifact=found.artifact, offset=stored.start, data=stored.data)
        # The sweep may have been faster than this read: its tombstone tells.
        found = await self._found(message)
        raise Ql3Error("unavailable", "The log is not in the store.", data={"state": found.artifact.state})

    async def _found(self, message: ArtifactRead) -> artifacts.Found:
        found = await self._database.read(lambda tx: artifacts.of_attempt(tx, message.project, message.attempt_id))
        if found is None:
            raise Ql3Error("not_found", "There is no log of this attempt.")
        if found.artifact.state == "gone":
            raise Ql3Error(
                "gone",
                data={
                    "artifact_id": found.artifact.id,
                    "retired_at_ms": found.artifact.retired_at_ms,
                    "disposition": found.disposition,
                    "bytes_reclaimed": found.bytes_reclaimed,
                },
            )
        return found

    # -- ages and holds

    async def get_policy(self, message: RetentionRead, _caller: Caller) -> RetentionAnswer:
        """The ages in force in a project."""
        await self._policy.require(message.actor, message.project, "policy.manage")
        stored = await self._database.read(lambda tx: policies.policy(tx, message.project))
        return RetentionAnswer(policy=self._view(message.project, stored))

    async def set_policy(self, message: RetentionSet, _caller: Caller) -> RetentionAnswer:
        """Change a project's ages; `expected_version` 0 for a project that has the defaults."""
        decision = await self._policy.require(message.actor, message.project, "policy.manage")
        policy.check(message.logs_ms, message.runs_ms)

        async def work(tx: Transaction) -> policies.Policy:
            changed = await policies.set_policy(
                tx,
                message.project,
                logs_ms=message.logs_ms,
                runs_ms=message.runs_ms,
                expected_version=message.expected_version,
                now_ms=self._clock.now_ms(),
            )
            stored = await policies.policy(tx, message.project)
            if not changed:
                raise Ql3Error("version_conflict", field="expected_version", data={"current_version": stored.version})
            await audit.append(
                tx,
                message.actor,
                "retention.set",
                message.project,
                None,
                decision,
                {"logs_ms": message.logs_ms, "runs_ms": message.runs_ms, "version": stored.version},
            )
            return stored

        stored = await self._database.transact(work)
        self._old_logs.ring()
        self._old_runs.ring()
        return RetentionAnswer(policy=self._view(message.project, stored))

    def _view(self, project: str, stored: policies.Policy) -> RetentionPolicy:
        return RetentionPolicy(
            project=project,
            logs_ms=policy.logs_age(stored.logs_ms, self._defaults, pressure=False),
            runs_ms=policy.runs_age(stored.runs_ms, self._defaults),
            version=stored.version,
            updated_at_ms=stored.updated_at_ms,
        )

    async def set_hold(self, message: HoldSet, _caller: Caller) -> HoldAnswer:
        """Hold a run or a whole project, or end the hold."""
        decision = await self._policy.require(message.actor, message.project, "policy.manage")

        async def work(tx: Transaction) -> Hold:
            if message.held:
                held_by = f"{message.actor.type}/{message.actor.id}"
                found = await policies.hold(
                    tx, message.project, message.run, message.reason, held_by, self._clock.now_ms()
                )
            else:
                ended = await policies.release(tx, message.project, message.run)
                if ended is None:
                    raise Ql3Error("not_found", "There is no such hold.")
                found = ended
            await audit.append(
                tx,
                message.actor,
                "hold.set" if message.held else "hold.end",
                message.project,
                message.run,
                decision,
                {"reason": message.reason},
            )
            return found

        return HoldAnswer(hold=await self._database.transact(work))

    async def list_holds(self, message: HoldList, _caller: Caller) -> HoldPage:
        """Holds of a project; the whole project's comes first."""
        await self._policy.require(message.actor, message.project, "policy.manage")
        cursor = message.page.cursor
        if cursor is not None and cursor != _WHOLE_PROJECT and not is_id(cursor):
            raise Ql3Error("invalid", "The cursor is not one of ours.", field="page.cursor")
        after = "" if cursor == _WHOLE_PROJECT else cursor
        limit = message.page.limit
        items = await self._database.read(lambda tx: policies.holds(tx, message.project, after, limit + 1))
        following = items[limit - 1].run_id or _WHOLE_PROJECT if len(items) > limit else None
        return HoldPage(items=items[:limit], next=following)

    # -- life

    async def start(self) -> None:
        """Make the artifact directory, answer, and begin the loops."""
        await self._store.run(self._store.prepare)
        health = Health()
        health.add(NAME, self.health)
        await self._bus.serve(
            NAME,
            VERSION,
            [
                Route(ARTIFACTS_LIST, self.list_artifacts),
                Route(ARTIFACTS_READ, self.read_artifact),
                Route(ARTIFACTS_RETIRED, self.worker_retired),
                Route(RETENTION_GET, self.get_policy),
                Route(RETENTION_SET, self.set_policy),
                Route(HOLDS_SET, self.set_hold),
                Route(HOLDS_LIST, self.list_holds),
                *standing_routes(NAME, VERSION, database=self._database, policy=self._policy, health=health),
            ],
        )
        await self._bus.on_ack(NAME, self._heard_ack)
        await self._bus.on_event("ql3.evt.attempt.>", self._heard_fact)
        await self._bus.flush()  # from here on who asks is heard
        for loop in self._loops:
            await loop.start()

    async def stop(self) -> None:
        """End the loops after their present step."""
        await asyncio.gather(self._looks.stop(), self._old_logs.stop())  # each may wait for the store
        self._store.close()
        for loop in self._loops:
            await loop.stop()

    def health(self) -> list[str]:
        """Reasons why retention is not ready."""
        unusable = ["the artifact store is not usable"] if self._looks.failures > FAILURES else []
        return [*unusable, *self._bus.health()]
