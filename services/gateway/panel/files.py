"""Serves the panel's files from the package. There is a fixed list: no path of a request ever reaches a folder."""

from __future__ import annotations

import hashlib
from importlib.resources import files as package_files
from typing import Any, Final

from litestar import Request, Response
from litestar.handlers import HTTPRouteHandler

_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
ASSETS: Final = (
    "panel.css",
    "icon.svg",
    "app.js",
    "api.js",
    "dom.js",
    "format.js",
    "log.js",
    "view-others.js",
    "view-run.js",
    "view-runs.js",
    "view-session.js",
    "view-tasks.js",
    "words.js",
)


def handlers() -> list[HTTPRouteHandler]:
    """`/` and `/assets/…`."""
    return [_page("/", "index.html"), *(_asset(f"/assets/{name}", name) for name in ASSETS)]


def _page(path: str, name: str) -> HTTPRouteHandler:
    english = _read(name)
    chinese = english.replace(b'<html lang="en">', b'<html lang="zh-CN">')
    headers = {"Vary": "Accept-Language", "Cache-Control": "no-cache"}

    async def serve(request: Request[Any, Any, Any]) -> Response[Any]:
        content = chinese if prefers_chinese(request.headers.get("accept-language", "")) else english
        return Response(content, media_type=_TYPES["html"], headers=headers)

    serve.__annotations__ = {"request": Request, "return": Response}
    return HTTPRouteHandler(path, http_method=["GET", "HEAD"], include_in_schema=False)(serve)


def prefers_chinese(accepted: str) -> bool:
    """Whether Chinese stands before English in an Accept-Language header (its order is what browsers mean by it)."""
    for part in accepted.lower().split(","):
        language = part.partition(";")[0].strip()
        if language.startswith(("zh", "en")):
            return language.startswith("zh")
    return False


def _read(name: str) -> bytes:
    return (package_files("services.gateway.panel") / name).read_bytes()


def _asset(path: str, name: str) -> HTTPRouteHandler:
    content = _read(name)
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    kind = _TYPES[name.rpartition(".")[2]]
    headers = {"ETag": tag, "Cache-Control": "no-cache"}

    async def serve(request: Request[Any, Any, Any]) -> Response[Any]:
        if request.headers.get("if-none-match") == tag:
            return Response(b"", status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)

    serve.__annotations__ = {"request": Request, "return": Response}
    return HTTPRouteHandler(path, http_method=["GET", "HEAD"], include_in_schema=False)(serve)
