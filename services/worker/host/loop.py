"""The one loop: it spawns, pumps, reaps, stops, and tells the worker. Nothing here waits for anything but `epoll`."""

from __future__ import annotations

import contextlib
import heapq
import os
import select
import signal
import sys
import time
import traceback
from collections import deque
from typing import Any, Final

from services.worker.host.attempts import Attempt, check
from services.worker.host.cgroups import CgroupError, Cgroups
from services.worker.host.identity import Identity, boot_id, read_stat
from services.worker.host.link import Link
from services.worker.host.mask import Mask
from services.worker.host.pump import Pump
from services.worker.host.receipts import Receipt, Receipts
from services.worker.host.spawn import RefusedError, Spawner, start_helper
from services.worker.host.stops import Stops
from services.worker.host.syncer import End, Syncer
from services.worker.host.tree import Trees

SPAWNS_A_TURN: Final = 8
"""So that a batch of 256 keeps neither pumps nor exits waiting for 100 ms."""
BATCH: Final = 256
GROWN_EVERY_S: Final = 0.05
LONELY_S: Final = 30.0
"""Without a worker and with nothing running the host ends itself after this long; receipts are on disk."""
RECENT: Final = 1024
CLEANUP_S: Final = 30.0
MAX_NAMED: Final = 200
"""Characters of a program or a folder that a refusal names."""


class Host:
    """All state of the process host. One thread, but for the syncer's."""

    def __init__(self, *, listen_fd: int, logs_fd: int, receipts: Receipts) -> None:
        self.epoll = select.epoll()
        self.attempts: dict[str, Attempt] = {}
        """Started and not yet durable."""
        self.mains: dict[int, str] = {}
        """First processes that were not reaped yet, by pid."""
        self.trees = Trees()
        self.cgroups = Cgroups()
        self.unacked: dict[str, Receipt] = dict(receipts.pending)
        self.refused: dict[str, dict[str, str]] = {}
        """Starts that were refused and not yet acknowledged, as the worker is told of them."""
        self.retiring = False
        self._queue: deque[dict[str, Any]] = deque()
        self._queued: set[str] = set()
        self._fresh: list[Attempt] = []
        self._pipes: dict[int, Attempt] = {}
        self._ending: set[str] = set()
        self._timers: list[tuple[float, int, str, str]] = []
        self._timer_number = 0
        self._followed: set[str] = set()
        self._grown: set[str] = set()
        self._grown_at = 0.0
        self._recent: deque[str] = deque(maxlen=RECENT)
        self._logs_fd = logs_fd
        self._spawner = Spawner()
        self._cleaners: dict[int, str] = {}
        self._stops = Stops(self)
        self._boot_id = boot_id()
        self.lonely_since = time.monotonic()
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        self.epoll.register(self._wake_r, select.EPOLLIN)
        self.link = Link(self, listen_fd)
        self._syncer = Syncer(receipts, lambda: os.fsync(logs_fd), self._ring)
        self._reported_problem: str | None = None

    # What the worker asks.

    def hello(self) -> dict[str, Any]:
        """Who this host is and what it has; after it, everything unacknowledged is told again."""
        stat = read_stat(os.getpid())
        me = Identity(self._boot_id, os.getpid(), stat.start_ticks if stat else 0)
        rows = [self._row(attempt) for attempt in self.attempts.values()]
        rows += [{"attempt": item["attempt"], "state": "queued"} for item in self._queue]
        rows += [{"attempt": attempt, "state": "ended"} for attempt in self.unacked]
        rows += [{"attempt": attempt, "state": "refused"} for attempt in self.refused]
        self.retiring = False
        return {"op": "hello", "host": me._asdict(), "attempts": rows}

    def tell_again(self) -> None:
        """Tell every unacknowledged end and refusal."""
        for receipt in self.unacked.values():
            self.link.tell("exits", receipt._asdict())
        for refusal in self.refused.values():
            self.link.tell("refused", refusal)

    def spawn(self, items: list[dict[str, Any]]) -> None:
        """Queue attempts for the start. One that is known already is told of again, never started again."""
        for item in items:
            attempt = str(item.get("attempt"))
            try:
                check(item)
            except (ValueError, KeyError, TypeError):
                self._refuse(attempt, "command_invalid")
                continue
            if attempt in self.attempts:
                self._fresh.append(self.attempts[attempt])
            elif attempt in self.unacked or attempt in self.refused or attempt in self._queued:
                continue
            elif attempt in self._recent:
                self._refuse(attempt, "already_ran")
            else:
                self._queue.append(item)
                self._queued.add(attempt)

    def kill(self, items: list[dict[str, Any]]) -> None:
        """Stop attempts: `attempt`, `reason`, optional `grace_ms`. One that is not here is told as gone."""
        wanted: list[Attempt] = []
        for item in items:
            attempt = self.attempts.get(item["attempt"])
            if attempt is None:
                self._kill_unstarted(item["attempt"], str(item["reason"]))
                continue
            if attempt.stopped is None and attempt.status is None:
                attempt.stopped = str(item["reason"])
            if "grace_ms" in item:
                attempt.grace_s = min(attempt.grace_s, item["grace_ms"] / 1000)
            wanted.append(attempt)
        self._stops.begin(wanted)

    def acknowledge(self, attempts: list[str]) -> None:
        """The worker has taken these ends and refusals."""
        for attempt in attempts:
            self.refused.pop(attempt, None)
            if self.unacked.pop(attempt, None) is not None:
                self._recent.append(attempt)
        self._syncer.give(("ack", attempts))

    def quarantine(self, attempts: list[str]) -> None:
        """The worker found these receipts' proofs wrong."""
        for attempt in attempts:
            self.unacked.pop(attempt, None)
        self._syncer.give(("quarantine", attempts))

    def follow(self, attempts: list[str]) -> None:
        """From now on tell the growth of exactly these logs."""
        self._followed = set(attempts)
        self._grown |= {name for name in self._followed & self.attempts.keys() if self.attempts[name].pump.stored}

    def sweep(self, items: list[dict[str, Any]]) -> None:
        """End what an earlier host left of these attempts, then tell each as gone (or unknown)."""
        self._stops.sweep([item for item in items if item["attempt"] not in self.attempts])

    # The loop.

    def run(self) -> None:
        """Until told to retire (or left alone) and nothing runs."""
        while not self._may_end():
            try:
                self._turn()
            except Exception:
                # A fault in the handling of one attempt must not end the host, on which all others depend.
                traceback.print_exc(file=sys.stderr)
                sys.stderr.flush()
        self.link.close()
        self._syncer.stop()

    def _turn(self) -> None:
        for fd, mask in self.epoll.poll(self._patience(), 64):
            if fd == self._wake_r:
                self._drain_wake()
                self._reap()
            elif fd in self._pipes:
                self._move(self._pipes[fd])
            else:
                self.link.ready(fd, mask)
        self._take_receipts()
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            _, _, name, what = heapq.heappop(self._timers)
            self._fire(name, what)
        self._start_some()
        if self._ending:
            self._settle()
        if self._fresh:
            for attempt in self._fresh:
                self.link.tell("started", self._started(attempt))
            self._fresh.clear()
        self._tell_grown(now)
        self.link.flush()

    def _patience(self) -> float:
        if self._queue:
            return 0.0
        until = self._timers[0][0] - time.monotonic() if self._timers else 3600.0
        if self._grown:
            until = min(until, self._grown_at + GROWN_EVERY_S - time.monotonic())
        if not self.link.connected:
            until = min(until, self.lonely_since + LONELY_S - time.monotonic())
        return max(0.0, until)

    def _may_end(self) -> bool:
        if self.attempts or self._queue or self._syncer.outstanding or self._stops.busy:
            return False
        if self.link.connected:
            self.lonely_since = time.monotonic()
        return self.retiring or time.monotonic() - self.lonely_since >= LONELY_S

    def at(self, when_s: float, attempt: str, what: str) -> None:
        """Have `what` happen to an attempt at a monotonic time."""
        self._timer_number += 1
        heapq.heappush(self._timers, (when_s, self._timer_number, attempt, what))

    def _fire(self, name: str, what: str) -> None:
        if what == "sweep":
            self._stops.sweep_again(name)
            return
        attempt = self.attempts.get(name)
        if attempt is None or attempt.phase in ("syncing", "ended"):
            return
        if attempt.phase == "cleaning":
            if what == "cleanup":
                self._end_cleanup(name)
            return  # nothing of the tree is left that an older timer could be meant for
        if what == "timeout":
            if attempt.status is None and attempt.phase == "running":
                attempt.stopped = attempt.stopped or "timeout"
                self._stops.begin([attempt])
        elif what == "kill":
            self._stops.kill(attempt)
        self._ending.add(name)

    # Starting.

    def _start_some(self) -> None:
        for _ in range(min(SPAWNS_A_TURN, len(self._queue))):
            item = self._queue.popleft()
            self._queued.discard(item["attempt"])
            try:
                self._start(item)
            except RefusedError as refused:
                self._refuse(item["attempt"], refused.code, item)
            if not self._queue:
                self._spawner.leave()

    def _start(self, item: dict[str, Any]) -> None:
        # The window that dispatcher granted, on the clock that suspend does not stop; both ends are on this machine.
        if time.clock_gettime_ns(time.CLOCK_BOOTTIME) > item.get("not_after_ns", 1 << 63):
            raise RefusedError("start_window_passed")
        try:
            read_end, write_end = os.pipe()
        except OSError:
            raise RefusedError("descriptor_limit") from None
        try:
            if "cgroup" in item:
                self._confine(item)
            pid = self._spawner.start(item, write_end)
        except BaseException:
            os.close(read_end)
            if "cgroup_path" in item:
                self.cgroups.remove(item["cgroup_path"])
            raise
        finally:
            os.close(write_end)
        os.set_blocking(read_end, False)
        secrets = [value.encode() for value in item.get("mask", ())]
        name = f"{item['attempt']}.log"
        pump = Pump(read_end, self._logs_fd, name, item["quota"], Mask(secrets) if secrets else None)
        attempt = Attempt(item, pid, pump, time.time_ns() // 1_000_000)
        self.attempts[attempt.id] = attempt
        self.mains[pid] = attempt.id
        self.trees.add(attempt.id, attempt.tag, pid)
        self._pipes[read_end] = attempt
        self.epoll.register(read_end, select.EPOLLIN)
        if item.get("timeout_ms"):
            self.at(time.monotonic() + item["timeout_ms"] / 1000, attempt.id, "timeout")
        self._fresh.append(attempt)

    def _confine(self, item: dict[str, Any]) -> None:
        try:
            item["cgroup_path"] = self.cgroups.make(item["attempt"], item["cgroup"])
        except CgroupError:
            if item.get("cgroup_required", True):
                raise RefusedError("limit_unsupported") from None

    def _refuse(self, attempt: str, code: str, item: dict[str, Any] | None = None) -> None:
        refusal = {"attempt": attempt, "code": code}
        if item is not None:
            # The program and the folder, for whoever has to mend it; further arguments may hold values.
            refusal |= {
                "command": item["argv"][0][:MAX_NAMED],
                "directory": (item.get("cwd") or "/")[:MAX_NAMED],
                "limits": ", ".join(sorted(_limits_of(item))),
            }
        self.refused[attempt] = refusal
        self.link.tell("refused", refusal)

    def _kill_unstarted(self, attempt: str, reason: str) -> None:
        if attempt in self._queued:
            self._queued.discard(attempt)
            self._queue = deque(item for item in self._queue if item["attempt"] != attempt)
            self._refuse(attempt, f"stopped_{reason}")
        elif attempt not in self.unacked and attempt not in self.refused:
            self.link.tell("gone", {"attempt": attempt, "presence": "gone"})

    # Output and ends.

    def _move(self, attempt: Attempt) -> None:
        if not attempt.pump.move():
            self._output_ended(attempt)
        if attempt.id in self._followed:
            self._grown.add(attempt.id)

    def _output_ended(self, attempt: Attempt) -> None:
        attempt.eof = True
        self._forget_pipe(attempt)
        if attempt.status is not None:
            self._ending.add(attempt.id)

    def _forget_pipe(self, attempt: Attempt) -> None:
        fd = attempt.pump.pipe
        if self._pipes.pop(fd, None) is not None:
            self.epoll.unregister(fd)
        attempt.pump.close_pipe()

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            cleaned = self._cleaners.pop(pid, None)
            if cleaned is not None:
                self._finish(self.attempts[cleaned])
                continue
            name = self.mains.pop(pid, None)
            attempt = self.attempts.get(name) if name else None
            if attempt is None:
                continue  # an adopted orphan
            attempt.status = status
            attempt.usage = (int((usage.ru_utime + usage.ru_stime) * 1000), usage.ru_maxrss)
            attempt.ended_ms = time.time_ns() // 1_000_000
            attempt.ended_s = time.monotonic()
            self._ending.add(attempt.id)
            if not attempt.eof and not attempt.pump.drain():
                self._output_ended(attempt)
        # Also when only an orphan ended: it may have been the last of a tree that is waited for.
        self._ending.update(a.id for a in self.attempts.values() if a.phase in ("stopping", "killing"))

    def _settle(self) -> None:
        """Finish every attempt whose first process ended and of whose tree nothing is left."""
        ending = [self.attempts[name] for name in self._ending if name in self.attempts]
        self._ending.clear()
        ending = [one for one in ending if one.status is not None and one.phase not in ("cleaning", "syncing")]
        if not ending:
            return
        orphans = self.trees.orphans(self.mains.keys() | self._cleaners.keys() if self._cleaners else self.mains)
        leaving: list[Attempt] = []
        for attempt in ending:
            left = orphans.get(attempt.id)
            if left and not attempt.survivors:
                if attempt.phase == "running":
                    attempt.left_behind = len(left)
                    leaving.append(attempt)
            elif attempt.eof or attempt.survivors or time.monotonic() >= attempt.ended_s + attempt.grace_s:
                self._finish(attempt)
            else:
                # Somebody outside the tree got the pipe; what is written until then is still theirs to say.
                self.at(attempt.ended_s + attempt.grace_s, attempt.id, "settle")
        if leaving:
            self._stops.begin(leaving)
        if None in orphans and not self.mains:
            self._stops.kill_unknown(orphans[None])

    def _clean(self, attempt: Attempt, command: tuple[list[str], dict[str, str]]) -> bool:
        """Start what has to run behind the tree (a container's removal); False if that cannot be."""
        attempt.cleanup = None
        try:
            pid = start_helper(*command)
        except (OSError, ValueError):
            return False
        attempt.phase = "cleaning"
        self._cleaners[pid] = attempt.id
        self.at(time.monotonic() + CLEANUP_S, attempt.id, "cleanup")
        return True

    def _end_cleanup(self, name: str) -> None:
        for pid in [pid for pid, attempt in self._cleaners.items() if attempt == name]:
            os.kill(pid, signal.SIGKILL)  # ours and not reaped yet: nobody else can have this pid

    def _finish(self, attempt: Attempt) -> None:
        if attempt.cleanup is not None and self._clean(attempt, attempt.cleanup):
            return
        attempt.phase = "syncing"
        if attempt.cgroup is not None:
            attempt.oom_killed = self.cgroups.remove(attempt.cgroup)
        if not attempt.eof:
            attempt.pump.drain()
            attempt.eof = True
            self._forget_pipe(attempt)
        self._grown.discard(attempt.id)
        self._syncer.give(
            End(attempt.id, attempt.sequence, attempt.key, attempt.facts(), attempt.context, attempt.pump)
        )

    def _take_receipts(self) -> None:
        while self._syncer.done:
            receipt = self._syncer.done.popleft()
            self._syncer.outstanding -= 1
            attempt = self.attempts.pop(receipt.attempt)
            attempt.phase = "ended"
            self.trees.remove(attempt.id, attempt.tag, attempt.pid)
            self.unacked[receipt.attempt] = receipt
            self.link.tell("exits", receipt._asdict())
        if self._syncer.problem != self._reported_problem:
            self._reported_problem = self._syncer.problem
            print(self._reported_problem or "receipts: writing again", file=sys.stderr, flush=True)

    # Telling.

    def _started(self, attempt: Attempt) -> dict[str, Any]:
        return {"attempt": attempt.id, "pid": attempt.pid, "at_ms": attempt.started_ms}

    def _row(self, attempt: Attempt) -> dict[str, Any]:
        if attempt.start_ticks is None and attempt.status is None:
            stat = read_stat(attempt.pid)
            attempt.start_ticks = stat.start_ticks if stat else None
        return attempt.row()

    def _tell_grown(self, now: float) -> None:
        if self._grown and now - self._grown_at >= GROWN_EVERY_S:
            self._grown_at = now
            for name in self._grown:
                attempt = self.attempts.get(name)
                if attempt is not None:
                    self.link.tell("grown", {"attempt": name, "size": attempt.pump.stored})
            self._grown.clear()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is ringing already
            os.write(self._wake_w, b"\0")

    def _drain_wake(self) -> None:
        try:
            while len(os.read(self._wake_r, 4096)) == 4096:
                pass
        except BlockingIOError:
            pass


def _limits_of(item: dict[str, Any]) -> dict[str, Any]:
    """The limits that were tried last: those of a cgroup before all others."""
    if "cgroup" in item and "cgroup_path" not in item and item.get("cgroup_required", True):
        return item["cgroup"]
    return item.get("limits", {})
