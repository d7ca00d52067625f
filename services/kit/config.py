"""The configuration of a process: one typed struct, from a TOML file and from `QL3_*` variables (which win).

An unknown key is refused by name. Passwords are given as files (`…_FILE`) or as variables, never as arguments.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from schemas.errors import Ql3Error
from schemas.ids import Slug

PREFIX: Final = "QL3_"
CLIENT_KEYS: Final = frozenset({"URL", "TOKEN", "LANG", "CONFIG", "PROJECT"})
"""Variables of the command, which are not configuration of a service."""


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that can be set. Sizes in bytes; `QL3_NATS_URL` sets `nats_url`, and so on.

    `database_url` is `sqlite:<directory>` or `postgresql://…`; empty means SQLite under the data folder.
    """

    profile: Literal["edge", "standalone", "cluster"] = "edge"
    data: Path = Path("ql3-data")
    listen: str = "127.0.0.1:5700"
    public_url: str | None = None
    """The address that people use, when a proxy stands in front; its host is accepted too."""
    allowed_hosts: str = ""
    """Further host names of the gateway, separated by commas; empty means any, unless it listens on loopback only."""
    trusted_proxies: str = ""
    """Addresses or networks, separated by commas, whose X-Forwarded-For the gateway believes; nobody's by default."""
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    """With both the gateway speaks TLS itself."""
    gateway_key: Path | None = None
    """The key under which credentials are kept; default `keys/gateway.key` under the data folder, made when absent. All
    replicas of a gateway need the same one."""
    gateway_requests: Annotated[int, Meta(ge=1, le=4096)] = 64
    """Requests worked on at once; as many open streams are allowed besides."""
    probe_listen: str | None = None
    """`host:port` of `/livez`, `/readyz` and `/metrics` in `ql3 serve`, for machines; none when absent."""
    database_url: str = ""
    database_password: str | None = None
    database_credentials: Path | None = None
    """A JSON object service -> password, for a process that runs several services and for `ql3 migrate`."""
    database_admin_url: str | None = None
    """Only `ql3 migrate` uses it: a role that may create schemas and roles."""
    database_pool: Annotated[int, Meta(ge=1, le=200)] = 8
    nats_url: str = ""
    """Empty means the embedded server of `ql3 up`."""
    nats_user: str | None = None
    """Default: the name of the service."""
    nats_password: str | None = None
    nats_credentials: Path | None = None
    """A JSON object user -> password, for a process that runs several services."""
    nats_ca: Path | None = None
    nats_certificate: Path | None = None
    nats_key: Path | None = None
    nats_replicas: Annotated[int, Meta(ge=1, le=5)] = 1
    artifacts: Path | None = None
    """The artifact directory; default `artifacts` under the data folder."""
    artifacts_url: str = ""
    """An object store instead, `s3://bucket/prefix` (or `gs://`, `az://`): needed when workers and retention are on
    several hosts. Credentials are the provider's own variables, such as `AWS_ACCESS_KEY_ID` and `AWS_ENDPOINT_URL`."""
    keyring: Path | None = None
    """The vault's keyring; default `keys/keyring.json` under the data folder."""
    worker_id: Slug = "local"
    worker_slots: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    """Default: `default_slots` of this machine."""
    worker_pool: Slug | None = None
    worker_labels: dict[str, str] = {}
    """As a variable: `gpu=none,zone=a`."""
    worker_min_free: Annotated[int, Meta(ge=0)] = 64 * 1024 * 1024
    project_logs_ms: Annotated[int, Meta(ge=3_600_000)] = 30 * 86_400_000
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    def __repr__(self) -> str:  # passwords and addresses with passwords are in here
        return f"Config(profile={self.profile!r}, data={str(self.data)!r})"

    @property
    def database(self) -> str:
        """The database address with its default filled in."""
        return self.database_url or f"sqlite:{self.data.absolute() / 'db'}"

    def database_password_for(self, service: str) -> str | None:
        """The password of a service's role: its own setting, or its entry of the credentials file."""
        return self.database_password or _entry("QL3_DATABASE_CREDENTIALS", self.database_credentials, service)

    def nats_password_for(self, user: str) -> str | None:
        """The password of a NATS user: its own setting, or its entry of the credentials file."""
        return self.nats_password or _entry("QL3_NATS_CREDENTIALS", self.nats_credentials, user)

    @property
    def artifact_directory(self) -> Path:
        """The artifact directory with its default filled in."""
        return (self.artifacts or self.data / "artifacts").absolute()

    @property
    def gateway_key_file(self) -> Path:
        """The gateway's key with its default filled in."""
        return (self.gateway_key or self.data / "keys" / "gateway.key").absolute()

    @property
    def keyring_file(self) -> Path:
        """The keyring with its default filled in."""
        return (self.keyring or self.data / "keys" / "keyring.json").absolute()

    @property
    def slots(self) -> int:
        """Runs at once on this worker."""
        return self.worker_slots or default_slots(os.cpu_count() or 1, memory_bytes())


def memory_bytes(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Memory of this machine, or of the container that we are in."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(memory, int(limit.read_text()))
    except (OSError, ValueError):  # no limit
        return memory


def default_slots(cores: int, memory_bytes: int) -> int:
    """Runs at once where nothing else is set: 16 per core and at least 64, for most scripts wait most of their time;
    but one per 64 MiB of memory at most, and never fewer than 8."""
    return max(8, min(max(64, 16 * cores), memory_bytes // (64 * 1024 * 1024)))


def load(
    environment: Mapping[str, str] | None = None,
    *,
    file: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Config:
    """The configuration of this process; `overrides` (from the command line) win over variables, they over the file.

    Raises `setup_invalid` or `unknown_field` naming the variable or the key.
    """
    environment = os.environ if environment is None else environment
    named = file or (Path(environment[PREFIX + "CONFIG"]) if PREFIX + "CONFIG" in environment else None)
    plain: dict[str, Any] = _from_file(named) if named else {}
    fields = {field.name: field.type for field in msgspec.structs.fields(Config)}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or variable.removeprefix(PREFIX) in CLIENT_KEYS:
            continue
        key = variable.removeprefix(PREFIX).lower()
        if key not in fields and key.endswith("_file") and key.removesuffix("_file") in fields:
            plain[key.removesuffix("_file")] = _from_secret_file(variable, text)
        elif key not in fields:
            raise Ql3Error("unknown_field", "There is no such setting.", field=variable)
        else:
            plain[key] = _labels(variable, text) if key == "worker_labels" else text
    plain.update({key: value for key, value in (overrides or {}).items() if value is not None})
    plain = {key: str(value) if isinstance(value, Path) else value for key, value in plain.items()}
    return _convert(plain)


def _convert(plain: dict[str, Any]) -> Config:
    try:
        # Lax, because variables are text: "8" is 8.
        return msgspec.convert(plain, Config, strict=False, dec_hook=_decode)
    except msgspec.ValidationError:
        key, sentence = _culprit(plain)
        raise Ql3Error("setup_invalid", sentence, field=f"{PREFIX}{key.upper()}") from None


def _culprit(plain: dict[str, Any]) -> tuple[str, str]:
    # One key at a time, so that the message names the key and never shows another one's value.
    for key, value in plain.items():
        try:
            msgspec.convert({key: value}, Config, strict=False, dec_hook=_decode)
        except msgspec.ValidationError as error:
            what = str(error).rpartition(" - at `$")[0] or str(error)
            return key, what + "."
    return "config", "The settings do not fit together."


def _decode(wanted: Any, value: Any) -> Any:
    if wanted is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(wanted)


def _from_file(path: Path) -> dict[str, Any]:
    try:
        plain = tomllib.loads(path.read_text())
    except OSError as error:
        raise Ql3Error("setup_invalid", f"The file cannot be read ({error.strerror}).", field=str(path)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Ql3Error("setup_invalid", f"The file is not valid TOML ({error}).", field=str(path)) from error
    known = {field.name for field in msgspec.structs.fields(Config)}
    for key in plain:
        if key not in known:
            raise Ql3Error("unknown_field", f"There is no such setting in {path.name}.", field=key)
    return plain


def _from_secret_file(variable: str, name: str) -> str:
    try:
        return Path(name).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Ql3Error("setup_invalid", "The file cannot be read.", field=variable) from error


def _entry(variable: str, path: Path | None, name: str) -> str | None:
    if path is None:
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, str]).get(name)
    except (OSError, msgspec.DecodeError) as error:
        raise Ql3Error("setup_invalid", "The file is not a JSON object of passwords.", field=variable) from error


def _labels(variable: str, text: str) -> dict[str, str]:
    labels: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, found, value = part.partition("=")
        if not found or not name.strip():
            raise Ql3Error("setup_invalid", "Write labels as name=value,name=value.", field=variable)
        labels[name.strip()] = value.strip()
    return labels
