"""The hand-over: one approval, one dispatch; the requester's authority judged again; the documented errors in order."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from schemas.errors import Ql3Error
from schemas.identity import IdentitySet, Subject
from services.approval.store import actions
from services.approval.store import requests as rows
from services.kit.database import CheckViolation, Statement
from services.kit.ids import new_id
from tests.approval.conftest import HOUR, Works, console, hold
from tests.fixtures_database import shift_clock

ANN = Subject(type="user", id="ann")
SYSTEM = Subject(type="system", id="approval")


async def refused(work: Any) -> Ql3Error:
    """The error that `work` ends with."""
    with pytest.raises(Ql3Error) as error:
        await work
    return error.value


async def command(works: Works, request_id: str, **changes: Any) -> dict[str, Any]:
    request = await works.database.read(lambda tx: rows.get(tx, request_id))
    assert request is not None
    return {
        "request_id": request_id,
        "consumption_id": new_id(),
        "dispatch_id": new_id(),
        "expected_version": 2,
        "action": request.binding,
        "requested_by": request.requested_by,
        "consumed_by": SYSTEM,
        **changes,
    }


async def consume(works: Works, wanted: dict[str, Any]) -> bool:
    wanted = dict(wanted)
    return await works.hand_over.consume(wanted.pop("request_id"), **wanted)


async def test_one_approval_makes_one_dispatch_and_a_replay_answers(works: Works) -> None:
    request_id = await works.approved()
    wanted = await command(works, request_id)
    assert await consume(works, wanted) is False
    assert await consume(works, wanted) is True
    dispatch = await works.dispatch_of(request_id)
    execution = await works.execution(dispatch)
    assert (execution.status, execution.version, execution.attempt_count, execution.max_attempts) == (
        "pending",
        0,
        0,
        5,
    )
    assert (dispatch.approved_by.id, dispatch.approved_assurance) == ("local-console", "local_console")
    # Also after expiry, and however far the execution is.
    works.clock.advance(2 * HOUR)
    await works.leased(dispatch)
    assert await consume(works, wanted) is True
    other = msgspec.structs.replace(wanted["action"], action_digest="b" * 64)
    drifts: list[dict[str, Any]] = [
        {"dispatch_id": new_id()},
        {"expected_version": 3},
        {"action": other},
        {"consumed_by": Subject(type="system", id="another")},
    ]
    for drift in drifts:
        assert (await refused(consume(works, {**wanted, **drift}))).code == "mutation_conflict"


async def test_order_of_the_checks(works: Works) -> None:
    pending = hold()
    await works.approvals.hold([pending])
    request_id = await works.approved()
    by_hand = await command(works, request_id, consumed_by=ANN)
    assert (await refused(consume(works, by_hand))).code == "forbidden"
    assert (await refused(consume(works, await command(works, request_id) | {"request_id": new_id()}))).code == (
        "not_found"
    )
    assert (await refused(consume(works, await command(works, request_id, expected_version=1)))).code == (
        "version_conflict"
    )
    early = await command(works, pending.request_id, expected_version=1)
    assert (await refused(consume(works, early))).code == "invalid_transition"
    used = await works.dispatched()
    taken = await command(works, request_id, dispatch_id=used.id)
    assert (await refused(consume(works, taken))).code == "mutation_conflict"
    works.clock.advance(HOUR)
    late = await command(works, request_id, expected_version=1)
    assert (await refused(consume(works, late))).code == "approval_expired"


async def test_a_requester_who_lost_the_right_gets_nothing_until_they_have_it_again(works: Works) -> None:
    await works.person("ann", "operator")
    request_id = await works.approved(requested_by=ANN)
    await works.bind(ANN, None, expected=1)
    assert (await refused(consume(works, await command(works, request_id)))).code == "forbidden"
    assert await works.hand_over.one(request_id) is False
    listed = await works.database.read(lambda tx: rows.view(tx, "default", request_id))
    assert listed is not None
    assert (listed.request.state, listed.execution_result) == ("approved", "forbidden")
    # It is not tried again at once, but it is tried again.
    assert await works.hand_over.due(10) == []
    await works.bind(ANN, "operator", expected=2)
    await shift_clock(works.database, 15_000)
    assert await works.hand_over.due(10) == [request_id]
    assert await works.hand_over.one(request_id)


async def test_a_disabled_requester_gets_nothing(works: Works) -> None:
    await works.person("ann", "operator")
    await works.person("boss", "owner")
    request_id = await works.approved(requested_by=ANN)
    await works.directory.set_status(IdentitySet(actor=console(), subject=ANN, expected_version=1, status="disabled"))
    assert (await refused(consume(works, await command(works, request_id)))).code == "forbidden"


@pytest.mark.parametrize("name", ["insert_dispatch", "insert_execution"])
async def test_a_hand_over_that_fails_midway_leaves_the_approval_usable(works: Works, name: str, monkeypatch) -> None:
    request_id = await works.approved()
    real = getattr(actions, name)

    async def broken(tx: Any, made: Any) -> None:
        await real(tx, made)
        await tx.execute(Statement("UPDATE projects SET version = 0 WHERE id = 'default'"))

    monkeypatch.setattr(actions, name, broken)
    with pytest.raises(CheckViolation):
        await consume(works, await command(works, request_id))
    monkeypatch.undo()
    request = await works.database.read(lambda tx: rows.get(tx, request_id))
    assert request is not None
    assert (request.state, request.dispatch_id) == ("approved", None)
    assert await works.hand_over.one(request_id)


async def test_what_is_approved_early_is_handed_over_when_it_is_due(works: Works) -> None:
    request_id = await works.approved(ttl_ms=2 * HOUR, not_before_ms=works.clock.now_ms() + HOUR)
    assert await works.hand_over.due(10) == []
    wait_s = await works.hand_over.next_s()
    assert wait_s is not None
    assert HOUR / 1000 - 2 - 60 < wait_s <= HOUR / 1000 - 1
    # The database's clock counts, whatever the wall's says meanwhile.
    works.clock.advance(-60_000)
    await shift_clock(works.database, HOUR - 1_000)
    assert await works.hand_over.due(10) == [request_id]
    await works.executor.step()
    assert works.receiver.effects == [(await works.dispatch_of(request_id)).id]


async def test_what_is_due_after_its_request_ends_is_refused(works: Works) -> None:
    order = hold(not_before_ms=works.clock.now_ms() + HOUR)
    (outcome,) = await works.approvals.hold([order])
    assert outcome is not None
    assert (outcome.code, outcome.field) == ("invalid", "not_before_ms")


async def test_a_requester_who_lost_the_right_before_it_is_due_gets_nothing(works: Works) -> None:
    await works.person("ann", "operator")
    request_id = await works.approved(requested_by=ANN, ttl_ms=2 * HOUR, not_before_ms=works.clock.now_ms() + HOUR)
    await works.bind(ANN, None, expected=1)
    await shift_clock(works.database, HOUR)
    assert await works.hand_over.one(request_id) is False
