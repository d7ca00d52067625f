"""The canonical digests, against vectors that were computed elsewhere."""

from __future__ import annotations

import pytest

from services.approval import digests

PLAN = {
    "schemaVersion": 1,
    "actionType": "run.create",
    "actionRef": "plan:1",
    "projectId": "default",
    "taskId": "task-1",
    "taskRevision": "1",
    "executorType": "local_process",
    "priority": 0,
    "taskName": None,
    "taskSnapshotRef": None,
    "inputRef": None,
}
PLAN_DIGEST = "0764f7e1c54d5ff53daea3e78fd5d64bcc64a6909c607492e92e3386ec59c4d0"
RECEIPT = {
    "schemaVersion": 1,
    "dispatchId": "d-1",
    "approvalRequestId": "a-1",
    "projectId": "default",
    "actionType": "run.create",
    "actionDigest": PLAN_DIGEST,
    "executionAttempt": 1,
    "executionVersion": 2,
    "startedAtMs": 1000,
    "idempotencyKey": "d-1",
    "outcome": "succeeded",
    "resultCode": "approved_run_created",
    "resourceType": "run",
    "resourceId": "r-1",
    "finishedAtMs": 1001,
    "createdAtMs": 1001,
}
FACT = {
    "dispatchId": "d-1",
    "projectId": "default",
    "mutationId": "m-1",
    "resolvedByType": "user",
    "resolvedById": "u-1",
    "authenticationId": "auth-1",
    "assurance": "multi_factor",
    "authenticatedAtMs": 900_000,
    "projectVersion": 1,
    "bindingVersion": 1,
    "authorizedAtMs": 1_000_000,
}


def test_plan_vector() -> None:
    assert digests.plan_digest("run.create", PLAN) == PLAN_DIGEST


def test_receipt_vector() -> None:
    assert digests.receipt_digest(RECEIPT) == "2b3de8113f548cb9c1788c031f677efaedc164aca20252ee83f20846a9ce0143"


def test_fact_vector() -> None:
    assert digests.fact_digest(FACT) == "fc5a02dfeac13364cb0cbad30b4c4ca47204380c6fa0c4120dde36a491bb7c06"


def test_absent_optionals_count_as_null_and_order_of_the_dict_does_not_matter() -> None:
    shuffled = {key: PLAN[key] for key in reversed(PLAN) if PLAN[key] is not None}
    assert digests.plan_digest("run.create", shuffled) == PLAN_DIGEST


def test_inputs_stand_beside_the_plan() -> None:
    assert digests.plan_digest("run.create", {**PLAN, "inputs": {"a": 1}}) == PLAN_DIGEST


def test_what_is_no_part_of_a_digest_is_refused() -> None:
    with pytest.raises(ValueError, match="colour"):
        digests.plan_digest("run.create", {**PLAN, "colour": "red"})


@pytest.mark.parametrize(("made", "keys"), [(digests.receipt_digest, RECEIPT), (digests.fact_digest, FACT)])
def test_every_field_counts(made, keys) -> None:
    whole = made(keys)
    for key in keys:
        assert made({**keys, key: "another"}) != whole


def test_the_same_plan_of_another_action_has_another_digest() -> None:
    plan = {"worker": "w1", "drain": True}
    assert digests.plan_digest("worker.drain", plan) != digests.plan_digest("task.change", plan)
