"""The numbers of the gateway's process: for who may read runs, and for nobody else."""

from __future__ import annotations

from services.kit.version import VERSION
from tests.gateway.conftest import HouseFor
from tests.metrics import read


async def test_numbers_are_for_who_may_read_runs(house_for: HouseFor) -> None:
    house = await house_for()
    answer = await house.client().get("/metrics")
    assert answer.status_code == 401
    assert "ql3_build" not in answer.text
    answer = await house.console().get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-store"
    assert read(answer.text)["ql3_build", VERSION] == 1
    assert read(answer.text)["ql3_outbox_backlog", "gateway"] == 0
    house.authority.denied.add("run.read")
    assert (await house.console().get("/metrics")).status_code == 403
