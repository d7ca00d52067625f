"""The one way rows of an append-only table leave it: by key, and only below a stored watermark.

Called by the table's owner on retention's order, inside the transaction that also deletes what the rows belong to. The
table declares it in its migration (`-- ql3: purgeable <table> by <key> before <time column>`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from services.kit.database import Statement, Transaction, json_set

_RAISE = Statement("UPDATE purge_watermarks SET below_ms = $2 WHERE table_name = $1 AND below_ms < $2")
_LAST_PURGED = Statement("SELECT last_purged AS purged FROM purge_watermarks WHERE table_name = $1")
_table = re.compile(r"[a-z][a-z0-9_]{0,62}")


async def raise_watermark(tx: Transaction, table: str, below_ms: int) -> None:
    """Allows rows of `table` older than `below_ms` to be purged from now on. Never lowers what is stored."""
    await tx.execute(_RAISE, table, below_ms)


async def purge(tx: Transaction, table: str, keys: Sequence[str]) -> int:
    """Deletes the rows of `table` whose key is in `keys` and whose time is below its watermark; answers how many.

    Rows at or above the watermark stay, silently: whoever deletes their parent next meets a foreign key.
    """
    row = await tx.fetch_one(_purge_of(table), json_set(keys))
    if tx.dialect == "sqlite":
        row = await tx.fetch_one(_LAST_PURGED, table)
    return int(row["purged"]) if row else 0


@lru_cache
def _purge_of(table: str) -> Statement:
    if _table.fullmatch(table) is None:
        raise ValueError(f"{table!r} is not a table's name")
    return Statement(
        f"INSERT INTO kit_purge_{table} (keys) VALUES ($1)",  # noqa: S608 - a name, checked above
        postgresql=f"SELECT kit_purge_{table}($1) AS purged",
    )
