"""The approval request: a machine of five stored states and one computed. Pure.

`pending@1 → approved@2 → consumed@3`, `pending@1 → rejected@2`, and `withdrawn` from pending (@2) or approved (@3).
`expired` is never stored: a pending or approved request is expired from `expires_at_ms` on, that instant included.

Checks come in a fixed order, so that an answer does not depend on luck: expired before version, version before state,
state before fence (which the store compares).
"""

from __future__ import annotations

import re
from typing import Any, Final, Literal

import msgspec

from schemas.approvals import ApprovalState, Binding, DecisionMode, Risk, preview_digest
from schemas.errors import Ql3Error
from schemas.identity import Actor, Assurance, Subject
from services.approval.policy import is_local_console, is_permission

LIFETIME_MAX_MS: Final = 86_400_000
RECENT_MS: Final = 300_000
SKEW_MS: Final = 5_000
"""How far ahead the clock of the service that authenticated somebody may be."""
PREVIEW_BYTES: Final = 8_192
STRONG: Final[frozenset[Assurance]] = frozenset({"multi_factor", "hardware", "local_console"})
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}")
_REF: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,254}")


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request as stored. Times in wall milliseconds."""

    id: str
    project: str
    version: int = 1
    state: Literal["pending", "approved", "rejected", "consumed", "withdrawn"] = "pending"
    mode: DecisionMode
    quorum: int = 1
    decider_role: Literal["owner", "admin"] | None = None
    rule: str | None = None
    binding: Binding
    preview: dict[str, Any]
    risk: Risk
    requested_by: Subject
    requested_at_ms: int
    expires_at_ms: int
    not_before_ms: int | None = None
    """When what it is about is due; approved earlier, it is handed over then."""
    decision_id: str | None = None
    decision: Literal["approved", "rejected"] | None = None
    decision_reason: str | None = None
    decided_by: Subject | None = None
    decided_at_ms: int | None = None
    consumption_id: str | None = None
    dispatch_id: str | None = None
    consumed_by: Subject | None = None
    consumed_at_ms: int | None = None
    withdrawal_id: str | None = None
    withdrawn_by: Subject | None = None
    withdrawn_at_ms: int | None = None


class DecisionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One person's decision as stored."""

    id: str
    request_id: str
    decision: Literal["approved", "rejected"]
    reason: str | None
    decided_by: Subject
    authentication_id: str
    assurance: Assurance
    authenticated_at_ms: int
    project_version: int
    binding_version: int | None
    decided_at_ms: int


def validate(request: Request) -> Request:
    """The request itself, if it can be one. Raises `invalid`, naming the field."""
    binding = request.binding
    if not is_permission(binding.permission):
        raise Ql3Error("invalid", "There is no such permission.", field="binding.permission")
    if _NAME.fullmatch(binding.action_type) is None:
        raise Ql3Error("invalid", "This cannot be the type of an action.", field="binding.action_type")
    if _REF.fullmatch(binding.action_ref) is None:
        raise Ql3Error("invalid", "This cannot refer to a plan.", field="binding.action_ref")
    if not 0 < request.expires_at_ms - request.requested_at_ms <= LIFETIME_MAX_MS:
        raise Ql3Error("invalid", "A request lives at most 24 hours.", field="expires_at_ms")
    if request.not_before_ms is not None and request.not_before_ms >= request.expires_at_ms:
        raise Ql3Error("invalid", "It is due after the end of its request.", field="not_before_ms")
    try:
        size, digest = len(msgspec.json.encode(request.preview)), preview_digest(request.preview)
    except ValueError as error:
        raise Ql3Error("invalid", "The preview has no canonical form.", field="preview") from error
    if size > PREVIEW_BYTES:
        raise Ql3Error("too_large", f"The preview has {size} bytes; at most {PREVIEW_BYTES} are kept.", field="preview")
    if digest != binding.preview_digest:
        raise Ql3Error("invalid", "The preview is not the one of the digest.", field="binding.preview_digest")
    return request


def effective_state(request: Request, now_ms: int) -> ApprovalState:
    """The state as people see it."""
    if request.state in ("pending", "approved") and now_ms >= request.expires_at_ms:
        return "expired"
    return request.state


def same_request(stored: Request, wanted: Request) -> bool:
    """Whether a repeated creation asks for what is there: everything that the requester chose, but no clock's time."""
    return (
        stored.project == wanted.project
        and stored.binding == wanted.binding
        and stored.risk == wanted.risk
        and stored.requested_by == wanted.requested_by
        and stored.expires_at_ms - stored.requested_at_ms == wanted.expires_at_ms - wanted.requested_at_ms
    )


def default_mode(humans: int) -> DecisionMode:
    """The mode where no rule says otherwise; `humans` who may decide, the local console not counted."""
    return "separation_of_duty" if humans >= 2 else "human_confirmation"


def console_decides(mode: DecisionMode, quorum: int) -> bool:
    """Whether the machine's own console may decide: it stands for a place, where any of the people may sit."""
    return mode == "human_confirmation" and quorum == 1


def admit_decider(request: Request, actor: Actor, now_ms: int) -> None:
    """Whether this person may decide this request at all, as far as policy has not said already.

    Raises `human_required`, `self_decision` or `assurance_required`. Confirming one's own request, and deciding about a
    high risk, needs a proof of identity that is not older than five minutes.
    """
    if actor.type != "user":
        raise Ql3Error("human_required")
    who = Subject(type=actor.type, id=actor.id)
    own = who == request.requested_by
    if request.mode == "separation_of_duty" and own:
        raise Ql3Error("self_decision")
    if is_local_console(who) and not console_decides(request.mode, request.quorum):
        raise Ql3Error("self_decision", "The console does not decide where two people have to.")
    recent = own or request.risk in ("high", "critical")
    require_strong(actor, now_ms, recent=recent)


def require_strong(actor: Actor, now_ms: int, *, recent: bool) -> None:
    """Raises `assurance_required` unless the actor proved more than a password, within five minutes where `recent`."""
    if actor.assurance not in STRONG:
        raise Ql3Error("assurance_required")
    age = now_ms - actor.authenticated_at_ms
    if age < -SKEW_MS or (recent and age > RECENT_MS):
        raise Ql3Error("assurance_required", "The sign-in is older than five minutes.")


def decide(
    request: Request,
    earlier: list[DecisionRow],
    wanted: DecisionRow,
    *,
    expected_version: int | None,
    expected_digest: str | None,
    now_ms: int,
) -> Request:
    """The request after this decision; unchanged while the quorum is not reached. One rejection rejects.

    Raises `approval_expired`, `version_conflict`, `already_decided`, `invalid_transition` or `conflict`.
    """
    _open(request, expected_version, now_ms)
    if request.state != "pending":
        raise Ql3Error("invalid_transition" if request.state == "withdrawn" else "already_decided")
    if expected_digest is not None and expected_digest != request.binding.action_digest:
        raise Ql3Error("conflict", "The action is not the one that was shown.", field="expected_digest")
    if any(row.decided_by == wanted.decided_by for row in earlier):
        raise Ql3Error("already_decided", "You have decided this already.")
    votes = 1 + sum(row.decision == "approved" for row in earlier)
    if wanted.decision == "approved" and votes < request.quorum:
        return request
    return msgspec.structs.replace(
        request,
        version=2,
        state=wanted.decision,
        decision_id=wanted.id,
        decision=wanted.decision,
        decision_reason=wanted.reason,
        decided_by=wanted.decided_by,
        decided_at_ms=wanted.decided_at_ms,
    )


def withdraw(request: Request, *, withdrawal_id: str, by: Subject, now_ms: int) -> Request:
    """The request taken back, before it was consumed. Raises `approval_expired` or `invalid_transition`."""
    _open(request, None, now_ms)
    if request.state not in ("pending", "approved"):
        raise Ql3Error("invalid_transition")
    return msgspec.structs.replace(
        request,
        version=request.version + 1,
        state="withdrawn",
        withdrawal_id=withdrawal_id,
        withdrawn_by=by,
        withdrawn_at_ms=max(now_ms, request.requested_at_ms, request.decided_at_ms or 0),
    )


def consume(
    request: Request,
    *,
    consumption_id: str,
    dispatch_id: str,
    expected_version: int,
    action: Binding,
    requested_by: Subject,
    consumed_by: Subject,
    now_ms: int,
) -> Request:
    """The request, used for its one dispatch.

    Raises `approval_expired`, `version_conflict`, `invalid_transition`, or `mutation_conflict` where the action is not
    the approved one.
    """
    _open(request, expected_version, now_ms)
    if request.state != "approved" or request.decided_at_ms is None:
        raise Ql3Error("invalid_transition")
    if request.binding != action or request.requested_by != requested_by:
        raise Ql3Error("mutation_conflict", "The action is not the approved one.")
    return msgspec.structs.replace(
        request,
        version=3,
        state="consumed",
        consumption_id=consumption_id,
        dispatch_id=dispatch_id,
        consumed_by=consumed_by,
        consumed_at_ms=max(now_ms, request.decided_at_ms),
    )


def _open(request: Request, expected_version: int | None, now_ms: int) -> None:
    # An approved request that was consumed in time stays consumed; only an unused one expires.
    if request.state in ("pending", "approved") and now_ms >= request.expires_at_ms:
        raise Ql3Error("approval_expired")
    if expected_version is not None and request.version != expected_version:
        raise Ql3Error("version_conflict", field="expected_version", data={"version": request.version})
