"""Open answers: what happened is shown once, what was missed is read again, who may no longer look is let go."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

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


async def test_a_session_that_ended_ends_its_streams(
    ledger: Ledger, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.streams.QUIET_S", 0.05)
    owner = await house.owner()
    cookie = owner.cookies["ql3_session"]
    watcher = house.client(Cookie=f"ql3_session={cookie}")
    async with watcher.stream("GET", f"{PROJECT}/events") as answer:
        events = Events(answer.aiter_lines())
        assert (await events.next())[0] == "ready"
        assert (await owner.delete("/api/v3/session")).status_code == 200
        name, body, _ = await events.next()
        assert (name, body["code"]) == ("error", "unauthenticated")


async def test_an_authority_that_is_away_for_a_while_ends_no_stream(
    ledger: Ledger, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.streams.QUIET_S", 0.05)
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
