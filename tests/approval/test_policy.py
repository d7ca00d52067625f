"""Who may do what: the whole matrix, and the order in which policy looks for a reason to refuse."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest

from schemas.approvals import ApprovalRule
from schemas.identity import LOCAL_CONSOLE, Role, Subject, SubjectType
from services.approval import policy
from services.approval.handlers.run_create import RunCreateHandler
from services.approval.handlers.secret_set import SecretSetHandler
from services.approval.handlers.task_change import TaskChangeHandler
from services.approval.handlers.worker_drain import WorkerDrainHandler
from services.approval.policy import Binding, Snapshot

READS = {"project.read", "task.read", "run.read", "artifact.read"}
OPERATES = {"task.create", "task.update", "run.start", "run.stop", "run.retry", "secret.use"}
ADMINISTERS = {
    "task.delete",
    "secret.manage",
    "worker.manage",
    "policy.manage",
    "approval.decide",
    "approval.recover",
}
# Written out once more, from the words of the contract and not from the code.
EXPECTED: dict[str, set[str]] = {
    "viewer": READS | {"trigger.read"},
    "operator": READS | {"trigger.read", "approval.read"} | OPERATES | {"tool.call:browser.open"},
    "admin": READS | {"trigger.read", "approval.read"} | OPERATES | ADMINISTERS | {"tool.call:browser.open"},
    "owner": READS
    | {"trigger.read", "approval.read", "project.manage"}
    | OPERATES
    | ADMINISTERS
    | {"tool.call:browser.open"},
}
PERMISSIONS = [*sorted(EXPECTED["owner"]), "tool.call:*", "everything", ""]
ROLES = [*get_args(Role), None]


def expected(kind: str, role: str | None, permission: str, active: bool) -> tuple[str, str]:
    """The contract in ten lines."""
    if permission not in EXPECTED["owner"]:
        return "deny", "permission_unknown"
    if kind == "system":
        may = READS | {"approval.read", "trigger.read", "run.start", "run.stop", "run.retry"}
        if not active and permission not in READS | {"approval.read", "trigger.read"}:
            return "deny", "project_archived"
        return ("allow", "system_grant") if permission in may else ("deny", "permission_missing")
    if role is None:
        return "deny", "subject_unbound"
    if not active and permission not in READS | {"approval.read", "trigger.read"}:
        return "deny", "project_archived"
    if permission not in EXPECTED[role]:
        return "deny", "permission_missing"
    if kind == "agent" and permission not in READS | {"approval.read", "trigger.read"}:
        return "require_approval", "agent_action_requires_approval"
    return "allow", "role_grant"


@pytest.mark.parametrize(
    ("kind", "role", "permission", "active"),
    list(itertools.product(get_args(SubjectType), ROLES, PERMISSIONS, [True, False])),
)
def test_matrix(kind: SubjectType, role: Role | None, permission: str, active: bool) -> None:
    snapshot = Snapshot(
        project_version=3,
        project_status="active" if active else "archived",
        binding=Binding(2, role),
        identity="active",
    )
    decision = policy.evaluate(Subject(type=kind, id="somebody"), permission, snapshot)
    assert (decision.effect, decision.reasons[0]) == expected(kind, role, permission, active)
    assert (decision.project_version, decision.binding_version) == (3, 2)


def snapshot(**changes: object) -> Snapshot:
    made = Snapshot(project_version=1, project_status="active", binding=Binding(1, "owner"), identity="active")
    return made._replace(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (None, "project_not_found"),
        (snapshot(identity=None, binding=None), "subject_unknown"),
        (snapshot(identity="disabled"), "subject_disabled"),
        (snapshot(binding=None), "subject_unbound"),
        (snapshot(binding=Binding(4, None)), "subject_unbound"),
        (snapshot(project_status="archived"), "project_archived"),
        (snapshot(binding=Binding(1, "viewer")), "permission_missing"),
    ],
)
def test_reasons_of_a_refusal(seen: Snapshot | None, reason: str) -> None:
    decision = policy.evaluate(Subject(type="user", id="ann"), "run.start", seen)
    assert (decision.effect, decision.reasons) == ("deny", [reason])


def test_the_console_needs_no_binding_and_keeps_the_bootstrap_open() -> None:
    console = Subject(type="user", id=LOCAL_CONSOLE)
    seen = snapshot(binding=None, identity=None)
    for permission in EXPECTED["owner"]:
        decision = policy.evaluate(console, permission, seen)
        assert (decision.effect, decision.reasons, decision.role) == ("allow", ["local_console"], "owner")
        assert decision.binding_version is None
    archived = policy.evaluate(console, "run.start", seen._replace(project_status="archived"))
    assert archived.reasons == ["project_archived"]


def test_only_who_carries_out_approved_actions_may_change_what_was_approved() -> None:
    for permission in ("task.update", "secret.use", "secret.manage", "worker.manage"):
        assert policy.evaluate(Subject(type="system", id="approval"), permission, snapshot()).effect == "allow"
        assert policy.evaluate(Subject(type="system", id="scheduler"), permission, snapshot()).effect == "deny"
    assert policy.evaluate(Subject(type="system", id="approval"), "policy.manage", snapshot()).effect == "deny"


PROD = ApprovalRule(name="prod", permission="run.start", labels={"env": "prod"}, ahead_ms=60_000)


def test_a_projects_rule_asks_even_an_owner_and_a_trigger() -> None:
    seen = snapshot(rules=(PROD,))
    for who in (Subject(type="user", id="ann"), Subject(type="system", id="trigger/1")):
        asked = policy.evaluate(who, "run.start", seen, {"env": "prod", "team": "a"})
        assert (asked.effect, asked.reasons, asked.rule, asked.ahead_ms) == (
            "require_approval",
            ["project_rule"],
            "prod",
            60_000,
        )
        assert policy.evaluate(who, "run.start", seen, {"env": "test"}).effect == "allow"
        assert policy.evaluate(who, "run.stop", seen, {"env": "prod"}).effect == "allow"
    # What was approved is not asked for again.
    assert policy.evaluate(Subject(type="system", id="approval"), "run.start", seen, {"env": "prod"}).effect == "allow"


def test_a_rule_never_lets_anybody_in() -> None:
    seen = snapshot(rules=(PROD,), binding=Binding(1, "viewer"))
    assert policy.evaluate(Subject(type="user", id="ann"), "run.start", seen, {"env": "prod"}).effect == "deny"


def test_the_first_matching_rule_counts() -> None:
    critical = ApprovalRule(name="two", permission="run.start", risks=["critical"], quorum=2)
    rules = (critical, PROD)
    found = policy.rule_for(rules, "run.start", {"env": "prod"}, "critical")
    assert found is critical
    assert policy.rule_for(rules, "run.start", {"env": "prod"}, "low") is PROD
    assert policy.rule_for(rules, "run.start", {}, "low") is None


def test_a_rule_never_holds_what_takes_it_back() -> None:
    everything = tuple(
        ApprovalRule(name=f"r{number}", permission=permission)
        for number, permission in enumerate(sorted(policy.PERMISSIONS))
    )
    held = {
        permission
        for permission in policy.PERMISSIONS
        if policy.evaluate(Subject(type="user", id="ann"), permission, snapshot(rules=everything)).effect
        == "require_approval"
    }
    assert held == policy.HOLDABLE


def test_what_a_rule_may_hold_an_approval_carries_out() -> None:
    actions = (RunCreateHandler, TaskChangeHandler, SecretSetHandler, WorkerDrainHandler)
    assert {action.permission for action in actions} == policy.HOLDABLE
