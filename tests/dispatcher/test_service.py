"""The dispatcher on the real bus: orders, answers and what is sent again when it was lost."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from schemas import subjects
from schemas.approvals import RequestApprovals
from schemas.endpoints import (
    POLICY_CHECK,
    READINESS,
    RUNS_ATTEMPTS,
    RUNS_CANCEL,
    RUNS_EVENTS,
    RUNS_EXPLAIN,
    RUNS_GET,
    RUNS_LIST,
    RUNS_RELEASE,
    RUNS_RETRY,
    RUNS_SUBMIT,
    WORKERS_LIST,
    WORKERS_REGISTER,
)
from schemas.errors import Ql3Error
from schemas.identity import Actor, PolicyCheck, PolicyDecision
from schemas.runs import (
    AttemptList,
    RunCancel,
    RunEventList,
    RunExplain,
    RunList,
    RunRead,
    RunRelease,
    RunRetry,
    SubmitRuns,
)
from schemas.tasks import Terms
from schemas.workers import Capabilities, ReadinessRead, ReportAttempts, WorkerList, WorkerRegister
from services.dispatcher import submission
from services.dispatcher.service import DispatcherService
from services.kit.bus import Bus, Caller, Route
from services.kit.clock import WallClock
from services.kit.config import Config
from services.kit.database import Database, UniqueViolation
from services.kit.ids import new_id
from services.kit.natsserver import NatsServer
from tests.dispatcher.busworker import BusWorker, until
from tests.dispatcher.house import PUBLIC_KEY, order, revision
from tests.fixtures_database import DatabaseFor
from tests.fixtures_nats import OTHER_WORKER, WORKER, BusFactory, Heard

THIEF = OTHER_WORKER
ADA = Actor(
    type="user", id="ada", authentication_id="t", assurance="single_factor", authenticated_at_ms=1,
    expires_at_ms=2**52,
)  # fmt: skip
EVE = Actor(
    type="user", id="eve", authentication_id="t", assurance="single_factor", authenticated_at_ms=1,
    expires_at_ms=2**52,
)  # fmt: skip


class House:
    """A dispatcher with its bus, a scheduler's bus that asks, and approval's policy that knows ada."""

    def __init__(self, dispatcher: DispatcherService, database: Database, bus: Bus, bus_for: BusFactory) -> None:
        self.dispatcher = dispatcher
        self.database = database
        self.bus = bus
        self.bus_for = bus_for

    async def worker(self, **options: object) -> BusWorker:
        worker = BusWorker(await self.bus_for("worker", worker=WORKER, streams=False), WORKER, **options)
        await worker.begin()
        return worker

    async def run(self, run_id: str) -> object:
        return (await self.bus.request(RUNS_GET, RunRead(actor=ADA, project="default", run=run_id))).run

    async def ended(self, run_id: str) -> object:
        return await until(lambda: self.run(run_id), lambda run: run.finished_at_ms is not None)


async def _policy(question: PolicyCheck, _caller: Caller) -> PolicyDecision:
    allowed = question.actor.id == "ada"
    if allowed and question.permission == "run.start" and question.labels.get("env") == "prod":
        return PolicyDecision(effect="require_approval", reasons=["project_rule"], project_version=1, binding_version=1)
    return PolicyDecision(
        effect="allow" if allowed else "deny",
        reasons=["role_grant" if allowed else "subject_unbound"],
        project_version=1,
        binding_version=1,
    )


@pytest_asyncio.fixture
async def house(bus_for: BusFactory, database_for: DatabaseFor) -> AsyncIterator[House]:
    database = await database_for("dispatcher")
    approval = await bus_for("approval")
    await approval.serve("approval", "1.0.0", [Route(POLICY_CHECK, _policy)])
    await approval.flush()
    service = DispatcherService(config=Config(), database=database, bus=await bus_for("dispatcher"), clock=WallClock())
    await service.start()
    yield House(service, database, await bus_for("gateway"), bus_for)
    await service.stop()


async def test_a_submitted_run_is_started_and_settled(house: House) -> None:
    worker = await house.worker()
    of = revision()
    one = order(of)
    scheduler = await house.bus_for("scheduler")
    answer = await scheduler.request(RUNS_SUBMIT, SubmitRuns(sender="scheduler", revisions=[of], runs=[one]))
    assert answer.results[0].run is not None
    run = await house.ended(one.run_id)
    assert (run.status, run.exit_code, run.worker_id) == ("succeeded", 0, WORKER)
    await worker.until(lambda: not worker.open)
    assert worker.started == [run.attempt_id]
    events = await house.bus.request(RUNS_EVENTS, RunEventList(actor=ADA, project="default", run=one.run_id))
    assert [event.sequence for event in events.items] == list(range(1, 10))
    attempts = await house.bus.request(RUNS_ATTEMPTS, AttemptList(actor=ADA, project="default", run=one.run_id))
    assert [attempt.status for attempt in attempts.items] == ["succeeded"]
    page = await house.bus.request(RUNS_LIST, RunList(actor=ADA, project="default"))
    assert [item.id for item in page.items] == [one.run_id]


async def test_orders_by_command_are_acknowledged_after_the_commit(house: House) -> None:
    worker = await house.worker()
    of = revision()
    orders = [order(of) for _ in range(40)]
    scheduler = await house.bus_for("scheduler")
    acks = Heard()

    async def heard(ids: list[str]) -> None:
        await acks.add(*ids)

    await scheduler.on_ack("scheduler", heard)
    message = SubmitRuns(sender="scheduler", revisions=[of], runs=orders)
    for _ in range(2):
        await scheduler.publish(subjects.command("dispatcher", "submit"), message)
    await acks.until(lambda items: {o.order_id for o in orders} <= set(items))
    await worker.until(lambda: len(worker.started) == 40)
    for one in orders:
        assert (await house.ended(one.run_id)).status == "succeeded"
    assert len(set(worker.started)) == 40


async def test_a_running_run_is_cancelled_through_its_worker(house: House) -> None:
    worker = await house.worker(decide=lambda _: None)
    of = revision()
    one = order(of)
    scheduler = await house.bus_for("scheduler")
    await scheduler.request(RUNS_SUBMIT, SubmitRuns(sender="scheduler", revisions=[of], runs=[one]))
    await until(lambda: house.run(one.run_id), lambda run: run.status == "running")
    await house.bus.request(RUNS_CANCEL, RunCancel(actor=ADA, project="default", run=one.run_id))
    run = await house.ended(one.run_id)
    assert (run.status, run.error_code) == ("cancelled", "cancelled_by_user")
    assert worker.stops


async def test_reads_and_acts_need_permission_and_do_not_tell_what_exists(house: House) -> None:
    of = revision()
    one = order(of)
    scheduler = await house.bus_for("scheduler")
    await scheduler.request(RUNS_SUBMIT, SubmitRuns(sender="scheduler", revisions=[of], runs=[one]))
    for endpoint, question in (
        (RUNS_GET, RunRead(actor=EVE, project="default", run=one.run_id)),
        (RUNS_LIST, RunList(actor=EVE, project="default")),
        (RUNS_CANCEL, RunCancel(actor=EVE, project="default", run=one.run_id)),
        (RUNS_RETRY, RunRetry(actor=EVE, project="default", run=one.run_id, new_run_id=new_id())),
        (RUNS_EXPLAIN, RunExplain(actor=EVE, project="default", run=one.run_id)),
        (WORKERS_LIST, WorkerList(actor=EVE)),
    ):
        with pytest.raises(Ql3Error) as refused:
            await house.bus.request(endpoint, question)
        assert refused.value.code == "forbidden"
    with pytest.raises(Ql3Error) as absent:
        await house.bus.request(RUNS_GET, RunRead(actor=ADA, project="other", run=one.run_id))
    assert absent.value.code == "not_found"


async def test_a_worker_speaks_for_itself_alone(house: House) -> None:
    bus = await house.bus_for("worker", worker=WORKER, streams=False)
    question = WorkerRegister(
        worker="somebody", session_id=new_id(), slots=1, capabilities=Capabilities(), public_key=PUBLIC_KEY
    )
    with pytest.raises(Ql3Error) as refused:
        await bus.request(WORKERS_REGISTER, question, token=WORKER)
    assert refused.value.code == "forbidden"


async def test_a_report_on_anothers_subject_is_refused_and_recorded(house: House) -> None:
    """However well it is signed: the bus lets each worker speak under its own name alone."""
    worker = await house.worker(decide=lambda _: None)
    of = revision()
    one = order(of)
    scheduler = await house.bus_for("scheduler")
    await scheduler.request(RUNS_SUBMIT, SubmitRuns(sender="scheduler", revisions=[of], runs=[one]))
    run = await until(lambda: house.run(one.run_id), lambda run: run.status == "running")
    thief = await house.bus_for("worker", worker=THIEF, streams=False)
    acks = Heard()

    async def heard(ids: list[str]) -> None:
        await acks.add(*ids)

    await thief.on_ack(THIEF, heard)
    await thief.flush()
    report = worker.signed(run.attempt_id, kind="ended", exit_code=0)
    await thief.publish(subjects.report(THIEF), ReportAttempts(fence=worker.fence, reports=[report]))
    await acks.until(lambda items: report.order_id in items)
    assert (await house.run(one.run_id)).status == "running"
    events = await house.bus.request(RUNS_EVENTS, RunEventList(actor=ADA, project="default", run=one.run_id))
    assert [(event.type, event.actor_id) for event in events.items][-1] == ("attempt.fence_refused", THIEF)


async def test_orders_that_others_keep_committing_first_are_refused_for_now(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def beaten(*_: object) -> object:
        raise UniqueViolation

    of = revision()
    message = SubmitRuns(sender="scheduler", revisions=[of], runs=[order(of)])
    scheduler = await house.bus_for("scheduler")
    with monkeypatch.context() as patch:
        patch.setattr(submission, "submit", beaten)
        with pytest.raises(Ql3Error) as refused:
            await scheduler.request(RUNS_SUBMIT, message)
    assert refused.value.code == "unavailable"
    assert (await scheduler.request(RUNS_SUBMIT, message)).results[0].run is not None


async def test_a_held_run_waits_for_approval_and_goes_on_once(house: House) -> None:
    worker = await house.worker()
    asked = Heard()

    async def take(messages: list[RequestApprovals]) -> None:
        await asked.add(*(request for message in messages for request in message.requests))

    approval = await house.bus_for("approval")
    await approval.consume("approval", {RequestApprovals: take})
    of = revision(terms=Terms(needs_approval=True))
    one = order(of)
    scheduler = await house.bus_for("scheduler")
    answer = await scheduler.request(RUNS_SUBMIT, SubmitRuns(sender="scheduler", revisions=[of], runs=[one]))
    assert answer.results[0].run is not None
    assert answer.results[0].run.status == "waiting_approval"
    (request,) = await asked.count(1)
    await approval.acknowledge("dispatcher", [request.order_id])
    assert (request.request_id, request.binding.action_ref) == (one.run_id, one.run_id)
    explained = await until(
        lambda: house.bus.request(RUNS_EXPLAIN, RunExplain(actor=ADA, project="default", run=one.run_id)),
        lambda found: found.cause == "waiting_approval",
    )
    assert "approval" in explained.sentence
    release = RunRelease(
        dispatch_id=new_id(), run=one.run_id, project="default", outcome="approved", approval_id=one.run_id,
        action_digest=request.binding.action_digest,
    )  # fmt: skip
    first = await approval.request(RUNS_RELEASE, release)
    again = await approval.request(RUNS_RELEASE, release)
    assert first.outcome == again.outcome == "released"
    assert first.evidence_digest == again.evidence_digest
    assert (await house.ended(one.run_id)).status == "succeeded"
    assert len(worker.started) == 1


async def test_a_retry_waits_where_a_rule_of_the_project_holds_the_task(house: House) -> None:
    """Otherwise whoever may retry would run what was rejected."""
    scheduler = await house.bus_for("scheduler")
    for labels, status in (({"env": "prod"}, "waiting_approval"), ({}, "queued")):
        of = revision(terms=Terms(labels=labels))
        one = order(of, hold=True)
        await scheduler.request(RUNS_SUBMIT, SubmitRuns(sender="scheduler", revisions=[of], runs=[one]))
        await house.bus.request(RUNS_CANCEL, RunCancel(actor=ADA, project="default", run=one.run_id))
        question = RunRetry(actor=ADA, project="default", run=one.run_id, new_run_id=new_id())
        for replayed in (False, True):
            again = await house.bus.request(RUNS_RETRY, question)
            assert (again.run.status, again.replayed) == (status, replayed)


async def test_readiness_says_why_nothing_could_run(house: House) -> None:
    answer = await house.bus.request(READINESS, ReadinessRead())
    assert "no worker is online" in answer.reasons
    await house.worker()
    await until(lambda: house.bus.request(READINESS, ReadinessRead()), lambda found: found.reasons == [])


async def test_what_nats_forgot_is_offered_again(house: House, nats_server: NatsServer) -> None:
    """The stream of worker orders is emptied after an offer was published: the lease row rings it again."""
    of = revision()
    one = order(of)
    scheduler = await house.bus_for("scheduler")
    bus = await house.bus_for("worker", worker=WORKER, streams=False)
    worker = BusWorker(bus, WORKER)
    question = WorkerRegister(
        worker=WORKER, session_id=worker.session_id, slots=4, capabilities=Capabilities(), public_key=PUBLIC_KEY
    )
    worker.generation = (await bus.request(WORKERS_REGISTER, question, token=WORKER)).generation
    await scheduler.request(RUNS_SUBMIT, SubmitRuns(sender="scheduler", revisions=[of], runs=[one]))
    await until(lambda: house.run(one.run_id), lambda run: run.status == "dispatching")
    await nats_server.stop()
    shutil.rmtree(nats_server.store)
    await nats_server.start()

    async def begun() -> bool:
        try:
            await worker.begin()
        except Ql3Error:
            return False  # the dispatcher is not back on the bus yet
        return True

    await until(begun, bool)
    assert (await house.ended(one.run_id)).status == "succeeded"
    assert len(worker.started) == 1
