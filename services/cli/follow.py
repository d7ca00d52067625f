"""Waiting for a run and following its log over broken connections, retries and the move into the store."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Any, Final

from schemas.errors import Ql3Error
from schemas.ids import is_id
from schemas.limits import LOG_RANGE_BYTES
from schemas.runs import RUN_TERMINAL
from services.cli.client import Client, chunk_bytes, in_project
from services.cli.output import note
from services.cli.words import say

PAUSE_S: Final = 0.5
"""Before a stream that broke is opened again."""
GIVE_UP_S: Final = 60.0
"""A service that cannot be reached for so long while something is followed is an error."""

_PASSING: Final = ("unavailable", "database_unavailable", "capacity")

_CUT: Final = {"true": True, "false": False, "unknown": None}

Sink = Callable[[bytes], None]


def run_path(project: str, run: str) -> str:
    """Path of a run. Raises `not_found` when this can be the id of none."""
    if not is_id(run):
        raise Ql3Error("not_found", "There is no such run; its id is what ql3 run list shows.", field="RUN")
    return in_project(project, f"/runs/{run}")


def ended(run: dict[str, Any]) -> bool:
    """Whether a run can change no more."""
    return run["status"] in RUN_TERMINAL


class _Patience:
    """Lets what passes pass, for a bounded time since something last worked."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.worked()

    def worked(self) -> None:
        self._until = time.monotonic() + GIVE_UP_S

    def take(self, error: Ql3Error) -> None:
        """Wait a little, or raise the error when it does not pass by itself or has lasted too long."""
        if self._client.renew():
            return
        if error.code not in _PASSING or time.monotonic() > self._until:
            raise error
        time.sleep(PAUSE_S)


def changes(client: Client, project: str, run_id: str) -> Generator[dict[str, Any]]:
    """The run as it is now and after each change, until it has ended."""
    patience = _Patience(client)
    told = False
    while True:
        try:
            with client.events(f"{run_path(project, run_id)}/stream") as events:
                for name, data in events:
                    patience.worked()
                    if name != "run":
                        continue
                    if data["status"] == "waiting_approval" and not told:
                        told = True
                        how = f"ql3 approval approve {run_id}"
                        note(say(f"The run waits for an approval: {how}", f"运行等待审批：{how}"))
                    yield data
                    if ended(data):
                        return
            time.sleep(PAUSE_S)
        except Ql3Error as error:
            patience.take(error)


def wait(client: Client, project: str, run_id: str) -> dict[str, Any]:
    """The run as ended."""
    return [*changes(client, project, run_id)][-1]


class LogReader:
    """Reads one run's log into a sink, each byte once."""

    def __init__(self, client: Client, project: str, run_id: str, sink: Sink) -> None:
        self._client = client
        self._project = project
        self._run_id = run_id
        self._sink = sink
        self._offset = 0
        self.truncated: bool | None = False
        """Whether the log last read was cut at its quota; None when nobody can say whether it is all."""

    def read(self, attempt: str | None = None) -> None:
        """Read what there is now of an attempt (default: the latest).

        Raises `gone` when retention removed the log, `not_found` when there is no such run or attempt.
        """
        patience = _Patience(self._client)
        path = f"{run_path(self._project, self._run_id)}/log"
        while True:
            try:
                answer = self._client.raw(path, attempt=attempt, offset=self._offset, length=LOG_RANGE_BYTES)
            except Ql3Error as error:
                # An ended log is for a moment neither here nor there, on its way from the worker to the store.
                if error.data.get("state") != "pending":
                    raise
                patience.take(error)
                continue
            self._offset += len(answer.content)
            told = answer.headers
            # While it is written, nobody can say either; that is no news.
            self.truncated = _CUT[told["Ql3-Log-Truncated"]] if told["Ql3-Log-Ended"] == "true" else False
            if answer.content:
                self._sink(answer.content)
            if not answer.content or self._offset >= int(answer.headers["Ql3-Log-Total"]):
                return

    def follow(self) -> dict[str, Any]:
        """Read every attempt from the latest on until the run has ended; the run as ended."""
        attempt: str | None = None
        while True:
            for run in changes(self._client, self._project, self._run_id):
                if run["attempt_id"] not in (None, attempt):
                    break
                if ended(run):
                    return run
            else:
                raise AssertionError("changes end with the end")
            attempt, self._offset = run["attempt_id"], 0
            self._follow_attempt(run["attempt_id"])

    def _follow_attempt(self, attempt: str) -> None:
        path = f"{run_path(self._project, self._run_id)}/log/stream"
        patience = _Patience(self._client)
        while True:
            try:
                with self._client.events(path, attempt=attempt, offset=self._offset) as events:
                    for name, data in events:
                        patience.worked()
                        if name == "end":
                            self.truncated = data["truncated"]
                            return
                        if name == "chunk":
                            self._take(chunk_bytes(data), int(data["offset"]))
                time.sleep(PAUSE_S)
            except Ql3Error as error:
                patience.take(error)

    def _take(self, data: bytes, offset: int) -> None:
        if offset > self._offset:
            raise Ql3Error("unavailable", "A part of the live log is missing.")  # opened again from where we are
        fresh = data[self._offset - offset :]
        self._offset += len(fresh)
        if fresh:
            self._sink(fresh)
