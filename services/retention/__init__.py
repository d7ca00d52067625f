"""Artifacts, retention policies, sweeps and tombstones."""
