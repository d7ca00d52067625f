"""Processes of /bin/true a second through the process host: started, reaped, receipted on disk, told and acknowledged.

`just bench spawning [--quick] [--in-flight N]`. `ratio` compares with a bare loop of `os.posix_spawn` with 8 in flight,
measured before and after in the same run; `with_output` is the same for a command that prints a line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from uuid_utils import uuid7

from benchmarks.limits import spawn_rate
from services.worker.hostlink import HostLink, News


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer processes, for a first look")
    parser.add_argument("--in-flight", type=int, default=64)
    options = parser.parse_args()
    count = 1_000 if options.quick else 5_000
    before = spawn_rate(count)
    plain = asyncio.run(_through_host(["/bin/true"], count, options.in_flight))
    printing = asyncio.run(_through_host(["/bin/echo", "hello"], count, options.in_flight))
    limit = (before + spawn_rate(count)) / 2
    print(
        json.dumps(
            {
                "benchmark": "spawning",
                "processes": count,
                "in_flight": options.in_flight,
                "spawns_per_s": round(plain["rate"], 1),
                "with_output_per_s": round(printing["rate"], 1),
                "limit_spawns_per_s": round(limit, 1),
                "ratio": round(plain["rate"] / limit, 3),
                "with_output_ratio": round(printing["rate"] / limit, 3),
                "host_rss_kib": plain["rss_kib"],
                "host_cpu_us_each": plain["cpu_us"],
                "with_output_host_cpu_us_each": printing["cpu_us"],
                "cores": os.cpu_count(),
            }
        )
    )


async def _through_host(argv: list[str], count: int, in_flight: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as root:
        done = asyncio.Event()
        ended: list[str] = []
        open_now = 0
        sent = 0
        pid = 0

        def hello(news: News) -> None:
            nonlocal pid
            pid = news.host["pid"]

        def heard(news: News) -> None:
            nonlocal open_now
            if news.refused:
                raise RuntimeError(news.refused[0].code)
            names = [told.attempt for told in news.exits]
            if names:
                ended.extend(names)
                open_now -= len(names)
                link.send({"op": "ack", "attempts": names})
                more()
            if len(ended) == count:
                done.set()

        def more() -> None:
            nonlocal open_now, sent
            room = min(in_flight - open_now, count - sent)
            if room > 0:
                link.send_items("spawn", [_item(argv) for _ in range(room)])
                open_now += room
                sent += room

        link = HostLink(Path(root) / "host", Path(root) / "logs", on_hello=hello, on_news=heard)
        await link.start()
        started = time.perf_counter()
        more()
        await asyncio.wait_for(done.wait(), 600)
        elapsed = time.perf_counter() - started
        figures = {"rate": count / elapsed, "rss_kib": _rss_kib(pid), "cpu_us": round(_cpu_s(pid) / count * 1e6)}
        await link.stop()
        return figures


def _item(argv: list[str]) -> dict[str, Any]:
    attempt = str(uuid7())
    return {
        "attempt": attempt,
        "argv": argv,
        "env": {"PATH": "/usr/bin:/bin", "QL3_ATTEMPT_ID": attempt},
        "key": "00" * 32,
        "sequence": 2,
        "quota": 1 << 20,
    }


def _rss_kib(pid: int) -> int:
    rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(rows["VmRSS"].split()[0])


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
