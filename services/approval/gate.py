"""Policy as this service asks it: before a mutation with a fence, inside it again, and with refusals on record."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NamedTuple, TypeVar

import msgspec

from schemas import subjects
from schemas.errors import Ql3Error
from schemas.identity import Actor, PolicyChanged, PolicyCheck, PolicyDecision, Subject
from schemas.ids import is_subject_id
from services.approval import policy
from services.approval.requests import SKEW_MS
from services.approval.store import projects
from services.kit import audit, outbox
from services.kit.clock import Clock
from services.kit.database import Database, Transaction, UniqueViolation
from services.kit.ids import new_id

TRIES: Final = 5
RECORDED: Final = frozenset(
    {
        "forbidden",
        "approval_required",
        "assurance_required",
        "human_required",
        "self_decision",
        "policy_fence_conflict",
        "fence_rejected",
        "bootstrap_rejected",
        "last_owner",
        "project_archived",
    }
)
"""Refusals that go into the audit: somebody tried what they may not."""

SERVICE: Final = Subject(type="system", id=policy.EXECUTOR)
"""Under this name approved actions are carried out."""

T = TypeVar("T")


class Act(NamedTuple):
    """What an actor tries, for the audit."""

    actor: Actor | Subject
    action: str
    project: str | None
    target: str | None


def subject_of(actor: Actor) -> Subject:
    """Who acts, without how they proved it."""
    return Subject(type=actor.type, id=actor.id)


def refuse_unnameable(subject: Subject) -> None:
    """Raises `invalid` for an id that no path can hold, and under which nobody could be shut out."""
    if not is_subject_id(subject.id):
        raise Ql3Error(
            "invalid", "Use letters, digits and _ . : @ ~ -, not beginning with . : or -.", field="subject.id"
        )


class Gate:
    """Checks and changes of authority on one database. `clock` is wall time."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self.database = database
        self._clock = clock

    def now_ms(self) -> int:
        """Wall time in milliseconds."""
        return self._clock.now_ms()

    async def answer(self, question: PolicyCheck) -> PolicyDecision:
        """`policy.check`: what the asking service may keep for two seconds."""
        return await self.database.read(
            lambda tx: self.decide(tx, question.actor, question.project, question.permission, question.labels)
        )

    async def decide(
        self, tx: Transaction, actor: Actor, project: str, permission: str, labels: Mapping[str, str] | None = None
    ) -> PolicyDecision:
        """Policy's answer about an actor, who must still be authenticated and be what it claims to be."""
        subject = subject_of(actor)
        snapshot = await projects.snapshot(tx, project, subject)
        decision = policy.evaluate(subject, permission, snapshot, labels)
        reason = self._doubt(actor)
        if reason is not None:
            return msgspec.structs.replace(decision, effect="deny", reasons=[reason], role=None)
        return decision

    async def require(
        self, tx: Transaction, actor: Actor, project: str, permission: str, *, archived: bool = False
    ) -> PolicyDecision:
        """The decision that allows it. Raises `forbidden`, `approval_required`, `project_archived` or `not_found`.

        With `archived` an archived project is judged as if it were active: to make it so, or to repeat that it is not.
        """
        decision = await self.decide(tx, actor, project, permission)
        if archived and decision.reasons == ["project_archived"]:
            snapshot = await projects.snapshot(tx, project, subject_of(actor))
            if snapshot is not None:
                decision = policy.evaluate(subject_of(actor), permission, snapshot._replace(project_status="active"))
        return _allowed(decision, actor, project, permission)

    def _doubt(self, actor: Actor) -> str | None:
        if actor.expires_at_ms + SKEW_MS <= self.now_ms():
            return "authentication_expired"
        # Two names stand for places, not for people: whoever uses them must have come from there.
        if policy.is_local_console(subject_of(actor)) and actor.assurance != "local_console":
            return "not_the_console"
        if actor.type == "system" and actor.assurance != "service":
            return "not_a_service"
        return None

    async def change(self, act: Act, work: Callable[[Transaction], Awaitable[T]]) -> T:
        """Run a mutation; one that loses to a unique index runs again, to find the other's row. Refusals are recorded.

        Raises what `work` raises, and `mutation_conflict` when a unique index keeps refusing.
        """
        try:
            for _ in range(TRIES - 1):
                try:
                    return await self.database.transact(work)
                except UniqueViolation:
                    continue
            try:
                return await self.database.transact(work)
            except UniqueViolation as error:
                raise Ql3Error("mutation_conflict") from error
        except Ql3Error as error:
            if error.code in RECORDED:
                await self._record(act, error)
            raise

    async def refuse(self, act: Act, error: Ql3Error) -> Ql3Error:
        """Record a refusal that came before any mutation; hands the error back to be raised."""
        if error.code in RECORDED:
            await self._record(act, error)
        return error

    async def _record(self, act: Act, error: Ql3Error) -> None:
        async def write(tx: Transaction) -> None:
            project = act.project if act.project and await projects.get(tx, act.project) else None
            await audit.append(tx, act.actor, act.action, project, act.target, error.code)

        await self.database.transact(write)


def _allowed(decision: PolicyDecision, actor: Actor, project: str, permission: str) -> PolicyDecision:
    if decision.effect == "allow":
        return decision
    data = {"permission": permission, "project": project, "reasons": decision.reasons}
    if decision.effect == "require_approval":
        raise Ql3Error("approval_required", data=data)
    reason = decision.reasons[0]
    if reason == "project_archived":
        raise Ql3Error("project_archived", data=data)
    if reason == "authentication_expired":
        raise Ql3Error("unauthenticated", data=data)
    # Who has no place in a project must not learn whether it exists; the console sees all of them.
    if reason == "project_not_found" and actor.assurance == "local_console":
        raise Ql3Error("not_found", "There is no such project.", data=data)
    if reason == "project_not_found":
        data["reasons"] = ["subject_unbound"]
    raise Ql3Error("forbidden", data=data)


async def policy_changed(tx: Transaction, project: str | None, version: int, *, rules: bool = False) -> None:
    """Tell everybody to drop what they keep about a project, or about all; `rules` when its own rules changed."""
    about = project or new_id()
    subject = subjects.event("policy", project or "-", about, "changed")
    await outbox.fact(tx, subject, PolicyChanged(project=project, version=version, rules=rules))
