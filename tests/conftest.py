"""Fixtures shared by every room."""

from __future__ import annotations

pytest_plugins = ["tests.fixtures_database", "tests.fixtures_nats"]
