"""Tasks, their revisions, what they execute, and recipes."""

from __future__ import annotations

from services.kit.database import Row, Statement, Transaction, json_rows, json_set
from services.scheduler.tasks import Compiled

_HEAD = "t.id, t.project, t.name, t.revision, t.version, t.enabled, t.deleted, t.created_at_ms, t.updated_at_ms"
_WITH_SPEC = f"{_HEAD}, r.spec, r.content_digest"

_INSERT = Statement("""
    INSERT INTO task_definitions (id, project, name, revision, version, enabled, folder, created_at_ms, updated_at_ms)
    VALUES ($1, $2, $3, 1, 1, $4, $5, $6, $6)
""")
_INSERT_REVISION = Statement("""
    INSERT INTO task_revisions
      (task_id, revision, spec, content_digest, mutation_id, request_digest, created_by_type, created_by_id,
       created_at_ms)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)
""")
_INSERT_EXECUTION = Statement("""
    INSERT INTO task_execution_revisions
      (project, task_id, task_revision, executor_type, execution_template, context_ref, content_digest, created_at_ms)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
""")
_INSERT_RECIPE = Statement("""
    INSERT INTO execution_context_recipes (context_ref, environment_recipe, content_digest, created_at_ms)
    VALUES ($1, $2, $3, $4) ON CONFLICT (context_ref) DO NOTHING
""")
_ADVANCE = Statement("""
    UPDATE task_definitions SET revision = revision + 1, version = version + 1, folder = $3, updated_at_ms = $4
    WHERE id = $1 AND revision = $2 AND deleted = 0
""")
_SET_ENABLED = Statement("""
    UPDATE task_definitions SET enabled = $2, version = version + 1, updated_at_ms = $3
    WHERE id = $1 AND deleted = 0 AND enabled <> $2
""")
_DELETE = Statement("""
    UPDATE task_definitions SET deleted = 1, enabled = 0, version = version + 1, updated_at_ms = $2
    WHERE id = $1 AND deleted = 0
""")
_DROP_LABELS = Statement("DELETE FROM task_labels WHERE task_id = $1")
_INSERT_LABELS = Statement("""
    INSERT INTO task_labels (task_id, name, value)
    SELECT $1, r.name, r.value FROM {rows:$2 name text, value text} AS r
""")
_FIND = Statement(f"""
    SELECT {_WITH_SPEC} FROM task_definitions t
    JOIN task_revisions r ON r.task_id = t.id AND r.revision = t.revision
    WHERE t.project = $1 AND ((t.name = $2 AND t.deleted = 0) OR t.id = $2)
    ORDER BY t.deleted, t.id LIMIT 1
""")  # noqa: S608
_FIND_MANY = Statement(f"""
    SELECT {_WITH_SPEC} FROM task_definitions t
    JOIN task_revisions r ON r.task_id = t.id AND r.revision = t.revision
    WHERE t.project = $1 AND t.deleted = 0 AND (t.name {{in:$2}} OR t.id {{in:$2}})
""")  # noqa: S608
_LABELS = Statement("""
    SELECT t.id, t.name AS task, t.revision, l.name, l.value
    FROM task_definitions t LEFT JOIN task_labels l ON l.task_id = t.id
    WHERE t.project = $1 AND t.deleted = 0 AND (t.name {in:$2} OR t.id {in:$2})
""")
_AT_REVISION = Statement("SELECT spec, content_digest FROM task_revisions WHERE task_id = $1 AND revision = $2")
_REVISIONS = Statement("""
    SELECT revision, content_digest, created_by_type, created_by_id, created_at_ms FROM task_revisions
    WHERE task_id = $1 AND revision < $2 ORDER BY revision DESC LIMIT $3
""")
_LOCK = Statement("SELECT id, revision, version, enabled, deleted FROM task_definitions WHERE id = $1 {for_update}")
_BY_MUTATION = Statement("""
    SELECT r.task_id, r.revision, r.request_digest, t.project FROM task_revisions r
    JOIN task_definitions t ON t.id = r.task_id WHERE r.mutation_id = $1
""")
_EXECUTION = Statement("""
    SELECT e.execution_template, e.context_ref, e.content_digest, c.environment_recipe FROM task_execution_revisions e
    JOIN execution_context_recipes c ON c.context_ref = e.context_ref
    WHERE e.task_id = $1 AND e.task_revision = $2
""")
_EXECUTION_DIGESTS = Statement("""
    SELECT t.id, t.name, t.enabled, t.deleted, t.revision, e.content_digest FROM task_definitions t
    JOIN task_execution_revisions e ON e.task_id = t.id AND e.task_revision = t.revision
    WHERE t.id {in:$1}
""")
_LIST = Statement(f"""
    SELECT {_WITH_SPEC} FROM task_definitions t
    JOIN task_revisions r ON r.task_id = t.id AND r.revision = t.revision
    WHERE t.project = $1 AND t.deleted = 0 AND t.name > $2 ORDER BY t.name LIMIT $3
""")  # noqa: S608
_LIST_FOLDER = Statement(f"""
    SELECT {_WITH_SPEC} FROM task_definitions t
    JOIN task_revisions r ON r.task_id = t.id AND r.revision = t.revision
    WHERE t.project = $1 AND t.deleted = 0 AND t.folder = $4 AND t.name > $2 ORDER BY t.name LIMIT $3
""")  # noqa: S608
_LIST_LABEL = Statement(f"""
    SELECT {_WITH_SPEC} FROM task_definitions t
    JOIN task_revisions r ON r.task_id = t.id AND r.revision = t.revision
    JOIN task_labels l ON l.task_id = t.id
    WHERE t.project = $1 AND t.deleted = 0 AND t.name > $2 AND l.name = $4 AND l.value = $5
    ORDER BY t.name LIMIT $3
""")  # noqa: S608


async def insert(
    tx: Transaction, task_id: str, project: str, name: str, *, enabled: bool, folder: str | None, now_ms: int
) -> None:
    """A new task at revision 1. Raises `UniqueViolation` when the name is taken."""
    await tx.execute(_INSERT, task_id, project, name, int(enabled), folder, now_ms)


async def insert_revision(
    tx: Transaction,
    compiled: Compiled,
    *,
    mutation_id: str | None,
    request_digest: str,
    created_by: tuple[str, str],
    now_ms: int,
) -> None:
    """One revision with what it executes and its recipe, together."""
    execution = compiled.execution
    task_id, revision = execution.task_id, execution.task_revision
    await tx.execute(
        _INSERT_REVISION,
        task_id,
        revision,
        compiled.spec,
        compiled.spec_digest,
        mutation_id,
        request_digest,
        *created_by,
        now_ms,
    )
    await tx.execute(_INSERT_RECIPE, compiled.context_ref, compiled.recipe_text, compiled.recipe_digest, now_ms)
    await tx.execute(
        _INSERT_EXECUTION,
        execution.project,
        task_id,
        revision,
        execution.terms.placement.executor,
        compiled.execution_text,
        compiled.context_ref,
        compiled.execution_digest,
        now_ms,
    )
    await tx.execute(_DROP_LABELS, task_id)
    labels = execution.terms.labels
    if labels:
        rows = json_rows({"name": name, "value": value} for name, value in labels.items())
        await tx.execute(_INSERT_LABELS, task_id, rows)


async def advance(tx: Transaction, task_id: str, expected: int, folder: str | None, now_ms: int) -> bool:
    """Moves the head from `expected` to the next revision; False when somebody was quicker."""
    return await tx.execute(_ADVANCE, task_id, expected, folder, now_ms) == 1


async def set_enabled(tx: Transaction, task_id: str, enabled: bool, now_ms: int) -> bool:
    """False when it already was so."""
    return await tx.execute(_SET_ENABLED, task_id, int(enabled), now_ms) == 1


async def delete(tx: Transaction, task_id: str, now_ms: int) -> bool:
    """False when it already was gone."""
    return await tx.execute(_DELETE, task_id, now_ms) == 1


async def find(tx: Transaction, project: str, task: str) -> Row | None:
    """A task by name or id with its current specification; a deleted one only by its id."""
    return await tx.fetch_one(_FIND, project, task)


async def find_many(tx: Transaction, project: str, tasks: list[str]) -> list[Row]:
    """Tasks by names or ids."""
    return await tx.fetch(_FIND_MANY, project, json_set(tasks))


async def labels_of(tx: Transaction, project: str, tasks: list[str]) -> dict[str, tuple[int, dict[str, str]]]:
    """Revisions of tasks with their labels, under their names and under their ids; those that are gone are left out."""
    found: dict[str, tuple[int, dict[str, str]]] = {}
    for row in await tx.fetch(_LABELS, project, json_set(tasks)):
        for key in (row["id"], row["task"]):
            _, labels = found.setdefault(key, (row["revision"], {}))
            if row["name"] is not None:
                labels[row["name"]] = row["value"]
    return found


async def at_revision(tx: Transaction, task_id: str, revision: int) -> Row | None:
    """The specification of one revision."""
    return await tx.fetch_one(_AT_REVISION, task_id, revision)


async def revisions(tx: Transaction, task_id: str, before: int, limit: int) -> list[Row]:
    """Revisions below `before`, newest first."""
    return await tx.fetch(_REVISIONS, task_id, before, limit)


async def lock(tx: Transaction, task_id: str) -> Row | None:
    """The head, held until the transaction ends."""
    return await tx.fetch_one(_LOCK, task_id)


async def by_mutation(tx: Transaction, mutation_id: str) -> Row | None:
    """What a mutation id made."""
    return await tx.fetch_one(_BY_MUTATION, mutation_id)


async def execution(tx: Transaction, task_id: str, revision: int) -> Row | None:
    """What a revision executes, with its recipe."""
    return await tx.fetch_one(_EXECUTION, task_id, revision)


async def current_executions(tx: Transaction, task_ids: list[str]) -> dict[str, Row]:
    """Of each task its head and the digest of what its current revision executes."""
    rows = await tx.fetch(_EXECUTION_DIGESTS, json_set(task_ids))
    return {row["id"]: row for row in rows}


async def page(
    tx: Transaction, project: str, after: str, limit: int, *, folder: str | None, label: tuple[str, str] | None
) -> list[Row]:
    """Tasks by name after `after`."""
    if label is not None:
        return await tx.fetch(_LIST_LABEL, project, after, limit, *label)
    if folder is not None:
        return await tx.fetch(_LIST_FOLDER, project, after, limit, folder)
    return await tx.fetch(_LIST, project, after, limit)
