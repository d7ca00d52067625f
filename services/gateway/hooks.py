"""Webhooks: `POST /hooks/<project>/<trigger>/<secret>` makes one run of the trigger's task, with the body as its input.

A signed call carries `X-Ql3-Signature: t=<seconds>,v1=<hex>`, the HMAC-SHA256 under the secret over `<seconds>.<body>`,
and is taken for five minutes around its time. `X-Ql3-Delivery` names a delivery: repeated, it gives the same run. The
secret is compared and used here; the scheduler gets its digest and nothing else.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from typing import Any, Final

import msgspec
from litestar import Request, Response
from litestar.handlers import HTTPRouteHandler

from schemas import endpoints
from schemas.errors import Ql3Error
from schemas.ids import is_id, is_slug
from schemas.runs import RunAnswer
from schemas.triggers import WebhookCall
from services.gateway.desk import Desk
from services.gateway.serve import anonymous_body_of, headers_of

PATH: Final = "/hooks/{project:str}/{trigger:str}/{secret:str}"
BODY_BYTES: Final = 60 * 1024
WINDOW_S: Final = 300
SIGNATURE: Final = "x-ql3-signature"
DELIVERY: Final = "x-ql3-delivery"

_signature = re.compile(r"t=([0-9]{1,12}),v1=([0-9a-f]{64})")
_secret = re.compile(r"[A-Za-z0-9_-]{43}")


def new_secret() -> str:
    """A secret for a webhook's path."""
    return secrets.token_urlsafe(32)


def digest_of(secret: str) -> str:
    """What the scheduler knows of a secret."""
    return hashlib.sha256(secret.encode()).hexdigest()


def path_of(project: str, trigger: str, secret: str) -> str:
    """Where a webhook is called."""
    return f"/hooks/{project}/{trigger}/{secret}"


def sign(secret: str, at_s: int, body: bytes) -> str:
    """The signature header of a call."""
    return f"t={at_s},v1={_mac(secret, at_s, body)}"


def handler(desk: Desk) -> HTTPRouteHandler:
    """The route."""

    async def call(request: Request[Any, Any, Any]) -> Response[Any]:
        answer = await _call(desk, request)
        return Response(
            msgspec.json.encode({"run": answer.run.id, "status": answer.run.status, "replayed": answer.replayed}),
            status_code=200 if answer.replayed else 202,
            media_type="application/json",
        )

    call.__annotations__ = {"request": Request, "return": Response}
    return HTTPRouteHandler(PATH, http_method="POST", include_in_schema=False)(call)


async def _call(desk: Desk, request: Request[Any, Any, Any]) -> RunAnswer:
    project, trigger = request.path_params["project"], request.path_params["trigger"]
    secret: str = request.path_params["secret"]
    if not (is_slug(project) and is_id(trigger) and _secret.fullmatch(secret)):
        raise Ql3Error("not_found", field="trigger")
    headers = headers_of(request)
    body = await anonymous_body_of(request, headers, BODY_BYTES)
    signature = headers.get(SIGNATURE)
    if signature is not None:
        _check(signature, secret, body, desk.clock.now_ms() // 1000)
    question = WebhookCall(
        project=project,
        trigger=trigger,
        token_digest=digest_of(secret),
        signed=signature is not None,
        delivery=_delivery(headers, signature),
        payload=_payload(headers, body),
    )
    return await desk.bus.request(endpoints.TRIGGERS_CALL, question)


def _check(signature: str, secret: str, body: bytes, now_s: int) -> None:
    found = _signature.fullmatch(signature)
    if found is None or not hmac.compare_digest(found[2], _mac(secret, int(found[1]), body)):
        raise Ql3Error("unauthenticated", "The signature does not fit the body.", field=SIGNATURE)
    if abs(now_s - int(found[1])) > WINDOW_S:
        raise Ql3Error("unauthenticated", "The signature is too old, or from the future.", field=SIGNATURE)


def _mac(secret: str, at_s: int, body: bytes) -> str:
    return hmac.new(secret.encode(), f"{at_s}.".encode() + body, hashlib.sha256).hexdigest()


def _delivery(headers: dict[str, str], signature: str | None) -> str:
    named = headers.get(DELIVERY)
    if named is None:
        # A signed call that comes again unchanged is the same delivery; without a signature nothing tells.
        return hashlib.sha256(signature.encode()).hexdigest() if signature else secrets.token_hex(16)
    if not (0 < len(named) <= 128 and named.isascii() and named.isprintable()):
        raise Ql3Error("invalid", "Use 1 to 128 printable ASCII characters.", field=DELIVERY)
    return named


def _payload(headers: dict[str, str], body: bytes) -> Any:
    """JSON as data, other text as text."""
    if not body:
        return None
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        if kind == "application/json" or kind.endswith("+json"):
            return msgspec.json.decode(body)
        return body.decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Ql3Error("invalid", "The body is neither JSON nor text.", field="body") from error
