"""Slows down wrong attempts, by address and by account. In memory: a restart forgives, a flood cannot fill it."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Generator
from dataclasses import dataclass

from schemas.errors import Ql3Error
from services.kit.clock import Clock

FREE = 5
"""Wrong attempts that cost nothing; the next waits 2 s, then 4, 8, … up to 15 minutes."""
FREE_OF_ADDRESS = 20
"""Of an address, behind which many people may be."""
WAIT_MAX_MS = 15 * 60_000
FORGET_MS = 30 * 60_000
ENTRIES = 4096


@dataclass(slots=True)
class _Record:
    wrong: int = 0
    last_ms: int = 0
    until_ms: int = 0


class Throttle:
    """Counts attempts under keys such as `address:…` and `account:…`.

    An attempt counts as wrong from its beginning, so that many at once are not free; a right one takes that back.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._records: OrderedDict[str, _Record] = OrderedDict()

    def attempt(self, *keys: str) -> None:
        """Counts an attempt. Raises `rate_limited` with `retry_after_s`, counting nothing, while a key has to wait."""
        now = self._clock.now_ms()
        wait_ms = max((self._records[key].until_ms - now for key in keys if key in self._records), default=0)
        if wait_ms > 0:
            raise Ql3Error("rate_limited", data={"retry_after_s": -(-wait_ms // 1000)})
        for key in keys:
            record = self._records.setdefault(key, _Record())
            if now - record.last_ms > FORGET_MS:
                record.wrong = 0
            record.wrong += 1
            record.last_ms = now
            beyond = record.wrong - _free(key)
            if beyond > 0:
                record.until_ms = now + min(WAIT_MAX_MS, 1000 * 2 ** min(beyond, 20))
            self._records.move_to_end(key)
        while len(self._records) > ENTRIES:
            self._records.popitem(last=False)

    @contextlib.contextmanager
    def attempting(self, *keys: str) -> Generator[None]:
        """`attempt`; one that comes to nothing because something is away is nobody's wrong attempt."""
        self.attempt(*keys)
        try:
            yield
        except Ql3Error as error:
            if error.kind.status >= 500:
                for key in keys:
                    self._void(key)
            raise

    def _void(self, key: str) -> None:
        record = self._records.get(key)
        if record is not None:
            record.wrong -= 1
            if record.wrong <= _free(key):  # what was set by others, wrong ones, stays
                record.until_ms = 0

    def undo(self, key: str) -> None:
        """That attempt was right. What was wrong before still counts: a right name must not launder guesses."""
        record = self._records.get(key)
        if record is not None:
            record.wrong -= 1
            record.until_ms = 0

    def clear(self, key: str) -> None:
        """Whoever this key stands for has proved it in full."""
        self._records.pop(key, None)


def _free(key: str) -> int:
    return FREE if key.startswith("account:") else FREE_OF_ADDRESS
