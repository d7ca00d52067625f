"""The machines of requests and executions as models: whatever comes in whatever order, what must not be is not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from schemas.approvals import Binding, preview_digest
from schemas.errors import Ql3Error
from schemas.identity import Subject
from services.approval import executions, recovery, requests
from services.approval.executions import Execution, Lease
from services.approval.recovery import Control, Finding, Resolution
from services.approval.requests import DecisionRow, Request

PREVIEW = {"task": "backup"}
BINDING = Binding(
    permission="run.start",
    action_type="run.release",
    action_ref="run-1",
    action_digest="a" * 64,
    preview_digest=preview_digest(PREVIEW),
)
ANN, BOB, EVE = (Subject(type="user", id=name) for name in ("ann", "bob", "eve"))
SYSTEM = Subject(type="system", id="approval")
TTL = 1_000


def request(quorum: int = 1, **changes: Any) -> Request:
    made = Request(
        id="r-1",
        project="default",
        mode="human_confirmation",
        quorum=quorum,
        binding=BINDING,
        preview=PREVIEW,
        risk="low",
        requested_by=ANN,
        requested_at_ms=0,
        expires_at_ms=TTL,
    )
    return msgspec.structs.replace(made, **changes)


def decision(number: int, what: Any, who: Subject, at_ms: int) -> DecisionRow:
    return DecisionRow(
        id=f"d-{number}",
        request_id="r-1",
        decision=what,
        reason=None,
        decided_by=who,
        authentication_id="auth",
        assurance="multi_factor",
        authenticated_at_ms=at_ms,
        project_version=1,
        binding_version=1,
        decided_at_ms=at_ms,
    )


class RequestMachine(RuleBasedStateMachine):
    """One request, decided, consumed and taken back in any order, at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 0
        self.request = request(quorum=2)
        self.decisions: list[DecisionRow] = []
        self.consumptions = 0
        self.seen = {"pending"}

    def apply(self, after: Request) -> None:
        before, self.request = self.request, after
        assert after.version >= before.version
        if after is not before:
            # Terminal states are final.
            assert before.state not in ("rejected", "consumed", "withdrawn")
            assert self.now_ms < before.expires_at_ms
        self.seen.add(after.state)

    @rule(by_ms=st.integers(0, TTL // 2))
    def time_passes(self, by_ms: int) -> None:
        self.now_ms += by_ms

    @rule(
        who=st.sampled_from([ANN, BOB, EVE]),
        what=st.sampled_from(["approved", "rejected"]),
        expected=st.sampled_from([None, 1, 2]),
    )
    def decide(self, who: Subject, what: str, expected: int | None) -> None:
        row = decision(len(self.decisions), what, who, self.now_ms)
        try:
            after = requests.decide(
                self.request,
                self.decisions,
                row,
                expected_version=expected,
                expected_digest=None,
                now_ms=self.now_ms,
            )
        except Ql3Error:
            return
        self.decisions.append(row)
        self.apply(after)

    @rule(expected=st.sampled_from([1, 2, 3]))
    def consume(self, expected: int) -> None:
        try:
            after = requests.consume(
                self.request,
                consumption_id=f"c-{self.consumptions}",
                dispatch_id=f"x-{self.consumptions}",
                expected_version=expected,
                action=BINDING,
                requested_by=ANN,
                consumed_by=SYSTEM,
                now_ms=self.now_ms,
            )
        except Ql3Error:
            return
        self.consumptions += 1
        self.apply(after)

    @rule()
    def withdraw(self) -> None:
        try:
            self.apply(requests.withdraw(self.request, withdrawal_id="w", by=ANN, now_ms=self.now_ms))
        except Ql3Error:
            return

    @invariant()
    def holds(self) -> None:
        assert self.consumptions <= 1
        assert (self.request.state == "consumed") == (self.consumptions == 1)
        people = [row.decided_by for row in self.decisions]
        assert len(set(people)) == len(people)
        if "approved" in self.seen:
            assert sum(row.decision == "approved" for row in self.decisions) >= 2
        if any(row.decision == "rejected" for row in self.decisions):
            assert self.request.state == "rejected"
        expired = self.now_ms >= TTL and self.request.state in ("pending", "approved")
        assert (requests.effective_state(self.request, self.now_ms) == "expired") == expired


class ExecutionMachine(RuleBasedStateMachine):
    """One execution under several owners whose leases lapse, with its recovery beside it."""

    leases: Bundle[Lease] = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 1_000
        self.record: Execution = executions.created("x-1", "default", self.now_ms)
        self.control: Control | None = None
        self.effects = 0
        self.barriers = 0
        self.tokens = 0

    @rule(by_ms=st.integers(0, 45_000))
    def time_passes(self, by_ms: int) -> None:
        self.now_ms += by_ms

    @rule(target=leases, owner=st.sampled_from(["a", "b"]))
    def claim(self, owner: str) -> Lease:
        self.tokens += 1
        token = f"t-{self.tokens}"
        outcome, after = executions.claim(self.record, owner=owner, token=token, now_ms=self.now_ms)
        if self.barriers:
            # What crossed the barrier is never claimed again.
            assert outcome not in ("claimed", "leased", "not_due")
        self.record = after
        return Lease(owner, token, after.version if outcome == "claimed" else -1)

    @rule(target=leases, lease=leases)
    def start(self, lease: Lease) -> Lease:
        before = self.record
        try:
            after = executions.start(before, lease, self.now_ms)
        except Ql3Error:
            return lease
        if after is not before:
            self.barriers += 1
            self.control = recovery.armed(after, self.now_ms)
        self.record = after
        return lease._replace(version=after.version)

    @rule(target=leases, lease=leases)
    def renew(self, lease: Lease) -> Lease:
        try:
            self.record = executions.renew(self.record, lease, self.now_ms)
        except Ql3Error:
            return lease
        if self.record.status == "executing":
            assert self.control is not None
            self.control = recovery.rearmed(self.control, self.record, self.now_ms)
        return lease._replace(version=self.record.version)

    @rule(lease=consumes(leases), retry=st.booleans())
    def release(self, lease: Lease, retry: bool) -> None:
        again = self.now_ms + 1_000 if retry else None
        try:
            self.record = executions.release(
                self.record, lease, mutation_id="m", code="c", now_ms=self.now_ms, retry_at_ms=again
            )
        except Ql3Error:
            return

    @rule(lease=leases, outcome=st.sampled_from(["succeeded", "failed", "indeterminate"]), number=st.integers(0, 9))
    def complete(self, lease: Lease, outcome: Any, number: int) -> None:
        before = self.record
        try:
            after = executions.complete(
                before, lease, outcome=outcome, mutation_id=f"m-{number}", code="c", now_ms=self.now_ms
            )
        except Ql3Error:
            return
        if after is not before:
            self.effects += 1
            assert self.control is not None
            self.control = recovery.completed(self.control, after, self.now_ms)
        self.record = after

    @rule(
        kind=st.sampled_from(["verified_succeeded", "verified_failed", "still_running", "missing", "conflict"]),
        human=st.booleans(),
    )
    def recover(self, kind: Any, human: bool) -> None:
        if self.control is None:
            return
        if not human:
            outcome, claimed = recovery.claim(self.control, self.record, owner="r", token="t", now_ms=self.now_ms)
            if outcome != "claimed":
                return
            # A living lease is nobody's doubt.
            assert self.now_ms >= (self.record.lease_expires_at_ms or 0)
            self.control = claimed
            if kind in recovery.RETRIED | recovery.MANUAL:
                self.control = recovery.record(
                    claimed, Finding(kind, "c"), mutation_id=f"f-{self.now_ms}", owner="r", token="t",
                    now_ms=self.now_ms,
                )  # fmt: skip
                return
        try:
            recovery.admit_resolution(
                self.control,
                self.record,
                expected_execution_version=self.record.version,
                expected_recovery_version=None,
                now_ms=self.now_ms,
            )
        except Ql3Error:
            return
        resolution = Resolution(
            dispatch_id="x-1",
            project="default",
            execution_version=self.record.version,
            mutation_id="s",
            source="human" if human else "automatic_evidence",
            decision="confirm_succeeded" if kind == "verified_succeeded" else "confirm_failed",
            evidence_digest=None,
            reason_code="c",
            resolved_by="ann" if human else None,
            resolved_at_ms=self.now_ms,
        )
        self.record = executions.resolved(
            self.record, resolution.decision, mutation_id="s", code="c", now_ms=self.now_ms
        )
        self.control = recovery.settled(self.control, self.record, resolution, None, self.now_ms)
        self.effects += 1

    @invariant()
    def holds(self) -> None:
        record = self.record
        assert self.barriers <= 1
        assert self.effects <= 1
        assert record.attempt_count <= record.max_attempts
        assert (self.control is not None) == (self.barriers == 1)
        leased = record.status in ("leased", "executing")
        assert leased == (record.lease_owner is not None) == (record.lease_expires_at_ms is not None)
        if leased:
            assert record.updated_at_ms < (record.lease_expires_at_ms or 0) <= record.updated_at_ms + 600_000
        if record.status in executions.TERMINAL:
            assert record.completed_at_ms == record.updated_at_ms
            assert record.result_mutation_id is not None
        if self.control is not None:
            assert (self.control.status == "resolved") == (record.status in executions.TERMINAL)
            assert self.control.execution_version == record.version


limits = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestRequest = RequestMachine.TestCase
TestRequest.settings = limits
TestExecution = ExecutionMachine.TestCase
TestExecution.settings = limits


@pytest.mark.parametrize(
    ("changes", "expected", "digest", "code"),
    [
        # Expired beats version, version beats state, state beats what comes behind it.
        ({"state": "rejected", "version": 2}, 1, None, "version_conflict"),
        ({"state": "rejected", "version": 2}, 2, None, "already_decided"),
        ({"state": "consumed", "version": 3}, None, None, "already_decided"),
        ({"state": "withdrawn", "version": 2}, None, None, "invalid_transition"),
        ({"expires_at_ms": 5}, 9, None, "approval_expired"),
        ({}, 9, None, "version_conflict"),
        ({}, 1, "b" * 64, "conflict"),
    ],
)
def test_order_of_the_checks_of_a_decision(changes: Any, expected: int | None, digest: str | None, code: str) -> None:
    with pytest.raises(Ql3Error) as refused:
        requests.decide(
            request(**changes),
            [],
            decision(1, "approved", BOB, 5),
            expected_version=expected,
            expected_digest=digest,
            now_ms=5,
        )
    assert refused.value.code == code


def test_the_instant_of_expiry_is_expired() -> None:
    assert requests.effective_state(request(), TTL - 1) == "pending"
    assert requests.effective_state(request(), TTL) == "expired"
    assert requests.effective_state(request(state="consumed", version=3), TTL) == "consumed"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"expires_at_ms": 86_400_001}, "expires_at_ms"),
        ({"expires_at_ms": 0}, "expires_at_ms"),
        ({"preview": {"task": "another"}}, "binding.preview_digest"),
        ({"preview": {"x": 1.5}}, "preview"),
        ({"preview": {"x": "y" * 9_000}}, "preview"),
        ({"binding": msgspec.structs.replace(BINDING, permission="tool.call:*")}, "binding.permission"),
        ({"binding": msgspec.structs.replace(BINDING, action_type="run create")}, "binding.action_type"),
        ({"binding": msgspec.structs.replace(BINDING, action_ref="a b")}, "binding.action_ref"),
    ],
)
def test_what_cannot_be_asked_for(changes: Any, field: str) -> None:
    with pytest.raises(Ql3Error) as refused:
        requests.validate(request(**changes))
    assert refused.value.field == field


@pytest.mark.parametrize(("attempt", "delay_ms"), [(1, 1_000), (2, 2_000), (6, 32_000), (7, 60_000), (16, 60_000)])
def test_pauses_before_the_barrier(attempt: int, delay_ms: int) -> None:
    assert executions.retry_delay_ms(attempt) == delay_ms


@pytest.mark.parametrize(("findings", "delay_ms"), [(0, 5_000), (1, 10_000), (6, 300_000), (99, 300_000)])
def test_pauses_between_looks(findings: int, delay_ms: int) -> None:
    assert recovery.retry_delay_ms(findings) == delay_ms


def test_used_up_attempts_end_as_blocked() -> None:
    record = executions.created("x", "default", 0)
    now_ms = 0
    for number in range(executions.MAX_ATTEMPTS):
        outcome, record = executions.claim(record, owner="a", token=f"t{number}", now_ms=now_ms)
        assert outcome == "claimed"
        now_ms += executions.LEASE_MS
    outcome, record = executions.claim(record, owner="a", token="t", now_ms=now_ms)
    assert (outcome, record.status, record.last_result_code) == ("blocked", "blocked", "attempt_budget_exhausted")
    assert record.result_mutation_id == f"exhausted:{executions.MAX_ATTEMPTS}"
