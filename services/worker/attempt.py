"""One attempt as the worker holds it: its fence, its proofs, its reports. Rules without I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

from schemas import proof
from schemas.tasks import ExecutionRevision
from schemas.workers import AttemptReport, JournalEntry, OfferItem, ReportBody
from services.worker import container

State = Literal["accepted", "launching", "running", "ended"]
START_SEQUENCE: Final = 1
END_SEQUENCE: Final = 2


class Held(msgspec.Struct, kw_only=True, eq=False):
    """An attempt from its offer to the acknowledgement of its end. `digest` is the SHA-256 of its token."""

    attempt_id: str
    offer_id: str
    run_id: str
    project: str
    lease_generation: int
    host: str
    digest: str
    engine: str | None = None
    """The container engine that may have it: a container outlives the process host."""
    state: State = "accepted"
    offer: OfferItem | None = None
    revision: ExecutionRevision | None = None
    """Both only until the process is started."""
    asked: bool = False
    """The start barrier was asked for; from then on its token is known to the dispatcher."""
    accepted_s: float = 0.0
    stop_reason: str | None = None
    in_doubt: bool = False
    """Whether it was started is not known: its host is gone, and what is left is being ended."""
    log_size: int = 0
    truncated: bool | None = None
    beat_proof: str = ""
    told_start: bool = False


class Receipt(NamedTuple):
    """The signed end of an attempt."""

    sequence: int
    body: bytes
    proof: str


def hold(key: bytes, item: OfferItem, revision: ExecutionRevision, host: str, engine: str | None, now_s: float) -> Held:
    """Take an offer on; the token is derived here and only its digest kept."""
    token = proof.token(key, item.attempt_id, item.offer_id, item.lease_generation)
    return Held(
        attempt_id=item.attempt_id,
        offer_id=item.offer_id,
        run_id=item.run_id,
        project=item.project,
        lease_generation=item.lease_generation,
        host=host,
        digest=proof.token_digest(token),
        engine=engine if container.wanted(revision) else None,
        offer=item,
        revision=revision,
        accepted_s=now_s,
    )


def sign(held: Held, body: ReportBody, sequence: int) -> Receipt:
    """A report's body under the attempt's proof."""
    raw = msgspec.json.encode(body)
    return Receipt(sequence, raw, proof.proof(held.digest, held.attempt_id, sequence, raw))


def authentic(held: Held, receipt: Receipt) -> bool:
    """Whether a receipt of the process host is about this attempt and was signed with its key."""
    return proof.proof_holds(held.digest, held.attempt_id, receipt.sequence, receipt.body, receipt.proof)


def was_ours(key: bytes, attempt_id: str, context: dict[str, Any], receipt: Receipt) -> bool:
    """Whether a receipt of an attempt that has no row any more was signed under a token of this worker."""
    offer, generation = context.get("offer"), context.get("generation")
    if not isinstance(offer, str) or not isinstance(generation, int):
        return False
    digest = proof.token_digest(proof.token(key, attempt_id, offer, generation))
    return proof.proof_holds(digest, attempt_id, receipt.sequence, receipt.body, receipt.proof)


def report(held: Held, receipt: Receipt, order_id: str) -> AttemptReport:
    """A receipt as it goes to the dispatcher."""
    return AttemptReport(
        order_id=order_id,
        attempt_id=held.attempt_id,
        run_id=held.run_id,
        lease_generation=held.lease_generation,
        sequence=receipt.sequence,
        proof=receipt.proof,
        body=msgspec.Raw(receipt.body),
    )


def beat_proof(held: Held) -> str:
    """The proof that goes with every beat; it covers no fact and never changes."""
    if not held.beat_proof:
        held.beat_proof = proof.proof(held.digest, held.attempt_id, 0, proof.BEAT_BODY)
    return held.beat_proof


def journal_entry(held: Held) -> JournalEntry:
    """The attempt as registration tells it. What is in doubt is said to be unknown, never gone."""
    state = "unknown" if held.in_doubt else held.state
    return JournalEntry(
        attempt_id=held.attempt_id,
        offer_id=held.offer_id,
        lease_generation=held.lease_generation,
        state=state,
        sequence=0,
        proof=proof.proof(held.digest, held.attempt_id, 0, proof.register_body(state)),
    )


class Found(NamedTuple):
    """What a restart finds, by what has to be done."""

    running: list[Held]
    never_started: list[Held]
    in_doubt: list[Held]


def reconcile(held: Sequence[Held], host: str, known: dict[str, dict[str, Any]]) -> Found:
    """Compare what the worker holds with what the process host `host` has (`known` rows by attempt).

    What a host does not know that was there when the attempt was taken on, was never started. What another host may
    have been asked to start is in doubt. Ends and refusals that the host has are told again by itself.
    """
    running: list[Held] = []
    never: list[Held] = []
    doubt: list[Held] = []
    for one in held:
        if one.state == "ended":
            continue
        row = known.get(one.attempt_id)
        if row is not None:
            if row["state"] not in ("ended", "refused"):
                running.append(one)
        elif one.host == host:
            never.append(one)
        else:
            doubt.append(one)
    return Found(running, never, doubt)


class Fact(msgspec.Struct):
    """What the worker itself reads of a log fact."""

    size: int = 0
    sha256: str | None = None
    truncated: bool = False


class Ended(msgspec.Struct):
    """What the worker itself reads of a receipt's body."""

    log: Fact | None = None


def end_of(reason: str | None, code: str, *, kind: Literal["not_started", "start_failed"], summary: str) -> ReportBody:
    """The end of an attempt of which nothing ran."""
    return ReportBody(kind=kind, stopped_for=_reason(reason), error_code=code, error_summary=summary)


def _reason(reason: str | None) -> Any:
    return reason if reason in ("user", "policy", "shutdown", "reconcile", "timeout") else None
