"""The chaos check itself, as a command, at a size that a test may have."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_a_hundred_runs_survive_the_blows_of_a_seed(database: str) -> None:
    command = [sys.executable, "-m", "benchmarks.chaos", "--quick", "--runs", "100", "--seed", "11", "--db", database]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False)
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["clean"], done.stderr
    assert done.returncode == 0
    assert figures["runs_in_ledger"] == figures["runs"] == 100
    assert figures["starts_recorded"] >= 80
    assert figures["faults"] >= 11
