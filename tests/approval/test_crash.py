"""kill -9 at every step of an approval's life: afterwards at most one run exists for it, and the next life goes on.

The points of a matrix share the other services, the bus and the databases; each has lives of its own.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from schemas import endpoints
from schemas.endpoints import Endpoint
from schemas.errors import Ql3Error
from schemas.tasks import TaskRead, TaskRun, TaskUpdate
from services.approval import executions
from services.approval.handlers.port import service_actor
from services.kit.clock import WallClock
from tests.approval.conftest import console
from tests.approval.house import now
from tests.approval.lives import POINTS, Scene, ended, second_life
from tests.fixtures_database import shift_clock


@pytest.mark.timeout(300)
async def test_at_most_one_run_is_made(scene: Scene) -> None:
    known: set[str] = set()
    for point in POINTS:
        await scene.begin(point)
        approval = await scene.asked("run.create", {"task": "plain"})
        await scene.end(point)
        await scene.working
        action = await ended(scene.bus, approval)
        fresh = [run for run in await scene.made() if run.id not in known]
        known |= {run.id for run in fresh}
        if point in ("execute:before", "action.start:after"):
            # It crossed the barrier and nothing came of it: closed for ever, and said so.
            found = (action.status, action.result_code, fresh)
            assert found == ("failed", "approved_run_never_created", []), point
        else:
            assert (action.status, len(fresh)) == ("succeeded", 1), point
            assert await scene.queued(fresh[0].id) == 1, point
        await scene.life.kill()


CLOSINGS = ["close:before", "close:after", "approval.recover:inside", "approval.recover:after"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("action_type", ["run.create", "task.change"])
async def test_what_was_closed_before_it_failed_has_no_late_effect(scene: Scene, action_type: str) -> None:
    question = TaskRead(actor=now(console), project="default", task="plain")
    spec = msgspec.structs.replace(scene.task.spec, title="changed")
    change = {"task": "plain", "expected_revision": 1, "spec": msgspec.to_builtins(spec)}
    plan = {"task": "plain"} if action_type == "run.create" else change
    for point in CLOSINGS:
        # The first life dies before its order is sent; the recovery of the second dies at the point.
        await scene.life.begin("execute:before")
        approval = await scene.asked(action_type, plan)
        assert await scene.life.died()
        await shift_clock(scene.database, executions.LEASE_MS)
        await scene.life.begin(point)
        await second_life(scene.life, scene.database)
        await scene.working
        action = await ended(scene.bus, approval)
        assert action.status == "failed", point
        assert action.result_code in ("approved_run_never_created", "task_change_never_done"), point
        # The order that was on its way all the time arrives now.
        late: tuple[Endpoint[Any, Any], Any] = (
            endpoints.TASKS_RUN,
            TaskRun(
                actor=service_actor(WallClock().now_ms()),
                project="default",
                task="plain",
                idempotency_key=action.dispatch_id,
                trigger_type="approved_action",
                expected_revision=1,
            ),
        )
        if action_type == "task.change":
            late = (
                endpoints.TASKS_UPDATE,
                TaskUpdate(
                    actor=service_actor(WallClock().now_ms()),
                    project="default",
                    task="plain",
                    expected_revision=1,
                    spec=spec,
                    mutation_id=action.dispatch_id,
                    dispatch_id=action.dispatch_id,
                ),
            )
        with pytest.raises(Ql3Error) as refused:
            await scene.bus.request(*late)
        assert refused.value.code == "conflict", point
        assert await scene.made() == [], point
        assert (await scene.bus.request(endpoints.TASKS_GET, question)).task.revision == 1, point
        await scene.life.kill()
