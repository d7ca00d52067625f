"""The names of the database's bells that wake the scheduler's loops after a commit."""

from __future__ import annotations

from typing import Final

BELL: Final = "schedule"
"""Wakes the admission loop."""
RING_BELL: Final = "admissions"
"""Wakes the loop of open orders."""
CHAIN_BELL: Final = "chains"
"""Wakes the loop of tasks that follow others."""
