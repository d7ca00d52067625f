"""The API describes itself, and its printed copy is of this version."""

from __future__ import annotations

import html
import json
from pathlib import Path

import msgspec
import pytest

from services.gateway.openapi import page, specification
from services.gateway.routes import ALL

from .conftest import House

COPY = Path(__file__).parents[2] / "docs" / "openapi.json"


@pytest.fixture
def dialect() -> str:
    """Nothing here is stored."""
    return "sqlite"


def test_the_copy_in_docs_is_of_this_version() -> None:
    printed = msgspec.json.format(msgspec.json.encode(specification()), indent=1) + b"\n"
    assert COPY.read_bytes() == printed, "run: uv run python -m services.gateway.openapi > docs/openapi.json"


def test_every_operation_is_described_once_with_its_errors() -> None:
    paths = specification()["paths"]
    described = [operation for path in paths.values() for operation in path.values()]
    assert len(described) == len(ALL)
    names = [operation["operationId"] for operation in described]
    assert len(set(names)) == len(names)
    for operation in described:
        assert operation["summary"].endswith("."), operation["operationId"]
        assert "application/problem+json" in operation["responses"]["default"]["content"]


def test_every_reference_leads_somewhere() -> None:
    document = specification()
    known = document["components"]["schemas"]

    def walk(part: object) -> None:
        if isinstance(part, dict):
            reference = part.get("$ref")
            if isinstance(reference, str):
                assert reference.removeprefix("#/components/schemas/") in known
            for value in part.values():
                walk(value)
        elif isinstance(part, list):
            for value in part:
                walk(value)

    walk(document)


def test_the_page_names_every_route() -> None:
    text = page()
    for operation in ALL:
        assert html.escape(operation.path) in text
    assert "<script" not in text


async def test_document_and_page_need_no_sign_in(house: House) -> None:
    client = house.client()
    assert json.loads((await client.get("/api/v3/openapi.json")).text) == json.loads(COPY.read_text())
    answer = await client.get("/api/v3/schema")
    assert answer.headers["content-type"].startswith("text/html")
