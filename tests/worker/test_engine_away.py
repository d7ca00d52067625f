"""A container engine that answered when the worker started and does not any more."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.worker.apart import VICTIMS, Lone, marking
from tests.worker.ledger import Ledger, make_revision

# A double of the engine's command: it lists nothing while it answers, and a container is the process of `run`.
DOUBLE = """#!/bin/sh
[ -e "$(dirname "$0")/away" ] && exit 1
[ "$1" = run ] && echo up && exec sleep 1000
exit 0
"""


@pytest.mark.parametrize("victim", [name for name in VICTIMS if name != "worker"])
async def test_it_holds_up_nobody_but_those_whom_it_may_run(
    doomed: Lone, ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    engine = tmp_path / "engine"
    engine.mkdir()
    (engine / "docker").write_text(DOUBLE)
    (engine / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{engine}{os.pathsep}{os.environ['PATH']}")
    await doomed.start()
    plain = await ledger.offer(*marking(doomed, "exec sleep 1000"))
    contained = await ledger.offer("work", revision=make_revision("work", image="some:image"))
    for attempt in (plain, contained):
        await ledger.running(attempt)
    (engine / "away").touch()
    await doomed.kill(victim)
    assert (await ledger.end(plain)).kind == "vanished"
    # Whether the container is gone nobody can say before the engine answers.
    assert ledger.told(contained, "vanished") == []
    (engine / "away").unlink()
    assert (await ledger.end(contained)).kind == "vanished"
