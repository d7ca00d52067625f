"""The wire contract: tags are unique and versioned, readers ignore new fields, subjects take only ids and slugs."""

from __future__ import annotations

import importlib
import pkgutil

import msgspec
import pytest

import schemas
from schemas import endpoints, proof, subjects
from schemas.base import Message, View, decode, encode, schema_of
from schemas.errors import Ql3Error
from schemas.strict import read_json
from schemas.tasks import TaskSpec
from schemas.workers import LogRead


def message_types() -> list[type[Message]]:
    for module in pkgutil.iter_modules(schemas.__path__):
        importlib.import_module(f"schemas.{module.name}")
    # Tests of the bus make messages of their own in the same process.
    ours = [kind for kind in Message.__subclasses__() if kind.__module__.startswith("schemas.")]
    return sorted(ours, key=lambda kind: kind.__name__)


def test_every_message_has_its_own_versioned_tag() -> None:
    tags = [schema_of(kind) for kind in message_types()]
    assert len(tags) == len(set(tags))
    for tag in tags:
        name, _, version = tag.partition("/")
        assert name
        assert version.isdigit()


def test_every_message_is_documented_and_frozen() -> None:
    for kind in message_types():
        assert kind.__doc__, kind
        assert kind.__struct_config__.frozen, kind


def test_a_view_shows_every_field() -> None:
    for kind in View.__subclasses__():
        assert not kind.__struct_config__.omit_defaults, kind


def test_a_reader_ignores_what_a_newer_writer_adds() -> None:
    message = LogRead(attempt_id="0190a000-0000-7000-8000-000000000000", offset=3, length=5)
    newer = msgspec.json.decode(encode(message)) | {"added_later": [1, 2]}
    assert decode(msgspec.json.encode(newer), LogRead) == message


def test_a_broken_message_names_the_field_and_never_its_value() -> None:
    with pytest.raises(Ql3Error) as refused:
        decode(b'{"schema":"log.read/1","attempt_id":"SECRET-VALUE","offset":0}', LogRead)
    assert refused.value.field == "attempt_id"
    assert "SECRET-VALUE" not in refused.value.sentence


def test_what_people_send_is_refused_on_unknown_fields_at_any_depth() -> None:
    raw = b'{"execution":{"command":["true"]},"terms":{"retry":{"max_attemps":3}}}'
    with pytest.raises(Ql3Error) as refused:
        read_json(raw, TaskSpec, max_bytes=1000)
    assert (refused.value.code, refused.value.field) == ("unknown_field", "terms.retry.max_attemps")
    assert "max_attempts" in refused.value.sentence


def test_what_people_send_is_bounded() -> None:
    with pytest.raises(Ql3Error) as refused:
        read_json(b" " * 1001, TaskSpec, max_bytes=1000)
    assert refused.value.code == "too_large"


def test_endpoints_have_names_without_dots_and_subjects_of_their_service() -> None:
    declared = [value for value in vars(endpoints).values() if isinstance(value, endpoints.Endpoint)]
    assert len(declared) > 30
    assert len({endpoint.subject for endpoint in declared}) == len(declared)
    for endpoint in declared:
        assert "." not in endpoint.name
        assert endpoint.subject.startswith(f"ql3.rpc.{endpoint.service}.")


@pytest.mark.parametrize("text", ["", "a.b", "a b", "*", ">", "A", "x" * 64, "-a", "a\n"])
def test_a_persons_text_never_becomes_a_subject(text: str) -> None:
    with pytest.raises(ValueError, match="token"):
        subjects.to_worker(text, "offer")
    with pytest.raises(ValueError, match="token"):
        subjects.event("run", text, "x", "queued")


def test_a_proof_holds_for_its_own_sequence_and_body_alone() -> None:
    word = proof.token(b"k" * 32, "attempt", "offer", 1)
    digest = proof.token_digest(word)
    given = proof.proof(digest, "attempt", 1, b"body")
    assert proof.proof_holds(digest, "attempt", 1, b"body", given)
    assert not proof.proof_holds(digest, "attempt", 2, b"body", given)
    assert not proof.proof_holds(digest, "attempt", 1, b"other", given)
    assert not proof.proof_holds(digest, "other", 1, b"body", given)
    next_lease = proof.token_digest(proof.token(b"k" * 32, "attempt", "offer", 2))
    assert not proof.proof_holds(next_lease, "attempt", 1, b"body", given)
    assert not proof.proof_holds(digest, "attempt", 1, b"body", "é" * 64)
