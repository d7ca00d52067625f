"""SIGKILL of the worker, of the process host, of both, right at each point of an attempt's life, by name."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.worker.apart import VICTIMS, Lone, marking, starts
from tests.worker.doomed import HOST_POINTS, WORKER_POINTS
from tests.worker.ledger import Ledger

# What may be told of an attempt, by who died: the worker, the host, both.
ENDED, UNSTARTED, VANISHED = {"ended"}, {"not_started"}, {"vanished"}
OUTCOMES: dict[str, tuple[set[str], set[str], set[str]]] = {
    # Nobody was asked yet, so it is offered anew; of a worker that lives the next host gets it.
    "offer journaled": (ENDED, ENDED, ENDED),
    "about to ask at the barrier": (ENDED, ENDED, ENDED),
    # It is handed to the next host if the death is seen when it is handed over.
    "barrier answered": (UNSTARTED, VANISHED | ENDED, VANISHED),
    "inputs written": (UNSTARTED, VANISHED | ENDED, VANISHED),
    # Whether the host took it in before it died, its receipts tell.
    "handed to the host": (ENDED, VANISHED | ENDED, VANISHED | ENDED),
    "start heard": (ENDED, VANISHED | ENDED, VANISHED | ENDED),
    "stop sent": (ENDED, VANISHED | ENDED, VANISHED | ENDED),
    "end heard": (ENDED, ENDED, ENDED),
    "end reported": (ENDED, ENDED, ENDED),
    "end acknowledged": (ENDED, ENDED, ENDED),
    "journal row gone": (ENDED, ENDED, ENDED),
    "host told to forget": (ENDED, ENDED, ENDED),
    "about to start": (ENDED, VANISHED, VANISHED),
    "process exists": (ENDED, VANISHED, VANISHED),
    "process reaped": (ENDED, VANISHED, VANISHED),
    "about to write the receipt": (ENDED, VANISHED, VANISHED),
    "receipt written": (ENDED, ENDED, ENDED),
    "receipt acknowledged": (ENDED, ENDED, ENDED),
}


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("point", [*WORKER_POINTS, *HOST_POINTS])
async def test_killed_right_at_a_point_of_an_attempts_life(
    doomed: Lone, ledger: Ledger, point: str, victim: str
) -> None:
    doomed.doom = (point, victim)
    await doomed.start()
    stopping = point == "stop sent"
    rest = "exec sleep 1000" if stopping else "exit 3"
    more: dict[str, Any] = {"inputs": {"n": 1}} if point == "inputs written" else {}
    attempt = await ledger.offer(*marking(doomed, f"echo hello; {rest}"), **more)
    if stopping:
        await ledger.running(attempt)
        await ledger.cancel(attempt)
    await doomed.struck()
    if victim != "host":
        await ledger.until(lambda: len(ledger.registrations) == 2)
    if point in WORKER_POINTS[:2] and victim != "host":
        # Of the older lease nothing is kept.
        await doomed.settled()
        await ledger.offer_again(attempt, lease_generation=2)
    if stopping and victim != "host":
        # An order that was taken is an intent; the dispatcher repeats it until the end is told.
        await ledger.cancel(attempt)
    body = await ledger.end(attempt)
    assert body.kind in OUTCOMES[point][VICTIMS.index(victim)]
    started = starts(doomed)[attempt]
    if body.kind == "ended":
        assert started == 1
        assert body.stopped_for == ("user" if stopping else None)
        assert body.exit_code == (128 + signal.SIGTERM if stopping else 3)
        assert body.log is not None
        assert body.log.size == len("hello\n")
    elif body.kind == "not_started":
        assert started == 0
    assert started <= 1
    # What runs after it does so as ever, and nothing of it is left or told differently.
    after = await ledger.offer("/bin/true")
    assert (await ledger.end(after)).exit_code == 0
    await doomed.settled()
    assert starts(doomed)[attempt] == started
    assert ledger.contradictions == []
