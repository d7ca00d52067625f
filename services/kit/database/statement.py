"""One statement, written once for both dialects.

Placeholders are `$1` to `$n`. Markers in the text:

- `{for_update}`, `{for_update_skip_locked}`: row locks on PostgreSQL, nothing on SQLite (one writer).
- `{in:$1}`: membership in a set handed over as one JSON array of texts (`json_set`), as in `WHERE id {in:$1}`.
- `{rows:$1 id text, version bigint}`: a JSON array of objects (`json_rows`) as a table, as in
  `UPDATE runs SET version = r.version FROM {rows:$1 id text, version bigint} AS r WHERE runs.id = r.id`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

Dialect = Literal["sqlite", "postgresql"]

_placeholder = re.compile(r"\$([0-9]+)")
_in = re.compile(r"\{in:(\$[0-9]+)\}")
_rows = re.compile(r"\{rows:(\$[0-9]+)\s+([^}]+)\}")
_lock = re.compile(r"\s*\{(for_update|for_update_skip_locked)\}")
_LOCKS = {"for_update": " FOR UPDATE", "for_update_skip_locked": " FOR UPDATE SKIP LOCKED"}


class Statement:
    """An SQL statement. `sql` is in the common subset, or SQLite's when `postgresql` is given as well.

    `long` says that it may touch any number of rows, so that SQLite keeps the event loop free meanwhile.
    """

    __slots__ = ("long", "postgresql", "source", "sqlite")

    def __init__(self, sql: str, *, postgresql: str | None = None, long: bool = False) -> None:
        self.source = sql
        self.long = long
        self.sqlite = _for_sqlite(sql.strip())
        self.postgresql = _for_postgresql((postgresql or sql).strip())

    def __repr__(self) -> str:
        return f"Statement({self.source!r})"


def id_set(sql: str) -> Statement:
    """A statement with an `{in:$n}` marker; the argument at `n` is `json_set(ids)`."""
    return Statement(sql)


def json_set(values: Iterable[str]) -> str:
    """The argument of an `{in:$n}` marker."""
    return msgspec.json.encode(list(values)).decode()


def json_rows(rows: Iterable[Mapping[str, Any]]) -> str:
    """The argument of a `{rows:$n …}` marker. Values are text, integers or None; a flag is 0 or 1, never a bool."""
    return msgspec.json.encode(list(rows)).decode()


def _for_sqlite(sql: str) -> str:
    sql = _lock.sub("", sql)
    sql = _in.sub(r"IN (SELECT value FROM json_each(\1))", sql)
    sql = _rows.sub(_sqlite_rows, sql)
    return _placeholder.sub(r"?\1", sql)


def _sqlite_rows(match: re.Match[str]) -> str:
    names = [column.split()[0] for column in match[2].split(",")]
    columns = ", ".join(f"json_extract(value, '$.{name}') AS {name}" for name in names)
    return f"(SELECT {columns} FROM json_each({match[1]}))"  # noqa: S608 - built from a constant's own text


def _for_postgresql(sql: str) -> str:
    sql = _lock.sub(lambda match: _LOCKS[match[1]], sql)
    sql = _in.sub(r"= ANY(ARRAY(SELECT jsonb_array_elements_text(\1::text::jsonb)))", sql)
    return _rows.sub(r"(SELECT * FROM jsonb_to_recordset(\1::text::jsonb) AS r_(\2))", sql)
