"""Where a request comes from: the connection's other end, or what a trusted proxy says stands behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address
from typing import Any, NamedTuple

from services.gateway.settings import is_loopback


class Peer(NamedTuple):
    """A client's address, and whether it is on this machine."""

    address: str
    local: bool


Networks = Sequence[IPv4Network | IPv6Network]


def peer_of(scope: Mapping[str, Any], trusted: Networks) -> Peer:
    """The client. `X-Forwarded-For` counts only as far as trusted proxies wrote it: anybody can send one.

    Local is loopback, and whoever comes from the very address that it connected to.
    """
    address = _address(scope, trusted)
    server = scope.get("server")
    return Peer(address, is_loopback(address) or (server is not None and address == str(server[0])))


def _address(scope: Mapping[str, Any], trusted: Networks) -> str:
    client = scope.get("client")
    address = str(client[0]) if client else "unknown"
    if not trusted or not within(address, trusted):
        return address
    values = [value.decode("latin-1") for name, value in scope["headers"] if name == b"x-forwarded-for"]
    for hop in reversed([part.strip() for value in values for part in value.split(",")]):
        if not _is_address(hop):
            return address
        address = hop
        if not within(hop, trusted):
            return address
    return address


def within(address: str, networks: Networks) -> bool:
    """Whether an address is of one of these networks; text that is none is not."""
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
