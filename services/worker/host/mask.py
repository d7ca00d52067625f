"""Secret values in output become `***` wherever they appear verbatim, however the output was cut into chunks.

Only what may be the beginning of a value is held back, so that a prompt without a line end still reaches a follower.
Values shorter than four bytes are not masked: they would turn ordinary output into stars and hide nothing.
"""

from __future__ import annotations

import re
from typing import Final

STARS: Final = b"***"
MIN_BYTES: Final = 4
MIN_LINE_BYTES: Final = 8
BLOCK_BYTES: Final = 1024
"""A longer value is looked for in blocks of this size, which bounds what is held back and compared."""
MAX_NEEDLES: Final = 1024


def needles(values: list[bytes]) -> list[bytes]:
    """What to look for: each value, each longer line of a value with several lines, in blocks; longest first."""
    found: set[bytes] = set()
    for value in values:
        pieces = [value]
        if b"\n" in value.strip(b"\r\n"):
            pieces += [line.strip(b"\r") for line in value.split(b"\n") if len(line.strip(b"\r")) >= MIN_LINE_BYTES]
        for piece in pieces:
            blocks = [piece[at : at + BLOCK_BYTES] for at in range(0, len(piece), BLOCK_BYTES)]
            found.update(block for block in blocks if len(block) >= MIN_BYTES)
    return sorted(found, key=lambda needle: (-len(needle), needle))[:MAX_NEEDLES]


class Mask:
    """A streaming replacer for one attempt's output."""

    def __init__(self, values: list[bytes]) -> None:
        self._needles = needles(values)
        self._pattern = re.compile(b"|".join(re.escape(needle) for needle in self._needles)) if self._needles else None
        self._held = b""

    def feed(self, chunk: bytes) -> bytes:
        """What may be written now; the rest is held until more comes."""
        if self._pattern is None:
            return chunk
        data = self._held + chunk
        out: list[bytes] = []
        at = 0
        keep = self._open_from(data, 0)
        for match in self._pattern.finditer(data):
            # A longer value may begin earlier or at the same place and need bytes that have not come yet.
            if keep <= match.start():
                break
            out += (data[at : match.start()], STARS)
            at = match.end()
            if keep < at:
                keep = self._open_from(data, at)
        out.append(data[at:keep])
        self._held = data[keep:]
        return b"".join(out)

    def finish(self) -> bytes:
        """The rest, when no more will come."""
        held, self._held = self._held, b""
        return held if self._pattern is None else self._pattern.sub(STARS, held)

    def _open_from(self, data: bytes, start: int) -> int:
        """The first position from `start` on from which the data to its end is a proper beginning of a value."""
        size = first = len(data)
        for needle in self._needles:
            at = max(start, size - len(needle) + 1)
            while at < first:
                at = data.find(needle[:1], at, first)
                if at < 0:
                    break
                if needle.startswith(data[at:]):
                    first = at
                    break
                at += 1
        return first
