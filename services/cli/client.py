"""The HTTP client of the command: where the system is, who asks, and errors as `Ql3Error`.

`QL3_URL` and `QL3_TOKEN` name a system elsewhere; without them `console.json` of the data folder names the one here.
"""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import os
import time
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import msgspec

from schemas.errors import REGISTRY, Ql3Error
from schemas.ids import is_slug
from schemas.limits import LIST_ITEMS

TIMEOUT_S: Final = 30.0
STREAM_IDLE_S: Final = 60.0
"""The gateway sends at least a comment this often; longer silence is a dead connection."""
TRIES: Final = 3
EXIT_BY_OUTCOME: Final[Mapping[str, int]] = {"succeeded": 0, "failed": 1, "cancelled": 3, "timed_out": 4}
_BY_STATUS: Final = {401: "unauthenticated", 403: "forbidden", 404: "not_found", 413: "too_large"}
_TRANSIENT: Final = frozenset({"unavailable", "commit_unknown", "database_unavailable", "capacity"})


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """A problem+json answer (RFC 9457) as the gateway writes it."""

    code: str = "internal_error"
    detail: str | None = None
    field: str | None = None
    data: dict[str, Any] = {}


class Console(msgspec.Struct, frozen=True, kw_only=True):
    """`console.json`, written by `ql3 up` once it listens."""

    url: str
    credential_id: str
    secret: str
    nats_url: str | None = None

    def __repr__(self) -> str:  # a secret does not belong into a traceback
        return f"Console({self.url})"


def token_of(console: Console) -> str:
    """The bearer token of the local console."""
    return f"ql3c_{console.credential_id}_{console.secret}"


def data_folder(data: Path | None) -> Path:
    """The data folder: `--data`, else QL3_DATA, else ./ql3-data."""
    return data or Path(os.environ.get("QL3_DATA") or "ql3-data")


def read_console(data: Path | None) -> Console:
    """What the running `ql3 up` wrote into its data folder. Raises `unavailable`, naming the folder."""
    folder = data_folder(data)
    try:
        return msgspec.json.decode((folder / "console.json").read_bytes(), type=Console)
    except FileNotFoundError:
        raise Ql3Error(
            "unavailable",
            f"ql3 is not running on {folder}: start it with ql3 up, or name it with --data.",
            field="--data",
        ) from None
    except (OSError, msgspec.DecodeError):
        # The decoder's error may hold what it read.
        raise Ql3Error("unavailable", f"{folder / 'console.json'} cannot be read.", field="--data") from None


def find(data: Path | None) -> tuple[str, str]:
    """URL and token: the environment's, else the data folder's. Raises `unavailable`, `unauthenticated`, `invalid`."""
    url, token = os.environ.get("QL3_URL"), os.environ.get("QL3_TOKEN")
    if url and data is None:
        if not token:
            raise Ql3Error("unauthenticated", "QL3_URL is set without a credential.", field="QL3_TOKEN")
        try:
            parts = httpx.URL(url)
            urlsplit(url)
        except (httpx.InvalidURL, ValueError):
            parts = httpx.URL()
        if parts.scheme not in ("http", "https") or not parts.host or (parts.port or 0) > 65_535:
            raise Ql3Error("invalid", "Write http://host:port or https://host.", field="QL3_URL")
        token = token.strip()
        if not (token.isascii() and token.isprintable()):
            raise Ql3Error("invalid", "This is no credential; give it as it was issued.", field="QL3_TOKEN")
        return url, token
    console = read_console(data)
    return console.url, token_of(console)


def connect(data: Path | None) -> Client:
    """A client of the system that `find` finds."""
    url, token = find(data)
    return Client(url, token, where=lambda: find(data))


class Client:
    """Asks one system. Every failure is a `Ql3Error`: the gateway's own, or `unavailable` when it cannot be reached.

    `where` tells URL and token anew, for `renew`.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        timeout_s: float = TIMEOUT_S,
        where: Callable[[], tuple[str, str]] | None = None,
    ) -> None:
        self._found = (url, token)
        self._timeout_s = timeout_s
        self._where = where
        self._http = self._open()

    def _open(self) -> httpx.Client:
        url, token = self._found
        return httpx.Client(
            base_url=url.rstrip("/"),
            headers={"Authorization": f"Bearer {token}", "User-Agent": "ql3-cli", "Accept": "application/json"},
            timeout=httpx.Timeout(self._timeout_s, connect=5.0),
            # A proxy of the environment is for the world outside, never for this machine.
            trust_env=not _is_loopback(url),
        )

    @property
    def url(self) -> str:
        """Where the system is."""
        return self._found[0].rstrip("/")

    def renew(self) -> bool:
        """Whether the system is elsewhere or takes another token now: a `ql3 up` that was started again."""
        try:
            found = self._where() if self._where else self._found
        except Ql3Error:
            return False
        if found == self._found:
            return False
        self._found = found
        self._http.close()
        self._http = self._open()
        return True

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def get(self, path: str, **query: Any) -> Any:
        """A JSON answer; a query value of None is left out."""
        return self.ask("GET", path, query=query)

    def post(self, path: str, body: Any = None, *, key: str | None = None) -> Any:
        """Send JSON; `key` makes a repeat harmless."""
        return self.ask("POST", path, body={} if body is None else body, key=key)

    def put(self, path: str, body: Any, *, key: str | None = None) -> Any:
        """Replace."""
        return self.ask("PUT", path, body=body, key=key)

    def delete(self, path: str) -> Any:
        """Remove."""
        return self.ask("DELETE", path)

    def ask(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: Any = None,
        key: str | None = None,
        repeat: bool = True,
    ) -> Any:
        """One request; the decoded JSON answer, or None for an empty one.

        It is sent again when its answer is lost, unless `repeat` is off: for what the gateway does not remember.
        """
        # Everything that changes something bears a key, so that it may be sent again when its answer is lost.
        headers = {} if method == "GET" else {"Idempotency-Key": key or str(uuid.uuid4())}
        content: bytes | None = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            content = msgspec.json.encode(body)
        answer = self._send(method, "/api/v3" + path, query=query, content=content, headers=headers, repeat=repeat)
        if not answer.content:
            return None
        try:
            return msgspec.json.decode(answer.content)
        except msgspec.DecodeError:
            raise Ql3Error("unavailable", "What answered there is not ql3.", field="QL3_URL") from None

    def items(self, path: str, limit: int, **query: Any) -> dict[str, Any]:
        """Up to `limit` items of a list, over as many pages as that takes, as one list document."""
        found: list[Any] = []
        cursor: str | None = None
        while True:
            page = self.get(path, **query, limit=min(LIST_ITEMS, limit - len(found)), cursor=cursor)
            found += page["items"]
            cursor = page["next"]
            if cursor is None or len(found) >= limit:
                return {"items": found, "next": cursor}

    def root(self, path: str) -> httpx.Response:
        """A GET outside of the API (`/livez`, `/readyz`), whatever its status."""
        with _reaching():
            return self._http.get(path)

    def _send(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        repeat: bool = True,
    ) -> httpx.Response:
        for attempt in range(1, TRIES + 1):
            try:
                with _reaching():
                    answer = self._http.request(method, path, params=_present(query), content=content, headers=headers)
                refuse(answer)
                return answer
            except Ql3Error as error:
                # Nobody listens (no state to wait for): the person is told at once.
                passing = error.code in _TRANSIENT and not error.data.keys() & {"state", "refused"}
                if not repeat or not passing or attempt == TRIES:
                    raise
            time.sleep(0.3 * attempt)
        raise AssertionError

    def raw(self, path: str, **query: Any) -> httpx.Response:
        """Exact bytes with their headers."""
        return self._send("GET", "/api/v3" + path, query=query)

    @contextmanager
    def stream_bytes(self, path: str, **query: Any) -> Generator[httpx.Response]:
        """Exact bytes as they come, for what may be large."""
        with _reaching(), self._http.stream("GET", "/api/v3" + path, params=_present(query)) as answer:
            if answer.is_error:
                answer.read()
                refuse(answer)
            yield answer

    @contextmanager
    def events(self, path: str, **query: Any) -> Generator[Generator[tuple[str, Any]]]:
        """Server-sent events as (name, decoded data); ends when the server ends it, raises what it sends as an error.

        Raises `unavailable` when the connection breaks: whoever follows asks again from where it was.
        """
        headers = {"Accept": "text/event-stream"}
        timeout = httpx.Timeout(TIMEOUT_S, connect=5.0, read=STREAM_IDLE_S)
        with (
            _reaching(),
            self._http.stream(
                "GET", "/api/v3" + path, params=_present(query), headers=headers, timeout=timeout
            ) as answer,
        ):
            if answer.is_error:
                answer.read()
                refuse(answer)
            yield _events(answer)


def refuse(answer: httpx.Response) -> None:
    """Raise the answer's problem as a `Ql3Error`."""
    if answer.is_error:
        raise _problem(answer.content, answer.status_code)


def _problem(content: bytes, status: int) -> Ql3Error:
    try:
        problem = msgspec.json.decode(content, type=Problem)
    except msgspec.DecodeError:
        return Ql3Error(_BY_STATUS.get(status, "unavailable" if status >= 500 else "invalid"))
    code = problem.code if problem.code in REGISTRY else "internal_error"
    return Ql3Error(code, problem.detail, field=problem.field, data=problem.data)


def chunk_bytes(data: Mapping[str, Any]) -> bytes:
    """The bytes of a live log chunk."""
    return base64.b64decode(data["data"])


def segment(name: str, *, field: str) -> str:
    """A name or id as one path segment. Raises `invalid` naming the field when it can be neither."""
    if not is_slug(name):
        raise Ql3Error("invalid", "Names are lower-case letters, digits and hyphens, at most 63.", field=field)
    return name


def in_project(project: str, rest: str) -> str:
    """A path inside of a project. Raises `invalid`, naming the option."""
    return f"/projects/{segment(project, field='--project')}{rest}"


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _events(answer: httpx.Response) -> Generator[tuple[str, Any]]:
    name, data = "message", list[str]()
    for line in answer.iter_lines():
        if not line:
            if name == "error":
                raise _problem("\n".join(data).encode(), 500)
            if data:
                yield name, msgspec.json.decode("\n".join(data))
            name, data = "message", []
        elif line.startswith("event:"):
            name = line[6:].strip()
        elif line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))


def _present(query: Mapping[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in (query or {}).items() if value is not None}


@contextmanager
def _reaching() -> Generator[None]:
    try:
        yield
    except httpx.HTTPError as error:
        refused = {"refused": True} if isinstance(error, httpx.ConnectError) else None
        raise Ql3Error(
            "unavailable", f"The gateway cannot be reached ({type(error).__name__}).", data=refused
        ) from error
