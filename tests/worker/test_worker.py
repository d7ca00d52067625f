"""The worker over a real bus, with a real process host and journal; a test plays the dispatcher."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from schemas import limits, subjects
from schemas.endpoints import ARTIFACTS_RETIRED, LOG_FOLLOW, LOG_READ
from schemas.errors import Ql3Error
from schemas.system import Done
from schemas.tasks import Variable
from schemas.workers import (
    ArtifactsRetired,
    LogChunk,
    LogFollow,
    LogRead,
    OfferAttempts,
    RetireArtifacts,
    RetireItem,
)
from services.kit.artifact_store import artifact_path, stored_size
from services.kit.bus import Caller, Delivery, Route
from services.kit.ids import new_id
from services.worker.attempt import Held
from services.worker.place import Room
from services.worker.service import WorkerService
from tests.fixtures_nats import WAIT_S, WORKER, BusFactory, Heard
from tests.worker.conftest import alive, wait_gone
from tests.worker.ledger import Ledger, make_revision
from tests.worker.life import Worker, settled

Starter = Callable[..., Awaitable[WorkerService]]


async def test_a_run_is_journaled_started_told_and_settled(worker: Worker, ledger: Ledger) -> None:
    service = await worker.start()
    attempt = await ledger.offer("sh", "-c", "echo hello; exit 3")
    body = await ledger.end(attempt)
    assert (body.kind, body.exit_code, body.signal, body.stopped_for) == ("ended", 3, None, None)
    assert body.log is not None
    assert (body.log.artifact_id, body.log.size, body.log.produced, body.log.truncated) == (attempt, 6, 6, False)
    assert body.started_at_ms is not None
    assert body.finished_at_ms is not None
    assert service.health() == []
    await settled(worker)
    assert ledger.starts == [attempt]
    (registration,) = ledger.registrations
    assert registration.capabilities.cpu_cores >= 1
    assert "python" in registration.capabilities.runtimes


async def test_a_short_run_is_told_in_one_report_and_a_long_one_in_two(worker: Worker, ledger: Ledger) -> None:
    await worker.start()
    gate = worker.data / "gate"
    os.mkfifo(gate)
    long, short = await ledger.offer_many([("cat", str(gate)), ("/bin/true",)])
    await ledger.end(short)
    started = await ledger.running(long)
    assert started.pid is not None
    assert not ledger.told(short, "started")
    gate.write_bytes(b"x")
    assert (await ledger.end(long)).exit_code == 0


async def test_the_environment_says_what_runs(worker: Worker, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAKED", "never")
    await worker.start()
    revision = make_revision(
        "/usr/bin/env",
        "-0",
        project="home",
        environment=[Variable(name="COLOUR", value="grün"), Variable(name="QL3_RUN_ID", value="forged")],
    )
    attempt = await ledger.offer(revision=revision, inputs={"n": 1}, scheduled_for_ms=5)
    await ledger.end(attempt)
    text = (worker.data / "worker" / "logs" / f"{attempt}.log").read_bytes().decode()
    environment = dict(line.split("=", 1) for line in text.split("\0") if line)
    item = ledger.item(attempt)
    assert environment["QL3_RUN_ID"] == item.run_id
    assert environment["QL3_ATTEMPT_ID"] == attempt
    assert environment["QL3_PROJECT"] == "home"
    assert environment["QL3_TASK"] == "task"
    assert environment["QL3_INPUTS"] == '{"n":1}'
    assert Path(environment["QL3_INPUTS_FILE"]).parent.name == attempt
    assert environment["QL3_SCHEDULED_FOR_MS"] == "5"
    assert environment["COLOUR"] == "grün"
    assert "LEAKED" not in environment
    where = await ledger.offer("pwd")
    await ledger.end(where)
    assert (worker.data / "worker" / "logs" / f"{where}.log").read_text().strip() == str(worker.data / "work/default")


async def test_inputs_are_given_as_a_private_file_that_goes_with_the_attempt(worker: Worker, ledger: Ledger) -> None:
    await worker.start()
    command = 'stat -c %a "$QL3_INPUTS_FILE"; cat "$QL3_INPUTS_FILE"; echo; echo "$QL3_INPUTS"; echo "$QL3_INPUTS_FILE"'
    # The second is more than the kernel takes as one variable: it comes as the file alone.
    few, many = {"text": "grün"}, {"text": "x" * limits.KERNEL_STRING_BYTES}
    for inputs in (few, many):
        attempt = await ledger.offer("sh", "-c", command, inputs=inputs)
        body = await ledger.end(attempt)
        assert (body.kind, body.exit_code) == ("ended", 0)
        mode, file, variable, path = (worker.data / "worker" / "logs" / f"{attempt}.log").read_text().splitlines()
        assert mode == "600"
        assert json.loads(file) == inputs
        assert variable == (file if inputs is few else "")
        await settled(worker)
        assert not Path(path).parent.exists()
    without = await ledger.offer("sh", "-c", 'echo "${QL3_INPUTS-none} ${QL3_INPUTS_FILE-none}"')
    await ledger.end(without)
    assert (worker.data / "worker" / "logs" / f"{without}.log").read_text() == "none none\n"


async def test_what_cannot_start_is_told_with_a_code(worker: Worker, ledger: Ledger) -> None:
    await worker.start()
    missing = await ledger.offer("no-such-program", "--password=hunter2")
    body = await ledger.end(missing)
    assert (body.kind, body.error_code, body.exit_code) == ("start_failed", "command_not_found", None)
    # It names the program and the folder, and none of the other arguments.
    assert body.error_summary is not None
    assert "no-such-program" in body.error_summary
    assert str(worker.data / "work/default") in body.error_summary
    assert "hunter2" not in body.error_summary
    nowhere = await ledger.end(await ledger.offer(revision=make_revision("true", working_directory="/no/such/folder")))
    assert nowhere.error_code == "working_directory_unusable"
    assert "/no/such/folder" in str(nowhere.error_summary)
    noise = await ledger.end(await ledger.offer("\x1b[31m" + "n" * 5000))
    assert noise.error_code == "command_not_found"
    assert str(noise.error_summary).isprintable()
    ledger.start_within_ms = -1
    late = await ledger.offer("/bin/true")
    body = await ledger.end(late)
    assert (body.kind, body.error_code) == ("not_started", "start_window_passed")
    await settled(worker)


async def test_a_refused_start_is_dropped_without_a_word(worker: Worker, ledger: Ledger) -> None:
    await worker.start()
    ledger.granting = False
    attempt = await ledger.offer("/bin/true")
    await ledger.until(lambda: attempt in ledger.starts)
    ledger.refused.add(attempt)
    ledger.granting = True
    await settled(worker)
    assert not ledger.told(attempt)


async def test_a_repeated_offer_starts_nothing_again(worker: Worker, ledger: Ledger) -> None:
    await worker.start()
    mark = worker.data / "mark"
    attempt = await ledger.offer("sh", "-c", f"echo x >> {mark}; exec sleep 1000")
    await ledger.offer_again(attempt)
    await ledger.running(attempt)
    await ledger.offer_again(attempt, lease_generation=2)
    other = await ledger.offer("/bin/true")
    await ledger.end(other)
    assert mark.read_text() == "x\n"
    assert ledger.starts.count(attempt) == 1


async def test_a_cancel_ends_the_tree_and_its_end_says_why(worker: Worker, ledger: Ledger) -> None:
    await worker.start()
    gate = worker.data / "gate"
    os.mkfifo(gate)
    attempt = await ledger.offer("sh", "-c", f"trap '' TERM; (setsid sleep 1000 &) ; cat {gate}")
    await ledger.running(attempt)
    await ledger.cancel(attempt, "policy", grace_ms=100)
    body = await ledger.end(attempt)
    assert (body.kind, body.signal, body.stopped_for) == ("ended", 9, "policy")


async def test_a_cancel_before_the_barrier_answers_starts_nothing(worker: Worker, ledger: Ledger) -> None:
    await worker.start()
    ledger.granting = False
    attempt = await ledger.offer("/bin/true")
    await ledger.until(lambda: attempt in ledger.starts)
    await ledger.cancel(attempt)
    body = await ledger.end(attempt)
    assert (body.kind, body.stopped_for) == ("not_started", "user")


async def test_a_beat_carries_every_attempt_and_its_answer_stops_what_is_refused(
    worker: Worker, ledger: Ledger
) -> None:
    service = await worker.start()
    attempts = await ledger.offer_many([("sleep", "1000")] * 2)
    for attempt in attempts:
        await ledger.running(attempt)
    service.session.loop.ring()
    await ledger.until(lambda: any({i.attempt_id for i in b.attempts} == set(attempts) for b in ledger.beats))
    ledger.beat_refused = [attempts[0]]
    service.session.loop.ring()
    assert (await ledger.end(attempts[0])).stopped_for == "reconcile"
    assert not ledger.told(attempts[1], "ended")


async def test_reports_are_sent_again_until_they_are_acknowledged(worker: Worker, ledger: Ledger) -> None:
    service = await worker.start()
    ledger.acking = False
    attempt = await ledger.offer("/bin/true")
    await ledger.end(attempt)
    assert worker.journal() == [attempt]
    ledger.acking = True
    await settled(worker)
    assert service.holdings.reports.outstanding == 0


async def test_a_log_is_read_followed_published_and_retired(
    worker: Worker, ledger: Ledger, bus_for: BusFactory
) -> None:
    service = await worker.start()
    gateway = await bus_for("gateway")
    gate = worker.data / "gate"
    os.mkfifo(gate)
    attempt = await ledger.offer("sh", "-c", f"printf before; cat {gate}; printf after")
    await ledger.running(attempt)
    item = ledger.item(attempt)
    heard = Heard()

    async def hear(delivery: Delivery) -> None:
        await heard.add(delivery.decode(LogChunk))

    await gateway.subscribe(subjects.live_log(item.project, item.run_id, attempt), hear)
    await gateway.flush()
    follow = LogFollow(attempt_id=attempt, project=item.project, run_id=item.run_id)
    await gateway.request(LOG_FOLLOW.bound(WORKER), follow)
    piece = await gateway.request(LOG_READ.bound(WORKER), LogRead(attempt_id=attempt, offset=0))
    assert (piece.data, piece.total, piece.ended) == (b"before", 6, False)
    gate.write_bytes(b" \x00\xff " * 20_000)
    body = await ledger.end(attempt)
    await heard.until(lambda items: any(chunk.ended for chunk in items))  # type: ignore[attr-defined]
    chunks: list[Any] = heard.items
    whole = b"before" + b" \x00\xff " * 20_000 + b"after"
    assert b"before" + b"".join(chunk.data for chunk in chunks) == whole
    offsets = [6]
    for chunk in chunks[:-1]:
        assert chunk.offset == offsets[-1]
        assert len(chunk.data) <= 64 * 1024
        offsets.append(chunk.offset + len(chunk.data))
    assert (chunks[-1].offset, chunks[-1].data) == (len(whole), b"")
    # Into the store under its id, and dropped here once retention says so.
    assert body.log is not None
    await settled(worker)
    await service.holdings.logs._publish()
    stored = artifact_path(worker.data / "artifacts", attempt)
    assert stored.read_bytes() == whole
    piece = await gateway.request(LOG_READ.bound(WORKER), LogRead(attempt_id=attempt, offset=len(whole) - 5))
    assert (piece.data, piece.ended) == (b"after", True)
    retention = await bus_for("retention")
    acks = Heard()

    async def retired(question: ArtifactsRetired, caller: Caller) -> Done:
        assert caller.token == WORKER
        await acks.add(*question.attempt_ids)
        return Done()

    await retention.serve("retention", "1.0.0", [Route(ARTIFACTS_RETIRED, retired)])
    await retention.flush()
    order = RetireArtifacts(worker=WORKER, items=[RetireItem(attempt_id=attempt, artifact_id=attempt)])
    await retention.publish(subjects.to_worker(WORKER, "retire"), order)
    assert await acks.count(1) == [attempt]
    with pytest.raises(Ql3Error) as gone:
        await gateway.request(LOG_READ.bound(WORKER), LogRead(attempt_id=attempt, offset=0))
    assert gone.value.code == "not_found"
    assert stored.read_bytes() == whole


@pytest.mark.parametrize("place", ["ln -s $VICTIM $LOG", "mkfifo $LOG", "mkdir $LOG"])
async def test_what_a_command_puts_in_the_place_of_its_log_is_never_read_or_published(
    worker: Worker, ledger: Ledger, bus_for: BusFactory, place: str
) -> None:
    service = await worker.start()
    victim = worker.data / "victim"
    victim.write_text("somebody's secret")
    # More than the host digests on its way, so that the worker would have to read it.
    swap = f"head -c 40000000 /dev/zero; LOG={worker.data}/worker/logs/$QL3_ATTEMPT_ID.log; VICTIM={victim}; rm $LOG"
    attempt = await ledger.offer("sh", "-c", f"{swap}; {place}")
    body = await ledger.end(attempt)
    assert (body.kind, body.exit_code) == ("ended", 0)
    await settled(worker)
    gateway = await bus_for("gateway")
    with pytest.raises(Ql3Error) as refused:
        await gateway.request(LOG_READ.bound(WORKER), LogRead(attempt_id=attempt, offset=0))
    assert refused.value.code == "unavailable"
    after = await ledger.offer("echo", "hello")
    await ledger.end(after)
    await settled(worker)
    await service.holdings.logs._publish()
    assert artifact_path(worker.data / "artifacts", after).read_bytes() == b"hello\n"
    assert stored_size(worker.data / "artifacts", attempt) is None
    assert service.health() == []


async def test_a_vanished_attempt_whose_log_was_replaced_is_told_without_one(worker: Worker, ledger: Ledger) -> None:
    await worker.start()
    written = f"echo x; LOG={worker.data}/worker/logs/$QL3_ATTEMPT_ID.log; until [ -e $LOG ]; do :; done"
    swap = f"{written}; rm $LOG; ln -s /etc/passwd $LOG; echo > $PLACE"
    place = worker.data / "place"
    os.mkfifo(place)
    attempt = await ledger.offer("sh", "-c", f"PLACE={place}; {swap}; exec sleep 1000")
    await asyncio.to_thread(place.read_text)
    os.kill(worker.host_pid(), 9)
    body = await ledger.end(attempt)
    assert (body.kind, body.log) == ("vanished", None)


async def test_a_full_journal_takes_no_more_until_something_has_ended(
    worker: Worker, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.worker.store.MAX_JOURNAL", 1)
    service = await worker.start()
    first = await ledger.offer("sleep", "1000")
    await ledger.running(first)
    item = msgspec.structs.replace(ledger.item(first), attempt_id=new_id(), offer_id=new_id())
    assert ledger.fence is not None
    offer = OfferAttempts(fence=ledger.fence, revisions=[make_revision("/bin/true")], offers=[item])
    offer = msgspec.structs.replace(offer, offers=[msgspec.structs.replace(item, revision=offer.revisions[0].digest)])
    await service.take_offers([offer])
    assert worker.journal() == [first]
    await ledger.cancel(first)
    await ledger.end(first)
    await settled(worker)
    await service.take_offers([offer])
    assert (await ledger.end(item.attempt_id)).exit_code == 0


def test_room_is_kept_for_what_runs_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.worker.place.free_bytes", lambda _: 1000)
    room = Room(tmp_path, 100)
    attempts = [
        Held(attempt_id=name, offer_id="", run_id="", project="", lease_generation=1, host="", digest="")
        for name in "abc"
    ]
    assert room.reserve(attempts[0], 500)
    assert not room.reserve(attempts[1], 401)
    assert room.reserve(attempts[1], 400)
    assert not room.fits(1)
    room.release(attempts[0])
    room.release(attempts[0])
    assert room.fits(500)
    assert not room.fits(501)

    def away(_: Path) -> int:
        raise OSError

    monkeypatch.setattr("services.worker.place.free_bytes", away)
    assert not room.reserve(attempts[2], 0)


async def test_the_folders_are_nobody_elses(worker: Worker, ledger: Ledger) -> None:
    worker.data = worker.data / "deeper" / "still"
    await worker.start()
    await ledger.end(await ledger.offer("echo", "hello"))
    for folder in (worker.data.parent, worker.data, worker.data / "worker", worker.data / "worker" / "logs"):
        assert folder.stat().st_mode & 0o777 == 0o700, folder
    for file in (worker.data / "worker").rglob("*"):
        if file.is_file():
            assert file.stat().st_mode & 0o077 == 0, file


async def test_following_is_for_the_attempts_own_project_and_run(
    worker: Worker, ledger: Ledger, bus_for: BusFactory
) -> None:
    await worker.start()
    gateway = await bus_for("gateway")
    attempt = await ledger.offer("sleep", "1000")
    await ledger.running(attempt)
    follow = LogFollow(attempt_id=attempt, project="other", run_id=ledger.item(attempt).run_id)
    with pytest.raises(Ql3Error) as refused:
        await gateway.request(LOG_FOLLOW.bound(WORKER), follow)
    assert refused.value.code == "not_found"


async def test_a_worker_that_crashed_adopts_what_runs_and_tells_its_end(worker: Worker, ledger: Ledger) -> None:
    await worker.start()
    gate = worker.data / "gate"
    os.mkfifo(gate)
    running = await ledger.offer("sh", "-c", f"echo before; cat {gate}; echo after; exit 7")
    await ledger.running(running)
    ledger.acking = False
    told = await ledger.offer("/bin/true")
    await ledger.end(told)
    await worker.crash()
    # Meanwhile one ends, and nobody is there to hear it.
    gate.write_bytes(b"between\n")
    ledger.acking = True
    await worker.start()
    body = await ledger.end(running)
    assert (body.kind, body.exit_code) == ("ended", 7)
    assert ledger.starts.count(running) == 1
    log = artifact_path(worker.data / "artifacts", running)
    await settled(worker)
    assert worker.service is not None
    await worker.service.holdings.logs._publish()
    assert log.read_bytes() == b"before\nbetween\nafter\n"
    states = {entry.attempt_id: entry.state for entry in ledger.registrations[-1].journal}
    assert set(states) == {running, told}


async def test_an_attempt_that_was_taken_on_but_never_started_is_given_back(worker: Worker, ledger: Ledger) -> None:
    await worker.start()
    ledger.granting = False
    attempt = await ledger.offer("/bin/true")
    await ledger.until(lambda: attempt in ledger.starts)
    await worker.crash()
    ledger.granting = True
    await worker.start()
    body = await ledger.end(attempt)
    assert (body.kind, body.error_code) == ("not_started", "not_started")
    await settled(worker)


async def test_what_the_dispatcher_released_is_forgotten(worker: Worker, ledger: Ledger) -> None:
    await worker.start()
    ledger.granting = False
    attempt = await ledger.offer("/bin/true")
    await ledger.until(lambda: attempt in ledger.starts)
    await worker.crash()
    ledger.granting = True
    ledger.released.add(attempt)
    await worker.start()
    await settled(worker)
    assert not ledger.told(attempt)


async def test_when_the_host_dies_its_attempts_vanish_and_nothing_of_them_runs_on(
    worker: Worker, ledger: Ledger
) -> None:
    await worker.start()
    place = worker.data / "place"
    os.mkfifo(place)
    attempt = await ledger.offer("sh", "-c", f"echo $$ > {place}; exec sleep 1000")
    pid = int(await asyncio.to_thread(place.read_text))
    await ledger.running(attempt)
    os.kill(worker.host_pid(), 9)
    body = await ledger.end(attempt)
    assert (body.kind, body.exit_code) == ("vanished", None)
    assert not alive(pid)
    # A new host serves what comes next.
    assert (await ledger.end(await ledger.offer("/bin/true"))).exit_code == 0


class Hostless:
    """A worker whose host dies while it asks at the barrier, and that reaches no other until `gate` is set."""

    def __init__(self, worker: Worker, service: WorkerService, ledger: Ledger) -> None:
        self.gate = threading.Event()
        self.waiting = asyncio.Event()
        """A start was granted that there was no host for."""
        self._worker = worker
        self._hung_up = asyncio.Event()
        ledger.before_grant = self._lose_host
        holdings = service.holdings
        reach, hang_up, spawn = holdings.host._reach, holdings.host.hung_up, holdings.spawn

        def reach_later() -> socket.socket:
            assert self.gate.wait(WAIT_S)
            return reach()

        def hung_up() -> None:
            hang_up()
            self._hung_up.set()

        def spawned(items: list[dict[str, Any]]) -> None:
            spawn(items)
            if holdings._unhanded:
                self.waiting.set()

        holdings.host._reach, holdings.host.hung_up, holdings.spawn = reach_later, hung_up, spawned

    async def _lose_host(self) -> None:
        if not self.gate.is_set():
            os.kill(self._worker.host_pid(), 9)
            await self._hung_up.wait()


@pytest.fixture
async def hostless(worker: Worker, ledger: Ledger) -> AsyncIterator[Hostless]:
    lost = Hostless(worker, await worker.start(), ledger)
    yield lost
    lost.gate.set()


async def test_a_start_that_was_granted_while_the_host_died_is_handed_to_the_next(
    hostless: Hostless, ledger: Ledger
) -> None:
    attempt = await ledger.offer("/bin/true")
    await hostless.waiting.wait()
    hostless.gate.set()
    assert (await ledger.end(attempt)).exit_code == 0


async def test_a_start_that_waits_for_a_host_can_be_stopped(hostless: Hostless, ledger: Ledger) -> None:
    attempt = await ledger.offer("/bin/true")
    await hostless.waiting.wait()
    await ledger.cancel(attempt)
    body = await ledger.end(attempt)
    assert (body.kind, body.stopped_for) == ("not_started", "user")
    hostless.gate.set()
    assert (await ledger.end(await ledger.offer("/bin/true"))).exit_code == 0


async def test_a_start_waits_for_a_host_no_longer_than_it_is_granted(hostless: Hostless, ledger: Ledger) -> None:
    ledger.start_within_ms = 1
    body = await ledger.end(await ledger.offer("/bin/true"))
    assert (body.kind, body.error_summary) == ("not_started", "The worker had no process host.")


async def test_when_worker_and_host_die_together_the_truth_is_told_after_the_restart(
    worker: Worker, ledger: Ledger
) -> None:
    await worker.start()
    attempt = await ledger.offer("sleep", "1000")
    pid = (await ledger.running(attempt)).pid
    assert pid is not None
    host = worker.host_pid()
    await worker.crash()
    os.kill(host, 9)
    await worker.start()
    body = await ledger.end(attempt)
    assert body.kind == "vanished"
    assert not alive(pid)
    (entry,) = ledger.registrations[-1].journal
    assert entry.state == "unknown"


async def test_a_replaced_session_ends_its_runs_and_takes_no_more(worker: Worker, ledger: Ledger) -> None:
    service = await worker.start()
    attempt = await ledger.offer("sleep", "1000")
    pid = (await ledger.running(attempt)).pid
    assert pid is not None
    ledger.beat_error = "session_replaced"
    service.session.loop.ring()
    await asyncio.to_thread(wait_gone, pid)
    assert "a newer session of this worker exists" in service.health()
    assert len(ledger.registrations) == 1


async def test_a_dispatcher_that_lost_its_tables_is_registered_with_again(worker: Worker, ledger: Ledger) -> None:
    service = await worker.start()
    await ledger.until(lambda: ledger.fence is not None)
    ledger.beat_error = "not_found"
    service.session.loop.ring()
    await ledger.until(lambda: len(ledger.registrations) == 2)
    ledger.beat_error = None
    assert (await ledger.end(await ledger.offer("/bin/true"))).exit_code == 0


async def test_stopping_leaves_what_runs_to_the_host_and_the_next_start_finds_it(
    worker: Worker, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.worker.service.DRAIN_S", 0.1)
    service = await worker.start()
    attempt = await ledger.offer("sleep", "1000")
    await ledger.running(attempt)
    host = worker.host_pid()
    await service.stop()
    await service._bus.stop()
    assert service._directories._lock == -1
    assert ledger.beats[-1].draining
    await worker.start()
    assert worker.host_pid() == host
    await ledger.cancel(attempt)
    assert (await ledger.end(attempt)).stopped_for == "user"


async def test_two_workers_cannot_share_a_data_folder(worker: Worker, ledger: Ledger, bus_for: BusFactory) -> None:
    await worker.start()
    second = Worker(worker.data, bus_for)
    with pytest.raises(Ql3Error) as refused:
        await second.start()
    assert refused.value.code == "setup_invalid"
    second.service = None


async def test_what_runs_without_a_row_in_the_journal_is_ended(worker: Worker, ledger: Ledger) -> None:
    await worker.start()
    attempt = await ledger.offer("sleep", "1000")
    pid = (await ledger.running(attempt)).pid
    assert pid is not None
    await worker.crash()
    await worker.lose_journal()
    await worker.start()
    await ledger.until(lambda: len(ledger.registrations) == 2)
    await ledger.end(await ledger.offer("/bin/true"))
    client = worker.host()  # takes the worker's place at the host, and hears what is not acknowledged
    client.wait(lambda: not any(row["state"] in ("running", "stopping") for row in client.hello["attempts"]))
    client.close()
    assert not alive(pid)
    assert not ledger.told(attempt, "ended")


async def test_a_receipt_that_nobody_here_asked_for_is_kept_apart(worker: Worker, ledger: Ledger) -> None:
    service = await worker.start()
    await ledger.until(lambda: ledger.fence is not None)
    foreign = "01a00000-0000-7000-8000-00000000f0f0"
    item = {"attempt": foreign, "argv": ["true"], "env": {}, "key": "11" * 32, "sequence": 2, "quota": 0}
    service.holdings.host.send_items("spawn", [item | {"context": {"offer": "o", "generation": 1}}])
    quarantine = worker.data / "worker" / "host" / "receipts" / "quarantine"
    async with asyncio.timeout(30):
        while not await asyncio.to_thread(lambda: list(quarantine.glob("*.record"))):
            pass
    (kept,) = quarantine.glob("*.record")
    assert foreign.encode() in kept.read_bytes()
    assert not ledger.told(foreign)


async def test_copies_that_the_store_has_go_after_a_while(worker: Worker, ledger: Ledger) -> None:
    service = await worker.start()
    logs = worker.data / "worker" / "logs"
    attempt = await ledger.offer("echo", "hello")
    await ledger.end(attempt)
    await settled(worker)
    await service.holdings.logs._publish()
    (logs / "somebody's").write_text("not ours")
    await service.holdings.logs.sweep(set())
    assert (logs / f"{attempt}.log").exists()
    os.utime(logs / f"{attempt}.log", (1, 1))
    await service.holdings.logs.sweep({attempt})
    assert (logs / f"{attempt}.log").exists()
    await service.holdings.logs.sweep(set())
    assert [path.name for path in logs.iterdir()] == ["somebody's"]
    assert artifact_path(worker.data / "artifacts", attempt).read_bytes() == b"hello\n"
