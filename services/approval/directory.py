"""The directory of subjects, and the bootstrap that gives a project its first owner."""

from __future__ import annotations

from collections.abc import Mapping

from schemas.errors import Ql3Error
from schemas.identity import (
    DEFAULT_PROJECT,
    GATEWAY,
    Actor,
    AuthenticationBinding,
    BindingAnswer,
    BindingRevoke,
    BootstrapClaim,
    BootstrapIssue,
    BootstrapRead,
    BootstrapState,
    Identity,
    IdentityAnswer,
    IdentityDetail,
    IdentityList,
    IdentityPage,
    IdentityRead,
    IdentityRegister,
    IdentityResolve,
    IdentitySet,
    PolicyDecision,
    Role,
    RoleAnswer,
    RoleBinding,
    Subject,
)
from services.approval import bootstrap
from services.approval.gate import Act, Gate, policy_changed, refuse_unnameable, subject_of
from services.approval.policy import RANK, fence_of, is_local_console
from services.approval.store import challenges, identities, projects
from services.kit import audit
from services.kit.database import Transaction

BOOTSTRAP = Subject(type="system", id="owner-bootstrap")


class Directory:
    """Who there is. Rights over subjects are those of `policy.manage` in project `default`."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._database = gate.database

    async def register(self, wanted: IdentityRegister) -> IdentityAnswer:
        """Make a subject and bind a provider's name to it. Raises `forbidden`, `conflict` or `invalid`.

        The same binding again is a replay; a name that stands for somebody else is a conflict.
        """
        actor, subject = wanted.actor, wanted.subject
        target = f"{subject.type}/{subject.id}"
        if subject.type in ("system", "worker") or is_local_console(subject):
            raise Ql3Error("invalid", "This subject is not one that can be registered.", field="subject")

        async def work(tx: Transaction) -> Identity:
            decision = await self._admit_registrar(tx, wanted)
            now_ms = self._gate.now_ms()
            identity = await identities.get(tx, subject)
            if identity is None:
                refuse_unnameable(subject)
                await identities.insert(tx, subject, wanted.display_name, now_ms)
                identity = Identity(
                    type=subject.type,
                    id=subject.id,
                    display_name=wanted.display_name,
                    status="active",
                    version=1,
                    created_at_ms=now_ms,
                    updated_at_ms=now_ms,
                )
            bound = await identities.bound(tx, wanted.provider, wanted.provider_subject)
            if bound is not None and bound.active:
                if bound.subject != subject:
                    raise Ql3Error("conflict", "This name stands for somebody else.", field="provider_subject")
                return identity
            version = bound.version + 1 if bound else 1
            await identities.bind(tx, wanted.provider, wanted.provider_subject, version, "active", subject, now_ms)
            await audit.append(tx, actor, "identity.register", None, target, decision, {"provider": wanted.provider})
            # Whoever was refused as unknown a moment ago is known from now on.
            await policy_changed(tx, None, identity.version)
            return identity

        identity = await self._gate.change(Act(actor, "identity.register", None, target), work)
        return IdentityAnswer(identity=identity)

    async def _admit_registrar(self, tx: Transaction, wanted: IdentityRegister) -> PolicyDecision:
        actor = wanted.actor
        if actor.type == "system" and actor.id == GATEWAY:
            return await self._gate.require(tx, actor, DEFAULT_PROJECT, "project.read")
        if subject_of(actor) == wanted.subject and await identities.get(tx, wanted.subject) is not None:
            # Somebody adds a name to themselves, which needs that they are active and nothing else.
            seen = await self._gate.decide(tx, actor, DEFAULT_PROJECT, "project.read")
            if seen.effect == "allow" or seen.reasons in (["subject_unbound"], ["permission_missing"]):
                return seen
        decision = await self._gate.require(tx, actor, DEFAULT_PROJECT, "policy.manage")
        await projects.assert_fence(tx, DEFAULT_PROJECT, subject_of(actor), fence_of(decision))
        return decision

    async def resolve(self, wanted: IdentityResolve) -> IdentityAnswer:
        """For whom a provider's name stands; null unless both binding and subject are active."""

        async def work(tx: Transaction) -> Identity | None:
            bound = await identities.bound(tx, wanted.provider, wanted.provider_subject)
            if bound is None or not bound.active:
                return None
            identity = await identities.find(tx, bound.subject)
            return identity if identity is not None and identity.status == "active" else None

        return IdentityAnswer(identity=await self._database.read(work))

    async def set_status(self, wanted: IdentitySet) -> IdentityAnswer:
        """Disable or enable a subject, everywhere and at once. Raises `forbidden`, `version_conflict`, `last_owner`."""
        actor, subject = wanted.actor, wanted.subject
        target = f"{subject.type}/{subject.id}"

        async def work(tx: Transaction) -> Identity:
            decision, identity, held = await self._admit_above(tx, actor, subject)
            if identity.version != wanted.expected_version:
                if identity.status == wanted.status and identity.version == wanted.expected_version + 1:
                    return identity
                raise Ql3Error("version_conflict", field="expected_version", data={"version": identity.version})
            if identity.status == wanted.status:
                return identity
            if wanted.status == "disabled":
                await _keep_owners(tx, subject, held)
            now_ms = max(self._gate.now_ms(), identity.updated_at_ms)
            if not await identities.set_status(tx, subject, identity.version, wanted.status, now_ms):
                raise Ql3Error("version_conflict", field="expected_version")
            await audit.append(tx, actor, f"identity.{wanted.status}", None, target, decision)
            await policy_changed(tx, None, identity.version + 1)
            return Identity(
                type=identity.type,
                id=identity.id,
                display_name=identity.display_name,
                status=wanted.status,
                version=identity.version + 1,
                created_at_ms=identity.created_at_ms,
                updated_at_ms=now_ms,
            )

        identity = await self._gate.change(Act(actor, f"identity.{wanted.status}", None, target), work)
        return IdentityAnswer(identity=identity)

    async def get(self, wanted: IdentityRead) -> IdentityDetail:
        """A subject with a page of its bindings, for itself and for who may change it. Raises `not_found`."""

        async def work(tx: Transaction) -> IdentityDetail:
            await self._admit_reader(tx, wanted.actor, wanted.subject)
            identity = await identities.find(tx, wanted.subject)
            if identity is None:
                raise Ql3Error("not_found", "There is no such subject.")
            page = wanted.page
            found, more = await identities.bindings(tx, wanted.subject, page.limit, page.cursor)
            return IdentityDetail(identity=identity, bindings=found, next=more)

        return await self._database.read(work)

    async def _admit_reader(self, tx: Transaction, actor: Actor, subject: Subject) -> None:
        if subject_of(actor) == subject:
            seen = await self._gate.decide(tx, actor, DEFAULT_PROJECT, "project.read")
            if seen.effect == "allow" or seen.reasons in (["subject_unbound"], ["permission_missing"]):
                return
        await self._gate.require(tx, actor, DEFAULT_PROJECT, "policy.manage")

    async def revoke_binding(self, wanted: BindingRevoke) -> BindingAnswer:
        """End one of a subject's names; a subject may end its own.

        The last name may go too, as the console lets a person in again; that of a project's last owner only by the
        console's own hand. Raises `forbidden`, `not_found`, `version_conflict` or `last_owner`.
        """
        actor, subject = wanted.actor, wanted.subject
        target = f"{subject.type}/{subject.id}"

        async def work(tx: Transaction) -> BindingAnswer:
            decision, held = await self._admit_binder(tx, actor, subject, wanted.provider)
            bound = await identities.bound(tx, wanted.provider, wanted.provider_subject)
            if bound is None or bound.subject != subject:
                raise Ql3Error("not_found", "This subject has no such name.", field="provider_subject")
            version, now_ms = bound.version, bound.created_at_ms
            if bound.active:
                if wanted.expected_version not in (None, version):
                    raise Ql3Error("version_conflict", field="expected_version", data={"version": version})
                if not is_local_console(subject_of(actor)) and not await identities.other_names(
                    tx, subject, wanted.provider, wanted.provider_subject
                ):
                    await _keep_owners(tx, subject, held)
                version, now_ms = version + 1, max(self._gate.now_ms(), now_ms)
                await identities.bind(tx, wanted.provider, wanted.provider_subject, version, "revoked", subject, now_ms)
                detail = {"provider": wanted.provider, "name": wanted.provider_subject}
                await audit.append(tx, actor, "identity.revoke_binding", None, target, decision, detail)
                await policy_changed(tx, None, version)
            elif wanted.expected_version not in (None, version, version - 1):
                raise Ql3Error("version_conflict", field="expected_version", data={"version": version})
            binding = AuthenticationBinding(
                provider=wanted.provider,
                provider_subject=wanted.provider_subject,
                version=version,
                state="revoked",
                created_at_ms=now_ms,
            )
            return BindingAnswer(binding=binding, replayed=not bound.active)

        return await self._gate.change(Act(actor, "identity.revoke_binding", None, target), work)

    async def _admit_binder(
        self, tx: Transaction, actor: Actor, subject: Subject, provider: str
    ) -> tuple[PolicyDecision, Mapping[str, Role]]:
        # A program may end its own credentials, as when one was seen by others.
        if subject_of(actor) == subject and (actor.type == "user" or provider == "api_credential"):
            seen = await self._gate.decide(tx, actor, DEFAULT_PROJECT, "project.read")
            if seen.effect == "allow" or seen.reasons in (["subject_unbound"], ["permission_missing"]):
                _, held = await _hold(tx, subject)
                return seen, held
        decision, _, held = await self._admit_above(tx, actor, subject)
        return decision, held

    async def _admit_above(
        self, tx: Transaction, actor: Actor, subject: Subject
    ) -> tuple[PolicyDecision, Identity, Mapping[str, Role]]:
        """Who may shut a subject out or let it in: who manages people, and ranks below it in no project.

        A role in `default` counts for people, so it is what the actor has at least in every project. Answers the
        decision, the subject and its roles, all of them locked. Raises `forbidden`, `not_found` or
        `policy_fence_conflict`.
        """
        decision = await self._gate.require(tx, actor, DEFAULT_PROJECT, "policy.manage")
        identity, held = await _hold(tx, subject)
        await projects.assert_fence(tx, DEFAULT_PROJECT, subject_of(actor), fence_of(decision))
        everywhere = decision.role or "viewer"
        own = await projects.roles_of(tx, subject_of(actor))
        for project, role in held.items():
            if RANK[role] > max(RANK[everywhere], RANK[own.get(project, everywhere)]):
                raise Ql3Error("forbidden", "Somebody with a role above your own is not yours to shut out.")
        return decision, identity, held

    async def page(self, wanted: IdentityList) -> IdentityPage:
        """Subjects by type and id."""

        async def work(tx: Transaction) -> IdentityPage:
            await self._gate.require(tx, wanted.actor, DEFAULT_PROJECT, "policy.manage")
            items, more = await identities.page(tx, wanted.page.limit, wanted.page.cursor)
            return IdentityPage(items=items, next=more)

        return await self._database.read(work)

    # -- owner bootstrap

    async def issue(self, wanted: BootstrapIssue) -> BootstrapState:
        """A new challenge, from the console only. Raises `forbidden`, `bootstrap_closed` or `challenge_active`."""
        actor, project = wanted.actor, wanted.project
        act = Act(actor, "bootstrap.issue", project, wanted.challenge_id)
        if actor.assurance != "local_console" or not is_local_console(subject_of(actor)):
            raise await self._gate.refuse(act, Ql3Error("forbidden", "Only the machine's own console may do this."))

        async def work(tx: Transaction) -> BootstrapState:
            row = await projects.lock(tx, project)
            if row is None:
                raise Ql3Error("not_found", "There is no such project.")
            latest = await challenges.latest(tx, project)
            if (
                latest is not None
                and (latest.challenge_id, latest.token_digest) == (wanted.challenge_id, wanted.token_digest)
                and latest.consumed_at_ms is None
            ):
                return _state(project, True, latest.challenge_id, latest.expires_at_ms)
            now_ms = self._gate.now_ms()
            version = bootstrap.issue(
                project_active=row.status == "active",
                ever_bound=await projects.ever_bound(tx, project),
                latest=latest,
                now_ms=now_ms,
            )
            expires = now_ms + bootstrap.LIFETIME_MS
            await challenges.insert(tx, project, version, wanted.challenge_id, wanted.token_digest, now_ms, expires)
            await audit.append(tx, actor, "bootstrap.issue", project, wanted.challenge_id, "allow")
            return _state(project, True, wanted.challenge_id, expires)

        return await self._gate.change(act, work)

    async def claim(self, wanted: BootstrapClaim) -> RoleAnswer:
        """Become the first owner. Every wrong claim is `bootstrap_rejected`, whatever was wrong."""
        actor, project = wanted.actor, wanted.project
        who = subject_of(actor)

        async def work(tx: Transaction) -> RoleAnswer:
            row = await projects.lock(tx, project)
            latest = await challenges.latest(tx, project)
            now_ms = self._gate.now_ms()
            identity = await identities.get(tx, who)
            outcome = bootstrap.claim(
                project_active=row is not None and row.status == "active",
                latest=latest,
                challenge_id=wanted.challenge_id,
                token_digest=wanted.token_digest,
                subject=who,
                identity_active=identity is not None and identity.status == "active",
                ever_bound=await projects.ever_bound(tx, project),
                now_ms=now_ms,
            )
            assert latest is not None
            mutation = bootstrap.mutation_id(latest.challenge_id)
            if outcome == "replay":
                known = await projects.binding_by_mutation(tx, project, mutation)
                if known is None:
                    raise Ql3Error("unavailable", "A claimed owner link has no owner.")
                return RoleAnswer(binding=known, replayed=True)
            if not await challenges.consume(tx, project, latest, who, now_ms):
                raise Ql3Error("bootstrap_rejected")
            made = RoleBinding(
                project=project,
                subject=who,
                version=1,
                state="active",
                role="owner",
                mutation_id=mutation,
                changed_by=BOOTSTRAP,
                created_at_ms=now_ms,
            )
            await projects.append_binding(tx, made)
            await audit.append(tx, actor, "bootstrap.claim", project, f"{who.type}/{who.id}", "allow")
            await policy_changed(tx, project, row.version if row else 1)
            return RoleAnswer(binding=made)

        return await self._gate.change(Act(actor, "bootstrap.claim", project, None), work)

    async def state(self, wanted: BootstrapRead) -> BootstrapState:
        """Whether a project still waits for its first owner, and until when a link lives. No secret is in it."""

        async def work(tx: Transaction) -> BootstrapState:
            row = await projects.get(tx, wanted.project)
            latest = await challenges.latest(tx, wanted.project)
            used = latest is not None and latest.consumed_at_ms is not None
            open_ = (
                row is not None
                and row.status == "active"
                and not used
                and not await projects.ever_bound(tx, wanted.project)
            )
            if not open_ or latest is None or latest.expires_at_ms <= self._gate.now_ms():
                return _state(wanted.project, open_, None, None)
            return _state(wanted.project, True, latest.challenge_id, latest.expires_at_ms)

        return await self._database.read(work)


async def _hold(tx: Transaction, subject: Subject) -> tuple[Identity, Mapping[str, Role]]:
    """Lock a subject and the projects in which it has a role. Raises `not_found` or `policy_fence_conflict`."""
    # Projects before subjects, the order in which every mutation locks.
    locked = sorted({DEFAULT_PROJECT, *await projects.roles_of(tx, subject)})
    for project in locked:
        await projects.lock(tx, project)
    identity = await identities.get(tx, subject)
    if identity is None:
        raise Ql3Error("not_found", "There is no such subject.")
    held = await projects.roles_of(tx, subject)
    if not held.keys() <= set(locked):
        raise Ql3Error("policy_fence_conflict")
    return identity, held


async def _keep_owners(tx: Transaction, subject: Subject, held: Mapping[str, Role]) -> None:
    """Raises `last_owner` where a project would be left without an owner who can sign in."""
    for project, role in held.items():
        if role == "owner" and await projects.other_active_owners(tx, project, subject) == 0:
            raise Ql3Error("last_owner", data={"project": project})


def _state(project: str, is_open: bool, challenge_id: str | None, expires_at_ms: int | None) -> BootstrapState:
    return BootstrapState(project=project, open=is_open, challenge_id=challenge_id, expires_at_ms=expires_at_ms)
