"""`run.release`: let a held run go on.

The plan is the run itself, which the dispatcher keeps; its digest travels with the release and is compared there. The
dispatcher stores the receipt in the transaction that releases, under the dispatch id, and answers the same request
with the same answer. So asking again is how its receipt is read; it is no second release.
"""

from __future__ import annotations

from typing import Any

from schemas.canonical import digest
from schemas.endpoints import RUNS_CLOSE, RUNS_RELEASE
from schemas.errors import Ql3Error
from schemas.runs import DispatchClose, RunRelease, RunReleaseAnswer
from services.approval.executions import Execution
from services.approval.handlers.port import Ask, Inspection, Outcome, Planned
from services.approval.recovery import Finding
from services.approval.store.actions import Dispatch


class RunReleaseHandler:
    """Releases held runs through the dispatcher."""

    action_type = "run.release"
    permission = "run.start"
    needs = "dispatcher"

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def understand(self, project: str, action_ref: str, plan: dict[str, Any]) -> Planned:
        """Nobody asks for this by hand: the dispatcher does when it holds a run."""
        raise Ql3Error("invalid", "A held run asks for itself.", field="action_type")

    async def inspect(self, dispatch: Dispatch) -> Inspection:
        """The digest is compared by the dispatcher, in the transaction that releases."""
        return Inspection(dispatch.binding.action_digest)

    async def execute(self, dispatch: Dispatch) -> Outcome:
        """Release. What the dispatcher refuses for good is a failure that is known."""
        answer = await self._release(dispatch)
        if answer.outcome == "released":
            return Outcome("succeeded", "run_released", "run", dispatch.binding.action_ref)
        return Outcome("failed", _CODES[answer.outcome])

    async def observe(self, dispatch: Dispatch, execution: Execution) -> Finding:
        """The dispatcher's receipt, by the same request."""
        answer = await self._release(dispatch)
        if answer.outcome == "released":
            return _verified(dispatch, answer)
        return Finding("verified_failed", _CODES[answer.outcome], _evidence(answer))

    async def close(self, dispatch: Dispatch) -> Finding | None:
        """A tombstone receipt: a late release is refused."""
        answer = await self._ask(RUNS_CLOSE, DispatchClose(dispatch_id=dispatch.id, project=dispatch.project))
        return _verified(dispatch, answer) if answer.outcome == "released" else None

    async def _release(self, dispatch: Dispatch) -> RunReleaseAnswer:
        return await self._ask(
            RUNS_RELEASE,
            RunRelease(
                dispatch_id=dispatch.id,
                run=dispatch.binding.action_ref,
                project=dispatch.project,
                outcome="approved",
                approval_id=dispatch.approval_id,
                action_digest=dispatch.binding.action_digest,
            ),
        )


_CODES = {"ended": "run_ended", "closed": "run_release_closed", "not_waiting": "run_not_waiting"}


def _verified(dispatch: Dispatch, answer: RunReleaseAnswer) -> Finding:
    return Finding(
        "verified_succeeded", "run_release_verified", _evidence(answer), ("run", dispatch.binding.action_ref)
    )


def _evidence(answer: RunReleaseAnswer) -> str:
    return answer.evidence_digest or digest(
        "ql3.run-release-answer.v1", {"dispatch_id": answer.dispatch_id, "outcome": answer.outcome}
    )
