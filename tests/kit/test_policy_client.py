"""The policy client: what it keeps, for how long, and what makes it forget."""

from __future__ import annotations

import asyncio

import pytest

from schemas.endpoints import POLICY_CHECK
from schemas.errors import Ql3Error
from schemas.identity import Actor, PolicyChanged, PolicyCheck, PolicyDecision
from schemas.subjects import event
from services.kit.bus import Bus, Caller, Route
from services.kit.clock import ManualClock
from services.kit.policy import ENTRIES, PolicyClient
from tests.fixtures_nats import WAIT_S, BusFactory, Heard

NOW_MS = 1_700_000_000_000
ACTOR = Actor(
    type="user",
    id="ada",
    authentication_id="session-1",
    assurance="single_factor",
    authenticated_at_ms=NOW_MS,
    expires_at_ms=NOW_MS + 1_000_000,
)


class Authority:
    """An approval service that answers what it is told and counts the questions."""

    def __init__(self) -> None:
        self.effect = "allow"
        self.valid_for_ms = 2_000
        self.asked: list[PolicyCheck] = []
        self.hold: asyncio.Event | None = None
        self.heard = Heard()

    async def answer(self, question: PolicyCheck, caller: Caller) -> PolicyDecision:
        self.asked.append(question)
        effect = self.effect
        await self.heard.add(question)
        if self.hold is not None:
            await self.hold.wait()
        return PolicyDecision(
            effect=effect,  # type: ignore[arg-type]
            reasons=["test"],
            project_version=1,
            binding_version=1,
            valid_for_ms=self.valid_for_ms,
        )


class Seconds:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def served(bus_for: BusFactory) -> tuple[Authority, Bus]:
    authority, bus = Authority(), await bus_for("approval")
    await bus.serve("approval", "1.0.0", [Route(POLICY_CHECK, authority.answer)])
    await bus.flush()
    return authority, bus


async def test_an_answer_is_kept_two_seconds_and_no_longer(bus_for: BusFactory) -> None:
    authority, _ = await served(bus_for)
    authority.valid_for_ms = 60_000
    seconds = Seconds()
    client = PolicyClient(await bus_for("scheduler"), clock=ManualClock(NOW_MS), monotonic=seconds)
    for _ in range(3):
        assert (await client.require(ACTOR, "default", "task.read")).effect == "allow"
    seconds.now = 1.999
    await client.require(ACTOR, "default", "task.read")
    assert len(authority.asked) == 1
    seconds.now = 2.0
    await client.require(ACTOR, "default", "task.read")
    assert len(authority.asked) == 2


async def test_an_answer_is_not_kept_longer_than_it_says_or_the_sign_in_lasts(bus_for: BusFactory) -> None:
    authority, _ = await served(bus_for)
    authority.valid_for_ms = 500
    seconds, clock = Seconds(), ManualClock(NOW_MS)
    client = PolicyClient(await bus_for("scheduler"), clock=clock, monotonic=seconds)
    await client.require(ACTOR, "default", "task.read")
    seconds.now = 0.5
    await client.require(ACTOR, "default", "task.read")
    assert len(authority.asked) == 2
    clock.advance(1_000_000)
    await client.require(ACTOR, "default", "task.read")
    assert len(authority.asked) == 3


async def test_every_difference_in_the_question_is_asked_anew(bus_for: BusFactory) -> None:
    authority, _ = await served(bus_for)
    client = PolicyClient(await bus_for("scheduler"), clock=ManualClock(NOW_MS), monotonic=Seconds())
    await client.require(ACTOR, "default", "task.read")
    await client.require(ACTOR, "other", "task.read")
    await client.require(ACTOR, "default", "task.update")
    await client.require(ACTOR, "default", "task.read", labels={"needs": "approval"})
    assert len(authority.asked) == 4


@pytest.mark.parametrize(("effect", "code"), [("deny", "forbidden"), ("require_approval", "approval_required")])
async def test_what_is_not_allowed_is_refused_by_name(bus_for: BusFactory, effect: str, code: str) -> None:
    authority, _ = await served(bus_for)
    authority.effect = effect
    client = PolicyClient(await bus_for("scheduler"), clock=ManualClock(NOW_MS))
    with pytest.raises(Ql3Error) as caught:
        await client.require(ACTOR, "default", "run.create")
    assert caught.value.code == code
    assert (await client.check(ACTOR, "default", "run.create")).effect == effect


async def test_an_authority_that_is_away_denies(bus_for: BusFactory) -> None:
    client = PolicyClient(await bus_for("scheduler"), clock=ManualClock(NOW_MS))
    with pytest.raises(Ql3Error) as caught:
        await client.require(ACTOR, "default", "task.read")
    assert caught.value.code == "unavailable"


async def test_a_change_drops_what_is_kept_about_its_project_only(bus_for: BusFactory) -> None:
    authority, approval = await served(bus_for)
    hearing = await bus_for("scheduler")
    client = PolicyClient(hearing, clock=ManualClock(NOW_MS), monotonic=Seconds())
    await client.require(ACTOR, "default", "task.read")
    await client.require(ACTOR, "other", "task.read")
    await change(approval, hearing, client, "default")
    authority.effect = "deny"
    with pytest.raises(Ql3Error):
        await client.require(ACTOR, "default", "task.read")
    await client.require(ACTOR, "other", "task.read")
    await change(approval, hearing, client, None)
    with pytest.raises(Ql3Error):
        await client.require(ACTOR, "other", "task.read")


async def test_an_answer_from_before_a_change_is_not_kept(bus_for: BusFactory) -> None:
    authority, approval = await served(bus_for)
    hearing = await bus_for("scheduler")
    client = PolicyClient(hearing, clock=ManualClock(NOW_MS), monotonic=Seconds())
    await client.start()
    authority.hold = asyncio.Event()
    early = asyncio.create_task(client.require(ACTOR, "default", "task.read"))
    await authority.heard.count(1)
    await change(approval, hearing, client, "default")
    authority.effect = "deny"
    late = asyncio.create_task(client.require(ACTOR, "default", "task.read"))
    await authority.heard.count(2)
    authority.hold.set()
    assert (await early).effect == "allow"
    with pytest.raises(Ql3Error):
        await late
    with pytest.raises(Ql3Error):
        await client.require(ACTOR, "default", "task.read")


async def test_questions_that_are_alike_are_asked_once(bus_for: BusFactory) -> None:
    authority, _ = await served(bus_for)
    client = PolicyClient(await bus_for("scheduler"), clock=ManualClock(NOW_MS), monotonic=Seconds())
    await client.start()
    authority.hold = asyncio.Event()
    callers = [asyncio.create_task(client.require(ACTOR, "default", "task.read")) for _ in range(20)]
    await authority.heard.count(1)
    callers[0].cancel()
    authority.hold.set()
    results = await asyncio.gather(*callers, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert all(isinstance(result, PolicyDecision) for result in results[1:])
    assert len(authority.asked) == 1


async def test_what_is_kept_is_bounded(bus_for: BusFactory) -> None:
    await served(bus_for)
    client = PolicyClient(await bus_for("scheduler"), clock=ManualClock(NOW_MS), monotonic=Seconds())
    for start in range(0, ENTRIES + 200, 100):
        await asyncio.gather(*(client.require(ACTOR, "default", f"p.{start + n}") for n in range(100)))
    assert len(client._kept) == ENTRIES


async def change(approval: Bus, hearing: Bus, client: PolicyClient, project: str | None) -> None:
    """Publish a policy change and return when the client has heard it."""
    epoch = client._epoch
    subject = event("policy", project or "-", "default", "changed")
    await approval.publish(subject, PolicyChanged(project=project, version=2))
    async with asyncio.timeout(WAIT_S):
        while client._epoch == epoch:
            await hearing.flush()
