"""Role bindings: who may give which role to whom. Pure."""

from __future__ import annotations

from typing import NamedTuple

from schemas.errors import Ql3Error
from schemas.identity import Role, Subject
from services.approval.policy import RANK, is_local_console

MAX_VERSION = 2_147_483_647


class Change(NamedTuple):
    """A wanted change of a subject's role. `role` None revokes; `current_role` None is unbound or revoked."""

    target: Subject
    role: Role | None
    current_role: Role | None
    current_version: int
    expected_version: int
    other_active_owners: int
    """Owners of the project who can sign in (identity and a name are active), the target not counted."""


def admit(change: Change, changer_role: Role) -> int:
    """The version of the new binding. Raises `version_conflict`, `forbidden`, `last_owner` or `invalid`.

    A changer never gives, takes or lowers a role above their own, and a project that has an owner keeps one.
    """
    if change.current_version != change.expected_version:
        raise Ql3Error("version_conflict", field="expected_version", data={"version": change.current_version})
    if change.current_version >= MAX_VERSION:
        raise Ql3Error("conflict", "This binding has had as many versions as it can have.")
    if is_local_console(change.target):
        raise Ql3Error("invalid", "The local console has its rights from a built-in rule.", field="subject")
    if change.target.type in ("system", "worker"):
        raise Ql3Error("invalid", "Services and workers have no role.", field="subject.type")
    if change.role == "owner" and change.target.type != "user":
        raise Ql3Error("invalid", "Only a user can be an owner.", field="role")
    if change.role is None and change.current_role is None:
        raise Ql3Error("invalid", "There is no role to revoke.", field="role")
    for role in (change.role, change.current_role):
        if role is not None and RANK[role] > RANK[changer_role]:
            raise Ql3Error("forbidden", "A role above your own is not yours to change.", field="role")
    if change.current_role == "owner" and change.role != "owner" and change.other_active_owners == 0:
        raise Ql3Error("last_owner")
    return change.current_version + 1
