"""Projects and who may do what in them. Owner: approval."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from schemas import endpoints
from schemas.base import Value
from schemas.identity import (
    Project,
    ProjectArchive,
    ProjectCreate,
    ProjectList,
    ProjectRead,
    Role,
    RoleBind,
    RoleBinding,
    RoleList,
)
from schemas.ids import ProjectId
from services.gateway.calls import Call, listing
from services.gateway.operations import Listing, Nothing, Operations, Paged

operations = Operations("projects")


class NewProject(Value, frozen=True, kw_only=True):
    """A project; its id is its name in addresses and commands, and never changes."""

    id: ProjectId
    name: Annotated[str, Meta(min_length=1, max_length=255)] | None = None


class Expected(Value, frozen=True, kw_only=True):
    """The version that the change starts from; a later one is a `version_conflict`."""

    expected_version: int


class RoleChange(Value, frozen=True, kw_only=True):
    """The role to give, or null to take it away. `expected_version` is 0 for a subject never bound."""

    role: Role | None
    expected_version: int


@operations.get("/projects", Paged, Listing[Project])
async def list_projects(call: Call[Paged]) -> Listing[Project]:
    """The projects that you may read."""
    return listing(await call.ask(endpoints.PROJECTS_LIST, ProjectList(actor=call.actor, page=call.input.page)))


@operations.post("/projects", NewProject, Project, status=201)
async def create_project(call: Call[NewProject]) -> Project:
    """Make a project and become its owner."""
    new = call.input
    question = ProjectCreate(actor=call.actor, id=new.id, name=new.name or new.id)
    return (await call.ask(endpoints.PROJECTS_CREATE, question)).project


@operations.get("/projects/{project}", Nothing, Project)
async def get_project(call: Call[Nothing]) -> Project:
    """One project."""
    return (await call.ask(endpoints.PROJECTS_GET, ProjectRead(actor=call.actor, project=call.project))).project


@operations.post("/projects/{project}/archive", Expected, Project)
async def archive_project(call: Call[Expected]) -> Project:
    """Archive: nothing starts there any more, everything stays readable."""
    return await _set_archived(call, archived=True)


@operations.post("/projects/{project}/activate", Expected, Project)
async def activate_project(call: Call[Expected]) -> Project:
    """Make an archived project active again."""
    return await _set_archived(call, archived=False)


async def _set_archived(call: Call[Expected], *, archived: bool) -> Project:
    question = ProjectArchive(
        actor=call.actor, project=call.project, expected_version=call.input.expected_version, archived=archived
    )
    return (await call.ask(endpoints.PROJECTS_ARCHIVE, question)).project


@operations.get("/projects/{project}/roles", Paged, Listing[RoleBinding])
async def list_roles(call: Call[Paged]) -> Listing[RoleBinding]:
    """Who has which role."""
    question = RoleList(actor=call.actor, project=call.project, page=call.input.page)
    return listing(await call.ask(endpoints.ROLES_LIST, question))


@operations.put("/projects/{project}/roles/{type}/{id}", RoleChange, RoleBinding)
async def bind_role(call: Call[RoleChange]) -> RoleBinding:
    """Give or take away a role."""
    question = RoleBind(
        actor=call.actor,
        project=call.project,
        subject=call.subject,
        role=call.input.role,
        expected_version=call.input.expected_version,
        mutation_id=call.mutation_id,
    )
    return (await call.ask(endpoints.ROLES_BIND, question)).binding
