"""Rules of secrets: what a value may be, which version comes next, and what an attempt may open."""

from __future__ import annotations

from typing import NamedTuple

from schemas import limits
from schemas.errors import Ql3Error
from schemas.tasks import ExecutionRevision

MAX_VERSION = 2_147_483_647


class Wanted(NamedTuple):
    """One environment variable of an attempt that a secret fills; `version` None means the current one."""

    variable: str
    name: str
    version: int | None


def check_value(value: bytes | bytearray) -> None:
    """Raise `invalid` or `too_large` when a value could not be an environment variable; never echoes it."""
    if len(value) > limits.SECRET_BYTES:
        raise Ql3Error("too_large", f"A secret has at most {limits.SECRET_BYTES} bytes.", field="value")
    if not value:
        raise Ql3Error("invalid", "The value is empty.", field="value")
    if 0 in value:
        raise Ql3Error("invalid", "The value holds a NUL byte.", field="value")
    try:
        value.decode("utf-8", "strict")
    except UnicodeDecodeError:
        # The decoder's error holds the bytes: it must not become the cause.
        raise Ql3Error("invalid", "The value is not UTF-8 text.", field="value") from None


def next_version(current: int, expected: int | None) -> int:
    """The version that follows `current` (0: the secret is new). Raises `version_conflict`."""
    if expected is not None and expected != current:
        raise Ql3Error("version_conflict", field="expected_version", data={"current_version": current})
    if current >= MAX_VERSION:
        raise Ql3Error("capacity", "The secret has too many versions.")
    return current + 1


def check_replay(version: int, expected: int | None, *, same_value: bool) -> None:
    """A mutation id that was seen may come again only with the same content. Raises `mutation_conflict`."""
    if not same_value or (expected is not None and version != expected + 1):
        raise Ql3Error("mutation_conflict", field="mutation_id")


def wanted_by(revision: ExecutionRevision) -> list[Wanted]:
    """The secrets that a pinned revision refers to, in its order. Raises `secret_unavailable` beyond the limit."""
    wanted = [
        Wanted(variable.name, variable.secret.secret, variable.secret.version)
        for variable in revision.execution.environment
        if variable.secret is not None
    ]
    if len(wanted) > limits.SECRETS_PER_RUN:
        raise Ql3Error("secret_unavailable", f"A run takes at most {limits.SECRETS_PER_RUN} secrets.")
    return wanted


def absent(wanted: Wanted) -> Ql3Error:
    """A variable's secret does not exist. Both are named, as the task names them; absent is never an empty value."""
    which = wanted.name if wanted.version is None else f"{wanted.name} (version {wanted.version})"
    detail = f"The secret {which} of the variable {wanted.variable} does not exist."
    return Ql3Error("secret_unavailable", detail, field=f"environment.{wanted.variable}")
