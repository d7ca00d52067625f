"""Secrets over a real bus: sealed on their way in and out, refused to whoever is not allowed, nowhere in plain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from schemas.endpoints import (
    AUDIT_READ,
    CONTEXT_OPEN,
    FEED_READ,
    HEALTH,
    LEASES_VERIFY,
    SECRETS_LIST,
    SECRETS_SET,
    VAULT_KEY,
)
from schemas.errors import Ql3Error
from schemas.paging import Page
from schemas.secrets import ContextOpen, SealedValues, Secret, SecretList, SecretSet, VaultKeyRead
from schemas.system import AuditRead, FeedRead, HealthRead
from schemas.tasks import Execution, ExecutionRevision, SecretRef, Variable
from schemas.workers import LeaseVerified, LeaseVerify, SessionFence
from services.kit.bus import Bus, Caller, Route
from services.kit.clock import ManualClock
from services.kit.config import Config
from services.kit.database import Database, Statement
from services.kit.sealing import SealingKey, attempt_context, seal, secret_context
from services.vault.keyring import KeyringFile, provision, rotate
from services.vault.service import VaultService
from tests.fixtures_nats import WORKER
from tests.peers import OWNER, STRANGER, Authority, code_of

VALUE = "s3cret-välue-4711"
ATTEMPT = "01990000-0000-7000-8000-0000000000aa"
RUN = "01990000-0000-7000-8000-0000000000bb"
TASK = "01990000-0000-7000-8000-0000000000cc"
SESSION = "01990000-0000-7000-8000-0000000000dd"
FENCE = SessionFence(worker=WORKER, session_id=SESSION, generation=1)


def mutation(number: int) -> str:
    return f"01990000-0000-7000-8000-{number:012d}"


class Ledger:
    """The dispatcher's side: says which revision an attempt has pinned, or refuses."""

    def __init__(self, session: SealingKey) -> None:
        self.session = session
        self.environment: list[Variable] = []
        self.refusal: str | None = None
        self.asked: list[LeaseVerify] = []

    async def verify(self, message: LeaseVerify, _caller: Caller) -> LeaseVerified:
        self.asked.append(message)
        if self.refusal:
            raise Ql3Error(self.refusal)
        return LeaseVerified(
            project="default",
            run_id=RUN,
            revision=ExecutionRevision(
                project="default",
                task_id=TASK,
                task_name="sync",
                task_revision=1,
                execution=Execution(command=["true"], environment=self.environment),
            ),
            public_key=self.session.public,
        )


class Vault:
    """A running vault with its peers."""

    def __init__(self, service: VaultService, database: Database, keyring: Path, bus: Bus, worker: Bus) -> None:
        self.service = service
        self.database = database
        self.keyring = keyring
        self.bus = bus
        self.worker = worker
        self.session = SealingKey.generate()
        self.ledger = Ledger(self.session)

    async def set(
        self,
        name: str = "token",
        value: str = VALUE,
        *,
        number: int = 1,
        expected: int | None = None,
        actor=OWNER,
        project: str = "default",
    ):
        key = await self.bus.request(VAULT_KEY, VaultKeyRead())
        sealed = seal(key.public_key, value.encode(), secret_context(project, name, mutation(number)))
        message = SecretSet(
            actor=actor,
            project=project,
            name=name,
            sealed=sealed,
            expected_version=expected,
            mutation_id=mutation(number),
        )
        return await self.bus.request(SECRETS_SET, message)

    async def open(self, *environment: Variable, worker: str = WORKER) -> dict[str, str]:
        self.ledger.environment = list(environment)
        message = ContextOpen(
            fence=msgspec.structs.replace(FENCE, worker=worker),
            attempt_id=ATTEMPT,
            lease_generation=3,
            sequence=1,
            proof="0" * 64,
        )
        answer = await self.worker.request(CONTEXT_OPEN, message, token=WORKER)
        opened = self.session.open(answer.sealed, attempt_context(ATTEMPT, 3))
        return msgspec.json.decode(opened, type=SealedValues).values


@pytest.fixture
async def vault(database_for, bus_for, tmp_path: Path) -> AsyncIterator[Vault]:
    database = await database_for("vault")
    keyring = tmp_path / "keyring.json"
    provision(keyring)
    service = VaultService(
        config=Config(keyring=keyring), database=database, bus=await bus_for("vault"), clock=ManualClock()
    )
    await Authority().serve(await bus_for("approval"))
    running = Vault(
        service, database, keyring, await bus_for("gateway"), await bus_for("worker", worker=WORKER, streams=False)
    )
    dispatcher = await bus_for("dispatcher")
    await dispatcher.serve("dispatcher", "1.0.0", [Route(LEASES_VERIFY, running.ledger.verify)])
    await dispatcher.flush()
    await service.start()
    yield running
    await service.stop()


def variable(name: str, secret: str, version: int | None = None) -> Variable:
    return Variable(name=name, secret=SecretRef(secret=secret, version=version))


async def test_what_was_set_opens_for_the_session_that_holds_the_attempt(vault: Vault) -> None:
    await vault.set("token", "one", number=1)
    await vault.set("token", "two", number=2)
    await vault.set("other", VALUE, number=3)
    values = await vault.open(
        Variable(name="PUBLIC", value="x"),
        variable("NOW", "token"),
        variable("FIRST", "token", 1),
        variable("OTHER", "other"),
    )
    assert values == {"NOW": "two", "FIRST": "one", "OTHER": VALUE}
    asked = vault.ledger.asked[0]
    assert (asked.fence, asked.attempt_id, asked.lease_generation) == (FENCE, ATTEMPT, 3)


async def test_versions_count_up_and_are_compared(vault: Vault) -> None:
    assert (await vault.set(number=1, expected=0)).secret.version == 1
    assert (await vault.set(number=2, expected=1)).secret.version == 2
    with pytest.raises(Ql3Error) as caught:
        await vault.set(number=3, expected=1)
    assert caught.value.code == "version_conflict"
    assert caught.value.data == {"current_version": 2}
    assert (await vault.set(number=4)).secret.version == 3


async def test_a_mutation_is_replayed_with_the_same_value_and_refused_with_another(vault: Vault) -> None:
    first = await vault.set(number=1, expected=0)
    again = await vault.set(number=1, expected=0)
    assert (again.secret, again.replayed) == (first.secret, True)
    for value, expected in (("another", 0), (VALUE, 1)):
        with pytest.raises(Ql3Error) as caught:
            await vault.set(value=value, number=1, expected=expected)
        assert caught.value.code == "mutation_conflict"
    assert (await vault.set(number=2)).secret.version == 2
    assert (await vault.set(number=1, expected=0)).replayed


async def test_of_writers_at_once_each_gets_a_version_and_one_a_compared_one(vault: Vault) -> None:
    open_writers = await asyncio.gather(*(vault.set(number=number) for number in range(1, 6)))
    assert sorted(answer.secret.version for answer in open_writers) == [1, 2, 3, 4, 5]
    compared = await asyncio.gather(
        *(vault.set("other", number=number, expected=0) for number in range(10, 15)), return_exceptions=True
    )
    assert [code_of(outcome) for outcome in compared if isinstance(outcome, Exception)] == ["version_conflict"] * 4
    repeats = await asyncio.gather(*(vault.set("third", number=20, expected=0) for _ in range(5)))
    assert {answer.secret.version for answer in repeats} == {1}
    assert [answer.replayed for answer in repeats].count(False) == 1


async def test_who_may_not_manage_secrets_changes_and_sees_nothing(vault: Vault) -> None:
    for actor, project in ((STRANGER, "default"), (OWNER, "elsewhere")):
        with pytest.raises(Ql3Error) as caught:
            await vault.set(actor=actor, project=project)
        assert caught.value.code == "forbidden"
        with pytest.raises(Ql3Error) as caught:
            await vault.bus.request(SECRETS_LIST, SecretList(actor=actor, project=project))
        assert caught.value.code == "forbidden"
    page = await vault.bus.request(SECRETS_LIST, SecretList(actor=OWNER, project="default"))
    assert page.items == []


async def test_the_list_is_paged_and_holds_no_values(vault: Vault) -> None:
    for number, name in enumerate(("c", "a", "b"), start=1):
        await vault.set(name, number=number)
    first = await vault.bus.request(SECRETS_LIST, SecretList(actor=OWNER, project="default", page=Page(limit=2)))
    assert [item.name for item in first.items] == ["a", "b"]
    rest = await vault.bus.request(
        SECRETS_LIST, SecretList(actor=OWNER, project="default", page=Page(limit=2, cursor=first.next))
    )
    assert ([item.name for item in rest.items], rest.next) == (["c"], None)
    assert set(Secret.__struct_fields__) == {"project", "name", "version", "key_id", "created_at_ms"}


async def test_a_box_for_another_name_or_key_is_refused(vault: Vault) -> None:
    key = (await vault.bus.request(VAULT_KEY, VaultKeyRead())).public_key
    boxes = (
        seal(key, VALUE.encode(), secret_context("default", "other", mutation(1))),
        seal(SealingKey.generate().public, VALUE.encode(), secret_context("default", "token", mutation(1))),
        "AAAA",
    )
    for sealed in boxes:
        message = SecretSet(
            actor=OWNER, project="default", name="token", sealed=sealed, expected_version=0, mutation_id=mutation(1)
        )
        with pytest.raises(Ql3Error) as caught:
            await vault.bus.request(SECRETS_SET, message)
        assert (caught.value.code, caught.value.field) == ("invalid", "sealed")


@pytest.mark.parametrize(("value", "code"), [("", "invalid"), ("a\0b", "invalid"), ("x" * 16385, "too_large")])
async def test_values_that_no_variable_can_hold_are_refused(vault: Vault, value: str, code: str) -> None:
    with pytest.raises(Ql3Error) as caught:
        await vault.set(value=value)
    assert (caught.value.code, caught.value.field) == (code, "value")


async def test_the_largest_value_goes_through(vault: Vault) -> None:
    await vault.set(value="x" * 16384)
    assert await vault.open(variable("BIG", "token")) == {"BIG": "x" * 16384}


async def test_the_dispatcher_alone_decides_who_holds_an_attempt(vault: Vault) -> None:
    await vault.set()
    vault.ledger.refusal = "fence_rejected"
    with pytest.raises(Ql3Error) as caught:
        await vault.open(variable("TOKEN", "token"))
    assert code_of(caught.value) == "fence_rejected"
    vault.ledger.refusal = None
    vault.ledger.asked.clear()
    with pytest.raises(Ql3Error) as caught:
        await vault.open(variable("TOKEN", "token"), worker="somebody-else")
    assert code_of(caught.value) == "fence_rejected"
    assert vault.ledger.asked == []


async def test_an_absent_secret_fails_the_whole_context_and_is_named(vault: Vault) -> None:
    await vault.set()
    with pytest.raises(Ql3Error) as caught:
        await vault.open(variable("TOKEN", "token"), variable("ABSENT", "nothing"))
    assert (caught.value.code, caught.value.field) == ("secret_unavailable", "environment.ABSENT")
    assert caught.value.detail == "The secret nothing of the variable ABSENT does not exist."
    with pytest.raises(Ql3Error) as caught:
        await vault.open(variable("TOKEN", "token", 2))
    assert code_of(caught.value) == "secret_unavailable"
    assert "token (version 2)" in str(caught.value.detail)


async def test_secrets_survive_a_rotation_and_a_lost_key_shows_in_health(vault: Vault) -> None:
    await vault.set(value="old", number=1)
    before = vault.keyring.read_bytes()
    rotate(vault.keyring, KeyringFile(vault.keyring).read().active_key_id)
    await vault.set("newer", "new", number=2)
    assert await vault.open(variable("A", "token"), variable("B", "newer")) == {"A": "old", "B": "new"}
    assert (await vault.bus.request(HEALTH["vault"], HealthRead())).reasons == []
    vault.keyring.write_bytes(before)
    await vault.service.check_keyring()
    (reason,) = (await vault.bus.request(HEALTH["vault"], HealthRead())).reasons
    assert "lacks a key" in reason
    with pytest.raises(Ql3Error) as caught:
        await vault.open(variable("B", "newer"))
    assert code_of(caught.value) == "secret_unavailable"


async def test_each_new_version_is_audited_and_told_without_its_value(vault: Vault) -> None:
    await vault.set(number=1)
    await vault.set(number=1)
    audit = await vault.bus.request(AUDIT_READ["vault"], AuditRead(actor=OWNER, project="default"))
    (row,) = audit.items
    assert (row.action, row.target, row.outcome, row.actor and row.actor.id) == ("secret.set", "token", "allow", "ada")
    feed = await vault.bus.request(FEED_READ["vault"], FeedRead())
    assert [item.subject for item in feed.items] == ["ql3.evt.secret.default.token.set"]


async def test_the_value_is_in_no_table_in_plain(vault: Vault) -> None:
    await vault.set()
    names = Statement(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'",
        postgresql="SELECT tablename AS name FROM pg_tables WHERE schemaname = 'ql3_vault'",
    )
    tables = [row["name"] for row in await vault.database.read(lambda tx: tx.fetch(names))]
    assert "secret_envelopes" in tables
    for table in tables:
        rows = await vault.database.read(lambda tx, table=table: tx.fetch(Statement(f"SELECT * FROM {table}")))
        assert VALUE not in repr([dict(row) for row in rows])
