"""The shapes of names: ids are lower-case UUIDv7, slugs are what people type and what subjects may hold."""

from __future__ import annotations

import re
from typing import Annotated, Final

from msgspec import Meta

ID_PATTERN: Final = r"^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}\Z"
SLUG_PATTERN: Final = r"^[a-z0-9][a-z0-9-]{0,62}\Z"
ENV_NAME_PATTERN: Final = r"^[A-Za-z_][A-Za-z0-9_]{0,254}\Z"
SUBJECT_PATTERN: Final = r"^[A-Za-z0-9_@~][A-Za-z0-9_.:@~-]{0,254}\Z"
DIGEST_PATTERN: Final = r"^[0-9a-f]{64}\Z"

Id = Annotated[str, Meta(pattern=ID_PATTERN)]
Slug = Annotated[str, Meta(pattern=SLUG_PATTERN)]
ProjectId = Annotated[str, Meta(pattern=SLUG_PATTERN)]
"""A project's id is its slug, fixed at creation: it stands in subjects and in people's commands."""
WorkerId = Annotated[str, Meta(pattern=SLUG_PATTERN)]
EnvName = Annotated[str, Meta(pattern=ENV_NAME_PATTERN)]
Digest = Annotated[str, Meta(pattern=DIGEST_PATTERN)]
Millis = Annotated[int, Meta(ge=0, le=2**53 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**53 - 1)]

_id = re.compile(ID_PATTERN)
_slug = re.compile(SLUG_PATTERN)
_subject = re.compile(SUBJECT_PATTERN)


def is_id(text: str) -> bool:
    """Whether text is a lower-case UUIDv7."""
    return _id.fullmatch(text) is not None


def is_slug(text: str) -> bool:
    """Whether text may stand in a subject and be typed as a name."""
    return _slug.fullmatch(text) is not None


def is_subject_id(text: str) -> bool:
    """Whether text may be the id of somebody new: it fits into a path, so that they can be shut out by it too."""
    return _subject.fullmatch(text) is not None
