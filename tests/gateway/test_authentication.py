"""Nobody gets in without a proof, and every proof that does not count looks the same."""

from __future__ import annotations

import base64
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from schemas.errors import Ql3Error
from services.gateway import totp
from services.gateway.peers import Peer
from services.gateway.routes import ALL
from services.gateway.service import GatewayService
from services.kit.config import Config
from services.kit.database import Statement

from .conftest import PASSWORD, PROJECT, USER, House, HouseFor

REFUSED = {"code": "unauthenticated", "status": 401}


@pytest.fixture
def dialect() -> str:
    """What reaches a table runs on the other dialect in `test_postgresql.py`."""
    return "sqlite"


def _concrete(path: str) -> str:
    for name, value in {"project": "default", "type": "user", "id": "x", "worker": "w1"}.items():
        path = path.replace("{" + name + "}", value)
    while "{" in path:
        path = path[: path.index("{")] + "0190a0a0-0000-7000-8000-000000000000" + path[path.index("}") + 1 :]
    return path


async def test_every_operation_that_is_not_public_refuses_an_unknown_caller(house: House) -> None:
    client = house.client()
    asked = 0
    for operation in ALL:
        if operation.public:
            continue
        answer = await client.request(operation.method, _concrete(operation.path))
        assert answer.status_code == 401, operation.path
        assert answer.json()["code"] == "unauthenticated"
        asked += 1
    assert asked > 40


async def test_the_console_credential_counts_and_the_one_of_an_earlier_start_does_not(house: House) -> None:
    console = house.console()
    answer = await console.get("/api/v3/session")
    assert answer.json()["id"] == "local-console"
    assert answer.json()["assurance"] == "local_console"
    newer = await house.gateway.issue_console_credential()
    house.clock.advance(2_001)
    assert (await console.get("/api/v3/session")).status_code == 401
    again = house.client(f"ql3c_{newer['credential_id']}_{newer['secret']}")
    assert (await again.get("/api/v3/session")).status_code == 200


async def test_the_console_credential_counts_on_this_machine_only(house: House) -> None:
    authenticator = house.gateway._desk.authenticator
    headers = {"authorization": f"Bearer {house.console_token}"}
    here, elsewhere = Peer("127.0.0.1", local=True), Peer("192.0.2.7", local=False)
    assert (await authenticator.authenticate("GET", headers, here)).actor.assurance == "local_console"
    # Kept for the next two seconds, but not for somebody elsewhere.
    with pytest.raises(Ql3Error, match="Sign-in is required"):
        await authenticator.authenticate("GET", headers, elsewhere)
    house.clock.advance(2_001)
    with pytest.raises(Ql3Error, match="Sign-in is required"):
        await authenticator.authenticate("GET", headers, elsewhere)


@pytest.mark.parametrize(
    "header",
    [
        "Bearer",
        "Bearer x",
        "Basic bWlyYTpzZWNyZXQ=",
        "Bearer ql3c_0190a0a0-0000-7000-8000-000000000000_" + "A" * 43,
        "Bearer ql3c_0190a0a0-0000-7000-8000-000000000000_" + "A" * 44,
        "ql3c_0190a0a0-0000-7000-8000-000000000000_" + "A" * 43,
    ],
)
async def test_wrong_credentials_look_alike(house: House, header: str) -> None:
    answer = await house.client(Authorization=header).get(f"{PROJECT}/tasks")
    assert {key: answer.json()[key] for key in REFUSED} == REFUSED
    assert answer.json()["detail"] is None


async def test_one_changed_character_of_a_secret_is_refused(house: House) -> None:
    wrong = house.console_token[:-2] + ("AA" if not house.console_token.endswith("AA") else "BB")
    assert (await house.client(wrong).get("/api/v3/session")).status_code == 401


async def test_only_a_digest_of_a_credential_is_kept(house: House) -> None:
    owner = await house.owner()
    made = (await owner.post("/api/v3/credentials", json={"name": "ci"})).json()
    secret = made["token"].split("_", 2)[2]
    cookie = owner.cookies["ql3_session"].partition(".")[2]
    for table in ("api_credentials", "sessions", "password_credentials", "audit_events", "outbox"):
        rows = await house.database.read(lambda tx, table=table: tx.fetch(Statement(f"SELECT * FROM {table}")))
        text = repr([dict(row) if not hasattr(row, "keys") else {k: row[k] for k in row} for row in rows])
        for value in (secret, cookie, PASSWORD, house.console_token):
            assert value not in text


async def test_a_credential_lives_until_it_expires_or_is_revoked(house: House) -> None:
    owner = await house.owner()
    made = (await owner.post("/api/v3/credentials", json={"name": "ci", "ttl_ms": 60_000})).json()
    program = house.client(made["token"])
    assert (await program.get("/api/v3/session")).json()["assurance"] == "single_factor"
    house.clock.advance(60_001)
    assert (await program.get("/api/v3/session")).status_code == 401
    second = (await owner.post("/api/v3/credentials", json={"name": "ci"})).json()
    program = house.client(second["token"])
    assert (await program.get("/api/v3/session")).status_code == 200
    ended = await owner.post(f"/api/v3/credentials/{second['id']}/revoke")
    assert ended.json()["state"] == "revoked"
    assert (await program.get("/api/v3/session")).status_code == 401  # here at once, without waiting for anything
    listed = (await owner.get("/api/v3/credentials")).json()["items"]
    assert {item["state"] for item in listed} == {"expired", "revoked"}
    assert all(item["token"] is None for item in listed)


async def test_a_credential_is_not_half_revoked_while_nobody_can_say_whose_name_it_is(house: House) -> None:
    owner = await house.owner()
    made = (await owner.post("/api/v3/credentials", json={"name": "ci"})).json()
    program = house.client(made["token"])
    house.authority.away = True
    refused = await owner.post(f"/api/v3/credentials/{made['id']}/revoke")
    assert (refused.status_code, refused.json()["code"]) == (503, "unavailable")
    house.authority.away = False
    assert (await program.get("/api/v3/session")).status_code == 200
    # A name that is gone already, as after a revocation that broke off behind it, stops nothing.
    house.authority.bound.pop(("api_credential", made["id"]))
    ended = await owner.post(f"/api/v3/credentials/{made['id']}/revoke")
    assert ended.json()["state"] == "revoked"


async def test_a_rotation_keeps_the_old_secret_for_the_overlap(house: House) -> None:
    owner = await house.owner()
    made = (await owner.post("/api/v3/credentials", json={"name": "ci"})).json()
    rotated = (await owner.post(f"/api/v3/credentials/{made['id']}/rotate", json={"overlap_ms": 60_000})).json()
    assert rotated["version"] == 2
    assert (await house.client(made["token"]).get("/api/v3/session")).status_code == 200
    assert (await house.client(rotated["token"]).get("/api/v3/session")).status_code == 200
    house.clock.advance(60_001)
    assert (await house.client(made["token"]).get("/api/v3/session")).status_code == 401
    assert (await house.client(rotated["token"]).get("/api/v3/session")).status_code == 200


async def test_a_credential_cannot_make_another_for_itself(house: House) -> None:
    owner = await house.owner()
    made = (await owner.post("/api/v3/credentials", json={"name": "ci"})).json()
    answer = await house.client(made["token"]).post("/api/v3/credentials", json={"name": "second"})
    assert answer.status_code == 403


async def test_a_credential_rotates_only_itself_and_never_outlives_its_end(house: House) -> None:
    owner = await house.owner()
    made, sibling = [
        (await owner.post("/api/v3/credentials", json={"name": name, "ttl_ms": 3_600_000})).json()
        for name in ("ci", "other")
    ]
    program = house.client(made["token"])
    house.clock.advance(1_800_000)
    year = {"ttl_ms": 300 * 86_400_000, "overlap_ms": 60_000}
    refused = await program.post(f"/api/v3/credentials/{sibling['id']}/rotate", json=year)
    assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
    rotated = (await program.post(f"/api/v3/credentials/{made['id']}/rotate", json=year)).json()
    assert (rotated["version"], rotated["expires_at_ms"]) == (2, made["expires_at_ms"])
    renewed = (await owner.post(f"/api/v3/credentials/{made['id']}/rotate", json=year)).json()
    assert renewed["expires_at_ms"] == house.clock.now_ms() + 300 * 86_400_000


async def test_a_disabled_person_is_refused_within_two_seconds(house: House) -> None:
    owner = await house.owner()
    assert (await owner.get("/api/v3/session")).status_code == 200
    house.authority.disabled.add(USER)
    house.clock.advance(2_001)
    assert (await owner.get("/api/v3/session")).status_code == 401


async def test_authority_that_is_away_is_no_way_in(house_for: HouseFor) -> None:
    house = await house_for()
    owner = await house.owner()
    house.clock.advance(2_001)

    async def away(*_: object) -> object:
        raise AssertionError

    house.gateway._desk.bus.request = _unavailable  # type: ignore[method-assign]
    answer = await owner.get("/api/v3/session")
    assert answer.status_code == 503
    assert answer.json()["code"] == "unavailable"


async def _unavailable(*_: object, **__: object) -> object:
    from schemas.errors import Ql3Error

    raise Ql3Error("unavailable")


async def test_the_owner_link_is_good_for_once(house: House) -> None:
    link = await house.gateway.issue_owner_link()
    assert link is not None
    # A second start cannot show the link again, but tells that it lives.
    assert await house.gateway.open_ownership() == (None, 600_000)
    challenge, _, token = link.partition("#claim=")[2].partition(".")
    body = {"challenge": challenge, "token": token, "user": USER, "password": PASSWORD}
    client = house.client()
    wrong = await client.post("/api/v3/bootstrap/claim", json={**body, "token": "A" * 43})
    assert wrong.json()["code"] == "bootstrap_rejected"
    # A link that did not count leaves no way in behind.
    refused = await client.post("/api/v3/session", json={"user": USER, "password": PASSWORD})
    assert refused.status_code == 401
    answer = await client.post("/api/v3/bootstrap/claim", json=body)
    assert answer.status_code == 200
    assert house.authority.owner is not None
    again = await house.client().post("/api/v3/bootstrap/claim", json={**body, "user": "other"})
    assert again.json()["code"] == "bootstrap_rejected"
    assert await house.gateway.issue_owner_link() is None


async def test_who_has_no_link_makes_no_identity(house: House) -> None:
    await house.gateway.issue_owner_link()
    body = {"challenge": "A" * 22, "token": "A" * 43, "user": "mallory", "password": PASSWORD}
    answer = await house.client().post("/api/v3/bootstrap/claim", json=body)
    assert answer.json()["code"] == "bootstrap_rejected"
    assert not house.authority.bound


async def test_a_sign_in_makes_a_new_session_and_ends_the_one_before(house: House) -> None:
    owner = await house.owner()
    before = owner.cookies["ql3_session"]
    answer = await owner.post("/api/v3/session", json={"user": USER, "password": PASSWORD})
    assert answer.status_code == 200
    assert owner.cookies["ql3_session"] != before
    fixed = house.client(Cookie=f"ql3_session={before}")
    assert (await fixed.get("/api/v3/session")).status_code == 401


async def test_the_cookie_is_kept_from_scripts_and_other_sites(house: House) -> None:
    await house.owner()
    answer = await house.client().post("/api/v3/session", json={"user": USER, "password": PASSWORD})
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert "Path=/" in cookie
    assert "Domain" not in cookie


async def test_behind_tls_the_cookie_is_bound_to_the_host(house_for: HouseFor) -> None:
    house = await house_for(public_url="https://ql3.example.org")
    link = house.gateway._desk.ownership
    issued = await link.issue(house.gateway.url)
    assert issued is not None
    assert issued.url is not None
    assert issued.url.startswith("https://ql3.example.org/#claim=")
    challenge, _, token = issued.url.partition("#claim=")[2].partition(".")
    port = house.gateway._server.port
    client = house.client()
    answer = await client.post(
        f"http://127.0.0.1:{port}/api/v3/bootstrap/claim",
        json={"challenge": challenge, "token": token, "user": USER, "password": PASSWORD},
    )
    assert answer.headers["set-cookie"].startswith("__Host-ql3_session=")
    assert answer.headers["set-cookie"].endswith("; Secure")
    assert "strict-transport-security" in answer.headers


async def test_changes_with_a_cookie_need_the_csrf_token_and_our_own_origin(house: House) -> None:
    owner = await house.owner()
    token = owner.headers.pop("Ql3-Csrf")
    assert (await owner.get("/api/v3/session")).status_code == 200
    body = {"name": "ci"}
    without = await owner.post("/api/v3/credentials", json=body)
    assert (without.status_code, without.json()["field"]) == (403, "ql3-csrf")
    wrong = await owner.post("/api/v3/credentials", json=body, headers={"Ql3-Csrf": "0" * 64})
    assert wrong.status_code == 403
    foreign = {"Ql3-Csrf": token, "Origin": "https://evil.example"}
    assert (await owner.post("/api/v3/credentials", json=body, headers=foreign)).status_code == 403
    cross = {"Ql3-Csrf": token, "Sec-Fetch-Site": "cross-site"}
    assert (await owner.post("/api/v3/credentials", json=body, headers=cross)).status_code == 403
    right = {"Ql3-Csrf": token, "Origin": house.gateway.url, "Sec-Fetch-Site": "same-origin"}
    assert (await owner.post("/api/v3/credentials", json=body, headers=right)).status_code == 201


async def test_signing_out_ends_the_session_here_and_in_the_browser(house: House) -> None:
    owner = await house.owner()
    cookie = owner.cookies["ql3_session"]
    assert "Max-Age=0" in (await owner.delete("/api/v3/session")).headers["set-cookie"]
    assert (await house.client(Cookie=f"ql3_session={cookie}").get("/api/v3/session")).status_code == 401


async def test_an_idle_session_ends(house: House) -> None:
    owner = await house.owner()
    house.clock.advance(23 * 3_600_000)
    assert (await owner.get("/api/v3/session")).status_code == 200
    house.clock.advance(23 * 3_600_000)  # the visit in between moved the end
    assert (await owner.get("/api/v3/session")).status_code == 200
    house.clock.advance(24 * 3_600_000 + 1)
    assert (await owner.get("/api/v3/session")).status_code == 401


async def test_wrong_passwords_are_slowed_down_whatever_the_name(house: House) -> None:
    await house.owner()
    client = house.client()
    for name in (USER, "nobody"):
        for _ in range(6):
            answer = await client.post("/api/v3/session", json={"user": name, "password": "wrong"})
            assert answer.status_code == 401
            assert answer.json()["detail"] == "The name, the password or the code is wrong."
        answer = await client.post("/api/v3/session", json={"user": name, "password": PASSWORD})
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "2"
    house.clock.advance(3_600_000)
    answer = await client.post("/api/v3/session", json={"user": USER, "password": PASSWORD})
    assert answer.status_code == 200


async def test_an_outage_of_ours_is_nobodys_wrong_password(house: House) -> None:
    await house.owner()
    client = house.client()
    house.authority.names_away = True
    for password in (PASSWORD, "wrong") * 10:  # and it tells nothing about the password
        answer = await client.post("/api/v3/session", json={"user": USER, "password": password})
        assert (answer.status_code, answer.json()["code"]) == (503, "unavailable")
    house.authority.names_away = False
    assert (await client.post("/api/v3/session", json={"user": USER, "password": PASSWORD})).status_code == 200


async def test_an_outage_takes_back_no_wait_that_wrong_passwords_have_earned(house: House) -> None:
    await house.owner()
    client = house.client()
    for _ in range(6):
        await client.post("/api/v3/session", json={"user": USER, "password": "wrong"})
    house.clock.advance(2_000)
    house.authority.names_away = True
    assert (await client.post("/api/v3/session", json={"user": USER, "password": "wrong"})).status_code == 503
    house.authority.names_away = False
    assert (await client.post("/api/v3/session", json={"user": USER, "password": "wrong"})).status_code == 429


async def test_many_wrong_names_from_one_address_are_slowed_down_too(house: House) -> None:
    await house.owner()
    client = house.client()
    statuses = [
        (await client.post("/api/v3/session", json={"user": f"name-{number}", "password": "wrong"})).status_code
        for number in range(22)
    ]
    assert statuses == [401] * 21 + [429]
    # A right name does not launder the guesses that came before it.
    house.clock.advance(2_001)
    assert (await client.post("/api/v3/session", json={"user": USER, "password": PASSWORD})).status_code == 200
    assert (await client.post("/api/v3/session", json={"user": "name-1", "password": "wrong"})).status_code == 401
    assert (await client.post("/api/v3/session", json={"user": "name-2", "password": "wrong"})).status_code == 429


async def test_a_flood_of_wrong_credentials_is_slowed_down_and_a_right_one_is_not(house: House) -> None:
    wrong = house.client("ql3c_0190a0a0-0000-7000-8000-000000000000_" + "A" * 43)
    statuses = [(await wrong.get("/api/v3/session")).status_code for _ in range(23)]
    assert statuses[-1] == 429
    assert (await house.console().get("/api/v3/session")).status_code == 200


async def test_refused_sign_ins_are_in_the_ledger(house: House) -> None:
    await house.owner()
    await house.client().post("/api/v3/session", json={"user": USER, "password": "wrong"})
    rows = await house.database.read(
        lambda tx: tx.fetch(Statement("SELECT action, target, decision FROM audit_events ORDER BY id"))
    )
    acts = [(row["action"], row["target"], row["decision"]) for row in rows]
    assert ("session.refused", USER, "deny") in acts
    assert ("password.first", USER, "allow") in acts


async def test_a_second_factor_is_asked_for_and_each_code_is_good_for_once(house: House) -> None:
    owner = await house.owner()
    uri = (await owner.post("/api/v3/session/totp", json={"password": PASSWORD})).json()["uri"]
    secret = base64.b32decode(parse_qs(urlsplit(uri).query)["secret"][0] + "=" * 0)
    now = totp.code_at(secret, house.clock.now_ms() // 1000 // 30)
    assert (await owner.post("/api/v3/session/confirm", json={"code": now})).status_code == 200
    assert (await owner.get("/api/v3/session")).json()["assurance"] == "multi_factor"
    login = {"user": USER, "password": PASSWORD}
    client = house.client()
    asked = await client.post("/api/v3/session", json=login)
    assert asked.status_code == 401
    assert asked.json()["data"] == {"second_factor": True}
    replayed = await client.post("/api/v3/session", json={**login, "code": now})
    assert replayed.status_code == 401
    house.clock.advance(30_000)
    fresh = totp.code_at(secret, house.clock.now_ms() // 1000 // 30)
    answer = await client.post("/api/v3/session", json={**login, "code": fresh})
    assert answer.status_code == 200
    assert answer.json()["assurance"] == "multi_factor"


async def test_an_invited_person_sets_a_password_with_a_link_that_is_good_for_once(house: House) -> None:
    owner = await house.owner()
    invitation = (await owner.post("/api/v3/invitations", json={"user": "noor"})).json()
    link, _, token = invitation["url"].partition("#join=")[2].partition(".")
    body = {"link": link, "token": token, "password": "another long password"}
    client = house.client()
    wrong = await client.post("/api/v3/password-links/use", json={**body, "token": "A" * 43})
    assert wrong.json()["code"] == "bootstrap_rejected"
    answer = await client.post("/api/v3/password-links/use", json=body)
    assert answer.json()["id"] == "noor"
    again = await house.client().post("/api/v3/password-links/use", json=body)
    assert again.json()["code"] == "bootstrap_rejected"


async def test_whoever_may_not_manage_the_project_invites_nobody(house: House) -> None:
    owner = await house.owner()
    house.authority.denied.add("project.manage")
    assert (await owner.post("/api/v3/invitations", json={"user": "noor"})).status_code == 403
    application = {"name": "x", "subject": {"type": "api_app", "id": "ci"}}
    assert (await owner.post("/api/v3/credentials", json=application)).status_code == 403


@pytest.mark.parametrize("password", ["short", "aaaaaaaaaaaaaaaa", "mira12345678"])
async def test_weak_passwords_are_refused(house: House, password: str) -> None:
    link = await house.gateway.issue_owner_link()
    assert link is not None
    challenge, _, token = link.partition("#claim=")[2].partition(".")
    body = {"challenge": challenge, "token": token, "user": USER, "password": password}
    answer = await house.client().post("/api/v3/bootstrap/claim", json=body)
    assert (answer.status_code, answer.json()["field"]) == (400, "password")
    assert password not in answer.text


async def test_a_password_is_changed_and_other_sessions_end(house: House) -> None:
    owner = await house.owner()
    other = house.client()
    await other.post("/api/v3/session", json={"user": USER, "password": PASSWORD})
    body = {"current": "wrong", "new": "a quite different one"}
    assert (await owner.post("/api/v3/session/password", json=body)).json()["field"] == "current"
    body["current"] = PASSWORD
    assert (await owner.post("/api/v3/session/password", json=body)).status_code == 200
    house.clock.advance(2_001)
    assert (await owner.get("/api/v3/session")).status_code == 200
    assert (await other.get("/api/v3/session")).status_code == 401
    old = await house.client().post("/api/v3/session", json={"user": USER, "password": PASSWORD})
    assert old.status_code == 401


async def test_an_eleventh_session_ends_the_oldest(house: House) -> None:
    first = await house.owner()
    for _ in range(10):
        house.clock.advance(60_000)
        answer = await house.client().post("/api/v3/session", json={"user": USER, "password": PASSWORD})
        assert answer.status_code == 200
    house.clock.advance(2_001)
    assert (await first.get("/api/v3/session")).status_code == 401


@pytest.mark.parametrize("path", ["/api/v3/session/confirm", "/api/v3/session/totp"])
async def test_a_right_password_does_not_launder_wrong_codes(house: House, path: str) -> None:
    owner = await house.owner()
    uri = (await owner.post("/api/v3/session/totp", json={"password": PASSWORD})).json()["uri"]
    method = "POST" if path.endswith("confirm") else "DELETE"
    for _ in range(5):
        answer = await owner.request(method, path, json={"code": "000000"})
        assert answer.json()["code"] == "forbidden"
        assert (await owner.post("/api/v3/session/totp", json={"password": PASSWORD})).status_code == 200
    assert (await owner.request(method, path, json={"code": "000000"})).json()["code"] == "forbidden"
    assert (await owner.request(method, path, json={"code": "000000"})).status_code == 429
    house.clock.advance(2_001)
    uri = (await owner.post("/api/v3/session/totp", json={"password": PASSWORD})).json()["uri"]
    secret = base64.b32decode(parse_qs(urlsplit(uri).query)["secret"][0])
    code = totp.code_at(secret, house.clock.now_ms() // 1000 // 30)
    assert (await owner.post("/api/v3/session/confirm", json={"code": code})).status_code == 200


async def test_removing_a_second_factor_that_is_not_there_proves_nothing(house: House) -> None:
    owner = await house.owner()
    for _ in range(6):
        await house.client().post("/api/v3/session", json={"user": USER, "password": "wrong"})
    assert (await owner.request("DELETE", "/api/v3/session/totp", json={"code": "000000"})).status_code == 200
    right = await house.client().post("/api/v3/session", json={"user": USER, "password": PASSWORD})
    assert right.status_code == 429


async def test_a_second_factor_is_removed_with_a_code_of_it(house: House) -> None:
    owner = await house.owner()
    uri = (await owner.post("/api/v3/session/totp", json={"password": PASSWORD})).json()["uri"]
    secret = base64.b32decode(parse_qs(urlsplit(uri).query)["secret"][0])

    def code() -> str:
        house.clock.advance(30_000)
        return totp.code_at(secret, house.clock.now_ms() // 1000 // 30)

    await owner.post("/api/v3/session/confirm", json={"code": code()})
    assert (await owner.get("/api/v3/session")).json()["second_factor"] is True
    again = await owner.post("/api/v3/session/totp", json={"password": PASSWORD})
    assert again.json()["code"] == "conflict"
    wrong = await owner.request("DELETE", "/api/v3/session/totp", json={"code": "000000"})
    assert (wrong.status_code, wrong.json()["field"]) == (403, "code")
    assert (await owner.request("DELETE", "/api/v3/session/totp", json={"code": code()})).status_code == 200
    answer = await house.client().post("/api/v3/session", json={"user": USER, "password": PASSWORD})
    assert answer.json()["assurance"] == "single_factor"


async def test_replicas_with_the_same_key_know_the_same_people(house: House, bus_for: Any) -> None:
    owner = await house.owner()
    made = (await owner.post("/api/v3/credentials", json={"name": "ci"})).json()
    second = GatewayService(
        config=Config(),
        database=house.database,
        bus=await bus_for("gateway"),
        clock=house.clock,
        settings=house.gateway._settings,
    )
    await second.start()
    try:
        cookie = {"Cookie": f"ql3_session={owner.cookies['ql3_session']}", "Ql3-Csrf": owner.headers["Ql3-Csrf"]}
        browser = httpx.AsyncClient(base_url=second.url, headers=cookie, trust_env=False)
        program = httpx.AsyncClient(
            base_url=second.url, headers={"Authorization": f"Bearer {made['token']}"}, trust_env=False
        )
        house.clients += [browser, program]
        assert (await browser.get("/api/v3/session")).json()["id"] == USER
        assert (await program.get("/api/v3/session")).status_code == 200
        # What one of them ends, the other has forgotten two seconds later.
        await owner.post(f"/api/v3/credentials/{made['id']}/revoke")
        await owner.delete("/api/v3/session")
        house.clock.advance(2_001)
        assert (await browser.get("/api/v3/session")).status_code == 401
        assert (await program.get("/api/v3/session")).status_code == 401
    finally:
        await second.stop()


async def test_an_open_session_alone_does_not_become_a_stronger_one(house: House) -> None:
    owner = await house.owner()
    answer = await owner.post("/api/v3/session/totp", json={"password": "found it open"})
    assert (answer.status_code, answer.json()["field"]) == (403, "password")
    assert (await owner.post("/api/v3/session/totp")).json()["code"] == "invalid"
