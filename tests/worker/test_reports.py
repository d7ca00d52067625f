"""Reports are open until they are acknowledged, whatever becomes of one message."""

from __future__ import annotations

import pytest

from schemas.workers import AttemptReport, SessionFence
from services.kit.clock import ManualClock
from services.kit.ids import new_id
from services.worker import reports as module
from services.worker.attempt import END_SEQUENCE, Held, end_of, sign
from services.worker.reports import Reports

FENCE = SessionFence(worker="w", session_id=new_id(), generation=1)


def held() -> Held:
    return Held(
        attempt_id=new_id(),
        offer_id=new_id(),
        run_id=new_id(),
        project="p",
        lease_generation=1,
        host="",
        digest="0" * 64,
    )


async def test_a_message_that_fails_in_any_way_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1_000]
    monkeypatch.setattr(module, "monotonic_ms", lambda: now[0])
    sent: list[list[str]] = []

    async def send(_: SessionFence, batch: list[AttemptReport]) -> None:
        sent.append([item.attempt_id for item in batch])
        if len(sent) == 1:
            raise RuntimeError("nobody thought of this")

    reports = Reports(
        clock=ManualClock(), send=send, fence=lambda: FENCE, ended=lambda _: None, more_coming=lambda _: False
    )
    one = held()
    reports.end(one, sign(one, end_of(None, "not_started", kind="not_started", summary=""), END_SEQUENCE))
    with pytest.raises(RuntimeError):
        await reports._step()
    now[0] += 60_000
    await reports._step()
    assert sent == [[one.attempt_id], [one.attempt_id]]
    assert reports.outstanding == 1
