"""From a held run to its release, on a fresh installation where only the local console exists."""

from __future__ import annotations

from schemas.approvals import ApprovalDecide, ApprovalRead
from schemas.runs import RunReleaseAnswer
from services.approval.executor import Executor
from services.approval.handlers.run_release import RunReleaseHandler
from services.kit.ids import new_id
from tests.approval.conftest import World, console, hold


async def test_console_releases_a_held_run(world: World) -> None:
    order = hold()
    assert await world.approvals.hold([order]) == [None]
    assert await world.approvals.hold([order]) == [None]

    answer = await world.approvals.decide(
        ApprovalDecide(
            actor=console(), project="default", approval=order.request_id, decision_id=new_id(), decision="approved"
        )
    )
    assert answer.approval.state == "approved"
    assert answer.approval.mode == "human_confirmation"

    asked: list[object] = []

    async def ask(endpoint: object, message: object) -> object:
        asked.append(message)
        return RunReleaseAnswer(dispatch_id=message.dispatch_id, outcome="released", run_status="queued")  # type: ignore[attr-defined]

    async def reach(service: str) -> bool:
        return True

    executor = Executor(
        world.gate,
        {"run.release": RunReleaseHandler(ask)},
        reach=reach,
        owner="test",  # type: ignore[arg-type]
    )
    await executor.step()
    await executor.step()
    assert len(asked) == 1
    seen = await world.approvals.get(ApprovalRead(actor=console(), project="default", approval=order.request_id))
    assert (seen.approval.state, seen.approval.execution_status) == ("consumed", "succeeded")
