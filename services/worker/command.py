"""From an offer to what the process host is asked to start. Rules without I/O: the machine is described by `Place`."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

import msgspec

from schemas import limits
from schemas.tasks import Execution, ExecutionRevision
from schemas.workers import OfferItem
from services.worker.attempt import END_SEQUENCE, Held

CACHED: Final = 256
RESERVED_PREFIX: Final = "QL3_"


class Refused(Exception):  # noqa: N818 - an outcome with a code, not a fault
    """This attempt cannot be started here. `code` is told; `summary` is one sentence for people."""

    def __init__(self, code: str, summary: str) -> None:
        self.code = code
        self.summary = summary
        super().__init__(code)


class Place(msgspec.Struct, frozen=True):
    """What this machine gives to every process: a base environment and a directory for working directories."""

    environment: dict[str, str]
    work: str


class Prepared(msgspec.Struct, frozen=True):
    """What is the same for every attempt of a revision."""

    fixed: dict[str, Any]
    environment: dict[str, str]
    secrets: tuple[str, ...]
    """Names of variables whose values come from the vault."""
    files: tuple[str, ...]
    """Names of variables that are delivered as the path of a file."""


class Builder:
    """Builds spawn items; keeps what revisions have in common, because thousands of runs share a few."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._prepared: OrderedDict[str, Prepared] = OrderedDict()

    def prepare(self, digest: str, revision: ExecutionRevision) -> Prepared:
        """The common part of a revision. Raises Refused for what this worker cannot run."""
        found = self._prepared.get(digest)
        if found is None:
            found = self._prepared[digest] = _prepare(revision, self._place)
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
        secrets: dict[str, str] | None = None,
        files: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """One spawn item. `secrets` are values by variable, `files` paths by variable. Raises Refused."""
        environment = prepared.environment | {
            "QL3_RUN_ID": offer.run_id,
            "QL3_ATTEMPT_ID": offer.attempt_id,
            "QL3_ATTEMPT": str(offer.attempt),
            "QL3_TRIGGER_TYPE": offer.trigger_type,
        }
        if offer.scheduled_for_ms is not None:
            environment["QL3_SCHEDULED_FOR_MS"] = str(offer.scheduled_for_ms)
        if offer.inputs is not None:
            environment["QL3_INPUTS"] = msgspec.json.encode(offer.inputs).decode()
        item = prepared.fixed | {
            "attempt": held.attempt_id,
            "env": environment,
            "key": held.digest,
            "sequence": END_SEQUENCE,
            "not_after_ns": not_after_ns,
            "context": {"run": held.run_id, "offer": held.offer_id, "generation": held.lease_generation},
        }
        if timeout_ms is not None:
            item["timeout_ms"] = timeout_ms
        if secrets:
            environment |= secrets
            item["mask"] = list(secrets.values())
        if files:
            environment |= files
        check_size(environment)
        return item


def check_size(environment: dict[str, str]) -> None:
    """Refuse, by name, what the kernel would refuse without one. Sizes in bytes of `NAME=value` and a NUL."""
    for name, value in environment.items():
        if len(name) + len(value.encode()) + 2 > limits.KERNEL_STRING_BYTES + 1:
            raise Refused("environment_too_large", f"The variable {name} is larger than the kernel takes; use a file.")


def _prepare(revision: ExecutionRevision, place: Place) -> Prepared:
    execution = revision.execution
    if execution.runtime is not None or execution.image is not None or revision.terms.placement.executor == "docker":
        raise Refused("runtime_unsupported", "This worker does not have the runtime that the task asks for.")
    environment = place.environment | {
        "QL3_PROJECT": revision.project,
        "QL3_TASK": revision.task_name,
        "QL3_TASK_REVISION": str(revision.task_revision),
    }
    secrets: list[str] = []
    files: list[str] = []
    for variable in execution.environment:
        if variable.name.startswith(RESERVED_PREFIX):
            continue  # those names tell the command about its run
        if variable.as_file:
            files.append(variable.name)
        if variable.secret is not None:
            secrets.append(variable.name)
        elif variable.value is not None and not variable.as_file:
            environment[variable.name] = variable.value
    fixed: dict[str, Any] = {
        "argv": list(execution.command),
        "cwd": execution.working_directory or f"{place.work}/{revision.project}",
        "quota": execution.log_quota_bytes,
        "grace_ms": execution.grace_ms,
    }
    fixed |= _isolation(execution)
    return Prepared(fixed, environment, tuple(secrets), tuple(files))


def _isolation(execution: Execution) -> dict[str, Any]:
    wanted = execution.isolation
    if wanted is None:
        return {}
    fixed: dict[str, Any] = {}
    if wanted.umask is not None:
        fixed["umask"] = wanted.umask
    if wanted.nice is not None:
        fixed["nice"] = wanted.nice
    rlimits = {
        "nofile": wanted.open_files,
        "fsize": wanted.file_bytes,
        "nproc": wanted.processes,
        "cpu": wanted.cpu_seconds,
    }
    rlimits = {name: value for name, value in rlimits.items() if value is not None}
    if rlimits:
        fixed["limits"] = rlimits
    if wanted.required and (wanted.memory_bytes or wanted.cpu_percent or wanted.user):
        raise Refused("limit_unsupported", "This worker cannot enforce a limit that the task requires.")
    return fixed
