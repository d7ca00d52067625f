"""What can be set about the gateway."""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from schemas.errors import Ql3Error
from services.kit.config import Config

PORT_DEFAULT = 5700


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """`listen` is `host:port`; port 0 takes a free one. `allowed_hosts` are the names (without port) by which people
    reach a gateway besides addresses and localhost; empty means: any name, unless it listens on loopback only."""

    listen: Annotated[str, Meta(max_length=300)] = f"127.0.0.1:{PORT_DEFAULT}"
    key_file: str = ""
    tls_certificate_file: str | None = None
    tls_key_file: str | None = None
    allowed_hosts: list[str] = []
    trusted_proxies: list[str] = []
    """Addresses or networks whose `X-Forwarded-For` is believed; nobody's by default."""
    public_url: Annotated[str, Meta(max_length=300)] | None = None
    in_flight: Annotated[int, Meta(ge=1, le=10_000)] = 64
    streams: Annotated[int, Meta(ge=1, le=10_000)] = 64
    connections: Annotated[int, Meta(ge=1, le=65_000)] = 512

    def __repr__(self) -> str:
        return f"GatewaySettings(listen={self.listen!r})"

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of `listen`. Raises `setup_invalid` when it is neither."""
        host, colon, port = self.listen.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
            raise Ql3Error("setup_invalid", "Use host:port, such as 127.0.0.1:5700.", field="QL3_LISTEN")
        return host, int(port)

    @property
    def proxies(self) -> tuple[IPv4Network | IPv6Network, ...]:
        """The networks of `trusted_proxies`. Raises `setup_invalid` for what is none."""
        try:
            return tuple(ip_network(proxy) for proxy in self.trusted_proxies)
        except ValueError as error:
            raise Ql3Error(
                "setup_invalid", "Use addresses or networks, such as 10.0.0.0/8.", field="QL3_TRUSTED_PROXIES"
            ) from error

    @property
    def tls(self) -> bool:
        """Whether the gateway itself speaks TLS."""
        return self.tls_certificate_file is not None

    @property
    def secure(self) -> bool:
        """Whether browsers reach it over TLS, here or at a proxy in front."""
        return self.tls or (self.public_url or "").startswith("https://")


def settings_of(config: Config) -> GatewaySettings:
    """The gateway's part of a process's configuration. Raises `setup_invalid` naming the variable."""
    public = urlsplit(config.public_url) if config.public_url else None
    if public is not None and (public.scheme not in ("http", "https") or not public.hostname):
        raise Ql3Error("setup_invalid", "Use an address such as https://ql3.example.org.", field="QL3_PUBLIC_URL")
    if (config.tls_certificate is None) != (config.tls_key is None):
        raise Ql3Error("setup_invalid", "TLS needs a certificate and its key.", field="QL3_TLS_KEY")
    hosts = [host.strip() for host in config.allowed_hosts.split(",") if host.strip()]
    if public is not None and public.hostname and (hosts or is_loopback(config.listen.rpartition(":")[0])):
        hosts.append(public.hostname)
    return GatewaySettings(
        trusted_proxies=[proxy.strip() for proxy in config.trusted_proxies.split(",") if proxy.strip()],
        listen=config.listen,
        key_file=str(config.gateway_key_file),
        tls_certificate_file=str(config.tls_certificate) if config.tls_certificate else None,
        tls_key_file=str(config.tls_key) if config.tls_key else None,
        allowed_hosts=hosts,
        public_url=config.public_url,
        in_flight=config.gateway_requests,
        streams=config.gateway_requests,
        connections=8 * config.gateway_requests,
    )


def is_loopback(host: str) -> bool:
    """Whether an address is of this machine only."""
    if host == "localhost":
        return True
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def is_address(host: str) -> bool:
    """Whether it is an address, and no name that somebody could point elsewhere."""
    try:
        ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
