"""Who asks, in which project, with which role, and what policy answered."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta

from schemas.base import Message, Value, View
from schemas.ids import Id, Millis, ProjectId
from schemas.paging import Page

SubjectType = Literal["user", "api_app", "mcp_client", "agent", "worker", "system"]
Assurance = Literal["single_factor", "multi_factor", "hardware", "local_console", "service"]
Role = Literal["owner", "admin", "operator", "viewer"]
SubjectId = Annotated[str, Meta(min_length=1, max_length=255)]

LOCAL_CONSOLE: Final = "local-console"
"""Subject id of the local console (`user/local-console`)."""
GATEWAY: Final = "gateway"
"""Subject id of the gateway itself (`system/gateway`, assurance `service`). It registers the first user of a valid
owner link, before anybody has a role; no person's request ever travels under this name."""
DEFAULT_PROJECT: Final = "default"


class Subject(Value, frozen=True, kw_only=True):
    """Somebody or something that acts."""

    type: SubjectType
    id: SubjectId


class Actor(Value, frozen=True, kw_only=True):
    """An authenticated subject as it travels with a request; it carries no roles.

    `authenticated_at_ms` is when the person proved who they are, for rules that ask for a recent proof.
    """

    type: SubjectType
    id: SubjectId
    authentication_id: Annotated[str, Meta(max_length=128)]
    assurance: Assurance
    authenticated_at_ms: Millis
    expires_at_ms: Millis


class PolicyCheck(Message, frozen=True, kw_only=True, tag="policy.check/1"):
    """May `actor` do `permission` in `project`? `labels` are those of the object, for a project's own rules."""

    project: ProjectId
    actor: Actor
    permission: Annotated[str, Meta(max_length=255)]
    labels: dict[str, str] = {}


class PolicyDecision(Message, frozen=True, kw_only=True, tag="policy.decision/1"):
    """Policy's answer with its fence; may be kept until `valid_until_ms` (wall time of the answering service, 2 s)."""

    effect: Literal["allow", "deny", "require_approval"]
    reasons: list[str]
    project_version: int
    binding_version: int | None
    valid_for_ms: int = 2_000
    role: Role | None = None
    rule: str | None = None
    """The project's own rule that asks for an approval."""
    ahead_ms: int = 0
    """How long before its time a scheduled run asks, by that rule."""
    has_rules: bool = False
    """The project has rules of its own: other labels may have another answer."""


class PolicyChanged(Message, frozen=True, kw_only=True, tag="policy.changed/1"):
    """Fact: a role, a project's state or a rule changed; drop what you keep about the project (or all, when null).

    `rules`: the project's own rules did.
    """

    project: str | None
    version: int
    rules: bool = False


class Project(View, frozen=True, kw_only=True):
    """A project; its id is its slug."""

    id: str
    name: str
    status: Literal["active", "archived"]
    version: int
    created_at_ms: int
    updated_at_ms: int


class ProjectCreate(Message, frozen=True, kw_only=True, tag="projects.create/1"):
    """Make a project; its creator becomes its owner."""

    actor: Actor
    id: ProjectId
    name: Annotated[str, Meta(min_length=1, max_length=255)]


class ProjectArchive(Message, frozen=True, kw_only=True, tag="projects.archive/1"):
    """Archive or reactivate; `expected_version` is compared."""

    actor: Actor
    project: ProjectId
    expected_version: int
    archived: bool = True


class ProjectRead(Message, frozen=True, kw_only=True, tag="projects.get/1"):
    """One project."""

    actor: Actor
    project: ProjectId


class ProjectList(Message, frozen=True, kw_only=True, tag="projects.list/1"):
    """The projects that the actor may read."""

    actor: Actor
    page: Page = Page()


class ProjectAnswer(Message, frozen=True, kw_only=True, tag="projects.answer/1"):
    """One project."""

    project: Project


class ProjectPage(Message, frozen=True, kw_only=True, tag="projects.page/1"):
    """A page of projects."""

    items: list[Project]
    next: str | None


class RoleBinding(View, frozen=True, kw_only=True):
    """The state of a subject's role in a project; the highest version is current."""

    project: str
    subject: Subject
    version: int
    state: Literal["active", "revoked"]
    role: Role | None
    mutation_id: str
    changed_by: Subject
    created_at_ms: int


class RoleBind(Message, frozen=True, kw_only=True, tag="roles.bind/1"):
    """Give a role (or revoke it, with null). `expected_version` is 0 for a subject never bound."""

    actor: Actor
    project: ProjectId
    subject: Subject
    role: Role | None
    expected_version: int
    mutation_id: Id


class RoleList(Message, frozen=True, kw_only=True, tag="roles.list/1"):
    """Current bindings of a project."""

    actor: Actor
    project: ProjectId
    page: Page = Page()


class RoleAnswer(Message, frozen=True, kw_only=True, tag="roles.answer/1"):
    """A binding; `replayed` when the same mutation id was seen before."""

    binding: RoleBinding
    replayed: bool = False


class RolePage(Message, frozen=True, kw_only=True, tag="roles.page/1"):
    """A page of bindings."""

    items: list[RoleBinding]
    next: str | None


class Identity(View, frozen=True, kw_only=True):
    """A subject known to the system."""

    type: SubjectType
    id: str
    display_name: str | None
    status: Literal["active", "disabled"]
    version: int
    created_at_ms: int
    updated_at_ms: int


class IdentityRegister(Message, frozen=True, kw_only=True, tag="identities.register/1"):
    """Make a subject and bind a provider's name to it (gateway's own providers: `password`, `api_credential`).

    Asked by somebody with `policy.manage`, by a subject that adds a binding to itself, or by `system/gateway`. The same
    binding again is a replay; a name that is bound to another subject is a conflict.
    """

    actor: Actor
    subject: Subject
    provider: Annotated[str, Meta(max_length=64)]
    provider_subject: Annotated[str, Meta(max_length=128)]
    display_name: Annotated[str, Meta(max_length=255)] | None = None


class IdentityResolve(Message, frozen=True, kw_only=True, tag="identities.resolve/1"):
    """Whom does a provider's name stand for? Only active bindings of active subjects resolve."""

    provider: Annotated[str, Meta(max_length=64)]
    provider_subject: Annotated[str, Meta(max_length=128)]


class IdentitySet(Message, frozen=True, kw_only=True, tag="identities.set/1"):
    """Disable or enable a subject."""

    actor: Actor
    subject: Subject
    expected_version: int
    status: Literal["active", "disabled"]


class IdentityList(Message, frozen=True, kw_only=True, tag="identities.list/1"):
    """Subjects."""

    actor: Actor
    page: Page = Page()


class AuthenticationBinding(View, frozen=True, kw_only=True):
    """A name under which a provider knows a subject: a user name for `password`, an id for `api_credential`."""

    provider: str
    provider_subject: str
    version: int
    state: Literal["active", "revoked"]
    created_at_ms: int
    """When it came to be in this state."""


class IdentityRead(Message, frozen=True, kw_only=True, tag="identities.get/1"):
    """One subject with its authentication bindings, by provider and name; `page` is about the bindings."""

    actor: Actor
    subject: Subject
    page: Page = Page()


class IdentityDetail(Message, frozen=True, kw_only=True, tag="identities.detail/1"):
    """One subject and a page of its bindings, revoked ones too."""

    identity: Identity
    bindings: list[AuthenticationBinding]
    next: str | None


class BindingRevoke(Message, frozen=True, kw_only=True, tag="identities.revoke_binding/1"):
    """Nobody signs in under this name any more; the subject's other bindings stay. Its owner may register it anew."""

    actor: Actor
    subject: Subject
    provider: Annotated[str, Meta(min_length=1, max_length=64)]
    provider_subject: Annotated[str, Meta(min_length=1, max_length=128)]
    expected_version: int | None = None


class BindingAnswer(Message, frozen=True, kw_only=True, tag="identities.binding/1"):
    """One binding; `replayed` when it was revoked before."""

    binding: AuthenticationBinding
    replayed: bool = False


class IdentityAnswer(Message, frozen=True, kw_only=True, tag="identities.answer/1"):
    """A subject, or null where nothing active resolves."""

    identity: Identity | None


class IdentityPage(Message, frozen=True, kw_only=True, tag="identities.page/1"):
    """A page of subjects."""

    items: list[Identity]
    next: str | None


class BootstrapIssue(Message, frozen=True, kw_only=True, tag="bootstrap.issue/1"):
    """Issue the one-time owner link's challenge; local console only. The caller made the token and sends its digest."""

    actor: Actor
    project: ProjectId
    challenge_id: Annotated[str, Meta(min_length=22, max_length=22)]
    token_digest: Annotated[str, Meta(min_length=64, max_length=64)]


class BootstrapClaim(Message, frozen=True, kw_only=True, tag="bootstrap.claim/1"):
    """Claim ownership with a challenge; every wrong claim is refused alike."""

    actor: Actor
    project: ProjectId
    challenge_id: Annotated[str, Meta(max_length=64)]
    token_digest: Annotated[str, Meta(max_length=64)]


class BootstrapState(Message, frozen=True, kw_only=True, tag="bootstrap.state/1"):
    """Whether a project is still without an owner, and until when a challenge lives."""

    project: ProjectId
    open: bool
    challenge_id: str | None = None
    expires_at_ms: int | None = None


class BootstrapRead(Message, frozen=True, kw_only=True, tag="bootstrap.read/1"):
    """Read the bootstrap state."""

    project: ProjectId
