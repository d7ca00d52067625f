"""The service on a real bus: orders, acknowledgements, policy for everybody, a release that survives an outage."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import pytest_asyncio

from schemas import endpoints, subjects
from schemas.approvals import ApprovalDecide, ApprovalWithdraw, HoldOrder, RequestApprovals
from schemas.endpoints import HEALTH
from schemas.identity import PolicyCheck
from schemas.runs import RunRelease, RunReleaseAnswer
from schemas.system import HealthAnswer, HealthRead
from services.approval.service import ApprovalService
from services.kit.bus import Bus, Caller, Route
from services.kit.clock import ManualClock
from services.kit.config import Config
from services.kit.database import Database
from services.kit.ids import new_id
from tests.approval.conftest import HOUR, NOW, actor, console, hold
from tests.fixtures_nats import BusFactory, Heard


class Receiver:
    """The dispatcher's part of the contract: releases once for each dispatch id, and says what it did."""

    def __init__(self) -> None:
        self.heard = Heard()
        self.receipts: dict[str, RunReleaseAnswer] = {}
        self.waiting: set[str] = set()

    async def release(self, wanted: RunRelease, caller: Caller) -> RunReleaseAnswer:
        known = self.receipts.get(wanted.dispatch_id)
        if known is None:
            outcome = "not_waiting"
            if wanted.run in self.waiting:
                self.waiting.discard(wanted.run)
                outcome = "released" if wanted.outcome == "approved" else "ended"
            known = RunReleaseAnswer(dispatch_id=wanted.dispatch_id, outcome=outcome)  # type: ignore[arg-type]
            self.receipts[wanted.dispatch_id] = known
        await self.heard.add((wanted, known))
        return known

    async def healthy(self, _: HealthRead, caller: Caller) -> HealthAnswer:
        return HealthAnswer(service="dispatcher", version="0", reasons=[])

    async def serve(self, bus: Bus) -> None:
        await bus.serve(
            "dispatcher",
            "0",
            [Route(endpoints.RUNS_RELEASE, self.release), Route(HEALTH["dispatcher"], self.healthy)],
        )


@pytest_asyncio.fixture
async def service(database_on: Callable[..., Awaitable[Database]], bus_for: BusFactory):
    clock = ManualClock(NOW)
    made = ApprovalService(
        config=Config(), database=await database_on("sqlite", "approval"), bus=await bus_for("approval"), clock=clock
    )
    await made.start()
    yield made, clock
    await made.stop()


async def order(bus: Bus, *holds: HoldOrder) -> None:
    await bus.publish(
        subjects.command("approval", "request"), RequestApprovals(sender="dispatcher", requests=list(holds))
    )


async def test_orders_are_acknowledged_and_released(service, bus_for: BusFactory) -> None:
    bus = await bus_for("dispatcher")
    receiver, acks = Receiver(), Heard()

    async def heard(ids: list[str]) -> None:
        await acks.add(*ids)

    await bus.on_ack("dispatcher", heard)
    first, second = hold(), hold()
    receiver.waiting |= {first.request_id, second.request_id}
    await order(bus, first, second)
    await acks.until(lambda items: {first.order_id, second.order_id} <= set(items))

    gateway = await bus_for("gateway")
    for held, decision in ((first, "approved"), (second, "rejected")):
        await gateway.request(
            endpoints.APPROVALS_DECIDE,
            ApprovalDecide(
                actor=console(),
                project="default",
                approval=held.request_id,
                decision_id=new_id(),
                decision=decision,  # type: ignore[arg-type]
            ),
        )
    # The dispatcher comes back only now: nothing was lost and no attempt was used up meanwhile.
    await receiver.serve(bus)
    await receiver.heard.count(2)
    outcomes = {item[0].run: (item[0].outcome, item[1].outcome) for item in receiver.heard.items}  # type: ignore[index]
    assert outcomes == {
        first.request_id: ("approved", "released"),
        second.request_id: ("rejected", "ended"),
    }


async def test_withdrawn_and_expired_runs_are_told(service, bus_for: BusFactory) -> None:
    _, clock = service
    bus = await bus_for("dispatcher")
    receiver, acks = Receiver(), Heard()

    async def heard(ids: list[str]) -> None:
        await acks.add(*ids)

    await bus.on_ack("dispatcher", heard)
    await receiver.serve(bus)
    taken_back, forgotten = hold(), hold()
    receiver.waiting |= {taken_back.request_id, forgotten.request_id}
    await order(bus, taken_back, forgotten)
    await acks.count(2)
    await bus.request(
        endpoints.APPROVALS_WITHDRAW,
        ApprovalWithdraw(actor=console(), project="default", approval=taken_back.request_id),
    )
    clock.advance(HOUR)
    await receiver.heard.count(2)
    assert {(item[0].run, item[0].outcome) for item in receiver.heard.items} == {  # type: ignore[index]
        (taken_back.request_id, "withdrawn"),
        (forgotten.request_id, "expired"),
    }


@pytest.mark.parametrize(
    ("who", "effect", "reason"),
    [
        (console(), "allow", "local_console"),
        (actor("local-console"), "deny", "not_the_console"),
        (actor("nobody"), "deny", "subject_unknown"),
        (actor("gateway", kind="system", assurance="service"), "allow", "system_grant"),
        (actor("gateway", kind="system"), "deny", "not_a_service"),
    ],
)
async def test_policy_answers_on_the_bus(service, bus_for: BusFactory, who, effect, reason) -> None:
    bus = await bus_for("scheduler")
    decision = await bus.request(
        endpoints.POLICY_CHECK, PolicyCheck(project="default", actor=who, permission="run.start")
    )
    assert (decision.effect, decision.reasons, decision.valid_for_ms) == (effect, [reason], 2_000)
