"""Reading what people send: unknown fields are refused, with the path of the field and the name that was meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, Final, TypeVar, cast

import msgspec
from msgspec import inspect

from schemas.errors import Ql3Error
from schemas.ids import DIGEST_PATTERN, ENV_NAME_PATTERN, ID_PATTERN, SLUG_PATTERN

S = TypeVar("S")
INTEGER_MAX: Final = 2**63 - 1
"""What a column of a table keeps."""
_DOUBTFUL: Final = re.compile(rb"\\u0000|[0-9]{16}")


def read_json(raw: bytes, wanted: type[S], *, max_bytes: int) -> S:
    """Decode JSON that a person sent. Raises `invalid`, `unknown_field` or `too_large`, naming the field."""
    if len(raw) > max_bytes:
        raise Ql3Error("too_large", f"The body has {len(raw)} bytes; at most {max_bytes} are read.")
    try:
        plain = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Ql3Error("invalid", "The body is not valid JSON.") from error
    try:
        if _DOUBTFUL.search(raw):
            refuse_unkept(plain)
        return read_plain(plain, wanted)
    except RecursionError:
        raise Ql3Error("invalid", "The body is nested too deeply.") from None


def read_plain(plain: Any, wanted: type[S]) -> S:
    """Convert plain data (from JSON, YAML or TOML) to `wanted`, refusing unknown fields at every depth."""
    refuse_unknown(plain, wanted)
    try:
        return msgspec.convert(plain, wanted)
    except msgspec.ValidationError as error:
        what, found, path = str(error).rpartition(" - at `$")
        field = path.rstrip("`").lstrip(".") if found else None
        raise Ql3Error("invalid", _sentence(what if found else str(error)), field=field or None) from error


def refuse_unkept(plain: Any, path: str = "") -> None:
    """Raise `invalid` for the first text with a NUL character, or whole number beyond `INTEGER_MAX`, naming it."""
    if isinstance(plain, str):
        if "\0" in plain:
            raise Ql3Error("invalid", "Text holds no NUL character.", field=path.replace("\0", "?") or None)
    elif isinstance(plain, int):
        if abs(plain) > INTEGER_MAX:
            raise Ql3Error("invalid", f"A whole number is at most {INTEGER_MAX}.", field=path or None)
    elif isinstance(plain, Mapping):
        for name, value in cast("Mapping[str, Any]", plain).items():
            inner = f"{path}.{name}" if path else name
            refuse_unkept(name, inner)
            refuse_unkept(value, inner)
    elif isinstance(plain, list | tuple):
        for index, value in enumerate(cast("list[Any]", plain)):
            refuse_unkept(value, f"{path}[{index}]")


def refuse_unknown(plain: Any, wanted: Any) -> None:
    """Raise `unknown_field` for the first field of `plain` that `wanted` does not have."""
    _walk(plain, inspect.type_info(wanted), "")


def _walk(plain: Any, kind: inspect.Type, path: str) -> None:
    if isinstance(kind, inspect.UnionType):
        for option in kind.types:
            if _fits(plain, option):
                _walk(plain, option, path)
                return
        return
    if isinstance(kind, inspect.StructType) and isinstance(plain, dict):
        fields = {field.encode_name: field.type for field in kind.fields}
        tag = {kind.tag_field} if kind.tag_field else set[str]()
        for name, value in plain.items():  # pyright: ignore[reportUnknownVariableType]
            if name in tag:
                continue
            if name not in fields:
                near = difflib.get_close_matches(str(name), fields, n=1)  # pyright: ignore[reportUnknownArgumentType]
                hint = f" Did you mean {near[0]}?" if near else ""
                raise Ql3Error("unknown_field", f"There is no such field.{hint}", field=f"{path}{name}")
            _walk(value, fields[name], f"{path}{name}.")
    elif isinstance(kind, inspect.ListType | inspect.VarTupleType) and isinstance(plain, list):
        for index, value in enumerate(plain):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
            _walk(value, kind.item_type, f"{path.rstrip('.')}[{index}].")
    elif isinstance(kind, inspect.DictType) and isinstance(plain, dict):
        for name, value in plain.items():  # pyright: ignore[reportUnknownVariableType]
            _walk(value, kind.value_type, f"{path}{name}.")


def _fits(plain: Any, kind: inspect.Type) -> bool:
    if isinstance(kind, inspect.StructType):
        return isinstance(plain, dict) and (kind.tag_field is None or bool(plain.get(kind.tag_field) == kind.tag))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    if isinstance(kind, inspect.ListType | inspect.VarTupleType):
        return isinstance(plain, list)
    return isinstance(kind, inspect.DictType) and isinstance(plain, dict)


_PATTERNS = {
    SLUG_PATTERN: "Use lower-case letters, digits and hyphens, 1 to 63, beginning with a letter or a digit.",
    ID_PATTERN: "This is not an id.",
    ENV_NAME_PATTERN: "Use letters, digits and underscores, not beginning with a digit.",
    DIGEST_PATTERN: "This is not a digest: 64 lower-case hexadecimal digits.",
}


def _sentence(text: str) -> str:
    # A pattern says little to whoever typed the value.
    _, found, pattern = text.partition("matching regex ")
    for known, sentence in _PATTERNS.items():
        if found and pattern == repr(known):
            return sentence
    return text if text.endswith(".") else text + "."
