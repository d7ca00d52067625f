"""Bounds of everything that comes from outside, in one place."""

from __future__ import annotations

from typing import Final

BATCH_ITEMS: Final = 256
BATCH_BYTES: Final = 512 * 1024
LIST_ITEMS: Final = 200
LIST_DEFAULT: Final = 50
LOG_RANGE_BYTES: Final = 256 * 1024
LIVE_CHUNK_BYTES: Final = 64 * 1024

ID_CHARS: Final = 36
SLUG_CHARS: Final = 63
KEY_CHARS: Final = 255
"""Idempotency keys, concurrency keys, subject ids."""
TEXT_CHARS: Final = 1024

SPEC_BYTES: Final = 64 * 1024
ARGV_ITEMS: Final = 256
ARGV_BYTES: Final = 64 * 1024
ENVIRONMENT_ENTRIES: Final = 256
ENVIRONMENT_BYTES: Final = 256 * 1024
KERNEL_STRING_BYTES: Final = 128 * 1024 - 1
"""Linux refuses a longer single `NAME=value` at exec (MAX_ARG_STRLEN, 32 pages, with its NUL)."""
LABELS: Final = 32
LABEL_CHARS: Final = 255
SECRET_BYTES: Final = 16 * 1024
SECRETS_PER_RUN: Final = 64

MAX_ATTEMPTS: Final = 16
BACKOFF_MAX_MS: Final = 86_400_000
TIMEOUT_MAX_MS: Final = 365 * 86_400_000
GRACE_DEFAULT_MS: Final = 5_000
GRACE_MAX_MS: Final = 600_000
PRIORITY_MIN: Final = -1000
PRIORITY_MAX: Final = 1000

LOG_QUOTA_DEFAULT_BYTES: Final = 64 * 1024 * 1024
LOG_QUOTA_MIN_BYTES: Final = 64 * 1024
LOG_QUOTA_MAX_BYTES: Final = 16 * 1024**3

LEASE_UNSTARTED_MS: Final = 15_000
LEASE_STARTED_MS: Final = 30_000
BEAT_MS: Final = 5_000
SESSION_MS: Final = 600_000
"""A worker session's life; its row is written again at half of it."""
OUTAGE_MS: Final = 15_000
"""A dispatcher that finds its own last-alive stamp older than this extends live leases first."""
SUBMIT_AHEAD_MS: Final = 1_000
DECISION_VALID_MS: Final = 2_000
MISFIRE_GRACE_MS: Final = 30_000
RPC_TIMEOUT_S: Final = 5.0
FEED_PULL_S: Final = 60.0
OUTBOX_KEPT_MS: Final = 86_400_000
MAX_DELIVERIES: Final = 8
