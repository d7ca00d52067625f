"""A loop keeps every ring, never ends by an error, and never spins."""

from __future__ import annotations

import asyncio

from schemas.errors import Ql3Error
from services.kit.loops import Loop

NEVER_S = 3600.0
LIMIT_S = 30.0


async def test_a_step_runs_at_once_and_then_when_rung() -> None:
    ran = asyncio.Semaphore(0)

    async def step() -> None:
        ran.release()

    loop = Loop("test", step, every_s=NEVER_S)
    await loop.start()
    await asyncio.wait_for(ran.acquire(), LIMIT_S)
    loop.ring()
    await asyncio.wait_for(ran.acquire(), LIMIT_S)
    await loop.stop()
    assert loop.steps == 2


async def test_a_ring_during_a_step_is_kept() -> None:
    began, go_on, ran = asyncio.Event(), asyncio.Event(), asyncio.Semaphore(0)

    async def step() -> None:
        began.set()
        await go_on.wait()
        ran.release()

    loop = Loop("test", step, every_s=NEVER_S)
    await loop.start()
    await asyncio.wait_for(began.wait(), LIMIT_S)
    loop.ring()
    go_on.set()
    await asyncio.wait_for(ran.acquire(), LIMIT_S)
    await asyncio.wait_for(ran.acquire(), LIMIT_S)
    await loop.stop()


async def test_true_means_more_at_once_and_none_means_wait() -> None:
    answers = [True, True, None]
    done = asyncio.Event()
    count = 0

    async def step() -> bool | None:
        nonlocal count
        answer = answers[count]
        count += 1
        if count == len(answers):
            done.set()
        return answer

    loop = Loop("test", step, every_s=NEVER_S)
    await loop.start()
    await asyncio.wait_for(done.wait(), LIMIT_S)
    await loop.stop()
    assert count == 3


async def test_a_failing_step_is_tried_again_and_counted() -> None:
    recovered = asyncio.Event()
    calls = 0

    async def step() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise Ql3Error("unavailable")
        if calls == 2:
            raise RuntimeError("a fault of ours")
        recovered.set()

    loop = Loop("test", step, every_s=NEVER_S)
    await loop.start()
    loop.ring()
    await asyncio.wait_for(recovered.wait(), LIMIT_S)
    await loop.stop()
    assert (loop.failures, loop.steps, calls) == (0, 1, 3)


async def test_stop_does_not_wait_out_a_backoff() -> None:
    failed = asyncio.Semaphore(0)

    async def step() -> None:
        failed.release()
        raise RuntimeError("always")

    loop = Loop("test", step, every_s=NEVER_S)
    await loop.start()
    for _ in range(6):
        loop.ring()
        await asyncio.wait_for(failed.acquire(), LIMIT_S)
    await asyncio.wait_for(loop.stop(), LIMIT_S)
    assert loop.failures >= 6


async def test_a_loop_can_be_started_again() -> None:
    ran = asyncio.Semaphore(0)

    async def step() -> None:
        ran.release()

    loop = Loop("test", step, every_s=NEVER_S)
    for _ in range(2):
        await loop.start()
        await asyncio.wait_for(ran.acquire(), LIMIT_S)
        await loop.stop()


async def test_a_cancellation_from_within_does_not_end_the_loop() -> None:
    done = asyncio.Event()
    calls = 0

    async def step() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise asyncio.CancelledError
        done.set()

    loop = Loop("test", step, every_s=3600)
    await loop.start()
    await asyncio.wait_for(done.wait(), 30)
    await loop.stop()


async def test_a_step_that_hangs_is_cancelled_in_the_end() -> None:
    entered = asyncio.Event()

    async def step() -> None:
        entered.set()
        await asyncio.Event().wait()

    loop = Loop("test", step, every_s=3600)
    await loop.start()
    await entered.wait()
    await asyncio.wait_for(loop.stop(0.01), 30)
    assert loop.health() == ["loop test is not running"]


async def test_a_loop_stands_aside_before_it_begins_and_not_while_more_waits() -> None:
    answers: list[bool | None] = [True, True, None, None]
    told: list[str] = []
    quiet = asyncio.Semaphore(0)

    async def aside() -> None:
        told.append("aside")

    async def step() -> bool | None:
        answer = answers.pop(0)
        told.append("step")
        if answer is None:
            quiet.release()
        return answer

    loop = Loop("test", step, every_s=NEVER_S, aside=aside)
    await loop.start()
    await asyncio.wait_for(quiet.acquire(), LIMIT_S)
    loop.ring()
    await asyncio.wait_for(quiet.acquire(), LIMIT_S)
    await loop.stop()
    assert told == ["aside", "step", "step", "step", "aside", "step"]


async def test_a_loop_stands_aside_again_after_a_step_that_failed() -> None:
    told: list[str] = []
    quiet = asyncio.Event()

    async def aside() -> None:
        told.append("aside")

    async def step() -> bool | None:
        told.append("step")
        if told.count("step") == 1:
            return True
        if told.count("step") == 2:
            raise Ql3Error("unavailable")
        quiet.set()
        return None

    loop = Loop("test", step, every_s=0.01, aside=aside)
    await loop.start()
    await asyncio.wait_for(quiet.wait(), LIMIT_S)
    await loop.stop()
    assert told[:5] == ["aside", "step", "step", "aside", "step"]
