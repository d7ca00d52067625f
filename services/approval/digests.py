"""Canonical digests of plans, receipts and authorization facts (a preview's is in `schemas.approvals`).

SHA-256 over compact JSON with a fixed order of keys and absent optionals as null, so that they can be recomputed
anywhere; they guard against accidents, not against somebody who can write the database.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from schemas.canonical import digest

RUN_CREATE_KEYS: Final = (
    "schemaVersion", "actionType", "actionRef", "projectId", "taskId", "taskRevision", "executorType", "priority",
    "taskName", "taskSnapshotRef", "inputRef",
)  # fmt: skip
RECEIPT_KEYS: Final = (
    "schemaVersion", "dispatchId", "approvalRequestId", "projectId", "actionType", "actionDigest", "executionAttempt",
    "executionVersion", "startedAtMs", "idempotencyKey", "outcome", "resultCode", "resourceType", "resourceId",
    "finishedAtMs", "createdAtMs",
)  # fmt: skip
FACT_KEYS: Final = (
    "dispatchId", "projectId", "mutationId", "resolvedByType", "resolvedById", "authenticationId", "assurance",
    "authenticatedAtMs", "projectVersion", "bindingVersion", "authorizedAtMs",
)  # fmt: skip


def ordered_digest(keys: Sequence[str], values: Mapping[str, Any]) -> str:
    """Lower-case hex SHA-256 of the compact JSON of `values` in the order of `keys`; a missing key is null."""
    unknown = set(values) - set(keys)
    if unknown:
        raise ValueError(f"not part of the digest: {', '.join(sorted(unknown))}")
    return hashlib.sha256(msgspec.json.encode({key: values.get(key) for key in keys})).hexdigest()


def plan_digest(action_type: str, plan: Mapping[str, Any]) -> str:
    """The digest of an action's plan. `run.create` keeps its fixed order of keys; the others are canonical JSON."""
    if action_type == "run.create":
        # The inputs stand beside the fixed fields, which hold their digest.
        return ordered_digest(RUN_CREATE_KEYS, {key: value for key, value in plan.items() if key != "inputs"})
    return digest(f"ql3.approved-action.{action_type}.v1", dict(plan))


def receipt_digest(values: Mapping[str, Any]) -> str:
    """The evidence digest of a receipt."""
    return ordered_digest(RECEIPT_KEYS, values)


def fact_digest(values: Mapping[str, Any]) -> str:
    """The digest of an authorization fact of a manual recovery."""
    return ordered_digest(FACT_KEYS, values)
