"""Output: byte for byte, to the quota, marked when cut, masked when secret, in flat memory."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.host.mask import Mask, needles
from services.worker.host.pump import CHUNK, WIDE_AFTER, Pump
from tests.worker.conftest import Box, Client

PYTHON = (sys.executable, "-I", "-S", "-c")


def run(box: Box, host: Client, *argv: str, **more: object) -> tuple[dict, bytes | None]:
    item = box.item(*argv, **more)
    host.send({"op": "spawn", "items": [item]})
    return host.exit(item["attempt"]), box.log(item["attempt"])


def test_nul_invalid_utf8_and_carriage_returns_stay_what_they_are(box: Box, host: Client) -> None:
    script = "import os; os.write(1, bytes(range(256)) * 2 + b'\\r\\n\\xff\\xfe\\xed\\xa0\\x80')"
    body, log = run(box, host, *PYTHON, script)
    assert log == bytes(range(256)) * 2 + b"\r\n\xff\xfe\xed\xa0\x80"
    assert body["log"]["produced"] == len(log)


def test_stdout_and_stderr_keep_their_order_byte_by_byte(box: Box, host: Client) -> None:
    script = "import os\nfor i in range(5000): os.write(1 + i % 2, bytes([97 + i % 26]))"
    _, log = run(box, host, *PYTHON, script)
    assert log == bytes(97 + i % 26 for i in range(5000))


def test_200_mb_of_mixed_output_equal_the_processes_own_digest(box: Box, host: Client) -> None:
    script = (
        "import os, hashlib, random\n"
        "r, h, left, block = random.Random(7), hashlib.sha256(), 200_000_000, os.urandom(1 << 20)\n"
        "while left:\n"
        "    n = min(left, r.choice((1, 7, 4096, 65537, 1 << 20)))\n"
        "    os.write(1 + (n & 1), block[:n]) == n or exit(9)\n"
        "    h.update(block[:n]); left -= n\n"
        "open(os.environ['OUT'], 'w').write(h.hexdigest())\n"
    )
    item = box.item(*PYTHON, script, quota=1 << 30, env={"OUT": str(box.logs / "digest")})
    host.send({"op": "spawn", "items": [item]})
    body = host.exit(item["attempt"])
    assert body["exit_code"] == 0
    assert (body["log"]["size"], body["log"]["produced"], body["log"]["cut"]) == (200_000_000, 200_000_000, None)
    with (box.logs / f"{item['attempt']}.log").open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == (box.logs / "digest").read_text()
    assert box.process is not None
    status = dict(line.split(":", 1) for line in Path(f"/proc/{box.process.pid}/status").read_text().splitlines())
    assert int(status["VmHWM"].split()[0]) < 24 * 1024


def test_what_is_beyond_the_quota_is_drained_and_counted_in_flat_memory(box: Box, host: Client) -> None:
    body, log = run(box, host, "sh", "-c", "yes 'a line of output' | head -c 300000000", quota=70_000)
    assert body["exit_code"] == 0
    assert (body["log"]["size"], body["log"]["produced"], body["log"]["cut"]) == (70_000, 300_000_000, "quota")
    assert log == (b"a line of output\n" * 5000)[:70_000]
    assert box.process is not None
    status = dict(line.split(":", 1) for line in Path(f"/proc/{box.process.pid}/status").read_text().splitlines())
    assert int(status["VmHWM"].split()[0]) < 24 * 1024


def test_a_million_lines_written_one_by_one(box: Box, host: Client) -> None:
    script = "import os\nfor i in range(1000000): os.write(1, b'%07d\\n' % i)"
    body, log = run(box, host, *PYTHON, script)
    assert body["log"]["size"] == 8_000_000
    assert log == b"".join(b"%07d\n" % i for i in range(1_000_000))


@pytest.mark.parametrize(("size", "quota"), [(70_000, 65_536), (65_536, 65_536), (3_000_000, 1_000_001), (5, 0)])
def test_the_quota_is_exact_and_says_so(box: Box, host: Client, size: int, quota: int) -> None:
    script = f"import os\ndata = bytes(i % 251 for i in range({size}))\nwhile data: data = data[os.write(1, data):]\n"
    body, log = run(box, host, *PYTHON, script, quota=quota)
    expected = bytes(i % 251 for i in range(size))[:quota]
    assert body["exit_code"] == 0
    assert (log or b"") == expected
    assert body["log"]["size"] == min(size, quota)
    assert body["log"]["produced"] == size
    assert body["log"]["cut"] == ("quota" if size > quota else None)
    assert body["log"]["truncated"] == (size > quota)
    if body["log"]["sha256"]:
        assert body["log"]["sha256"] == hashlib.sha256(expected).hexdigest()


def test_a_file_in_the_way_is_not_overwritten_and_the_run_goes_on(box: Box, host: Client) -> None:
    item = box.item("echo", "hello")
    target = box.logs / "elsewhere"
    target.write_text("old")
    (box.logs / f"{item['attempt']}.log").symlink_to(target)
    host.send({"op": "spawn", "items": [item]})
    body = host.exit(item["attempt"])
    assert body["exit_code"] == 0
    assert (body["log"]["size"], body["log"]["produced"], body["log"]["cut"]) == (0, 6, "io_error")
    assert body["log"]["truncated"]
    assert target.read_text() == "old"


def test_a_follower_hears_of_growth_while_it_runs(box: Box, host: Client) -> None:
    gate = box.logs / "gate"
    os.mkfifo(gate)
    item = box.item("sh", "-c", f"printf 'Password: '; cat {gate}")
    host.send({"op": "spawn", "items": [item]})
    host.send({"op": "follow", "attempts": [item["attempt"]]})
    assert host.wait(lambda: host.find("grown", item["attempt"]))["size"] == 10
    gate.write_bytes(b"x" * 100)
    host.exit(item["attempt"])
    assert len(box.log(item["attempt"]) or b"") == 110


def test_secret_values_are_masked_even_across_writes(box: Box, host: Client) -> None:
    script = "import os\nfor c in b'a token-4711 and tok': os.write(1, bytes([c]))\nos.write(2, b' token-4711')"
    body, log = run(box, host, *PYTHON, script, mask=["token-4711", "other"])
    assert log == b"a *** and tok ***"
    assert body["log"]["sha256"] == hashlib.sha256(log).hexdigest()
    assert "token-4711" not in json.dumps(body)


def chunked(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@given(
    st.lists(st.sampled_from([b"ab", b"abab", b"abcabc", b"\x00\xff", b"xyzzy", b"c"])), st.lists(st.integers(0, 99))
)
def test_masking_does_not_depend_on_the_chunks(parts: list[bytes], cuts: list[int]) -> None:
    secrets = [b"abab", b"abcabcab", b"babc", b"xyzzyxy"]
    data = b"".join(parts)
    whole = Mask(secrets)
    expected = whole.feed(data) + whole.finish()
    mask = Mask(secrets)
    assert b"".join(mask.feed(chunk) for chunk in chunked(data, cuts)) + mask.finish() == expected
    assert not any(secret in expected for secret in needles(secrets))


def test_only_the_possible_beginning_of_a_secret_is_held_back() -> None:
    mask = Mask([b"secret-value"])
    assert mask.feed(b"Password: ") == b"Password: "
    assert mask.feed(b"it is sec") == b"it is "
    assert mask.feed(b"ond") == b"second"


def test_each_long_line_of_a_secret_with_lines_is_masked() -> None:
    key = b"-----BEGIN KEY-----\nMIIabcdefgh\nshort\n-----END KEY-----\n"
    mask = Mask([key, b"abc"])
    assert mask.feed(b"x MIIabcdefgh abc short\n") + mask.finish() == b"x *** abc short\n"


@given(
    data=st.binary(max_size=3000).map(lambda some: some * 150),
    cuts=st.lists(st.integers(0, 450_000), max_size=12),
    quota=st.integers(0, 460_000),
)
def test_any_chunking_gives_the_same_bytes(tmp_path_factory: pytest.TempPathFactory, data, cuts, quota) -> None:
    directory = tmp_path_factory.mktemp("pump")
    fd = os.open(directory, os.O_RDONLY)
    read_end, write_end = os.pipe2(os.O_NONBLOCK)
    pump = Pump(read_end, fd, "log", quota, None)
    try:
        for chunk in chunked(data, cuts):
            view = memoryview(chunk)
            while view:
                try:
                    view = view[os.write(write_end, view) :]
                except BlockingIOError:
                    assert pump.move()
            pump.move()
        os.close(write_end)
        assert not pump.drain()
        path = directory / "log"
        assert (path.read_bytes() if path.exists() else b"") == data[:quota]
        assert (pump.stored, pump.written) == (min(quota, len(data)), len(data))
        assert pump.cut == ("quota" if len(data) > quota else None)
        if len(data) <= min(quota, WIDE_AFTER):
            assert pump.sha256() == hashlib.sha256(data).hexdigest()
    finally:
        pump.close()
        os.close(fd)


def test_a_full_disk_is_said_and_disturbs_nobody(box: Box, host: Client) -> None:
    # /dev/full gives ENOSPC at every write; O_EXCL keeps the pump from opening it, so the writer is handed to it open.
    read_end, write_end = os.pipe2(os.O_NONBLOCK)
    pump = Pump(read_end, -1, "log", CHUNK, None)
    pump.file = os.open("/dev/full", os.O_WRONLY)
    try:
        os.write(write_end, b"x" * 1000)
        assert pump.move()
        os.write(write_end, b"y" * 1000)
        os.close(write_end)
        assert not pump.drain()
        assert (pump.stored, pump.written, pump.cut) == (0, 2000, "disk_full")
    finally:
        pump.close()
