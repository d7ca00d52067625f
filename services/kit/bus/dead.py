"""Dead letters: what could not be handled is kept with its reason and where it came from, and can be sent again."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any, Final, cast

import msgspec
import structlog
from nats.aio.msg import Msg

from schemas.errors import Ql3Error
from schemas.limits import BATCH_BYTES
from schemas.subjects import DEAD, dead
from services.kit.bus.connection import Connection, ConnectionLost, NoResponders
from services.kit.bus.envelope import MSG_ID, place_of
from services.kit.bus.streams import JetStreamRefusal, jetstream_api

DEAD_SUBJECT: Final = "Ql3-Dead-Subject"
DEAD_REASON: Final = "Ql3-Dead-Reason"
DEAD_MSG_ID: Final = "Ql3-Dead-Msg-Id"
DEAD_DELIVERIES: Final = "Ql3-Dead-Deliveries"
DEAD_CUT: Final = "Ql3-Dead-Cut"
DEAD_ERROR: Final = "Ql3-Dead-Error"

KEPT_HEADERS: Final = 16
KEPT_HEADER_CHARS: Final = 512
CUT_BYTES: Final = 64 * 1024
_NO_MESSAGE = 10037

log: structlog.stdlib.BoundLogger = structlog.get_logger("ql3.bus")


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """One kept message. `sequence` names it; `cut` is its whole size in bytes when only its beginning was kept."""

    sequence: int
    service: str
    reason: str
    subject: str
    headers: Mapping[str, str]
    payload: bytes
    deliveries: int
    error: str
    cut: int | None
    time: str


def dead_subject(service: str, reason: str) -> str:
    """The subject of a reason: words and dashes only, whatever the code was called."""
    return dead(service, re.sub(r"[^a-z0-9-]", "-", reason.lower())[:63] or "unknown")


def dead_headers(message: Msg, reason: str, error: str, deliveries: int) -> dict[str, str]:
    """The original headers, bounded and without those by which the server would act, and why it is here."""
    headers: dict[str, str] = {}
    for name, value in (message.headers or {}).items():
        if len(headers) >= KEPT_HEADERS:
            break
        if not name.lower().startswith(("nats-", "ql3-dead-")):
            headers[name[:64]] = value[:KEPT_HEADER_CHARS]
    msg_id = (message.headers or {}).get(MSG_ID)
    if msg_id is not None:
        headers[DEAD_MSG_ID] = msg_id[:KEPT_HEADER_CHARS]
    headers[DEAD_SUBJECT] = message.subject[:KEPT_HEADER_CHARS]
    headers[DEAD_REASON] = reason
    headers[DEAD_ERROR] = error[:KEPT_HEADER_CHARS]
    headers[DEAD_DELIVERIES] = str(deliveries)
    if len(message.data) > BATCH_BYTES:
        headers[DEAD_CUT] = str(len(message.data))
    # The place in the stream and its time: the same message buried twice is kept once.
    place = place_of(message.reply)
    if place is not None:
        headers[MSG_ID] = f"dead.{place.stream}.{place.sequence}.{place.stored_ns}"
    return headers


def dead_payload(message: Msg) -> bytes:
    """The payload as it was; of one larger than any message of ours only the beginning."""
    return message.data if len(message.data) <= BATCH_BYTES else message.data[:CUT_BYTES]


async def read_dead(connection: Connection, sequence: int, *, service: str | None = None) -> DeadLetter | None:
    """The first dead letter (of a service) at or after `sequence`, or None. Raises `unavailable`."""
    filter_subject = f"ql3.dead.{service}.>" if service else "ql3.dead.>"
    try:
        answer = await jetstream_api(
            connection, f"STREAM.MSG.GET.{DEAD.name}", {"seq": sequence, "next_by_subj": filter_subject}
        )
    except JetStreamRefusal as refusal:
        if refusal.code == _NO_MESSAGE:
            return None
        raise Ql3Error("unavailable", "The dead letters cannot be read.") from refusal
    except (TimeoutError, ConnectionLost, NoResponders) as error:
        raise Ql3Error("unavailable", "The dead letters cannot be read.") from error
    return _letter(cast("dict[str, Any]", answer["message"]))


async def list_dead(
    connection: Connection, *, service: str | None = None, after: int = 0, limit: int = 200
) -> list[DeadLetter]:
    """Up to `limit` dead letters behind the sequence `after`, oldest first."""
    letters: list[DeadLetter] = []
    while len(letters) < limit:
        letter = await read_dead(connection, after + 1, service=service)
        if letter is None:
            break
        letters.append(letter)
        after = letter.sequence
    return letters


async def delete_dead(connection: Connection, sequence: int) -> None:
    """Remove a dead letter for good; one that is already gone is no error."""
    try:
        await jetstream_api(connection, f"STREAM.MSG.DELETE.{DEAD.name}", {"seq": sequence})
    except JetStreamRefusal as refusal:
        log.info("dead letter was not there any more", sequence=sequence, code=refusal.code)
    except (TimeoutError, ConnectionLost, NoResponders) as error:
        raise Ql3Error("unavailable") from error


def _letter(message: dict[str, Any]) -> DeadLetter:
    headers = _headers(base64.b64decode(message.get("hdrs", "")))
    tokens = str(message["subject"]).split(".")
    cut = headers.get(DEAD_CUT, "")
    deliveries = headers.get(DEAD_DELIVERIES, "")
    return DeadLetter(
        sequence=int(message["seq"]),
        service=tokens[2],
        reason=headers.get(DEAD_REASON, tokens[-1]),
        subject=headers.get(DEAD_SUBJECT, ""),
        headers={k: v for k, v in headers.items() if not k.lower().startswith(("nats-", "ql3-dead-"))},
        payload=base64.b64decode(message.get("data", "")),
        deliveries=int(deliveries) if deliveries.isdigit() else 0,
        error=headers.get(DEAD_ERROR, ""),
        cut=int(cut) if cut.isdigit() else None,
        time=str(message.get("time", "")),
    )


def _headers(block: bytes) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in block.split(b"\r\n")[1:]:
        name, found, value = line.partition(b":")
        if found:
            headers[name.decode("ascii", "replace").strip()] = value.decode("utf-8", "replace").strip()
    return headers
