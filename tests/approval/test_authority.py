"""Projects, roles, subjects and the first owner, on SQLite and on PostgreSQL."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from schemas.approvals import ApprovalRule, RulesDryRun, RulesRead, RulesSet
from schemas.errors import Ql3Error
from schemas.identity import (
    Actor,
    BindingRevoke,
    BootstrapClaim,
    BootstrapIssue,
    BootstrapRead,
    IdentityList,
    IdentityRead,
    IdentityRegister,
    IdentityResolve,
    IdentitySet,
    PolicyCheck,
    ProjectArchive,
    ProjectCreate,
    ProjectList,
    ProjectRead,
    RoleBind,
    RoleList,
    Subject,
)
from schemas.paging import Page
from services.approval.bootstrap import LIFETIME_MS
from services.kit.audit import read_page
from services.kit.ids import new_id
from tests.approval.conftest import World, actor, console, gateway


async def refused(work: Any) -> Ql3Error:
    """The error that `work` ends with."""
    with pytest.raises(Ql3Error) as error:
        await work
    return error.value


def bind(by: Actor, subject: Subject, role: Any, expected: int, **more: Any) -> RoleBind:
    return RoleBind(
        actor=by,
        project=more.get("project", "default"),
        subject=subject,
        role=role,
        expected_version=expected,
        mutation_id=more.get("mutation_id", new_id()),
    )


def user(name: str) -> Subject:
    return Subject(type="user", id=name)


async def effect(world: World, who: Actor, permission: str, project: str = "default") -> str:
    return (await world.gate.answer(PolicyCheck(project=project, actor=who, permission=permission))).effect


# -- roles


async def test_roles_are_given_changed_and_revoked(world: World) -> None:
    owner = await world.person("owner", "owner")
    ann = await world.person("ann")
    assert await effect(world, ann, "run.start") == "deny"
    first = await world.authority.bind_role(bind(owner, user("ann"), "viewer", 0))
    assert (first.binding.version, first.replayed) == (1, False)
    await world.authority.bind_role(bind(owner, user("ann"), "operator", 1))
    assert await effect(world, ann, "run.start") == "allow"
    await world.authority.bind_role(bind(owner, user("ann"), None, 2))
    assert await effect(world, ann, "run.start") == "deny"
    listed = await world.authority.list_roles(RoleList(actor=owner, project="default", page=Page(limit=1)))
    assert [item.subject.id for item in listed.items] == ["ann"]
    assert listed.items[0].state == "revoked"
    rest = await world.authority.list_roles(
        RoleList(actor=owner, project="default", page=Page(limit=1, cursor=listed.next))
    )
    assert ([item.subject.id for item in rest.items], rest.next) == (["owner"], None)


async def test_a_mutation_id_is_an_acknowledgement_for_ever(world: World) -> None:
    owner = await world.person("owner", "owner")
    await world.person("ann")
    order = bind(owner, user("ann"), "viewer", 0)
    made = await world.authority.bind_role(order)
    await world.authority.bind_role(bind(owner, user("ann"), "admin", 1))
    again = await world.authority.bind_role(order)
    # The old row, not today's authority.
    assert (again.replayed, again.binding) == (True, made.binding)
    for drift in (
        bind(owner, user("ann"), "operator", 0, mutation_id=order.mutation_id),
        bind(owner, user("bob"), "viewer", 0, mutation_id=order.mutation_id),
        bind(owner, user("ann"), "viewer", 1, mutation_id=order.mutation_id),
        bind(console(), user("ann"), "viewer", 0, mutation_id=order.mutation_id),
    ):
        assert (await refused(world.authority.bind_role(drift))).code == "mutation_conflict"


@pytest.mark.parametrize(
    ("by", "target", "role", "expected", "code"),
    [
        ("admin", "ann", "owner", 0, "forbidden"),
        ("admin", "owner", "viewer", 1, "forbidden"),
        ("admin", "owner", None, 1, "forbidden"),
        ("admin", "ann", "admin", 0, None),
        ("operator", "ann", "viewer", 0, "forbidden"),
        ("owner", "owner", "admin", 1, "last_owner"),
        ("owner", "owner", None, 1, "last_owner"),
        ("owner", "ann", "viewer", 3, "version_conflict"),
        ("owner", "ann", None, 0, "invalid"),
        ("owner", "local-console", "viewer", 0, "invalid"),
    ],
)
async def test_who_may_give_what(world: World, by: str, target: str, role: Any, expected: int, code: Any) -> None:
    people = {name: await world.person(name, name) for name in ("owner", "admin", "operator")}
    await world.person("ann")
    work = world.authority.bind_role(bind(people[by], user(target), role, expected))
    if code is None:
        assert (await work).binding.role == role
        return
    assert (await refused(work)).code == code
    if code in ("forbidden", "last_owner"):
        rows = await world.database.read(lambda tx: read_page(tx, None, Page(limit=1)))
        assert (rows.items[0].action, rows.items[0].outcome, rows.items[0].actor) == (
            "role.bind",
            code,
            user(by),
        )


@pytest.mark.parametrize("kind", ["agent", "api_app", "mcp_client", "worker", "system"])
async def test_only_people_own(world: World, kind: Any) -> None:
    owner = await world.person("owner", "owner")
    error = await refused(world.authority.bind_role(bind(owner, Subject(type=kind, id="x"), "owner", 0)))
    assert error.code == "invalid"


async def test_a_second_owner_lets_the_first_go(world: World) -> None:
    first = await world.person("first", "owner")
    await world.person("second", "owner")
    await world.authority.bind_role(bind(first, user("first"), None, 1))
    assert await effect(world, first, "project.read") == "deny"


async def test_agents_ask_before_they_change_roles(world: World) -> None:
    agent = await world.person("bot", "admin", kind="agent")
    error = await refused(world.authority.bind_role(bind(agent, user("ann"), "viewer", 0)))
    assert error.code == "approval_required"


# -- projects


async def test_a_project_is_its_makers(world: World) -> None:
    owner = await world.person("owner", "owner")
    admin = await world.person("admin", "admin")
    assert (
        await refused(world.authority.create_project(ProjectCreate(actor=admin, id="two", name="Two")))
    ).code == "forbidden"
    made = await world.authority.create_project(ProjectCreate(actor=owner, id="two", name="Two"))
    assert (made.project.id, made.project.version) == ("two", 1)
    assert await effect(world, owner, "project.manage", "two") == "allow"
    assert await effect(world, admin, "project.read", "two") == "deny"
    again = await refused(world.authority.create_project(ProjectCreate(actor=owner, id="two", name="Two")))
    assert (again.code, again.field) == ("name_taken", "id")
    assert [p.id for p in (await world.authority.list_projects(ProjectList(actor=owner))).items] == ["default", "two"]
    assert [p.id for p in (await world.authority.list_projects(ProjectList(actor=admin))).items] == ["default"]
    seen = await world.authority.list_projects(ProjectList(actor=console(), page=Page(limit=1)))
    assert [p.id for p in seen.items] == ["default"]
    rest = await world.authority.list_projects(ProjectList(actor=console(), page=Page(limit=1, cursor=seen.next)))
    assert ([p.id for p in rest.items], rest.next) == (["two"], None)
    # Somebody else's project and one that does not exist look alike.
    foreign = await refused(world.authority.get_project(ProjectRead(actor=admin, project="two")))
    absent = await refused(world.authority.get_project(ProjectRead(actor=admin, project="three")))
    assert (foreign.code, foreign.data["reasons"]) == (absent.code, absent.data["reasons"])


async def test_an_archived_project_is_only_read(world: World) -> None:
    owner = await world.person("owner", "owner")
    await world.authority.create_project(ProjectCreate(actor=owner, id="two", name="Two"))

    def archive(version: int, archived: bool = True) -> ProjectArchive:
        return ProjectArchive(actor=owner, project="two", expected_version=version, archived=archived)

    assert (await refused(world.authority.archive_project(archive(7)))).code == "version_conflict"
    closed = await world.authority.archive_project(archive(1))
    assert (closed.project.status, closed.project.version) == ("archived", 2)
    assert await world.authority.archive_project(archive(1)) == closed
    assert await effect(world, owner, "project.read", "two") == "allow"
    assert await effect(world, owner, "run.start", "two") == "deny"
    error = await refused(world.authority.bind_role(bind(owner, user("ann"), "viewer", 0, project="two")))
    assert error.code == "project_archived"
    opened = await world.authority.archive_project(archive(2, archived=False))
    assert (opened.project.status, opened.project.version) == ("active", 3)
    assert await effect(world, owner, "run.start", "two") == "allow"
    error = await refused(
        world.authority.archive_project(ProjectArchive(actor=owner, project="default", expected_version=1))
    )
    assert error.code == "invalid"


# -- subjects


async def test_names_of_providers_resolve_while_all_is_active(world: World) -> None:
    owner = await world.person("owner", "owner")
    ann = await world.person("ann", "operator")

    async def resolve(name: str) -> str | None:
        found = await world.directory.resolve(IdentityResolve(provider="password", provider_subject=name))
        return found.identity.id if found.identity else None

    assert (await resolve("ann"), await resolve("nobody")) == ("ann", None)
    taken = IdentityRegister(actor=owner, subject=user("bob"), provider="password", provider_subject="ann")
    assert (await refused(world.directory.register(taken))).code == "conflict"
    more = IdentityRegister(actor=ann, subject=user("ann"), provider="api_credential", provider_subject="c1")
    assert (await world.directory.register(more)).identity.id == "ann"
    assert (await refused(world.directory.register(_as(more, actor("eve"))))).code == "forbidden"

    off = IdentitySet(actor=owner, subject=user("ann"), expected_version=1, status="disabled")
    assert (await world.directory.set_status(off)).identity.version == 2
    assert (await world.directory.set_status(off)).identity.version == 2
    assert await resolve("ann") is None
    assert await effect(world, ann, "run.start") == "deny"
    assert (await refused(world.directory.register(more))).code == "forbidden"
    on = IdentitySet(actor=owner, subject=user("ann"), expected_version=2, status="active")
    await world.directory.set_status(on)
    assert (await resolve("ann"), await effect(world, ann, "run.start")) == ("ann", "allow")


@pytest.mark.parametrize("name", ["a/b", ".", "..", "a b", "ä", "a%2fb", "a\n", "-a", "?"])
async def test_nobody_gets_a_name_that_fits_into_no_path(world: World, name: str) -> None:
    owner = await world.person("owner", "owner")
    subject = Subject(type="api_app", id=name)
    wanted = IdentityRegister(actor=owner, subject=subject, provider="api_credential", provider_subject="c1")
    for made in (world.directory.register(wanted), world.authority.bind_role(bind(owner, subject, "viewer", 0))):
        error = await refused(made)
        assert (error.code, error.field) == ("invalid", "subject.id")
    assert (await world.person("team:ci_1@host.example~x", "viewer")).id


def _as(wanted: IdentityRegister, who: Actor) -> IdentityRegister:
    return IdentityRegister(
        actor=who, subject=wanted.subject, provider=wanted.provider, provider_subject=wanted.provider_subject
    )


async def test_the_last_owner_is_not_disabled_and_nobody_disables_upwards(world: World) -> None:
    owner = await world.person("owner", "owner")
    admin = await world.person("admin", "admin")

    def off(by: Actor, name: str) -> Any:
        return world.directory.set_status(
            IdentitySet(actor=by, subject=user(name), expected_version=1, status="disabled")
        )

    assert (await refused(off(admin, "owner"))).code == "forbidden"
    assert (await refused(off(owner, "owner"))).code == "last_owner"
    await world.person("second", "owner")
    assert (await off(owner, "owner")).identity.status == "disabled"
    listed = await world.directory.page(IdentityList(actor=admin))
    assert {item.id: item.status for item in listed.items}["owner"] == "disabled"


async def test_one_name_ends_and_may_be_registered_again(world: World) -> None:
    ada = await world.person("ada")
    await world.person("boss", "admin")
    await world.person("owner", "owner")

    def revoke(by: Actor, name: str = "ada", **more: Any) -> Any:
        wanted = {"subject": user("ada"), "provider": "password", "provider_subject": name, **more}
        return world.directory.revoke_binding(BindingRevoke(actor=by, **wanted))

    async def resolves() -> bool:
        found = await world.directory.resolve(IdentityResolve(provider="password", provider_subject="ada"))
        return found.identity is not None

    for by, code in ((actor("nobody"), "forbidden"), (await world.person("op", "operator"), "forbidden")):
        assert (await refused(revoke(by))).code == code
    boss = actor("boss")
    assert (await refused(revoke(boss, "bob"))).code == "not_found"
    assert (await refused(revoke(boss, subject=user("boss")))).code == "not_found"
    assert (await refused(revoke(boss, expected_version=2))).code == "version_conflict"
    assert (await refused(revoke(boss, "owner", subject=user("owner")))).code == "forbidden"
    assert await resolves()
    ended = await revoke(boss, expected_version=1)
    assert (ended.binding.state, ended.binding.version, ended.replayed) == ("revoked", 2, False)
    again = await revoke(boss, expected_version=1)
    assert (again.binding.version, again.replayed) == (2, True)
    assert not await resolves()
    await world.person("ada")
    assert await resolves()
    # Whoever it is may end their own.
    assert (await revoke(ada)).binding.version == 4
    page = await world.directory.get(IdentityRead(actor=ada, subject=user("ada")))
    assert [(item.provider_subject, item.state, item.version) for item in page.bindings] == [("ada", "revoked", 4)]
    with pytest.raises(Ql3Error) as hidden:
        await world.directory.get(IdentityRead(actor=ada, subject=user("boss")))
    assert hidden.value.code == "forbidden"
    assert (await refused(world.directory.get(IdentityRead(actor=boss, subject=user("ghost"))))).code == "not_found"


def _end(world: World, by: Actor, name: str, provider: str = "password", *, of: str | None = None) -> Any:
    """Revoke a name of a user, who is called like the name when not given."""
    return world.directory.revoke_binding(
        BindingRevoke(actor=by, subject=user(of or name), provider=provider, provider_subject=name)
    )


def _disable(world: World, by: Actor, name: str) -> Any:
    return world.directory.set_status(IdentitySet(actor=by, subject=user(name), expected_version=1, status="disabled"))


async def test_the_last_name_of_a_projects_last_owner_stays(world: World) -> None:
    owner, admin = await world.person("owner", "owner"), await world.person("admin", "admin")
    await world.authority.create_project(ProjectCreate(actor=console(), id="web", name="Web"))
    bob = await world.person("bob", "owner", project="web")
    more = IdentityRegister(actor=bob, subject=user("bob"), provider="api_credential", provider_subject="c1")
    await world.directory.register(more)

    # No role in `default`, but a role above the admin's in another project.
    for work in (_end(world, admin, "bob"), _end(world, admin, "c1", "api_credential", of="bob")):
        assert (await refused(work)).code == "forbidden"
    assert (await refused(_disable(world, admin, "bob"))).code == "forbidden"
    # One of two may go, whichever; the last may not, whoever asks, as long as nobody else can act for the project.
    await _end(world, owner, "c1", "api_credential", of="bob")
    for by in (owner, bob):
        error = await refused(_end(world, by, "bob"))
        assert (error.code, error.data) == ("last_owner", {"project": "web"})
    assert (await refused(_disable(world, owner, "bob"))).code == "last_owner"
    rows = await world.database.read(lambda tx: read_page(tx, None, Page(limit=2)))
    assert [(row.action, row.outcome) for row in rows.items] == [
        ("identity.disabled", "last_owner"),
        ("identity.revoke_binding", "last_owner"),
    ]
    await world.directory.register(more)
    await _end(world, bob, "bob")
    assert (await refused(_end(world, bob, "c1", "api_credential", of="bob"))).code == "last_owner"
    # The console may: it is who lets a person in again.
    assert (await _end(world, console(), "c1", "api_credential", of="bob")).binding.state == "revoked"


async def test_an_owner_who_cannot_sign_in_keeps_no_project(world: World) -> None:
    await world.authority.create_project(ProjectCreate(actor=console(), id="web", name="Web"))
    bob = await world.person("bob", "owner", project="web")
    eve = await world.person("eve", "owner", project="web")
    await _end(world, eve, "eve")
    assert (await refused(_end(world, bob, "bob"))).code == "last_owner"
    assert (await refused(world.authority.bind_role(bind(bob, user("bob"), None, 1, project="web")))).code == (
        "last_owner"
    )
    await world.person("eve")
    assert (await _end(world, bob, "bob")).binding.state == "revoked"


async def test_a_role_in_default_is_the_least_one_has_over_people(world: World) -> None:
    owner, admin = await world.person("owner", "owner"), await world.person("admin", "admin")
    await world.authority.create_project(ProjectCreate(actor=console(), id="web", name="Web"))
    for name in ("bob", "eve", "zoe"):
        await world.person(name, "owner", project="web")
    await world.person("op", "operator", project="web")
    await _end(world, admin, "op")
    await _disable(world, admin, "op")
    assert (await refused(_end(world, admin, "bob"))).code == "forbidden"
    await _end(world, owner, "bob")
    await world.bind(user("admin"), "owner", project="web")
    await _disable(world, admin, "eve")
    # Above oneself in `default` is above oneself, whatever one is elsewhere.
    assert (await refused(_end(world, admin, "owner"))).code == "forbidden"


async def test_names_are_listed_in_pages_and_only_for_whom_they_stand(world: World) -> None:
    await world.person("ada")
    for number in range(5):
        await world.directory.register(
            IdentityRegister(
                actor=gateway(), subject=user("ada"), provider="api_credential", provider_subject=f"c{number}"
            )
        )
    await world.directory.revoke_binding(
        BindingRevoke(actor=console(), subject=user("ada"), provider="api_credential", provider_subject="c1")
    )
    # A name that was ended stands for whom it is given next, and is theirs alone.
    await world.directory.register(
        IdentityRegister(actor=gateway(), subject=user("bob"), provider="api_credential", provider_subject="c1")
    )
    seen: list[tuple[str, str]] = []
    cursor: str | None = None
    while True:
        page = await world.directory.get(
            IdentityRead(actor=console(), subject=user("ada"), page=Page(limit=2, cursor=cursor))
        )
        seen += [(item.provider_subject, item.state) for item in page.bindings]
        if page.next is None:
            break
        cursor = page.next
    assert seen == [("c0", "active"), ("c2", "active"), ("c3", "active"), ("c4", "active"), ("ada", "active")]


async def test_a_stale_sign_in_is_no_sign_in(world: World) -> None:
    owner = await world.person("owner", "owner")
    world.clock.advance(366 * 24 * 3_600_000)
    decision = await world.gate.answer(PolicyCheck(project="default", actor=owner, permission="run.start"))
    assert (decision.effect, decision.reasons) == ("deny", ["authentication_expired"])


# -- the first owner

TOKEN = hashlib.sha256(b"token").hexdigest()
CHALLENGE = "c" * 22


def issue(by: Actor, **changes: Any) -> BootstrapIssue:
    wanted = {"actor": by, "project": "default", "challenge_id": CHALLENGE, "token_digest": TOKEN} | changes
    return BootstrapIssue(**wanted)


def claim(by: Actor, **changes: Any) -> BootstrapClaim:
    wanted = {"actor": by, "project": "default", "challenge_id": CHALLENGE, "token_digest": TOKEN} | changes
    return BootstrapClaim(**wanted)


async def test_the_first_owner_is_made_once(world: World) -> None:
    ann, bob = await world.person("ann"), await world.person("bob")
    assert (await world.directory.state(BootstrapRead(project="default"))).open
    state = await world.directory.issue(issue(console()))
    assert state.expires_at_ms == world.clock.now_ms() + LIFETIME_MS
    assert await world.directory.issue(issue(console())) == state
    assert (await refused(world.directory.issue(issue(console(), challenge_id="d" * 22)))).code == "challenge_active"

    made = await world.directory.claim(claim(ann))
    assert (made.binding.role, made.binding.subject, made.replayed) == ("owner", user("ann"), False)
    again = await world.directory.claim(claim(ann))
    assert (again.binding, again.replayed) == (made.binding, True)
    assert (await refused(world.directory.claim(claim(bob)))).code == "bootstrap_rejected"
    assert (await refused(world.directory.issue(issue(console(), challenge_id="d" * 22)))).code == "bootstrap_closed"
    assert not (await world.directory.state(BootstrapRead(project="default"))).open
    # A later revocation opens nothing, and the old answer is no authority.
    await world.person("second", "owner")
    await world.bind(user("ann"), None, expected=1)
    assert (await world.directory.claim(claim(ann))).replayed
    assert await effect(world, ann, "project.read") == "deny"
    assert (await refused(world.directory.issue(issue(console(), challenge_id="e" * 22)))).code == "bootstrap_closed"


async def test_every_wrong_claim_is_refused_alike(world: World) -> None:
    ann = await world.person("ann")
    await world.person("agent", kind="agent")
    await world.directory.issue(issue(console()))
    wrong = [
        claim(ann, token_digest="0" * 64),
        claim(ann, challenge_id="x" * 22),
        claim(ann, project="nowhere"),
        claim(actor("unknown")),
        claim(actor("agent", kind="agent")),
    ]
    seen = {str(await refused(world.directory.claim(one))) for one in wrong}
    world.clock.advance(LIFETIME_MS)
    seen.add(str(await refused(world.directory.claim(claim(ann)))))
    assert len(seen) == 1
    # The link may be issued again from the instant at which the old one has expired; the old one stays dead.
    await world.directory.issue(issue(console(), challenge_id="n" * 22, token_digest="1" * 64))
    seen.add(str(await refused(world.directory.claim(claim(ann)))))
    assert len(seen) == 1


@pytest.mark.parametrize(
    "by",
    [gateway(), actor("local-console"), actor("ann", assurance="local_console"), actor("ann", assurance="hardware")],
)
async def test_only_the_console_issues(world: World, by: Actor) -> None:
    assert (await refused(world.directory.issue(issue(by)))).code == "forbidden"


async def test_a_project_that_had_a_binding_has_no_bootstrap(world: World) -> None:
    ann = await world.person("ann")
    await world.directory.issue(issue(console()))
    await world.person("bob", "viewer")
    assert (await refused(world.directory.claim(claim(ann)))).code == "bootstrap_closed"
    world.clock.advance(LIFETIME_MS)
    assert (await refused(world.directory.issue(issue(console(), challenge_id="d" * 22)))).code == "bootstrap_closed"


# -- rules

PROD = ApprovalRule(name="prod", permission="run.start", labels={"env": "prod"}, decider_role="owner", quorum=1)


async def test_rules_are_versioned_and_dry_run_stores_nothing(world: World) -> None:
    owner = await world.person("owner", "owner")
    await world.person("admin", "admin")
    ann = await world.person("ann", "operator")

    def change(expected: int, rules: list[ApprovalRule], **more: Any) -> RulesSet:
        return RulesSet(
            actor=more.get("by", owner),
            project="default",
            expected_version=expected,
            rules=rules,
            mutation_id=more.get("mutation_id", new_id()),
        )

    def dry(rules: list[ApprovalRule] | None) -> RulesDryRun:
        return RulesDryRun(
            actor=owner,
            project="default",
            permission="run.start",
            requested_by=user("ann"),
            labels={"env": "prod"},
            rules=rules,
        )

    asked = await world.authority.dry_run(dry([PROD]))
    assert (asked.effect, asked.rule, asked.deciders) == ("require_approval", "prod", [user("owner")])
    assert (await world.authority.dry_run(dry(None))).effect == "allow"
    assert (await refused(world.authority.set_rules(change(0, [PROD], by=ann)))).code == "forbidden"

    first = change(0, [PROD])
    assert (await world.authority.set_rules(first)).version == 1
    assert (await world.authority.set_rules(first)).replayed
    drift = change(0, [], mutation_id=first.mutation_id)
    assert (await refused(world.authority.set_rules(drift))).code == "mutation_conflict"
    assert (await refused(world.authority.set_rules(change(0, [])))).code == "version_conflict"
    question = PolicyCheck(project="default", actor=ann, permission="run.start", labels={"env": "prod"})
    decision = await world.gate.answer(question)
    # A change of the rules makes every fence of the project stale.
    assert (decision.effect, decision.rule, decision.project_version) == ("require_approval", "prod", 2)
    assert (await world.authority.get_rules(RulesRead(actor=ann, project="default"))).rules == [PROD]
    assert (await world.authority.set_rules(change(1, []))).version == 2
    assert (await world.gate.answer(question)).effect == "allow"


@pytest.mark.parametrize(
    "permission",
    ["project.read", "tool.call:*", "nonsense", "policy.manage", "project.manage", "approval.decide", "run.stop"],
)
async def test_rules_that_no_approval_could_answer_are_refused(world: World, permission: str) -> None:
    wanted = RulesSet(
        actor=console(),
        project="default",
        expected_version=0,
        rules=[ApprovalRule(name="x", permission=permission)],
        mutation_id=new_id(),
    )
    assert (await refused(world.authority.set_rules(wanted))).field == "rules[0].permission"
