"""Waiting for a run and following its log over broken connections, retries and the move into the store."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from schemas.errors import Ql3Error
from schemas.limits import LOG_RANGE_BYTES
from schemas.runs import RUN_TERMINAL
from services.cli.client import Client, chunk_bytes, in_project, segment
from services.cli.output import note
from services.cli.words import say

PAUSE_S: Final = 0.5
"""Between looks while no stream tells of changes."""
STORE_S: Final = 60.0
"""How long a log may be between its worker and the store before that is an error."""

Sink = Callable[[bytes], None]


def run_path(project: str, run: str) -> str:
    """Path of a run."""
    return in_project(project, f"/runs/{segment(run, field='RUN')}")


def ended(run: dict[str, Any]) -> bool:
    """Whether a run can change no more."""
    return run["status"] in RUN_TERMINAL


def wait(client: Client, project: str, run_id: str) -> dict[str, Any]:
    """The run as ended."""
    told = False
    while True:
        run: dict[str, Any] = client.get(run_path(project, run_id))
        if ended(run):
            return run
        if run["status"] == "waiting_approval" and not told:
            told = True
            note(
                say(
                    f"The run waits for an approval: ql3 approval approve {run_id}",
                    f"运行等待审批:ql3 approval approve {run_id}",
                )
            )
        _await_change(client, project, run_id)


def _await_change(client: Client, project: str, run_id: str) -> None:
    # Any event is a reason to look again; a stream that cannot be had is replaced by a pause.
    try:
        with client.events(f"{run_path(project, run_id)}/stream") as events:
            for _ in events:
                return
    except Ql3Error as error:
        if error.code not in ("unavailable", "capacity"):
            raise
    time.sleep(PAUSE_S)


class LogReader:
    """Reads one run's log from a byte on, attempt after attempt, into a sink."""

    def __init__(self, client: Client, project: str, run_id: str, sink: Sink) -> None:
        self._client = client
        self._project = project
        self._run_id = run_id
        self._sink = sink
        self._attempt: str | None = None
        self._offset = 0
        self.truncated = "unknown"
        """As the API told last: true, false or unknown."""

    def read(self, attempt: str | None = None) -> bool:
        """Read what there is now, from where the last read ended; whether no more bytes will come.

        Raises `gone` when retention removed the log, `not_found` when there is no such attempt.
        """
        while True:
            params = {"attempt": attempt, "offset": self._offset, "length": LOG_RANGE_BYTES}
            answer = self._client.raw(f"{run_path(self._project, self._run_id)}/log", **params)
            self._offset = int(answer.headers["Ql3-Log-Offset"]) + len(answer.content)
            self.truncated = answer.headers.get("Ql3-Log-Truncated", "unknown")
            if answer.content:
                self._sink(answer.content)
            if self._offset >= int(answer.headers["Ql3-Log-Total"]) or not answer.content:
                return answer.headers["Ql3-Log-Ended"] == "true"

    def read_whole(self, attempt: str | None = None) -> None:
        """`read`, with patience while an ended log is on its way into the store."""
        self._patiently(attempt)

    def _patiently(self, attempt: str | None) -> bool:
        give_up = time.monotonic() + STORE_S
        while True:
            try:
                return self.read(attempt)
            except Ql3Error as error:
                if error.code != "unavailable" or error.data.get("state") != "pending" or time.monotonic() > give_up:
                    raise
            time.sleep(PAUSE_S)

    def follow(self) -> dict[str, Any]:
        """Read until the run has ended, retries included; the run as ended."""
        log_ended = False
        while True:
            run: dict[str, Any] = self._client.get(run_path(self._project, self._run_id))
            if run["attempt_id"] != self._attempt:
                # Nothing of an attempt is left out because the next one began meanwhile.
                if self._attempt is not None and not log_ended:
                    self._patiently(self._attempt)
                self._attempt, self._offset, log_ended = run["attempt_id"], 0, False
            if self._attempt is not None and run["started_at_ms"] is not None and not log_ended:
                log_ended = self._patiently(self._attempt)
            if ended(run):
                return run
            if self._attempt is not None and run["status"] == "running" and not log_ended:
                log_ended = self._stream(self._attempt)
            else:
                _await_change(self._client, self._project, self._run_id)

    def _stream(self, attempt: str) -> bool:
        path = f"{run_path(self._project, self._run_id)}/log/stream"
        try:
            with self._client.events(path, attempt=attempt, offset=self._offset) as events:
                for name, data in events:
                    if name == "end":
                        return self.read(attempt)
                    if name == "chunk":
                        self._take(chunk_bytes(data), int(data["offset"]))
        except Ql3Error as error:
            if error.code not in ("unavailable", "capacity", "not_found"):
                raise
            time.sleep(PAUSE_S)
        return False

    def _take(self, data: bytes, offset: int) -> None:
        if offset > self._offset:
            # Something was lost on the way: the ranges have it.
            self.read(self._attempt)
        fresh = data[max(0, self._offset - offset) :]
        if offset <= self._offset and fresh:
            self._offset += len(fresh)
            self._sink(fresh)
