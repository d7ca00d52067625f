"""Why an attempt cannot be started on this worker."""

from __future__ import annotations


class Refused(Exception):  # noqa: N818 - an outcome with a code, not a fault
    """This attempt cannot be started here. `code` is told; `summary` is one sentence for people."""

    def __init__(self, code: str, summary: str) -> None:
        self.code = code
        self.summary = summary
        super().__init__(code)
