"""Policy: who may do what in a project. Pure; default deny.

The evaluation order is fixed and each step has one reason code: `project_not_found`, `subject_unknown`,
`subject_disabled`, `local_console` or `system_grant` (built-in rules), `subject_unbound`, `project_archived`,
`permission_missing`, `agent_action_requires_approval`, `project_rule`, `role_grant`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

import msgspec

from schemas.approvals import ApprovalRule
from schemas.identity import LOCAL_CONSOLE, PolicyDecision, Role, Subject

READS: Final = frozenset({"project.read", "task.read", "run.read", "artifact.read", "approval.read", "trigger.read"})
"""What stays allowed in an archived project."""

_OPERATOR: Final = READS | {"task.create", "task.update", "run.start", "run.stop", "run.retry", "secret.use"}
_ADMIN: Final = _OPERATOR | {
    "task.delete",
    "secret.manage",
    "worker.manage",
    "policy.manage",
    "approval.decide",
    "approval.recover",
}
MATRIX: Final[Mapping[Role, frozenset[str]]] = {
    "owner": frozenset(_ADMIN | {"project.manage"}),
    "admin": frozenset(_ADMIN),
    "operator": frozenset(_OPERATOR),
    "viewer": frozenset(READS - {"approval.read"}),
}
PERMISSIONS: Final = MATRIX["owner"]
TOOL_ROLES: Final[frozenset[Role]] = frozenset({"owner", "admin", "operator"})
"""Roles that may hold `tool.call:<name>`."""
RANK: Final[Mapping[Role, int]] = {"viewer": 1, "operator": 2, "admin": 3, "owner": 4}

_TOOL: Final = re.compile(r"tool\.call:[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
AGENT_ASKS: Final = PERMISSIONS - READS
"""What an agent may never do by its role alone; every `tool.call:` besides."""
HOLDABLE: Final = frozenset({"run.start", "task.update", "secret.manage", "worker.manage"})
"""What a project's rule may hold: an approval carries each out. The change of roles and of rules is not among
them, so that whatever was ruled can be taken back."""
EXECUTOR: Final = "approval"
"""`system/approval` carries out what people have approved."""
SYSTEM_MAY: Final = frozenset({*READS, "run.start", "run.stop", "run.retry"})
"""What our own services do on behalf of what people have set up: triggers, retries, the stop of what is too late."""
EXECUTOR_MAY: Final = SYSTEM_MAY | {"task.update", "secret.use", "secret.manage", "worker.manage"}
"""A task that names secrets needs `secret.use`; whoever may ask for its change holds that too."""


class Binding(NamedTuple):
    """The current role binding of a subject; a revoked one has no role."""

    version: int
    role: Role | None


class Snapshot(NamedTuple):
    """What policy knows about a subject in a project at one instant. `identity` is None for an unknown subject."""

    project_version: int
    project_status: Literal["active", "archived"]
    binding: Binding | None
    identity: Literal["active", "disabled"] | None
    rules: tuple[ApprovalRule, ...] = ()


class Fence(NamedTuple):
    """The versions on which a decision was made; a mutation compares them again in its own transaction."""

    project_version: int
    binding_version: int | None


def is_permission(text: str) -> bool:
    """Whether text names a permission: one of the registry, or `tool.call:` and an exact name."""
    return text in PERMISSIONS or _TOOL.fullmatch(text) is not None


def holds(role: Role, permission: str) -> bool:
    """Whether a role grants a permission."""
    if permission.startswith("tool.call:"):
        return role in TOOL_ROLES and is_permission(permission)
    return permission in MATRIX[role]


def is_local_console(subject: Subject) -> bool:
    """Whether this is the machine's own console."""
    return subject.type == "user" and subject.id == LOCAL_CONSOLE


def evaluate(
    subject: Subject,
    permission: str,
    snapshot: Snapshot | None,
    labels: Mapping[str, str] | None = None,
) -> PolicyDecision:
    """May `subject` do `permission`? `labels` are those of the object, for the project's own rules."""
    if snapshot is None:
        return PolicyDecision(effect="deny", reasons=["project_not_found"], project_version=0, binding_version=None)
    role, grant = _role(subject, snapshot)
    binding = snapshot.binding

    def answer(effect: Literal["allow", "deny", "require_approval"], reason: str) -> PolicyDecision:
        return PolicyDecision(
            effect=effect,
            reasons=[reason],
            project_version=snapshot.project_version,
            binding_version=binding.version if binding else None,
            role=role,
            has_rules=bool(snapshot.rules),
        )

    if not is_permission(permission):
        return answer("deny", "permission_unknown")
    if grant in ("subject_unknown", "subject_disabled", "subject_unbound"):
        return answer("deny", grant)
    if snapshot.project_status != "active" and permission not in READS:
        return answer("deny", "project_archived")
    if grant == "system_grant":
        executor = subject.id == EXECUTOR
        if permission not in (EXECUTOR_MAY if executor else SYSTEM_MAY):
            return answer("deny", "permission_missing")
        if executor:
            return answer("allow", grant)
    elif role is None or not holds(role, permission):
        return answer("deny", "permission_missing")
    if subject.type == "agent" and (permission in AGENT_ASKS or permission.startswith("tool.call:")):
        return answer("require_approval", "agent_action_requires_approval")
    rule = rule_for(snapshot.rules, permission, labels or {})
    if rule is not None:
        asks = answer("require_approval", "project_rule")
        return msgspec.structs.replace(asks, rule=rule.name, ahead_ms=rule.ahead_ms)
    return answer("allow", grant)


def _role(subject: Subject, snapshot: Snapshot) -> tuple[Role | None, str]:
    """The role in force and where it comes from, or the reason why there is none."""
    if subject.type == "system":
        return None, "system_grant"
    if is_local_console(subject):
        return "owner", "local_console"
    if snapshot.identity is None and subject.type != "worker":
        return None, "subject_unknown"
    if snapshot.identity == "disabled":
        return None, "subject_disabled"
    if snapshot.binding is None or snapshot.binding.role is None:
        return None, "subject_unbound"
    return snapshot.binding.role, "role_grant"


def rule_for(
    rules: tuple[ApprovalRule, ...], permission: str, labels: Mapping[str, str], risk: str | None = None
) -> ApprovalRule | None:
    """The first rule of the project that speaks about this permission, these labels and this risk."""
    if permission not in HOLDABLE:
        return None
    for rule in rules:
        if rule.permission != permission:
            continue
        if any(labels.get(name) != value for name, value in rule.labels.items()):
            continue
        if risk is not None and rule.risks and risk not in rule.risks:
            continue
        return rule
    return None


def fence_of(decision: PolicyDecision) -> Fence:
    """The fence that a decision stands on."""
    return Fence(decision.project_version, decision.binding_version)
