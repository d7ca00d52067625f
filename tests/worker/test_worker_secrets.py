"""Secrets on their way into a process, and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from schemas import proof
from schemas.endpoints import CONTEXT_OPEN
from schemas.errors import Ql3Error
from schemas.secrets import ContextAnswer, ContextOpen, SealedValues
from schemas.tasks import SecretRef, Variable
from services.kit.bus import Bus, Caller, Route
from services.kit.sealing import attempt_context, seal
from tests.fixtures_nats import WORKER, BusFactory
from tests.worker.ledger import Ledger, make_revision
from tests.worker.life import Worker, settled

SECRET = "s3cr3t-4711-value"


class Vault:
    """Answers as the vault does: to the session's key, under the attempt's context, if the proof holds."""

    def __init__(self, bus: Bus, ledger: Ledger) -> None:
        self.values = {"TOKEN": SECRET, "CERT": SECRET + "-cert"}
        self.asked: list[ContextOpen] = []
        self.error: str | None = None
        self.detail: str | None = None
        self._bus = bus
        self._ledger = ledger

    async def start(self) -> None:
        await self._bus.serve("vault", "1.0.0", [Route(CONTEXT_OPEN, self._open)])
        await self._bus.flush()

    async def _open(self, question: ContextOpen, caller: Caller) -> ContextAnswer:
        assert caller.token == WORKER
        assert question.fence == self._ledger.fence
        digest = self._ledger.digests[question.attempt_id]
        assert proof.proof_holds(digest, question.attempt_id, question.sequence, proof.CONTEXT_BODY, question.proof)
        self.asked.append(question)
        if self.error is not None:
            raise Ql3Error(self.error, self.detail)
        plain = msgspec.json.encode(SealedValues(values=self.values))
        context = attempt_context(question.attempt_id, question.lease_generation)
        key = self._ledger.registrations[-1].public_key
        return ContextAnswer(attempt_id=question.attempt_id, sealed=seal(key, plain, context))


@pytest_asyncio.fixture
async def vault(bus_for: BusFactory, ledger: Ledger) -> Vault:
    vault = Vault(await bus_for("vault"), ledger)
    await vault.start()
    return vault


def of_process(pid: int, name: str) -> bytes:
    return Path(f"/proc/{pid}/{name}").read_bytes()


def exists(path: str) -> bool:
    return Path(path).exists()


def everything_below(root: Path) -> bytes:
    return b"".join(path.read_bytes() for path in root.rglob("*") if path.is_file())


async def test_a_secret_reaches_the_process_and_no_file_log_or_argument(
    worker: Worker,
    ledger: Ledger,
    vault: Vault,
) -> None:
    service = await worker.start()
    gate, pid_of = worker.data / "gate", worker.data / "pid"
    os.mkfifo(gate)
    os.mkfifo(pid_of)
    script = (
        (
            f'echo "got $TOKEN"; [ "$(cat $CERT)" = \'{SECRET}-cert\' ] && echo same; cat $CERT; echo $CERT;'
            f" echo $$ > {pid_of}; read x < {gate}"
        )
        .replace(SECRET, "${TOKEN}")
        .replace("'", '"')
    )
    revision = make_revision(
        "sh",
        "-c",
        script,
        environment=[
            Variable(name="TOKEN", secret=SecretRef(secret="token")),
            Variable(name="CERT", secret=SecretRef(secret="cert"), as_file=True),
        ],
    )
    attempt = await ledger.offer(revision=revision)
    await ledger.running(attempt)
    pid = int(pid_of.read_text())
    assert SECRET.encode() in of_process(pid, "environ")
    assert SECRET.encode() not in of_process(pid, "cmdline")
    assert SECRET.encode() not in everything_below(worker.data)
    gate.write_text("\n")
    body = await ledger.end(attempt)
    assert body.exit_code == 0
    lines = (worker.data / "worker" / "logs" / f"{attempt}.log").read_text().splitlines()
    assert lines[:2] == ["got ***", "same"]
    assert lines[2].startswith("***")
    assert not exists(lines[2].removeprefix("***"))
    await settled(worker)
    assert SECRET.encode() not in everything_below(worker.data)
    assert service.health() == []
    assert len(vault.asked) == 1


@pytest.mark.parametrize("fault", ["secret_unavailable", "missing", "wrong key"])
async def test_without_its_secrets_an_attempt_is_not_started(
    worker: Worker,
    ledger: Ledger,
    vault: Vault,
    fault: str,
) -> None:
    service = await worker.start()
    await ledger.until(lambda: ledger.fence is not None)
    if fault == "missing":
        vault.values = {"OTHER": "x"}
    elif fault == "wrong key":
        service.session.key = type(service.session.key).generate()
    else:
        vault.error, vault.detail = fault, "The secret token of the variable TOKEN does not exist."
    mark = worker.data / "mark"
    revision = make_revision("touch", str(mark), environment=[Variable(name="TOKEN", secret=SecretRef(secret="token"))])
    body = await ledger.end(await ledger.offer(revision=revision))
    assert (body.kind, body.error_code) == ("not_started", "context_unavailable")
    assert body.error_summary == (vault.detail or "The run's secrets were not delivered in time.")
    assert not mark.exists()
    await settled(worker)


async def test_a_public_value_as_a_file(worker: Worker, ledger: Ledger) -> None:
    await worker.start()
    big = "x" * 200_000
    revision = make_revision(
        "sh", "-c", 'cat "$BIG"; echo "$BIG" >&2', environment=[Variable(name="BIG", value=big, as_file=True)]
    )
    attempt = await ledger.offer(revision=revision)
    assert (await ledger.end(attempt)).exit_code == 0
    log = (worker.data / "worker" / "logs" / f"{attempt}.log").read_text()
    assert log.startswith(big)
    await settled(worker)
    assert not exists(log.removeprefix(big).strip())


async def test_a_full_disk_takes_no_offers_and_says_so(worker: Worker, ledger: Ledger) -> None:
    service = await worker.start()
    attempt = await ledger.offer("sleep", "1000")
    await ledger.running(attempt)
    service._room._minimum_free = 1 << 60
    service.session.loop.ring()
    await ledger.until(lambda: bool(ledger.beats) and ledger.beats[-1].slots == 0)
    assert "too little room on the disk" in service.health()
    body = await ledger.end(await ledger.offer("/bin/true"))
    assert (body.kind, body.error_code) == ("not_started", "disk_full")
