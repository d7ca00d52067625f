"""The commands about authority, through the real gateway to the real services."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog

from schemas import endpoints
from schemas.identity import IdentityRegister, Subject
from services.gateway.service import GatewayService
from services.gateway.settings import GatewaySettings
from services.kit import audit
from services.kit.clock import WallClock
from services.kit.config import Config
from services.kit.ids import new_id
from services.retention.service import RetentionService
from services.vault.service import VaultService
from tests.approval.conftest import gateway
from tests.approval.house import House, now
from tests.cli.conftest import Command, clean_environment
from tests.fixtures_database import Tamper
from tests.fixtures_nats import BusFactory


@pytest.fixture
async def ql3(house: House, database_on: Any, bus_for: BusFactory, tmp_path: Path) -> AsyncIterator[Command]:
    """`await ql3("approval", "list")`, signed in as the local console."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(file=open("/dev/null", "w")))  # noqa: SIM115, ASYNC230
    config = Config(data=tmp_path / "data", artifacts=tmp_path / "artifacts", keyring=tmp_path / "keyring.json")
    services: list[Any] = []
    for name, kind in (("vault", VaultService), ("retention", RetentionService)):
        made = kind(
            config=config, database=await database_on("sqlite", name), bus=await bus_for(name), clock=WallClock()
        )
        await made.start()
        services.append(made)
    made = GatewayService(
        config=config,
        database=await database_on("sqlite", "gateway"),
        bus=house.bus,
        clock=WallClock(),
        settings=GatewaySettings(listen="127.0.0.1:0", key_file=str(tmp_path / "keys" / "gateway.key")),
    )
    await made.start()
    services.append(made)
    data = tmp_path / "ql3-data"
    data.mkdir(mode=0o700)
    found = {"url": made.url, **dict(await made.issue_console_credential())}
    (data / "console.json").write_bytes(msgspec.json.encode(found))
    yield Command({**clean_environment(), "QL3_DATA": str(data)}, house, None)  # type: ignore[arg-type]
    for made in reversed(services):
        await made.stop()
    structlog.reset_defaults()


async def test_a_held_run_is_shown_and_released(ql3: Command, house: House) -> None:
    await house.task()
    run = await house.run()
    approved = await ql3("approval", "approve", run.id, "--reason", "fine", "--json")
    assert (approved.code, approved.json["state"]) == (0, "approved"), approved.err
    assert (await house.until(run.id, "queued")).status == "queued"
    await house.asked(run.id, "consumed")
    shown = await ql3("approval", "show", run.id)
    assert "run.release" in shown.out
    assert "local-console  approved: fine" in shown.out
    listed = await ql3("approval", "list", "--json", "--state", "consumed")
    assert [item["id"] for item in listed.json["items"]] == [run.id]
    assert run.id in (await ql3("approval", "list")).out
    again = await ql3("approval", "reject", run.id)
    assert (again.code, again.out) == (2, "")
    actions = await ql3("approval", "actions", "--json")
    assert actions.json["items"][0]["action_type"] == "run.release"
    assert (await ql3("approval", "actions", "--recovery", "--json")).json["items"] == []


async def test_a_rejected_run_and_one_taken_back(ql3: Command, house: House) -> None:
    await house.task()
    first, second = await house.run(), await house.run()
    assert (await ql3("approval", "reject", first.id)).out == f"{first.id}: rejected\n"
    assert (await house.until(first.id, "cancelled")).error_code == "approval_rejected"
    assert (await ql3("approval", "show", second.id)).code in (0, 2)
    await house.asked(second.id, "pending")
    assert (await ql3("approval", "withdraw", second.id)).out == f"{second.id}: withdrawn\n"
    await house.until(second.id, "cancelled")


async def test_projects_roles_and_rules(ql3: Command, house: House, tmp_path: Path) -> None:
    assert (await ql3("project", "create", "web", "--name", "Web")).out == "web: active\n"
    assert (await ql3("project", "create", "web")).code == 2
    listed = await ql3("project", "list", "--json")
    assert [item["id"] for item in listed.json["items"]] == ["default", "web"]
    await house.bus.request(
        endpoints.IDENTITIES_REGISTER,
        IdentityRegister(
            actor=now(gateway),
            subject=Subject(type="user", id="ada.l@x"),
            provider="password",
            provider_subject="ada.l@x",
        ),
    )
    given = await ql3("role", "set", "ada.l@x", "operator", "--project", "web")
    assert given.code == 0, given.err[-200:]
    assert (given.out, given.err) == ("ada.l@x: operator\n", "")
    assert (await ql3("role", "set", "ada.l@x", "owner", "--project", "web")).out == "ada.l@x: owner\n"
    assert (await ql3("role", "revoke", "ada.l@x", "--project", "web")).code == 2  # the last owner
    roles = await ql3("role", "list", "--project", "web", "--json")
    assert [(item["subject"]["id"], item["role"], item["version"]) for item in roles.json["items"]] == [
        ("ada.l@x", "owner", 2)
    ]
    assert (await ql3("role", "set", "nonsense/x", "owner")).code == 2
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps([{"name": "prod", "permission": "run.start", "labels": {"env": "prod"}, "quorum": 2}]))
    tried = await ql3(
        "project", "try", "web", "run.start", "--as", "ada.l@x", "--label", "env=prod", "--rules", str(rules), "--json"
    )
    assert (tried.json["effect"], tried.json["quorum"]) == ("require_approval", 2)
    stored = await ql3("project", "rules", "web", "--set", str(rules), "--json")
    assert (stored.json["version"], stored.json["rules"][0]["name"]) == (1, "prod")
    assert "prod" in (await ql3("project", "rules", "web")).out
    rules.write_text('[{"name": "x", "permission": "run.start", "colour": "red"}]')
    wrong = await ql3("project", "rules", "web", "--set", str(rules))
    assert (wrong.code, "colour" in wrong.err) == (2, True)
    assert (await ql3("project", "archive", "web")).out == "web: archived\n"
    assert (await ql3("project", "activate", "web")).out == "web: active\n"
    assert (await ql3("project", "archive", "default")).code == 2


async def test_the_ledgers_are_listed_exported_and_verified(ql3: Command, house: House) -> None:
    await ql3("project", "create", "web")
    listed = await ql3("audit", "list", "--service", "approval", "--json")
    assert listed.json["items"][0]["action"] == "project.create"
    exported = [json.loads(line) for line in (await ql3("audit", "export")).out.splitlines()]
    assert {"approval", "gateway"} <= {row["service"] for row in exported}
    verified = await ql3("audit", "verify", "--json")
    assert verified.code == 0, verified.err
    assert all(item["intact"] for item in verified.json["items"])
    assert (await ql3("audit", "list")).code == 0


TAMPERING = [
    ("UPDATE audit_events SET decision = 'deny' WHERE target = 'two'", "its event was edited"),
    ("DELETE FROM audit_events WHERE target = 'two'", "its event is missing"),
    (
        "UPDATE audit_seals SET position = CASE position WHEN 1 THEN 1002 ELSE 1001 END WHERE position < 3;"
        "UPDATE audit_seals SET position = position - 1000 WHERE position > 1000",
        "its place or its seal was changed",
    ),
    ("DELETE FROM audit_seals WHERE position = (SELECT max(position) FROM audit_seals)", "missing"),
]


@pytest.mark.parametrize("house", ["sqlite", "postgresql"], indirect=True)
async def test_verify_finds_what_was_done_to_a_ledger_and_shows_unsealed_rows_apart(
    ql3: Command, house: House, tamper: Tamper
) -> None:
    database = house.approval.gate.database
    for name in ("one", "two"):
        assert (await ql3("project", "create", name)).code == 0
    (sealing,) = [loop for loop in house.approval.loops if loop.name == "audit-sealer"]
    await sealing.stop()
    sealer = audit.Sealer(database)
    while await sealer.step():
        pass
    assert (await ql3("project", "create", "three")).code == 0

    async def verdict(code: int) -> Any:
        ended = await ql3("audit", "verify", "--json")
        assert ended.code == code, ended
        (found,) = [item for item in ended.json["items"] if item["service"] == "approval"]
        assert all(item["intact"] for item in ended.json["items"] if item["service"] != "approval")
        return found

    whole = await verdict(0)
    assert (whole["intact"], whole["unsealed"], whole["problems"]) == (True, 1, [])
    assert whole["sealed"] >= 2
    listed = (await ql3("audit", "list", "--service", "approval", "--json")).json["items"]
    assert [item["position"] is None for item in listed[:2]] == [True, False]
    tables = ("audit_events", "audit_seals")
    for sql, problem in TAMPERING:
        # Each on a ledger of its own would take minutes; what was done before shows beside it.
        await tamper(database, tables, sql)
        found = await verdict(1)
        assert any(problem in text for text in found["problems"]), (sql, found)
    shown = await ql3("audit", "verify")
    assert (shown.code, "approval: position" in shown.out) == (1, True)


async def test_what_cannot_be_is_refused_in_one_line(ql3: Command) -> None:
    for arguments in (
        ("approval", "approve", "NOT AN ID"),
        ("approval", "request", "run.create", "--plan", "not json"),
        ("approval", "request", "nothing.known", "--plan", "{}"),
        ("approval", "recover", new_id(), "perhaps", "--reason", "x"),
        ("approval", "list", "--state", "nonsense"),
        ("project", "show", "nowhere"),
        ("role", "set", "ann", "king"),
    ):
        ended = await ql3(*arguments)
        assert ended.code == 2, (arguments, ended)
        assert len(ended.err.splitlines()) == 1


async def test_who_is_known_and_shut_out(ql3: Command, house: House) -> None:
    for provider, name in (("password", "ada.l@x"), ("api_credential", "c1")):
        await house.bus.request(
            endpoints.IDENTITIES_REGISTER,
            IdentityRegister(
                actor=now(gateway),
                subject=Subject(type="user", id="ada.l@x"),
                provider=provider,
                provider_subject=name,
                display_name="Ada",
            ),
        )
    listed = await ql3("identity", "list", "--json")
    assert [(item["id"], item["status"]) for item in listed.json["items"]] == [("ada.l@x", "active")]
    assert "Ada" in (await ql3("identity", "list")).out
    shown = await ql3("identity", "show", "ada.l@x")
    assert shown.out.startswith("ada.l@x: active\n")
    assert "c1" in shown.out
    whole = await ql3("identity", "show", "ada.l@x", "--json")
    assert [item["provider"] for item in whole.json["bindings"]] == ["api_credential", "password"]
    first = await ql3("identity", "show", "ada.l@x", "--limit", "1", "--json")
    assert len(first.json["bindings"]) == 1
    assert first.json["next"]
    ended = await ql3("identity", "revoke-binding", "ada.l@x", "api_credential", "c1")
    assert (ended.code, ended.out) == (0, "api_credential c1: revoked\n")
    assert (await ql3("identity", "revoke-binding", "ada.l@x", "api_credential", "c2")).code == 2
    assert (await ql3("identity", "disable", "ada.l@x")).out == "ada.l@x: disabled\n"
    assert (await ql3("identity", "disable", "ada.l@x")).out == "ada.l@x: disabled\n"
    assert (await ql3("identity", "show", "ada.l@x")).out.startswith("ada.l@x: disabled\n")
    assert (await ql3("identity", "enable", "ada.l@x", "--json")).json["status"] == "active"
    assert (await ql3("identity", "show", "nobody")).code == 2
    assert (await ql3("identity", "show", "nothing/x")).code == 2
    assert (await ql3("identity", "disable", "ada.l@x", QL3_LANG="zh")).out == "ada.l@x: 已停用\n"
