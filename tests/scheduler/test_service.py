"""The scheduler over a real bus: its endpoints, its orders with their answers, and who may do what."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from schemas.base import decode
from schemas.endpoints import (
    AUDIT_READ,
    FEED_READ,
    HEALTH,
    POLICY_CHECK,
    RUNS_CANCEL,
    RUNS_SUBMIT,
    SECRETS_LIST,
    TASKS_APPLY,
    TASKS_CREATE,
    TASKS_DELETE,
    TASKS_ENABLE,
    TASKS_GET,
    TASKS_LIST,
    TASKS_RUN,
    TASKS_RUN_BATCH,
    TASKS_UPDATE,
    TRIGGERS_BACKFILL,
    TRIGGERS_CREATE,
    TRIGGERS_LIST,
    TRIGGERS_MISSED,
)
from schemas.errors import Ql3Error
from schemas.identity import PolicyChanged, PolicyCheck, PolicyDecision
from schemas.runs import RunAnswer, RunCancel, SubmitAnswer, SubmitRuns
from schemas.secrets import Secret, SecretList, SecretPage
from schemas.subjects import event
from schemas.system import AuditRead, FeedRead, HealthRead
from schemas.tasks import (
    Execution,
    SecretRef,
    TaskChanged,
    TaskCreate,
    TaskDelete,
    TaskEnable,
    TaskFile,
    TaskList,
    TaskRead,
    TaskRun,
    TaskRunBatch,
    TaskRunItem,
    TasksApply,
    TaskSpec,
    TaskUpdate,
    Terms,
    Variable,
)
from schemas.triggers import MissedList, TriggerBackfill, TriggerCreate, TriggerList
from services.kit.bus import Bus, Caller, Route
from services.kit.clock import WallClock
from services.kit.config import Config
from services.kit.database import Database
from services.kit.ids import new_id
from services.scheduler.service import SchedulerService
from tests.fixtures_nats import Heard
from tests.peers import OWNER, STRANGER, code_of
from tests.scheduler.conftest import PROJECT, Ledger, cron, run_of, spec


class Authority:
    """Allows the owner everything, the scheduler what it needs, in projects that are not archived."""

    def __init__(self) -> None:
        self.archived: set[str] = set()
        self.denied: set[str] = set()

    async def check(self, message: PolicyCheck, _caller: Caller) -> PolicyDecision:
        if message.actor.type == "agent":
            return _answer("require_approval", "agent_action_requires_approval")
        if message.permission == "run.start" and message.labels.get("env") == "prod":
            return _answer("require_approval", "project_rule")
        known = message.actor.id in (OWNER.id, "scheduler") and message.permission not in self.denied
        archived = message.project in self.archived and not message.permission.endswith(".read")
        reason = "project_archived" if archived else "role_grant" if known else "subject_unbound"
        return _answer("allow" if known and not archived else "deny", reason)


def _answer(effect: Any, reason: str) -> PolicyDecision:
    return PolicyDecision(effect=effect, reasons=[reason], project_version=1, binding_version=1)


class Dispatcher:
    """Keeps a ledger of what it is ordered to run, and answers after it is kept."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.ledger = Ledger()
        self.heard = Heard()
        """What was asked for and answered."""
        self.queued = Heard()
        """What came by the queue, taken or not."""

    async def start(self) -> None:
        await self.bus.serve("dispatcher", "1.0.0", [Route(RUNS_SUBMIT, self.submit), Route(RUNS_CANCEL, self.cancel)])
        await self.bus.consume("dispatcher", {SubmitRuns: self.ordered})
        await self.bus.flush()

    async def submit(self, message: SubmitRuns, _caller: Caller) -> SubmitAnswer:
        answer = await self.ledger.submit(message)
        await self.heard.add(*message.runs)
        return answer

    async def ordered(self, batch: list[SubmitRuns]) -> None:
        for message in batch:
            await self.queued.add(*message.runs)
            answer = await self.ledger.submit(message)
            self.ledger.acknowledged |= {order.order_id for order in message.runs}
            await self.bus.acknowledge(message.sender, [result.order_id for result in answer.results])

    async def cancel(self, message: RunCancel, _caller: Caller) -> RunAnswer:
        await self.ledger.cancel(message.project, message.run)
        await self.heard.add(message)
        order = next(order for order in self.ledger.runs.values() if order.run_id == message.run)
        return RunAnswer(run=run_of(order))


class House:
    """A running scheduler with its peers."""

    def __init__(
        self, service: SchedulerService, database: Database, bus: Bus, peer: Dispatcher, boss: Authority
    ) -> None:
        self.service = service
        self.database = database
        self.bus = bus
        self.dispatcher = peer
        self.authority = boss

    async def ask(self, endpoint: Any, message: Any) -> Any:
        """Ask as the gateway does."""
        return await self.bus.request(endpoint, message, timeout=20)

    async def create(self, name: str, *triggers: Any) -> Any:
        """A task of the owner."""
        ask = TaskCreate(actor=OWNER, project=PROJECT, name=name, spec=spec(), triggers=list(triggers))
        return (await self.ask(TASKS_CREATE, ask)).task


@pytest.fixture
async def house(
    database_for: Callable[[str], Awaitable[Database]], bus_for: Callable[..., Awaitable[Bus]]
) -> AsyncIterator[House]:
    """The scheduler on both databases, with a real nats-server."""
    database = await database_for("scheduler")
    authority = Authority()
    approval = await bus_for("approval")
    await approval.serve("approval", "1.0.0", [Route(POLICY_CHECK, authority.check)])
    await approval.flush()
    dispatcher = Dispatcher(await bus_for("dispatcher"))
    await dispatcher.start()
    service = SchedulerService(config=Config(), database=database, bus=await bus_for("scheduler"), clock=WallClock())
    await service.start()
    yield House(service, database, await bus_for("gateway"), dispatcher, authority)
    await service.stop()


async def test_a_task_that_names_a_secret_needs_the_right_to_use_one(house: House) -> None:
    house.authority.denied = {"secret.use"}
    named = Variable(name="TOKEN", secret=SecretRef(secret="token"))
    wanted = TaskSpec(execution=Execution(command=["/bin/true"], environment=[named]))
    create = TaskCreate(actor=OWNER, project=PROJECT, name="sync", spec=wanted)
    with pytest.raises(Ql3Error) as refused:
        await house.ask(TASKS_CREATE, create)
    assert code_of(refused.value) == "forbidden"
    await house.create("plain")
    update = TaskUpdate(actor=OWNER, project=PROJECT, task="plain", expected_revision=1, spec=wanted)
    with pytest.raises(Ql3Error) as refused:
        await house.ask(TASKS_UPDATE, update)
    assert code_of(refused.value) == "forbidden"
    with pytest.raises(Ql3Error) as refused:
        await house.ask(TASKS_APPLY, TasksApply(actor=OWNER, project=PROJECT, tasks=[TaskFile(name="a", spec=wanted)]))
    assert code_of(refused.value) == "forbidden"
    house.authority.denied = set()
    labelled = TaskSpec(execution=wanted.execution, terms=Terms(labels={"asks": "anew"}))
    allowed = TaskCreate(actor=OWNER, project=PROJECT, name="sync", spec=labelled)
    assert (await house.ask(TASKS_CREATE, allowed)).task.name == "sync"


class Vault:
    """Knows which secrets there are, two a page."""

    def __init__(self) -> None:
        self.versions = {"alpha": 1, "beta": 1, "gamma": 1, "token": 2, "zeta": 1}

    async def list(self, message: SecretList, _caller: Caller) -> SecretPage:
        assert message.actor == OWNER
        names = [name for name in sorted(self.versions) if name > (message.page.cursor or "")][:2]
        return SecretPage(
            items=[
                Secret(project=PROJECT, name=name, version=self.versions[name], key_id="k", created_at_ms=1)
                for name in names
            ],
            next=names[-1] if names and names[-1] != "zeta" else None,
        )


async def test_secrets_that_do_not_exist_are_warned_about(house: House, bus_for: Callable[..., Awaitable[Bus]]) -> None:
    def wanted(*refs: SecretRef) -> TaskSpec:
        variables = [Variable(name=f"V{n}", secret=ref) for n, ref in enumerate(refs)]
        return TaskSpec(execution=Execution(command=["/bin/true"], environment=variables))

    # Without an answer of the vault nothing is said, and nothing refused.
    create = TaskCreate(actor=OWNER, project=PROJECT, name="early", spec=wanted(SecretRef(secret="absent")))
    assert (await house.ask(TASKS_CREATE, create)).task.warnings == []
    vault = await bus_for("vault")
    await vault.serve("vault", "1.0.0", [Route(SECRETS_LIST, Vault().list)])
    await vault.flush()
    missing = "V1: the secret missing does not exist; runs fail until it is set."
    both = wanted(SecretRef(secret="token", version=2), SecretRef(secret="missing"))
    create = TaskCreate(actor=OWNER, project=PROJECT, name="sync", spec=both)
    assert (await house.ask(TASKS_CREATE, create)).task.warnings == [missing]
    newer = wanted(SecretRef(secret="token", version=3), SecretRef(secret="zeta"))
    update = TaskUpdate(actor=OWNER, project=PROJECT, task="sync", expected_revision=1, spec=newer)
    (warning,) = (await house.ask(TASKS_UPDATE, update)).task.warnings
    assert "token (version 3)" in warning
    files = [TaskFile(name="a", spec=wanted()), TaskFile(name="b", spec=both)]
    applied = await house.ask(TASKS_APPLY, TasksApply(actor=OWNER, project=PROJECT, tasks=files))
    assert [item.warnings for item in applied.items] == [[], [missing]]


async def test_a_task_from_its_creation_to_its_end(house: House) -> None:
    task = await house.create("backup", {"expression": "@daily"})
    updated = await house.ask(
        TASKS_UPDATE,
        TaskUpdate(actor=OWNER, project=PROJECT, task="backup", expected_revision=1, spec=spec("/bin/echo")),
    )
    assert updated.task.revision == 2
    added = await house.ask(
        TRIGGERS_CREATE, TriggerCreate(actor=OWNER, project=PROJECT, task="backup", spec=cron("@every 1h"))
    )
    listed = await house.ask(TRIGGERS_LIST, TriggerList(actor=OWNER, project=PROJECT, task="backup"))
    assert [trigger.id for trigger in listed.items] == [task.triggers[0]["id"], added.trigger.id]
    ran = await house.ask(TASKS_RUN, TaskRun(actor=OWNER, project=PROJECT, task="backup"))
    assert ran.run.status == "queued"
    many = await house.ask(
        TASKS_RUN_BATCH,
        TaskRunBatch(actor=OWNER, project=PROJECT, runs=[TaskRunItem(task="backup"), TaskRunItem(task="nothing")]),
    )
    assert [result.error for result in many.results] == [None, "not_found"]
    await house.ask(TASKS_ENABLE, TaskEnable(actor=OWNER, project=PROJECT, task="backup", enabled=False))
    await house.ask(TASKS_DELETE, TaskDelete(actor=OWNER, project=PROJECT, task="backup"))
    assert (await house.ask(TASKS_LIST, TaskList(actor=OWNER, project=PROJECT))).items == []
    feed = await house.ask(FEED_READ["scheduler"], FeedRead())
    facts = [decode(bytes(item.payload), TaskChanged) for item in feed.items]
    assert [(fact.version, fact.enabled, fact.deleted) for fact in facts] == [
        (1, True, False),
        (2, True, False),
        (3, False, False),
        (4, False, True),
    ]
    audit = await house.ask(AUDIT_READ["scheduler"], AuditRead(actor=OWNER, project=PROJECT))
    assert [row.action for row in audit.items][::-1] == [
        "task.create",
        "task.update",
        "trigger.create",
        "run.start",
        "run.start",
        "task.disable",
        "task.delete",
    ]


async def test_a_trigger_fires_and_its_orders_are_closed(house: House) -> None:
    await house.create("secondly", {"expression": "* * * * * *"})
    orders = await house.dispatcher.heard.count(3)
    instants = [order.scheduled_for_ms for order in orders]  # type: ignore[attr-defined]
    assert instants == sorted(set(instants))
    assert all(instant % 1000 == 0 for instant in instants)


async def test_an_order_that_nobody_took_waits_in_the_queue(house: House) -> None:
    ledger, heard = house.dispatcher.ledger, house.dispatcher.queued
    ledger.away = True
    await house.create("secondly", {"expression": "* * * * * *"})
    await heard.count(1)
    ledger.away = False
    # Taken from the queue, then asked about once more, by which the scheduler learns what became of it.
    await house.dispatcher.heard.until(
        lambda items: any(getattr(item, "order_id", "") in ledger.acknowledged for item in items)
    )


async def test_the_scheduler_is_ready(house: House) -> None:
    answer = await house.ask(HEALTH["scheduler"], HealthRead())
    assert answer.reasons == []


async def test_a_stranger_learns_and_changes_nothing(house: House) -> None:
    await house.create("backup")
    asks: list[tuple[Any, Any]] = [
        (TASKS_CREATE, TaskCreate(actor=STRANGER, project=PROJECT, name="mine", spec=spec())),
        (TASKS_UPDATE, TaskUpdate(actor=STRANGER, project=PROJECT, task="backup", expected_revision=1, spec=spec("x"))),
        (TASKS_ENABLE, TaskEnable(actor=STRANGER, project=PROJECT, task="nothing", enabled=False)),
        (TASKS_DELETE, TaskDelete(actor=STRANGER, project=PROJECT, task="backup")),
        (TASKS_GET, TaskRead(actor=STRANGER, project=PROJECT, task="nothing")),
        (TASKS_LIST, TaskList(actor=STRANGER, project=PROJECT)),
        (TASKS_RUN, TaskRun(actor=STRANGER, project=PROJECT, task="backup")),
        (TASKS_RUN_BATCH, TaskRunBatch(actor=STRANGER, project=PROJECT, runs=[TaskRunItem(task="backup")])),
        (TRIGGERS_CREATE, TriggerCreate(actor=STRANGER, project=PROJECT, task="backup", spec=cron("@daily"))),
        (TRIGGERS_LIST, TriggerList(actor=STRANGER, project=PROJECT)),
        (TRIGGERS_MISSED, MissedList(actor=STRANGER, project=PROJECT)),
    ]
    for endpoint, message in asks:
        with pytest.raises(Ql3Error) as refused:
            await house.ask(endpoint, message)
        assert code_of(refused.value) == "forbidden", endpoint
    assert house.dispatcher.ledger.runs == {}
    assert len((await house.ask(TASKS_LIST, TaskList(actor=OWNER, project=PROJECT))).items) == 1


async def test_a_rule_of_the_project_holds_the_runs_of_labelled_tasks(house: House) -> None:
    for name, labels in (("plain", {}), ("labelled", {"env": "prod"})):
        ask = TaskCreate(actor=OWNER, project=PROJECT, name=name, spec=spec(labels=labels))
        await house.ask(TASKS_CREATE, ask)
        await house.ask(TASKS_RUN, TaskRun(actor=OWNER, project=PROJECT, task=name))
    batch = [TaskRunItem(task="labelled"), TaskRunItem(task="plain")]
    await house.ask(TASKS_RUN_BATCH, TaskRunBatch(actor=OWNER, project=PROJECT, runs=batch))
    assert [order.hold for order in house.dispatcher.ledger.runs.values()] == [False, True, True, False]
    # An agent's run is not even made before somebody approved it.
    agent = msgspec.structs.replace(OWNER, type="agent")
    with pytest.raises(Ql3Error) as refused:
        await house.ask(TASKS_RUN, TaskRun(actor=agent, project=PROJECT, task="plain"))
    assert code_of(refused.value) == "approval_required"
    assert len(house.dispatcher.ledger.runs) == 4


async def test_a_rule_counts_for_a_label_that_was_given_a_moment_before(house: House) -> None:
    task = await house.create("backup")
    daily = TriggerCreate(actor=OWNER, project=PROJECT, task="backup", spec=cron("0 4 * * *"))
    trigger = (await house.ask(TRIGGERS_CREATE, daily)).trigger
    now_ms = WallClock().now_ms()
    window = TriggerBackfill(
        actor=OWNER, project=PROJECT, trigger=trigger.id, from_ms=now_ms - 86_400_000, until_ms=now_ms, again=True
    )
    plain = TaskRun(actor=OWNER, project=PROJECT, task="backup")
    batch = TaskRunBatch(actor=OWNER, project=PROJECT, runs=[TaskRunItem(task="backup")])

    async def run_all(number: int) -> list[bool]:
        before = set(house.dispatcher.ledger.runs)
        await house.ask(TASKS_RUN, plain)
        await house.ask(TASKS_RUN_BATCH, batch)
        await house.ask(TRIGGERS_BACKFILL, msgspec.structs.replace(window, mutation_id=new_id()))
        await house.dispatcher.heard.count(number)
        return [order.hold for run, order in house.dispatcher.ledger.runs.items() if run not in before]

    assert await run_all(3) == [False] * 3
    labelled = spec(labels={"env": "prod"})
    await house.ask(
        TASKS_UPDATE, TaskUpdate(actor=OWNER, project=PROJECT, task=task.id, expected_revision=1, spec=labelled)
    )
    assert await run_all(6) == [True] * 3


async def test_what_is_disabled_ahead_is_taken_back_at_the_dispatcher(house: House) -> None:
    await house.create("secondly", {"expression": "* * * * * *"})
    await house.dispatcher.heard.count(1)
    await house.ask(TASKS_ENABLE, TaskEnable(actor=OWNER, project=PROJECT, task="secondly", enabled=False))
    await house.dispatcher.heard.until(lambda items: any(isinstance(item, RunCancel) for item in items))


async def test_an_archived_project_starts_nothing_as_soon_as_it_is_told(
    house: House, bus_for: Callable[..., Awaitable[Bus]]
) -> None:
    house.authority.archived.add(PROJECT)
    approval = await bus_for("approval")
    await approval.publish(event("policy", PROJECT, PROJECT, "changed"), PolicyChanged(project=PROJECT, version=2))
    with pytest.raises(Ql3Error) as refused:
        await house.create("backup")
    assert code_of(refused.value) == "forbidden"
