"""Whole trees: what an attempt started is gone when it is stopped, and when it ends; nobody else is touched."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from services.worker.host.identity import Identity, boot_id, inspect, read_stat
from services.worker.host.spawn import tag_of
from services.worker.host.tree import inherited_tag
from tests.worker.conftest import Box, Client, alive, heard_from

PYTHON = (sys.executable, "-I", "-S", "-c")

NESTED = """
trap '' TERM
python3 -I -S -c '
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(os.environ["FIFO"], "w").write(str(os.getpid()) + " " + str(os.getsid(0)) + "\\n")
        signal.pause()
    os._exit(0)
signal.pause()
' &
wait
"""


def fifo(box: Box, name: str = "fifo") -> Path:
    path = box.logs / name
    os.mkfifo(path)
    return path


def stop(host: Client, attempt: str, **more: object) -> None:
    host.send({"op": "kill", "items": [{"attempt": attempt, "reason": "user"} | more]})


def test_a_nested_tree_that_ignores_term_is_gone_within_grace_and_a_second(box: Box, host: Client) -> None:
    where = fifo(box)
    item = box.item("bash", "-c", NESTED, env={"FIFO": str(where)}, grace_ms=500)
    host.send({"op": "spawn", "items": [item]})
    grandchild, session = map(int, heard_from(where).split())
    box.pids.append(grandchild)
    started = host.started(item["attempt"])
    assert session != started["pid"]
    before = time.monotonic()
    stop(host, item["attempt"])
    body = host.exit(item["attempt"])
    assert time.monotonic() - before < 0.5 + 1
    assert (body["signal"], body["exit_code"], body["stopped_for"]) == (9, 137, "user")
    assert not alive(grandchild)


@pytest.mark.parametrize(
    "wrapper",
    [
        "setsid -f {inner}",
        "env -i setsid -f {inner}",
        "(setsid {inner} &) ; true",
        "nohup {inner} >/dev/null 2>&1 & disown",
        "env -i PATH=$PATH setsid -f sh -c 'setsid -f {inner}'",
    ],
)
def test_what_a_run_leaves_behind_is_ended_with_it(box: Box, host: Client, wrapper: str) -> None:
    where = fifo(box)
    daemon_script = box.logs / "daemon"
    daemon_script.write_text(f"echo $$ > {where}\nexec sleep 1000\n")
    inner = f"sh {daemon_script}"
    gate = fifo(box, "gate")
    script = f"{wrapper.format(inner=inner)}\ncat {gate}; echo done; exit 5"
    item = box.item("bash", "-c", script, grace_ms=300)
    host.send({"op": "spawn", "items": [item]})
    daemon = int(heard_from(where))
    box.pids.append(daemon)
    gate.write_bytes(b"")
    body = host.exit(item["attempt"])
    assert (body["exit_code"], body["stopped_for"]) == (5, None)
    assert box.log(item["attempt"]) == b"done\n"
    assert not alive(daemon)


def test_two_attempts_with_the_same_command_are_told_apart(box: Box, host: Client) -> None:
    places = [fifo(box, "one"), fifo(box, "two")]
    script = "setsid -f sh -c 'echo $$ > '$FIFO'; exec sleep 1000'; setsid -f sleep 1000; sleep 1000"
    items = [box.item("bash", "-c", script, env={"FIFO": str(place)}, grace_ms=300) for place in places]
    host.send({"op": "spawn", "items": items})
    daemons = [int(heard_from(place)) for place in places]
    box.pids += daemons
    stop(host, items[0]["attempt"])
    host.exit(items[0]["attempt"])
    assert not alive(daemons[0])
    assert alive(daemons[1])
    assert host.find("exits", items[1]["attempt"]) is None
    stop(host, items[1]["attempt"])
    host.exit(items[1]["attempt"])
    assert not alive(daemons[1])


def test_the_tag_is_inherited_through_everything(box: Box, host: Client) -> None:
    where = fifo(box)
    item = box.item("sh", "-c", f"env -i setsid -f sh -c 'echo $$ > {where}; exec sleep 1000'; exec sleep 1000")
    host.send({"op": "spawn", "items": [item]})
    daemon = int(heard_from(where))
    box.pids.append(daemon)
    assert inherited_tag(daemon) == tag_of(item["attempt"])
    assert inherited_tag(os.getpid()) is None
    stop(host, item["attempt"], grace_ms=0)
    host.exit(item["attempt"])


def test_a_stopped_process_is_ended_too(box: Box, host: Client) -> None:
    where = fifo(box)
    item = box.item("sh", "-c", f"trap 'exit 3' TERM; echo $$ > {where}; kill -STOP $$; sleep 1000 & wait")
    host.send({"op": "spawn", "items": [item]})
    pid = int(heard_from(where))
    end = time.monotonic() + 30
    while (stat := read_stat(pid)) and stat.state != "T":
        assert time.monotonic() < end
        os.sched_yield()
    stop(host, item["attempt"])
    assert host.exit(item["attempt"])["exit_code"] == 3


def test_a_fork_bomb_is_ended(box: Box, host: Client) -> None:
    where = fifo(box)
    script = (
        "import os,time,signal\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "first = os.getpid()\n"
        "end = time.monotonic() + 20\n"
        "n = 0\n"
        "while time.monotonic() < end:\n"
        "    if os.fork() == 0:\n"
        "        n += 1\n"
        "        if n > 30: time.sleep(20); os._exit(0)\n"
        "        if n == 25: open(os.environ['FIFO'], 'w').write('on\\n')\n"
        "        os.setsid()\n"
        "    else:\n"
        "        time.sleep(0.001)\n"
        "        if n: os._exit(0)\n"
        "        time.sleep(20)\n"
    )
    item = box.item(*PYTHON, script, env={"FIFO": str(where)}, grace_ms=0)
    host.send({"op": "spawn", "items": [item]})
    assert heard_from(where) == "on"
    stop(host, item["attempt"])
    assert host.exit(item["attempt"])["exit_code"] == 137
    tag = tag_of(item["attempt"])
    assert not [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if inherited_tag(pid) == tag]


def test_a_timeout_ends_any_command(box: Box, host: Client) -> None:
    items = [
        box.item("sleep", "1000", timeout_ms=150, grace_ms=300),
        box.item("sh", "-c", "trap '' TERM; while :; do sleep 1000; done", timeout_ms=150, grace_ms=300),
    ]
    host.send({"op": "spawn", "items": items})
    for item, signalled in zip(items, (15, 9), strict=True):
        body = host.exit(item["attempt"])
        assert (body["stopped_for"], body["signal"]) == ("timeout", signalled)


def test_a_foreign_holder_of_the_pipe_keeps_nobody_alive_beyond_the_grace(box: Box, host: Client) -> None:
    """The pipe goes through a Unix socket to this test, which is no part of the tree."""
    import array
    import socket

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(box.logs / "s"))
    listener.listen()
    script = (
        "import socket,array,os\n"
        "s = socket.socket(socket.AF_UNIX); s.connect(os.environ['S'])\n"
        "s.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [1]))])\n"
        "print('mine', flush=True)\n"
    )
    item = box.item(*PYTHON, script, env={"S": str(box.logs / "s")}, grace_ms=300)
    host.send({"op": "spawn", "items": [item]})
    peer, _ = listener.accept()
    _, ancillary, _, _ = peer.recvmsg(1, socket.CMSG_SPACE(4))
    (held,) = array.array("i", ancillary[0][2])
    try:
        assert host.exit(item["attempt"])["exit_code"] == 0
        assert box.log(item["attempt"]) == b"mine\n"
    finally:
        os.close(held)


def test_a_queued_attempt_can_be_stopped_before_it_starts_and_an_unknown_one_is_gone(box: Box, host: Client) -> None:
    items = [box.item("/bin/true") for _ in range(200)]
    host.send({"op": "spawn", "items": items})
    last = items[-1]["attempt"]
    stop(host, last)
    stop(host, "0190a000-0000-7000-8000-00000000dead")
    assert host.refused(last) == "stopped_user"
    assert host.wait(lambda: host.find("gone", "0190a000-0000-7000-8000-00000000dead"))["presence"] == "gone"


def test_killing_the_host_leaves_processes_whose_identity_tells_the_truth(box: Box, host: Client) -> None:
    where = fifo(box)
    item = box.item("bash", "-c", f"env -i setsid -f sh -c 'echo $$ > {where}; exec sleep 1000'; exec sleep 1000")
    host.send({"op": "spawn", "items": [item]})
    daemon = int(heard_from(where))
    started = host.started(item["attempt"])
    box.pids += [daemon, started["pid"]]
    stat = read_stat(started["pid"])
    assert stat is not None
    identity = Identity(boot_id(), started["pid"], stat.start_ticks)
    box.kill_host()
    assert inspect(identity) == "running"
    assert inspect(identity._replace(start_ticks=identity.start_ticks + 1)) == "gone"
    assert inspect(identity._replace(boot_id="00000000-0000-0000-0000-000000000000")) == "gone"
    # The next host ends what is left, also what only the tag tells about.
    again = box.start()
    assert not again.hello["attempts"]
    never = "0190a000-0000-7000-8000-00000000beef"
    again.send(
        {
            "op": "sweep",
            "items": [
                {"attempt": item["attempt"], "grace_ms": 300, **identity._asdict()},
                {"attempt": never, "grace_ms": 300},
            ],
        }
    )
    assert again.wait(lambda: again.find("gone", item["attempt"]))["presence"] == "gone"
    assert again.wait(lambda: again.find("gone", never))["presence"] == "gone"
    assert inspect(identity) == "gone"
    assert not alive(daemon)


def test_the_host_ends_alone_survivors_of_nobody(box: Box, host: Client) -> None:
    """Its own signals: SIGTERM retires, SIGINT and SIGHUP do nothing."""
    item = box.item("sleep", "1000")
    host.send({"op": "spawn", "items": [item]})
    host.started(item["attempt"])
    assert box.process is not None
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        box.process.send_signal(number)
    stop(host, item["attempt"], grace_ms=0)
    assert host.exit(item["attempt"])["signal"] in (9, 15)
    assert box.process.wait(30) == 0
