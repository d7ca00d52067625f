"""Pinned revisions: content-addressed, never changed, checked against their digest on every read from the table."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec
import structlog

from schemas.canonical import canonical, digest_bytes
from schemas.tasks import ExecutionRevision
from services.kit.database import Statement, Transaction, json_set

KEPT: Final = 1024
_DOMAIN: Final = "ql3.task-execution-revision.v1"

log: structlog.stdlib.BoundLogger = structlog.get_logger("ql3.dispatcher")

_READ = Statement("SELECT digest, content FROM pinned_revisions WHERE digest {in:$1}")
_PIN = Statement("""
    INSERT INTO pinned_revisions (digest, project_id, task_id, task_name, task_revision, content, created_at_ms)
    VALUES ($1, $2, $3, $4, $5, $6, $7) ON CONFLICT (digest) DO NOTHING
""")


class Revisions:
    """Decoded revisions by digest. What is kept never changes, so keeping it needs no invalidation."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, ExecutionRevision] = OrderedDict()

    async def read(self, tx: Transaction, digests: Iterable[str]) -> dict[str, ExecutionRevision]:
        """Those that are pinned. One whose stored content does not match its digest counts as absent, and is logged."""
        found: dict[str, ExecutionRevision] = {}
        missing: list[str] = []
        for wanted in set(digests):
            kept = self._kept.get(wanted)
            if kept is None:
                missing.append(wanted)
            else:
                found[wanted] = kept
        if missing:
            for row in await tx.fetch(_READ, json_set(missing)):
                revision = _decoded(row["digest"], row["content"])
                if revision is not None:
                    found[row["digest"]] = revision
                    self._keep(row["digest"], revision)
        return found

    async def pin(
        self, tx: Transaction, offered: Mapping[str, ExecutionRevision], now: int
    ) -> dict[str, ExecutionRevision]:
        """Pins revisions whose content has the digest they are offered under; answers those that stand now.

        What is kept after the transaction failed is still right: it is addressed by its content; it is only not stored.
        """
        standing = await self.read(tx, offered)
        rows: list[tuple[str, str, str, str, int, str, int]] = []
        for digest, revision in offered.items():
            if digest in standing:
                continue
            content = canonical(revision)
            if digest_bytes(_DOMAIN, content) != digest:
                continue
            rows.append(
                (
                    digest,
                    revision.project,
                    revision.task_id,
                    revision.task_name,
                    revision.task_revision,
                    content.decode(),
                    now,
                )
            )
            standing[digest] = revision
        await tx.execute_many(_PIN, rows)
        if rows:
            fresh = {row[0]: offered[row[0]] for row in rows}
            tx.after_commit(lambda: self._keep_all(fresh))
        return standing

    def kept(self, digest: str) -> ExecutionRevision | None:
        """A revision that was read or pinned before."""
        return self._kept.get(digest)

    def _keep_all(self, fresh: Mapping[str, ExecutionRevision]) -> None:
        for digest, revision in fresh.items():
            self._keep(digest, revision)

    def _keep(self, digest: str, revision: ExecutionRevision) -> None:
        self._kept[digest] = revision
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)


def _decoded(digest: str, content: str) -> ExecutionRevision | None:
    try:
        if digest_bytes(_DOMAIN, content.encode()) == digest:
            return msgspec.json.decode(content, type=ExecutionRevision)
    except msgspec.DecodeError:
        pass
    log.error("a pinned revision is corrupt", digest=digest)
    return None
