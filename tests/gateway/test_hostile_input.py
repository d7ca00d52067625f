"""What people and programs send is bounded, read strictly, and answered with one clear problem."""

from __future__ import annotations

import asyncio
import json
import re
from urllib.parse import urlsplit

import msgspec
import pytest

from schemas import endpoints
from schemas.errors import REGISTRY
from schemas.tasks import TaskCreate
from services.gateway.routes import ALL
from services.gateway.server import GuardedProtocol
from services.gateway.service import GatewayService
from services.gateway.settings import GatewaySettings
from services.kit.bus import Caller, Route
from services.kit.config import Config

from .conftest import PROJECT, House, HouseFor

TASK = {"name": "hello", "spec": {"execution": {"command": ["/bin/true"]}}}


@pytest.fixture
def dialect() -> str:
    """What is refused here never reaches a database; one dialect is enough."""
    return "sqlite"


async def _raw(house: House, request: bytes) -> bytes:
    """What the server says to bytes that no client library would send; ends when it closes the connection."""
    address = urlsplit(house.gateway.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(request)
        async with asyncio.timeout(30):
            return await reader.read()
    finally:
        writer.close()


def _get(path: str, *headers: str, host: str = "127.0.0.1") -> bytes:
    lines = [f"GET {path} HTTP/1.1", f"Host: {host}", "Connection: close", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def _problem(answer: bytes) -> dict[str, object]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/problem+json" in head.lower(), answer
    return json.loads(body)


PATHS = [
    "/aPi/v3/projects",
    "/API/V3/PROJECTS",
    "/api/v3/projects/",
    "/api/v3//projects",
    "/api/v3/../v3/projects",
    "/api/v3/./projects",
    "/api/v3/projects/..%2f..%2flivez",
    "/api/v3/%70rojects",
    "/api/v3/projects%00",
    "/api/v3/projects;x=1",
    "/api/v3/projects/default/tasks/..",
    "/api\\v3\\projects",
    "/assets/../service.py",
    "/assets/%2e%2e/service.py",
    "/assets/index.html",
    "//evil.example/api/v3/projects",
]


async def test_a_path_has_one_spelling(house: House) -> None:
    for path in PATHS:
        answer = await _raw(house, _get(path, f"Authorization: Bearer {house.console_token}"))
        status = int(answer.split(b" ", 2)[1])
        assert status in (400, 404), answer
        assert b"Traceback" not in answer


async def test_a_foreign_host_name_is_refused(house: House) -> None:
    for host in ("evil.example", "evil.example:5700", "127.0.0.1.evil.example", "localhost@evil.example", ""):
        answer = _problem(await _raw(house, _get("/api/v3/session", host=host)))
        assert (answer["code"], answer["field"]) == ("invalid", "host"), host
    twice = b"GET /api/v3/session HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
    assert _problem(await _raw(house, twice))["field"] == "host"
    for host in ("127.0.0.1", "localhost:5700", "[::1]:5700"):
        assert _problem(await _raw(house, _get("/api/v3/session", host=host)))["code"] == "unauthenticated", host
    # Probes come with whatever name the prober has.
    assert (await _raw(house, _get("/livez", host="gateway.ql3.svc"))).startswith(b"HTTP/1.1 200")


async def test_a_named_host_is_let_in_where_it_is_named(house_for: HouseFor) -> None:
    house = await house_for(allowed_hosts=["box.lan"])
    assert _problem(await _raw(house, _get("/api/v3/session", host="box.lan:5700")))["code"] == "unauthenticated"
    assert _problem(await _raw(house, _get("/api/v3/session", host="other.lan")))["field"] == "host"


async def test_an_endless_head_is_cut_off(house: House) -> None:
    # The server closes with bytes unread, so the system may reset the connection before its answer is seen.
    field = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"a" * 300_000
    many = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(40_000)) + b"\r\n"
    for request in (field, many):
        try:
            answer = await _raw(house, request)
        except ConnectionError:
            continue
        assert answer.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400")), answer[:80]
    # One that is a little too large for us, and small enough to be answered in order.
    answer = await _raw(house, _get("/", "X: " + "a" * 20_000))
    assert answer.startswith(b"HTTP/1.1 431")


async def test_a_long_address_is_refused(house: House) -> None:
    answer = _problem(await _raw(house, _get("/api/v3/projects?cursor=" + "a" * 4000)))
    assert answer["code"] == "too_large"


async def test_what_is_not_http_is_answered_and_let_go(house: House) -> None:
    assert (await _raw(house, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n")).startswith(b"HTTP/1.1 400")
    upgrade = _get("/api/v3/session", "Upgrade: websocket").replace(b"Connection: close", b"Connection: Upgrade")
    answer = await _raw(house, upgrade.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    assert b" 101 " not in answer.split(b"\r\n", 1)[0]


async def test_a_slow_head_is_let_go(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.server.HEAD_S", 0.05)
    assert await _raw(house, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ") == b""
    assert await _raw(house, b"") == b""


async def test_a_slow_body_is_let_go(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.serve.BODY_S", 0.05)
    head = f"POST {PROJECT}/tasks HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {house.console_token}\r\n"
    head += "Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    answer = _problem(await _raw(house, head.encode()))
    assert answer["code"] == "invalid"


async def test_a_large_body_is_refused_before_it_is_read(house: House) -> None:
    head = f"POST {PROJECT}/tasks HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {house.console_token}\r\n"
    head += "Content-Type: application/json\r\nContent-Length: 100000000\r\n\r\n"
    answer = _problem(await _raw(house, head.encode()))  # and the connection ends, though nothing was sent
    assert answer["code"] == "too_large"
    lying = head.replace("Content-Length: 100000000", "Transfer-Encoding: chunked")
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    answer = _problem(await _raw(house, lying.encode() + chunk * 10))
    assert answer["code"] == "too_large"


async def test_an_unknown_caller_sends_no_body(house: House) -> None:
    head = f"POST {PROJECT}/tasks HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    answer = _problem(await _raw(house, (head + "Content-Length: 100000\r\n\r\n").encode()))
    assert answer["code"] == "unauthenticated"


BODIES = [
    (b"{", "invalid", None),
    (b"[]", "invalid", None),
    (b'"\xff"', "invalid", None),
    (b"null", "invalid", None),
    (b"{}", "invalid", None),
    (json.dumps({**TASK, "nmae": "x"}).encode(), "unknown_field", "nmae"),
    (json.dumps({**TASK, "name": "No Slug"}).encode(), "invalid", "name"),
    (json.dumps({**TASK, "name": "a" * 64}).encode(), "invalid", "name"),
    (json.dumps({**TASK, "name": 7}).encode(), "invalid", "name"),
    (json.dumps({**TASK, "spec": {"execution": {"command": []}}}).encode(), "invalid", "spec.execution.command"),
    (
        json.dumps({**TASK, "spec": {"execution": {"command": ["x"], "timeout": 3}}}).encode(),
        "unknown_field",
        "spec.execution.timeout",
    ),
    (
        json.dumps({**TASK, "triggers": [{"kind": "cron", "expresion": "* * * * *"}]}).encode(),
        "unknown_field",
        "triggers[0].expresion",
    ),
    (b"[" * 100_000, "invalid", None),
]


async def test_a_wrong_body_names_its_field(house: House) -> None:
    for body, code, field in BODIES:
        answer = await house.console().post(
            f"{PROJECT}/tasks", content=body, headers={"Content-Type": "application/json"}
        )
        problem = answer.json()
        assert (problem["code"], problem["field"]) == (code, field), problem
        assert answer.status_code == REGISTRY[code].status
        assert problem["mend"]


async def test_only_json_is_read(house: House) -> None:
    # A page of another site can send these without asking first.
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        answer = await house.console().post(
            f"{PROJECT}/tasks", content=json.dumps(TASK).encode(), headers={"Content-Type": kind}
        )
        assert (answer.status_code, answer.json()["field"]) == (400, "content-type")


QUERIES = [
    ("limt=5", "limt"),
    ("limit=0", "limit"),
    ("limit=201", "limit"),
    ("limit=x", "limit"),
    ("limit=1&limit=2", "limit"),
    ("status=queued,nonsense", "status[1]"),
    ("limit", "query"),
]


async def test_a_wrong_query_names_its_field(house: House) -> None:
    for query, field in QUERIES:
        answer = await house.console().get(f"{PROJECT}/runs?{query}")
        assert (answer.status_code, answer.json()["field"]) == (400, field)


async def test_what_cannot_be_a_name_is_not_found(house: House) -> None:
    for path in ("runs/1", "runs/0190A0A0-0000-7000-8000-000000000000", "tasks/UPPER", "tasks/a_b"):
        answer = await house.console().get(f"{PROJECT}/{path}")
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found"), path
    answer = await house.console().get("/api/v3/nothing/here")
    assert answer.json()["code"] == "not_found"
    answer = await house.console().request("PATCH", f"{PROJECT}/tasks")
    assert answer.json()["field"] == "method"


async def test_a_header_that_decides_is_sent_once(house: House) -> None:
    token = house.console_token
    request = _get("/api/v3/session", f"Authorization: Bearer {token}", f"Authorization: Bearer {token}")
    assert _problem(await _raw(house, request))["field"] == "authorization"


async def test_every_answer_carries_the_security_headers(house: House) -> None:
    for path in ("/", "/livez", "/api/v3/session", "/assets/app.js", "/nothing"):
        headers = (await house.client().get(path)).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe-inline" not in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert "server" not in headers
        assert "access-control-allow-origin" not in headers
    assert (await house.client().get("/api/v3/session")).headers["cache-control"] == "no-store"


async def test_too_many_at_once_are_told_to_come_again(house_for: HouseFor) -> None:
    house = await house_for(in_flight=1)
    entered, leave = asyncio.Event(), asyncio.Event()

    async def slow(_: TaskCreate, __: Caller) -> object:
        entered.set()
        await leave.wait()
        raise AssertionError

    await house.serve("scheduler", Route(endpoints.TASKS_CREATE, slow))
    waiting = asyncio.create_task(house.console().post(f"{PROJECT}/tasks", json=TASK))
    await asyncio.wait_for(entered.wait(), 30)
    refused = await house.console().get("/api/v3/session")
    assert (refused.status_code, refused.json()["code"]) == (503, "capacity")
    assert refused.headers["retry-after"] == "1"
    assert (await house.client().get("/livez")).status_code == 200  # probes always pass
    leave.set()
    assert (await waiting).status_code == 500
    assert (await house.console().get("/api/v3/session")).status_code == 200


@pytest.mark.parametrize("path", ["/api/v3/session", "/hooks/default/0190a0a0-0000-7000-8000-00000000000a/" + "A" * 43])
async def test_a_stranger_who_sends_slowly_takes_nobodys_place(house_for: HouseFor, path: str) -> None:
    house = await house_for(in_flight=1)
    address = urlsplit(house.gateway.url)
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 12\r\n\r\n{{"
    strangers = [await asyncio.open_connection(address.hostname, address.port) for _ in range(3)]
    for _, writer in strangers:
        writer.write(head.encode())
        await writer.drain()
    for _ in range(3):
        assert (await house.console().get("/api/v3/session")).status_code == 200
    for reader, writer in strangers:
        writer.write(b" " * 11)
        assert (await asyncio.wait_for(reader.readline(), 30)).split()[1] in (b"400", b"404")
        writer.close()
    assert (await house.console().get("/api/v3/session")).status_code == 200


async def test_one_address_takes_no_more_than_half_of_the_connections(
    house_for: HouseFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.server.is_loopback", lambda _: False)
    gone = asyncio.Semaphore(0)
    lose = GuardedProtocol.connection_lost

    def lost(self: GuardedProtocol, error: Exception | None) -> None:
        lose(self, error)
        gone.release()

    monkeypatch.setattr(GuardedProtocol, "connection_lost", lost)
    house = await house_for(connections=4)
    address = urlsplit(house.gateway.url)
    for _ in range(2):  # a place that is left is free again
        opened = [await asyncio.open_connection(address.hostname, address.port) for _ in range(3)]
        for _, writer in opened:
            writer.write(_get("/livez").replace(b"Connection: close\r\n", b""))
        answers = [await _first_line(reader) for reader, _ in opened]
        assert sorted(answers) == [b"", b"HTTP/1.1 200 OK", b"HTTP/1.1 200 OK"]
        for _, writer in opened:
            writer.close()
        for _ in opened:
            await asyncio.wait_for(gone.acquire(), 30)


async def _first_line(reader: asyncio.StreamReader) -> bytes:
    try:
        return (await asyncio.wait_for(reader.readline(), 30)).strip()
    except ConnectionError:
        return b""


async def test_an_error_of_ours_shows_nothing_of_itself(house: House) -> None:
    async def broken(*_: object, **__: object) -> object:
        raise RuntimeError("a path /var/lib/x and a token")

    house.gateway._desk.bus.request = broken  # type: ignore[method-assign]
    answer = await house.console().get(f"{PROJECT}/tasks")
    assert (answer.status_code, answer.json()["code"]) == (500, "internal_error")
    assert "token" not in answer.text


async def test_a_busy_port_is_named(house: House, database_on: object, bus_for: object, tmp_path: object) -> None:
    port = house.gateway._server.port
    settings = GatewaySettings(listen=f"127.0.0.1:{port}", key_file=str(tmp_path) + "/second.key")
    second = GatewayService(
        config=Config(), database=house.database, bus=house.gateway._bus, clock=house.clock, settings=settings
    )
    with pytest.raises(Exception, match=f"127.0.0.1:{port} is already used by another program") as caught:
        await second.start()
    assert caught.value.code == "setup_invalid"  # type: ignore[attr-defined]
    assert caught.value.field == "QL3_LISTEN"  # type: ignore[attr-defined]
    await second.stop()


@pytest.mark.parametrize("listen", ["5700", "127.0.0.1:", "127.0.0.1:99999", ":5700", "127.0.0.1:x"])
def test_an_address_that_is_none_is_named(listen: str) -> None:
    with pytest.raises(Exception, match="host:port") as caught:
        _ = GatewaySettings(listen=listen).address
    assert caught.value.field == "QL3_LISTEN"  # type: ignore[attr-defined]


def _walked(path: str) -> str:
    """An operation's path with something plausible in each place."""
    for name, value in {"project": "default", "task": "hello", "type": "user"}.items():
        path = path.replace("{" + name + "}", value)
    return re.sub(r"\{\w+\}", "0190a0a0-0000-7000-8000-00000000000a", path)


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 10**400, "a\0b", ["a\0"], {"deep": [{"\0": 1}]}])
async def test_what_no_table_keeps_is_refused_by_name(house: House, value: object) -> None:
    owner = await house.owner()
    walked = 0
    for operation in ALL:
        if operation.method == "GET":
            continue
        field = next((one.encode_name for one in msgspec.structs.fields(operation.reads)), None)
        if field is None:
            continue
        body = json.dumps({field: value})
        answer = await owner.request(
            operation.method,
            _walked(operation.path),
            content=body,
            headers={"Content-Type": "application/json"},
        )
        problem = answer.json()
        assert (answer.status_code, problem["code"]) == (400, "invalid"), (operation.name, problem)
        if value != 10**400:  # the decoder itself has had enough
            assert problem["field"].startswith(field), (operation.name, problem)
        walked += 1
    assert walked > 30


@pytest.mark.parametrize("text", ["%00", str(2**63), "9" * 40, "-" + "9" * 19])
async def test_no_query_breaks_a_list(house: House, text: str) -> None:
    console = house.console()
    walked = 0
    for operation in ALL:
        if operation.method != "GET" or operation.produces != "json":
            continue
        for field in msgspec.structs.fields(operation.reads):
            kind = str(field.type)
            if "int" not in kind and (text != "%00" or "str" not in kind):
                continue
            answer = await console.get(f"{_walked(operation.path)}?{field.encode_name}={text}")
            problem = answer.json()
            assert (answer.status_code, problem["code"]) == (400, "invalid"), (operation.name, problem)
            walked += 1
    assert walked > 10
