"""The gateway before the real owners: what a person may do is what approval says, and it arrives where it belongs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from services.approval.service import ApprovalService
from services.dispatcher.service import DispatcherService
from services.gateway.service import GatewayService
from services.kit.clock import WallClock
from services.kit.config import Config
from services.retention.service import RetentionService
from services.scheduler.service import SchedulerService
from services.vault.keyring import provision
from services.vault.service import VaultService

from .conftest import PASSWORD, PROJECT, USER

SERVICES = {
    "approval": ApprovalService,
    "vault": VaultService,
    "scheduler": SchedulerService,
    "dispatcher": DispatcherService,
    "retention": RetentionService,
    "gateway": GatewayService,
}
TASK = {"name": "hello", "spec": {"execution": {"command": ["/bin/true"]}}}
WAIT_S = 30.0


class Town:
    """All services but the worker."""

    def __init__(self, gateway: GatewayService) -> None:
        self.gateway = gateway
        self._clients: list[httpx.AsyncClient] = []

    def client(self, token: str | None = None) -> httpx.AsyncClient:
        """Somebody at the door."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        client = httpx.AsyncClient(base_url=self.gateway.url, headers=headers, trust_env=False, timeout=WAIT_S)
        self._clients.append(client)
        return client

    async def console(self) -> httpx.AsyncClient:
        """The local console."""
        made = await self.gateway.issue_console_credential()
        return self.client(f"ql3c_{made['credential_id']}_{made['secret']}")

    async def enter(self, path: str, body: dict[str, Any]) -> httpx.AsyncClient:
        """A browser that came in by one of the links."""
        client = self.client()
        answer = await client.post(f"/api/v3/{path}", json=body)
        assert answer.status_code == 200, answer.text
        client.headers["Ql3-Csrf"] = answer.json()["csrf"]
        return client

    async def owner(self) -> httpx.AsyncClient:
        """The person of the owner link."""
        link = await self.gateway.issue_owner_link()
        assert link is not None
        challenge, _, token = link.partition("#claim=")[2].partition(".")
        body = {"challenge": challenge, "token": token, "user": USER, "password": PASSWORD}
        return await self.enter("bootstrap/claim", body)

    async def close(self) -> None:
        """Everybody leaves."""
        for client in self._clients:
            await client.aclose()


@pytest.fixture
async def town(
    database_on: Callable[..., Awaitable[Any]], bus_for: Callable[..., Awaitable[Any]], tmp_path: Path
) -> AsyncIterator[Town]:
    """The services of a box, on SQLite."""
    config = msgspec.structs.replace(Config(), data=tmp_path / "data", listen="127.0.0.1:0")
    config.keyring_file.parent.mkdir(mode=0o700, parents=True)
    provision(config.keyring_file)
    running: list[Any] = []
    for name, kind in SERVICES.items():
        service = kind(
            config=config, database=await database_on("sqlite", name), bus=await bus_for(name), clock=WallClock()
        )
        running.append(service)
        await service.start()
    town = Town(running[-1])
    yield town
    await town.close()
    for service in reversed(running):
        await service.stop()


async def test_the_console_makes_and_runs_tasks(town: Town) -> None:
    console = await town.console()
    made = await console.post(f"{PROJECT}/tasks", json={**TASK, "triggers": [{"expression": "0 4 * * *"}]})
    assert made.status_code == 201, made.text
    headers = {"Idempotency-Key": "once"}
    run = await console.post(f"{PROJECT}/tasks/hello/runs", headers=headers)
    again = await console.post(f"{PROJECT}/tasks/hello/runs", headers=headers)
    assert (run.status_code, run.json()["id"]) == (201, again.json()["id"])
    batch = await console.post(f"{PROJECT}/runs:batch", json={"runs": [{"task": "hello"}] * 256})
    assert [item["error"] for item in batch.json()["items"]] == [None] * 256
    keyed = [
        await console.post(f"{PROJECT}/runs:batch", json={"runs": [{"task": "hello"}] * 2}, headers=headers)
        for _ in range(2)
    ]
    first, again = ([item["run"]["id"] for item in answer.json()["items"]] for answer in keyed)
    assert first == again
    page = (await console.get(f"{PROJECT}/runs?task=hello&limit=200")).json()
    assert len(page["items"]) == 200
    rest = (await console.get(f"{PROJECT}/runs?task=hello&limit=200&cursor={page['next']}")).json()
    assert len(rest["items"]) == 59
    why = (await console.get(f"{PROJECT}/runs/{run.json()['id']}/explain")).json()
    assert why["sentence"]
    log = await console.get(f"{PROJECT}/runs/{run.json()['id']}/log")
    assert (log.content, log.headers["ql3-log-total"], log.headers["ql3-log-ended"]) == (b"", "0", "false")
    ready = await console.get("/readyz")
    assert (ready.status_code, ready.json()["degraded"]) == (503, [])
    assert all(reason.startswith("dispatcher:") for reason in ready.json()["reasons"])


async def test_a_role_is_what_counts_and_counts_at_once(town: Town) -> None:
    owner = await town.owner()
    await owner.post(f"{PROJECT}/tasks", json=TASK)
    invitation = (await owner.post("/api/v3/invitations", json={"user": "noor"})).json()
    link, _, token = invitation["url"].partition("#join=")[2].partition(".")
    noor = await town.enter("password-links/use", {"link": link, "token": token, "password": "another long one"})
    role = f"{PROJECT}/roles/user/noor"

    assert (await noor.get(f"{PROJECT}/tasks")).status_code in (403, 404)
    assert (await noor.post("/api/v3/invitations", json={"user": "third"})).status_code in (403, 404)

    bound = await owner.put(role, json={"role": "viewer", "expected_version": 0})
    assert bound.status_code == 200, bound.text
    await _until(lambda: _status(noor, "GET", f"{PROJECT}/tasks", 200))
    assert (await noor.post(f"{PROJECT}/tasks/hello/runs")).status_code == 403
    assert (await noor.put(role, json={"role": "owner", "expected_version": 1})).status_code == 403
    assert (await noor.get("/api/v3/audit")).status_code == 403
    assert (await noor.get("/api/v3/dead")).status_code == 403

    await owner.put(role, json={"role": "operator", "expected_version": 1})
    await _until(lambda: _status(noor, "POST", f"{PROJECT}/tasks/hello/runs", 201))
    assert (await noor.put(f"{PROJECT}/secrets/x", json={"value": "v"})).status_code == 403

    await owner.put(role, json={"role": None, "expected_version": 2})
    await _until(lambda: _status(noor, "GET", f"{PROJECT}/tasks", 403, 404))


async def test_limits_are_set_by_who_manages_policy_and_read_by_who_may_look(town: Town) -> None:
    owner = await town.owner()
    spec = {"execution": {"command": ["/bin/true"]}, "terms": {"concurrency": [{"key": "db", "limit": 2}]}}
    await owner.post(f"{PROJECT}/tasks", json={"name": "hello", "spec": spec})
    assert (await owner.post(f"{PROJECT}/tasks/hello/runs")).status_code == 201
    own = {"project": "default", "kind": "project", "key": "default", "limit": 7, "live": 0}
    key = {**own, "kind": "key", "key": "db", "limit": 2}
    answer = await owner.put(f"{PROJECT}/limit", json={"limit": 7})
    assert (answer.status_code, answer.json()) == (200, {"items": [own], "next": None})
    assert (await owner.get(f"{PROJECT}/limits")).json() == {"items": [key, own], "next": None}
    page = (await owner.get(f"{PROJECT}/limits?limit=1")).json()
    assert page["items"] == [key]
    assert (await owner.get(f"{PROJECT}/limits?cursor={page['next']}")).json()["items"] == [own]
    changed = await owner.put(f"{PROJECT}/limits/db", json={"limit": 5})
    assert changed.json()["items"] == [{**key, "limit": 5}]
    assert (await owner.put(f"{PROJECT}/limits/db", json={"limit": None})).json()["items"] == [key]
    assert (await owner.put(f"{PROJECT}/limit", json={"limit": None})).json()["items"] == []

    for body in ({}, {"limit": 0}, {"limit": 100_001}, {"limit": "7"}, {"limit": 7, "key": "db"}):
        assert (await owner.put(f"{PROJECT}/limit", json=body)).status_code == 400
    assert (await owner.put(f"{PROJECT}/limits/NOT_A_KEY", json={"limit": 1})).json()["code"] == "not_found"
    assert (await owner.get(f"{PROJECT}/limits?cursor=foreign")).json()["code"] == "invalid"
    acts = [item["action"] for item in (await owner.get("/api/v3/audit?service=dispatcher")).json()["items"]]
    assert acts.count("limit.set") == 4

    invitation = (await owner.post("/api/v3/invitations", json={"user": "noor"})).json()
    link, _, token = invitation["url"].partition("#join=")[2].partition(".")
    noor = await town.enter("password-links/use", {"link": link, "token": token, "password": "another long one"})
    assert (await noor.get(f"{PROJECT}/limits")).status_code in (403, 404)
    await owner.put(f"{PROJECT}/roles/user/noor", json={"role": "operator", "expected_version": 0})
    await _until(lambda: _status(noor, "GET", f"{PROJECT}/limits", 200))
    refused = await noor.put(f"{PROJECT}/limit", json={"limit": 1})
    assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
    assert (await town.client().get(f"{PROJECT}/limits")).status_code == 401


async def test_an_application_acts_under_its_own_name(town: Town) -> None:
    owner = await town.owner()
    await owner.post(f"{PROJECT}/tasks", json=TASK)
    subject = {"type": "api_app", "id": "ci"}
    made = (await owner.post("/api/v3/credentials", json={"name": "ci", "subject": subject})).json()
    program = town.client(made["token"])
    assert (await program.get("/api/v3/session")).json()["assurance"] == "service"
    assert (await program.get(f"{PROJECT}/tasks")).status_code in (403, 404)
    await owner.put(f"{PROJECT}/roles/api_app/ci", json={"role": "operator", "expected_version": 0})
    await _until(lambda: _status(program, "POST", f"{PROJECT}/tasks/hello/runs", 201))
    (run,) = (await program.get(f"{PROJECT}/runs")).json()["items"]
    assert run["requested_by"] == subject
    identities = (await owner.get("/api/v3/identities")).json()["items"]
    (known,) = [item for item in identities if item["id"] == "ci"]
    change = {"status": "disabled", "expected_version": known["version"]}
    assert (await owner.put("/api/v3/identities/api_app/ci", json=change)).status_code == 200
    await _until(lambda: _status(program, "GET", f"{PROJECT}/tasks", 401, 403))


async def test_a_secret_goes_in_and_never_comes_out(town: Town) -> None:
    console = await town.console()
    answer = await console.put(f"{PROJECT}/secrets/token", json={"value": "hush-hush", "expected_version": 0})
    assert (answer.status_code, answer.json()["version"]) == (200, 1)
    stale = await console.put(f"{PROJECT}/secrets/token", json={"value": "x", "expected_version": 0})
    assert stale.json()["code"] == "version_conflict"
    listed = await console.get(f"{PROJECT}/secrets")
    assert [item["name"] for item in listed.json()["items"]] == ["token"]
    assert "hush-hush" not in listed.text


async def test_every_ledger_is_read_and_intact(town: Town) -> None:
    owner = await town.owner()
    await owner.post(f"{PROJECT}/tasks", json=TASK)
    acts: list[str] = []
    query = ""
    while True:
        page = (await owner.get(f"/api/v3/audit?limit=2{query}")).json()
        acts += [f"{item['service']}:{item['action']}" for item in page["items"]]
        if page["next"] is None:
            break
        query = f"&cursor={page['next']}"
    assert "gateway:password.first" in acts
    assert any(act.startswith("approval:") for act in acts)
    assert any(act.startswith("scheduler:") for act in acts)
    verdicts = (await owner.get("/api/v3/audit/verify")).json()["items"]
    assert len(verdicts) == 6
    assert all(verdict["intact"] for verdict in verdicts)


async def test_a_project_of_others_is_as_if_it_were_not(town: Town) -> None:
    owner = await town.owner()
    assert (await owner.post("/api/v3/projects", json={"id": "mine"})).status_code == 201
    invitation = (await owner.post("/api/v3/invitations", json={"user": "noor"})).json()
    link, _, token = invitation["url"].partition("#join=")[2].partition(".")
    noor = await town.enter("password-links/use", {"link": link, "token": token, "password": "another long one"})
    theirs = await noor.get("/api/v3/projects/mine/tasks")
    nothing = await noor.get("/api/v3/projects/nothing/tasks")
    assert theirs.status_code == nothing.status_code
    assert theirs.json()["code"] == nothing.json()["code"]
    assert (await noor.get("/api/v3/projects")).json()["items"] == []


async def _status(client: httpx.AsyncClient, method: str, path: str, *wanted: int) -> bool:
    return (await client.request(method, path)).status_code in wanted


async def _until(holds: Callable[[], Awaitable[bool]]) -> None:
    """A change of authority counts everywhere within two seconds, on an idle machine."""
    async with asyncio.timeout(WAIT_S):
        while not await holds():
            pass


async def _refused_after(act: Callable[[], Awaitable[httpx.Response]], since: float, *codes: int) -> None:
    """Every request that is sent later than two seconds after `since` is refused (as nobody's, if nothing is named)."""
    async with asyncio.timeout(WAIT_S):
        while True:
            sent = time.monotonic()
            answer = await act()
            if answer.status_code in (codes or (401,)):
                return
            assert sent - since <= 2.0, f"{answer.status_code} for a request of {sent - since:.1f} s later"


async def test_who_is_disabled_is_nobody_within_two_seconds(town: Town) -> None:
    owner, console = await town.owner(), await town.console()
    invitation = (await owner.post("/api/v3/invitations", json={"user": "noor"})).json()
    link, _, token = invitation["url"].partition("=")[2].partition(".")
    noor = await town.enter("password-links/use", {"link": link, "token": token, "password": PASSWORD})
    await owner.put(f"{PROJECT}/roles/user/noor", json={"role": "operator", "expected_version": 0})
    await _until(lambda: _status(noor, "GET", f"{PROJECT}/tasks", 200))
    made = (await noor.post("/api/v3/credentials", json={"name": "script"})).json()
    program = town.client(made["token"])
    assert (await program.get(f"{PROJECT}/tasks")).status_code == 200

    seen = (await owner.get("/api/v3/identities/user/noor")).json()
    assert [(item["provider"], item["state"]) for item in seen["bindings"]] == [
        ("api_credential", "active"),
        ("password", "active"),
    ]
    change = {"status": "disabled", "expected_version": seen["identity"]["version"]}
    assert (await owner.put("/api/v3/identities/user/noor", json=change)).status_code == 200
    since = time.monotonic()
    await asyncio.gather(
        _refused_after(lambda: noor.get(f"{PROJECT}/tasks"), since),
        _refused_after(lambda: program.get(f"{PROJECT}/tasks"), since),
    )
    sign_in = {"user": "noor", "password": PASSWORD}
    assert (await town.client().post("/api/v3/session", json=sign_in)).status_code == 401

    change = {"status": "active", "expected_version": change["expected_version"] + 1}
    assert (await console.put("/api/v3/identities/user/noor", json=change)).status_code == 200
    await _until(lambda: _status(program, "GET", f"{PROJECT}/tasks", 200))


async def test_a_role_that_is_taken_away_ends_within_two_seconds_in_every_service(town: Town) -> None:
    owner = await town.owner()
    await owner.post(f"{PROJECT}/tasks", json=TASK)
    subject = {"type": "api_app", "id": "ci"}
    made = (await owner.post("/api/v3/credentials", json={"name": "ci", "subject": subject})).json()
    program = town.client(made["token"])
    role = f"{PROJECT}/roles/api_app/ci"
    await owner.put(role, json={"role": "admin", "expected_version": 0})
    # Scheduler, dispatcher, vault, retention and approval itself, each with an answer of its own that it may keep.
    reads = ["tasks", "runs", "secrets", "retention", "approvals"]
    for path in reads:
        await _until(lambda path=path: _status(program, "GET", f"{PROJECT}/{path}", 200))
    assert (await owner.put(role, json={"role": None, "expected_version": 1})).status_code == 200
    since = time.monotonic()
    await asyncio.gather(
        *(_refused_after(lambda path=path: program.get(f"{PROJECT}/{path}"), since, 403, 404) for path in reads)
    )


async def test_one_name_of_a_person_is_revoked_and_the_others_stay(town: Town) -> None:
    owner = await town.owner()
    made = (await owner.post("/api/v3/credentials", json={"name": "script"})).json()
    program = town.client(made["token"])
    assert (await program.get(f"{PROJECT}/tasks")).status_code == 200
    path = f"/api/v3/identities/user/{USER}"
    wrong = {"provider": "api_credential", "provider_subject": "nobody"}
    assert (await owner.post(f"{path}/bindings/revoke", json=wrong)).status_code == 404
    name = {"provider": "api_credential", "provider_subject": made["id"], "expected_version": 2}
    assert (await owner.post(f"{path}/bindings/revoke", json=name)).json()["code"] == "version_conflict"
    ended = await owner.post(f"{path}/bindings/revoke", json={**name, "expected_version": 1})
    assert (ended.status_code, ended.json()["state"], ended.json()["version"]) == (200, "revoked", 2)
    await _refused_after(lambda: program.get(f"{PROJECT}/tasks"), time.monotonic())
    assert (await owner.get(f"{PROJECT}/tasks")).status_code == 200
    states = {item["provider"]: item["state"] for item in (await owner.get(path)).json()["bindings"]}
    assert states == {"api_credential": "revoked", "password": "active"}
    assert (await program.get(path)).status_code == 401
    (act,) = [
        item
        for item in (await owner.get("/api/v3/audit?service=approval")).json()["items"]
        if item["action"] == "identity.revoke_binding"
    ]
    assert act["detail"].items() >= {"provider": "api_credential", "name": made["id"]}.items()


async def test_a_revoked_credential_is_no_name_of_its_subject_any_more(town: Town) -> None:
    owner = await town.owner()
    made = (await owner.post("/api/v3/credentials", json={"name": "script"})).json()
    for _ in range(2):  # whoever repeats it gets the same answer
        ended = await owner.post(f"/api/v3/credentials/{made['id']}/revoke")
        assert (ended.status_code, ended.json()["state"]) == (200, "revoked")
    shown = (await owner.get(f"/api/v3/identities/user/{USER}")).json()["bindings"]
    assert {item["provider"]: item["state"] for item in shown} == {"api_credential": "revoked", "password": "active"}
    # So the password is the last name of the last owner.
    name = {"provider": "password", "provider_subject": USER}
    refused = await owner.post(f"/api/v3/identities/user/{USER}/bindings/revoke", json=name)
    assert refused.json()["code"] == "last_owner"


async def test_the_last_name_of_a_last_owner_is_not_revoked_as_a_credential_either(town: Town) -> None:
    owner = await town.owner()
    made = (await owner.post("/api/v3/credentials", json={"name": "script"})).json()
    program = town.client(made["token"])
    name = {"provider": "password", "provider_subject": USER}
    assert (await owner.post(f"/api/v3/identities/user/{USER}/bindings/revoke", json=name)).status_code == 200
    refused = await program.post(f"/api/v3/credentials/{made['id']}/revoke")
    assert refused.json()["code"] == "last_owner"
    assert (await program.get(f"{PROJECT}/tasks")).status_code == 200
    console = await town.console()
    assert (await console.post(f"/api/v3/credentials/{made['id']}/revoke")).status_code == 200
    assert (await program.get(f"{PROJECT}/tasks")).status_code == 401


async def test_a_program_ends_its_own_credential_and_no_other_name(town: Town) -> None:
    owner = await town.owner()
    subject = {"type": "api_app", "id": "ci"}
    first, second = [
        (await owner.post("/api/v3/credentials", json={"name": "ci", "subject": subject})).json() for _ in range(2)
    ]
    program = town.client(first["token"])
    assert (await program.post(f"/api/v3/credentials/{first['id']}/revoke")).status_code == 200
    assert (await program.get("/api/v3/session")).status_code == 401
    assert (await town.client(second["token"]).get("/api/v3/session")).status_code == 200
    shown = (await owner.get("/api/v3/identities/api_app/ci")).json()["bindings"]
    assert {item["provider_subject"]: item["state"] for item in shown} == {
        first["id"]: "revoked",
        second["id"]: "active",
    }
