"""Tokens and proofs of an attempt (RFC 2104 HMAC with SHA-256).

The token is derived by the worker from its own key and is never stored or sent. Its SHA-256 goes to the dispatcher
once; every later message carries an HMAC under that digest, so that a message that somebody saw lets nobody write
about another sequence or another body.
"""

from __future__ import annotations

import hashlib
import hmac


def token(worker_key: bytes, attempt_id: str, offer_id: str, lease_generation: int) -> bytes:
    """The 32-byte token of a lease, known to the worker alone."""
    return hmac.digest(worker_key, f"{attempt_id}|{offer_id}|{lease_generation}".encode(), "sha256")


def token_digest(token_bytes: bytes) -> str:
    """Lower-case hex SHA-256 of the token; sent once, with the start request."""
    return hashlib.sha256(token_bytes).hexdigest()


def proof(digest: str, attempt_id: str, sequence: int, body: bytes) -> str:
    """Hex HMAC under the token's digest over `attempt|sequence|sha256(body)`."""
    text = f"{attempt_id}|{sequence}|{hashlib.sha256(body).hexdigest()}"
    return hmac.digest(bytes.fromhex(digest), text.encode(), "sha256").hex()


def proof_holds(digest: str, attempt_id: str, sequence: int, body: bytes, given: str) -> bool:
    """Constant-time check of a proof."""
    return hmac.compare_digest(proof(digest, attempt_id, sequence, body).encode(), given.encode())


BEAT_BODY = b"beat"
CONTEXT_BODY = b"context"


def register_body(state: str) -> bytes:
    """The body that a journal entry's proof covers at registration."""
    return f"register|{state}".encode()
