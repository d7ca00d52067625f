"""kill -9 at every step of the approval of a held run: it is released once, and the next life goes on."""

from __future__ import annotations

import asyncio

import pytest

from tests.approval.lives import POINTS, Scene, ended


@pytest.mark.timeout(300)
async def test_a_held_run_is_released_once(scene: Scene) -> None:
    for point in POINTS:
        await scene.begin(point)
        run = await scene.others.run()
        working = asyncio.create_task(scene.decided(run.id))
        await scene.end(point)
        await working
        action = await ended(scene.bus, run.id)
        # The release is asked about by the same question, which is no second release: it comes in the end.
        assert (action.status, action.resource_id) == ("succeeded", run.id), point
        assert (await scene.others.read(run.id)).status == "queued", point
        assert await scene.queued(run.id) == 1, point
        await scene.life.kill()
