"""Carrying out approved actions: claim, inspect, cross the barrier, execute, complete; and ending held runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Literal

import structlog

from schemas.errors import Ql3Error
from schemas.runs import RunReleaseAnswer
from services.approval import executions, recovery
from services.approval.approvals import RELEASE, WORK, Approvals
from services.approval.digests import receipt_digest
from services.approval.executions import Execution, Lease
from services.approval.gate import SERVICE, Gate
from services.approval.handlers.port import Handler, Outcome
from services.approval.handover import HandOver
from services.approval.store import actions
from services.approval.store import recovery as controls
from services.approval.store import requests as rows
from services.approval.store.actions import Dispatch, Receipt
from services.kit import audit
from services.kit.database import Transaction
from services.kit.ids import new_id

PAGE: Final = 16
RENEW_S: Final = 10.0
ASK_AGAIN_S: Final = (0.2, 0.5, 1.0, 2.0, 4.0)
"""Pauses between requests whose answer was lost, within one execution; after that the doubt is recovery's."""
ENDING_RETRY_MS: Final = 1_000
ENDING_RETRY_MAX_MS: Final = 30_000

log: structlog.stdlib.BoundLogger = structlog.get_logger("ql3.approval")

Reach = Callable[[str], Awaitable[bool]]
"""Whether a service answers now."""
EndRun = Callable[[rows.Ending], Awaitable[RunReleaseAnswer]]


class Executor:
    """Executes approved actions under leases. Several may run: each dispatch has one holder at a time."""

    def __init__(self, gate: Gate, handlers: Mapping[str, Handler], *, reach: Reach, owner: str) -> None:
        self._gate = gate
        self._database = gate.database
        self._hand_over = HandOver(gate)
        self._handlers = handlers
        self._reach = reach
        self._owner = owner
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Ask nobody again from now on: what is in doubt is left to the recovery of the next life."""
        self._stopping.set()

    async def step(self) -> bool | float | None:
        """Hand over what is approved, then carry out one page. True when there may be more."""
        ready = await self._hand_over.due(PAGE)
        for request_id in ready:
            await self._hand_over.one(request_id)
        due = await self._due()
        if not due:
            return True if len(ready) == PAGE else await self._hand_over.next_s()
        reachable = {name: await self._reach(name) for name in await self._needed(due)}
        done = await asyncio.gather(*(self._guarded(dispatch, reachable) for dispatch in due))
        if not any(done):
            # Whoever has to carry them out is away: no lease is taken and no attempt is used up.
            return 1.0
        return True if len(due) == PAGE else None

    async def _due(self) -> list[str]:
        async def work(tx: Transaction) -> list[str]:
            return await actions.due(tx, await tx.now_ms(), PAGE)

        return await self._database.read(work)

    async def _needed(self, due: list[str]) -> set[str]:
        async def work(tx: Transaction) -> set[str]:
            needed: set[str] = set()
            for dispatch_id in due:
                dispatch = await actions.dispatch(tx, dispatch_id)
                handler = self._handlers.get(dispatch.binding.action_type) if dispatch else None
                if handler is not None and handler.needs is not None:
                    needed.add(handler.needs)
            return needed

        return await self._database.read(work)

    async def _guarded(self, dispatch_id: str, reachable: Mapping[str, bool]) -> bool:
        try:
            return await self.run(dispatch_id, reachable)
        except Ql3Error as error:
            # Its lease lapses and it is taken again, or recovered behind the barrier.
            log.warning("an approved action was left", dispatch=dispatch_id, error=error.code)
            return True

    async def run(self, dispatch_id: str, reachable: Mapping[str, bool]) -> bool:
        """Carry out one dispatch as far as it goes now; False when its receiver is away."""
        dispatch = await self._database.read(lambda tx: actions.dispatch(tx, dispatch_id))
        if dispatch is None:
            raise Ql3Error("not_found")
        handler = self._handlers.get(dispatch.binding.action_type)
        if handler is not None and handler.needs is not None and not reachable.get(handler.needs, False):
            return False
        try:
            code, retry = await self._inspect(handler, dispatch)
        except Ql3Error:
            return False  # it answers for its health, but not for this: no attempt is used up either
        token = new_id()
        claimed = await self.claim(dispatch_id, token)
        if claimed is None:
            return True
        lease = Lease(self._owner, token, claimed.version)
        if code is not None or handler is None:
            await self.release(dispatch_id, lease, code or "handler_unavailable", retry=retry)
            return True
        started = await self.start(dispatch, lease)
        await self._execute(handler, dispatch, started, token)
        return True

    async def _inspect(self, handler: Handler | None, dispatch: Dispatch) -> tuple[str | None, bool]:
        """Why it cannot be carried out, and whether that may pass. Raises what comes of an outage."""
        if handler is None:
            return "handler_unavailable", True
        try:
            found = await handler.inspect(dispatch)
        except Exception as error:  # whatever it was, nothing has happened yet and it may be tried again
            if isinstance(error, Ql3Error) and error.kind.status >= 500:
                raise
            log.warning("an inspection failed", dispatch=dispatch.id, error=type(error).__name__)
            return "handler_inspection_failed", True
        if found.verdict != "ready":
            return found.code, found.verdict == "retry"
        if found.digest != dispatch.binding.action_digest:
            return "action_digest_mismatch", False
        return None, False

    async def _execute(self, handler: Handler, dispatch: Dispatch, started: Execution, token: str) -> None:
        keeper = _Keeper(self, dispatch.id, Lease(self._owner, token, started.version))
        renewing = asyncio.create_task(keeper.run())
        try:
            outcome = await self._outcome(handler, dispatch)
        finally:
            # Not cancelled: a renewal that is under way commits, and the completion needs its version.
            keeper.done.set()
            await asyncio.gather(renewing, return_exceptions=True)
        if outcome is None:
            return
        await self.complete(dispatch, keeper.lease, outcome)

    async def _outcome(self, handler: Handler, dispatch: Dispatch) -> Outcome | None:
        """What came of it; None when nobody answered, which leaves it to recovery."""
        for pause_s in (*ASK_AGAIN_S, None):
            try:
                return await handler.execute(dispatch)
            except Ql3Error as error:
                # Of a failure of ours nobody knows whether it was before the effect; a fence has kept it from that.
                if error.kind.status < 500 and error.code != "policy_fence_conflict":
                    return Outcome("failed", error.code)
            except Exception:
                log.exception("an approved action failed behind the barrier", dispatch=dispatch.id)
                return Outcome("indeterminate", "handler_failed_after_start")
            if pause_s is None or await waited(self._stopping, pause_s):
                return None
        return None

    # -- the machine's steps, each in a transaction of its own

    async def claim(self, dispatch_id: str, token: str, *, lease_ms: int = executions.LEASE_MS) -> Execution | None:
        """Take the lease; None when somebody else has it, or it is over."""

        async def work(tx: Transaction) -> Execution | None:
            before = await self._locked(tx, dispatch_id)
            outcome, after = executions.claim(
                before, owner=self._owner, token=token, now_ms=await tx.now_ms(), lease_ms=lease_ms
            )
            if outcome == "blocked" and after is not before:
                await actions.update_execution(tx, before, after)
                dispatch = await self._dispatch(tx, dispatch_id)
                await self._end_hold(tx, dispatch)
                await self._audit(tx, dispatch, "action.blocked", "attempt_budget_exhausted")
            elif outcome == "claimed":
                await actions.update_execution(tx, before, after)
            return after if outcome in ("claimed", "replayed") else None

        return await self._database.transact(work)

    async def start(self, dispatch: Dispatch, lease: Lease) -> Execution:
        """Cross the barrier; recovery is armed in the same transaction. Raises `fence_rejected` or `conflict`."""

        async def work(tx: Transaction) -> Execution:
            before = await self._locked(tx, dispatch.id)
            stored = await self._dispatch(tx, dispatch.id)
            approved = (stored.approval_id, stored.binding.action_digest)
            if approved != (dispatch.approval_id, dispatch.binding.action_digest):
                raise Ql3Error("conflict", "The action is not the approved one.")
            now_ms = await tx.now_ms()
            after = executions.start(before, lease, now_ms)
            if after is before:
                control = await controls.control(tx, dispatch.id)
                if control is None or control.status == "resolved":
                    raise Ql3Error("internal_error", "A started action has no recovery control.")
                return after
            await actions.update_execution(tx, before, after)
            await controls.insert_control(tx, recovery.armed(after, after.updated_at_ms))
            await self._audit(tx, dispatch, "action.start", "started")
            return after

        return await self._database.transact(work)

    async def renew(self, dispatch_id: str, lease: Lease, *, lease_ms: int = executions.LEASE_MS) -> Execution:
        """Hold the lease longer; behind the barrier recovery is armed anew. Raises `fence_rejected`."""

        async def work(tx: Transaction) -> Execution:
            before = await self._locked(tx, dispatch_id)
            after = executions.renew(before, lease, await tx.now_ms(), lease_ms)
            await actions.update_execution(tx, before, after)
            if after.status == "executing":
                control = await self._control(tx, dispatch_id)
                await controls.update_control(tx, control, recovery.rearmed(control, after, after.updated_at_ms))
            return after

        return await self._database.transact(work)

    async def release(self, dispatch_id: str, lease: Lease, code: str, *, retry: bool) -> Execution:
        """Give the lease back before the barrier. Raises `fence_rejected`."""
        mutation_id = new_id()

        async def work(tx: Transaction) -> Execution:
            before = await self._locked(tx, dispatch_id)
            now_ms = await tx.now_ms()
            again = now_ms + executions.retry_delay_ms(before.attempt_count) if retry else None
            after = executions.release(
                before, lease, mutation_id=mutation_id, code=code, now_ms=now_ms, retry_at_ms=again
            )
            await actions.update_execution(tx, before, after)
            if after.status == "blocked":
                dispatch = await self._dispatch(tx, dispatch_id)
                await self._end_hold(tx, dispatch)
                await self._audit(tx, dispatch, "action.blocked", code)
            return after

        return await self._database.transact(work)

    async def complete(self, dispatch: Dispatch, lease: Lease, outcome: Outcome) -> Execution:
        """End behind the barrier, with the receipt of a success. Raises `fence_rejected`."""
        mutation_id = new_id()

        async def work(tx: Transaction) -> Execution:
            before = await self._locked(tx, dispatch.id)
            after = executions.complete(
                before,
                lease,
                outcome=outcome.kind,
                mutation_id=mutation_id,
                code=outcome.code,
                now_ms=await tx.now_ms(),
            )
            if after is before:
                return after
            await actions.update_execution(tx, before, after)
            control = await self._control(tx, dispatch.id)
            await controls.update_control(tx, control, recovery.completed(control, after, after.updated_at_ms))
            if after.status == "succeeded":
                await actions.insert_receipt(tx, make_receipt(dispatch, before, after, outcome))
            elif outcome.code != "run_not_waiting":
                await self._end_hold(tx, dispatch)
            await self._audit(tx, dispatch, f"action.{after.status}", outcome.code)
            return after

        return await self._database.transact(work)

    async def _locked(self, tx: Transaction, dispatch_id: str) -> Execution:
        execution = await actions.execution(tx, dispatch_id, lock=True)
        if execution is None:
            raise Ql3Error("not_found")
        return execution

    async def _control(self, tx: Transaction, dispatch_id: str) -> recovery.Control:
        control = await controls.control(tx, dispatch_id, lock=True)
        if control is None:
            raise Ql3Error("internal_error", "A started action has no recovery control.")
        return control

    async def _dispatch(self, tx: Transaction, dispatch_id: str) -> Dispatch:
        dispatch = await actions.dispatch(tx, dispatch_id)
        if dispatch is None:
            raise Ql3Error("internal_error", "An execution has no dispatch.")
        return dispatch

    async def _end_hold(self, tx: Transaction, dispatch: Dispatch) -> None:
        await end_hold(tx, dispatch, self._gate.now_ms())

    async def _audit(self, tx: Transaction, dispatch: Dispatch, action: str, code: str) -> None:
        await audit.append(tx, SERVICE, action, dispatch.project, dispatch.id, code, {"approval": dispatch.approval_id})
        tx.after_commit(tx.database.bell(WORK).set)


class _Keeper:
    """Renews a lease while its action runs; knows the version at which it was last seen."""

    def __init__(self, executor: Executor, dispatch_id: str, lease: Lease) -> None:
        self._executor = executor
        self._dispatch_id = dispatch_id
        self.lease = lease
        self.done = asyncio.Event()

    async def run(self) -> None:
        """Until `done`, or until somebody else has it."""
        while not await waited(self.done, RENEW_S):
            try:
                renewed = await self._executor.renew(self._dispatch_id, self.lease)
            except Ql3Error as error:
                if error.code == "fence_rejected":
                    return
                continue
            self.lease = self.lease._replace(version=renewed.version)


async def waited(event: asyncio.Event, timeout_s: float) -> bool:
    """Whether the event came within so many seconds."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def end_hold(tx: Transaction, dispatch: Dispatch, now_ms: int) -> None:
    """An approved release that will not happen: its run must not wait for ever."""
    if dispatch.binding.action_type == RELEASE:
        await rows.end(tx, dispatch.approval_id, dispatch.project, "rejected", new_id(), now_ms)
        tx.after_commit(tx.database.bell("endings").set)


def make_receipt(dispatch: Dispatch, before: Execution, after: Execution, outcome: Outcome) -> Receipt:
    """The receipt of a success."""
    started = before.started_at_ms or 0
    finished = after.updated_at_ms
    return Receipt(
        dispatch_id=dispatch.id,
        approval_request_id=dispatch.approval_id,
        project=dispatch.project,
        action_type=dispatch.binding.action_type,
        action_digest=dispatch.binding.action_digest,
        execution_attempt=before.attempt_count,
        execution_version=before.version,
        started_at_ms=started,
        result_code=outcome.code,
        resource_type=outcome.resource_type,
        resource_id=outcome.resource_id,
        finished_at_ms=finished,
        evidence_digest=receipt_digest(
            {
                "schemaVersion": 1,
                "dispatchId": dispatch.id,
                "approvalRequestId": dispatch.approval_id,
                "projectId": dispatch.project,
                "actionType": dispatch.binding.action_type,
                "actionDigest": dispatch.binding.action_digest,
                "executionAttempt": before.attempt_count,
                "executionVersion": before.version,
                "startedAtMs": started,
                "idempotencyKey": dispatch.id,
                "outcome": "succeeded",
                "resultCode": outcome.code,
                "resourceType": outcome.resource_type,
                "resourceId": outcome.resource_id,
                "finishedAtMs": finished,
                "createdAtMs": finished,
            }
        ),
    )


class Endings:
    """Tells held runs that were rejected, withdrawn or that expired; again and again until it is answered."""

    def __init__(self, gate: Gate, approvals: Approvals, end_run: EndRun) -> None:
        self._gate = gate
        self._database = gate.database
        self._approvals = approvals
        self._end_run = end_run
        self._since_ms = 0

    async def step(self) -> bool | float | None:
        """Open the endings of what has expired, then tell one page. True when there may be more."""
        now_ms = self._gate.now_ms()
        opened = await self._approvals.expire(self._since_ms, PAGE)
        if opened == 0:
            # Everything older has its ending; an hour covers a clock that is set back a little.
            self._since_ms = max(0, now_ms - 3_600_000)
        due = await self._database.read(lambda tx: rows.due_endings(tx, PAGE))
        waits = await asyncio.gather(*(self._tell(ending) for ending in due))
        if opened == PAGE or (len(due) == PAGE and "later" not in waits):
            return True
        return 1.0 if "later" in waits else None

    async def _tell(self, ending: rows.Ending) -> Literal["told", "later"]:
        try:
            answer = (await self._end_run(ending)).outcome
        except Ql3Error as error:
            if error.code in ("unavailable", "database_unavailable", "commit_unknown", "capacity", "internal_error"):
                wait_ms = min(ENDING_RETRY_MAX_MS, ENDING_RETRY_MS * 2 ** min(ending.tries, 10))
                await self._database.transact(lambda tx: rows.ending_later(tx, ending.request_id, wait_ms))
                return "later"
            answer = error.code  # such as not_found: there is nothing that waits
        now_ms = self._gate.now_ms()
        await self._database.transact(lambda tx: rows.ending_answered(tx, ending.request_id, answer, now_ms))
        return "told"
