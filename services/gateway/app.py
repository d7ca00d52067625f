"""The application: probes, the panel's files, the API's operations, and its description."""

from __future__ import annotations

from typing import Any, cast

import msgspec
from litestar import Litestar, Request, Response
from litestar.config.app import AppConfig
from litestar.handlers import HTTPRouteHandler

from schemas.identity import DEFAULT_PROJECT
from services.gateway import hooks
from services.gateway.desk import Desk
from services.gateway.front import App, Front
from services.gateway.openapi import page, specification
from services.gateway.operations import PREFIX
from services.gateway.panel import files
from services.gateway.peers import peer_of
from services.gateway.routes import ALL
from services.gateway.serve import handlers, headers_of, on_error
from services.kit import metrics


def create_app(desk: Desk) -> Front:
    """The ASGI application of one gateway."""
    app = Litestar(
        route_handlers=[
            *handlers(ALL, desk),
            hooks.handler(desk),
            *_probes(desk),
            _metrics(desk),
            *_description(),
            *files.handlers(),
        ],
        exception_handlers={Exception: on_error},
        openapi_config=None,
        debug=False,
        # Litestar would configure the process's logs; that is the composition root's.
        logging_config=None,
        on_app_init=[_without_after_thoughts],
    )
    return Front(cast("App", app), desk.settings)


def _without_after_thoughts(config: AppConfig) -> AppConfig:
    # Bodies are read and bounded by `serve`; Litestar must not read them first.
    config.request_max_body_size = None
    return config


def _probes(desk: Desk) -> list[HTTPRouteHandler]:
    async def livez(request: Request[Any, Any, Any]) -> Response[Any]:
        return Response(b'{"alive":true}', media_type="application/json")

    async def readyz(request: Request[Any, Any, Any]) -> Response[Any]:
        report = await desk.readiness.report()
        return Response(
            msgspec.json.encode(report), status_code=200 if report.ready else 503, media_type="application/json"
        )

    return [plain_handler("/livez", livez), plain_handler("/readyz", readyz)]


def _metrics(desk: Desk) -> HTTPRouteHandler:
    """The numbers of this process, for whoever may read the runs of the default project."""

    async def read(request: Request[Any, Any, Any]) -> Response[Any]:
        caller = await desk.authenticator.authenticate("GET", headers_of(request), peer_of(request.scope, desk.proxies))
        await desk.policy.require(caller.actor, DEFAULT_PROJECT, "run.read")
        return Response(
            await metrics.exposition(), media_type=metrics.CONTENT_TYPE, headers={"Cache-Control": "no-store"}
        )

    return plain_handler("/metrics", read)


def _description() -> list[HTTPRouteHandler]:
    async def openapi_json(request: Request[Any, Any, Any]) -> Response[Any]:
        return Response(msgspec.json.encode(specification()), media_type="application/json")

    async def openapi_page(request: Request[Any, Any, Any]) -> Response[Any]:
        return Response(page(), media_type="text/html; charset=utf-8")

    return [plain_handler(f"{PREFIX}/openapi.json", openapi_json), plain_handler(f"{PREFIX}/schema", openapi_page)]


def plain_handler(path: str, run: Any) -> HTTPRouteHandler:
    """A handler outside the table of operations: whether somebody must be signed in is its own matter."""
    run.__annotations__ = {"request": Request, "return": Response}
    return HTTPRouteHandler(path, http_method=["GET", "HEAD"], include_in_schema=False)(run)
