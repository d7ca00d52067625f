"""Projects, role bindings, rules, and the fence that every mutation of authority compares in its own transaction."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import msgspec

from schemas.approvals import ApprovalRule
from schemas.errors import Ql3Error
from schemas.identity import Project, Role, RoleBinding, Subject
from services.approval.policy import Binding, Fence, Snapshot
from services.approval.store.cursors import decode_text, decode_texts, encode
from services.kit.database import Row, Statement, Transaction

_SNAPSHOT = Statement("""
    SELECT p.version AS project_version, p.status AS project_status, i.status AS identity,
      b.version AS binding_version, b.role AS role, r.rules AS rules
    FROM projects AS p
    LEFT JOIN identity_subjects AS i ON i.type = $2 AND i.id = $3
    LEFT JOIN project_role_bindings AS b ON b.project_id = p.id AND b.subject_type = $2 AND b.subject_id = $3
      AND b.version = (SELECT MAX(m.version) FROM project_role_bindings AS m
        WHERE m.project_id = $1 AND m.subject_type = $2 AND m.subject_id = $3)
    LEFT JOIN project_rules AS r ON r.project_id = p.id
      AND r.version = (SELECT MAX(q.version) FROM project_rules AS q WHERE q.project_id = $1)
    WHERE p.id = $1
""")
# Locks first, reads after: on PostgreSQL a statement that waited for a lock would still see bindings as they were when
# it began. The locks are shared, so that decisions do not wait for each other, only for changes of authority.
_SHARE_PROJECT = Statement(
    "SELECT version FROM projects WHERE id = $1", postgresql="SELECT version FROM projects WHERE id = $1 FOR SHARE"
)
_SHARE_IDENTITY = Statement(
    "SELECT status FROM identity_subjects WHERE type = $1 AND id = $2",
    postgresql="SELECT status FROM identity_subjects WHERE type = $1 AND id = $2 FOR SHARE",
)
_BINDING_VERSION = Statement("""
    SELECT MAX(version) AS version FROM project_role_bindings
    WHERE project_id = $1 AND subject_type = $2 AND subject_id = $3
""")

_PROJECT = "p.id, p.name, p.status, p.version, p.created_at_ms, p.updated_at_ms"
_GET = Statement(f"SELECT {_PROJECT} FROM projects AS p WHERE p.id = $1")  # noqa: S608
_LOCK = Statement(f"SELECT {_PROJECT} FROM projects AS p WHERE p.id = $1 {{for_update}}")  # noqa: S608
_INSERT = Statement("""
    INSERT INTO projects (id, name, status, version, created_at_ms, updated_at_ms)
    VALUES ($1, $2, 'active', 1, $3, $3)
""")
_SET = Statement("""
    UPDATE projects SET status = $3, version = version + 1, updated_at_ms = $4 WHERE id = $1 AND version = $2
""")
_BUMP = Statement("UPDATE projects SET version = version + 1, updated_at_ms = $2 WHERE id = $1 RETURNING version")
_LIST_ALL = Statement(f"SELECT {_PROJECT} FROM projects AS p WHERE p.id > $1 ORDER BY p.id LIMIT $2")  # noqa: S608
_LIST_BOUND = Statement(
    f"""
    SELECT {_PROJECT} FROM projects AS p
    JOIN project_role_bindings AS b ON b.project_id = p.id AND b.subject_type = $3 AND b.subject_id = $4
    WHERE p.id > $1 AND b.state = 'active' AND b.version = (SELECT MAX(m.version) FROM project_role_bindings AS m
      WHERE m.project_id = p.id AND m.subject_type = $3 AND m.subject_id = $4)
    ORDER BY p.id LIMIT $2
    """  # noqa: S608
)

_BINDING = (
    "b.project_id, b.subject_type, b.subject_id, b.version, b.state, b.role, b.mutation_id, b.changed_by_type, "
    "b.changed_by_id, b.created_at_ms"
)
_BINDING_OF = Statement(
    f"""
    SELECT {_BINDING} FROM project_role_bindings AS b
    WHERE b.project_id = $1 AND b.subject_type = $2 AND b.subject_id = $3 ORDER BY b.version DESC LIMIT 1
    """  # noqa: S608
)
_BINDING_BY_MUTATION = Statement(
    f"SELECT {_BINDING} FROM project_role_bindings AS b WHERE b.project_id = $1 AND b.mutation_id = $2"  # noqa: S608
)
_APPEND = Statement("""
    INSERT INTO project_role_bindings (project_id, subject_type, subject_id, version, state, role, mutation_id,
      changed_by_type, changed_by_id, created_at_ms)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)
""")
_BINDINGS = Statement(
    f"""
    SELECT {_BINDING} FROM project_role_bindings AS b
    WHERE b.project_id = $1 AND (b.subject_type, b.subject_id) > ($2, $3)
      AND b.version = (SELECT MAX(m.version) FROM project_role_bindings AS m
        WHERE m.project_id = b.project_id AND m.subject_type = b.subject_type AND m.subject_id = b.subject_id)
    ORDER BY b.subject_type, b.subject_id LIMIT $4
    """  # noqa: S608
)
_EVER_BOUND = Statement("SELECT 1 AS one FROM project_role_bindings WHERE project_id = $1 LIMIT 1")
_DECIDERS = Statement("""
    SELECT b.subject_id, b.role FROM project_role_bindings AS b
    JOIN identity_subjects AS i ON i.type = b.subject_type AND i.id = b.subject_id
    WHERE b.project_id = $1 AND b.subject_type = 'user' AND b.state = 'active' AND b.role IN ('owner', 'admin')
      AND i.status = 'active'
      AND b.version = (SELECT MAX(m.version) FROM project_role_bindings AS m
        WHERE m.project_id = b.project_id AND m.subject_type = b.subject_type AND m.subject_id = b.subject_id)
    ORDER BY b.subject_id LIMIT 201
""")
_OTHER_OWNERS = Statement("""
    SELECT COUNT(*) AS owners FROM project_role_bindings AS b
    JOIN identity_subjects AS i ON i.type = b.subject_type AND i.id = b.subject_id
    WHERE b.project_id = $1 AND b.state = 'active' AND b.role = 'owner' AND i.status = 'active'
      AND NOT (b.subject_type = $2 AND b.subject_id = $3)
      AND b.version = (SELECT MAX(m.version) FROM project_role_bindings AS m
        WHERE m.project_id = b.project_id AND m.subject_type = b.subject_type AND m.subject_id = b.subject_id)
      AND EXISTS (SELECT 1 FROM identity_authentication_bindings AS n
        WHERE n.subject_type = b.subject_type AND n.subject_id = b.subject_id AND n.state = 'active'
          AND n.version = (SELECT MAX(l.version) FROM identity_authentication_bindings AS l
            WHERE l.provider = n.provider AND l.provider_subject = n.provider_subject))
""")
_ROLES_OF = Statement("""
    SELECT b.project_id, b.role FROM project_role_bindings AS b
    WHERE b.subject_type = $1 AND b.subject_id = $2 AND b.state = 'active'
      AND b.version = (SELECT MAX(m.version) FROM project_role_bindings AS m
        WHERE m.project_id = b.project_id AND m.subject_type = b.subject_type AND m.subject_id = b.subject_id)
    ORDER BY b.project_id
""")

_RULES = Statement("""
    SELECT version, rules, mutation_id FROM project_rules WHERE project_id = $1 ORDER BY version DESC LIMIT 1
""")
_RULES_BY_MUTATION = Statement("""
    SELECT version, rules, mutation_id FROM project_rules WHERE project_id = $1 AND mutation_id = $2
""")
_SET_RULES = Statement("""
    INSERT INTO project_rules (project_id, version, rules, mutation_id, changed_by_type, changed_by_id, created_at_ms)
    VALUES ($1, $2, $3, $4, $5, $6, $7)
""")


async def snapshot(tx: Transaction, project: str, subject: Subject) -> Snapshot | None:
    """What policy knows about a subject in a project; None where there is no such project."""
    row = await tx.fetch_one(_SNAPSHOT, project, subject.type, subject.id)
    if row is None:
        return None
    binding = None if row["binding_version"] is None else Binding(row["binding_version"], row["role"])
    return Snapshot(
        project_version=row["project_version"],
        project_status=row["project_status"],
        binding=binding,
        identity=row["identity"],
        rules=parse_rules(row["rules"]) if row["rules"] else (),
    )


async def assert_fence(tx: Transaction, project: str, subject: Subject, fence: Fence) -> None:
    """Raises `policy_fence_conflict` when the authority that was checked is not what is there now.

    Holds project and identity (shared) until the transaction ends: what would revoke it waits, or has come before.
    """
    row = await tx.fetch_one(_SHARE_PROJECT, project)
    identity = await tx.fetch_one(_SHARE_IDENTITY, subject.type, subject.id)
    binding = await tx.fetch_one(_BINDING_VERSION, project, subject.type, subject.id)
    version = binding["version"] if binding else None
    if row is None or Fence(row["version"], version) != fence or (identity and identity["status"] != "active"):
        raise Ql3Error("policy_fence_conflict")


async def share_identity(tx: Transaction, subject: Subject) -> None:
    """Wait for whoever shuts a subject out or lets it in, and keep others from it until the transaction ends."""
    await tx.fetch_one(_SHARE_IDENTITY, subject.type, subject.id)


async def get(tx: Transaction, project: str) -> Project | None:
    """A project."""
    row = await tx.fetch_one(_GET, project)
    return _project(row) if row else None


async def lock(tx: Transaction, project: str) -> Project | None:
    """A project, locked: every change of its authority begins with this, so that such changes come one by one."""
    row = await tx.fetch_one(_LOCK, project)
    return _project(row) if row else None


async def insert(tx: Transaction, project: str, name: str, now_ms: int) -> None:
    """A new active project."""
    await tx.execute(_INSERT, project, name, now_ms)


async def set_status(
    tx: Transaction, project: str, version: int, status: Literal["active", "archived"], now_ms: int
) -> bool:
    """Archive or reactivate; False when the project is no longer at `version`."""
    return await tx.execute(_SET, project, version, status, now_ms) == 1


async def bump(tx: Transaction, project: str, now_ms: int) -> int:
    """Make every fence of the project stale; answers the new version."""
    row = await tx.fetch_one(_BUMP, project, now_ms)
    if row is None:
        raise Ql3Error("not_found")
    return row["version"]


async def page(
    tx: Transaction, subject: Subject | None, limit: int, cursor: str | None
) -> tuple[list[Project], str | None]:
    """Projects by id: those in which `subject` has a role, or all for None."""
    after = decode_text(cursor)
    if subject is None:
        rows = await tx.fetch(_LIST_ALL, after, limit + 1)
    else:
        rows = await tx.fetch(_LIST_BOUND, after, limit + 1, subject.type, subject.id)
    items = [_project(row) for row in rows[:limit]]
    return items, encode(items[-1].id) if len(rows) > limit else None


async def binding(tx: Transaction, project: str, subject: Subject) -> RoleBinding | None:
    """The current binding of a subject, a revoked one too."""
    row = await tx.fetch_one(_BINDING_OF, project, subject.type, subject.id)
    return _binding(row) if row else None


async def binding_by_mutation(tx: Transaction, project: str, mutation_id: str) -> RoleBinding | None:
    """The binding that a mutation made."""
    row = await tx.fetch_one(_BINDING_BY_MUTATION, project, mutation_id)
    return _binding(row) if row else None


async def append_binding(tx: Transaction, made: RoleBinding) -> None:
    """Append a version."""
    await tx.execute(
        _APPEND,
        made.project,
        made.subject.type,
        made.subject.id,
        made.version,
        made.state,
        made.role,
        made.mutation_id,
        made.changed_by.type,
        made.changed_by.id,
        made.created_at_ms,
    )


async def bindings(
    tx: Transaction, project: str, limit: int, cursor: str | None
) -> tuple[list[RoleBinding], str | None]:
    """Current bindings of a project, by subject."""
    kind, subject_id = decode_texts(cursor)
    rows = await tx.fetch(_BINDINGS, project, kind, subject_id, limit + 1)
    items = [_binding(row) for row in rows[:limit]]
    return items, encode(items[-1].subject.type, items[-1].subject.id) if len(rows) > limit else None


async def ever_bound(tx: Transaction, project: str) -> bool:
    """Whether the project has ever had a role binding."""
    return await tx.fetch_one(_EVER_BOUND, project) is not None


async def deciders(tx: Transaction, project: str) -> list[tuple[Subject, Role]]:
    """People who may decide in a project, at most 201."""
    rows = await tx.fetch(_DECIDERS, project)
    return [(Subject(type="user", id=row["subject_id"]), row["role"]) for row in rows]


async def other_active_owners(tx: Transaction, project: str, subject: Subject) -> int:
    """How many owners a project has besides a subject: active ones with a name under which they can sign in."""
    row = await tx.fetch_one(_OTHER_OWNERS, project, subject.type, subject.id)
    return row["owners"] if row else 0


async def roles_of(tx: Transaction, subject: Subject) -> dict[str, Role]:
    """The projects in which a subject has a role, in order, and which."""
    return {row["project_id"]: row["role"] for row in await tx.fetch(_ROLES_OF, subject.type, subject.id)}


async def rules(tx: Transaction, project: str) -> tuple[int, tuple[ApprovalRule, ...]]:
    """The project's own rules and their version; 0 and none where none were ever set."""
    row = await tx.fetch_one(_RULES, project)
    return (row["version"], parse_rules(row["rules"])) if row else (0, ())


async def rules_by_mutation(
    tx: Transaction, project: str, mutation_id: str
) -> tuple[int, tuple[ApprovalRule, ...]] | None:
    """The rules that a mutation set."""
    row = await tx.fetch_one(_RULES_BY_MUTATION, project, mutation_id)
    return (row["version"], parse_rules(row["rules"])) if row else None


async def set_rules(
    tx: Transaction, project: str, version: int, wanted: list[ApprovalRule], mutation_id: str, by: Subject, now_ms: int
) -> None:
    """Append a version of the project's rules."""
    text = msgspec.json.encode(wanted).decode()
    await tx.execute(_SET_RULES, project, version, text, mutation_id, by.type, by.id, now_ms)


@lru_cache(maxsize=256)
def parse_rules(text: str) -> tuple[ApprovalRule, ...]:
    """Rules as stored. Raises `unavailable` on what cannot be read: nobody is let in by a broken rule."""
    try:
        return msgspec.json.decode(text, type=tuple[ApprovalRule, ...])
    except msgspec.DecodeError as error:
        raise Ql3Error("unavailable", "The project's rules cannot be read.") from error


def _project(row: Row) -> Project:
    return Project(
        id=row["id"],
        name=row["name"],
        status=row["status"],
        version=row["version"],
        created_at_ms=row["created_at_ms"],
        updated_at_ms=row["updated_at_ms"],
    )


def _binding(row: Row) -> RoleBinding:
    return RoleBinding(
        project=row["project_id"],
        subject=Subject(type=row["subject_type"], id=row["subject_id"]),
        version=row["version"],
        state=row["state"],
        role=row["role"],
        mutation_id=row["mutation_id"],
        changed_by=Subject(type=row["changed_by_type"], id=row["changed_by_id"]),
        created_at_ms=row["created_at_ms"],
    )
