"""Logs: exact bytes, from the worker or the store, whole, in ranges and live; nothing lost, nothing twice."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from services.gateway.server import GuardedProtocol

from .conftest import PROJECT, House, HouseFor
from .ledger import RUN, Ledger

LOG = f"{PROJECT}/runs/{RUN}/log"


@pytest.fixture
def dialect() -> str:
    """Logs touch no table of the gateway."""
    return "sqlite"


@pytest.fixture
async def ledger(house: House, bus_for: Any) -> Ledger:
    """A running run."""
    ledger = Ledger(house)
    await ledger.start(bus_for)
    return ledger


class Events:
    """Server-sent events as they come."""

    def __init__(self, lines: AsyncIterator[str]) -> None:
        self._lines = lines

    async def next(self) -> tuple[str, Any, str | None]:
        """The next event: name, data, id. Comments and `retry` are passed over."""
        name, data, mark = "", "", None
        async with asyncio.timeout(30):
            async for line in self._lines:
                if line.startswith("event: "):
                    name = line[7:]
                elif line.startswith("data: "):
                    data = line[6:]
                elif line.startswith("id: "):
                    mark = line[4:]
                elif not line and name:
                    return name, json.loads(data), mark
        raise AssertionError("the stream ended")

    async def bytes_until(self, size: int, offset: int = 0) -> bytes:
        """The bytes of chunks from `offset` until there are `size` of them; each follows the one before."""
        data = b""
        while len(data) < size:
            name, body, mark = await self.next()
            assert name == "chunk"
            assert body["offset"] == offset + len(data)
            data += base64.b64decode(body["data"])
            assert mark == str(offset + len(data))
        return data


async def test_a_running_log_is_read_at_the_worker(ledger: Ledger, house: House) -> None:
    ledger.log = bytes(range(256)) * 3
    answer = await house.console().get(LOG)
    assert answer.content == ledger.log
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["ql3-log-offset"] == "0"
    assert answer.headers["ql3-log-total"] == "768"
    assert answer.headers["ql3-log-ended"] == "false"
    assert answer.headers["ql3-log-truncated"] == "false"


async def test_a_stored_log_is_read_in_the_store_and_says_that_it_was_cut(ledger: Ledger, house: House) -> None:
    ledger.log = b"x" * 10
    await ledger.store()
    answer = await house.console().get(LOG)
    assert answer.content == ledger.log
    assert answer.headers["ql3-log-ended"] == "true"
    assert answer.headers["ql3-log-truncated"] == "true"


async def test_a_settled_log_that_is_not_stored_yet_is_still_at_the_worker(ledger: Ledger, house: House) -> None:
    ledger.log = b"on its way"
    await ledger.store()
    ledger.stored, ledger.at_worker, ledger.ended = False, True, True
    assert (await house.console().get(LOG)).content == b"on its way"


@pytest.mark.parametrize(("status", "truncated"), [("lost", "unknown"), ("succeeded", "true")])
async def test_only_a_lost_log_may_be_incomplete(ledger: Ledger, house: House, status: str, truncated: str) -> None:
    ledger.log = b"as far as it came"
    await ledger.store()
    ledger.attempt_status = status
    answer = await house.console().get(LOG)
    assert (answer.content, answer.headers["ql3-log-ended"]) == (ledger.log, "true")
    assert answer.headers["ql3-log-truncated"] == truncated
    async with house.console().stream("GET", f"{LOG}/stream") as stream:
        events = Events(stream.aiter_lines())
        assert await events.bytes_until(len(ledger.log)) == ledger.log
        _, told, _ = await events.next()
    assert told == {"offset": len(ledger.log), "truncated": None if status == "lost" else True}


async def test_a_large_log_is_passed_on_in_pieces_of_256_kib(ledger: Ledger, house: House) -> None:
    ledger.log = random.Random(7).randbytes(1_000_003)
    answer = await house.console().get(LOG)
    assert answer.content == ledger.log
    assert answer.headers["content-length"] == "1000003"
    assert max(length for _, length in ledger.reads) == 256 * 1024


async def test_a_log_that_moves_while_it_is_read_arrives_whole(ledger: Ledger, house: House) -> None:
    ledger.log = random.Random(8).randbytes(700_000)
    ledger.moves_after = 1
    answer = await house.console().get(LOG)
    assert answer.content == ledger.log
    assert len(ledger.reads) == 1  # the rest came from the store


RANGES = [
    ("offset=2&length=3", b"234"),
    ("offset=8", b"89"),
    ("offset=10", b""),
    ("offset=99", b""),
    ("length=0", b""),
    ("attempt=1&offset=9", b"9"),
]


async def test_ranges(ledger: Ledger, house: House) -> None:
    ledger.log = b"0123456789"
    for query, expected in RANGES:
        answer = await house.console().get(f"{LOG}?{query}")
        assert answer.content == expected, query
        assert answer.headers["ql3-log-total"] == "10"


async def test_a_log_that_retention_removed_is_gone(ledger: Ledger, house: House) -> None:
    await ledger.store()
    ledger.gone = True
    answer = await house.console().get(LOG)
    assert (answer.status_code, answer.json()["code"]) == (410, "gone")


async def test_whoever_may_not_read_artifacts_reads_no_log(ledger: Ledger, house: House) -> None:
    house.authority.denied.add("artifact.read")
    for path in (LOG, f"{LOG}/stream"):
        assert (await house.console().get(path)).status_code == 403


async def test_an_attempt_that_is_none_is_named(ledger: Ledger, house: House) -> None:
    assert (await house.console().get(f"{LOG}?attempt=2")).json()["field"] == "attempt"
    assert (await house.console().get(f"{LOG}?attempt=x")).json()["code"] == "invalid"


async def test_a_log_is_followed_from_its_beginning_to_its_end(ledger: Ledger, house: House) -> None:
    ledger.log = b"before "
    async with house.console().stream("GET", f"{LOG}/stream") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = Events(answer.aiter_lines())
        assert await events.bytes_until(7) == b"before "
        await ledger.write(b"live ")
        assert await events.bytes_until(5, 7) == b"live "
        assert ledger.follows >= 1
        await ledger.write(b"\xff\x00\n")
        assert await events.bytes_until(3, 12) == b"\xff\x00\n"
        await ledger.end()
        name, body, _ = await events.next()
        assert (name, body) == ("end", {"offset": 15, "truncated": False})


async def test_lost_chunks_are_read_again(ledger: Ledger, house: House) -> None:
    async with house.console().stream("GET", f"{LOG}/stream") as answer:
        events = Events(answer.aiter_lines())
        await ledger.write(b"first ")
        assert await events.bytes_until(6) == b"first "
        await ledger.write(b"lost ", live=False)
        await ledger.write(b"third")
        assert await events.bytes_until(10, 6) == b"lost third"
        await ledger.end()
        assert (await events.next())[0] == "end"


async def test_following_resumes_by_offset_or_by_the_browsers_mark(ledger: Ledger, house: House) -> None:
    ledger.log, ledger.ended = b"0123456789", True
    for query, headers in (("?offset=6", {}), ("", {"Last-Event-ID": "6"})):
        async with house.console().stream("GET", f"{LOG}/stream{query}", headers=headers) as answer:
            events = Events(answer.aiter_lines())
            assert await events.bytes_until(4, 6) == b"6789"
            assert (await events.next())[0] == "end"


async def test_the_end_is_found_although_its_news_was_lost(ledger: Ledger, house: House) -> None:
    async with house.console().stream("GET", f"{LOG}/stream") as answer:
        events = Events(answer.aiter_lines())
        await ledger.write(b"all of it")
        assert await events.bytes_until(9) == b"all of it"
        await ledger.end(live=False)
        await ledger.store()
        await ledger.change("succeeded")  # any news about the run makes it look again
        assert (await events.next())[0] == "end"


async def test_a_stored_log_can_be_followed_too(ledger: Ledger, house: House) -> None:
    ledger.log = random.Random(9).randbytes(600_000)
    await ledger.store()
    async with house.console().stream("GET", f"{LOG}/stream") as answer:
        events = Events(answer.aiter_lines())
        assert await events.bytes_until(600_000) == ledger.log
        name, body, _ = await events.next()
        assert (name, body) == ("end", {"offset": 600_000, "truncated": True})


async def test_open_answers_are_bounded_and_end_with_the_gateway(house_for: HouseFor, bus_for: Any) -> None:
    house = await house_for(streams=1)
    ledger = Ledger(house)
    await ledger.start(bus_for)
    async with house.console().stream("GET", f"{LOG}/stream") as answer:
        events = Events(answer.aiter_lines())
        await ledger.write(b"x")
        await events.bytes_until(1)
        refused = await house.console().get(f"{LOG}/stream")
        assert refused.json()["code"] == "capacity"
        await house.gateway.stop()
        with pytest.raises(AssertionError, match="the stream ended"):
            await events.next()


async def test_a_reader_that_takes_nothing_is_let_go(
    ledger: Ledger, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.front.SEND_STALL_S", 0.2)
    let_go = asyncio.Event()
    lost = GuardedProtocol.connection_lost

    def connection_lost(self: GuardedProtocol, error: Exception | None) -> None:
        lost(self, error)
        let_go.set()

    monkeypatch.setattr(GuardedProtocol, "connection_lost", connection_lost)
    ledger.log = bytes(32 * 1024 * 1024)  # more than the buffers of both ends hold
    await ledger.store()
    port = house.gateway._server.port
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    head = f"GET {LOG} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {house.console_token}\r\n\r\n"
    writer.write(head.encode())
    await reader.readline()
    # Nothing more is read; the server's side of the connection ends, although all was not sent.
    await asyncio.wait_for(let_go.wait(), 30)
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await reader.readexactly(33 * 1024 * 1024)
    writer.close()


async def test_a_part_of_a_log_is_never_taken_for_the_whole(ledger: Ledger, house: House) -> None:
    ledger.log = bytes(700_000)
    ledger.moves_after = 1
    ledger.gone_after_move = True
    with pytest.raises(httpx.RemoteProtocolError):
        await house.console().get(LOG)


async def test_a_download_outlasts_the_question_it_began_with(
    ledger: Ledger, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.streams.RECHECK_S", 0.0)
    ledger.log = random.Random(10).randbytes(2_000_000)
    ledger.read_takes_ms = 30_000
    await ledger.store()
    assert (await house.console().get(LOG)).content == ledger.log


async def test_a_download_is_cut_off_when_its_reader_is_shut_out(
    ledger: Ledger, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.streams.RECHECK_S", 0.0)
    ledger.log = bytes(2_000_000)
    ledger.denies_after = 3
    await ledger.store()
    with pytest.raises(httpx.RemoteProtocolError):
        await house.console().get(LOG)
    assert len(ledger.stored_reads) < 6
