"""Every published number has its script here; each prints one JSON object as its last line."""
