"""The registry of errors: a stable code, an HTTP status, an exit code of the command, and one sentence of what to do.

Inside, an error is a typed exception; on the bus and over HTTP it is a code with a field and bounded details. No text
holds a secret, a path of this machine or a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple


class ErrorKind(NamedTuple):
    """One registered error. `exit_code` is that of the command (2 refused input, 5 not reachable, 6 denied)."""

    status: int
    exit_code: int
    title: str
    mend: str


REGISTRY: Final[Mapping[str, ErrorKind]] = {
    # What people send.
    "invalid": ErrorKind(400, 2, "The request is not valid.", "Correct the named field and send it again."),
    "unknown_field": ErrorKind(400, 2, "The request has a field that does not exist.", "Remove or correct the field."),
    "too_large": ErrorKind(413, 2, "The request is larger than the limit.", "Send less, or raise the named limit."),
    "cron_invalid": ErrorKind(400, 2, "The schedule expression is not valid.", "Correct the named field."),
    "cron_never_fires": ErrorKind(400, 2, "The schedule can never fire.", "Choose a date that exists."),
    "timezone_invalid": ErrorKind(400, 2, "The time zone is not an IANA zone.", "Use a name such as Europe/Berlin."),
    "message_invalid": ErrorKind(400, 2, "The message could not be read.", "Send the declared schema."),
    # Who asks.
    "unauthenticated": ErrorKind(401, 6, "Sign-in is required.", "Sign in, or send a valid credential."),
    "forbidden": ErrorKind(403, 6, "This is not allowed for you.", "Ask an owner of the project for the role."),
    "approval_required": ErrorKind(403, 6, "This needs an approval first.", "Request an approval and wait for it."),
    "assurance_required": ErrorKind(
        403, 6, "This needs a stronger or more recent sign-in.", "Sign in again with a second factor."
    ),
    "rate_limited": ErrorKind(429, 6, "Too many attempts.", "Wait as long as Retry-After says."),
    # What is there.
    "not_found": ErrorKind(404, 2, "There is no such thing here.", "Check the name or id and the project."),
    "gone": ErrorKind(410, 2, "This was removed by retention.", "See the tombstone for when and why."),
    "conflict": ErrorKind(409, 2, "This collides with what is there.", "Read the current state and try again."),
    "name_taken": ErrorKind(409, 2, "This name is already used in the project.", "Choose another name."),
    "version_conflict": ErrorKind(409, 2, "Somebody changed this meanwhile.", "Read it again and repeat your change."),
    "idempotency_conflict": ErrorKind(
        409, 2, "This idempotency key was used for a different request.", "Use a new key for a new request."
    ),
    "mutation_conflict": ErrorKind(409, 2, "This mutation id was used for something else.", "Use a new mutation id."),
    "invalid_transition": ErrorKind(409, 2, "The present state does not allow this.", "See its state and history."),
    "project_archived": ErrorKind(409, 2, "The project is archived.", "Work in an active project."),
    "last_owner": ErrorKind(409, 2, "The last owner of a project cannot be removed.", "Name another owner first."),
    # Fences.
    "fence_rejected": ErrorKind(409, 2, "Whoever asked no longer holds this.", "Stop; somebody else holds it now."),
    "policy_fence_conflict": ErrorKind(409, 2, "A role or project changed meanwhile.", "Repeat the request."),
    "session_replaced": ErrorKind(409, 2, "A newer session of this worker exists.", "Stop the older process."),
    # Approval.
    "approval_expired": ErrorKind(409, 2, "The approval has expired.", "Request a new one."),
    "approval_rejected": ErrorKind(409, 2, "The approval was rejected.", "Request a new one if the reason is gone."),
    "already_decided": ErrorKind(409, 2, "This was already decided.", "See the decision."),
    "human_required": ErrorKind(403, 6, "Only a person may do this.", "Sign in as a user."),
    "self_decision": ErrorKind(403, 6, "The requester may not decide this.", "Ask another person to decide."),
    "bootstrap_rejected": ErrorKind(403, 6, "The owner link is not valid.", "Issue a new link at the console."),
    "bootstrap_closed": ErrorKind(409, 2, "This project already had an owner.", "Ask an owner for a role."),
    "challenge_active": ErrorKind(409, 2, "An owner link is still valid.", "Use it, or wait until it expires."),
    # Secrets.
    "secret_unavailable": ErrorKind(503, 5, "A secret could not be opened.", "Check that it exists and the keyring."),
    # Execution.
    "context_unavailable": ErrorKind(503, 1, "The run's secrets were not delivered in time.", "Check the vault."),
    "revision_unavailable": ErrorKind(503, 1, "The task revision could not be read.", "Save the task again."),
    "limit_unsupported": ErrorKind(409, 1, "This machine cannot enforce a required limit.", "See worker list."),
    # Ourselves.
    "unavailable": ErrorKind(503, 5, "A part of the system is not reachable.", "Try again shortly; see ql3 doctor."),
    "database_unavailable": ErrorKind(503, 5, "The database is not reachable.", "Check the database; see ql3 doctor."),
    "commit_unknown": ErrorKind(503, 5, "It is not known whether this was stored.", "Send the same request again."),
    "capacity": ErrorKind(503, 5, "There is no room for this now.", "Try again later."),
    "schema_unsupported": ErrorKind(500, 2, "The data was written by another version.", "Use a version that knows it."),
    "setup_invalid": ErrorKind(500, 2, "The set-up is not valid.", "Correct what is named."),
    "internal_error": ErrorKind(500, 1, "Something of ours went wrong.", "See the log of the named service."),
}


class Ql3Error(Exception):
    """A registered error.

    `code` is a key of `REGISTRY`; `field` names what to correct (a dotted path); `detail` is one safe sentence that
    says more than the title; `data` holds bounded facts (numbers, ids) for programs.
    """

    def __init__(
        self, code: str, detail: str | None = None, *, field: str | None = None, data: Mapping[str, Any] | None = None
    ) -> None:
        if code not in REGISTRY:
            raise ValueError(f"unregistered error code {code!r}")
        self.code = code
        self.detail = detail
        self.field = field
        self.data = dict(data or {})
        super().__init__(self.sentence)

    @property
    def kind(self) -> ErrorKind:
        """The registered row of this error."""
        return REGISTRY[self.code]

    @property
    def sentence(self) -> str:
        """What happened, where, and what to do, in one line."""
        kind = REGISTRY[self.code]
        where = f"{self.field}: " if self.field else ""
        return f"{where}{self.detail or kind.title} {kind.mend}"

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self.code, self.detail, self.field, self.data))


def _rebuild(code: str, detail: str | None, field: str | None, data: dict[str, Any]) -> Ql3Error:
    return Ql3Error(code, detail, field=field, data=data)
