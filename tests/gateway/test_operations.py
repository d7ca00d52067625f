"""From a request to the owner's endpoint and back: nothing added, nothing lost, repeats harmless."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from schemas import endpoints
from schemas.errors import Ql3Error
from schemas.runs import RunAnswer, RunBatchAnswer, RunResult, RunRetry
from schemas.secrets import Secret, SecretAnswer, SecretSet, VaultKey, VaultKeyRead
from schemas.tasks import Task, TaskAnswer, TaskCreate, TaskList, TaskPage, TaskRun, TaskRunBatch
from schemas.workers import Readiness, ReadinessRead
from services.kit.bus import Caller, Route
from services.kit.database import Statement
from services.kit.health import Health
from services.kit.sealing import SealingKey, secret_context

from .conftest import PROJECT, House, digest
from .ledger import RUN, run_row

TASK = {"name": "hello", "spec": {"execution": {"command": ["/bin/true"]}}}


@pytest.fixture
def dialect() -> str:
    """What reaches a table runs on the other dialect in `test_postgresql.py`."""
    return "sqlite"


class Scheduler:
    """Remembers what it was asked, and makes each mutation once."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.made: dict[str, Task] = {}
        self.fail: str | None = None

    async def create(self, message: TaskCreate, _: Caller) -> TaskAnswer:
        self.asked.append(message)
        if self.fail:
            raise Ql3Error(self.fail, field="name")
        assert message.mutation_id is not None
        task = self.made.setdefault(message.mutation_id, self._task(message))
        return TaskAnswer(task=task)

    async def list(self, message: TaskList, _: Caller) -> TaskPage:
        self.asked.append(message)
        return TaskPage(items=list(self.made.values()), next="further")

    async def run(self, message: TaskRun, _: Caller) -> RunAnswer:
        self.asked.append(message)
        return RunAnswer(run=run_row("queued"))

    async def batch(self, message: TaskRunBatch, _: Caller) -> RunBatchAnswer:
        self.asked.append(message)
        results = [RunResult(run=run_row("queued")) for _ in message.runs[1:]]
        return RunBatchAnswer(results=[*results, RunResult(error="not_found", error_field="task")])

    def routes(self) -> list[Route[Any, Any]]:
        return [
            Route(endpoints.TASKS_CREATE, self.create),
            Route(endpoints.TASKS_LIST, self.list),
            Route(endpoints.TASKS_RUN, self.run),
            Route(endpoints.TASKS_RUN_BATCH, self.batch),
        ]

    @staticmethod
    def _task(message: TaskCreate) -> Task:
        return Task(
            id=RUN,
            project=message.project,
            name=message.name,
            revision=1,
            version=1,
            enabled=message.enabled,
            deleted=False,
            spec=message.spec,
            digest=digest("x"),
            created_at_ms=1,
            updated_at_ms=1,
        )


@pytest.fixture
async def scheduler(house: House) -> Scheduler:
    """An owner of tasks."""
    scheduler = Scheduler()
    await house.serve("scheduler", *scheduler.routes())
    return scheduler


async def test_a_task_travels_to_its_owner_with_who_asked(house: House, scheduler: Scheduler) -> None:
    body = {**TASK, "triggers": [{"kind": "cron", "expression": "* * * * *"}]}
    answer = await house.console().post(f"{PROJECT}/tasks", json=body)
    assert answer.status_code == 201
    assert answer.json()["name"] == "hello"
    assert "schema" not in answer.json()
    (asked,) = scheduler.asked
    assert (asked.actor.type, asked.actor.id, asked.actor.assurance) == ("user", "local-console", "local_console")
    assert asked.project == "default"
    assert asked.triggers[0]["expression"] == "* * * * *"


async def test_a_list_is_items_and_next(house: House, scheduler: Scheduler) -> None:
    answer = await house.console().get(f"{PROJECT}/tasks?limit=7&cursor=abc&folder=nightly")
    assert answer.json() == {"items": [], "next": "further"}
    assert (scheduler.asked[0].page.limit, scheduler.asked[0].page.cursor) == (7, "abc")
    assert scheduler.asked[0].folder == "nightly"


async def test_an_owners_refusal_is_the_answer(house: House, scheduler: Scheduler) -> None:
    scheduler.fail = "name_taken"
    answer = await house.console().post(f"{PROJECT}/tasks", json=TASK)
    assert answer.status_code == 409
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json() == {
        "type": "urn:ql3:error:name_taken",
        "title": "This name is already used in the project.",
        "status": 409,
        "code": "name_taken",
        "detail": None,
        "field": "name",
        "mend": "Choose another name.",
        "data": {},
    }


async def test_an_owner_that_is_away_is_unavailable(house: House) -> None:
    answer = await house.console().get(f"{PROJECT}/secrets")
    assert (answer.status_code, answer.json()["code"]) == (503, "unavailable")
    assert answer.headers["retry-after"] == "1"


async def test_the_same_key_and_request_is_done_once(house: House, scheduler: Scheduler) -> None:
    console = house.console()
    headers = {"Idempotency-Key": "first"}
    first = await console.post(f"{PROJECT}/tasks", json=TASK, headers=headers)
    again = await console.post(f"{PROJECT}/tasks", json=TASK, headers=headers)
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.json() == again.json()
    assert again.headers["idempotency-replayed"] == "true"
    assert len(scheduler.asked) == 1
    other = await console.post(f"{PROJECT}/tasks", json={**TASK, "name": "other"}, headers=headers)
    assert (other.status_code, other.json()["code"]) == (409, "idempotency_conflict")


async def test_a_repeat_after_a_lost_answer_carries_the_same_mutation(house: House, scheduler: Scheduler) -> None:
    console = house.console()
    headers = {"Idempotency-Key": "lost"}
    scheduler.fail = "unavailable"
    assert (await console.post(f"{PROJECT}/tasks", json=TASK, headers=headers)).status_code == 503
    scheduler.fail = None
    assert (await console.post(f"{PROJECT}/tasks", json=TASK, headers=headers)).status_code == 201
    first, second = scheduler.asked
    assert first.mutation_id == second.mutation_id


async def test_keys_are_of_their_actor_and_last_a_day(house: House, scheduler: Scheduler) -> None:
    headers = {"Idempotency-Key": "mine"}
    await house.console().post(f"{PROJECT}/tasks", json=TASK, headers=headers)
    owner = await house.owner()
    answer = await owner.post(f"{PROJECT}/tasks", json={**TASK, "name": "other"}, headers=headers)
    assert answer.status_code == 201
    house.clock.advance(86_400_001)
    await house.gateway._forget()
    rows = await house.database.read(lambda tx: tx.fetch(Statement("SELECT idempotency_key FROM idempotency_records")))
    assert rows == []


async def test_a_run_carries_its_key_to_the_owner(house: House, scheduler: Scheduler) -> None:
    console = house.console()
    answer = await console.post(
        f"{PROJECT}/tasks/hello/runs", json={"inputs": {"a": 1}}, headers={"Idempotency-Key": "k"}
    )
    assert (answer.status_code, answer.json()["status"]) == (201, "queued")
    assert (await console.post(f"{PROJECT}/tasks/hello/runs")).status_code == 201  # no body is an empty one
    assert [asked.idempotency_key for asked in scheduler.asked] == ["k", None]
    assert [asked.trigger_type for asked in scheduler.asked] == ["api", "api"]
    owner = await house.owner()
    await owner.post(f"{PROJECT}/tasks/hello/runs")
    assert scheduler.asked[-1].trigger_type == "manual"


async def test_a_batch_of_runs_is_one_question(house: House, scheduler: Scheduler) -> None:
    runs = [{"task": "hello", "idempotency_key": f"k{number}"} for number in range(256)]
    answer = await house.console().post(f"{PROJECT}/runs:batch", json={"runs": runs})
    assert answer.status_code == 200, answer.text
    items = answer.json()["items"]
    assert len(items) == 256
    assert (items[0]["run"]["status"], items[0]["error"]) == ("queued", None)
    assert (items[255]["run"], items[255]["error"]["code"], items[255]["error"]["field"]) == (None, "not_found", "task")
    assert len(scheduler.asked) == 1
    too_many = await house.console().post(f"{PROJECT}/runs:batch", json={"runs": [*runs, runs[0]]})
    assert (too_many.status_code, too_many.json()["field"]) == (400, "runs")


async def test_a_batch_with_a_key_asks_for_the_same_runs_again(house: House, scheduler: Scheduler) -> None:
    runs = [{"task": "hello"}, {"task": "hello"}, {"task": "hello", "idempotency_key": "own"}]
    for key in ("k" * 255, "k" * 255, "other"):
        answer = await house.console().post(
            f"{PROJECT}/runs:batch", json={"runs": runs}, headers={"Idempotency-Key": key}
        )
        assert answer.status_code == 200, answer.text
    first, again, other = ([item.idempotency_key for item in asked.runs] for asked in scheduler.asked)
    assert first == again
    assert len({*first, *other}) == 5
    assert {first[2], other[2]} == {"own"}


async def test_a_retry_with_a_key_asks_for_the_same_new_run(house: House) -> None:
    asked: list[RunRetry] = []

    async def retry(message: RunRetry, _: Caller) -> RunAnswer:
        asked.append(message)
        if len(asked) == 1:
            raise Ql3Error("commit_unknown")
        return RunAnswer(run=run_row("queued"))

    await house.serve("dispatcher", Route(endpoints.RUNS_RETRY, retry))
    headers = {"Idempotency-Key": "r"}
    assert (await house.console().post(f"{PROJECT}/runs/{RUN}/retry", headers=headers)).status_code == 503
    assert (await house.console().post(f"{PROJECT}/runs/{RUN}/retry", headers=headers)).status_code == 201
    assert asked[0].new_run_id == asked[1].new_run_id


async def test_a_secrets_value_leaves_the_gateway_sealed(house: House) -> None:
    key = SealingKey.generate()
    asked: list[SecretSet] = []

    async def vault_key(_: VaultKeyRead, __: Caller) -> VaultKey:
        return VaultKey(public_key=key.public)

    async def put(message: SecretSet, _: Caller) -> SecretAnswer:
        asked.append(message)
        return SecretAnswer(secret=Secret(project="default", name=message.name, version=1, key_id="k", created_at_ms=1))

    await house.serve("vault", Route(endpoints.VAULT_KEY, vault_key), Route(endpoints.SECRETS_SET, put))
    value = "a very secret value é"
    answer = await house.console().put(f"{PROJECT}/secrets/token", json={"value": value, "expected_version": 0})
    assert answer.status_code == 200
    assert value not in answer.text
    (message,) = asked
    assert value not in repr(message)
    assert key.open(message.sealed, secret_context("default", "token", message.mutation_id)).decode() == value
    # 16 KiB of bytes, not of characters.
    large = await house.console().put(f"{PROJECT}/secrets/token", json={"value": "é" * 9_000})
    assert (large.status_code, large.json()["field"]) == (413, "value")


async def test_ready_is_when_a_run_could_start(house: House) -> None:
    client = house.client()
    assert (await client.get("/livez")).json() == {"alive": True}
    answer = await client.get("/readyz")
    assert answer.status_code == 503
    assert any(reason.startswith("scheduler:") for reason in answer.json()["reasons"])
    no_worker: list[str] = ["no worker is online"]

    async def placing(_: ReadinessRead, __: Caller) -> Readiness:
        return Readiness(reasons=no_worker)

    health = Health()
    await house.serve("scheduler", health.route("scheduler", "1.0.0"))
    await house.serve("approval", health.route("approval", "1.0.0"))
    await house.serve("dispatcher", health.route("dispatcher", "1.0.0"), Route(endpoints.READINESS, placing))
    report = await _fresh(house, client)
    assert report.json()["reasons"] == ["dispatcher: no worker is online"]
    no_worker.clear()
    report = await _fresh(house, client)
    assert report.status_code == 200
    assert {reason.partition(":")[0] for reason in report.json()["degraded"]} == {"vault", "retention"}
    house.gateway._desk.readiness.draining = True
    assert (await client.get("/readyz")).status_code == 503


async def _fresh(house: House, client: httpx.AsyncClient) -> httpx.Response:
    house.gateway._desk.readiness._last = None
    return await client.get("/readyz")
