"""Projects, roles and the projects' own rules: who may change them, and the change itself."""

from __future__ import annotations

from typing import Final, Literal

from schemas.approvals import RulesAnswer, RulesDryRun, RulesForecast, RulesRead, RulesSet
from schemas.errors import Ql3Error
from schemas.identity import (
    DEFAULT_PROJECT,
    Project,
    ProjectAnswer,
    ProjectArchive,
    ProjectCreate,
    ProjectList,
    ProjectPage,
    ProjectRead,
    Role,
    RoleAnswer,
    RoleBind,
    RoleBinding,
    RoleList,
    RolePage,
    Subject,
)
from services.approval import policy, roles
from services.approval.gate import Act, Gate, policy_changed, refuse_unnameable, subject_of
from services.approval.policy import Fence, fence_of
from services.approval.requests import console_decides, default_mode
from services.approval.store import projects
from services.kit import audit
from services.kit.database import Transaction

SHOWN_DECIDERS: Final = 200


class Authority:
    """What people change about projects. Installation-wide rights are those of a role in project `default`."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._database = gate.database

    # -- projects

    async def create_project(self, wanted: ProjectCreate) -> ProjectAnswer:
        """Make a project; a user who makes it becomes its owner. Raises `forbidden` or `name_taken`."""
        actor = wanted.actor
        who = subject_of(actor)
        if actor.type != "user":
            raise await self._gate.refuse(
                Act(actor, "project.create", None, wanted.id), Ql3Error("human_required", "Only a user owns projects.")
            )

        async def work(tx: Transaction) -> Project:
            decision = await self._gate.require(tx, actor, DEFAULT_PROJECT, "project.manage")
            await projects.assert_fence(tx, DEFAULT_PROJECT, who, fence_of(decision))
            if await projects.get(tx, wanted.id) is not None:
                raise Ql3Error("name_taken", field="id")
            now_ms = self._gate.now_ms()
            await projects.insert(tx, wanted.id, wanted.name, now_ms)
            if not policy.is_local_console(who):
                # Under the console's hand a new project stays without owner, open for its own owner link.
                made = RoleBinding(
                    project=wanted.id,
                    subject=who,
                    version=1,
                    state="active",
                    role="owner",
                    mutation_id=f"project-create:{wanted.id}"[:64],
                    changed_by=who,
                    created_at_ms=now_ms,
                )
                await projects.append_binding(tx, made)
            await audit.append(tx, actor, "project.create", wanted.id, wanted.id, decision)
            await policy_changed(tx, wanted.id, 1)
            return Project(
                id=wanted.id,
                name=wanted.name,
                status="active",
                version=1,
                created_at_ms=now_ms,
                updated_at_ms=now_ms,
            )

        return ProjectAnswer(project=await self._gate.change(Act(actor, "project.create", None, wanted.id), work))

    async def archive_project(self, wanted: ProjectArchive) -> ProjectAnswer:
        """Archive or reactivate. Raises `forbidden`, `version_conflict` or `invalid`."""
        actor, name = wanted.actor, wanted.project
        action = "project.archive" if wanted.archived else "project.activate"

        async def work(tx: Transaction) -> Project:
            decision = await self._gate.require(tx, actor, name, "project.manage", archived=True)
            project = await projects.lock(tx, name)
            await projects.assert_fence(tx, name, subject_of(actor), fence_of(decision))
            if project is None:
                raise Ql3Error("not_found")
            if name == DEFAULT_PROJECT and wanted.archived:
                raise Ql3Error("invalid", "The default project stays active.", field="project")
            status: Literal["active", "archived"] = "archived" if wanted.archived else "active"
            if project.version != wanted.expected_version:
                if project.status == status and project.version == wanted.expected_version + 1:
                    return project  # the same request again, after its answer was lost
                raise Ql3Error("version_conflict", field="expected_version", data={"version": project.version})
            if project.status == status:
                return project
            now_ms = max(self._gate.now_ms(), project.updated_at_ms)
            if not await projects.set_status(tx, name, project.version, status, now_ms):
                raise Ql3Error("version_conflict", field="expected_version")
            await audit.append(tx, actor, action, name, name, decision)
            await policy_changed(tx, name, project.version + 1)
            return Project(
                id=name,
                name=project.name,
                status=status,
                version=project.version + 1,
                created_at_ms=project.created_at_ms,
                updated_at_ms=now_ms,
            )

        return ProjectAnswer(project=await self._gate.change(Act(actor, action, name, name), work))

    async def get_project(self, wanted: ProjectRead) -> ProjectAnswer:
        """One project, for those who may read it."""

        async def work(tx: Transaction) -> Project:
            await self._gate.require(tx, wanted.actor, wanted.project, "project.read")
            project = await projects.get(tx, wanted.project)
            if project is None:
                raise Ql3Error("not_found")
            return project

        return ProjectAnswer(project=await self._database.read(work))

    async def list_projects(self, wanted: ProjectList) -> ProjectPage:
        """The projects in which the actor has a role; all of them for the console."""
        who = subject_of(wanted.actor)

        async def work(tx: Transaction) -> ProjectPage:
            seen = await self._gate.decide(tx, wanted.actor, DEFAULT_PROJECT, "project.read")
            if seen.reasons in (["authentication_expired"], ["not_the_console"], ["not_a_service"]):
                raise Ql3Error("unauthenticated")
            if seen.reasons in (["subject_unknown"], ["subject_disabled"]):
                return ProjectPage(items=[], next=None)
            everything = policy.is_local_console(who) or who.type == "system"
            items, more = await projects.page(tx, None if everything else who, wanted.page.limit, wanted.page.cursor)
            return ProjectPage(items=items, next=more)

        return await self._database.read(work)

    # -- roles

    async def bind_role(self, wanted: RoleBind) -> RoleAnswer:
        """Give or revoke a role. Raises `forbidden`, `version_conflict`, `mutation_conflict` or `last_owner`."""
        actor, project = wanted.actor, wanted.project
        target = f"{wanted.subject.type}/{wanted.subject.id}"

        async def work(tx: Transaction) -> RoleAnswer:
            decision = await self._gate.require(tx, actor, project, "policy.manage")
            return await self._bind(tx, wanted, decision.role or "viewer", fence_of(decision))

        return await self._gate.change(Act(actor, "role.bind", project, target), work)

    async def _bind(self, tx: Transaction, wanted: RoleBind, changer_role: Role, fence: Fence) -> RoleAnswer:
        project, subject, by = wanted.project, wanted.subject, subject_of(wanted.actor)
        # One change of a project's authority at a time; what was checked before the lock is compared behind it.
        await projects.lock(tx, project)
        known = await projects.binding_by_mutation(tx, project, wanted.mutation_id)
        if known is not None:
            same = (known.subject, known.role, known.changed_by, known.version)
            if same != (subject, wanted.role, by, wanted.expected_version + 1):
                raise Ql3Error("mutation_conflict", field="mutation_id")
            return RoleAnswer(binding=known, replayed=True)
        await projects.assert_fence(tx, project, by, fence)
        # Nobody becomes an owner unseen by a transaction that shuts them out.
        await projects.share_identity(tx, subject)
        current = await projects.binding(tx, project, subject)
        if current is None:
            refuse_unnameable(subject)
        change = roles.Change(
            target=subject,
            role=wanted.role,
            current_role=current.role if current else None,
            current_version=current.version if current else 0,
            expected_version=wanted.expected_version,
            other_active_owners=await projects.other_active_owners(tx, project, subject),
        )
        version = roles.admit(change, changer_role)
        made = RoleBinding(
            project=project,
            subject=subject,
            version=version,
            state="active" if wanted.role else "revoked",
            role=wanted.role,
            mutation_id=wanted.mutation_id,
            changed_by=by,
            created_at_ms=self._gate.now_ms(),
        )
        await projects.append_binding(tx, made)
        await audit.append(
            tx,
            wanted.actor,
            "role.bind",
            project,
            f"{subject.type}/{subject.id}",
            "allow",
            {"role": wanted.role or "none", "was": change.current_role or "none", "version": version},
        )
        row = await projects.get(tx, project)
        await policy_changed(tx, project, row.version if row else 0)
        return RoleAnswer(binding=made)

    async def list_roles(self, wanted: RoleList) -> RolePage:
        """Current bindings of a project, revoked ones too."""

        async def work(tx: Transaction) -> RolePage:
            await self._gate.require(tx, wanted.actor, wanted.project, "project.read")
            items, more = await projects.bindings(tx, wanted.project, wanted.page.limit, wanted.page.cursor)
            return RolePage(items=items, next=more)

        return await self._database.read(work)

    # -- rules

    async def get_rules(self, wanted: RulesRead) -> RulesAnswer:
        """The project's own rules."""

        async def work(tx: Transaction) -> RulesAnswer:
            await self._gate.require(tx, wanted.actor, wanted.project, "project.read")
            version, rules = await projects.rules(tx, wanted.project)
            return RulesAnswer(project=wanted.project, version=version, rules=list(rules))

        return await self._database.read(work)

    async def set_rules(self, wanted: RulesSet) -> RulesAnswer:
        """Replace the rules as a whole. Raises `forbidden`, `version_conflict`, `mutation_conflict` or `invalid`."""
        actor, project = wanted.actor, wanted.project
        for index, rule in enumerate(wanted.rules):
            if rule.permission not in policy.HOLDABLE:
                holdable = ", ".join(sorted(policy.HOLDABLE))
                detail = f"No approval can be asked for this; a rule holds one of {holdable}."
                raise Ql3Error("invalid", detail, field=f"rules[{index}].permission")
        if len({rule.name for rule in wanted.rules}) != len(wanted.rules):
            raise Ql3Error("invalid", "Two rules have the same name.", field="rules")

        async def work(tx: Transaction) -> RulesAnswer:
            decision = await self._gate.require(tx, actor, project, "policy.manage")
            await projects.lock(tx, project)
            known = await projects.rules_by_mutation(tx, project, wanted.mutation_id)
            if known is not None:
                if known != (wanted.expected_version + 1, tuple(wanted.rules)):
                    raise Ql3Error("mutation_conflict", field="mutation_id")
                return RulesAnswer(project=project, version=known[0], rules=wanted.rules, replayed=True)
            await projects.assert_fence(tx, project, subject_of(actor), fence_of(decision))
            version, _ = await projects.rules(tx, project)
            if version != wanted.expected_version:
                raise Ql3Error("version_conflict", field="expected_version", data={"version": version})
            now_ms = self._gate.now_ms()
            await projects.set_rules(
                tx, project, version + 1, wanted.rules, wanted.mutation_id, subject_of(actor), now_ms
            )
            bumped = await projects.bump(tx, project, now_ms)
            await audit.append(tx, actor, "rules.set", project, project, decision, {"version": version + 1})
            await policy_changed(tx, project, bumped, rules=True)
            return RulesAnswer(project=project, version=version + 1, rules=wanted.rules)

        return await self._gate.change(Act(actor, "rules.set", project, project), work)

    async def dry_run(self, wanted: RulesDryRun) -> RulesForecast:
        """Who would be asked, under the rules in force or under those in the question. Stores nothing."""

        async def work(tx: Transaction) -> RulesForecast:
            await self._gate.require(tx, wanted.actor, wanted.project, "policy.manage")
            snapshot = await projects.snapshot(tx, wanted.project, wanted.requested_by)
            if snapshot is not None and wanted.rules is not None:
                snapshot = snapshot._replace(rules=tuple(wanted.rules))
            decision = policy.evaluate(wanted.requested_by, wanted.permission, snapshot, wanted.labels)
            rules = snapshot.rules if snapshot else ()
            rule = policy.rule_for(rules, wanted.permission, wanted.labels, wanted.risk)
            people = await projects.deciders(tx, wanted.project)
            mode = (rule.mode if rule else None) or default_mode(len(people))
            quorum = rule.quorum if rule else 1
            able = [
                who
                for who, role in people
                if (rule is None or rule.decider_role != "owner" or role == "owner")
                and (mode != "separation_of_duty" or who != wanted.requested_by)
            ]
            return RulesForecast(
                effect=decision.effect,
                reason=decision.reasons[0],
                rule=rule.name if rule else None,
                mode=mode,
                quorum=quorum,
                deciders=able[:SHOWN_DECIDERS],
                console_may_decide=console_decides(mode, quorum),
            )

        return await self._database.read(work)

    # -- for approved actions

    async def bind_approved(self, tx: Transaction, wanted: RoleBind, approved_by: Subject) -> RoleAnswer:
        """Bind a role that `approved_by` has approved, judged by what the approver may do now.

        `wanted.actor` is the service that carries it out. Raises as `bind_role` does.
        """
        snapshot = await projects.snapshot(tx, wanted.project, approved_by)
        decision = policy.evaluate(approved_by, "policy.manage", snapshot)
        if decision.effect != "allow" or decision.role is None:
            raise Ql3Error("forbidden", "Who approved this may not change roles any more.")
        return await self._bind(tx, wanted, decision.role, Fence(decision.project_version, None))
