"""Where a request comes from: the connection's other end, or what a trusted proxy says stands behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address
from typing import Any

Networks = Sequence[IPv4Network | IPv6Network]


def peer_of(scope: Mapping[str, Any], trusted: Networks) -> str:
    """The client's address. `X-Forwarded-For` counts only as far as trusted proxies wrote it: anybody can send one."""
    client = scope.get("client")
    peer = str(client[0]) if client else "unknown"
    if not trusted or not _within(peer, trusted):
        return peer
    values = [value.decode("latin-1") for name, value in scope["headers"] if name == b"x-forwarded-for"]
    for hop in reversed([part.strip() for value in values for part in value.split(",")]):
        if not _is_address(hop):
            return peer
        peer = hop
        if not _within(hop, trusted):
            return peer
    return peer


def _within(address: str, networks: Networks) -> bool:
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    parsed = getattr(parsed, "ipv4_mapped", None) or parsed
    return any(parsed in network for network in networks)


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
