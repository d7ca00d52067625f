"""The API described: OpenAPI 3.1 made from the table of operations, and a page that reads without JavaScript.

`python -m services.gateway.openapi` prints the document; a copy stands in `docs/openapi.json`.
"""

from __future__ import annotations

import functools
import html
import re
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from schemas.errors import REGISTRY
from services.gateway.operations import PREFIX, Nothing, Operation
from services.gateway.problem import MEDIA_TYPE, Problem
from services.gateway.routes import ALL
from services.gateway.sessions import COOKIE, CSRF_HEADER

_PARAMETER = re.compile(r"\{(\w+)\}")
_REFERENCE = "#/components/schemas/{name}"


@functools.cache
def specification() -> dict[str, Any]:
    """The OpenAPI document."""
    named = [operation.reads for operation in ALL if operation.method != "GET" and operation.reads is not Nothing]
    answered = [operation.answers for operation in ALL if operation.answers is not None]
    wanted: list[Any] = [*named, *answered, Problem]
    schemas, components = msgspec.json.schema_components(wanted, ref_template=_REFERENCE)
    by_type: dict[Any, Any] = dict(zip(map(str, wanted), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in ALL:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, by_type)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "ql3",
            "version": "3",
            "description": "Runs people's scripts on schedule, on demand or on approval, and never loses, doubles or "
            "forgets a run. Errors are application/problem+json with a stable `code`; lists are "
            '`{"items": [...], "next": cursor|null}`; times are milliseconds UTC.',
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{"credential": []}, {"session": [], "csrf": []}],
        "tags": [{"name": tag} for tag in dict.fromkeys(operation.tag for operation in ALL)],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "credential": {"type": "http", "scheme": "bearer", "bearerFormat": "ql3c_<id>_<secret>"},
                "session": {"type": "apiKey", "in": "cookie", "name": COOKIE},
                "csrf": {"type": "apiKey", "in": "header", "name": "Ql3-Csrf"},
            },
        },
        "x-error-codes": {code: {"status": kind.status, "mend": kind.mend} for code, kind in REGISTRY.items()},
    }


def _operation(operation: Operation, by_type: Mapping[str, Any]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": operation.name,
        "tags": [operation.tag],
        "summary": operation.summary,
        "parameters": [*_path_parameters(operation), *_query_parameters(operation)],
        "responses": {
            str(operation.status): {"description": "Done.", "content": _content(operation, by_type)},
            "default": {
                "description": "Refused or failed.",
                "content": {MEDIA_TYPE: {"schema": by_type[str(Problem)]}},
            },
        },
    }
    if operation.method != "GET":
        if operation.keep != "no":
            described["parameters"].append(
                {
                    "name": "Idempotency-Key",
                    "in": "header",
                    "required": False,
                    "description": "The same key with the same request is done once (24 h).",
                    "schema": {"type": "string", "maxLength": 255},
                }
            )
        if operation.reads is not Nothing:
            body = {"application/json": {"schema": by_type[str(operation.reads)]}}
            described["requestBody"] = {"required": True, "content": body}
    if operation.public:
        described["security"] = []
    return described


def _content(operation: Operation, by_type: Mapping[str, Any]) -> dict[str, Any]:
    if operation.produces == "bytes":
        return {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    if operation.produces == "events":
        return {"text/event-stream": {"schema": {"type": "string"}}}
    return {"application/json": {"schema": by_type[str(operation.answers)]}}


def _path_parameters(operation: Operation) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PARAMETER.findall(operation.path)
    ]


def _query_parameters(operation: Operation) -> list[dict[str, Any]]:
    if operation.method != "GET":
        return []
    (schema,), components = msgspec.json.schema_components([operation.reads], ref_template="{name}")
    properties = components[schema["$ref"]].get("properties", {})
    return [
        {"name": name, "in": "query", "required": False, "explode": False, "schema": described}
        for name, described in properties.items()
    ]


@functools.cache
def page() -> str:
    """The API on one page."""
    tags: dict[str, list[Operation]] = {}
    for operation in ALL:
        tags.setdefault(operation.tag, []).append(operation)
    sections = "".join(_section(tag, operations) for tag, operations in tags.items())
    errors = "".join(
        f"<tr><td><code>{html.escape(code)}</code></td><td>{kind.status}</td><td>{html.escape(kind.title)}</td>"
        f"<td>{html.escape(kind.mend)}</td></tr>"
        for code, kind in REGISTRY.items()
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>ql3 API</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="stylesheet" href="/assets/panel.css"></head><body class="page"><main>'
        f'<h1>ql3 API</h1><p>The machine-readable description is <a href="{PREFIX}/openapi.json">openapi.json</a>. '
        f"Programs send <code>Authorization: Bearer ql3c_…</code>; pages send their cookie and "
        f"<code>{html.escape(CSRF_HEADER)}</code>.</p>"
        f"{sections}<h2>Errors</h2><div class='scroll'><table><tr><th>Code</th><th>Status</th><th>Means</th>"
        f"<th>Mend</th></tr>{errors}</table></div></main></body></html>"
    )


def _section(tag: str, operations: list[Operation]) -> str:
    rows = "".join(
        f"<tr><td><code>{operation.method}</code></td><td><code>{html.escape(operation.path)}</code></td>"
        f"<td>{html.escape(operation.summary)}{_fields(operation)}</td></tr>"
        for operation in operations
    )
    return f"<h2>{html.escape(tag.capitalize())}</h2><div class='scroll'><table>{rows}</table></div>"


def _fields(operation: Operation) -> str:
    names = [field.encode_name + ("" if field.required else "?") for field in msgspec.structs.fields(operation.reads)]
    if not names:
        return ""
    where = "Query" if operation.method == "GET" else "Body"
    return f"<br><small>{where}: <code>{html.escape(', '.join(names))}</code></small>"


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(specification()), indent=1) + b"\n")
