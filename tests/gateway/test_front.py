"""Where requests come from, over which names and wires, and the trace they leave."""

from __future__ import annotations

import datetime
import ssl
from ipaddress import ip_address, ip_network
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from schemas.errors import Ql3Error
from services.gateway.panel.files import prefers_chinese
from services.gateway.peers import peer_of
from services.gateway.settings import GatewaySettings, settings_of
from services.kit.config import load

from .conftest import House, HouseFor


@pytest.fixture
def dialect() -> str:
    """Nothing here is stored."""
    return "sqlite"


@pytest.mark.parametrize(
    ("client", "forwarded", "peer"),
    [
        ("192.0.2.1", None, "192.0.2.1"),
        ("192.0.2.1", "127.0.0.1", "192.0.2.1"),  # anybody can write that
        ("10.0.0.1", "192.0.2.9", "192.0.2.9"),
        ("10.0.0.1", "127.0.0.1, 192.0.2.9", "192.0.2.9"),
        ("10.0.0.1", "192.0.2.9, 10.0.0.2", "192.0.2.9"),
        ("10.0.0.1", "nonsense", "10.0.0.1"),
        ("::ffff:10.0.0.1", "192.0.2.9", "192.0.2.9"),
        ("10.0.0.1", None, "10.0.0.1"),
    ],
)
def test_a_forwarded_address_counts_as_far_as_it_is_trusted(client: str, forwarded: str | None, peer: str) -> None:
    headers = [] if forwarded is None else [(b"x-forwarded-for", forwarded.encode())]
    scope = {"client": (client, 1), "headers": headers}
    assert peer_of(scope, [ip_network("10.0.0.0/8")]) == (peer, False)


@pytest.mark.parametrize(
    ("client", "server", "local"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("::1", "::1", True),
        ("::ffff:127.0.0.1", "::", True),
        ("192.0.2.1", "192.0.2.1", True),  # this machine, by its own name
        ("192.0.2.2", "192.0.2.1", False),
        ("::ffff:192.0.2.7", "::", False),
    ],
)
def test_who_is_on_this_machine(client: str, server: str, local: bool) -> None:
    assert peer_of({"client": (client, 1), "server": (server, 5700), "headers": []}, []) == (client, local)


def test_a_proxy_on_this_machine_does_not_make_its_clients_local() -> None:
    headers = [(b"x-forwarded-for", b"192.0.2.9")]
    scope = {"client": ("127.0.0.1", 1), "server": ("127.0.0.1", 5700), "headers": headers}
    assert peer_of(scope, [ip_network("127.0.0.0/8")]) == ("192.0.2.9", False)


def test_settings_name_what_is_wrong_with_them() -> None:
    with pytest.raises(Ql3Error) as caught:
        _ = GatewaySettings(trusted_proxies=["10.0.0.0/99"]).proxies
    assert caught.value.field == "QL3_TRUSTED_PROXIES"
    with pytest.raises(Ql3Error) as caught:
        settings_of(load({"QL3_PUBLIC_URL": "ql3.example.org"}))
    assert caught.value.field == "QL3_PUBLIC_URL"
    with pytest.raises(Ql3Error) as caught:
        settings_of(load({"QL3_TLS_CERTIFICATE": "server.crt"}))
    assert caught.value.field == "QL3_TLS_KEY"


def test_the_public_address_is_let_in_beside_loopback() -> None:
    assert settings_of(load({"QL3_PUBLIC_URL": "https://ql3.example.org"})).allowed_hosts == ["ql3.example.org"]
    assert settings_of(load({"QL3_LISTEN": "0.0.0.0:5700", "QL3_PUBLIC_URL": "https://a.example"})).allowed_hosts == []


async def test_the_gateway_speaks_tls_itself(house_for: HouseFor, tmp_path: Path) -> None:
    certificate, key = _certificate(tmp_path)
    house = await house_for(tls_certificate_file=str(certificate), tls_key_file=str(key))
    assert house.gateway.url.startswith("https://127.0.0.1:")
    context = ssl.create_default_context(cafile=str(certificate))
    async with httpx.AsyncClient(base_url=house.gateway.url, verify=context, trust_env=False) as client:
        answer = await client.get("/livez")
        assert answer.status_code == 200
        assert "strict-transport-security" in answer.headers


async def test_a_certificate_that_is_none_is_named(house_for: HouseFor, tmp_path: Path) -> None:
    (tmp_path / "bad.pem").write_text("nothing")
    with pytest.raises(Ql3Error) as caught:
        await house_for(tls_certificate_file=str(tmp_path / "bad.pem"), tls_key_file=str(tmp_path / "bad.pem"))
    assert (caught.value.code, caught.value.field) == ("setup_invalid", "QL3_TLS_CERTIFICATE")


async def test_a_request_carries_its_trace(house: House) -> None:
    client = house.client()
    given = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
    assert (await client.get("/livez", headers={"traceparent": given})).headers["ql3-trace"] == "ab" * 16
    made = (await client.get("/livez", headers={"traceparent": "00-x"})).headers["ql3-trace"]
    assert len(made) == 32
    assert made != (await client.get("/livez")).headers["ql3-trace"]


@pytest.mark.parametrize(
    ("accepted", "chinese"),
    [("zh-CN,zh;q=0.9,en;q=0.8", True), ("en-GB,en;q=0.9,zh;q=0.8", False), ("de,zh-TW;q=0.5", True), ("", False)],
)
def test_the_browsers_languages_choose(accepted: str, chinese: bool) -> None:
    assert prefers_chinese(accepted) is chinese


async def test_the_panel_is_served_in_the_language_of_the_browser(house: House) -> None:
    client = house.client()
    english = await client.get("/", headers={"Accept-Language": "en"})
    chinese = await client.get("/", headers={"Accept-Language": "zh-CN"})
    assert '<html lang="en">' in english.text
    assert '<html lang="zh-CN">' in chinese.text
    assert chinese.headers["vary"] == "Accept-Language"
    asset = await client.get("/assets/app.js")
    assert asset.headers["content-type"].startswith("text/javascript")
    again = await client.get("/assets/app.js", headers={"If-None-Match": asset.headers["etag"]})
    assert again.status_code == 304


def _certificate(folder: Path) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    certificate_file, key_file = folder / "server.crt", folder / "server.key"
    certificate_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return certificate_file, key_file


async def test_programs_on_this_machine_pass_by_the_proxy(house_for: HouseFor) -> None:
    house = await house_for(public_url="https://ql3.example.org", listen="0.0.0.0:0")
    assert house.gateway.url == "https://ql3.example.org"
    assert house.gateway.local_url == f"http://127.0.0.1:{house.gateway._server.port}"
    async with httpx.AsyncClient(base_url=house.gateway.local_url, trust_env=False) as client:
        answer = await client.get("/api/v3/session", headers={"Authorization": f"Bearer {house.console_token}"})
        assert answer.json()["assurance"] == "local_console"
