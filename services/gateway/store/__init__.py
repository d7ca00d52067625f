"""The gateway's tables."""
