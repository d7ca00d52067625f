"""The HTTP client of the command: where the system is, who asks, and errors as `Ql3Error`.

`QL3_URL` and `QL3_TOKEN` name a system elsewhere; without them `console.json` of the data folder names the one here.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import httpx
import msgspec

from schemas.errors import REGISTRY, Ql3Error
from schemas.ids import is_slug

TIMEOUT_S: Final = 30.0
MAX_ANSWER: Final = 64 * 1024 * 1024


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


def token_of(console: Console) -> str:
    """The bearer token of the local console."""
    return f"ql3c_{console.credential_id}_{console.secret}"


def find(data: Path | None) -> tuple[str, str]:
    """URL and token: the environment's, else the data folder's. Raises `unavailable` or `unauthenticated`."""
    url, token = os.environ.get("QL3_URL"), os.environ.get("QL3_TOKEN")
    if url and data is None:
        if not token:
            raise Ql3Error("unauthenticated", "QL3_URL is set without a credential.", field="QL3_TOKEN")
        return url, token
    folder = data or Path(os.environ.get("QL3_DATA") or "ql3-data")
    try:
        console = msgspec.json.decode((folder / "console.json").read_bytes(), type=Console)
    except FileNotFoundError as error:
        raise Ql3Error(
            "unavailable",
            f"ql3 is not running on {folder}: start it with ql3 up, or name it with --data.",
            field="--data",
        ) from error
    except (OSError, msgspec.DecodeError) as error:
        raise Ql3Error("unavailable", f"{folder / 'console.json'} cannot be read.", field="--data") from error
    return console.url, token_of(console)


class Client:
    """Asks one system. Every failure is a `Ql3Error`: the gateway's own, or `unavailable` when it cannot be reached."""

    def __init__(self, url: str, token: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self._http = httpx.Client(
            base_url=url.rstrip("/"),
            headers={"Authorization": f"Bearer {token}", "User-Agent": "ql3-cli", "Accept": "application/json"},
            timeout=httpx.Timeout(timeout_s, connect=5.0),
            trust_env=False,
        )

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

    def put(self, path: str, body: Any) -> Any:
        """Replace."""
        return self.ask("PUT", path, body=body)

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
    ) -> Any:
        """One request; the decoded JSON answer, or None for an empty one."""
        headers = {"Idempotency-Key": key} if key else {}
        content: bytes | None = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            content = msgspec.json.encode(body)
        with _reaching():
            answer = self._http.request(
                method, "/api/v3" + path, params=_present(query), content=content, headers=headers
            )
        refuse(answer)
        return msgspec.json.decode(answer.content) if answer.content else None

    def raw(self, path: str, **query: Any) -> httpx.Response:
        """Exact bytes with their headers."""
        with _reaching():
            answer = self._http.get("/api/v3" + path, params=_present(query))
        refuse(answer)
        return answer

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
        """Server-sent events as (name, decoded data); ends when the server ends it."""
        headers = {"Accept": "text/event-stream"}
        timeout = httpx.Timeout(TIMEOUT_S, read=None)
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
    if not answer.is_error:
        return
    try:
        problem = msgspec.json.decode(answer.content, type=Problem)
    except msgspec.DecodeError:
        problem = Problem(code="unavailable" if answer.status_code >= 500 else "invalid")
    code = problem.code if problem.code in REGISTRY else "internal_error"
    raise Ql3Error(code, problem.detail, field=problem.field, data=problem.data)


def chunk_bytes(data: Mapping[str, Any]) -> bytes:
    """The bytes of a live log chunk."""
    return base64.b64decode(data["data"])


def segment(name: str, *, field: str) -> str:
    """A name or id as one path segment. Raises `invalid` naming the field when it can be neither."""
    if not is_slug(name):
        raise Ql3Error("invalid", "Names are lower-case letters, digits and hyphens, at most 63.", field=field)
    return name


def _events(answer: httpx.Response) -> Generator[tuple[str, Any]]:
    name, data = "message", list[str]()
    for line in answer.iter_lines():
        if not line:
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
        raise Ql3Error("unavailable", f"The gateway cannot be reached ({type(error).__name__}).") from error
