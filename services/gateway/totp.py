"""Time-based one-time codes (RFC 6238: HMAC-SHA1, 30 s, six digits), each good for once. No I/O."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from urllib.parse import quote

STEP_S = 30
DIGITS = 6
SKEW_STEPS = 1
"""A clock may be one step off in either direction."""
SECRET_BYTES = 20


def new_secret() -> bytes:
    """160 bits, as RFC 4226 recommends."""
    return secrets.token_bytes(SECRET_BYTES)


def code_at(secret: bytes, step: int) -> str:
    """The code of one step (`seconds since 1970 // 30`)."""
    mac = hmac.new(secret, step.to_bytes(8, "big"), hashlib.sha1).digest()
    offset = mac[-1] & 0x0F
    number = int.from_bytes(mac[offset : offset + 4], "big") & 0x7FFF_FFFF
    return str(number % 10**DIGITS).zfill(DIGITS)


def accepted_step(secret: bytes, code: str, now_ms: int, last_step: int) -> int | None:
    """The step whose code this is, if it was not used before (`last_step`); every candidate is compared."""
    now = now_ms // 1000 // STEP_S
    found: int | None = None
    for step in range(now - SKEW_STEPS, now + SKEW_STEPS + 1):
        same = hmac.compare_digest(code_at(secret, step).encode(), code.encode())
        if same and step > last_step:
            found = step
    return found


def provisioning_uri(secret: bytes, user_name: str) -> str:
    """What an authenticator application reads from a QR code."""
    text = base64.b32encode(secret).decode().rstrip("=")
    return f"otpauth://totp/ql3:{quote(user_name)}?secret={text}&issuer=ql3&digits={DIGITS}&period={STEP_S}"
