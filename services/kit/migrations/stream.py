"""Streams of migration steps: which files, their checksums, their directives, and what a history must look like.

Pure: reads the package's own SQL files and nothing else. A directive is a comment line of a step:

- `-- ql3: append-only <table>`: neither UPDATE nor DELETE.
- `-- ql3: purgeable <table> by <key> before <time column>`: an append-only table (of this step or an earlier one of the
  stream) whose rows may go through `kit.purge`, by key, when their time lies below the table's stored watermark.
- `-- ql3: read-only <table>`: on PostgreSQL the service's role may only read it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable

import msgspec

from schemas.canonical import digest_bytes
from schemas.errors import Ql3Error
from services.kit.database.statement import Dialect

KIT = "kit"

_file = re.compile(r"([0-9]{4}_[a-z0-9][a-z0-9_]{0,100})(\.postgresql)?\.sql")
_directive = re.compile(r"^-- ql3:(.*)$", re.MULTILINE)
_name = r"([a-z][a-z0-9_]{0,62})"
_append_only = re.compile(rf"append-only {_name}")
_purgeable = re.compile(rf"purgeable {_name} by {_name} before {_name}")
_read_only = re.compile(rf"read-only {_name}")


class MigrationRefused(Ql3Error):  # noqa: N818 - an error is named for what happened
    """The recorded history and this version's steps do not fit. `step` names the first that does not."""

    def __init__(self, code: str, detail: str, step: str) -> None:
        self.step = step
        super().__init__(code, detail, data={"step": step})


class StepUnknown(MigrationRefused):
    """The database was migrated by a newer or a different version."""

    def __init__(self, step: str) -> None:
        super().__init__("schema_unsupported", f"The database has migration {step}, which this version has not.", step)


class StepChanged(MigrationRefused):
    """A recorded step's text is not the one that was applied."""

    def __init__(self, step: str) -> None:
        super().__init__(
            "schema_unsupported",
            f"Migration {step} was applied with another text; restore its file.",
            step,
        )


class StepMissing(MigrationRefused):
    """A step before an applied one is not recorded."""

    def __init__(self, step: str) -> None:
        super().__init__(
            "schema_unsupported",
            f"Migration {step} is missing from the history though a later one is there; restore a backup.",
            step,
        )


class StepPending(MigrationRefused):
    """The database is older than this version."""

    def __init__(self, step: str) -> None:
        super().__init__("setup_invalid", f"Migration {step} is not applied yet; run `ql3 migrate`.", step)


class StepFailed(MigrationRefused):
    """A step's SQL failed; it was rolled back as a whole, the steps before it stand."""

    def __init__(self, step: str) -> None:
        super().__init__("setup_invalid", f"Migration {step} failed and was rolled back; see the log.", step)


class LeaderUnavailable(MigrationRefused):
    """Another process is migrating the same schema."""

    def __init__(self, step: str) -> None:
        super().__init__("unavailable", "Another process is migrating this database.", step)


class InvalidStream(ValueError):  # noqa: N818
    """The files of a stream do not form one: a fault of this version, found before any database is touched."""


class Purgeable(msgspec.Struct, frozen=True):
    """How rows of an append-only table may be purged."""

    table: str
    key: str
    time: str


class Step(msgspec.Struct, frozen=True):
    """One migration. `name` is `<stream>/NNNN_words`."""

    stream: str
    id: str
    sql: str
    checksum: str
    append_only: tuple[str, ...]
    purgeable: tuple[Purgeable, ...]
    read_only: tuple[str, ...]

    @property
    def name(self) -> str:
        """The step as people read it."""
        return f"{self.stream}/{self.id}"


class Applied(msgspec.Struct, frozen=True):
    """A row of the history."""

    stream: str
    id: str
    dialect: str
    checksum: str

    @property
    def name(self) -> str:
        """The step as people read it."""
        return f"{self.stream}/{self.id}"


def load(service: str, dialect: Dialect, root: Traversable | None = None) -> list[Step]:
    """Every step of a service's database in order: the kit's stream, then its own (which may be empty)."""
    root = root or files("migrations")
    return [step for stream in (KIT, service) for step in _stream(root / stream, stream, dialect)]


def _stream(folder: Traversable, stream: str, dialect: Dialect) -> list[Step]:
    if not folder.is_dir():
        return []
    texts: dict[str, dict[bool, str]] = {}
    for entry in folder.iterdir():
        if not entry.name.endswith(".sql"):
            continue
        match = _file.fullmatch(entry.name)
        if match is None:
            raise InvalidStream(f"{stream}/{entry.name} is not named NNNN_words.sql")
        texts.setdefault(match[1], {})[bool(match[2])] = entry.read_text(encoding="utf-8").replace("\r\n", "\n")
    steps: list[Step] = []
    append_only: set[str] = set()
    for number, step_id in enumerate(sorted(texts), start=1):
        if int(step_id[:4]) != number:
            raise InvalidStream(f"{stream}/{step_id} should have number {number:04d}")
        variants = texts[step_id]
        sql = variants.get(dialect == "postgresql", variants.get(False))
        if sql is None:
            raise InvalidStream(f"{stream}/{step_id} has no text for {dialect}")
        step = _step(stream, step_id, sql)
        append_only.update(step.append_only)
        for entry in step.purgeable:
            if entry.table not in append_only:
                raise InvalidStream(f"{stream}/{step_id}: {entry.table} is purgeable but not append-only")
        steps.append(step)
    return steps


def _step(stream: str, step_id: str, sql: str) -> Step:
    append_only: list[str] = []
    purgeable: list[Purgeable] = []
    read_only: list[str] = []
    for line in _directive.findall(sql):
        text = line.strip()
        if match := _append_only.fullmatch(text):
            append_only.append(match[1])
        elif match := _purgeable.fullmatch(text):
            purgeable.append(Purgeable(match[1], match[2], match[3]))
        elif match := _read_only.fullmatch(text):
            read_only.append(match[1])
        else:
            raise InvalidStream(f"{stream}/{step_id} has an unknown directive: {text}")
    return Step(
        stream=stream,
        id=step_id,
        sql=sql,
        checksum=digest_bytes("ql3.migration.v1", sql.encode()),
        append_only=tuple(append_only),
        purgeable=tuple(purgeable),
        read_only=tuple(read_only),
    )


def pending(steps: Sequence[Step], history: Iterable[Applied], dialect: Dialect) -> list[Step]:
    """The steps still to apply. Raises `StepUnknown`, `StepChanged` or `StepMissing`, in this order of search."""
    known = {step.name: step for step in steps}
    applied: set[str] = set()
    for record in history:
        step = known.get(record.name)
        if step is None:
            raise StepUnknown(record.name)
        if record.checksum != step.checksum or record.dialect != dialect:
            raise StepChanged(record.name)
        applied.add(record.name)
    for stream in {step.stream for step in steps}:
        gap: str | None = None
        for step in steps:
            if step.stream != stream:
                continue
            if step.name not in applied:
                gap = gap or step.name
            elif gap is not None:
                raise StepMissing(gap)
    return [step for step in steps if step.name not in applied]


def history_tables(dialect: Dialect) -> str:
    """The tables every database keeps of its own migrations, made before its first step."""
    return f"""
CREATE TABLE IF NOT EXISTS schema_migrations (
  stream TEXT NOT NULL,
  migration_id TEXT NOT NULL,
  dialect TEXT NOT NULL CHECK (dialect = '{dialect}'),
  checksum TEXT NOT NULL CHECK (length(checksum) = 64),
  applied_at_ms BIGINT NOT NULL CHECK (applied_at_ms >= 0),
  PRIMARY KEY (stream, migration_id)
);
CREATE TABLE IF NOT EXISTS schema_capabilities (
  contract_name TEXT PRIMARY KEY,
  contract_version INTEGER NOT NULL CHECK (contract_version >= 1),
  migration_id TEXT NOT NULL,
  updated_at_ms BIGINT NOT NULL CHECK (updated_at_ms >= 0)
);
"""
