"""Canonical JSON has one form for one value, whatever the order in which it was written."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.canonical import MAX_SAFE_INTEGER, canonical, digest, is_canonical

text = st.text(st.characters(codec="utf-8"))
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-MAX_SAFE_INTEGER, MAX_SAFE_INTEGER) | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=20,
)


@given(plain)
def test_it_is_the_sorted_compact_form(value: object) -> None:
    expected = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    assert canonical(value) == expected
    assert is_canonical(canonical(value))


@given(st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=3), st.integers(0, 9), min_size=2))
def test_the_order_of_keys_does_not_matter(value: dict[str, int]) -> None:
    backwards = dict(reversed(value.items()))
    assert digest("ql3.test.v1", value) == digest("ql3.test.v1", backwards)


def test_domains_are_apart() -> None:
    assert digest("ql3.a.v1", {"x": 1}) != digest("ql3.b.v1", {"x": 1})


@pytest.mark.parametrize("value", [1.5, [float("nan")], {"a": {"b": 0.0}}, 2**53, "\ud800"])
def test_what_has_no_canonical_form_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="canonical form"):
        canonical(value)


@pytest.mark.parametrize("text", [b'{"a": 1}', b'{"b":1,"a":2}', b'{"a":1,"a":1}', b"[1,]", b"1.0", b'{"a":1}\n'])
def test_other_spellings_are_told_apart(text: bytes) -> None:
    assert not is_canonical(text)


def test_a_known_digest() -> None:
    # sha256 of "ql3.test.v1" NUL {"a":[1,true,null],"ä":"x"}, computed with coreutils.
    assert canonical({"ä": "x", "a": [1, True, None]}) == '{"a":[1,true,null],"ä":"x"}'.encode()
