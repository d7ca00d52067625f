"""What a box costs while nothing happens: `ql3 up` with 1,000 tasks.

`just bench idle_footprint [--quick] [--tasks N]`. RSS is the sum over every process that `up` started, itself included
(shared pages counted once a process: an upper bound; `pss_mib` counts them once). CPU and writes are over the observed
time. The limit is the cold start of a bare Python process, measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.system import System, ql3_up
from services.cli.client import Client

MIB = 1024 * 1024
TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tasks", type=int, default=1_000)
    options = parser.parse_args()
    observed_s = 5.0 if options.quick else 30.0
    bare = min(_bare_start() for _ in range(3))
    with ql3_up() as system:
        first_start = system.cold_start_s
        _make_tasks(system, options.tasks)
        before = {pid: _usage(pid) for pid in system.pids()}
        started = time.monotonic()
        time.sleep(observed_s)
        elapsed = time.monotonic() - started
        pids = system.pids()
        after = {pid: _usage(pid) for pid in pids}
        rss = {pid: _memory(pid) for pid in pids}
    cpu_s = sum(after[pid][0] - before.get(pid, (0.0, 0))[0] for pid in after)
    written = sum(after[pid][1] - before.get(pid, (0.0, 0))[1] for pid in after)
    print(
        json.dumps(
            {
                "benchmark": "idle_footprint",
                "tasks": options.tasks,
                "processes": len(pids),
                "rss_mib": round(sum(value[0] for value in rss.values()) / MIB, 1),
                "pss_mib": round(sum(value[1] for value in rss.values()) / MIB, 1),
                "cpu_percent": round(100 * cpu_s / elapsed, 2),
                "written_bytes_per_s": round(written / elapsed),
                "cold_start_s": round(first_start, 2),
                "limit_bare_python_start_s": round(bare, 3),
                "ratio": round(first_start / bare, 1),
                "cores": os.cpu_count(),
            }
        )
    )


def _make_tasks(system: System, count: int) -> None:
    with Client(system.url, system.token) as client:
        for number in range(count):
            client.post(
                "/projects/default/tasks",
                {
                    "name": f"idle-{number:05d}",
                    "spec": {"execution": {"command": ["/bin/true"]}},
                    # Once a year, so that nothing is due while the box is watched.
                    "triggers": [{"kind": "cron", "expression": f"{number % 60} {number % 24} 29 2 *"}],
                },
            )


def _bare_start() -> float:
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    return time.monotonic() - started


def _usage(pid: int) -> tuple[float, int]:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        written = 0
        for line in Path(f"/proc/{pid}/io").read_text().splitlines():
            if line.startswith("write_bytes:"):
                written = int(line.split()[1])
    except OSError:
        return 0.0, 0
    return (int(fields[11]) + int(fields[12])) / TICKS, written


def _memory(pid: int) -> tuple[int, int]:
    rss = pss = 0
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Rss:"):
                rss = int(line.split()[1]) * 1024
            elif line.startswith("Pss:"):
                pss = int(line.split()[1]) * 1024
    except OSError:
        return 0, 0
    return rss, pss


if __name__ == "__main__":
    main()
