"""Rules of tasks: what a specification must keep to, and the compiled form that a run pins. No I/O."""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

import msgspec

from schemas import limits
from schemas.canonical import canonical, digest_bytes
from schemas.errors import Ql3Error
from schemas.tasks import Execution, ExecutionRevision, TaskSpec, Variable
from services.scheduler.parameters import check_schema

SPEC_BYTES: Final = limits.ENVIRONMENT_BYTES + limits.ARGV_BYTES + limits.SPEC_BYTES
"""Canonical JSON of a whole specification."""
RESERVED_PREFIX: Final = "QL3_"
RECIPE_DOMAIN: Final = "ql3.execution-context.v1"

_LOOKS_SECRET = re.compile(
    r"secret|token|passw(or)?d|passphrase|(^|_)pwd(_|$)|api_?key|access_?key|private_?key|credential|cookie|(^|_)auth(_|$)",
    re.IGNORECASE,
)


_sorted = msgspec.json.Encoder(order="sorted")


class Compiled(NamedTuple):
    """One revision ready to be stored: canonical texts with their digests."""

    spec: str
    spec_digest: str
    execution: ExecutionRevision
    execution_text: str
    execution_digest: str
    context_ref: str
    recipe_text: str
    recipe_digest: str


def check(spec: TaskSpec) -> list[str]:
    """The warnings about a specification. Raises `invalid` or `too_large`, naming the field."""
    execution = spec.execution
    _check_command(execution)
    _check_environment(execution.environment)
    if execution.working_directory is not None and not execution.working_directory.startswith("/"):
        raise Ql3Error("invalid", "Write an absolute path.", field="spec.execution.working_directory")
    overlap = spec.terms.overlap
    if overlap.limit is not None and overlap.policy not in ("allow", "queue"):
        raise Ql3Error("invalid", f"`{overlap.policy}` takes no limit.", field="spec.terms.overlap.limit")
    retry = spec.terms.retry
    if retry.backoff_base_ms > retry.backoff_max_ms:
        raise Ql3Error("invalid", "The base is longer than the maximum.", field="spec.terms.retry.backoff_base_ms")
    check_schema(spec.parameters)
    keys = [limit.key for limit in spec.terms.concurrency]
    if len(set(keys)) != len(keys):
        raise Ql3Error("invalid", "A key stands there twice.", field="spec.terms.concurrency")
    return [
        f"environment.{variable.name}: a public value is readable by everyone who may read the task; "
        "its name looks like a secret's. Store it with `ql3 secret set` and refer to it."
        for variable in execution.environment
        if variable.value and _LOOKS_SECRET.search(variable.name)
    ]


def _check_command(execution: Execution) -> None:
    field = "spec.execution.command"
    if not execution.command[0]:
        raise Ql3Error("invalid", "The program's name is empty.", field=f"{field}[0]")
    total = 0
    for index, argument in enumerate(execution.command):
        size = len(argument.encode())
        total += size + 1
        if "\0" in argument:
            raise Ql3Error("invalid", "An argument cannot hold a NUL.", field=f"{field}[{index}]")
        if size > limits.KERNEL_STRING_BYTES:
            raise Ql3Error("too_large", f"One argument has at most {limits.KERNEL_STRING_BYTES} bytes.", field=field)
    # A whole script may be one argument, so the sum is bounded by what the kernel takes in one string.
    most = max(limits.ARGV_BYTES, limits.KERNEL_STRING_BYTES + 1)
    if total > most:
        raise Ql3Error("too_large", f"The command has {total} bytes; at most {most} are taken.", field=field)


def _check_environment(environment: list[Variable]) -> None:
    seen: set[str] = set()
    total = secrets = 0
    for variable in environment:
        field = f"spec.execution.environment.{variable.name}"
        if variable.name in seen:
            raise Ql3Error("invalid", "The variable stands there twice.", field=field)
        seen.add(variable.name)
        if variable.name.startswith(RESERVED_PREFIX):
            raise Ql3Error("invalid", f"Names that begin with {RESERVED_PREFIX} are ours.", field=field)
        if (variable.value is None) == (variable.secret is None):
            raise Ql3Error("invalid", "Give either a value or a secret.", field=field)
        if variable.secret is not None:
            secrets += 1
            continue
        value = variable.value or ""
        if "\0" in value:
            raise Ql3Error("invalid", "A value cannot hold a NUL.", field=field)
        size = len(variable.name) + 1 + len(value.encode())
        total += size + 1
        if size > limits.KERNEL_STRING_BYTES and not variable.as_file:
            raise Ql3Error(
                "too_large",
                f"The kernel takes at most {limits.KERNEL_STRING_BYTES} bytes of name and value together, this has "
                f"{size}; deliver it as a file (`as_file`).",
                field=field,
            )
    if total > limits.ENVIRONMENT_BYTES:
        detail = f"All values together have {total} bytes; at most {limits.ENVIRONMENT_BYTES} are taken."
        raise Ql3Error("too_large", detail, field="spec.execution.environment")
    if secrets > limits.SECRETS_PER_RUN:
        raise Ql3Error("too_large", f"At most {limits.SECRETS_PER_RUN} secrets.", field="spec.execution.environment")


def canonical_text(value: Any, field: str) -> str:
    """The canonical JSON of what a run executes. Raises `invalid` for what has none."""
    try:
        return canonical(value).decode()
    except ValueError as error:
        raise Ql3Error("invalid", f"It cannot be stored: {error}.", field=field) from error


def sorted_text(value: Any, field: str) -> str:
    """JSON with sorted keys, byte for byte the same when read and written again; fractions are allowed."""
    try:
        return _sorted.encode(value).decode()
    except UnicodeEncodeError as error:
        raise Ql3Error("invalid", "It holds a lone surrogate.", field=field) from error


def compile_revision(project: str, task_id: str, name: str, revision: int, spec: TaskSpec) -> Compiled:
    """One revision as it is stored. The same input always gives the same texts. Raises as `check` does."""
    text = sorted_text(spec, "spec")
    if (size := len(text.encode())) > SPEC_BYTES:
        raise Ql3Error("too_large", f"The task has {size} bytes; at most {SPEC_BYTES} are taken.", field="spec")
    execution = ExecutionRevision(
        project=project,
        task_id=task_id,
        task_name=name,
        task_revision=revision,
        execution=spec.execution,
        terms=spec.terms,
    )
    recipe = canonical_text({"environment": spec.execution.environment}, "spec.execution.environment")
    recipe_digest = digest_bytes(RECIPE_DOMAIN, recipe.encode())
    return Compiled(
        spec=text,
        spec_digest=content_digest(project, task_id, revision, text),
        execution=execution,
        execution_text=canonical_text(execution, "spec"),
        execution_digest=execution.digest,
        context_ref=f"ctx:sha256:{recipe_digest}",
        recipe_text=recipe,
        recipe_digest=recipe_digest,
    )


def content_digest(project: str, task_id: str, revision: int, spec_text: str) -> str:
    """The digest by which people and programs name exactly this content of a task."""
    whole = {"project": project, "task_id": task_id, "revision": revision, "spec": msgspec.Raw(spec_text.encode())}
    return digest_bytes("ql3.task-revision.v1", msgspec.json.encode(whole, order="sorted"))


def read_spec(text: str, project: str, task_id: str, revision: int, expected: str) -> TaskSpec:
    """A stored specification, checked. Raises `revision_unavailable` when the row is not what was written."""
    if content_digest(project, task_id, revision, text) != expected:
        raise _corrupt(task_id, revision)
    try:
        return msgspec.json.decode(text, type=TaskSpec)
    except msgspec.DecodeError as error:
        raise _corrupt(task_id, revision) from error


def read_execution(
    text: str, recipe: str, context_ref: str, task_id: str, revision: int, expected: str
) -> ExecutionRevision:
    """A stored execution revision with its recipe, checked to the byte. Raises `revision_unavailable`."""
    try:
        found = msgspec.json.decode(text, type=ExecutionRevision)
        same = canonical(found).decode() == text and found.digest == expected
        whole = canonical({"environment": found.execution.environment}).decode() == recipe
    except (msgspec.DecodeError, ValueError) as error:
        raise _corrupt(task_id, revision) from error
    named = context_ref == f"ctx:sha256:{digest_bytes(RECIPE_DOMAIN, recipe.encode())}"
    if not (same and whole and named and (found.task_id, found.task_revision) == (task_id, revision)):
        raise _corrupt(task_id, revision)
    return found


def _corrupt(task_id: str, revision: int) -> Ql3Error:
    return Ql3Error("revision_unavailable", data={"task_id": task_id, "revision": revision})


def request_digest(kind: str, content: Any) -> str:
    """What a mutation id stands for: the same id with other content is a conflict."""
    return digest_bytes(f"ql3.{kind}.v1", sorted_text(content, "spec").encode())
