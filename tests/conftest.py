"""Fixtures shared by every room."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.fixtures_database", "tests.fixtures_nats", "tests.fixtures_objects"]

# No test depends on the machine's speed, so no example has a time limit of its own.
settings.register_profile("ql3", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ql3")
