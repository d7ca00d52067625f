"""Open answers: what happened is shown once, what was missed is read again, who may no longer look is let go."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from schemas.identity import PolicyChanged
from schemas.subjects import event
from services.gateway.streams import FACTS

from .conftest import PROJECT, House
from .ledger import RUN, Ledger, run_row
from .test_logs import Events


@pytest.fixture
def dialect() -> str:
    """Streams touch no table of the gateway."""
    return "sqlite"


@pytest.fixture
async def ledger(house: House, bus_for: Any) -> Ledger:
    """A running run."""
    ledger = Ledger(house)
    await ledger.start(bus_for)
    return ledger


async def test_a_run_is_followed_to_its_end(ledger: Ledger, house: House) -> None:
    async with house.console().stream("GET", f"{PROJECT}/runs/{RUN}/stream") as answer:
        events = Events(answer.aiter_lines())
        name, body, mark = await events.next()
        assert (name, body["status"], mark) == ("run", "running", "1")
        await ledger.change("retry_wait")
        assert (await events.next())[1]["status"] == "retry_wait"
        await ledger.tell()  # the same state again is no news
        await ledger.change("succeeded")
        name, body, _ = await events.next()
        assert (body["status"], body["version"]) == ("succeeded", 3)
        assert (await events.next())[:2] == ("end", {"status": "succeeded"})


async def test_a_lost_fact_shows_with_the_next_one(ledger: Ledger, house: House) -> None:
    async with house.console().stream("GET", f"{PROJECT}/runs/{RUN}/stream") as answer:
        events = Events(answer.aiter_lines())
        await events.next()
        ledger.run = run_row("succeeded", 5)
        await ledger.tell()
        assert (await events.next())[1]["version"] == 5


async def test_an_ended_run_is_shown_and_the_stream_ends(ledger: Ledger, house: House) -> None:
    ledger.run = run_row("failed", 9)
    answer = await house.console().get(f"{PROJECT}/runs/{RUN}/stream")
    assert "event: run" in answer.text
    assert answer.text.rstrip().endswith('data: {"status":"failed"}')


async def test_a_run_of_nobody_is_not_found_before_the_stream_begins(ledger: Ledger, house: House) -> None:
    answer = await house.console().get(f"{PROJECT}/runs/0190a0a0-0000-7000-8000-0000000000ff/stream")
    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")


async def test_a_projects_facts_arrive_under_their_kind(ledger: Ledger, house: House) -> None:
    async with house.console().stream("GET", f"{PROJECT}/events") as answer:
        events = Events(answer.aiter_lines())
        name, body, _ = await events.next()
        assert name == "ready"
        assert "run" in body["kinds"]
        await ledger.tell("other")  # of a project that was not asked for
        await ledger.change("succeeded")
        name, body, _ = await events.next()
        assert (name, body["run_id"], body["status"], body["project"]) == ("run", RUN, "succeeded", "default")


async def test_facts_that_one_may_not_read_are_left_out(ledger: Ledger, house: House) -> None:
    house.authority.denied |= {"run.read", "artifact.read"}
    async with house.console().stream("GET", f"{PROJECT}/events") as answer:
        assert (await Events(answer.aiter_lines()).next())[1]["kinds"] == ["approval", "task", "trigger"]
    house.authority.denied |= {"task.read", "trigger.read", "approval.read"}
    assert (await house.console().get(f"{PROJECT}/events")).status_code == 403


async def test_a_reader_that_cannot_keep_up_is_told_to_read_again(
    ledger: Ledger, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.streams.WAITING", 0)
    async with house.console().stream("GET", f"{PROJECT}/events") as answer:
        events = Events(answer.aiter_lines())
        assert (await events.next())[0] == "ready"
        await ledger.tell()
        assert (await events.next())[0] == "reset"


async def test_a_connection_to_the_bus_that_was_lost_is_told(
    ledger: Ledger, house: House, nats_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.streams.QUIET_S", 0.2)
    async with house.console().stream("GET", f"{PROJECT}/events") as answer:
        events = Events(answer.aiter_lines())
        assert (await events.next())[0] == "ready"
        await nats_server.kill()
        while (await events.next())[0] != "reset":
            pass


async def test_a_session_that_ended_ends_its_streams_at_once(
    ledger: Ledger, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.streams.RECHECK_S", 3600.0)
    owner = await house.owner()
    cookie = owner.cookies["ql3_session"]
    watcher = house.client(Cookie=f"ql3_session={cookie}")
    async with watcher.stream("GET", f"{PROJECT}/events") as answer:
        events = Events(answer.aiter_lines())
        assert (await events.next())[0] == "ready"
        assert (await owner.delete("/api/v3/session")).status_code == 200
        name, body, _ = await events.next()
        assert (name, body["code"]) == ("error", "unauthenticated")


@pytest.mark.parametrize("path", ["events", f"runs/{RUN}/stream", f"runs/{RUN}/log/stream"])
async def test_who_is_shut_out_is_let_go_at_once(
    ledger: Ledger, house: House, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr("services.gateway.streams.RECHECK_S", 3600.0)
    await ledger.write(b"x")
    approval = await house.serve("approval")
    async with house.console().stream("GET", f"{PROJECT}/{path}") as answer:
        events = Events(answer.aiter_lines())
        await events.next()
        house.authority.denied |= set(FACTS.values())
        await approval.publish(
            event("policy", "default", "default", "changed"), PolicyChanged(project="default", version=2)
        )
        name, body, _ = await events.next()
        assert (name, body["code"]) == ("error", "forbidden")


@pytest.mark.parametrize("path", ["events", f"runs/{RUN}/stream", f"runs/{RUN}/log/stream"])
async def test_who_is_shut_out_is_let_go_although_the_news_of_it_was_lost(
    ledger: Ledger, house: House, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr("services.gateway.streams.RECHECK_S", 0.05)
    await ledger.write(b"x")
    async with house.console().stream("GET", f"{PROJECT}/{path}") as answer:
        events = Events(answer.aiter_lines())
        await events.next()
        house.authority.denied |= set(FACTS.values())
        name, body, _ = await events.next()
        assert (name, body["code"]) == ("error", "forbidden")


async def test_an_authority_that_is_away_for_a_while_ends_no_stream(
    ledger: Ledger, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.streams.RECHECK_S", 0.05)
    monkeypatch.setattr("services.gateway.streams.AWAY_S", 0.05)
    async with house.console().stream("GET", f"{PROJECT}/events") as answer:
        events = Events(answer.aiter_lines())
        assert (await events.next())[0] == "ready"
        house.authority.away = True
        await asyncio.wait_for(house.authority.asked_while_away.wait(), 30)
        await ledger.change("succeeded")
        house.authority.away = False
        name, body, _ = await events.next()
        assert (name, body["status"]) == ("run", "succeeded")


async def test_nobody_takes_the_places_of_all(ledger: Ledger, house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.streams.OWN_STREAMS", 1)
    house.gateway._desk.settings = msgspec.structs.replace(house.gateway._desk.settings, streams=4)
    owner = await house.owner()
    watcher = house.client(Cookie=f"ql3_session={owner.cookies['ql3_session']}")
    async with house.console().stream("GET", f"{PROJECT}/events") as answer:
        events = Events(answer.aiter_lines())
        assert (await events.next())[0] == "ready"
        refused = await house.console().get(f"{PROJECT}/events")
        assert (refused.status_code, refused.json()["code"]) == (503, "capacity")
        async with watcher.stream("GET", f"{PROJECT}/events") as other:
            events = Events(other.aiter_lines())
            assert (await events.next())[0] == "ready"
    async with asyncio.timeout(30):
        while house.gateway._desk.open_streams.total():
            await house.console().get("/livez")
    async with house.console().stream("GET", f"{PROJECT}/events") as answer:
        assert (await Events(answer.aiter_lines()).next())[0] == "ready"
