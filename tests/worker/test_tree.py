"""Who belongs to an attempt, while those who are looked at fork and end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from services.worker.host import tree
from services.worker.host.identity import Stat, read_stat
from services.worker.host.tree import ROUNDS, Trees, until_nobody_new

ATTEMPT = "01900000-0000-7000-8000-000000000001"
HANDS_ON = """
import os, sys
sys.stdin.readline()
if child := os.fork():
    print(child, flush=True)
else:
    os.setsid()
    os.execvp("sleep", ["sleep", "1000"])
"""


def test_a_listing_is_repeated_until_it_shows_nobody_new() -> None:
    shown, looked = [1, 2], list[int]()

    def look(pid: int) -> None:
        looked.append(pid)
        if pid in (2, 3, 4):
            shown.append(pid + 1)

    assert until_nobody_new(lambda: shown, look, {1})
    assert looked == [2, 3, 4, 5]


def test_who_never_stops_showing_somebody_new_is_not_done() -> None:
    shown = [1]
    assert not until_nobody_new(lambda: shown, lambda pid: shown.append(pid + 1), set())
    assert len(shown) == ROUNDS + 1


def test_a_process_that_forks_and_ends_under_the_look_does_not_hide_its_child(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment = os.environ | {"QL3_ATTEMPT_ID": ATTEMPT}
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", HANDS_ON], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        child = 0

        def read(pid: int) -> Stat | None:
            nonlocal child
            if pid == parent.pid and not child:
                assert parent.stdin is not None
                assert parent.stdout is not None
                parent.stdin.write(b"\n")
                parent.stdin.close()
                child = int(parent.stdout.readline())
                parent.wait()
            return read_stat(pid)

        monkeypatch.setattr(tree, "read_stat", read)
        trees = Trees()
        trees.add(ATTEMPT, 1, 0)
        try:
            found, whole = trees.strays([ATTEMPT])
            assert whole
            assert [stat.pid for stat in found[ATTEMPT]] == [child]
        finally:
            if child:
                os.kill(child, signal.SIGKILL)
