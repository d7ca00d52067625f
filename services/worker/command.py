"""From an offer to what the process host is asked to start.

Building is pure but for what a task asks of the machine (a user to look up, an environment to find): that part is done
once a revision (`prepare`) or beside the loop (`Prepared.slow`).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

import msgspec

from schemas import limits
from schemas.tasks import Execution, ExecutionRevision, Isolation, Runtime
from schemas.workers import OfferItem
from services.worker import container
from services.worker.attempt import END_SEQUENCE, Held
from services.worker.isolation import attributes, person
from services.worker.refusal import Refused

CACHED: Final = 256
RESERVED_PREFIX: Final = "QL3_"
INPUTS: Final = "QL3_INPUTS"
INPUTS_FILE: Final = "QL3_INPUTS_FILE"


class Place(msgspec.Struct, frozen=True):
    """What this machine gives to every process: a base environment, working directories, perhaps an OCI command."""

    environment: dict[str, str]
    work: str
    engine: str | None = None


class Prepared(msgspec.Struct, frozen=True):
    """What is the same for every attempt of a revision."""

    fixed: dict[str, Any]
    environment: dict[str, str]
    secrets: tuple[str, ...] = ()
    """Names of variables whose values come from the vault."""
    secret_files: tuple[str, ...] = ()
    """Those of them that are delivered as the path of a file."""
    files: dict[str, str] = {}
    """Public values that are delivered as the path of a file."""
    owner: tuple[int, int] | None = None
    """User and group of those files, when the process runs as somebody else."""
    runtime: Runtime | None = None
    container: Execution | None = None

    def slow(self, offer: OfferItem) -> bool:
        """Whether something has to be fetched, written or looked at for this attempt."""
        if offer.inputs is not None and self.container is None:
            return True
        return bool(self.secrets or self.files or self.runtime is not None)


class Extras(msgspec.Struct):
    """What was got for one attempt of a slow revision."""

    secrets: dict[str, str] = {}
    paths: dict[str, str] = {}
    argv: list[str] | None = None
    environment: dict[str, str] = {}


class Builder:
    """Builds spawn items; keeps what revisions have in common, because thousands of runs share a few."""

    def __init__(self) -> None:
        self.place = Place({}, "")
        """Set before the first offer."""
        self._prepared: OrderedDict[str, Prepared] = OrderedDict()

    def prepare(self, digest: str, revision: ExecutionRevision) -> Prepared:
        """The common part of a revision. Raises Refused for what this worker cannot run."""
        found = self._prepared.get(digest)
        if found is None:
            found = self._prepared[digest] = prepare(revision, self.place)
            if len(self._prepared) > CACHED:
                self._prepared.popitem(last=False)
        return found

    def item(
        self,
        held: Held,
        prepared: Prepared,
        offer: OfferItem,
        *,
        not_after_ns: int,
        timeout_ms: int | None,
        extras: Extras | None = None,
    ) -> dict[str, Any]:
        """One spawn item. Raises Refused."""
        environment = prepared.environment | {
            "QL3_RUN_ID": offer.run_id,
            "QL3_ATTEMPT_ID": offer.attempt_id,
            "QL3_ATTEMPT": str(offer.attempt),
            "QL3_TRIGGER_TYPE": offer.trigger_type,
        }
        if offer.scheduled_for_ms is not None:
            environment["QL3_SCHEDULED_FOR_MS"] = str(offer.scheduled_for_ms)
        inputs = inputs_of(offer)
        if inputs is not None and (fits(INPUTS, inputs) or prepared.container is not None):
            environment[INPUTS] = inputs
        item: dict[str, Any] = prepared.fixed | {
            "attempt": held.attempt_id,
            "env": environment,
            "key": held.digest,
            "sequence": END_SEQUENCE,
            "not_after_ns": not_after_ns,
            "context": {"run": held.run_id, "offer": held.offer_id, "generation": held.lease_generation},
        }
        if timeout_ms is not None:
            item["timeout_ms"] = timeout_ms
        if extras is not None:
            _add(item, environment, prepared, extras)
        if prepared.container is not None:
            assert self.place.engine is not None
            inside = environment.keys() - self.place.environment.keys() | _own(prepared.container)
            item |= container.command(self.place.engine, held.attempt_id, prepared.container, item["cwd"], inside)
        check_size(environment)
        return item


def _add(item: dict[str, Any], environment: dict[str, str], prepared: Prepared, extras: Extras) -> None:
    environment |= {name: value for name, value in extras.secrets.items() if name not in prepared.secret_files}
    environment |= extras.paths
    if extras.secrets:
        item["mask"] = list(extras.secrets.values())
    if extras.argv is not None:
        item["argv"] = extras.argv
        first = extras.environment.get("PATH", "")
        environment |= extras.environment | {"PATH": f"{first}:{environment['PATH']}"}


def _own(execution: Execution) -> set[str]:
    """Variables of the task itself, which go into its container even when the worker has one of the same name."""
    return {variable.name for variable in execution.environment if not variable.name.startswith(RESERVED_PREFIX)}


def inputs_of(offer: OfferItem) -> str | None:
    """A run's inputs as the command gets them: JSON, or None when there are none."""
    return None if offer.inputs is None else msgspec.json.encode(offer.inputs).decode()


def fits(name: str, value: str) -> bool:
    """Whether the kernel takes a variable. Sizes in bytes of `NAME=value` and a NUL."""
    # A character is at most four bytes: only long values are counted exactly.
    short = len(value) * 4 + len(name) < limits.KERNEL_STRING_BYTES
    return short or len(name) + len(value.encode()) + 1 <= limits.KERNEL_STRING_BYTES


def check_size(environment: dict[str, str]) -> None:
    """Refuse, by name, what the kernel would refuse without one."""
    for name, value in environment.items():
        if not fits(name, value):
            raise Refused("environment_too_large", f"The variable {name} is larger than the kernel takes; use a file.")


def prepare(revision: ExecutionRevision, place: Place) -> Prepared:
    """What all attempts of a revision share. Raises Refused."""
    execution = revision.execution
    environment = place.environment | {
        "QL3_PROJECT": revision.project,
        "QL3_TASK": revision.task_name,
        "QL3_TASK_REVISION": str(revision.task_revision),
    }
    secrets: list[str] = []
    secret_files: list[str] = []
    files: dict[str, str] = {}
    for variable in execution.environment:
        if variable.name.startswith(RESERVED_PREFIX):
            continue  # those names tell the command about its run
        if variable.secret is not None:
            secrets.append(variable.name)
            if variable.as_file:
                secret_files.append(variable.name)
        elif variable.as_file:
            files[variable.name] = variable.value or ""
        elif variable.value is not None:
            environment[variable.name] = variable.value
    fixed: dict[str, Any] = {
        "argv": list(execution.command),
        "cwd": execution.working_directory or f"{place.work}/{revision.project}",
        "quota": execution.log_quota_bytes,
        "grace_ms": execution.grace_ms,
    }
    contained = container.wanted(revision)
    owner: tuple[int, int] | None = None
    if contained:
        if place.engine is None:
            raise Refused("runtime_unsupported", "This worker has no container engine.")
        if execution.runtime is not None or files or secret_files:
            raise Refused("runtime_unsupported", "A container takes its packages from its image, and no files.")
        fixed["cwd"] = f"{place.work}/{revision.project}"
    elif execution.isolation is not None:
        owner = _isolate(execution, execution.isolation, fixed, environment)
    return Prepared(
        fixed=fixed,
        environment=environment,
        secrets=tuple(secrets),
        secret_files=tuple(secret_files),
        files=files,
        owner=owner,
        runtime=execution.runtime,
        container=execution if contained else None,
    )


def _isolate(
    execution: Execution, wanted: Isolation, fixed: dict[str, Any], environment: dict[str, str]
) -> tuple[int, int] | None:
    fixed |= attributes(wanted)
    if wanted.user is None:
        return None
    if execution.runtime is not None:
        raise Refused("runtime_unsupported", "An environment of packages belongs to the worker's own user.")
    who = person(wanted.user)
    fixed |= {"uid": who.uid, "gid": who.gid, "groups": who.groups}
    if execution.working_directory is None:
        fixed["cwd"] = who.home  # the project's directory is the worker's alone
    named = {variable.name for variable in execution.environment}
    environment |= {
        name: value
        for name, value in (("HOME", who.home), ("USER", who.name), ("LOGNAME", who.name))
        if name not in named
    }
    return who.uid, who.gid
